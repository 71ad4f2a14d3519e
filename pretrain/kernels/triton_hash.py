"""The dropout hash of `hashing.py` in Triton (uint32), and its tables for attention."""

from __future__ import annotations

import triton
import triton.language as tl
from triton import knobs

INTERPRETED: tl.constexpr = tl.constexpr(bool(knobs.runtime.interpret))


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


@triton.jit
def drop(x, rows, multiplier, offset, THRESHOLD: tl.constexpr):
    """x fp32 where `keep`, else 0.

    One piece of assembly on a GPU: left to itself the compiler moves the comparison away from the
    choice, runs out of predicates and packs them into registers, three instructions a value more.
    """
    if INTERPRETED:
        y = tl.where(keep(rows, multiplier, offset, THRESHOLD), x, 0.0)
    else:
        y = tl.inline_asm_elementwise(
            """{ .reg .pred kept; .reg .u32 hash; mad.lo.u32 hash, $2, $3, $4;
            setp.ge.u32 kept, hash, $5; selp.f32 $0, $1, 0f00000000, kept; }""",
            "=f,f,r,r,r,r", [x, rows, multiplier, offset, THRESHOLD * 65536],
            dtype=tl.float32, is_pure=True, pack=1,
        )  # fmt: skip
    return y


@triton.jit(do_not_specialize=["stream", "tokens"])
def hash_rows(token_keys, hashes, stream, tokens, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    keys = tl.load(token_keys + at, mask=at < tokens, other=0)
    tl.store(hashes + at, row_hash(keys, stream).to(tl.int32, bitcast=True), mask=at < tokens)


@triton.jit
def hash_channels(table, first_head, heads, LENGTH: tl.constexpr, HEAD_STRIDE: tl.constexpr):
    """table int32 [2, heads, LENGTH]: multipliers and offsets of each head's keys."""
    position = tl.arange(0, LENGTH)
    multiplier, shift = channel_hash((tl.program_id(0) + first_head) * HEAD_STRIDE + position)
    place = table + tl.program_id(0) * LENGTH + position
    tl.store(place, multiplier.to(tl.int32, bitcast=True))
    tl.store(place + heads * LENGTH, shift.to(tl.int32, bitcast=True))
