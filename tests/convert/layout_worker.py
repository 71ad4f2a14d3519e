"""Trains and saves in several layouts inside one 4-process world (started by test_layout_export)."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist

from configs.loading import to_dict
from pretrain.checkpoint.writer import Writer
from pretrain.downstream.pseudo import uniform_rows
from tests.trainer.layouts import Layout, config, make_engine, make_groups, train

LAYOUTS = (
    Layout(tp=1, dp=4, zero=1),
    Layout(tp=2, dp=2, zero=2, engine="deepspeed"),
    Layout(tp=4, dp=1, zero=0),
    Layout(tp=2, dp=2, zero=1, precision="bf16"),
)


def ids() -> torch.Tensor:
    """Four rows of sixteen random ids, the same wherever they are asked for."""
    return torch.randint(config().vocab_size, (4, 16), generator=torch.Generator().manual_seed(5))


def save_all(folder: str) -> dict[str, torch.Tensor]:
    """{layout: logits [64, vocab] of the training model after two updates}; saves each layout."""
    logits = {}
    for layout in LAYOUTS:
        groups = make_groups(layout.tp, layout.dp)
        engine = make_engine(layout, groups)
        train(layout, groups, updates=2, engine=engine)
        model = engine.model.eval()
        with torch.no_grad():
            micro = uniform_rows(ids())
            logits[str(layout)] = model.logits(model.encode(micro)).float()
        shapes = {s.piece.name: list(s.piece.logical_shape) for s in engine.shard.slices}
        everyone: list = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, shapes)
        meta = {
            "model": to_dict(config()),
            "tensors": {k: v for part in everyone for k, v in part.items()},
        }
        writer = Writer(Path(folder) / str(layout), groups, keep=1, token="test")
        dist.barrier()  # rank 0 first removes what a killed run left
        writer.save(2, engine.shard, meta)
        writer.close()
        dist.barrier()
    return logits
