"""Wikitext to prose, ours against parsers that are installed: `python -m bench.wikitext [--json]`.

On the enwiki fragment of $LAMBERT_DATA: MB of XML a CPU second of one core, decompression and XML
included; markup left over in a MB of prose; and the words shared with WikiExtractor's text of the
articles both hold (other snapshots of them, so nobody reaches 100).
"""

from __future__ import annotations

import argparse
import bz2
import gzip
import json
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator

from bench.data import data_folder
from configs.schema import SourceConfig
from data_prep.sources import Tally, open_source
from data_prep.sources.wikipedia import _NS, _TEXT, _TITLE
from data_prep.wikitext import unescape_xml

DATA = data_folder()
DUMP = "wiki/enwiki-latest-pages-articles1.xml-p000000010p000030302-shortened.bz2"
Plain = Callable[[str], str]
DEBRIS = re.compile(
    r"\{\{|\}\}|\[\[|\]\]|\{\||\|\}|'''|</?(?:ref|br|small|sub|sup|div|span|math)\b|^=+.*=+$|^[*#:;|!]"
    r"|\b(?:File|Image|Category):|\bthumb\||&nbsp;|https?://|\b(?:style|align|rowspan)=",
    re.M,
)


def pages() -> Iterator[tuple[str, str, int]]:
    """Title, wikitext and bytes of XML of each article."""
    xml = bz2.decompress((DATA / DUMP).read_bytes())
    for page in xml.split(b"<page>")[1:]:
        text, title, namespace = _TEXT.search(page), _TITLE.search(page), _NS.search(page)
        if b"<redirect" not in page and text and title and namespace and namespace[1] == b"0":
            body = unescape_xml(text[1].decode())
            yield unescape_xml(title[1].decode()), body, len(page)


def ours() -> tuple[dict[str, str], float]:
    """Prose by title, and MB of XML a CPU second, everything included."""
    source = open_source(SourceConfig(kind="wikipedia", path=str(DATA / DUMP)))
    units = source.ranges()
    start = time.process_time()
    found = {}
    for unit in units:
        for document in source.documents(unit, Tally()):
            found[document.id.split("/", 2)[2]] = "\n".join(document.paragraphs)
    used = time.process_time() - start
    return found, len(bz2.decompress((DATA / DUMP).read_bytes())) / 1e6 / used


def peer(plain: Plain, seconds: float) -> tuple[dict[str, str], float]:
    """As `ours`, from wikitext on (no decompression); stops after `seconds` of CPU time."""
    found: dict[str, str] = {}
    used, size = 0.0, 0
    shared = extracted()
    for title, text, xml in sorted(pages(), key=lambda page: page[0] not in shared):
        start = time.process_time()
        found[title] = plain(text)
        used += time.process_time() - start
        size += xml
        if used > seconds:
            break
    return found, size / 1e6 / used


def extracted() -> dict[str, str]:
    """WikiExtractor's text by title."""
    found = {}
    with gzip.open(DATA / "wiki/extracted/wiki_00.jsonl.gz", "rt", encoding="utf-8") as file:
        for line in file:
            row = json.loads(line)
            found[row["title"]] = row["text"]
    source = open_source(
        SourceConfig(kind="extracted", path=str(DATA / "wiki/extracted/doc-format"))
    )
    for unit in source.ranges():
        for document in source.documents(unit, Tally()):
            found[document.id.split("/", 2)[2]] = "\n".join(document.paragraphs)
    return found


def agreement(found: dict[str, str], gold: dict[str, str]) -> tuple[float, int]:
    """Mean F1 in percent of the bags of words of the articles both have, and how many they are."""
    scores = []
    for title in sorted(set(found) & set(gold)):
        a, b = (Counter(re.findall(r"\w+", side[title].lower())) for side in (found, gold))
        scores.append(200 * (a & b).total() / max(1, a.total() + b.total()))
    return sum(scores) / max(1, len(scores)), len(scores)


def peers() -> Iterator[tuple[str, Plain]]:
    """Parsers that are installed."""
    try:
        import mwparserfromhell

        yield (
            "mwparserfromhell strip_code",
            lambda text: str(mwparserfromhell.parse(text).strip_code()),
        )
    except ImportError:
        print("mwparserfromhell: left out, not installed")
    try:
        import wikitextparser

        yield "wikitextparser plain_text", lambda text: str(wikitextparser.parse(text).plain_text())
    except ImportError:
        print("wikitextparser: left out, not installed")
    try:
        from wikiextractor.extract import Extractor

        def extract(text: str) -> str:
            made = Extractor(1, 1, "", "Title", [text])
            return "\n".join(made.clean_text(text, expand_templates=False))

        yield "wikiextractor (no templates)", extract
    except ImportError:
        print("wikiextractor: left out, not installed")


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--json", action="store_true", help="one JSON line last")
    options.add_argument("--seconds", type=float, default=12, help="CPU seconds of each peer")
    chosen = options.parse_args()
    gold = extracted()
    rows = []
    print("| reader | MB/s of XML | markup left per MB | words as WikiExtractor (F1) | articles |")
    print("|---|---|---|---|---|")
    jobs: list[tuple[str, Callable[[], tuple[dict[str, str], float]]]] = [("lambert", ours)]
    jobs += [(name, lambda plain=plain: peer(plain, chosen.seconds)) for name, plain in peers()]  # type: ignore[misc]
    for name, job in jobs:
        found, rate = job()
        text = "\n".join(found.values())
        debris = len(DEBRIS.findall(text)) / (len(text.encode()) / 1e6)
        f1, articles = agreement(found, gold)
        rows.append({"name": name, "mb_per_s_core": rate, "debris_per_mb": debris, "f1": f1})
        print(f"| {name} | {rate:.2f} | {debris:.0f} | {f1:.1f} | {articles} |", flush=True)
    if chosen.json:
        print(json.dumps({"wikitext": rows}))


if __name__ == "__main__":
    main()
