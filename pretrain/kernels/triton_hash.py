"""The dropout hash of `hashing.py` in Triton (uint32), and small helpers the kernels share."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def scramble(x):
    x = x ^ (x >> 16)
    x = x * 0x7FEB352D
    x = x ^ (x >> 15)
    return x * 0x846CA68B


@triton.jit
def mix(x):
    x = scramble(x)
    return x ^ (x >> 16)


@triton.jit
def row_hash(token_keys, stream):
    """token_keys int32 tensor, stream int32 scalar -> uint32 tensor."""
    return mix((token_keys ^ stream).to(tl.uint32, bitcast=True))


@triton.jit
def hidden_keep(rows, columns, THRESHOLD: tl.constexpr):
    """rows, columns: hashes, broadcast against each other."""
    return (scramble(rows + columns) >> 16) >= THRESHOLD


@triton.jit
def attention_keep(rows, columns, odd_head, THRESHOLD: tl.constexpr):
    """odd_head: scalar 0 or 1; even heads take the upper sixteen bits, odd ones the lower."""
    bits = scramble(rows + columns)
    upper = bits >> 16
    if odd_head == 1:
        upper = (bits ^ upper) & 0xFFFF
    return upper >= THRESHOLD
