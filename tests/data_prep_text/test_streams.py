"""Reading files: packed, cut short, and line by line."""

from __future__ import annotations

import bz2
import gzip
import lzma
import struct
import time
from pathlib import Path

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from configs import UserError
from configs.schema import SourceConfig
from data_prep.sources import Tally, open_source
from data_prep.sources.base import Piece
from data_prep.sources.streams import chunks_of, lines_of, read_all, reading

PACK = {
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
    ".zst": zstandard.ZstdCompressor().compress,
}
SKIPPED = struct.pack("<II", 0x184D2A50, 5) + b"hello"  # a frame of .zst that is no content
PAGE = "<page><title>{0}</title><ns>0</ns><id>{0}</id><text>Sentence {0}. It is here.</text></page>"
TEXTS = {
    "text": (".txt", "Sentence {0}. It is here.\n\n"),
    "sentences": (".txt", "sentence {0}\n"),
    "books": (".txt", "Sentence {0}. It is here.\n\n"),
    "hub": (".jsonl", '{{"text": "Sentence {0}. It is here."}}\n'),
    "extracted": (".jsonl", '{{"text": "Sentence {0}. It is here."}}\n'),
    "wikipedia": (".xml", f"<mediawiki>{PAGE}</mediawiki>\n"),
}


@pytest.mark.parametrize("kind", TEXTS)
@pytest.mark.parametrize("packed", PACK)
def test_packed_files_cut_short_are_named(tmp_path: Path, kind: str, packed: str) -> None:
    suffix, text = TEXTS[kind]
    data = PACK[packed]("".join(text.format(n * n) for n in range(3000)).encode())
    for end in (len(data) - 10, len(data) // 2, 20):
        file = tmp_path / f"a{suffix}{packed}"
        file.write_bytes(data[:end])
        with pytest.raises(UserError, match=rf"a{suffix}{packed}: .*[\s\S]*cut"):
            source = open_source(SourceConfig(kind=kind, path=str(file)))
            for unit in source.ranges():
                for _ in source.documents(unit, Tally()):
                    pass


def test_a_file_without_rights_is_not_called_damaged(tmp_path: Path) -> None:
    refused = PermissionError(13, "Permission denied", "a.txt")
    for error, remedy in ((refused, "check its rights"), (EOFError("cut"), "get it again")):
        with pytest.raises(UserError, match=r"a\.txt: cannot be read") as caught, reading("a.txt"):
            raise error
        assert remedy in caught.value.remedy


@pytest.mark.parametrize("kind", TEXTS)
@pytest.mark.parametrize("packed", ["", *PACK])
def test_names_in_capitals_make_no_difference(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, packed: str
) -> None:
    monkeypatch.setattr("data_prep.sources.text.RANGE_BYTES", 1 << 10)
    suffix, text = TEXTS[kind]
    data = PACK.get(packed, bytes)("".join(text.format(n) for n in range(99)).encode())
    found = []
    for name in (f"a{suffix}{packed}", f"A{suffix}{packed}".upper()):
        (tmp_path / name).write_bytes(data)
        source = open_source(SourceConfig(kind=kind, path=str(tmp_path / name), name="s"))
        units = source.ranges()
        texts = [d.paragraphs for u in units for d in source.documents(u, Tally())]
        assert texts
        found.append((texts, [(u.size, [(p.start, p.end) for p in u.pieces]) for u in units]))
    assert found[0] == found[1]


@settings(max_examples=60, deadline=None)
@given(
    parts=st.lists(st.binary(max_size=300), min_size=1, max_size=5), place=st.floats(0, 1), data=st.data()
)  # fmt: skip
def test_zst_is_read_frame_by_frame(tmp_path_factory, parts, place, data) -> None:
    """Several frames are one file; a cut inside one is an error, between two nobody can tell."""
    file = str(tmp_path_factory.mktemp("zst") / "a.zst")
    frames = []
    for part in parts:
        size = data.draw(st.booleans())
        frames.append(zstandard.ZstdCompressor(write_content_size=size).compress(part))
        if data.draw(st.booleans()):
            frames.append(SKIPPED)
    packed = b"".join(frames)
    Path(file).write_bytes(packed)
    assert read_all(file) == b"".join(parts)
    assert b"".join(chunk for chunk, _ in chunks_of(Piece(file))) == b"".join(parts)
    cut = int(place * len(packed))
    Path(file).write_bytes(packed[:cut])
    if cut in {sum(map(len, frames[:n])) for n in range(len(frames) + 1)}:
        assert b"".join(parts).startswith(read_all(file))
    else:
        with pytest.raises(UserError, match=r"a\.zst: cannot be read"):
            read_all(file)


def test_large_zst_comes_in_chunks_of_one_size(tmp_path: Path) -> None:
    """What looks at a file's head must get one, however small the frames are."""
    frames = [PACK[".zst"](b"%d\n" % n * 999) for n in range(2000)]
    (tmp_path / "a.zst").write_bytes(b"".join(frames))
    chunks = [chunk for chunk, _ in chunks_of(Piece(str(tmp_path / "a.zst")))]
    assert {len(chunk) for chunk in chunks[:-1]} == {1 << 20} and len(chunks) > 3
    assert b"".join(chunks) == b"".join(b"%d\n" % n * 999 for n in range(2000))


@settings(max_examples=200, deadline=None)
@given(
    data=st.lists(st.sampled_from([b"a", b"bb", b"\n"]), max_size=20).map(b"".join),
    cuts=st.tuples(st.integers(1, 5), st.integers(0, 20), st.integers(0, 20)),
)
def test_a_line_belongs_to_the_range_with_its_start(data, cuts) -> None:
    step, *ends = cuts
    start, end = sorted(min(at, len(data)) for at in ends)
    chunks = [(data[at : min(at + step, end)], True) for at in range(start, end, step)]
    chunks += [(data[at : at + step], False) for at in range(end, len(data), step)]
    wanted, at = [], 0
    for line in data.split(b"\n"):
        # The LF before a line decides; the file's last line is one if it has anything.
        if (start < at <= end or start == at == 0) and (at + len(line) < len(data) or line):
            wanted.append(line)
        at += len(line) + 1
    if start == end:
        return  # no range is empty
    assert [line for line, own in lines_of(iter(chunks), start == 0) if own] == wanted


def test_a_long_line_costs_time_in_proportion() -> None:
    begin = time.process_time()
    (line, _), *more = lines_of(((b"x" * 1000, True) for _ in range(30_000)), True)
    assert len(line) == 30_000_000 and not more
    assert time.process_time() - begin < 5  # copied for each chunk it took minutes


def test_a_range_inside_a_line_is_not_read_beyond_its_end() -> None:
    chunks = iter([(b"inside", True), (b"the", False), (b"line", False), (b"\nnext", False)])
    assert not list(lines_of(chunks, False))
    assert next(chunks) == (b"line", False)
