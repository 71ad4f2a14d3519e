"""The order of training rows: a permutation that is computed, not stored.

Epoch e visits the rows in blocks of 256 neighbours (a network disk reads pieces of about 60 KB,
not single rows): the blocks are permuted over the whole set, then the rows are permuted inside
windows of 256 blocks. The set is rotated by a random shift first, so that other rows are
neighbours in every epoch and the short last block is another one. All of it is a function of
(seed, epoch, position): memory and seek cost nothing, whatever the size.
"""

from __future__ import annotations

import numpy as np

from pretrain.data.counter import MASK, ORDER_BLOCKS, ORDER_SHIFT, ORDER_WINDOW, fold, mix

BLOCK = 256  # rows
WINDOW = 256 * BLOCK
_ROUNDS = 6


def permute(index: np.ndarray, size: np.ndarray, key: np.ndarray) -> np.ndarray:
    """index -> its place in a random permutation of 0 .. size - 1, elementwise.

    A Feistel network over pairs of numbers below ceil(sqrt(size)) (Black and Rogaway,
    "Ciphers with arbitrary finite domains", 2002); results outside the domain walk on, which
    needs 1.0 passes on average for large sizes and few for small ones.

    Args:
        index, size, key: int64 of one shape; 0 <= index < size; key 32 bits, names the permutation.
    """
    side = np.ceil(np.sqrt(size)).astype(np.int64)
    value = _feistel(index, side, key)
    outside = np.flatnonzero(value >= size)
    while len(outside):
        value[outside] = _feistel(value[outside], side[outside], key[outside])
        outside = outside[value[outside] >= size[outside]]
    return value


def _feistel(value: np.ndarray, side: np.ndarray, key: np.ndarray) -> np.ndarray:
    left, right = np.divmod(value, side)
    for number in range(_ROUNDS):
        word = mix(mix(right ^ key) + fold(number) & MASK)
        left, right = right, (left + word) % side
    return left * side + right


class RowOrder:
    """The endless stream of rows: epoch after epoch, nothing dropped in between."""

    def __init__(self, num_rows: int, seed: int) -> None:
        if num_rows < 1:
            raise ValueError("an order needs at least one row")
        self.num_rows, self.seed = num_rows, seed

    def rows(self, start: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        """(epochs, rows) at stream positions start .. start + count - 1; int64 [count] each."""
        n = self.num_rows
        epoch, place = np.divmod(np.arange(start, start + count, dtype=np.int64), n)
        window, offset = np.divmod(place, WINDOW)
        size = np.minimum(WINDOW, n - window * WINDOW)
        inside = permute(offset, size, fold(ORDER_WINDOW, self.seed, epoch, window))
        slot, within = window * (WINDOW // BLOCK) + inside // BLOCK, inside % BLOCK
        full = n // BLOCK  # the short block, if any, keeps the last slot
        block = slot.copy()
        moved = np.flatnonzero(slot < full)
        key = fold(ORDER_BLOCKS, self.seed, epoch[moved])
        block[moved] = permute(slot[moved], np.full(len(moved), full), key)
        shift = fold(ORDER_SHIFT, self.seed, epoch)
        return epoch, (block * BLOCK + within + shift) % n
