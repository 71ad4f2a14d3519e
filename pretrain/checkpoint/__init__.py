"""Checkpoints: logical tensors in safetensors, everything else in JSON, complete or absent.

    train/checkpoints/step-00000500/
        checkpoint.json                      written last: meta data, every box with its checksum
        rank-00000-of-00004.safetensors      boxes of tensors, "master/NAME@0,0"

A tensor is stored under its Hugging Face name in up to three kinds (master, exp_avg, exp_avg_sq),
in boxes: each rank writes the blocks of the logical tensor that it holds, and whoever reads takes
the blocks that meet its own. So a checkpoint loads at any tp, dp, ZeRO stage and engine. Nothing
is pickled. The folder gets its name by a rename after all ranks' files are on disk.
"""

from typing import Any

from pretrain.checkpoint.folder import Damaged, checkpoints, latest, read_meta, resolve

__all__ = [
    "Damaged",
    "checkpoints",
    "latest",
    "load_logical",
    "read_meta",
    "resolve",
    "save_logical",
]

_NEED_TORCH = {"load_logical": "reader", "save_logical": "writer"}


def __getattr__(name: str) -> Any:
    """Reading and writing tensors imports torch, looking for checkpoints does not."""
    if name in _NEED_TORCH:
        from importlib import import_module

        return getattr(import_module(f"pretrain.checkpoint.{_NEED_TORCH[name]}"), name)
    raise AttributeError(name)
