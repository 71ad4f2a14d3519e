"""Named tensors into a model of ours on one process, and out again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from configs import UserError
from configs.model import ModelConfig

if TYPE_CHECKING:
    import torch

    from pretrain.model import BertForPreTraining


def to_model(
    config: ModelConfig, tensors: Mapping[str, torch.Tensor], kernels: Any = None
) -> BertForPreTraining:
    """The model (fp32, CPU, eval mode, whatever tp the tensors were trained at) with these weights.

    Raises:
        UserError: a tensor is missing, unknown, or of another shape; names it.
    """
    import torch

    from pretrain.model import build

    model, parts = build(config, kernels=kernels, init=False)
    names = {piece.name for piece in parts}
    for name in tensors.keys() ^ names:
        where = "missing from the weights" if name in names else "not part of this model"
        raise UserError(f"{name} is {where}", "weights and model config are of different runs")
    with torch.no_grad():
        for piece in parts:
            given = tensors[piece.name]
            if tuple(given.shape) != piece.logical_shape:
                raise UserError(
                    f"{piece.name} is {list(given.shape)}, the config says {list(piece.logical_shape)}",
                    "weights and model config are of different runs",
                )
            block = piece.view(piece.param.view(-1))
            block.zero_()  # padded vocabulary stays zero
            theirs, ours = piece.clip(block)
            block[ours] = given[theirs].to(block.dtype)
    return model.eval()


def with_new_heads(
    config: ModelConfig, tensors: Mapping[str, torch.Tensor], seed: int
) -> dict[str, torch.Tensor]:
    """fp32 tensors of the whole model: those given, the absent heads drawn as at the start of a run."""
    import torch

    from pretrain.model import build

    _, parts = build(config, seed=seed)
    whole = {}
    for piece in parts:
        if piece.name in tensors:
            whole[piece.name] = tensors[piece.name].to(torch.float32)
        else:
            block = piece.view(piece.param.detach().view(-1))
            whole[piece.name] = block[piece.clip(block)[1]].clone()
    return whole
