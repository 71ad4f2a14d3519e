"""The fused kernels with 8-bit products in the wide linear layers."""

from __future__ import annotations

from pretrain.kernels.fused import (
    attention,
    dropout,
    embedding,
    lamb_apply,
    lamb_moments,
    layer_norm,
    linear_cross_entropy,
    matrix_apply,
    matrix_momentum,
    matrix_norms,
)
from pretrain.kernels.triton_fp8 import (
    forked_linear,
    gathered_linear,
    linear,
    scattered_linear,
    summed_linear,
)
from pretrain.kernels.triton_fp8_gelu import bias_gelu
from pretrain.kernels.triton_fp8_norm import bias_dropout_add_norm

__all__ = [
    "attention",
    "bias_dropout_add_norm",
    "bias_gelu",
    "dropout",
    "embedding",
    "forked_linear",
    "gathered_linear",
    "lamb_apply",
    "lamb_moments",
    "layer_norm",
    "linear",
    "linear_cross_entropy",
    "matrix_apply",
    "matrix_momentum",
    "matrix_norms",
    "scattered_linear",
    "summed_linear",
]
