"""Reads a part of a .bz2 file, of one stream or of many, without what comes before it.

A bz2 stream is a header and blocks of at most 900 kB of text, each with its own check sum, that
start with the 48 bits of pi at any bit. A block becomes a stream of its own when it is moved to
a byte boundary and given a header and a trailer. So a dump of 20 GB in one stream is read by many
workers. (Chance of the 48 bits inside compressed data: 6e-4 in 20 GB, and the check sum tells.)
"""

from __future__ import annotations

import bz2
from collections.abc import Iterator
from typing import IO

BLOCK = 0x314159265359
END = 0x177245385090
STEP = 4 << 20
LONGEST = 2 << 20  # bytes from a block's start within which its end must show (900 kB and more)


def _patterns(magic: int) -> list[tuple[int, bytes, int, int, int, int]]:
    """For each bit shift: inner whole bytes to search for, and masks for the bytes around them."""
    found = []
    for shift in range(8):
        bits = (magic << (8 - shift if shift else 0)).to_bytes(7 if shift else 6, "big")
        if shift:
            first_mask, last_mask = 0xFF >> shift, (0xFF << (8 - shift)) & 0xFF
            found.append((shift, bits[1:6], first_mask, bits[0], last_mask, bits[6]))
        else:
            found.append((0, bits, 0, 0, 0, 0))
    return found


PATTERNS = {magic: _patterns(magic) for magic in (BLOCK, END)}


def find_marks(data: bytes, magic: int) -> list[int]:
    """Bit positions of `magic` in data."""
    marks = []
    for shift, inner, first_mask, first, last_mask, last in PATTERNS[magic]:
        at = data.find(inner)
        while at >= 0:
            if not shift:
                marks.append(at * 8)
            elif (
                at > 0
                and at + 5 < len(data)
                and data[at - 1] & first_mask == first
                and data[at + 5] & last_mask == last
            ):
                marks.append((at - 1) * 8 + shift)
            at = data.find(inner, at + 1)
    return sorted(marks)


def _bits(data: bytes, start: int, end: int) -> tuple[int, int]:
    """Bits [start, end) of data as a number, and how many they are."""
    number = int.from_bytes(data[start // 8 : (end + 7) // 8], "big")
    return (number >> (-end % 8)) & ((1 << (end - start)) - 1), end - start


def unpack(data: bytes, start: int, end: int) -> bytes:
    """The text of the block at bits [start, end); raises OSError when its check sum is wrong."""
    body, length = _bits(data, start, end)
    crc = (body >> (length - 80)) & 0xFFFFFFFF  # after the 48 bits; the trailer repeats it
    number = (((body << 48) | END) << 32) | crc
    length += 80
    pad = -length % 8
    return bz2.decompress(b"BZh9" + (number << pad).to_bytes((length + pad) // 8, "big"))


class BlockReader:
    """Blocks of an open .bz2 file."""

    def __init__(self, file: IO[bytes]) -> None:
        self.file = file

    def read(self, start: int, end: int) -> Iterator[tuple[bytes, bool]]:
        """Texts of the blocks from byte `start` on; own while they start before byte `end`."""
        base = start
        self.file.seek(start)
        data = b""
        finished = False
        while not finished:
            more = self.file.read(STEP)
            data += more
            finished = not more
            marks = [(at, True) for at in find_marks(data, BLOCK)]
            marks += [(at, False) for at in find_marks(data, END)]
            marks.sort()
            if finished and marks and marks[-1][1]:
                raise EOFError("the last bz2 block has no end")
            done = 0
            for (at, is_block), (until, _) in zip(marks, marks[1:]):
                if is_block:
                    yield unpack(data, at, until), base + at // 8 < end
                done = until
            if not marks:
                done = max(0, (len(data) - 7) * 8)
            # The last mark waits for the next one; keep its bytes.
            cut = (done if done or not marks else marks[0][0]) // 8
            if len(data) - cut > STEP + LONGEST and not finished:
                raise OSError("no bz2 block where one must be")
            base += cut
            data = data[cut:]
