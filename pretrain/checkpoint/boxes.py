"""A slice of a flattened tensor as boxes of the logical tensor.

A ZeRO partition cuts a tensor anywhere. A contiguous range of a row-major tensor is a tail of a
row, whole rows, and a head of a row, in each dimension: at most 2 n - 1 boxes. Shifted by the
tensor-parallel offset and clipped to the true vocabulary, each is a block of the logical tensor.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import prod

from torch import Tensor

from pretrain.parallel.slices import Slice


@dataclass(frozen=True)
class Box:
    """A block of the logical tensor `name`: its corner, its sizes, and where its elements lie,
    row-major without gaps, in the rank's flat tensors."""

    name: str
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    at: int

    def view(self, flat: Tensor) -> Tensor:
        return flat[self.at : self.at + prod(self.shape)].view(self.shape)


def ranges(
    shape: tuple[int, ...], begin: int, end: int
) -> list[tuple[tuple[int, ...], tuple[int, ...], int]]:
    """Row-major range [begin, end) of `shape` -> [(corner, sizes, flat begin)]."""
    if begin >= end:
        return []
    if len(shape) == 1:
        return [((begin,), (end - begin,), begin)]
    inner = prod(shape[1:])
    first, last = -(-begin // inner), end // inner  # whole rows: first .. last - 1

    def inside(row: int, low: int, high: int) -> list:
        return [
            ((row, *corner), (1, *sizes), row * inner + at)
            for corner, sizes, at in ranges(shape[1:], low - row * inner, high - row * inner)
        ]

    if first > last:
        return inside(last, begin, end)
    out = inside(first - 1, begin, first * inner) if begin < first * inner else []
    if first < last:
        corner = (first, *(0 for _ in shape[1:]))
        out.append((corner, (last - first, *shape[1:]), first * inner))
    return out + (inside(last, last * inner, end) if last * inner < end else [])


def boxes_of(slices: Iterable[Slice]) -> Iterator[Box]:
    """The boxes of a rank's slices, vocabulary padding left out."""
    for s in slices:
        piece = s.piece
        for corner, sizes, at in ranges(piece.shape, s.begin, s.begin + s.numel):
            offset = tuple(c + o for c, o in zip(corner, piece.offset))
            rows = min(sizes[0], piece.logical_shape[0] - offset[0])
            if rows > 0:
                yield Box(piece.name, offset, (rows, *sizes[1:]), s.at + at - s.begin)


def overlap(
    a_offset: Iterable[int], a_shape: Iterable[int], b_offset: Iterable[int], b_shape: Iterable[int]
) -> tuple[tuple[slice, ...], tuple[slice, ...]] | None:
    """Where two blocks of one tensor meet: (index into a, index into b), None if nowhere."""
    in_a, in_b = [], []
    for x, n, y, m in zip(a_offset, a_shape, b_offset, b_shape):
        low, high = max(x, y), min(x + n, y + m)
        if low >= high:
            return None
        in_a.append(slice(low - x, high - x))
        in_b.append(slice(low - y, high - y))
    return tuple(in_a), tuple(in_b)
