"""LAMB of whole matrices whose direction is an orthogonalised momentum, on any device.

Muon (Jordan et al. 2024; at scale in 2502.16982): Nesterov's momentum is brought near the
orthogonal matrix next to it, so that all its singular directions move the weights alike. Matrices
of one shape are worked on together.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import sqrt

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
    """Matrices of one shape in flat tensors, each held whole.

    starts: where each begins. decay: weight decay. scale: brings the root mean square of a direction
    to 0.2, about that of an Adam update (2502.16982), so that decay weighs the same against either.
    """

    starts: list[int]
    rows: int
    columns: int
    decay: float
    scale: float = field(init=False)

    def __post_init__(self) -> None:
        self.scale = 0.2 * sqrt(max(self.rows, self.columns))

    @property
    def numel(self) -> int:
        return self.rows * self.columns

    def slices(self) -> list[slice]:
        return [slice(at, at + self.numel) for at in self.starts]


@torch.no_grad()
def orthogonalise(x: Tensor) -> Tensor:
    """Newton-Schulz steps on matrices [n, rows, columns], in their precision; a zero one stays zero."""
    norm = torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True, dtype=torch.float32) * SPARE
    x = x * norm.clamp(min=1e-30).reciprocal().to(x.dtype)
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
    grad: Tensor, exp_avg: Tensor, table: MatrixTable, *, beta1: float, grad_scale: Tensor
) -> Tensor:
    """Momentum in place; Nesterov's, [n, rows, columns], is returned.

    Args:
        grad: flat [N], fp32 or lower. exp_avg: flat fp32 [N].
        grad_scale: fp32 scalar the gradient is multiplied by first. NaN: nothing is changed, and
            what is returned means nothing.
    """
    out = exp_avg.new_zeros(len(table.starts), table.rows, table.columns)
    if grad_scale.isnan():
        return out
    for x, at in zip(out, table.slices()):
        g, m = grad[at] * grad_scale, exp_avg[at]
        m.lerp_(g, 1 - beta1)
        x.view(-1).copy_(torch.lerp(m, g, 1 - beta1))
    return out


@torch.no_grad()
def matrix_norms(param: Tensor, direction: Tensor, table: MatrixTable) -> Tensor:
    """fp32 [2, n]: squared norms of the weights and of their updates, scale * direction + decay *
    weight. param: flat fp32 [N]. direction: [n, rows, columns]."""
    weights = [param[at] for at in table.slices()]
    updates = [_update(w, x, table) for w, x in zip(weights, direction)]
    return torch.stack([torch.stack([v.dot(v) for v in values]) for values in (weights, updates)])


@torch.no_grad()
def matrix_apply(
    param: Tensor, direction: Tensor, table: MatrixTable, rates: Tensor, low: Tensor | None = None
) -> None:
    """param -= rate * update, and its rounded copy into `low` if given. rates: [n]; a matrix whose
    rate is NaN is left as it is."""
    for at, x, rate in zip(table.slices(), direction, rates.tolist()):
        if rate == rate:
            param[at].sub_(_update(param[at], x, table), alpha=rate)
            if low is not None:
                low[at].copy_(param[at])


def _update(weight: Tensor, direction: Tensor, table: MatrixTable) -> Tensor:
    return direction.reshape(-1).float() * table.scale + table.decay * weight
