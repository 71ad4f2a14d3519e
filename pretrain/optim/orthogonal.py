"""Which tensors take an orthogonalised momentum instead of Adam's update, and their part of a step.

A matrix is orthogonalised whole, whatever the layout: ranks that hold parts of it put their momenta
together (one sum over the data-parallel ranks in ZeRO, one a shape over the tensor-parallel ones),
each does the same products, and takes of the direction what its weights need.
"""

from __future__ import annotations

from itertools import groupby
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from configs.schema import OptimizerConfig
from pretrain.kernels.matrices import MatrixTable, orthogonalise
from pretrain.parallel.groups import Groups
from pretrain.parallel.pieces import Piece
from pretrain.parallel.slices import Shard


def is_orthogonal(name: str, shape: tuple[int, ...], config: OptimizerConfig) -> bool:
    """The encoder's matrices, when asked for. Embeddings and heads are tables of vectors, one for a
    word or class, whose gradients come rarely: Muon leaves them to Adam."""
    return config.orthogonal_lr > 0 and len(shape) == 2 and name.startswith("bert.encoder.")


def scale_of(shape: tuple[int, ...]) -> float:
    """Brings the root mean square of an orthogonal matrix to 0.2, about that of an Adam update
    (2502.16982), so that weight decay weighs the same against either."""
    return 0.2 * max(shape) ** 0.5


class Matrices:
    """The orthogonalised matrices of a rank: their directions lie in one flat tensor, by shape, each as
    the piece that this rank's parameter holds.

    Args:
        pieces: all of the model, alike on the ranks of a tensor-parallel group: a rank that holds no
            slice of a matrix takes part in its sums. kernels: `plain` or a module of its functions.

    `held` are the numbers of the shard's slices that are parts of such matrices.
    """

    def __init__(
        self,
        pieces: list[Piece],
        shard: Shard,
        config: OptimizerConfig,
        groups: Groups,
        kernels: Any,
    ) -> None:
        self.shard, self.config, self.groups, self.kernels = shard, config, groups, kernels
        found = [p for p in pieces if is_orthogonal(p.name, p.shape, config)]
        found.sort(key=_kind)
        self.kinds = [list(same) for _, same in groupby(found, key=_kind)]
        places, self.total = {}, 0
        for piece in found:
            places[piece.name], self.total = self.total, self.total + piece.numel
        held = [(i, s) for i, s in enumerate(shard.slices) if s.piece.name in places]
        self.held = {i for i, _ in held}
        self._held = torch.tensor(sorted(self.held), dtype=torch.int64, device=shard.master.device)
        self.table = MatrixTable(
            [s.at for _, s in held],
            [s.numel for _, s in held],
            [places[s.piece.name] + s.begin for _, s in held],
            [config.weight_decay] * len(held),
            [scale_of(s.piece.logical_shape) for _, s in held],
        )

    def directions(self, grad: Tensor, grad_scale: Tensor, norms: Tensor) -> Tensor | None:
        """Momenta in place, then directions, which are returned: flat, bf16 on a GPU and fp32 on a CPU.

        Args:
            grad: flat [N], laid out as the shard. grad_scale: fp32 scalar on the device; NaN leaves the
                momenta as they are, and what is returned means nothing.
            norms: fp32 [2, slices], gets the squared norms of the slices held, of weights and updates.
        """
        if not self.kinds:
            return None
        shard, master = self.shard, self.shard.master
        dtype = torch.bfloat16 if master.is_cuda else torch.float32
        out = torch.zeros(self.total, dtype=dtype, device=master.device)
        beta1 = self.config.beta1
        self.kernels.matrix_momentum(
            grad, shard.exp_avg, self.table, out, beta1=beta1, grad_scale=grad_scale
        )
        if self.groups.dp > 1 and not shard.whole:
            dist.all_reduce(out, group=self.groups.dp_group)
        at = 0
        for same in self.kinds:
            end = at + sum(piece.numel for piece in same)
            self._orthogonalise(out[at:end].view(len(same), *same[0].shape), same[0])
            at = end
        norms[:, self._held] = self.kernels.matrix_norms(master, out, self.table)
        return out

    def _orthogonalise(self, matrices: Tensor, like: Piece) -> None:
        """Those of one shape [n, rows, columns], in place."""
        if not like.sharded:
            matrices.copy_(orthogonalise(matrices))
            return
        block = (slice(None), *like.clip(matrices[0])[0])
        whole = matrices.new_zeros(len(matrices), *like.logical_shape)
        whole[block] = matrices
        dist.all_reduce(whole, group=self.groups.tp_group)
        matrices.copy_(orthogonalise(whole)[block])

    def apply(
        self, direction: Tensor | None, ratios: Tensor, lr: float, low: Tensor | None
    ) -> None:
        """Moves the weights along what `directions` gave.

        Args:
            ratios: fp32 [slices], trust ratios of all slices; one of NaN leaves its weights alone.
            lr: of LAMB; matrices move at orthogonal_lr times it. low: as in `Lamb.step`.
        """
        if direction is not None:
            rates = ratios[self._held] * (lr * self.config.orthogonal_lr)
            self.kernels.matrix_apply(self.shard.master, direction, self.table, rates, low)


def _kind(piece: Piece) -> tuple[Any, ...]:
    """Pieces of which this is equal are worked on together."""
    return piece.logical_shape, piece.shape, piece.sharded
