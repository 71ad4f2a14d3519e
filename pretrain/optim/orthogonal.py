"""Which tensors take an orthogonalised momentum instead of Adam's update, and their part of a step."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from configs.schema import OptimizerConfig
from pretrain.kernels.matrices import MatrixTable, orthogonalise
from pretrain.parallel.slices import Shard, Slice


def is_orthogonal(name: str, shape: tuple[int, ...], config: OptimizerConfig) -> bool:
    """The encoder's matrices, when asked for. Embeddings and heads are tables of vectors, one for a
    word or class, whose gradients come rarely: Muon leaves them to Adam."""
    return config.orthogonal_lr > 0 and len(shape) == 2 and name.startswith("bert.encoder.")


class Matrices:
    """The orthogonalised matrices of a rank, by shape. Each must be whole here."""

    def __init__(self, slices: list[Slice], shard: Shard, config: OptimizerConfig, kernels: Any):
        self.shard, self.config, self.kernels = shard, config, kernels
        by_shape: dict[tuple[int, ...], list[int]] = {}
        for i, s in enumerate(slices):
            if is_orthogonal(s.piece.name, s.piece.shape, config):
                if s.numel != s.piece.numel or s.piece.sharded:
                    raise ValueError(f"{s.piece.name} is cut: it cannot be orthogonalised")
                by_shape.setdefault(s.piece.shape, []).append(i)
        device = shard.master.device
        self.groups = [
            (
                torch.tensor(places, device=device),
                MatrixTable(
                    [slices[i].at for i in places], shape[0], shape[1], config.weight_decay
                ),
            )
            for shape, places in by_shape.items()
        ]
        self.held = {i for places in by_shape.values() for i in places}

    def directions(self, grad: Tensor, grad_scale: Tensor, norms: Tensor) -> list[Tensor]:
        """Momenta in place, then directions; squared norms go into `norms` [2, slices]."""
        shard, beta1, out = self.shard, self.config.beta1, []
        for places, table in self.groups:
            momentum = self.kernels.matrix_momentum(
                grad, shard.exp_avg, table, beta1=beta1, grad_scale=grad_scale
            )
            out.append(orthogonalise(momentum))
            norms[:, places] = self.kernels.matrix_norms(shard.master, out[-1], table)
        return out

    def apply(self, directions: list[Tensor], ratios: Tensor, lr: float, low: Tensor | None):
        """ratios: of all slices."""
        rates = ratios * (lr * self.config.orthogonal_lr)
        for (places, table), direction in zip(self.groups, directions):
            self.kernels.matrix_apply(self.shard.master, direction, table, rates[places], low)
