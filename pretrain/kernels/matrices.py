"""LAMB of whole matrices whose direction is an orthogonalised momentum, on any device.

Muon (Jordan et al. 2024; at scale in 2502.16982): Nesterov's momentum is brought near the
orthogonal matrix next to it, so that all its singular directions move the weights alike.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

# Odd polynomials a s + b s^3 + c s^5 of the singular values, one after the other: each is the closest
# to 1 on what the one before leaves of 0.003 .. 1 (the greedy optimum of 2505.16932, by linear
# programming), with 1% to spare at the upper end, beyond which they diverge, for rounding. They bring
# 0.005 .. 1 to 0.78 .. 1.22; Jordan's one polynomial takes five steps to 0.68 .. 1.2.
POLYNOMIALS = (
    (8.3019, -24.0424, 17.4699),
    (4.0103, -2.9290, 0.5430),
    (3.5027, -2.5773, 0.5049),
    (2.5229, -1.8395, 0.4272),
)
SPARE = 1.01


@dataclass
class MatrixTable:
    """Slices of matrices in the flat tensors of the optimiser, and in the flat one of directions.

    starts, numels: of each slice in the former; places: where it begins in the latter. decays: weight
    decay. scales: what the direction is multiplied by.
    """

    starts: list[int]
    numels: list[int]
    places: list[int]
    decays: list[float]
    scales: list[float]

    def slices(self) -> Iterator[tuple[slice, slice]]:
        """(in the optimiser's tensors, in the directions) of each."""
        for start, numel, place in zip(self.starts, self.numels, self.places):
            yield slice(start, start + numel), slice(place, place + numel)


@torch.no_grad()
def orthogonalise(x: Tensor) -> Tensor:
    """Matrices [n, rows, columns] with their singular values brought near 1 by Newton-Schulz steps, in
    their own precision; a zero one stays zero."""
    # In fp64: squares of vanishing gradients are zero in fp32, and with too small a norm it diverges.
    norm = torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True, dtype=torch.float64) * SPARE
    x = x * norm.clamp(min=1e-37).reciprocal().to(x.dtype)
    tall = x.shape[1] > x.shape[2]
    for a, b, c in POLYNOMIALS:
        gram = x.mT @ x if tall else x @ x.mT
        factor = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        # On the diagonal and not as another term of the product, which would read all of x again.
        factor.diagonal(dim1=1, dim2=2).add_(a)
        x = x @ factor if tall else factor @ x
    return x


@torch.no_grad()
def matrix_momentum(
    grad: Tensor,
    exp_avg: Tensor,
    table: MatrixTable,
    out: Tensor,
    *,
    beta1: float,
    grad_scale: Tensor,
) -> None:
    """Momentum in place, Nesterov's into `out`.

    Args:
        grad: flat [N], fp32 or lower. exp_avg: flat fp32 [N]. out: flat, of directions.
        grad_scale: fp32 scalar the gradient is multiplied by first. NaN: nothing is changed.
    """
    if grad_scale.isnan():
        return
    for at, place in table.slices():
        g, m = grad[at] * grad_scale, exp_avg[at]
        m.lerp_(g, 1 - beta1)
        out[place] = torch.lerp(m, g, 1 - beta1)


@torch.no_grad()
def matrix_norms(param: Tensor, direction: Tensor, table: MatrixTable) -> Tensor:
    """fp32 [2, slices]: squared norms of the weights and of their updates, scale * direction + decay *
    weight. param: flat fp32 [N]."""
    norms = param.new_zeros(2, len(table.starts))
    for i, (weight, update) in enumerate(_updates(param, direction, table)):
        norms[0, i], norms[1, i] = weight.dot(weight), update.dot(update)
    return norms


@torch.no_grad()
def matrix_apply(
    param: Tensor, direction: Tensor, table: MatrixTable, rates: Tensor, low: Tensor | None = None
) -> None:
    """param -= rate * update, and its rounded copy into `low` if given. rates: [slices]; one whose
    rate is NaN is left as it is."""
    updates = _updates(param, direction, table)
    for (at, _), (weight, update), rate in zip(table.slices(), updates, rates.tolist()):
        if rate == rate:
            weight.sub_(update, alpha=rate)
            if low is not None:
                low[at].copy_(weight)


def _updates(
    param: Tensor, direction: Tensor, table: MatrixTable
) -> Iterator[tuple[Tensor, Tensor]]:
    """(weight, update) of each slice; the weight is a view."""
    for (at, place), decay, scale in zip(table.slices(), table.decays, table.scales):
        yield param[at], direction[place].to(param.dtype) * scale + decay * param[at]
