"""Matrix products through cuBLAS, whose backward pass adds where autograd would add afterwards.

The weight gradient goes into `weight.main_grad` (fp32, set by the engine) inside the product,
which saves writing, reading and adding it in low precision: 12 bytes a parameter become 8. The
residual's gradient is added inside the product that gives the input's.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pretrain.kernels.triton_gradients import weight_gradient


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, fork: bool):
        ctx.save_for_backward(x, weight)
        ctx.fork = fork
        ctx.has_bias = bias is not None and bias.requires_grad
        y = x @ weight.t() if bias is None else torch.addmm(bias, x, weight.t())
        return (y, x.view_as(x)) if fork else y

    @staticmethod
    def backward(ctx: Any, grad: Tensor, beside: Tensor | None = None):
        x, weight = ctx.saved_tensors
        grad_x = None
        if ctx.needs_input_grad[0]:
            # `beside` has been used up by everything else when this runs: it is ours to overwrite.
            grad_x = grad @ weight if beside is None else beside.addmm_(grad, weight)
        grad_weight = weight_gradient(weight, grad, x) if ctx.needs_input_grad[1] else None
        return grad_x, grad_weight, grad.sum(0) if ctx.has_bias else None, None


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """See `plain.linear`."""
    return _Linear.apply(x, weight, bias, False)


def forked_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """See `plain.forked_linear`. The gradient that comes to the second result is overwritten."""
    return _Linear.apply(x, weight, bias, True)
