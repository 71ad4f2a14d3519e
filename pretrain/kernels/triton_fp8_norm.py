"""LayerNorm(dropout(x + bias) + residual) that hands 8-bit versions on, both ways."""

from __future__ import annotations

from torch import Tensor

from pretrain.kernels.triton_fp8_gelu import placeholder
from pretrain.kernels.triton_fp8_rounding import Eight
from pretrain.kernels.triton_pointwise import Norm


def _from_eight(like: Tensor, values: Tensor, stats: Tensor) -> Tensor:
    grad = placeholder(like)
    grad.eight = Eight(values, stats, stats.amax(1))  # type: ignore[attr-defined]
    return grad


def bias_dropout_add_norm(x, bias, residual, weight, norm_bias, eps, p, token_keys, site, seed):
    """See `plain.bias_dropout_add_norm`. The result has attributes for the linear layer that
    follows: `eight`, and `fork`, itself again, whose gradient comes apart from the result's."""
    back = _from_eight if getattr(x, "takes8", False) else None
    y, fork, values, stats = Norm.apply(
        x.contiguous(), bias, residual.contiguous(), weight, norm_bias, eps, p, token_keys, site,
        seed, True, back,
    )  # fmt: skip
    y.eight = Eight(values, stats, stats[:, 0])  # all rows alike
    y.fork = fork
    return y
