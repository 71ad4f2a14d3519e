"""CRC-32C (Castagnoli, RFC 3720) in numpy: many lanes at once, joined by GF(2) arithmetic."""

from __future__ import annotations

import numpy as np

_POLY = 0x82F63B78
_LANES = 4096


def _make_table() -> np.ndarray:
    table = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        table = np.where(table & 1, (table >> 1) ^ np.uint32(_POLY), table >> 1)
    return table


_TABLE = _make_table()


def crc32c(data: bytes) -> int:
    """The CRC-32C of `data`: b"123456789" gives 0xE3069283."""
    width = len(data) // _LANES
    state = 0xFFFFFFFF
    if width >= 64:
        lanes = np.frombuffer(data, np.uint8, width * _LANES).reshape(_LANES, width)
        parts = np.zeros(_LANES, np.uint32)
        for column in np.ascontiguousarray(lanes.T):
            parts = _TABLE[(parts ^ column) & 0xFF] ^ (parts >> 8)
        shift = _zeros_operator(width)
        for part in parts.tolist():
            state = _apply(shift, state) ^ part
        data = data[width * _LANES :]
    table = _TABLE.tolist()
    for byte in data:
        state = table[(state ^ byte) & 0xFF] ^ (state >> 8)
    return state ^ 0xFFFFFFFF


def masked(crc: int) -> int:
    """The rotated form that LevelDB and TensorFlow store."""
    return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF


def _zeros_operator(length: int) -> list[int]:
    """What `length` zero bytes do to a CRC state, as the images of its 32 bits."""
    one = [0] * 32
    for bit in range(32):
        state = 1 << bit
        for _ in range(8):
            state = (state >> 1) ^ (_POLY if state & 1 else 0)
        one[bit] = state
    result = [1 << bit for bit in range(32)]
    while length:
        if length & 1:
            result = [_apply(one, image) for image in result]
        one = [_apply(one, image) for image in one]
        length >>= 1
    return result


def _apply(operator: list[int], state: int) -> int:
    result = bit = 0
    while state:
        if state & 1:
            result ^= operator[bit]
        state >>= 1
        bit += 1
    return result
