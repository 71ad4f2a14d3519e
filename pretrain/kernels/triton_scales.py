"""Powers of two as scales of e4m3 values."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def power_of_two(largest):
    """The smallest power of two s with largest / s <= 448, e4m3's largest value."""
    bits = (tl.maximum(largest, 1e-20) * (1.0 / 448.0)).to(tl.int32, bitcast=True)
    return ((bits + 0x7FFFFF) & 0x7F800000).to(tl.float32, bitcast=True)
