"""The layer classes that a model is built from: plain ones, and tensor-parallel ones.

A linear returns x W^T *without* its bias, which the model hands to the fused kernel that comes
next; the product itself is one of the kernels given to it. Sharded parameters carry `tensor_model_parallel` and `partition_dim`, as Megatron-core's do.
The collectives are Megatron-core's autograd mappings (those of sequence parallelism our own, see
`sequence.py`; products bring theirs along and hide them); with tp 1 there is none.

With sequence parallelism (2205.05198) activations between a row and the next column layer are
[T / tp, H]: every rank holds a contiguous T / tp of the tokens. An `exchange.Exchange` moves them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from pretrain.parallel.exchange import Exchange
from pretrain.parallel.sequence import gather_tokens, reduce_scatter_tokens

Lookup = Callable[[Tensor, Tensor], Tensor]


def _empty(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.zeros(shape))


class Linear(nn.Module):
    """weight [out, in], bias [out]; forward gives [T, out] without the bias."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.weight = _empty(out_features, in_features)
        self.bias = _empty(out_features)

    def forward(self, x: Tensor, kernels: Any) -> Tensor:
        return kernels.linear(x, self.weight)

    def fork(self, x: Tensor, kernels: Any, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """(x W^T + bias, x), for an input that is also the residual."""
        return kernels.forked_linear(x, self.weight, bias)


class Embedding(nn.Module):
    """weight [rows, hidden]; forward gives [T, hidden] through `lookup(ids, weight)`."""

    def __init__(self, rows: int, hidden: int) -> None:
        super().__init__()
        self.weight = _empty(rows, hidden)

    def forward(self, ids: Tensor, lookup: Lookup) -> Tensor:
        return lookup(ids, self.weight)


class Norm(nn.Module):
    """The two vectors of a LayerNorm; the kernels do the arithmetic."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden))
        self.bias = _empty(hidden)


class PlainLayers:
    """One process holds every weight."""

    tp = 1
    rank = 0
    group: Any = None
    sequence_parallel = False

    def column(self, in_features: int, out_features: int) -> Linear:
        """Linear whose output features are spread over the ranks."""
        return Linear(in_features, out_features)

    def row(self, in_features: int, out_features: int) -> Linear:
        """Linear whose input features are spread over the ranks; its output is whole."""
        return Linear(in_features, out_features)

    def vocabulary(self, rows: int, hidden: int) -> Embedding:
        """Word embedding whose rows are spread over the ranks."""
        return Embedding(rows, hidden)

    def vocabulary_bias(self, rows: int) -> nn.Parameter:
        return _empty(rows)

    def chunk(self, x: Tensor) -> Tensor:
        """This rank's tokens of [T, ...] where activations are token-sharded, else all of them."""
        return x

    def whole(self, x: Tensor) -> Tensor:
        """[T / tp, H] of every rank -> [T, H]; what follows is computed alike on every rank."""
        return x

    def whole_tokens(self) -> PlainLayers:
        """The same without token-sharded activations."""
        return self

    def before_vocabulary(self, x: Tensor) -> Tensor:
        """Marks a replicated input of a vocabulary-sharded product (its gradients are summed)."""
        return x

    def gather_vocabulary(self, logits: Tensor) -> Tensor:
        """[M, V / tp] of every rank -> [M, V] (no gradient)."""
        return logits


class TensorParallelLayers(PlainLayers):
    """Every rank of `group` holds 1 / tp of each sharded weight (1909.08053, section 3), and with an
    exchange 1 / tp of the tokens between a row and a column layer."""

    def __init__(self, group: Any, exchange: Exchange | None = None) -> None:
        self.group = group
        self.tp = group.size()
        self.rank = group.rank()
        self.exchange = exchange
        self.sequence_parallel = exchange is not None

    def column(self, in_features: int, out_features: int) -> Linear:
        return ColumnLinear(self, in_features, out_features)

    def row(self, in_features: int, out_features: int) -> Linear:
        return RowLinear(self, in_features, out_features)

    def vocabulary(self, rows: int, hidden: int) -> Embedding:
        return VocabularyEmbedding(self, rows, hidden)

    def vocabulary_bias(self, rows: int) -> nn.Parameter:
        return _sharded(_empty(rows // self.tp), 0)

    def chunk(self, x: Tensor) -> Tensor:
        if not self.sequence_parallel:
            return x
        size = x.shape[0] // self.tp
        return x[self.rank * size : (self.rank + 1) * size]

    def whole(self, x: Tensor) -> Tensor:
        return gather_tokens(x, self.group, alike=True) if self.sequence_parallel else x

    def whole_tokens(self) -> PlainLayers:
        return TensorParallelLayers(self.group) if self.sequence_parallel else self

    def before_vocabulary(self, x: Tensor) -> Tensor:
        from megatron.core.tensor_parallel import mappings

        return mappings.copy_to_tensor_model_parallel_region(x, group=self.group)

    def gather_vocabulary(self, logits: Tensor) -> Tensor:
        import torch.distributed as dist

        parts = [torch.empty_like(logits) for _ in range(self.tp)]
        dist.all_gather(parts, logits.contiguous(), group=self.group)
        return torch.cat(parts, dim=-1)


def _sharded(parameter: nn.Parameter, dim: int) -> nn.Parameter:
    from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes

    set_tensor_model_parallel_attributes(parameter, True, dim, 1)
    return parameter


class ColumnLinear(Linear):
    """weight [out / tp, in], bias [out / tp]."""

    def __init__(self, layers: TensorParallelLayers, in_features: int, out_features: int) -> None:
        super().__init__(in_features, out_features // layers.tp)
        self._group, self._exchange = layers.group, layers.exchange
        _sharded(self.weight, 0)
        _sharded(self.bias, 0)

    def forward(self, x: Tensor, kernels: Any, bias: Tensor | None = None) -> Tensor:
        if self._exchange is not None:
            return self.fork(x, kernels, bias)[0]
        return kernels.linear(x, self.weight, bias, self._group)

    def fork(self, x: Tensor, kernels: Any, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
        if self._exchange is not None:  # the residual is this rank's tokens alone
            return kernels.gathered_linear(x, self.weight, bias, self._exchange)
        return kernels.forked_linear(x, self.weight, bias, self._group)


class RowLinear(Linear):
    """weight [out, in / tp]; the bias [out] is added after the sum over ranks, hence replicated."""

    def __init__(self, layers: TensorParallelLayers, in_features: int, out_features: int) -> None:
        super().__init__(in_features // layers.tp, out_features)
        self._group, self._exchange = layers.group, layers.exchange
        _sharded(self.weight, 1)

    def forward(self, x: Tensor, kernels: Any) -> Tensor:
        if self._exchange is not None:
            return kernels.scattered_linear(x, self.weight, self._exchange)
        return kernels.summed_linear(x, self.weight, self._group)


class VocabularyEmbedding(Embedding):
    """weight [rows / tp, hidden]; a token outside this rank's rows contributes zero to the sum."""

    def __init__(self, layers: TensorParallelLayers, rows: int, hidden: int) -> None:
        super().__init__(rows // layers.tp, hidden)
        self._group, self._sequence = layers.group, layers.sequence_parallel
        self._start = layers.rank * (rows // layers.tp)
        _sharded(self.weight, 0)

    def forward(self, ids: Tensor, lookup: Lookup) -> Tensor:
        local = ids - self._start
        outside = (local < 0) | (local >= self.weight.shape[0])
        # Any row will do outside, but not one for all: equal ids are summed one after another.
        x = lookup(local.remainder(self.weight.shape[0]), self.weight)
        x = x.masked_fill(outside[:, None], 0.0)
        if self._sequence:
            return reduce_scatter_tokens(x, self._group)
        from megatron.core.tensor_parallel import mappings

        return mappings.reduce_from_tensor_model_parallel_region(x, group=self._group)
