"""Plain text, sentences a line and WikiExtractor output."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from configs import UserError
from configs.schema import SourceConfig
from data_prep.documents import family
from data_prep.sources import Document, Tally, open_source, text
from data_prep.sources.base import Piece, cut_bytes
from data_prep.sources.text import groups_of_lines

PACK = {
    "": lambda data: data,
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
    ".zst": lambda data: zstandard.ZstdCompressor().compress(data),
}


def read(kind: str, path: Path, **keys: Any) -> tuple[list[Document], Counter[str]]:
    source = open_source(SourceConfig(kind=kind, path=str(path), **keys))
    tally = Tally()
    return [d for u in source.ranges() for d in source.documents(u, tally)], tally.dropped


def test_b03_only_lf_ends_a_row(tmp_path) -> None:
    data = "one\u2028two\u0085three\vfour\ffive\x1csix\r\nseven\n".encode()
    for packed, pack in PACK.items():
        file = tmp_path / f"rows.txt{packed}"
        file.write_bytes(pack(data))
        documents, _ = read("sentences", file)
        assert [d.paragraphs for d in documents] == [["one two three four five six", "seven"]]
        assert documents[0].presplit


def test_b03_in_rows_of_a_data_set(tmp_path) -> None:
    (tmp_path / "a.txt").write_bytes("one\u2028two\u0085three\r\nfour\n".encode())
    documents, _ = read("hub", tmp_path / "a.txt", document="rows")
    assert [d.paragraphs for d in documents] == [["one two three", "four"]]


def test_blank_lines_part_documents(tmp_path) -> None:
    (tmp_path / "a.txt").write_bytes(
        b"\xef\xbb\xbf\n\na one\r\na two\r\n \r\n\r\nb one\n\t\nc one\nc two"
    )
    documents, _ = read("sentences", tmp_path / "a.txt")
    assert [d.paragraphs for d in documents] == [["a one", "a two"], ["b one"], ["c one", "c two"]]
    assert len({d.id for d in documents}) == 3
    for cut in ("window", "rows"):
        for count in (2, 3):
            same, _ = read("sentences", tmp_path / "a.txt", document=cut, window_sentences=count)
            assert [d.paragraphs for d in same] == [d.paragraphs for d in documents]


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-be"])
def test_lines_of_utf_16(tmp_path, monkeypatch, encoding) -> None:
    words = (
        "\ufeff" * (encoding != "utf-16") + "ein Wört\nਊ ok\n\nzwei\r\n"
    )  # U+0A0A: two bytes of LF
    (tmp_path / "a.txt").write_bytes(words.encode(encoding))
    documents, _ = read("sentences", tmp_path / "a.txt")
    assert [d.paragraphs for d in documents] == [["ein Wört", "ਊ ok"], ["zwei"]]
    documents, _ = read("text", tmp_path / "a.txt")
    assert [d.paragraphs for d in documents] == [["ein Wört ਊ ok", "zwei"]]
    documents, _ = read("hub", tmp_path / "a.txt", document="rows")
    assert [d.paragraphs for d in documents] == [["ein Wört", "ਊ ok"], ["zwei"]]
    monkeypatch.setattr(text, "RANGE_BYTES", 10)
    with pytest.raises(UserError, match=r"a\.txt: a large text in UTF-16"):
        read("sentences", tmp_path / "a.txt")


def test_a_document_of_a_file_of_lines_does_not_go_on_in_the_next(tmp_path) -> None:
    (tmp_path / "a.txt").write_text("one\ntwo\n\nthree\nfour\n")
    apart, _ = read("sentences", tmp_path / "a.txt")
    cut, _ = read("sentences", tmp_path / "a.txt", document="window", window_sentences=2)
    assert [len({family(d.id) for d in found}) for found in (apart, cut)] == [2, 1]


@settings(max_examples=100, deadline=None)
@given(lines=st.lists(st.sampled_from(["", "x", "yy", "\r"]), max_size=14), step=st.integers(1, 9))
def test_rows_of_any_cut_of_a_file_are_its_lines(tmp_path_factory, lines, step) -> None:
    """No blank line is needed to find a place to start; a cut ends a document and no more."""
    file = tmp_path_factory.mktemp("cut") / "a.txt"
    file.write_text("\n".join([*lines, "z"]))
    units = [([piece], size) for [piece], size in cut_bytes(file, step)]
    source = open_source(SourceConfig(kind="sentences", path=str(file), document="rows"))
    source.plan = lambda: units
    documents = [d for u in source.ranges() for d in source.documents(u, Tally())]
    texts = [line for line in [*lines, "z"] if line.strip()]
    assert [p for d in documents for p in d.paragraphs] == texts
    assert len({family(d.id) for d in documents}) == 1


def test_links_are_followed_and_broken_ones_named(tmp_path) -> None:
    folder, other = tmp_path / "in", tmp_path / "other"
    folder.mkdir(), other.mkdir()
    (folder / "a.txt").write_text("A.\n")
    (other / "z.txt").write_text("Z.\n")
    (folder / "part").symlink_to(other)
    (other / "back").symlink_to(folder)  # a link in a circle is gone through once
    documents, _ = read("text", folder)
    assert [d.paragraphs for d in documents] == [["A."], ["Z."]]
    (folder / "b.txt").symlink_to(tmp_path / "gone.txt")
    for path in (folder, folder / "*.txt"):
        with pytest.raises(UserError, match=r"b\.txt is a link to a file that is not there"):
            read("text", path)
    with pytest.raises(UserError, match=r"b\.txt is a link to a file that is not there"):
        read("hub", folder)  # a snapshot in the hub's cache is a folder of links


@pytest.mark.parametrize("kind", ["text", "hub"])
def test_a_missing_file_of_a_numbered_set_is_named(tmp_path, kind) -> None:
    for n in (0, 1, 2, 4):
        (tmp_path / f"text-{n:05d}-of-00005.txt").write_text("A.\n")
    (tmp_path / "other-00002-of-00002.txt").write_text("B.\n")  # counts from 1
    for path in (tmp_path, tmp_path / "*.txt", tmp_path / "*-of-0000?.txt"):
        with pytest.raises(UserError) as error:
            read(kind, path)
        assert "text-00003-of-00005.txt are missing" in error.value.what
        assert "other-00001-of-00002.txt" in error.value.what and error.value.remedy
    # On purpose: a file by its name, or a glob that would not have taken the missing ones.
    for path, count in (("text-00004-of-00005.txt", 1), ("text-0000[0-2]-of-*.txt", 3)):
        assert len(read(kind, tmp_path / path)[0]) == count
    for name in ("text-00003-of-00005.txt", "other-00001-of-00002.txt"):
        (tmp_path / name).write_text("C.\n")
    assert len(read(kind, tmp_path)[0]) == 7


def test_names_that_only_look_numbered(tmp_path) -> None:
    for name in ("lives-volume-1-of-3.txt", "2001-of-12345.txt", "a-00000-of-00001-0fa3b2c1.txt"):
        (tmp_path / name).write_text("A.\n")
    assert len(read("text", tmp_path)[0]) == 3


def test_a_folder_without_rights_is_named(tmp_path, monkeypatch) -> None:
    (tmp_path / "in" / "shut").mkdir(parents=True)
    (tmp_path / "in" / "a.txt").write_text("A.\n")
    scan = os.scandir

    def refuse(path: str) -> Any:  # root may read everything, so rights alone would not do
        if str(path).endswith("shut"):
            raise PermissionError(13, "Permission denied", str(path))
        return scan(path)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(UserError, match="shut: cannot be read"):
        read("text", tmp_path / "in")


@settings(max_examples=150, deadline=None)
@given(
    lines=st.lists(st.sampled_from(["", "x", "yy", "\r", "zzz"]), max_size=14),
    step=st.integers(1, 9),
)
def test_any_cut_of_a_file_gives_each_group_once(tmp_path_factory, lines, step) -> None:
    file = tmp_path_factory.mktemp("cut") / "a.txt"
    file.write_text("\n".join(lines))
    size = file.stat().st_size
    whole = list(groups_of_lines(Piece(str(file)), Tally(), "a"))
    parts = [
        group
        for start in range(0, max(size, 1), step)
        for group in groups_of_lines(Piece(str(file), start, min(start + step, size)), Tally(), "a")
    ]
    assert parts == whole


def test_text_files_and_windows(tmp_path, monkeypatch) -> None:
    paragraphs = [f"Sentence {n} a. Sentence {n} b.\nIt goes on." for n in range(60)]
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep/a.txt").write_text("\n\n".join(paragraphs))
    (tmp_path / "b.txt").write_bytes("caf\xe9 au lait.".encode("latin-1"))
    documents, _ = read("text", tmp_path, name="t")
    assert {d.id: len(d.paragraphs) for d in documents} == {"t/b.txt": 1, "t/deep/a.txt": 60}
    assert documents[0].paragraphs == ["café au lait."]
    assert documents[1].paragraphs[0] == "Sentence 0 a. Sentence 0 b. It goes on."
    monkeypatch.setattr(text, "RANGE_BYTES", 700)
    windowed, _ = read("text", tmp_path, document="window", window_sentences=9)
    joined = [p for d in windowed for p in d.paragraphs]
    assert sorted(joined) == sorted(p for d in documents for p in d.paragraphs)
    assert max(len(d.paragraphs) for d in windowed) == 3
    assert len({d.id for d in windowed}) == len(windowed)


def test_a_document_too_large_for_memory_is_refused(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(text, "LARGEST_DOCUMENT", 1000)
    (tmp_path / "big.txt").write_text("A line.\n" * 200)
    with pytest.raises(UserError, match=r"big.txt[\s\S]*document: window"):
        read("text", tmp_path)
    with pytest.raises(UserError, match="chapter"):
        read("text", tmp_path, document="chapter")


@pytest.mark.parametrize("ends", ["\n", " "])
@pytest.mark.parametrize("packed", ["", ".gz"])
def test_text_without_blank_lines_is_refused_or_read_by_line(
    tmp_path, monkeypatch, ends, packed
) -> None:
    """Each unit looked for one to the end of the file, and the first held all of it."""
    monkeypatch.setattr(text, "LARGEST_DOCUMENT", 1000)
    monkeypatch.setattr(text, "RANGE_BYTES", 400)
    monkeypatch.setattr("data_prep.sources.streams.CHUNK", 100)
    file = tmp_path / f"big.txt{packed}"
    lines = [f"line {n}" for n in range(300)]
    file.write_bytes(PACK[packed](ends.join(lines).encode()))
    for kind, cut in (("text", "window"), ("sentences", "file")):
        with pytest.raises(UserError, match=rf"big.txt{packed}: [\s\S]*put blank lines") as error:
            read(kind, file, document=cut)
        assert "document: rows" in error.value.remedy and "kind: hub" in error.value.remedy
    for cut in ("rows", "window"):
        documents, _ = read("sentences", file, document=cut, window_sentences=50)
        assert ends.join(p for d in documents for p in d.paragraphs) == ends.join(lines)
    groups = ["\n".join(lines[n : n + 60]) for n in range(0, 300, 60)]
    file.write_bytes(PACK[packed]("\n\n".join(groups).encode()))
    assert len(read("sentences", file)[0]) == 5
    assert read("text", file, document="window")[0]


def test_wrong_kinds_and_cuts_are_refused() -> None:
    with pytest.raises(UserError, match=r"kind 'wiki'[\s\S]*wikipedia"):
        open_source(SourceConfig(kind="wiki", path="x"))
    for kind, cut in (
        ("books", "page"),
        ("books", "rows"),
        ("wikipedia", "chapter"),
        ("sentences", "chapter"),
    ):
        with pytest.raises(UserError, match=f"document: {cut} is not for kind: {kind}"):
            open_source(SourceConfig(kind=kind, path="x", document=cut))
    with pytest.raises(UserError, match="no path"):
        open_source(SourceConfig(kind="books")).ranges()


def test_extracted_articles_of_both_forms(tmp_path) -> None:
    body = "Berlin & Bonn\n\nBerlin is a city in Germany.\nHistory.\n\nIt is &lt;old&gt;.\n\nSee also\n"
    docs = f'<doc id="7" url="http://x?curid=7" title="Berlin &amp; Bonn">\n{body}</doc>\n<doc id="8" url="" title="E">\nE\n\n</doc>\n'
    rows = "".join(json.dumps({"id": "7", "title": "Berlin & Bonn", "text": body.replace("&lt;", "<").replace("&gt;", ">")}) + "\n" for _ in (1,))  # fmt: skip
    for name, data in (("wiki_00", docs), ("wiki_01.gz", docs), ("wiki_02.jsonl", rows)):
        (tmp_path / name).write_bytes(
            gzip.compress(data.encode()) if name.endswith("gz") else data.encode()
        )
        documents, dropped = read("extracted", tmp_path / name, name="w")
        assert [(d.id, d.paragraphs) for d in documents] == [
            ("w/7/Berlin & Bonn", ["Berlin is a city in Germany.", "It is <old>."])
        ]
        parts, _ = read(
            "extracted", tmp_path / name, name="w", document="window", window_sentences=2
        )
        assert [d.id for d in parts] == ["w/7/Berlin & Bonn#0"]
        assert dropped["empty page"] == (0 if "jsonl" in name else 1)
    (tmp_path / "other").write_text("nothing of the kind")
    with pytest.raises(UserError, match=r"other: neither"):
        read("extracted", tmp_path / "other")


def test_extracted_articles_cut_off_are_named(tmp_path) -> None:
    (tmp_path / "wiki_00").write_text('<doc id="1" title="T">\nT\n\nOne. Two.\n</doc>\n<doc id="2')
    with pytest.raises(UserError, match="wiki_00: it ends inside <doc"):
        read("extracted", tmp_path)


def test_real_extracted_articles(real_data) -> None:
    documents, dropped = read("extracted", real_data / "wiki/extracted/doc-format")
    assert len(documents) + dropped["empty page"] == 933
    documents, _ = read("extracted", real_data / "wiki/extracted/wiki_00.jsonl.gz")
    assert len(documents) == 35
