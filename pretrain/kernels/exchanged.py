"""The products of sequence parallelism, in pieces that let the tokens of others come and go meanwhile.

A product starts with the tokens at hand. Where it ends in a sum over ranks, what others get comes
first and travels while this rank multiplies its own. The gathered input of a column layer is not
kept: it is gathered again in the backward pass, while its gradients are made (2205.05198, 4.2.2).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

# (weight, pairs (grad, x)) -> sum of grad^T x, or None where it went into the weight's main_grad.
WeightGradient = Callable[[Tensor, Iterable[tuple[Tensor, Tensor]]], Tensor | None]
PARTS = 2  # pieces that the tokens of one of two ranks leave in


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, exchange: Any, rule: Any
    ) -> tuple[Tensor, Tensor]:
        out = x.new_empty(x.shape[0] * exchange.n, weight.shape[0])

        def product(which: slice, rows: Tensor) -> None:
            if bias is None:
                torch.mm(rows, weight.t(), out=out[which])
            else:
                torch.addmm(bias, rows, weight.t(), out=out[which])

        coming = exchange.gather(x)
        product(exchange.own(x.shape[0]), x)
        for which, rows in coming.each():
            product(which, rows)
        ctx.save_for_backward(x, weight)
        ctx.set_materialize_grads(False)
        ctx.weight, ctx.exchange, ctx.rule = weight, exchange, rule
        ctx.has_bias = bias is not None and bias.requires_grad
        return out, x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor, beside: Tensor | None):
        x, weight = ctx.saved_tensors
        exchange, t = ctx.exchange, x.shape[0]
        grad = grad.contiguous()
        coming = exchange.gather(x)
        sums = exchange.sums(x, t, x.shape[1])
        _send(sums, exchange, grad, weight, t)
        pairs = ((grad[which], rows) for which, rows in coming.pieces(x))
        grad_weight = ctx.rule(ctx.weight, pairs)
        own = grad[exchange.own(t)]
        # `beside` has been used up by everything else when this runs: it is ours to overwrite.
        own = own @ weight if beside is None else beside.addmm_(own, weight)
        grad_bias = grad.sum(0) if ctx.has_bias else None
        return sums.total(own), grad_weight, grad_bias, None, None


class _Scattered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, exchange: Any, rule: Any) -> Tensor:
        t = x.shape[0] // exchange.n
        sums = exchange.sums(x, t, weight.shape[0])
        _send(sums, exchange, x, weight.t(), t, PARTS if exchange.n == 2 else 1)
        ctx.save_for_backward(x, weight)
        ctx.weight, ctx.exchange, ctx.rule = weight, exchange, rule
        torch.mm(x[exchange.own(t)], weight.t(), out=sums.place())
        return sums.collected()

    @staticmethod
    def backward(ctx: Any, grad: Tensor):
        x, weight = ctx.saved_tensors
        exchange = ctx.exchange
        grad = (grad if grad.dim() == 2 else grad[0]).contiguous()  # alike for all that is added up
        grad_x = torch.empty_like(x)

        def product(which: slice, rows: Tensor) -> None:
            torch.mm(rows, weight, out=grad_x[which])

        coming = exchange.gather(grad)
        product(exchange.own(grad.shape[0]), grad)
        pairs = ((rows, x[which]) for which, rows in coming.pieces(grad, product))
        return grad_x, ctx.rule(ctx.weight, pairs), None, None


def _send(sums: Any, exchange: Any, x: Tensor, weight: Tensor, t: int, parts: int = 1) -> None:
    """x [T, k] times weight [k, width]: to each other rank what belongs to its tokens."""
    for first, end in reversed(exchange.blocks):
        for rows in x[first * t : end * t].tensor_split(parts):
            made = rows @ weight
            pieces = made.chunk(end - first)
            for rank in exchange.ranks(first, end):
                sums.send(rank, pieces[rank - first])


def gathered_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, exchange: Any, rule: WeightGradient
) -> tuple[Tensor, Tensor]:
    """(the gathered x [T, in] times weight^T + bias, x [t, in]): for an input that goes on beside the
    product, as a residual. The gradient that comes to the second result is overwritten."""
    return _Gathered.apply(x.contiguous(), weight, bias, exchange, rule)


def scattered_linear(x: Tensor, weight: Tensor, exchange: Any, rule: WeightGradient) -> Tensor:
    """x [T, in] times weight^T, summed over the ranks: this rank's tokens [t, out] of it, or [n, t, out]
    that add up to them, which the next kernel has to do."""
    return _Scattered.apply(x, weight, exchange, rule)
