"""Matrix products through cuBLAS, whose backward pass adds where autograd would add afterwards.

The weight gradient goes into `weight.main_grad` (fp32, set by the engine) inside the product,
which saves writing, reading and adding it in low precision: 12 bytes a parameter become 8. The
residual's gradient is added inside the product that gives the input's. Under tensor parallelism
collectives run beside products: the input's gradient travels while the weight's is computed, and
a sum over ranks starts with the first rows of its product.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from pretrain.kernels import exchanged
from pretrain.kernels.triton_gradients import weight_gradient, weight_gradients

PARTS, PART_ROWS = 4, 2048  # a product's sum over ranks leaves in at most 4 parts, none smaller


@triton.jit
def _turn(x, y, n, k, TILE: tl.constexpr):
    row = tl.program_id(0) * TILE + tl.arange(0, TILE)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    valid = (row[:, None] < n) & (column[None, :] < k)
    tile = tl.load(x + row.to(tl.int64)[:, None] * k + column[None, :], mask=valid)
    valid = (column[:, None] < k) & (row[None, :] < n)
    tl.store(y + column.to(tl.int64)[:, None] * n + row[None, :], tl.trans(tile), mask=valid)


def _turned(weight: Tensor) -> Tensor:
    """weight [n, k] -> weight^T, contiguous."""
    (n, k), weight = weight.shape, weight.detach().contiguous()
    turned = weight.new_empty(k, n)
    _turn[(triton.cdiv(n, 64), triton.cdiv(k, 64))](weight, turned, n, k, TILE=64, num_warps=4)
    return turned


def _input_gradient(grad: Tensor, weight: Tensor) -> Tensor:
    """grad weight. A result wider than grad goes through the turned weight: cuBLAS is a sixth
    faster with the operands of a forward product, turning takes far less."""
    if weight.shape[1] > weight.shape[0]:
        return F.linear(grad, _turned(weight))
    return grad @ weight


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, fork: bool, group: Any = None
    ):
        ctx.save_for_backward(x, weight)
        ctx.weight, ctx.group = weight, group
        ctx.has_bias = bias is not None and bias.requires_grad
        y = x @ weight.t() if bias is None else torch.addmm(bias, x, weight.t())
        return (y, x.view_as(x)) if fork else y

    @staticmethod
    def backward(ctx: Any, grad: Tensor, beside: Tensor | None = None):
        x, weight = ctx.saved_tensors
        grad_x = sent = None
        if ctx.needs_input_grad[0]:
            # `beside` has been used up by everything else when this runs: it is ours to overwrite.
            # It is alike on all ranks of a group: one of them brings it into the sum.
            if ctx.group is not None and ctx.group.rank() > 0:
                beside = None
            grad_x = (
                _input_gradient(grad, weight) if beside is None else beside.addmm_(grad, weight)
            )
            if ctx.group is not None:
                sent = dist.all_reduce(grad_x, group=ctx.group, async_op=True)
        grad_weight = weight_gradient(ctx.weight, grad, x) if ctx.needs_input_grad[1] else None
        if sent is not None:
            sent.wait()
        return grad_x, grad_weight, grad.sum(0) if ctx.has_bias else None, None, None


class _SummedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, group: Any):
        ctx.save_for_backward(x, weight)
        ctx.weight = weight
        y = x.new_empty(x.shape[0], weight.shape[0])
        parts = max(1, min(PARTS, x.shape[0] // PART_ROWS))
        sent = []
        for rows, out in zip(x.tensor_split(parts), y.tensor_split(parts)):
            torch.mm(rows, weight.t(), out=out)
            sent.append(dist.all_reduce(out, group=group, async_op=True))
        for work in sent:
            work.wait()
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor):
        x, weight = ctx.saved_tensors
        grad_x = _input_gradient(grad, weight) if ctx.needs_input_grad[0] else None
        grad_weight = weight_gradient(ctx.weight, grad, x) if ctx.needs_input_grad[1] else None
        return grad_x, grad_weight, None


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, group: Any = None) -> Tensor:
    """See `plain.linear`."""
    return _Linear.apply(x, weight, bias, False, group)


def forked_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, group: Any = None
) -> tuple[Tensor, Tensor]:
    """See `plain.forked_linear`. The gradient that comes to the second result is overwritten."""
    return _Linear.apply(x, weight, bias, True, group)


def summed_linear(x: Tensor, weight: Tensor, group: Any) -> Tensor:
    """See `plain.summed_linear`."""
    return _SummedLinear.apply(x, weight, group)


def gathered_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, exchange: Any
) -> tuple[Tensor, Tensor]:
    """See `plain.gathered_linear`. The gradient that comes to the second result is overwritten."""
    return exchanged.gathered_linear(x, weight, bias, exchange, weight_gradients)


def scattered_linear(x: Tensor, weight: Tensor, exchange: Any) -> Tensor:
    """See `plain.scattered_linear`."""
    return exchanged.scattered_linear(x, weight, exchange, weight_gradients)
