"""Launches the attention kernels of `triton_attention` and ties them into autograd."""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from pretrain.kernels import triton_attention as kernels
from pretrain.kernels.hashing import HEAD_STRIDE, keep_scale, signed, stream, threshold
from pretrain.kernels.triton_gradients import collect
from pretrain.kernels.triton_hash import hash_channels, hash_rows

# Tile sizes and warps, measured on an H100 with heads of 64 (bench/RESULTS.md).
SHORT = 128
FORWARD_SHORT: dict[str, Any] = {"BLOCK_M": 64, "BLOCK_N": 64, "num_warps": 4, "num_stages": 2}
FORWARD_LONG: dict[str, Any] = {"BLOCK_M": 64, "BLOCK_N": 128, "num_warps": 4, "num_stages": 2}
BACKWARD_SHORT: dict[str, Any] = {"BLOCK_N": 32, "num_warps": 4, "num_stages": 3}
QUERIES: dict[str, Any] = {"BLOCK_M": 64, "BLOCK_N": 64, "num_warps": 4, "num_stages": 3}
# Its BLOCK_M divides that of QUERIES, whose kernel fills whole tiles of what this one reads.
KEYS: dict[str, Any] = {"BLOCK_M": 64, "BLOCK_N": 64, "num_warps": 4, "num_stages": 3}

_TABLES: dict[tuple[Any, ...], Tensor] = {}


def _table_length(max_length: int) -> int:
    return max(16, triton.next_power_of_2(max_length))


def hashes(
    token_keys: Tensor, p: float, site: int, seed: int, heads: int, first_head: int, max_length: int
) -> tuple[Tensor, Tensor]:
    """(row hashes of this site int32 [T], channel table int32 [2, heads, length]); see `hashing`.

    Made once, since inside the attention kernels they cost a quarter of their arithmetic. The
    table is the same for all layers and steps.
    """
    length = _table_length(max_length)
    key = (token_keys.device, heads, first_head, length)
    if key not in _TABLES:
        table = torch.empty(2, heads, length, dtype=torch.int32, device=token_keys.device)
        hash_channels[(heads,)](table, first_head, heads, LENGTH=length, HEAD_STRIDE=HEAD_STRIDE)
        _TABLES[key] = table
    if p == 0.0:
        return token_keys, _TABLES[key]  # neither is looked at
    rows = torch.empty_like(token_keys)
    tokens = len(token_keys)
    salt = signed(stream(seed, site))
    hash_rows[(triton.cdiv(tokens, 1024),)](token_keys, rows, salt, tokens, BLOCK=1024)
    return rows, _TABLES[key]


def _constants(qkv: Tensor, p: float) -> dict[str, Any]:
    _, _, heads, width = qkv.shape
    return {
        "SCALE": 1.0 / math.sqrt(width),
        "HEADS": heads,
        "D": width,
        "THRESHOLD": threshold(p),
        "KEEP_SCALE": keep_scale(p),
        "PRECISION": "ieee" if qkv.dtype == torch.float32 else "tf32",
    }


def _tiles(x: Tensor, rows: int, width: int) -> TensorDescriptor:
    return TensorDescriptor.from_tensor(x.view(x.shape[0], -1), [rows, width])


def _channels(table: Tensor, keys: int) -> TensorDescriptor:
    return TensorDescriptor.from_tensor(table.view(-1, table.shape[-1]), [1, keys])


def forward(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_length: int,
    rows_hash: Tensor,
    channels: Tensor,
    p: float,
    short: int = SHORT,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """Returns (out [T, heads * d], fp32 [heads, T]: base-2 log-sums less log2(keep_scale(p)))."""
    tokens, _, heads, width = qkv.shape
    if max_length <= short:
        tile = _table_length(max_length)
        options = FORWARD_SHORT | options
        options |= {size: min(tile, options[size]) for size in ("BLOCK_M", "BLOCK_N")}
    else:
        options = FORWARD_LONG | options
    m, n = options["BLOCK_M"], options["BLOCK_N"]
    out = qkv.new_empty(tokens, heads * width)
    log_sums = torch.empty(heads, tokens, dtype=torch.float32, device=qkv.device)
    kernels.attention_forward[(triton.cdiv(max_length, m), heads, cu_seqlens.shape[0] - 1)](
        _tiles(qkv, m, width), _tiles(qkv, n, width), cu_seqlens, rows_hash, _channels(channels, n),
        out, log_sums, tokens, FEW=max_length <= short, **_constants(qkv, p), **options,
    )  # fmt: skip
    return out, log_sums


def backward(
    grad_out: Tensor,
    qkv: Tensor,
    biased: bool,
    cu_seqlens: Tensor,
    max_length: int,
    rows_hash: Tensor,
    channels: Tensor,
    out: Tensor,
    log_sums: Tensor,
    p: float,
    short: int = SHORT,
    queries: dict[str, Any] | None = None,
    keys: dict[str, Any] | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """Returns (gradient of qkv, partial sums of the bias' fp32 [n, 3, heads, d] if `biased`).

    options: of the kernel for short rows; queries, keys: of the two for long rows.
    """
    tokens, _, heads, width = qkv.shape
    rows = cu_seqlens.shape[0] - 1
    fp32: dict[str, Any] = {"dtype": torch.float32, "device": qkv.device}
    grad_qkv = torch.empty_like(qkv)
    constants = _constants(qkv, p) | {"BIAS": biased}

    def tiles(m: int, n: int) -> tuple[TensorDescriptor, ...]:
        sizes = ((qkv, m), (qkv, n), (grad_out, m), (out, m))
        return tuple(_tiles(x, size, width) for x, size in sizes)

    if max_length <= short:
        options = BACKWARD_SHORT | {"BLOCK_M": _table_length(max_length)} | options
        options["BLOCK_N"] = min(options["BLOCK_M"], options["BLOCK_N"])
        partial = torch.zeros(rows if biased else 0, 3, heads, width, **fp32)
        kernels.attention_backward[(heads, rows)](
            *tiles(options["BLOCK_M"], options["BLOCK_N"]), cu_seqlens, rows_hash,
            _channels(channels, options["BLOCK_N"]), log_sums, grad_qkv, partial, tokens,
            **constants, **options,
        )  # fmt: skip
        return grad_qkv, partial if biased else None
    queries, keys = QUERIES | (queries or {}), KEYS | (keys or {})
    counts = [triton.cdiv(max_length, queries["BLOCK_M"]), triton.cdiv(max_length, keys["BLOCK_N"])]
    length = channels.shape[-1]
    stats = torch.empty(3, heads, rows, length, **fp32)
    partial = torch.zeros(rows * max(counts) if biased else 0, 3, heads, width, **fp32)
    kernels.attention_backward_queries[(counts[0], heads, rows)](
        *tiles(queries["BLOCK_M"], queries["BLOCK_N"]), cu_seqlens, rows_hash,
        _channels(channels, queries["BLOCK_N"]), log_sums, grad_qkv, partial, stats, tokens,
        LENGTH=length, **constants, **queries,
    )  # fmt: skip
    del constants["KEEP_SCALE"]
    kernels.attention_backward_keys[(counts[1], heads, rows)](
        *tiles(keys["BLOCK_M"], keys["BLOCK_N"])[:3], cu_seqlens, channels, grad_qkv, partial, stats,
        LENGTH=length, **constants, **keys,
    )  # fmt: skip
    return grad_qkv, partial if biased else None


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, qkv, bias, cu_seqlens, max_length, token_keys, p, site, seed, first_head):
        drawn = hashes(token_keys, p, site, seed, qkv.shape[2], first_head, max_length)
        out, log_sums = forward(qkv, cu_seqlens, max_length, *drawn, p)
        ctx.save_for_backward(qkv, cu_seqlens, *drawn, out, log_sums)
        ctx.max_length, ctx.p, ctx.bias = max_length, p, bias
        return out

    @staticmethod
    def backward(ctx: Any, grad_out):
        qkv, cu_seqlens, rows, channels, out, log_sums = ctx.saved_tensors
        places = (ctx.bias is not None, cu_seqlens, ctx.max_length, rows, channels)
        grad_qkv, partial = backward(grad_out.contiguous(), qkv, *places, out, log_sums, ctx.p)
        (grad_bias,) = collect(partial, ctx.bias)
        return grad_qkv, grad_bias, *(None,) * 7


def attention(
    qkv, cu_seqlens, max_length, token_keys, p, site, seed, first_head=0, bias=None
) -> Tensor:
    """See `plain.attention`. Heads of a power of two from 16 on."""
    return _Attention.apply(
        qkv.contiguous(), bias, cu_seqlens, max_length, token_keys, p, site, seed, first_head
    )
