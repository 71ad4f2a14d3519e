"""Attention inside packed rows, forward and backward, with dropout regenerated from counters.

Rows of at most one tile: a program owns a whole (row, head) in both directions, and nothing but
qkv, the output gradient and the result touches memory. Longer rows: tiles with a running softmax;
the backward pass is one kernel for the queries' and one for the keys' and values' gradients,
without atomics, so that results are bit-equal from run to run.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl

from pretrain.kernels.hashing import HEAD_STRIDE, keep_scale, signed, stream, threshold
from pretrain.kernels.triton_hash import channel_hash, keep, row_hash

Tensor = torch.Tensor
LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)


@triton.jit
def _row(cu_seqlens, row):
    """(first token as int64, length)"""
    start = tl.load(cu_seqlens + row)
    return start.to(tl.int64), tl.load(cu_seqlens + row + 1) - start


@triton.jit
def _tile(base, token, valid, d, STRIDE: tl.constexpr):
    return tl.load(base + token[:, None] * STRIDE + d[None, :], mask=valid[:, None], other=0.0)


@triton.jit(do_not_specialize=["stream", "first_head"])
def _attention_forward(
    qkv, cu_seqlens, token_keys, out, log_sums, stream, first_head, tokens,
    SCALE: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    SINGLE: tl.constexpr, THRESHOLD: tl.constexpr, KEEP_SCALE: tl.constexpr,
    HEAD_STRIDE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0)
    start, length = _row(cu_seqlens, tl.program_id(1))
    first = tl.program_id(2) * BLOCK_M
    if first >= length:
        return
    WIDTH: tl.constexpr = HEADS * D
    base = qkv + start * (3 * WIDTH) + head * D
    d = tl.arange(0, D)
    query = first + tl.arange(0, BLOCK_M)
    q = _tile(base, query, query < length, d, 3 * WIDTH)
    if THRESHOLD > 0:
        rows = row_hash(tl.load(token_keys + start + query, mask=query < length, other=0), stream)
    largest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, D], tl.float32)
    # A static single turn lets the compiler drop the loop and its running rescale.
    stop = BLOCK_N if SINGLE else length
    for n in range(0, stop, BLOCK_N):
        key = n + tl.arange(0, BLOCK_N)
        k = _tile(base + WIDTH, key, key < length, d, 3 * WIDTH)
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION) * (SCALE * LOG2_E)
        s = tl.where(key[None, :] < length, s, float("-inf"))
        new = tl.maximum(largest, tl.max(s, 1))
        p = tl.exp2(s - new[:, None])
        shrink = tl.exp2(largest - new)
        total = total * shrink + tl.sum(p, 1)
        if THRESHOLD > 0:
            multiplier, shift = channel_hash((head + first_head) * HEAD_STRIDE + key)
            p = tl.where(
                keep(rows[:, None], multiplier[None, :], shift[None, :], THRESHOLD), p, 0.0
            )
        v = _tile(base + 2 * WIDTH, key, key < length, d, 3 * WIDTH)
        acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None], input_precision=PRECISION)
        largest = new
    acc *= (KEEP_SCALE / total)[:, None]
    target = out + start * WIDTH + head * D + query[:, None] * WIDTH + d[None, :]
    tl.store(target, acc.to(out.dtype.element_ty), mask=query[:, None] < length)
    tl.store(
        log_sums + head * tokens + start + query, largest + tl.log2(total), mask=query < length
    )


@triton.jit
def _transposed(
    q, k, v, do, log_sum, rows, multiplier, shift, key_valid,
    SCALE: tl.constexpr, THRESHOLD: tl.constexpr, KEEP_SCALE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Keys down, queries across: (p, dropped p, gradient of p), fp32 [keys, queries]. So two of
    the three products that follow take them as they lie in registers."""
    s = tl.dot(k, tl.trans(q), input_precision=PRECISION) * (SCALE * LOG2_E)
    p = tl.where(key_valid[:, None], tl.exp2(s - log_sum[None, :]), 0.0)
    dp = tl.dot(v, tl.trans(do), input_precision=PRECISION)
    dropped = p
    if THRESHOLD > 0:
        kept = keep(rows[None, :], multiplier[:, None], shift[:, None], THRESHOLD)
        dp = tl.where(kept, dp * KEEP_SCALE, 0.0)
        dropped = tl.where(kept, p * KEEP_SCALE, 0.0)
    return p, dropped, dp


@triton.jit(do_not_specialize=["stream", "first_head"])
def _attention_backward(
    qkv, cu_seqlens, token_keys, log_sums, grad_out, grad_qkv, grad_bias, stream, first_head, tokens,
    SCALE: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, BIAS: tl.constexpr,
    THRESHOLD: tl.constexpr, KEEP_SCALE: tl.constexpr, HEAD_STRIDE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """All gradients of a (row, head) whose row fits one tile."""
    head = tl.program_id(0)
    row = tl.program_id(1)
    start, length = _row(cu_seqlens, row)
    if length == 0:
        return
    WIDTH: tl.constexpr = HEADS * D
    base = qkv + start * (3 * WIDTH) + head * D
    d = tl.arange(0, D)
    token = tl.arange(0, BLOCK)
    valid = token < length
    q = _tile(base, token, valid, d, 3 * WIDTH)
    k = _tile(base + WIDTH, token, valid, d, 3 * WIDTH)
    v = _tile(base + 2 * WIDTH, token, valid, d, 3 * WIDTH)
    do = _tile(grad_out + start * WIDTH + head * D, token, valid, d, WIDTH)
    # Queries past the end get probability exp2(-inf) = 0, hence nothing comes from them.
    log_sum = tl.load(log_sums + head * tokens + start + token, mask=valid, other=float("inf"))
    rows = row_hash(tl.load(token_keys + start + token, mask=valid, other=0), stream)
    multiplier, shift = channel_hash((head + first_head) * HEAD_STRIDE + token)
    p, dropped, dp = _transposed(
        q,
        k,
        v,
        do,
        log_sum,
        rows,
        multiplier,
        shift,
        valid,
        SCALE,
        THRESHOLD,
        KEEP_SCALE,
        PRECISION,
    )
    target = grad_qkv + start * (3 * WIDTH) + head * D + token[:, None] * (3 * WIDTH) + d[None, :]
    dv = tl.dot(dropped.to(v.dtype), do, input_precision=PRECISION)
    tl.store(target + 2 * WIDTH, dv.to(v.dtype), mask=valid[:, None])
    ds = (p * (dp - tl.sum(p * dp, 0)[None, :]) * SCALE).to(k.dtype)
    dk = tl.dot(ds, q, input_precision=PRECISION)
    tl.store(target + WIDTH, dk.to(k.dtype), mask=valid[:, None])
    dq = tl.dot(tl.trans(ds), k, input_precision=PRECISION)
    tl.store(target, dq.to(q.dtype), mask=valid[:, None])
    if BIAS:
        partial = grad_bias + row * (3 * WIDTH) + head * D + d
        tl.store(partial, tl.sum(dq, 0))
        tl.store(partial + 2 * WIDTH, tl.sum(dv, 0))


@triton.jit(do_not_specialize=["stream", "first_head"])
def _attention_backward_queries(
    qkv, cu_seqlens, token_keys, out, log_sums, grad_out, grad_qkv, grad_bias, deltas, stream, first_head, tokens,
    SCALE: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BIAS: tl.constexpr, THRESHOLD: tl.constexpr, KEEP_SCALE: tl.constexpr,
    HEAD_STRIDE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dq of a tile of queries, and deltas = sum(out * grad_out) of each query for the kernel below."""
    head = tl.program_id(0)
    start, length = _row(cu_seqlens, tl.program_id(1))
    first = tl.program_id(2) * BLOCK_M
    if first >= length:
        return
    WIDTH: tl.constexpr = HEADS * D
    base = qkv + start * (3 * WIDTH) + head * D
    d = tl.arange(0, D)
    query = first + tl.arange(0, BLOCK_M)
    valid = query < length
    q = _tile(base, query, valid, d, 3 * WIDTH)
    do = _tile(grad_out + start * WIDTH + head * D, query, valid, d, WIDTH)
    o = _tile(out + start * WIDTH + head * D, query, valid, d, WIDTH)
    delta = tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)
    stats = head * tokens + start + query
    tl.store(deltas + stats, delta, mask=valid)
    log_sum = tl.load(log_sums + stats, mask=valid, other=float("inf"))
    if THRESHOLD > 0:
        rows = row_hash(tl.load(token_keys + start + query, mask=valid, other=0), stream)
    dq = tl.zeros([BLOCK_M, D], tl.float32)
    for n in range(0, length, BLOCK_N):
        key = n + tl.arange(0, BLOCK_N)
        k = _tile(base + WIDTH, key, key < length, d, 3 * WIDTH)
        v = _tile(base + 2 * WIDTH, key, key < length, d, 3 * WIDTH)
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION) * (SCALE * LOG2_E)
        p = tl.where(key[None, :] < length, tl.exp2(s - log_sum[:, None]), 0.0)
        dp = tl.dot(do, tl.trans(v), input_precision=PRECISION)
        if THRESHOLD > 0:
            multiplier, shift = channel_hash((head + first_head) * HEAD_STRIDE + key)
            kept = keep(rows[:, None], multiplier[None, :], shift[None, :], THRESHOLD)
            dp = tl.where(kept, dp * KEEP_SCALE, 0.0)
        ds = (p * (dp - delta[:, None])).to(k.dtype)
        dq = tl.dot(ds, k, dq, input_precision=PRECISION)
    dq *= SCALE
    target = grad_qkv + start * (3 * WIDTH) + head * D + query[:, None] * (3 * WIDTH) + d[None, :]
    tl.store(target, dq.to(q.dtype), mask=valid[:, None])
    if BIAS:
        tile = tl.program_id(1) * tl.num_programs(2) + tl.program_id(2)
        tl.store(grad_bias + tile * (3 * WIDTH) + head * D + d, tl.sum(dq, 0))


@triton.jit(do_not_specialize=["stream", "first_head"])
def _attention_backward_keys(
    qkv, cu_seqlens, token_keys, log_sums, grad_out, grad_qkv, grad_bias, deltas, stream, first_head, tokens,
    SCALE: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BIAS: tl.constexpr, THRESHOLD: tl.constexpr, KEEP_SCALE: tl.constexpr,
    HEAD_STRIDE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dk and dv of a tile of keys."""
    head = tl.program_id(0)
    start, length = _row(cu_seqlens, tl.program_id(1))
    first = tl.program_id(2) * BLOCK_N
    if first >= length:
        return
    WIDTH: tl.constexpr = HEADS * D
    base = qkv + start * (3 * WIDTH) + head * D
    d = tl.arange(0, D)
    key = first + tl.arange(0, BLOCK_N)
    valid = key < length
    k = _tile(base + WIDTH, key, valid, d, 3 * WIDTH)
    v = _tile(base + 2 * WIDTH, key, valid, d, 3 * WIDTH)
    multiplier, shift = channel_hash((head + first_head) * HEAD_STRIDE + key)
    dk = tl.zeros([BLOCK_N, D], tl.float32)
    dv = tl.zeros([BLOCK_N, D], tl.float32)
    for m in range(0, length, BLOCK_M):
        query = m + tl.arange(0, BLOCK_M)
        there = query < length
        q = _tile(base, query, there, d, 3 * WIDTH)
        do = _tile(grad_out + start * WIDTH + head * D, query, there, d, WIDTH)
        stats = head * tokens + start + query
        log_sum = tl.load(log_sums + stats, mask=there, other=float("inf"))
        delta = tl.load(deltas + stats, mask=there, other=0.0)
        rows = row_hash(tl.load(token_keys + start + query, mask=there, other=0), stream)
        p, dropped, dp = _transposed(
            q,
            k,
            v,
            do,
            log_sum,
            rows,
            multiplier,
            shift,
            valid,
            SCALE,
            THRESHOLD,
            KEEP_SCALE,
            PRECISION,
        )
        dv = tl.dot(dropped.to(v.dtype), do, dv, input_precision=PRECISION)
        ds = (p * (dp - delta[None, :])).to(k.dtype)
        dk = tl.dot(ds, q, dk, input_precision=PRECISION)
    dk *= SCALE
    target = grad_qkv + start * (3 * WIDTH) + head * D + key[:, None] * (3 * WIDTH) + d[None, :]
    tl.store(target + WIDTH, dk.to(k.dtype), mask=valid[:, None])
    tl.store(target + 2 * WIDTH, dv.to(k.dtype), mask=valid[:, None])
    if BIAS:
        tile = tl.program_id(1) * tl.num_programs(2) + tl.program_id(2)
        tl.store(grad_bias + tile * (3 * WIDTH) + 2 * WIDTH + head * D + d, tl.sum(dv, 0))


# Tile sizes and warps, measured on an H100 with heads of 64 (bench/results/speed.md).
SHORT = 128
FORWARD_SHORT: dict[str, Any] = {"BLOCK_M": 128, "num_warps": 4, "num_stages": 1}
FORWARD_LONG: dict[str, Any] = {"BLOCK_M": 128, "BLOCK_N": 64, "num_warps": 4, "num_stages": 3}
BACKWARD_SHORT: dict[str, Any] = {"num_warps": 8, "num_stages": 1}
QUERIES: dict[str, Any] = {"BLOCK_M": 128, "BLOCK_N": 64, "num_warps": 8, "num_stages": 2}
KEYS: dict[str, Any] = {"BLOCK_M": 64, "BLOCK_N": 128, "num_warps": 8, "num_stages": 2}


def _constants(qkv: Tensor, p: float) -> dict[str, Any]:
    _, _, heads, width = qkv.shape
    return {
        "SCALE": 1.0 / math.sqrt(width),
        "HEADS": heads,
        "D": width,
        "THRESHOLD": threshold(p),
        "KEEP_SCALE": keep_scale(p),
        "HEAD_STRIDE": HEAD_STRIDE,
        "PRECISION": "ieee" if qkv.dtype == torch.float32 else "tf32",
    }


def _tile_of(max_length: int) -> int:
    return max(16, triton.next_power_of_2(max_length))


def forward(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_length: int,
    token_keys: Tensor,
    p: float,
    site: int,
    seed: int,
    first_head: int,
    short: int = SHORT,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """Returns (out [T, heads * d], base-2 log-sums fp32 [heads, T])."""
    tokens, _, heads, width = qkv.shape
    if max_length <= short:
        tile = _tile_of(max_length)
        options = FORWARD_SHORT | {"BLOCK_N": tile} | options
        options["BLOCK_M"] = min(tile, options["BLOCK_M"])
    else:
        options = FORWARD_LONG | options
    out = qkv.new_empty(tokens, heads * width)
    log_sums = torch.empty(heads, tokens, dtype=torch.float32, device=qkv.device)
    grid = (heads, cu_seqlens.shape[0] - 1, triton.cdiv(max_length, options["BLOCK_M"]))
    _attention_forward[grid](
        qkv, cu_seqlens, token_keys, out, log_sums, signed(stream(seed, site)), first_head, tokens,
        SINGLE=max_length <= options["BLOCK_N"], **_constants(qkv, p), **options,
    )  # fmt: skip
    return out, log_sums


def backward(
    grad_out: Tensor,
    qkv: Tensor,
    biased: bool,
    cu_seqlens: Tensor,
    max_length: int,
    token_keys: Tensor,
    out: Tensor,
    log_sums: Tensor,
    p: float,
    site: int,
    seed: int,
    first_head: int,
    short: int = SHORT,
    queries: dict[str, Any] | None = None,
    keys: dict[str, Any] | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """Returns (gradient of qkv, gradient of the bias fp32 [3, heads, d] if `biased`).

    options: of the kernel for short rows; queries, keys: of the two for long rows.
    """
    tokens, _, heads, width = qkv.shape
    rows = cu_seqlens.shape[0] - 1
    fp32: dict[str, Any] = {"dtype": torch.float32, "device": qkv.device}
    grad_qkv = torch.empty_like(qkv)
    rest = (signed(stream(seed, site)), first_head, tokens)
    constants = _constants(qkv, p) | {"BIAS": biased}
    if max_length <= short:
        partial = torch.zeros(rows if biased else 0, 3, heads, width, **fp32)
        _attention_backward[(heads, rows)](
            qkv, cu_seqlens, token_keys, log_sums, grad_out, grad_qkv, partial, *rest,
            BLOCK=_tile_of(max_length), **constants, **(BACKWARD_SHORT | options),
        )  # fmt: skip
        return grad_qkv, partial.sum(0) if biased else None
    queries, keys = QUERIES | (queries or {}), KEYS | (keys or {})
    tiles = [triton.cdiv(max_length, queries["BLOCK_M"]), triton.cdiv(max_length, keys["BLOCK_N"])]
    deltas = torch.empty_like(log_sums)
    partial = torch.zeros(rows * max(tiles) if biased else 0, 3, heads, width, **fp32)
    _attention_backward_queries[(heads, rows, tiles[0])](
        qkv, cu_seqlens, token_keys, out, log_sums, grad_out, grad_qkv, partial, deltas, *rest,
        **constants, **queries,
    )  # fmt: skip
    _attention_backward_keys[(heads, rows, tiles[1])](
        qkv, cu_seqlens, token_keys, log_sums, grad_out, grad_qkv, partial, deltas, *rest,
        **constants, **keys,
    )  # fmt: skip
    return grad_qkv, partial.sum(0) if biased else None


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, qkv, bias, cu_seqlens, max_length, token_keys, p, site, seed, first_head):
        rest = (p, site, seed, first_head)
        out, log_sums = forward(qkv, cu_seqlens, max_length, token_keys, *rest)
        ctx.save_for_backward(qkv, cu_seqlens, token_keys, out, log_sums)
        ctx.rest, ctx.max_length = rest, max_length
        ctx.bias_dtype = None if bias is None else bias.dtype
        return out

    @staticmethod
    def backward(ctx: Any, grad_out):
        qkv, *saved = ctx.saved_tensors
        biased = ctx.bias_dtype is not None
        grad_qkv, grad_bias = backward(
            grad_out.contiguous(), qkv, biased, saved[0], ctx.max_length, *saved[1:], *ctx.rest
        )
        if grad_bias is not None:
            grad_bias = grad_bias.to(ctx.bias_dtype)
        return grad_qkv, grad_bias, *(None,) * 7


def attention(
    qkv, cu_seqlens, max_length, token_keys, p, site, seed, first_head=0, bias=None
) -> Tensor:
    """See `plain.attention`. Heads of a power of two from 16 on."""
    return _Attention.apply(
        qkv.contiguous(), bias, cu_seqlens, max_length, token_keys, p, site, seed, first_head
    )
