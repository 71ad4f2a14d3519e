"""Random numbers as a pure function of integers: no generator, so nothing to save or to replay.

`mix`, `fold`, `row_keys` and `at` take Python integers, numpy arrays (uint32, or int64 below 2**32)
or torch int64 tensors alike and give the same integers for all of them, on any device: only ^, +,
*, & and >> are used, and results are cut to 32 bits. uint32 is the fast one for numpy.
"""

from __future__ import annotations

from typing import Any

import numpy as np

MASK = 0xFFFFFFFF
GOLDEN = 0x9E3779B9
MULTIPLY_1, MULTIPLY_2 = 0x7FEB352D, 0x846CA68B

# Streams keep the uses apart: two uses of one (seed, phase, epoch, row, position) are independent.
ORDER_BLOCKS, ORDER_WINDOW, ORDER_SHIFT = 1, 2, 3
DROPOUT, MASK_SCORE, MASK_KIND, MASK_TOKEN, SPAN_LENGTH = 11, 12, 13, 14, 15


def mix(x: Any) -> Any:
    """The lowbias32 finaliser: a bijection of 32-bit integers with nearly ideal avalanche."""
    x = x ^ (x >> 16)
    x = x * MULTIPLY_1 & MASK
    x = x ^ (x >> 15)
    x = x * MULTIPLY_2 & MASK
    return x ^ (x >> 16)


def fold(*words: Any) -> Any:
    """One 32-bit key out of integers of up to 64 bits each; the order of the words matters."""
    key: Any = GOLDEN
    for word in words:
        key = mix(key ^ (word & MASK))
        key = mix((key + (word >> 32 & MASK) + GOLDEN) & MASK)
    return key


def row_keys(stream: int, seed: int, phase: int, epochs: Any, rows: Any) -> tuple[Any, Any]:
    """Two 32-bit keys a row, together 64 bits, so that rows of a large set do not share a stream."""
    return fold(stream, 0, seed, phase, epochs, rows), fold(stream, 1, seed, phase, epochs, rows)


def at(keys: tuple[Any, Any], position: Any) -> Any:
    """The 32-bit number of a position inside the row (or place) that `keys` belong to."""
    return mix((mix(keys[0] ^ position) + keys[1]) & MASK)


def token_numbers(
    stream: int,
    seed: int,
    phase: int,
    epochs: np.ndarray,
    rows: np.ndarray,
    row_of: np.ndarray,
    position: np.ndarray,
) -> np.ndarray:
    """One number a token, uint32 [T], of (stream, seed, phase, epoch, row, position).

    Args:
        epochs, rows: int64 [n]. row_of: int [T], which of the n a token belongs to.
        position: uint32 [T], its place inside the row.
    """
    keys = row_keys(stream, seed, phase, epochs, rows)
    first, second = (np.asarray(key).astype(np.uint32)[row_of] for key in keys)
    return at((first, second), position)


def below(number: np.ndarray, size: int) -> np.ndarray:
    """32-bit numbers scaled to 0 .. size - 1 (size below 2**31); int64."""
    return number.astype(np.int64) * size >> 32
