"""LAMB as its paper writes it (1904.00962, algorithm 2), a tensor at a time: the test oracle.

NVLAMB's gradient pre-normalisation and the optional limits of the trust ratio are NVIDIA's
(developer.nvidia.com/blog/pretraining-bert-with-layer-wise-adaptive-learning-rates).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from configs.schema import OptimizerConfig
from pretrain.kernels.matrices import POLYNOMIALS, SPARE
from pretrain.optim.orthogonal import is_orthogonal, scale_of


class ReferenceLamb:
    """Whole tensors by name on one process. `step` changes them in place.

    Args:
        tensors: name -> weight. decayed: names that weight decay applies to; with
            `adapt_bias_and_norm` off, the others take a plain Adam step.
    """

    def __init__(
        self, tensors: Mapping[str, Tensor], config: OptimizerConfig, decayed: set[str]
    ) -> None:
        self.tensors, self.config, self.decayed = tensors, config, decayed
        self.exp_avg = {name: torch.zeros_like(w) for name, w in tensors.items()}
        self.exp_avg_sq = {name: torch.zeros_like(w) for name, w in tensors.items()}
        self.steps = 0
        self.ratios: dict[str, float] = {}

    @torch.no_grad()
    def step(self, grads: Mapping[str, Tensor], lr: float) -> float:
        """One update; returns the global gradient norm before it was limited."""
        c = self.config
        self.steps += 1
        norm = float(torch.stack([g.double().square().sum() for g in grads.values()]).sum().sqrt())
        shrink = max(1.0, norm / c.max_grad_norm) if c.max_grad_norm > 0 else 1.0
        correction1 = 1 - c.beta1**self.steps if c.bias_correction else 1.0
        correction2 = 1 - c.beta2**self.steps if c.bias_correction else 1.0
        for name, weight in self.tensors.items():
            grad = grads[name] / shrink
            m, v = self.exp_avg[name], self.exp_avg_sq[name]
            m.copy_(c.beta1 * m + (1 - c.beta1) * grad)
            if is_orthogonal(name, weight.shape, c):
                nesterov = c.beta1 * m + (1 - c.beta1) * grad
                update = scale_of(weight.shape) * _orthogonal(nesterov)
            else:
                v.copy_(c.beta2 * v + (1 - c.beta2) * grad * grad)
                update = (m / correction1) / ((v / correction2).sqrt() + c.eps)
            if name in self.decayed:
                update = update + c.weight_decay * weight
            ratio = self._trust_ratio(name, weight, update)
            self.ratios[name] = ratio
            rate = lr * c.orthogonal_lr if is_orthogonal(name, weight.shape, c) else lr
            weight.sub_(rate * ratio * update)
        return norm

    def _trust_ratio(self, name: str, weight: Tensor, update: Tensor) -> float:
        c = self.config
        if not c.adapt_bias_and_norm and name not in self.decayed:
            return 1.0
        weight_norm, update_norm = float(weight.double().norm()), float(update.double().norm())
        if weight_norm == 0 or update_norm == 0:
            return 1.0
        ratio = max(weight_norm / update_norm, c.trust_ratio_min)
        return min(ratio, c.trust_ratio_max) if c.trust_ratio_max > 0 else ratio


def _orthogonal(x: Tensor) -> Tensor:
    """Muon's steps towards the nearest orthogonal matrix (Jordan et al. 2024)."""
    x = x / (SPARE * x.double().norm()).clamp(min=1e-37).float()
    for a, b, c in POLYNOMIALS:
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x
