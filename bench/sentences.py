"""Sentence splitters on gold boundaries and on speed: `python -m bench.sentences [--json]`.

F1 on the UD treebanks EWT and GUM (dev + test) below $LAMBERT_DATA/sbd, over sentences as exact
spans and over boundaries inside paragraphs; MB/s of one core in CPU seconds on paragraphs of books.
Splitters that are not installed are left out.
"""

from __future__ import annotations

import argparse
import gzip
import json
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

from bench.data import data_folder
from configs.schema import SourceConfig
from data_prep.sentences import Splitter
from data_prep.sources import Tally, open_source

DATA = data_folder()
Split = Callable[[str], list[str]]
Gold = list[tuple[str, list[tuple[int, int]]]]  # paragraph, spans of its sentences


def gold(folder: Path, treebank: str) -> Gold:
    """Paragraphs of a treebank's dev and test parts with the spans of their sentences."""
    paragraphs: Gold = []
    for part in ("dev", "test"):
        with gzip.open(
            folder / f"en_{treebank}-ud-{part}.conllu.gz", "rt", encoding="utf-8"
        ) as file:
            paragraphs += _read(file)
    return [(text.rstrip(), spans) for text, spans in paragraphs if spans]


def _read(lines: Iterator[str]) -> Gold:
    found: Gold = []
    text = ""
    spans: list[tuple[int, int]] = []
    last_misc = ""
    for line in lines:
        if line.startswith(("# newdoc", "# newpar")) and spans:
            found.append((text, spans))
            text, spans = "", []
        elif line.startswith("# text = "):
            sentence = line[len("# text = ") :].rstrip("\n")
            spans.append((len(text), len(text) + len(sentence)))
            text += sentence
        elif line[:1].isdigit():
            last_misc = line.rstrip("\n").split("\t")[9]
        elif not line.strip() and spans:
            text += "" if "SpaceAfter=No" in last_misc else " "
    if spans:
        found.append((text, spans))
    return found


def spans_of(text: str, sentences: list[str]) -> list[tuple[int, int]]:
    """Where a splitter's sentences stand in the text, whatever it did to white space."""
    spans, at = [], 0
    squeezed = [(i, c) for i, c in enumerate(text) if not c.isspace()]
    for sentence in sentences:
        size = sum(not c.isspace() for c in sentence)
        if size and at + size <= len(squeezed):
            spans.append((squeezed[at][0], squeezed[at + size - 1][0] + 1))
            at += size
    return spans


def scores(split: Split, paragraphs: Gold) -> tuple[float, float]:
    """F1 in percent over exact sentences, and over boundaries inside paragraphs."""
    right, found, wanted = Counter[str](), Counter[str](), Counter[str]()
    for text, spans in paragraphs:
        got = spans_of(text, split(text))
        inner_got, inner_gold = {b for _, b in got[:-1]}, {b for _, b in spans[:-1]}
        right["sentence"] += len(set(got) & set(spans))
        found["sentence"] += len(got)
        wanted["sentence"] += len(spans)
        right["boundary"] += len(inner_got & inner_gold)
        found["boundary"] += len(inner_got)
        wanted["boundary"] += len(inner_gold)
    f1 = {k: 200 * right[k] / max(1, found[k] + wanted[k]) for k in ("sentence", "boundary")}
    return f1["sentence"], f1["boundary"]


def splitters() -> Iterator[tuple[str, Split]]:
    """Ours, and every other that is installed."""
    yield "lambert", Splitter().split
    for name, make in PEERS.items():
        try:
            yield name, make()
        except (ImportError, LookupError, OSError) as error:
            print(
                f"{name}: left out ({type(error).__name__}: {str(error).strip().splitlines()[0]})"
            )


def _nltk() -> Split:
    """Punkt as installed without its data set: parameters learnt on the books themselves."""
    from nltk.tokenize.punkt import PunktSentenceTokenizer, PunktTrainer

    trainer = PunktTrainer()
    trainer.train(" ".join(paragraphs(3_000_000)), finalize=True)
    return PunktSentenceTokenizer(trainer.get_params()).tokenize


def _pysbd() -> Split:
    import pysbd

    return pysbd.Segmenter(language="en", clean=False).segment


def _sentencex() -> Split:
    from sentencex import segment

    return lambda text: list(segment("en", text))


def _syntok() -> Split:
    from syntok import segmenter

    return lambda text: [
        "".join(t.spacing + t.value for t in sentence)
        for paragraph in segmenter.process(text)
        for sentence in paragraph
    ]


def _blingfire() -> Split:
    from blingfire import text_to_sentences

    return lambda text: text_to_sentences(text).split("\n")


def _segtok() -> Split:
    from segtok.segmenter import split_single

    return lambda text: list(split_single(text))


def _moses() -> Split:
    from sentence_splitter import SentenceSplitter

    return SentenceSplitter(language="en").split


PEERS: dict[str, Callable[[], Split]] = {
    "nltk punkt (trained on books)": _nltk,
    "pysbd": _pysbd,
    "sentencex": _sentencex,
    "syntok": _syntok,
    "blingfire": _blingfire,
    "segtok": _segtok,
    "sentence-splitter (Moses)": _moses,
}


def paragraphs(characters: int) -> list[str]:
    """Paragraphs of the books of $LAMBERT_DATA, in order."""
    source = open_source(SourceConfig(kind="books", path=str(DATA / "books")))
    found: list[str] = []
    size = 0
    for unit in source.ranges():
        for document in source.documents(unit, Tally()):
            found += document.paragraphs
            size += sum(map(len, document.paragraphs))
            if size >= characters:
                return found
    return found


def rate(split: Split, texts: list[str], seconds: float) -> float:
    """MB of text per CPU second; stops after `seconds`."""
    start, done = time.process_time(), 0
    for text in texts:
        split(text)
        done += len(text)
        if time.process_time() - start > seconds:
            break
    return done / 1e6 / (time.process_time() - start)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--json", action="store_true", help="one JSON line last")
    options.add_argument("--seconds", type=float, default=4, help="CPU seconds of each speed run")
    chosen = options.parse_args()
    banks = {bank: gold(DATA / "sbd", bank) for bank in ("ewt", "gum")}
    texts = paragraphs(20_000_000)
    rows = []
    print(
        "| splitter | EWT sentences | EWT boundaries | GUM sentences | GUM boundaries | mean | MB/s |"
    )
    print("|---|---|---|---|---|---|---|")
    for name, split in splitters():
        values = [value for bank in banks.values() for value in scores(split, bank)]
        mean = sum(values) / len(values)
        speed = rate(split, texts, chosen.seconds)
        rows.append({"name": name, "f1": values, "mean": mean, "mb_per_s_core": speed})
        print(
            f"| {name} | {' | '.join(f'{v:.1f}' for v in values)} | {mean:.1f} | {speed:.2f} |",
            flush=True,
        )
    if chosen.json:
        print(json.dumps({"splitters": rows}))


if __name__ == "__main__":
    main()
