"""Dumps: every packing and encoding gives the same articles, however the file is cut."""

from __future__ import annotations

import bz2
import gzip
import random
from collections import Counter
from pathlib import Path
from xml.sax.saxutils import escape

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from configs import UserError
from configs.schema import SourceConfig
from data_prep.sources import Range, Source, Tally, open_source, wikipedia

HEAD = """<mediawiki xml:lang="en"><siteinfo><namespaces>
<namespace key="0" /><namespace key="6">Datei</namespace><namespace key="14">Kategorie</namespace>
</namespaces></siteinfo>
"""
WORDS = [f"w{number * 7919 % 10_007}" for number in range(3000)]
Found = list[
    tuple[str, int, int]
]  # id, paragraphs, hash of the text: small, so that failures stay readable


def page(title: str, text: str, number: int, namespace: int = 0, extra: str = "") -> str:
    return (
        f"<page><title>{escape(title)}</title><ns>{namespace}</ns><id>{number}</id>{extra}<revision>"
        f'<id>1</id><model>wikitext</model><text xml:space="preserve">{escape(text)}</text></revision></page>\n'
    )


def dump(pages: int, seed: int = 3) -> str:
    """A dump with redirects, other namespaces, empty pages, and articles of uneven sizes."""
    chooser = random.Random(seed)
    parts = [HEAD]
    for number in range(pages):
        text = "\n\n".join(
            f"Café {number} <page> {' '.join(chooser.choices(WORDS, k=chooser.randint(5, 1500)))}."
            for _ in range(chooser.randint(1, 4))
        )
        kind = number % 10
        if kind == 7:
            parts.append(page(f"R{number}", "#REDIRECT [[X]]", number, 0, '<redirect title="X" />'))
        elif kind == 8:
            parts.append(page(f"Kategorie:{number}", text, number, 14))
        elif kind == 9:
            parts.append(page(f"E{number}", " ", number))
        else:
            parts.append(page(f"T & {number}", text, number))
    return "".join(parts) + "</mediawiki>\n"


def read(path: Path, **keys: object) -> tuple[Found, Counter[str], list[Range]]:
    source = open_source(SourceConfig(kind="wikipedia", path=str(path), name="w", **keys))  # type: ignore[arg-type]
    return read_source(source)


def read_source(source: Source) -> tuple[Found, Counter[str], list[Range]]:
    tally = Tally()
    units = source.ranges()
    found = [
        (d.id, len(d.paragraphs), hash(tuple(d.paragraphs)))
        for unit in units
        for d in source.documents(unit, tally)
    ]
    return found, tally.dropped, units


@pytest.fixture(scope="module")
def text() -> str:
    return dump(120)


@pytest.fixture(scope="module")
def whole(text: str, tmp_path_factory: pytest.TempPathFactory) -> Found:
    file = tmp_path_factory.mktemp("dump") / "w.xml"
    file.write_text(text, encoding="utf-8")
    found, dropped, units = read(file)
    assert len(units) == 1 and len(found) == 84
    assert dropped == {"redirect": 12, "not an article (other namespace)": 12, "empty page": 12}
    assert found[0][0] == "w/0/T & 0"
    return found


def multistream(data: bytes, streams: int) -> bytes:
    step = len(data) // streams + 1
    return b"".join(bz2.compress(data[i : i + step], 1) for i in range(0, len(data), step))


PACKINGS = {
    "a.xml.bz2": lambda text: bz2.compress(text.encode(), 1),
    "b.xml.bz2": lambda text: multistream(text.encode(), 7),
    "c.bz2": lambda text: bz2.compress(text.encode(), 9),
    "d.xml.gz": lambda text: gzip.compress(text.encode()),
    "e.xml": lambda text: text.encode("utf-16"),
    "f.xml": lambda text: text.encode("utf-16-be"),
    "g.xml.gz": lambda text: gzip.compress(text.encode("utf-16")),
    "h.xml": lambda text: text.replace("\n", "\r\n").encode(),
    "i.xml": lambda text: b"\xef\xbb\xbf" + text.encode(),
    "j.xml.bz2": lambda text: bz2.compress(text.encode("utf-16"), 1),
}


@pytest.mark.parametrize("name", PACKINGS)
def test_packings_and_encodings_give_the_same_articles(name, text, whole, tmp_path) -> None:
    (tmp_path / name).write_bytes(PACKINGS[name](text))
    assert read(tmp_path / name)[0] == whole


@settings(
    max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(parts=st.integers(2, 40), name=st.sampled_from(["a.xml.bz2", "b.xml.bz2", "e.xml"]))
def test_any_cut_into_ranges_gives_each_article_once(
    parts, name, text, whole, tmp_path, monkeypatch
) -> None:
    packing = PACKINGS[name] if name != "e.xml" else lambda text: text.encode()
    (tmp_path / name).write_bytes(packing(text))
    step = (tmp_path / name).stat().st_size // parts
    monkeypatch.setattr(wikipedia, "BZ2_STEP", step)
    monkeypatch.setattr(wikipedia, "PLAIN_STEP", step)
    found, _, units = read(tmp_path / name)
    assert len(units) >= parts
    assert found == whole


def test_cut_at_every_byte_of_a_small_dump(tmp_path, monkeypatch) -> None:
    (tmp_path / "s.xml").write_text(
        HEAD + page("A", "Alpha is a letter.", 1) + page("B", "Beta is one.", 2)
    )
    size = (tmp_path / "s.xml").stat().st_size
    for step in range(len(HEAD), size):
        monkeypatch.setattr(wikipedia, "PLAIN_STEP", step)
        assert [name for name, *_ in read(tmp_path / "s.xml")[0]] == ["w/1/A", "w/2/B"]


def test_a_changed_byte_changes_the_fingerprints(text, tmp_path) -> None:
    (tmp_path / "w.xml").write_text(text)
    before = read(tmp_path / "w.xml")[2]
    (tmp_path / "w.xml").write_text(text.replace("w7919", "w7918", 1))
    after = read(tmp_path / "w.xml")[2]
    assert [u.fingerprint for u in before] != [u.fingerprint for u in after]
    (tmp_path / "moved").mkdir()
    (tmp_path / "w.xml").rename(tmp_path / "moved" / "w.xml")
    assert [u.fingerprint for u in read(tmp_path / "moved" / "w.xml")[2]] == [
        u.fingerprint for u in after
    ]


def test_windows_of_articles(text, whole, tmp_path) -> None:
    (tmp_path / "w.xml").write_text(text)
    parts, _, _ = read(tmp_path / "w.xml", document="window", window_sentences=2)
    assert sum(count for _, count, _ in parts) == sum(count for _, count, _ in whole)
    assert max(count for _, count, _ in parts) <= 2 and parts[0][0].startswith("w/0/T & 0#0")


def test_damaged_and_foreign_files_are_named(text, tmp_path) -> None:
    packed = bz2.compress(text.encode(), 1)
    damaged = bytearray(packed)
    damaged[len(packed) // 2] ^= 4
    files = {
        "cut.xml": text.encode()[: len(text) // 2],
        "cut.xml.bz2": packed[: len(packed) // 2],
        "flip.xml.bz2": bytes(damaged),
        "cut.xml.gz": gzip.compress(text.encode())[:-2000],
    }
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
        with pytest.raises(UserError, match=name):
            read(tmp_path / name)
    (tmp_path / "poem.xml").write_text("Roses are red.")
    with pytest.raises(UserError, match=r"poem.xml.*not a MediaWiki dump"):
        read(tmp_path / "poem.xml")
    with pytest.raises(UserError, match="missing or empty"):
        read(tmp_path / "nothing.xml")
    (tmp_path / "empty.xml").touch()
    with pytest.raises(UserError, match=r"empty.xml is an empty file"):
        read(tmp_path / "empty.xml")
    (tmp_path / "books").mkdir()
    (tmp_path / "books" / "b.txt").write_text("x")
    with pytest.raises(UserError, match=r"only b.txt"):
        read(tmp_path / "books")


def test_real_dumps_are_counted_to_the_page(real_data) -> None:
    """Numbers of pages as they were counted when the data was collected."""
    found, dropped, _ = read(real_data / "wiki/ltgwiki-latest-pages-articles.xml.bz2")
    assert dropped["not an article (other namespace)"] == 2004 - 1050
    assert (
        len(found) + dropped["redirect"] + dropped["empty page"] + dropped["page without prose"]
        == 1050
    )
    found, dropped, _ = read(next((real_data / "wiki").glob("enwiki-*.bz2")))
    assert len(found) + dropped["redirect"] + dropped["page without prose"] == 205
    found, _, _ = read(real_data / "wiki/minidump-arwiki.xml.bz2")
    assert len({name for name, *_ in found}) == 3  # two of them have one title
