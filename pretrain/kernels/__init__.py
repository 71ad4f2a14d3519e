"""The arithmetic of a BERT step: plain torch everywhere, fused Triton kernels on a GPU.

Both offer the same functions with the same meaning; `plain.py` is the specification:

    attention, bias_dropout_add_norm, dropout, bias_gelu, layer_norm, embedding,
    linear_cross_entropy, LambTable, lamb_moments, lamb_apply

Shapes: T tokens of R packed rows (`cu_seqlens` int32 [R + 1]), H hidden, `token_keys` int32 [T].
Dropout is a pure function of (token key, seed, site, channel): see `hashing.py`.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import torch

from configs.errors import UserError


def select(name: str, device: torch.device | str) -> Any:
    """The kernels to use on `device`. name: `auto` (fused where they run) | `plain`.

    Fused needs a CUDA GPU with bf16 matrix units (compute capability 8.0) and Triton.
    Raises UserError for any other name.
    """
    from pretrain.kernels import plain

    if name not in ("auto", "plain"):
        raise UserError(f"train.kernels={name} is not known", "use auto or plain")
    device = torch.device(device)
    if name == "plain" or device.type != "cuda" or importlib.util.find_spec("triton") is None:
        return plain
    if torch.cuda.get_device_capability(device) < (8, 0):
        return plain
    from pretrain.kernels import fused

    return fused


def is_fused(kernels: Any) -> bool:
    """Whether `kernels` are the fused ones."""
    return kernels.__name__.endswith(".fused")
