"""GELU(x + bias) between two 8-bit products: read once, written in 8 bits alone, both ways round.

Rows for the product over features, columns for the weight gradient, in one pass. The results that
autograd sees are placeholders without memory that read as NaN.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from pretrain.kernels import triton_gelu
from pretrain.kernels.triton_fp8_rounding import Eight
from pretrain.kernels.triton_gelu import gelu, gelu_slope
from pretrain.kernels.triton_gradients import collect
from pretrain.kernels.triton_scales import power_of_two

# A product of rounded operands (each within 1/16) can exceed the bound of the exact ones.
ROUNDING: tl.constexpr = tl.constexpr(1.13)
STEEPEST: tl.constexpr = tl.constexpr(1.13)  # largest derivative of GELU
ROWS, COLUMNS = 64, 64  # of a tile: the fastest of those tried on an H200


@triton.jit
def _gelu8(
    grad, x, bias, norms, peak, weight_peak, bias_peak, y, stats, across, across_scale, partial,
    tokens, C: tl.constexpr, BACK: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    there = row < tokens
    valid = there[:, None] & (column[None, :] < C)
    at = row.to(tl.int64)[:, None] * C + column[None, :]
    z = tl.load(x + at, mask=valid, other=0.0).to(tl.float32)
    # Spread out in memory, not in registers: else the compiler does all this twice, once for each
    # way round, instead of turning the rounded values.
    spread = tl.broadcast_to(bias + column[None, :], [ROWS, COLUMNS])
    z += tl.load(spread, mask=valid, other=0.0).to(tl.float32)
    share = tl.load(weight_peak) * ROUNDING
    if BACK:
        share *= STEEPEST
        more = 0.0
        z = tl.load(grad + at, mask=valid, other=0.0).to(tl.float32) * gelu_slope(z)
        tl.store(partial + tl.program_id(0) * C + column, tl.sum(z, 0), mask=column < C)
    else:
        more = tl.load(bias_peak).to(tl.float32)
        z = gelu(z)
    whole = power_of_two(tl.load(peak) * share + more)
    scale = power_of_two(tl.load(norms + row, mask=there, other=0.0) * share + more)
    # Rounded apart for each way round, also where the scales are alike: of one rounding that is
    # stored both ways, ptxas 12.8 moves some bytes before it has made them.
    tl.store(y + at, (z * (1.0 / scale)[:, None]).to(tl.float8e4nv), mask=valid)
    rounded = (z * (1.0 / whole)).to(tl.float8e4nv)
    if tl.program_id(1) == 0:
        tl.store(stats + row, scale, mask=there)
    if (tl.program_id(0) == 0) & (tl.program_id(1) == 0):
        tl.store(across_scale, whole)
    at = column.to(tl.int64)[:, None] * tokens + row[None, :]
    tl.store(across + at, tl.trans(rounded), mask=(column[:, None] < C) & there[None, :])


def _run(grad: Tensor | None, x: Tensor, bias: Tensor, bounds: Any) -> tuple[Eight, Tensor | None]:
    """GELU, or with `grad` its gradient and the partial sums of the bias's."""
    tokens, channels = x.shape
    f32: dict[str, Any] = {"dtype": torch.float32, "device": x.device}
    e4m3: dict[str, Any] = {"dtype": torch.float8_e4m3fn, "device": x.device}
    y, across = torch.empty(tokens, channels, **e4m3), torch.empty(channels, tokens, **e4m3)
    stats, scale = torch.empty(2, tokens, **f32), torch.empty(1, **f32)
    programs = triton.cdiv(tokens, ROWS)
    partial = None if grad is None else torch.empty(programs, channels, **f32)
    bias_peak = scale if grad is not None else bias.abs().amax()
    _gelu8[(programs, triton.cdiv(channels, COLUMNS))](
        x if grad is None else grad, x, bias, *bounds, bias_peak, y, stats, across, scale,
        scale if partial is None else partial, tokens,
        C=channels, BACK=grad is not None, ROWS=ROWS, COLUMNS=COLUMNS, num_warps=4,
    )  # fmt: skip
    return Eight(y, stats, None, (across, scale)), partial


class _BiasGelu8(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor, bounds: Any):
        ctx.save_for_backward(x, bias)
        ctx.bias = bias
        ctx.set_materialize_grads(False)
        eight, _ = _run(None, x, bias, bounds)
        kept = (eight.values, eight.stats, *(eight.across or ()))
        ctx.mark_non_differentiable(*kept)
        return placeholder(x), *kept

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Any):
        x, bias = ctx.saved_tensors
        bounds = getattr(grad, "bounds", None)
        if bounds is None:
            norms = grad.abs().amax(1).float()
            bounds = (norms, norms.amax(), torch.ones_like(norms[0]))
        eight, partial = _run(grad.contiguous(), x, bias, bounds)
        grad_x = placeholder(x)
        grad_x.eight = eight  # type: ignore[attr-defined]
        return grad_x, *collect(partial, ctx.bias), None


_NOTHING: dict[Any, Tensor] = {}


def placeholder(x: Tensor) -> Tensor:
    """Of the shape of x, without memory: NaN wherever it is read."""
    key = (x.dtype, x.device)
    if key not in _NOTHING:
        _NOTHING[key] = torch.full((), float("nan"), dtype=x.dtype, device=x.device)
    return x.new_empty(0).set_(_NOTHING[key].untyped_storage(), 0, x.shape, (0,) * x.dim())


def bias_gelu(x: Tensor, bias: Tensor) -> Tensor:
    """See `plain.bias_gelu`."""
    bounds = getattr(x, "bounds", None)
    if bounds is None:
        return triton_gelu.bias_gelu(x, bias)
    y, values, stats, *across = _BiasGelu8.apply(x, bias, bounds)
    y.eight = Eight(values, stats, None, (across[0], across[1]))
    return y
