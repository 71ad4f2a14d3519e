"""Linear layers with 8-bit products (e4m3, 2209.05433), for `train.precision: fp8`.

Forward products of wide layers (qkv and both of the MLP) and the input gradients of the MLP's run
in e4m3 with one scale for each token and each output channel, found from the values themselves, so
there is no history to keep or to lose. Weight gradients, the square output projection (whose gain
is less than the cost of rounding its input), the heads and everything between stay in bf16.
GELU hands its result and its gradient on in 8 bits as well, which saves a pass over memory.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import triton
import triton.language as tl
from torch import Tensor

from pretrain.kernels.triton_gradients import collect, weight_gradient
from pretrain.kernels.triton_pointwise import _normal

E4M3_LARGEST: tl.constexpr = tl.constexpr(448.0)


@triton.jit
def _store_rows(values, place, scales, row, valid):
    """Rounds fp32 [BLOCK] of one row to e4m3 with a scale of its own."""
    scale = tl.maximum(tl.max(tl.abs(values), 0), 1e-12) / E4M3_LARGEST
    tl.store(place, (values / scale).to(tl.float8e4nv), mask=valid)
    tl.store(scales + row, scale)


@triton.jit
def _quantise(x, y, scales, K: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    at = row.to(tl.int64) * K + column
    values = tl.load(x + at, mask=column < K, other=0.0).to(tl.float32)
    _store_rows(values, y + at, scales, row, column < K)


@triton.jit
def _gelu_forward8(x, bias, y, y8, scales, C: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    valid = column < C
    at = row.to(tl.int64) * C + column
    z = tl.load(x + at, mask=valid, other=0.0).to(tl.float32)
    z += tl.load(bias + column, mask=valid, other=0.0).to(tl.float32)
    below, _ = _normal(z)
    result = z * below
    tl.store(y + at, result.to(y.dtype.element_ty), mask=valid)
    _store_rows(result, y8 + at, scales, row, valid)


@triton.jit
def _gelu_backward8(
    grad,
    x,
    bias,
    grad_x,
    grad8,
    scales,
    partial,
    tokens,
    each,
    C: tl.constexpr,
    BLOCK: tl.constexpr,
):
    column = tl.arange(0, BLOCK)
    valid = column < C
    b = tl.load(bias + column, mask=valid, other=0.0).to(tl.float32)
    sums = tl.zeros([BLOCK], tl.float32)
    first = tl.program_id(0) * each
    for row in range(first, tl.minimum(first + each, tokens)):
        at = (tl.full([], 0, tl.int64) + row) * C + column
        z = tl.load(x + at, mask=valid, other=0.0).to(tl.float32) + b
        dy = tl.load(grad + at, mask=valid, other=0.0).to(tl.float32)
        below, density = _normal(z)
        dz = dy * (below + z * density)
        tl.store(grad_x + at, dz.to(grad_x.dtype.element_ty), mask=valid)
        _store_rows(dz, grad8 + at, scales, row, valid)
        sums += dz
    tl.store(partial + tl.program_id(0) * C + column, sums, mask=valid)


def _warps(block: int) -> int:
    return max(1, min(8, block // 512))


def _empty8(x: Tensor) -> tuple[Tensor, Tensor]:
    scales = torch.empty(x.shape[0], 1, dtype=torch.float32, device=x.device)
    return torch.empty_like(x, dtype=torch.float8_e4m3fn), scales


def quantise(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [n, k] -> (e4m3 [n, k], scale of each row fp32 [n, 1])."""
    y, scales = _empty8(x)
    block = triton.next_power_of_2(x.shape[1])
    _quantise[(x.shape[0],)](x, y, scales, K=x.shape[1], BLOCK=block, num_warps=_warps(block))
    return y, scales


def _product(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor], dtype: torch.dtype, bias=None):
    """a [n, k] times b [m, k]^T, both e4m3 with scales of their rows."""
    return torch._scaled_mm(
        a[0], b[0].t(), a[1], b[1].t(), bias=bias, out_dtype=dtype, use_fast_accum=True
    )


def _rounded(x: Tensor) -> tuple[Tensor, Tensor]:
    """The 8-bit version that the kernel before left with x, or made here."""
    found = getattr(x, "eight", None)
    return quantise(x) if found is None else found


def _pays(x: Tensor, weight: Tensor, ratio: int) -> bool:
    sizes = (*weight.shape, x.shape[0])
    return max(weight.shape) >= ratio * min(weight.shape) and all(n % 16 == 0 for n in sizes)


class _Linear8(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        eight: Any,
        weight: Tensor,
        bias: Tensor | None,
        fork: bool,
        group: Any = None,
    ):
        ctx.save_for_backward(x, weight)
        ctx.group = group
        ctx.has_bias = bias is not None and bias.requires_grad
        if _pays(x, weight, 2):
            y = _product(eight or quantise(x), quantise(weight), x.dtype, bias)
        else:
            y = x @ weight.t() if bias is None else torch.addmm(bias, x, weight.t())
        return (y, x.view_as(x)) if fork else y

    @staticmethod
    def backward(ctx: Any, grad: Tensor, beside: Tensor | None = None):
        x, weight = ctx.saved_tensors
        if ctx.group is not None and ctx.group.rank() > 0:
            beside = None  # alike on all ranks: one of them brings it into the sum
        if _pays(x, weight, 4):
            across = quantise(weight.t().contiguous())
            grad_x = _product(_rounded(grad), across, grad.dtype)
            grad_x = grad_x if beside is None else beside.add_(grad_x)
        else:
            grad_x = grad @ weight if beside is None else beside.addmm_(grad, weight)
        sent = None
        if ctx.group is not None:
            sent = dist.all_reduce(grad_x, group=ctx.group, async_op=True)
        grad_weight = weight_gradient(weight, grad, x) if ctx.needs_input_grad[2] else None
        if sent is not None:
            sent.wait()
        return grad_x, None, grad_weight, grad.sum(0) if ctx.has_bias else None, None, None


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, group: Any = None) -> Tensor:
    """See `plain.linear`."""
    return _Linear8.apply(x, getattr(x, "eight", None), weight, bias, False, group)


def forked_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, group: Any = None
) -> tuple[Tensor, Tensor]:
    """See `plain.forked_linear`."""
    return _Linear8.apply(x, getattr(x, "eight", None), weight, bias, True, group)


def summed_linear(x: Tensor, weight: Tensor, group: Any) -> Tensor:
    """See `plain.summed_linear`."""
    from megatron.core.tensor_parallel import mappings

    return mappings.reduce_from_tensor_model_parallel_region(linear(x, weight), group=group)


class _BiasGelu8(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor):
        y, (y8, scales) = torch.empty_like(x), _empty8(x)
        block = triton.next_power_of_2(x.shape[1])
        _gelu_forward8[(x.shape[0],)](
            x, bias, y, y8, scales, C=x.shape[1], BLOCK=block, num_warps=_warps(block)
        )
        ctx.save_for_backward(x, bias)
        ctx.bias = bias
        ctx.mark_non_differentiable(y8, scales)
        return y, y8, scales

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Any):
        x, bias = ctx.saved_tensors
        tokens, channels = x.shape
        each = 32
        programs = triton.cdiv(tokens, each)
        partial = torch.empty(programs, channels, dtype=torch.float32, device=x.device)
        grad_x, eight = torch.empty_like(x), _empty8(x)
        block = triton.next_power_of_2(channels)
        _gelu_backward8[(programs,)](
            grad.contiguous(), x, bias, grad_x, *eight, partial, tokens, each,
            C=channels, BLOCK=block, num_warps=_warps(block),
        )  # fmt: skip
        grad_x.eight = eight  # type: ignore[attr-defined]
        return grad_x, *collect(partial, ctx.bias)


def bias_gelu(x: Tensor, bias: Tensor) -> Tensor:
    """See `plain.bias_gelu`."""
    y, *eight = _BiasGelu8.apply(x.contiguous(), bias)
    y.eight = tuple(eight)
    return y
