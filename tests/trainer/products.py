"""The fused tensor-parallel products beside the plain ones, run by the processes that tests start."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

TOKENS, HIDDEN, INNER = 10, 6, 8


def products(kernels: Any) -> list[torch.Tensor]:
    """Column product with the residual beside it, row product: results and every gradient."""
    group, rank = dist.group.WORLD, dist.get_rank()
    generator = torch.Generator().manual_seed(1)
    draw = [torch.randn(*s, generator=generator, dtype=torch.float64) for s in _SHAPES]
    x = draw[0].requires_grad_()
    half = INNER // 2
    first = draw[1][rank * half : (rank + 1) * half].clone().requires_grad_()
    second = draw[2][:, rank * half : (rank + 1) * half].clone().requires_grad_()
    y, residual = kernels.forked_linear(x, first, None, group)
    z = kernels.summed_linear(y.sin(), second, group)
    out = kernels.linear(z, first, None, group)
    # What comes after the sums is alike on all ranks, as in the model.
    loss = (z * draw[3]).sum() + (residual * draw[4]).sum()
    ((out * draw[5][:, rank * half : (rank + 1) * half]).sum() + loss).backward()
    return [z.detach(), out.detach(), x.grad, first.grad, second.grad]


_SHAPES = [(TOKENS, HIDDEN), (INNER, HIDDEN), (HIDDEN, INNER), (TOKENS, HIDDEN),
           (TOKENS, HIDDEN), (TOKENS, INNER)]  # fmt: skip


def both() -> list[tuple[list, list]]:
    """(plain, fused), the fused sum in one part and in three."""
    from pretrain.kernels import plain, triton_linear

    out = []
    for triton_linear.PARTS, triton_linear.PART_ROWS in ((1, 1), (3, 1)):
        out.append((products(plain), products(triton_linear)))
    return out
