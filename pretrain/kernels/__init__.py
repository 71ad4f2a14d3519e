"""The arithmetic of a BERT step: plain torch everywhere, fused Triton kernels on a GPU.

Both offer the same functions with the same meaning; `plain.py` is the specification:

    attention, bias_dropout_add_norm, dropout, bias_gelu, layer_norm, embedding,
    linear_cross_entropy, LambTable, lamb_moments, lamb_apply

Shapes: T tokens of R packed rows (`cu_seqlens` int32 [R + 1]), H hidden, `token_keys` int32 [T].
Dropout is a pure function of (token key, seed, site, channel): see `hashing.py`.
"""

from __future__ import annotations

from types import ModuleType

import torch

from configs.errors import UserError


def select(name: str, device: torch.device | str) -> ModuleType:
    """The kernels to use on `device`. name: `auto` (fused where they run) | `plain`.

    Raises UserError for any other name.
    """
    from pretrain.kernels import plain

    if name not in ("auto", "plain"):
        raise UserError(f"train.kernels={name} is not known", "use auto or plain")
    return plain
