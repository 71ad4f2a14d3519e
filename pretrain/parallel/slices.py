"""Which elements of which piece a rank's flat optimiser tensors hold."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from pretrain.parallel.pieces import Piece


@dataclass(frozen=True)
class Slice:
    """Elements begin .. begin + numel of a flattened piece, at `at` of the flat tensors.

    index: the piece's number among all pieces (equal on every rank).
    """

    piece: Piece
    index: int
    begin: int
    numel: int
    at: int

    def of(self, flat: Tensor) -> Tensor:
        return flat[self.at : self.at + self.numel]


def cut(
    pieces: Sequence[Piece], param: object, begin: int, end: int, at: int
) -> Iterable[tuple[Piece, int, int, int]]:
    """(piece, begin in the piece, numel, at) of elements begin .. end of a flattened parameter."""
    for piece in pieces:
        if piece.param is not param:
            continue
        low, high = max(begin, piece.start), min(end, piece.start + piece.numel)
        if low < high:
            yield piece, low - piece.start, high - low, at + low - begin


def make_slices(
    pieces: Sequence[Piece], held: Iterable[tuple[object, int, int, int]]
) -> list[Slice]:
    """Slices of what a rank holds. held: (parameter, begin, end, at), each a range of the flattened
    parameter and where the flat tensors keep it."""
    by_param: dict[int, list[Piece]] = {}
    for piece in pieces:
        by_param.setdefault(id(piece.param), []).append(piece)
    index = {piece.name: number for number, piece in enumerate(pieces)}
    return [
        Slice(piece, index[piece.name], start, numel, place)
        for param, begin, end, at in held
        for piece, start, numel, place in cut(by_param[id(param)], param, begin, end, at)
    ]


@dataclass
class Shard:
    """A rank's part of the optimiser state: flat fp32 tensors of equal length, and what they hold.

    whole: every data-parallel rank holds the same (ZeRO-0), else each holds its own part.
    """

    master: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    slices: list[Slice]
    whole: bool
    kinds: tuple[str, ...] = field(default=("master", "exp_avg", "exp_avg_sq"), init=False)

    def tensor(self, kind: str) -> Tensor:
        return getattr(self, kind)

    @torch.no_grad()
    def zero_padding(self) -> None:
        """Vocabulary padding holds zero weights and moments, whatever was loaded."""
        for s in self.slices:
            rows = s.piece.logical_shape[0] - s.piece.offset[0]
            if rows >= s.piece.shape[0]:
                continue
            width = s.piece.numel // s.piece.shape[0]
            first = max(rows, 0) * width - s.begin
            for kind in self.kinds:
                s.of(self.tensor(kind))[max(first, 0) :].zero_()
