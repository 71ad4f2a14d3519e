"""BERT, built from plain or tensor-parallel layers."""

from __future__ import annotations

from typing import Any

from configs.model import ModelConfig
from pretrain.model.bert import BertForPreTraining, LossSums
from pretrain.model.init import initialise
from pretrain.parallel.exchange import Exchange
from pretrain.parallel.layers import PlainLayers, TensorParallelLayers
from pretrain.parallel.pieces import Piece, pieces

__all__ = ["BertForPreTraining", "LossSums", "build", "pieces"]


def build(
    config: ModelConfig,
    tp_group: Any = None,
    kernels: Any = None,
    seed: int = 0,
    exchange: Exchange | None = None,
    recompute: bool = False,
    init: bool = True,
) -> tuple[BertForPreTraining, list[Piece]]:
    """The model of this rank in fp32 on the CPU, and its pieces.

    Args:
        config: resolved (`configs.model.resolve_model`). tp_group: None for one process.
        kernels: from `pretrain.kernels.select`; None takes the plain ones.
        exchange: of sequence parallelism (`pretrain.parallel.exchange.make_exchange`); None without.
        seed: of initial weights and dropout. init=False leaves the weights zero, to be loaded.
    """
    if kernels is None:
        import torch

        from pretrain.kernels import select

        kernels = select("plain", torch.device("cpu"))
    layers = TensorParallelLayers(tp_group, exchange) if _size(tp_group) > 1 else PlainLayers()
    model = BertForPreTraining(config, layers, kernels, seed, recompute)
    parts = pieces(model, config, layers.tp, layers.rank)
    if layers.sequence_parallel:
        _mark_partial(model)
    if init:
        initialise(parts, config.initializer_range, seed)
    return model, parts


def _mark_partial(model: BertForPreTraining) -> None:
    """Replicated parameters that see only this rank's tokens: their gradients must be summed."""
    last = f"encoder.layer.{model.config.num_layers - 1}."
    for name, param in model.bert.named_parameters():
        replicated = not getattr(param, "tensor_model_parallel", False)
        if replicated and not name.startswith(("pooler", last)):
            param.sequence_partial = True  # type: ignore[attr-defined]


def _size(group: Any) -> int:
    return 1 if group is None else int(group.size())
