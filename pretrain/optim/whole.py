"""LAMBs that see whole tensors on one rank: DeepSpeed's FusedLamb, NVIDIA apex's FusedLAMB and the
reference. They are exact only where no tensor is cut; `pretrain.checks` refuses the rest and says
why. The global gradient norm is limited here, so that all of them mean the same by it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from configs.errors import UserError
from configs.schema import OptimizerConfig
from pretrain.optim.lamb import Finite, Lamb, Update, Verdict
from pretrain.optim.reference import ReferenceLamb
from pretrain.parallel.groups import Groups
from pretrain.parallel.pieces import Piece
from pretrain.parallel.slices import Shard

NO_LIMIT = 1e30


class WholeTensorLamb(Lamb):
    """The interface of `Lamb` around an optimiser of torch's shape; state stays in the shard.

    Raises:
        UserError: the implementation is not installed, or its CUDA part cannot be built.
    """

    def __init__(
        self,
        pieces: list[Piece],
        shard: Shard,
        config: OptimizerConfig,
        groups: Groups,
        kernels: Any,
    ) -> None:
        super().__init__(pieces, shard, config, groups, kernels)
        self.reference: ReferenceLamb | None = None
        self.optimizer: Any = None
        if config.implementation == "reference":
            self.reference = self._reference()
        else:
            self.optimizer = self._fused()

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
        norm = self._global_norm(self._views(grad)) * grad_scale
        verdict = verdict or Finite()
        verdict.asked(norm)
        if not verdict.heard():
            then()
            return Update(norm, None, True)
        self.steps += 1
        ratios = None
        if self.reference:
            self.reference.steps = self.steps - 1
            grads = {name: g * grad_scale for name, g in self._shaped(grad).items()}
            self.reference.step(grads, lr)
            found = [self.reference.ratios[s.piece.name] for s in self.shard.slices]
            ratios = torch.zeros(len(self._sharded)).index_put_(
                (self._piece_of.cpu(),), torch.tensor(found)
            )
        else:
            limit = self.config.max_grad_norm
            shrink = max(1.0, norm.item() / limit) if limit > 0 else 1.0
            grad.mul_(grad_scale / shrink)
            for group in self.optimizer.param_groups:
                group["lr"], group["step"] = lr, self.steps - 1  # apex counts per group
                for p in group["params"]:
                    self.optimizer.state[p]["step"] = self.steps - 1  # DeepSpeed per tensor
                    p.grad = self._slice[p].of(grad)
            self.optimizer.step()
        if low is not None:
            low.copy_(self.shard.master)
        then()
        return Update(norm, ratios, False)

    def _reference(self) -> ReferenceLamb:
        shard = self.shard
        decayed = {s.piece.name for s in shard.slices if s.piece.decayed}
        out = ReferenceLamb(self._shaped(shard.master), self.config, decayed)
        out.exp_avg = self._shaped(shard.exp_avg)
        out.exp_avg_sq = self._shaped(shard.exp_avg_sq)
        return out

    def _shaped(self, flat: Tensor) -> dict[str, Tensor]:
        return {s.piece.name: s.of(flat).view(s.piece.shape) for s in self.shard.slices}

    def _fused(self) -> Any:
        self._slice = {nn.Parameter(s.of(self.shard.master)): s for s in self.shard.slices}
        c = self.config
        groups = [
            {"params": [p for p, s in self._slice.items() if s.piece.decayed is decayed],
             "weight_decay": c.weight_decay if decayed else 0.0}
            for decayed in (True, False)
        ]  # fmt: skip
        common = {
            "lr": 0.0,
            "betas": (c.beta1, c.beta2),
            "eps": c.eps,
            "bias_correction": c.bias_correction,
        }
        try:
            if c.implementation == "apex":
                from apex.optimizers import FusedLAMB

                optimizer = FusedLAMB(
                    groups, **common, max_grad_norm=NO_LIMIT, use_nvlamb=c.adapt_bias_and_norm
                )
            else:
                from deepspeed.ops.lamb import FusedLamb

                ceiling = c.trust_ratio_max or NO_LIMIT
                optimizer = FusedLamb(
                    groups, **common, max_coeff=ceiling, min_coeff=c.trust_ratio_min
                )
        except (ImportError, RuntimeError) as error:
            raise UserError(
                f"optimizer.implementation={c.implementation} cannot be used here: "
                f"{str(error).splitlines()[0]}",
                "use optimizer.implementation=lambert",
            ) from None
        for p, s in self._slice.items():
            optimizer.state[p] = {
                "step": 0,
                "exp_avg": s.of(self.shard.exp_avg),
                "exp_avg_sq": s.of(self.shard.exp_avg_sq),
            }
        return optimizer
