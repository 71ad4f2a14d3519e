"""Collectives of sequence parallelism (2205.05198) on [T, H], with their gradients.

Megatron-core has the same, but allocates on the current GPU whatever the device of its input.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def _gather(x: Tensor, group: Any) -> Tensor:
    out = x.new_empty(x.shape[0] * group.size(), *x.shape[1:])
    dist.all_gather_into_tensor(out, x.contiguous(), group=group)
    return out


def _reduce_scatter(x: Tensor, group: Any) -> Tensor:
    out = x.new_empty(x.shape[0] // group.size(), *x.shape[1:])
    dist.reduce_scatter_tensor(out, x.contiguous(), group=group)
    return out


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any, alike: bool) -> Tensor:
        ctx.group, ctx.alike = group, alike
        return _gather(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        group = ctx.group
        if not ctx.alike:
            return _reduce_scatter(grad, group), None, None
        size = grad.shape[0] // group.size()
        return grad[group.rank() * size : (group.rank() + 1) * size].contiguous(), None, None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return _reduce_scatter(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _gather(grad, ctx.group), None


def gather_tokens(x: Tensor, group: Any, alike: bool = False) -> Tensor:
    """[T / tp, H] of every rank -> [T, H]. alike: what follows is computed equally on every rank,
    so that its gradient is whole everywhere and only needs cutting; else gradients are summed."""
    return _Gather.apply(x, group, alike)


def reduce_scatter_tokens(x: Tensor, group: Any) -> Tensor:
    """Sum over ranks of [T, H], each keeping its T / tp tokens."""
    return _ReduceScatter.apply(x, group)
