"""What a model's parameters consist of: logical tensors under their Hugging Face names.

Every algorithm that must not depend on the layout (initial values, LAMB's norms per tensor,
checkpoints, export) speaks of pieces. A piece is the part of one logical tensor that this rank's
parameter holds: query, key and value are three pieces of one parameter; a sharded or padded
parameter is a piece with an offset in, and clipped to, the logical shape.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from torch import Tensor, nn

from configs.model import ModelConfig

WORDS = "bert.embeddings.word_embeddings.weight"
WORD_BIAS = "cls.predictions.bias"


@dataclass(frozen=True)
class Piece:
    """start: where it begins in the flattened parameter. shape: as held here; offset: of this
    block in the logical tensor; logical_shape: without vocabulary padding."""

    name: str
    param: nn.Parameter
    start: int
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    logical_shape: tuple[int, ...]
    sharded: bool
    decayed: bool  # neither a bias nor of a LayerNorm

    @property
    def numel(self) -> int:
        return prod(self.shape)

    def view(self, flat: Tensor) -> Tensor:
        """The piece inside a flat tensor that is laid out as the parameter."""
        return flat[self.start : self.start + self.numel].view(self.shape)

    def clip(self, block: Tensor) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
        """(index into the logical tensor, index into the local block), padding left out."""
        ours, theirs = [], []
        for size, offset, whole in zip(block.shape, self.offset, self.logical_shape):
            n = max(0, min(size, whole - offset))
            theirs.append(slice(offset, offset + n))
            ours.append(slice(0, n))
        return tuple(theirs), tuple(ours)


def pieces(model: nn.Module, config: ModelConfig, tp: int = 1, tp_rank: int = 0) -> list[Piece]:
    """All pieces of this rank in the order of the parameters; names and order equal on all ranks."""
    return list(_walk(model, config, tp, tp_rank))


def _walk(model: nn.Module, config: ModelConfig, tp: int, tp_rank: int) -> Iterator[Piece]:
    for name, param in model.named_parameters():
        sharded = bool(getattr(param, "tensor_model_parallel", False)) and tp > 1
        dim = int(getattr(param, "partition_dim", -1)) if sharded else -1
        decayed = not (name.endswith("bias") or "LayerNorm" in name)
        fused = ".qkv." in name
        parts = ("query", "key", "value") if fused else ("",)
        shape = (param.shape[0] // len(parts), *param.shape[1:])
        logical = tuple(n * tp if d == dim else n for d, n in enumerate(shape))
        if name in (WORDS, WORD_BIAS):
            logical = (config.vocab_size, *logical[1:])
        offset = tuple(n * tp_rank if d == dim else 0 for d, n in enumerate(shape))
        for index, part in enumerate(parts):
            yield Piece(
                name.replace("qkv", part) if fused else name,
                param,
                index * prod(shape),
                shape,
                offset,
                logical,
                sharded,
                decayed,
            )
