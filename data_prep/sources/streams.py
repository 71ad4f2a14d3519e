"""Reading files: compressed or not, from any byte on, by record, with flat memory.

A record (a page, a line) belongs to the byte range that holds its start, so that any cut of a file
into ranges gives each record once. A reader gets chunks `(bytes, own)`: chunks after its range has
ended have own=False and serve only to finish the last record.
"""

from __future__ import annotations

import bz2
import codecs
import gzip
import io
import lzma
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import IO, Any, cast

import zstandard

from configs.errors import UserError
from data_prep.sources.base import Piece
from data_prep.sources.bz2_blocks import BlockReader
from data_prep.sources.encoding import Tally, is_no_text, to_utf8

CHUNK = 1 << 20
ZST_STEP = 64 << 10  # compressed bytes at a time, so that what they hold stays small
Chunks = Iterator[tuple[bytes, bool]]


@contextmanager
def reading(path: str | Path) -> Iterator[None]:
    """Turns what a damaged or unreadable file raises into a UserError that names the file."""
    try:
        yield
    except (OSError, EOFError, zlib.error, lzma.LZMAError, zstandard.ZstdError) as error:
        text = f"{type(error).__name__}: {error}"
        remedy = "the file is damaged or cut: get it again"
        if isinstance(error, PermissionError):
            remedy = "check its rights"
        raise UserError(f"{path}: cannot be read ({text})", remedy) from error


def open_raw(path: str | Path) -> IO[bytes]:
    """A file's own bytes; an hf:// address is read from the hub piece by piece."""
    if "://" in str(path):
        from huggingface_hub import HfFileSystem

        return cast(IO[bytes], HfFileSystem().open(str(path), "rb", block_size=8 << 20))
    return open(path, "rb")


def open_bytes(path: str | Path) -> IO[bytes]:
    """The decompressed content of a .gz, .bz2, .zst, .xz or plain file."""
    suffix = Path(path).suffix.lower()
    source: Any = open_raw(path) if "://" in str(path) else path
    if suffix == ".gz":
        return cast(IO[bytes], gzip.open(source, "rb"))
    if suffix == ".bz2":
        return cast(IO[bytes], bz2.open(source, "rb"))
    if suffix == ".xz":
        return cast(IO[bytes], lzma.open(source, "rb"))
    if suffix == ".zst":
        return io.BufferedReader(_Frames(open_raw(path)), CHUNK)
    return open_raw(path)


class _Frames(io.RawIOBase):
    """What the frames of a .zst file hold. zstandard's own reader takes a cut frame for a whole one.

    Raises:
        EOFError: the file ends inside a frame.
    """

    def __init__(self, source: IO[bytes]) -> None:
        self._source = source
        self._parts = self._decompressed()
        self._held = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, target: Any) -> int:
        if not self._held:
            self._held = memoryview(next(self._parts, b""))
        size = min(len(target), len(self._held))
        target[:size], self._held = self._held[:size], self._held[size:]
        return size

    def close(self) -> None:
        self._source.close()
        super().close()

    def _decompressed(self) -> Iterator[bytes]:
        frame, data = None, b""
        while data := data or self._source.read(ZST_STEP):
            frame = frame or zstandard.ZstdDecompressor(max_window_size=1 << 31).decompressobj()
            if part := frame.decompress(data):  # an empty one would mean the file's end
                yield part
            data = frame.unused_data
            if frame.eof:
                frame = None
        if frame:
            raise EOFError("it ends inside a frame")


def read_all(path: str | Path) -> bytes:
    """The whole decompressed file; raises UserError for a damaged one."""
    with reading(path), open_bytes(path) as file:
        return file.read()


def chunks_of(piece: Piece) -> Chunks:
    """Decompressed chunks from a piece's start to the end of the file, with `own` as said above.

    Pieces of .gz, .zst and .xz files are always whole files: these formats have no inner starts.
    """
    with reading(piece.path):
        if piece.end < 0 or not can_cut(piece.path):
            with open_bytes(piece.path) as file:
                while chunk := file.read(CHUNK):
                    yield chunk, True
        elif piece.path.lower().endswith(".bz2"):
            with open(piece.path, "rb") as file:
                yield from BlockReader(file).read(piece.start, piece.end)
        else:
            yield from _plain(piece)


def text_chunks(piece: Piece, tally: Tally, name: str) -> Chunks:
    """chunks_of a file of lines, as UTF-8 where a byte order mark says UTF-16: its line ends are
    two bytes. A file that is no text has none, and is counted where it starts.

    Raises:
        UserError: such a file is so large that it is read in byte ranges, which UTF-16 has not.
    """
    chunks = chunks_of(piece)
    if piece.start:  # of a file that can be cut: its start tells what it is
        head = next(chunks_of(Piece(piece.path)), (b"", True))[0]
    else:
        first = next(chunks, (b"", True))
        head, chunks = first[0], chain([first], chunks)
    if is_no_text(head):
        if not piece.start:
            tally.drop_file(name)
        return iter(())
    if not piece.start and head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        if 0 <= piece.end < Path(piece.path).stat().st_size:
            raise UserError(
                f"{piece.path}: a large text in UTF-16",
                "convert it first: iconv -f UTF-16 -t UTF-8 FILE > NEW",
            )
        return to_utf8(chunks, "utf-16", tally, name)
    return chunks


def can_cut(path: str | Path) -> bool:
    """Whether byte ranges of this file can be read on their own."""
    return "://" not in str(path) and Path(path).suffix.lower() not in (".gz", ".zst", ".xz")


def _plain(piece: Piece) -> Chunks:
    with open(piece.path, "rb") as file:
        file.seek(piece.start)
        at = piece.start
        while at < piece.end and (chunk := file.read(min(CHUNK, piece.end - at))):
            at += len(chunk)
            yield chunk, True
        while chunk := file.read(CHUNK):
            yield chunk, False


def blocks_between(chunks: Chunks, start_tag: bytes, end_tag: bytes) -> Iterator[bytes]:
    """The insides of `<page>` ... `</page>`, for each start that lies in an own chunk."""
    buffer = bytearray()
    own_end = 0  # bytes of the buffer that are ours
    at = 0
    keep = len(start_tag) - 1
    for chunk, own in chunks:
        buffer += chunk
        if own:
            own_end = len(buffer)
        while True:
            start = buffer.find(start_tag, at)
            if start < 0 or start >= own_end:
                if not own:
                    # A start tag cut by the end of our own bytes still has `keep` bytes to come.
                    if start >= own_end or len(buffer) - own_end >= keep:
                        return
                    break
                at = max(at, len(buffer) - keep)
                break
            end = buffer.find(end_tag, start)
            if end < 0:
                at = start
                break
            yield bytes(buffer[start + len(start_tag) : end])
            at = end + len(end_tag)
        del buffer[:at]
        own_end -= at
        at = 0
    if 0 <= buffer.find(start_tag) < own_end:
        raise EOFError(f"it ends inside {start_tag.decode()}")


def lines_of(chunks: Chunks, first: bool) -> Iterator[tuple[bytes, bool]]:
    """Lines without their LF, with `own`. The LF before a line decides, so that the line right
    after a cut belongs to the range before it. `first`: this range starts the file."""
    tail: list[bytes] = []  # joined once, or a long line would be copied for each of its chunks
    started, own_line = first, True
    for chunk, own in chunks:
        *ended, rest = chunk.split(b"\n")
        if ended:
            ended[0] = b"".join([*tail, ended[0]])
            tail = []
        for line in ended:
            if started:
                yield line, own_line
            started, own_line = True, own
        if started:
            tail.append(rest)
        elif not own:
            return  # no line starts in this range
    if last := b"".join(tail):
        yield last, own_line
