"""The fused kernels with 8-bit products in the wide linear layers."""

from __future__ import annotations

from pretrain.kernels.fused import (
    attention,
    bias_dropout_add_norm,
    dropout,
    embedding,
    lamb_apply,
    lamb_moments,
    layer_norm,
    linear_cross_entropy,
)
from pretrain.kernels.triton_fp8 import bias_gelu, forked_linear, linear, summed_linear

__all__ = [
    "attention",
    "bias_dropout_add_norm",
    "bias_gelu",
    "dropout",
    "embedding",
    "forked_linear",
    "lamb_apply",
    "lamb_moments",
    "layer_norm",
    "linear",
    "linear_cross_entropy",
    "summed_linear",
]
