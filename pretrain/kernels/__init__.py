"""The arithmetic of a BERT step: plain torch everywhere, fused Triton kernels on a GPU.

All offer the same functions with the same meaning; `plain.py` is the specification, `fused.py`
collects the Triton kernels, `fused_fp8.py` replaces some by those with 8-bit products:

    attention, bias_dropout_add_norm, dropout, bias_gelu, layer_norm, embedding,
    linear, forked_linear, summed_linear, gathered_linear, scattered_linear, linear_cross_entropy,
    lamb_moments, lamb_apply, matrix_momentum, matrix_norms, matrix_apply

Shapes: T tokens of R packed rows (`cu_seqlens` int32 [R + 1]), H hidden, `token_keys` int32 [T].
Dropout is a pure function of (token key, seed, site, channel): see `hashing.py`.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import torch

from configs.errors import UserError


def select(name: str, device: torch.device | str, precision: str = "bf16") -> Any:
    """The kernels to use on `device`. name: `auto` (fused where they run) | `plain`.

    Fused needs a CUDA GPU with bf16 matrix units (compute capability 8.0) and Triton; `precision`
    fp8 needs 8-bit ones (8.9: Ada, Hopper, Blackwell).
    Raises UserError for any other name, and for fp8 where it cannot run.
    """
    from pretrain.kernels import plain

    if name not in ("auto", "plain"):
        raise UserError(f"train.kernels={name} is not known", "use auto or plain")
    device = torch.device(device)
    able = (0, 0)
    if name == "auto" and device.type == "cuda" and importlib.util.find_spec("triton") is not None:
        able = torch.cuda.get_device_capability(device)
    if precision == "fp8":
        if able < (8, 9):
            raise UserError(
                f"train.precision=fp8 with train.kernels={name} does not run on this device",
                "it needs a GPU of compute capability 8.9 (Ada, Hopper) and kernels=auto; use bf16",
            )
        from pretrain.kernels import fused_fp8

        return fused_fp8
    if able < (8, 0):
        return plain
    from pretrain.kernels import fused

    return fused


def is_fused(kernels: Any) -> bool:
    """Whether `kernels` are of the fused ones."""
    return "fused" in kernels.__name__
