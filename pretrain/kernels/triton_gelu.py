"""GELU(x + bias), exact to fp32's rounding, in one pass over memory in each direction."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from pretrain.kernels.triton_gradients import collect
from pretrain.kernels.triton_hash import INTERPRETED

# Rows and columns that a program works on at a time, rows whose bias gradient it sums: the fastest
# of those tried on an H200.
ROWS, BLOCK, EACH = 2, 1024, 128


@triton.jit
def _reciprocal(x):
    if INTERPRETED:
        y = 1.0 / x
    else:  # without the scaling that keeps denormals
        y = tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    return y


@triton.jit
def _exp2(x):
    if INTERPRETED:
        y = tl.exp2(x)
    else:
        y = tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    return y


@triton.jit
def _tail(size):
    """(a, g) of |x|: g = exp(-x^2 / 2), and a g is what the normal distribution has above |x|.

    By Abramowitz & Stegun 7.1.26 (absolute error 1.5e-7, that of fp32), with a fast reciprocal and
    exponential: GELU's arithmetic is what bounds it on fast memory.
    """
    t = _reciprocal(1.0 + 0.2316418878 * size)
    a = t * (
        0.127414796
        + t * (-0.142248368 + t * (0.7107068705 + t * (-0.7265760135 + t * 0.5307027145)))
    )
    root = 0.8493218003 * size
    return a, _exp2(-(root * root))


@triton.jit
def gelu(x):
    size = tl.abs(x)
    a, g = _tail(size)
    return tl.maximum(x, 0.0) - size * (a * g)


@triton.jit
def gelu_slope(x):
    """Its derivative."""
    size = tl.abs(x)
    a, g = _tail(size)
    above = g * (0.3989422804 * size - a)
    return tl.where(x > 0, 1.0 + above, -above)


@triton.jit
def _gelu_forward(x, bias, y, tokens, C: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    valid = (row[:, None] < tokens) & (column[None, :] < C)
    offset = row[:, None] * C + column[None, :]
    b = tl.load(bias + column, mask=column < C, other=0.0).to(tl.float32)
    z = tl.load(x + offset, mask=valid, other=0.0).to(tl.float32) + b[None, :]
    tl.store(y + offset, gelu(z).to(y.dtype.element_ty), mask=valid)


@triton.jit
def _gelu_backward(
    grad, x, bias, grad_x, partial, tokens, each,
    C: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    b = tl.load(bias + column, mask=column < C, other=0.0).to(tl.float32)
    sums = tl.zeros([BLOCK], tl.float32)
    first = tl.program_id(0).to(tl.int64) * each
    for start in range(0, each, ROWS):
        row = first + start + tl.arange(0, ROWS)
        valid = (row[:, None] < tokens) & (column[None, :] < C)
        offset = row[:, None] * C + column[None, :]
        z = tl.load(x + offset, mask=valid, other=0.0).to(tl.float32) + b[None, :]
        dy = tl.load(grad + offset, mask=valid, other=0.0).to(tl.float32)
        dz = dy * gelu_slope(z)
        tl.store(grad_x + offset, dz.to(grad_x.dtype.element_ty), mask=valid)
        sums += tl.sum(dz, 0)
    tl.store(partial + tl.program_id(0) * C + column, sums, mask=column < C)


class _BiasGelu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x, bias):
        tokens, channels = x.shape
        y = torch.empty_like(x)
        grid = (triton.cdiv(tokens, ROWS), triton.cdiv(channels, BLOCK))
        _gelu_forward[grid](x, bias, y, tokens, C=channels, ROWS=ROWS, BLOCK=BLOCK, num_warps=4)
        ctx.save_for_backward(x, bias)
        ctx.bias = bias
        return y

    @staticmethod
    def backward(ctx: Any, grad):
        x, bias = ctx.saved_tensors
        tokens, channels = x.shape
        chunks = triton.cdiv(tokens, EACH)
        partial = torch.empty(chunks, channels, dtype=torch.float32, device=x.device)
        grad_x = torch.empty_like(x)
        _gelu_backward[(chunks, triton.cdiv(channels, BLOCK))](
            grad.contiguous(), x, bias, grad_x, partial, tokens, EACH,
            C=channels, ROWS=ROWS, BLOCK=BLOCK, num_warps=4,
        )  # fmt: skip
        return grad_x, *collect(partial, ctx.bias)


def bias_gelu(x, bias):
    """See `plain.bias_gelu`."""
    return _BiasGelu.apply(x.contiguous(), bias)
