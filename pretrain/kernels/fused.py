"""The fused kernels behind the same names as `plain`."""

from __future__ import annotations

from pretrain.kernels.attention import attention
from pretrain.kernels.plain import LambTable
from pretrain.kernels.triton_embedding import embedding
from pretrain.kernels.triton_gelu import bias_gelu
from pretrain.kernels.triton_lamb import lamb_apply, lamb_moments
from pretrain.kernels.triton_linear import (
    forked_linear,
    gathered_linear,
    linear,
    scattered_linear,
    summed_linear,
)
from pretrain.kernels.triton_loss import linear_cross_entropy
from pretrain.kernels.triton_matrices import matrix_apply, matrix_momentum, matrix_norms
from pretrain.kernels.triton_pointwise import (
    bias_dropout_add_norm,
    dropout,
    layer_norm,
)
from pretrain.kernels.triton_sum import add_parts

__all__ = [
    "LambTable",
    "add_parts",
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
