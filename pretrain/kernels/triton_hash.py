"""The dropout hash of `hashing.py` in Triton (uint32)."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def mix(x):
    x = x ^ (x >> 16)
    x = x * 0x7FEB352D
    x = x ^ (x >> 15)
    x = x * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def row_hash(token_keys, stream):
    """token_keys int32, stream int32 scalar -> uint32."""
    return mix((token_keys ^ stream).to(tl.uint32, bitcast=True))


@triton.jit
def channel_hash(channels):
    """int32 -> (multiplier, offset), uint32."""
    channels = channels.to(tl.uint32)
    return mix(channels) | 1, mix(channels + 0x9E3779B9)


@triton.jit
def keep(rows, multiplier, offset, THRESHOLD: tl.constexpr):
    """Hashes, broadcast against each other -> bool."""
    return rows * multiplier + offset >= THRESHOLD * 65536
