"""What other ranks computed for this one's tokens, added up in one pass over memory."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

Tensor = torch.Tensor
BLOCK = 4096


@triton.jit
def _add_parts(own, parts, numel, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    valid = at < numel
    total = tl.load(own + at, mask=valid, other=0.0).to(tl.float32)
    for part in tl.static_range(PARTS):
        total += tl.load(parts + part * numel + at, mask=valid, other=0.0).to(tl.float32)
    tl.store(own + at, total.to(own.dtype.element_ty), mask=valid)


def add_parts(own: Tensor, parts: Tensor) -> Tensor:
    """own [t, H] += the sum of parts [n, t, H] in fp32, rounded once. Returns own."""
    grid = (triton.cdiv(own.numel(), BLOCK),)
    _add_parts[grid](own, parts, own.numel(), PARTS=parts.shape[0], BLOCK=BLOCK, num_warps=8)
    return own
