"""LAMB on flat, sharded tensors, exact per logical tensor for any ZeRO stage and tensor parallelism.

A rank holds slices of tensors (pretrain.parallel.slices). Trust ratios need the norms of whole
tensors: squared norms are taken per slice, added up per piece, and all-reduced over the ranks
that hold the other parts: two small collectives an update (this one and the gradient norm).
On a GPU the two passes over memory are fused kernels; the same code runs them on a CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from configs.schema import OptimizerConfig
from pretrain.kernels.plain import LambTable
from pretrain.optim.orthogonal import Matrices
from pretrain.parallel.groups import Groups
from pretrain.parallel.pieces import Piece
from pretrain.parallel.slices import Shard, Slice

_BLOCK = 1 << 16


class Verdict(Protocol):
    """Whether an update is applied, alike on all ranks. The device knows first, so that the whole
    update is launched before the host waits to hear of it."""

    def asked(self, norm: Tensor) -> Tensor:
        """A bool scalar on the device. norm: of the global gradient, a scalar there."""

    def heard(self) -> bool:
        """The same on the host: waits for the device; may raise to end the training."""


class Finite:
    """Applies every update whose gradient norm is finite."""

    def asked(self, norm: Tensor) -> Tensor:
        self.finite = norm.isfinite()
        return self.finite

    def heard(self) -> bool:
        return bool(self.finite)


@dataclass
class Update:
    """What an update did. grad_norm: global, before it was limited; ratios: one per piece, on the
    device (None when skipped). skipped: the verdict was no and nothing was changed."""

    grad_norm: Tensor
    ratios: Tensor | None
    skipped: bool


class Lamb:
    """The optimiser of one rank. `steps` counts applied updates (for the bias correction)."""

    def __init__(
        self,
        pieces: list[Piece],
        shard: Shard,
        config: OptimizerConfig,
        groups: Groups,
        kernels: Any,
    ) -> None:
        self.shard, self.config, self.groups, self.kernels = shard, config, groups, kernels
        self.steps = 0
        device = shard.master.device
        slices = shard.slices
        self.matrices = Matrices(pieces, shard, config, groups, kernels)
        self.table = LambTable(
            [s.at for s in slices],
            [0 if i in self.matrices.held else s.numel for i, s in enumerate(slices)],
            [config.weight_decay if s.piece.decayed else 0.0 for s in slices],
        )
        self._piece_of = torch.tensor([s.index for s in slices], dtype=torch.int64, device=device)
        self._sharded = torch.tensor([p.sharded for p in pieces], device=device)
        adapted = [config.adapt_bias_and_norm or p.decayed for p in pieces]
        self._adapted = torch.tensor(adapted, device=device)
        # A replicated tensor is on every tensor-parallel rank but counts once in the global norm.
        once = [1.0 if s.piece.sharded else 1.0 / groups.tp for s in slices]
        self._once = torch.tensor(once, device=device)
        self._cuts, self._places = _cuts(shard)
        self._replicated = [i for i, s in enumerate(slices) if not s.piece.sharded]
        self._alike = _alike([slices[i] for i in self._replicated])

    @torch.no_grad()
    def step(
        self,
        grad: Tensor,
        lr: float,
        grad_scale: float = 1.0,
        low: Tensor | None = None,
        verdict: Verdict | None = None,
        then: Callable[[], None] = lambda: None,
    ) -> Update:
        """One update from the summed gradient.

        Args:
            grad: flat, laid out as the shard. grad_scale: it is multiplied by this first (1 / loss
                scale). low: flat low-precision copy of the masters that is written as well.
            verdict: `Finite` by default. then: launches what follows on the device, whether the
                update is applied or not.
        """
        c, shard, verdict = self.config, self.shard, verdict or Finite()
        views = self._views(grad)
        self._agree_on_replicas(views)
        norm = self._global_norm(views) * grad_scale
        limit = norm / c.max_grad_norm if c.max_grad_norm > 0 else torch.zeros_like(norm)
        # NaN tells the kernels to leave everything as it is.
        refused = ~verdict.asked(norm)
        multiplier = (grad_scale / limit.clamp(min=1.0)).masked_fill(refused, torch.nan)
        step = self.steps + 1
        corrections = {
            "correction1": 1 - c.beta1**step if c.bias_correction else 1.0,
            "correction2": 1 - c.beta2**step if c.bias_correction else 1.0,
        }
        state = (shard.exp_avg, shard.exp_avg_sq, self.table)
        parts = self.kernels.lamb_moments(
            shard.master,
            grad,
            *state,
            beta1=c.beta1,
            beta2=c.beta2,
            eps=c.eps,
            grad_scale=multiplier,
            **corrections,
        )
        direction = self.matrices.directions(grad, multiplier, parts)
        ratios = self._trust_ratios(parts).masked_fill(refused, torch.nan)
        by_slice = ratios[self._piece_of]
        self.kernels.lamb_apply(
            shard.master, *state, by_slice, lr=lr, eps=c.eps, low=low, **corrections
        )
        self.matrices.apply(direction, by_slice, lr, low)
        then()
        if not verdict.heard():
            return Update(norm, None, True)
        self.steps = step
        return Update(norm, ratios, False)

    def _views(self, grad: Tensor) -> list[Tensor]:
        """The slices of a flat tensor. Cut at once: hundreds of views made one by one, or a launch
        for each, take the host longer than the update takes a GPU."""
        parts = grad.split(self._cuts)
        return [parts[i] for i in self._places]

    def _agree_on_replicas(self, slices: list[Tensor]) -> None:
        """One gradient for the copies of a replicated tensor: the sum where each rank saw its own
        tokens (sequence parallelism), else the mean, so that copies never drift apart."""
        if self.groups.tp == 1 or not self._replicated:
            return
        views = [slices[i] for i in self._replicated]
        joined = torch.cat(views)
        for begin, end in self._alike:
            joined[begin:end].div_(self.groups.tp)
        dist.all_reduce(joined, group=self.groups.tp_group)
        torch._foreach_copy_(views, list(joined.split([v.numel() for v in views])))

    def _global_norm(self, views: list[Tensor]) -> Tensor:
        total = torch.zeros((), dtype=torch.float32, device=self.shard.master.device)
        if views:
            total = total + (_squares(views) * self._once).sum()
        self._sum(total, over_tp=True)
        return total.sqrt()

    def _trust_ratios(self, parts: Tensor) -> Tensor:
        c = self.config
        squares = parts.new_zeros(2, len(self._sharded)).index_add_(1, self._piece_of, parts)
        self._sum(squares, over_tp=False)
        if self.groups.tp > 1:
            over_tp = squares * self._sharded
            dist.all_reduce(over_tp, group=self.groups.tp_group)
            squares = torch.where(self._sharded, over_tp, squares)
        weight, update = squares.sqrt()
        ratios = (weight / update).clamp(min=c.trust_ratio_min)
        if c.trust_ratio_max > 0:
            ratios = ratios.clamp(max=c.trust_ratio_max)
        plain_step = (weight == 0) | (update == 0) | ~self._adapted
        return ratios.masked_fill(plain_step, 1.0)

    def _sum(self, x: Tensor, over_tp: bool) -> None:
        if self.groups.dp > 1 and not self.shard.whole:
            dist.all_reduce(x, group=self.groups.dp_group)
        if over_tp and self.groups.tp > 1:
            dist.all_reduce(x, group=self.groups.tp_group)


def _cuts(shard: Shard) -> tuple[list[int], list[int]]:
    """(sizes of pieces that cut a flat tensor into gaps and slices, which piece each slice is)."""
    sizes, places, at = [], [0] * len(shard.slices), 0
    for number in sorted(range(len(shard.slices)), key=lambda i: shard.slices[i].at):
        s = shard.slices[number]
        sizes += [s.at - at, s.numel]
        places[number] = len(sizes) - 1
        at = s.at + s.numel
    return [*sizes, shard.master.numel() - at], places


def _alike(slices: list[Slice]) -> list[tuple[int, int]]:
    """Where, in all these joined, lie gradients that every tensor-parallel rank made of all tokens."""
    out, at = [], 0
    for partial, group in groupby(
        slices, lambda s: getattr(s.piece.param, "sequence_partial", False)
    ):
        end = at + sum(s.numel for s in group)
        if not partial:
            out.append((at, end))
        at = end
    return out


def _squares(views: list[Tensor]) -> Tensor:
    """Squared norm of each. A CPU adds a tensor's squares up one after the other: over millions of
    elements in fp32 that is wrong by 2e-4, so it takes them in blocks."""
    if views[0].device.type != "cpu":
        return torch.stack(torch._foreach_norm(views)).float().square()
    blocks = [torch.stack(torch._foreach_norm(v.split(_BLOCK))) for v in views]
    return torch.stack([b.square().sum() for b in blocks])
