"""Text that is not UTF-8, damaged text and files that are no text: read, left out, and always counted."""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from configs import UserError
from configs.schema import SourceConfig
from data_prep.shard_index import read_index
from data_prep.sources import Document, Tally, open_source, text
from data_prep.sources.encoding import LOST, NO_TEXT, SURROGATES, decode, is_no_text
from tests.data_prep.corpus import build, recipe_file, write_texts

FRENCH = "Où est l'élève naïf ? Il a dîné à l'hôtel « Zoë » près du château.\nÇa va très bien.\n"
RUSSIAN = "Река встретила старый камень. Потом она пошла дальше к морю.\n"
PROSE = st.text(
    st.characters(exclude_categories=("Cc", "Cs", "Cn", "Zl", "Zp"), exclude_characters="\ufffd\ufeff"),
    max_size=60,
)  # fmt: skip


def read(kind: str, path: Path, **keys: object) -> tuple[list[Document], Tally]:
    source = open_source(SourceConfig(kind=kind, path=str(path), name="s", **keys))  # type: ignore[arg-type]
    tally = Tally()
    return [d for u in source.ranges() for d in source.documents(u, tally)], tally


@settings(max_examples=300, deadline=None)
@given(PROSE, st.sampled_from([b"", b"\xef\xbb\xbf"]))
def test_utf8_is_read_as_it_is(prose: str, mark: bytes) -> None:
    tally = Tally()
    assert decode(mark + prose.encode(), tally, "a") == prose
    assert tally == Tally() and not is_no_text(mark + prose.encode())


@settings(max_examples=300, deadline=None)
@given(
    st.lists(
        st.sampled_from(["élan", "où", "naïf", "Zoë", "the", "river"]), min_size=1, max_size=80
    )
)
def test_latin_1_is_read_and_counted(words: list[str]) -> None:
    prose, tally = " ".join(words), Tally()
    data = prose.encode("latin-1")
    assert decode(data, tally, "a", "books") == prose and not is_no_text(data)
    assert tally.replaced == ({} if prose.isascii() else {"books read as Windows Latin-1": 1})


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.integers(0, len(RUSSIAN)), max_size=8, unique=True),
    st.sampled_from([RUSSIAN, FRENCH]),
)
def test_broken_characters_cost_themselves_alone(places: list[int], prose: str) -> None:
    """A line was read as Latin-1 for one of them: two letters of nonsense for each of its own."""
    prose, tally = prose.split("\n")[0], Tally()
    parts = [prose[a:b] for a, b in zip([0, *sorted(places)], [*sorted(places), None])]
    data = b"\xff".join(part.encode() for part in parts)
    assert decode(data, tally, "a") == prose and not is_no_text(data)
    assert tally.replaced == ({LOST: len(places)} if places else {})
    assert tally.first == ({LOST: "a"} if places else {})


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 2**32), st.integers(200, 3000))
def test_random_bytes_are_no_text(seed: int, size: int) -> None:
    assert is_no_text(random.Random(seed).randbytes(size))


NOT_TEXT: dict[str, Callable[[], bytes]] = {
    "random": lambda: random.Random(0).randbytes(5000),
    "zeros": lambda: bytes(5000),
    "gzip": lambda: gzip.compress(random.Random(0).randbytes(3000)),
    "utf-16 without a mark": lambda: (FRENCH * 9).encode("utf-16-le"),
    "big-endian": lambda: (RUSSIAN * 9).encode("utf-16-be"),
    "utf-16 of Chinese": lambda: ("石头遇见了河流。\n" * 40).encode("utf-16-le"),
    "koi8-r": lambda: (RUSSIAN * 9).encode("koi8-r"),
    "cp1251": lambda: (RUSSIAN * 9).encode("cp1251"),
    "gbk": lambda: ("石头遇见了河流。\n" * 40).encode("gbk"),
    "shift-jis": lambda: ("川は石に会った。それから海へ行った。\n" * 40).encode("shift-jis"),
}
GOOD = (
    "river.txt",
    "The river met a stone. It went on to the sea. She told him so, and he went away.\n",
)
KINDS = {"text": {}, "sentences": {}, "books": {}, "hub": {}, "extracted": {}}


def write(folder: Path, kind: str, name: str, data: bytes) -> None:
    if kind == "extracted":
        data = b'<doc id="1" title="T">\n' + data + b"\n</doc>\n"
    (folder / name).write_bytes(data)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("what", NOT_TEXT)
def test_files_that_are_no_text_are_left_out_and_counted(
    tmp_path: Path, kind: str, what: str
) -> None:
    for name in ("b.txt", "c.txt"):
        (tmp_path / name).write_bytes(NOT_TEXT[what]())
    write(tmp_path, kind, GOOD[0], GOOD[1].encode())
    documents, tally = read(kind, tmp_path)
    words = " ".join(p for d in documents for p in d.paragraphs)
    assert words == GOOD[1].strip()
    assert (tally.dropped, tally.first) == ({NO_TEXT: 2}, {NO_TEXT: "s/b.txt"})
    assert not tally.replaced


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "latin-1"])
def test_what_can_be_read_is_read_by_every_kind(tmp_path: Path, kind: str, encoding: str) -> None:
    prose = FRENCH * 3
    if kind == "extracted":
        prose = f'<doc id="1" title="T">\n{prose}</doc>\n'
    (tmp_path / "a.txt").write_bytes(prose.encode(encoding))
    documents, tally = read(kind, tmp_path)
    words = " ".join(p for d in documents for p in d.paragraphs)
    assert words == " ".join(FRENCH.split() * 3) and not tally.dropped
    if encoding == "latin-1":
        unit, count = {"books": ("books", 1), "extracted": ("articles", 1)}.get(kind, ("lines", 6))
        assert tally.replaced == {f"{unit} read as Windows Latin-1": count}
        assert set(tally.first.values()) == {"s/a.txt"}
    else:
        assert tally == Tally()


def test_a_large_file_that_is_no_text_is_one_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its later pieces look at its start, though they may look like text themselves."""
    (tmp_path / "a.txt").write_bytes(
        random.Random(1).randbytes(3000) + b"\nA stone fell. It lay.\n" * 50
    )
    (tmp_path / "b.txt").write_bytes(b"The river met it.\n" * 100)
    monkeypatch.setattr(text, "RANGE_BYTES", 1000)
    monkeypatch.setattr("data_prep.sources.streams.CHUNK", 2000)
    documents, tally = read("text", tmp_path, document="window", window_sentences=50)
    assert {p for d in documents for p in d.paragraphs} <= {
        " ".join(["The river met it."] * n) for n in range(101)
    }
    assert documents and tally.dropped == {NO_TEXT: 1}


def test_strings_of_tables_and_of_json_that_are_none(tmp_path: Path) -> None:
    values = [
        b"A stone fell. It lay there.",
        "Une \u00e9l\u00e8ve na".encode() + b"\xff" + "\u00efve.".encode(),
    ]
    ends = b"".join(n.to_bytes(4, "little") for n in (0, len(values[0]), sum(map(len, values))))
    buffers = [None, pa.py_buffer(ends), pa.py_buffer(b"".join(values))]
    table = pa.table({"text": pa.Array.from_buffers(pa.string(), 2, buffers)})
    pq.write_table(table, tmp_path / "a.parquet")
    documents, tally = read("hub", tmp_path / "a.parquet")
    assert [d.paragraphs for d in documents] == [
        ["A stone fell. It lay there."],
        ["Une élève naïve."],
    ]
    assert tally.replaced == {LOST: 1}
    rows = [
        {"text": "Half \ud83d of it. And 🙂 whole.", "title": "T", "id": 1},
        {"text": "One. Two."},
    ]
    (tmp_path / "b.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for kind in ("hub", "extracted"):
        documents, tally = read(kind, tmp_path / "b.jsonl")
        assert documents[0].paragraphs == ["Half of it. And 🙂 whole."]
        assert tally.replaced == {SURROGATES: 1}


def test_broken_pages_of_a_dump(tmp_path: Path) -> None:
    page = "<page><title>T</title><ns>0</ns><id>1</id><revision><text>Der Fluß ist \ufffd breit. Er fließt.</text></revision></page>"
    data = f"<mediawiki>{page}</mediawiki>".encode()
    (tmp_path / "a.xml").write_bytes(data)
    documents, tally = read("wikipedia", tmp_path)
    assert documents and tally == Tally()  # the page itself shows that character
    (tmp_path / "a.xml").write_bytes(data.replace(b"breit", b"br\xffeit"))
    documents, tally = read("wikipedia", tmp_path)
    assert "breit" in documents[0].paragraphs[0]
    assert (tally.replaced, tally.first) == ({LOST: 1}, {LOST: "s/a.xml"})
    wide = data.decode().encode("utf-16")
    at = wide.index("breit".encode("utf-16-le"))
    (tmp_path / "a.xml").write_bytes(wide[:at] + b"\x00\xdc" + wide[at:])
    documents, tally = read("wikipedia", tmp_path)
    assert "breit" in documents[0].paragraphs[0] and tally.replaced == {LOST: 1}


def test_a_build_says_what_was_not_utf8(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_texts(tmp_path / "text", files=8)
    (folder / "bad.txt").write_bytes(NOT_TEXT["random"]())
    (folder / "fr.txt").write_bytes(FRENCH.encode("latin-1"))
    recipe = recipe_file(tmp_path, folder)
    index = read_index(build(recipe) / "len64")
    said = capsys.readouterr().out
    assert "dropped: files that are no text 1 (first text/bad.txt); " in said
    assert "; not UTF-8: lines read as Windows Latin-1 2 (first text/fr.txt)" in said
    assert index["sources"][0]["replaced"] == {"lines read as Windows Latin-1": 2}
    for file in folder.iterdir():
        if file.name != "bad.txt":
            file.unlink()
    with pytest.raises(
        UserError,
        match=r"no document with text \(dropped: files that are no text 1 \(first text/bad",
    ):
        build(recipe, f"work_dir={tmp_path}/b")
    (folder / "bad.txt").unlink()
    write_texts(folder, files=8)
    index = read_index(build(recipe, f"work_dir={tmp_path}/c") / "len64")
    assert not {"replaced", "first"} & index["sources"][0].keys()
