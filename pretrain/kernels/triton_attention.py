"""Attention inside packed rows, forward and backward, with dropout regenerated from counters.

Rows of at most one tile: a program of the backward pass owns a whole (row, head), reads each value
once and finds all three gradients. Longer rows: one kernel for the queries' and one for the keys'
and values' gradients. Neither uses atomics, so that results are bit-equal from run to run.

Tiles are read through tensor descriptors (the copy engine on Hopper): what lies behind a row's end
is the next row, so every sum over keys or queries masks the probabilities, never the tiles.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from pretrain.kernels.hashing import HEAD_STRIDE, keep_scale, signed, stream, threshold
from pretrain.kernels.triton_gradients import collect
from pretrain.kernels.triton_hash import channel_hash, keep, row_hash

Tensor = torch.Tensor
LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)


@triton.jit(do_not_specialize=["stream", "tokens"])
def _hash_rows(token_keys, hashes, stream, tokens, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    keys = tl.load(token_keys + at, mask=at < tokens, other=0)
    tl.store(hashes + at, row_hash(keys, stream).to(tl.int32, bitcast=True), mask=at < tokens)


@triton.jit
def _hash_channels(table, first_head, heads, LENGTH: tl.constexpr, HEAD_STRIDE: tl.constexpr):
    """table int32 [2, heads, LENGTH]: multipliers and offsets of each head's keys."""
    position = tl.arange(0, LENGTH)
    multiplier, shift = channel_hash((tl.program_id(0) + first_head) * HEAD_STRIDE + position)
    place = table + tl.program_id(0) * LENGTH + position
    tl.store(place, multiplier.to(tl.int32, bitcast=True))
    tl.store(place + heads * LENGTH, shift.to(tl.int32, bitcast=True))


@triton.jit
def _load_hash(place, mask):
    return tl.load(place, mask=mask, other=0).to(tl.uint32, bitcast=True)


@triton.jit
def _row(cu_seqlens, row):
    """(first token, length)"""
    start = tl.load(cu_seqlens + row)
    return start, tl.load(cu_seqlens + row + 1) - start


@triton.jit
def _place(base, start, token, column, STRIDE: tl.constexpr, D: tl.constexpr):
    """Pointers to [tokens, D] of a matrix with rows of STRIDE, for masked stores."""
    d = tl.arange(0, D)
    return base + start.to(tl.int64) * STRIDE + column + token[:, None] * STRIDE + d[None, :]


@triton.jit
def _attention_forward(
    queries, keys, cu_seqlens, hashes, channels, out, log_sums, tokens,
    SCALE: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    SINGLE: tl.constexpr, THRESHOLD: tl.constexpr, KEEP_SCALE: tl.constexpr,
    LENGTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """queries, keys: descriptors of qkv [T, 3 * WIDTH] with tiles of BLOCK_M and BLOCK_N rows."""
    head = tl.program_id(0)
    start, length = _row(cu_seqlens, tl.program_id(1))
    first = tl.program_id(2) * BLOCK_M
    if first >= length:
        return
    WIDTH: tl.constexpr = HEADS * D
    query = first + tl.arange(0, BLOCK_M)
    q = queries.load([start + first, head * D])
    if THRESHOLD > 0:
        rows = _load_hash(hashes + start + query, query < length)
    largest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, D], tl.float32)
    # A static single turn lets the compiler drop the loop and its running rescale.
    stop = BLOCK_N if SINGLE else length
    for n in range(0, stop, BLOCK_N):
        key = n + tl.arange(0, BLOCK_N)
        k = keys.load([start + n, WIDTH + head * D])
        v = keys.load([start + n, 2 * WIDTH + head * D])
        s = tl.dot(q, k.T, input_precision=PRECISION)
        s = tl.where(key[None, :] < length, s, float("-inf"))
        new = tl.maximum(largest, tl.max(s, 1) * (SCALE * LOG2_E))
        p = tl.exp2(s * (SCALE * LOG2_E) - new[:, None])
        shrink = tl.exp2(largest - new)
        total = total * shrink + tl.sum(p, 1)
        if THRESHOLD > 0:
            multiplier = _load_hash(channels + head * LENGTH + key, key < length)
            shift = _load_hash(channels + (HEADS + head) * LENGTH + key, key < length)
            p = tl.where(
                keep(rows[:, None], multiplier[None, :], shift[None, :], THRESHOLD), p, 0.0
            )
        acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None], input_precision=PRECISION)
        largest = new
    acc *= (KEEP_SCALE / total)[:, None]
    target = _place(out, start, query, head * D, WIDTH, D)
    tl.store(target, acc.to(out.dtype.element_ty), mask=query[:, None] < length)
    tl.store(
        log_sums + head * tokens + start + query, largest + tl.log2(total), mask=query < length
    )


@triton.jit
def _gradients(
    q, k, v, do, log_sum, delta, rows, multiplier, shift, key_valid,
    SCALE: tl.constexpr, THRESHOLD: tl.constexpr, KEEP_SCALE: tl.constexpr,
    MASK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Keys down, queries across, so that two of the three products that follow take the results as
    they lie in registers: (dropped p / KEEP_SCALE, gradient of the scores / SCALE), [keys, queries]."""
    s = tl.dot(k, q.T, input_precision=PRECISION)
    p = tl.exp2(s * (SCALE * LOG2_E) - log_sum[None, :])
    if MASK:
        p = tl.where(key_valid[:, None], p, 0.0)
    dp = tl.dot(v, do.T, input_precision=PRECISION)
    if THRESHOLD > 0:
        kept = keep(rows[None, :], multiplier[:, None], shift[:, None], THRESHOLD)
        ds = p * (tl.where(kept, dp, 0.0) * KEEP_SCALE - delta[None, :])
        p = tl.where(kept, p, 0.0)
    else:
        ds = p * (dp - delta[None, :])
    return p.to(q.dtype), ds.to(q.dtype)


@triton.jit
def _attention_backward(
    queries, keys, grads, outs, cu_seqlens, hashes, channels, log_sums, grad_qkv, grad_bias, tokens,
    SCALE: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BIAS: tl.constexpr, THRESHOLD: tl.constexpr, KEEP_SCALE: tl.constexpr,
    LENGTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """All gradients of a (row, head) of at most BLOCK_M tokens, BLOCK_N keys at a time."""
    head = tl.program_id(0)
    row = tl.program_id(1)
    start, length = _row(cu_seqlens, row)
    if length == 0:
        return
    WIDTH: tl.constexpr = HEADS * D
    query = tl.arange(0, BLOCK_M)
    valid = query < length
    q = queries.load([start, head * D])
    do = grads.load([start, head * D])
    o = outs.load([start, head * D])
    delta = tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)
    # Queries past the end get probability exp2(-inf) = 0, hence nothing comes from them.
    log_sum = tl.load(log_sums + head * tokens + start + query, mask=valid, other=float("inf"))
    rows = _load_hash(hashes + start + query, valid)
    dq = tl.zeros([BLOCK_M, D], tl.float32)
    sum_dv = tl.zeros([D], tl.float32)
    for n in range(0, length, BLOCK_N):
        key = n + tl.arange(0, BLOCK_N)
        k = keys.load([start + n, WIDTH + head * D])
        v = keys.load([start + n, 2 * WIDTH + head * D])
        multiplier = _load_hash(channels + head * LENGTH + key, key < length)
        shift = _load_hash(channels + (HEADS + head) * LENGTH + key, key < length)
        p, ds = _gradients(
            q, k, v, do, log_sum, delta, rows, multiplier, shift, key < length,
            SCALE, THRESHOLD, KEEP_SCALE, True, PRECISION,
        )  # fmt: skip
        dv = tl.dot(p, do, input_precision=PRECISION) * KEEP_SCALE
        target = _place(grad_qkv, start, key, head * D, 3 * WIDTH, D)
        there = key[:, None] < length
        tl.store(target + 2 * WIDTH, dv.to(k.dtype), mask=there)
        dk = tl.dot(ds, q, input_precision=PRECISION) * SCALE
        tl.store(target + WIDTH, dk.to(k.dtype), mask=there)
        dq = tl.dot(ds.T, k, dq, input_precision=PRECISION)
        if BIAS:
            sum_dv += tl.sum(dv, 0)
    dq *= SCALE
    target = _place(grad_qkv, start, query, head * D, 3 * WIDTH, D)
    tl.store(target, dq.to(q.dtype), mask=valid[:, None])
    if BIAS:
        partial = grad_bias + row * (3 * WIDTH) + head * D + tl.arange(0, D)
        tl.store(partial, tl.sum(dq, 0))
        tl.store(partial + 2 * WIDTH, sum_dv)


@triton.jit
def _attention_backward_queries(
    queries, keys, grads, outs, cu_seqlens, hashes, channels, log_sums, grad_qkv, grad_bias, deltas, tokens,
    SCALE: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BIAS: tl.constexpr, THRESHOLD: tl.constexpr, KEEP_SCALE: tl.constexpr,
    LENGTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dq of a tile of queries, and deltas = sum(out * grad_out) of each query for the kernel below."""
    head = tl.program_id(0)
    start, length = _row(cu_seqlens, tl.program_id(1))
    first = tl.program_id(2) * BLOCK_M
    if first >= length:
        return
    WIDTH: tl.constexpr = HEADS * D
    query = first + tl.arange(0, BLOCK_M)
    valid = query < length
    q = queries.load([start + first, head * D])
    do = grads.load([start + first, head * D])
    o = outs.load([start + first, head * D])
    delta = tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)
    stats = head * tokens + start + query
    tl.store(deltas + stats, delta, mask=valid)
    log_sum = tl.load(log_sums + stats, mask=valid, other=float("inf"))
    if THRESHOLD > 0:
        rows = _load_hash(hashes + start + query, valid)
    dq = tl.zeros([BLOCK_M, D], tl.float32)
    for n in range(0, length, BLOCK_N):
        key = n + tl.arange(0, BLOCK_N)
        k = keys.load([start + n, WIDTH + head * D])
        v = keys.load([start + n, 2 * WIDTH + head * D])
        s = tl.dot(q, k.T, input_precision=PRECISION)
        p = tl.exp2(s * (SCALE * LOG2_E) - log_sum[:, None])
        p = tl.where(key[None, :] < length, p, 0.0)
        dp = tl.dot(do, v.T, input_precision=PRECISION)
        if THRESHOLD > 0:
            multiplier = _load_hash(channels + head * LENGTH + key, key < length)
            shift = _load_hash(channels + (HEADS + head) * LENGTH + key, key < length)
            kept = keep(rows[:, None], multiplier[None, :], shift[None, :], THRESHOLD)
            dp = tl.where(kept, dp, 0.0) * KEEP_SCALE
        ds = (p * (dp - delta[:, None])).to(k.dtype)
        dq = tl.dot(ds, k, dq, input_precision=PRECISION)
    dq *= SCALE
    target = _place(grad_qkv, start, query, head * D, 3 * WIDTH, D)
    tl.store(target, dq.to(q.dtype), mask=valid[:, None])
    if BIAS:
        tile = tl.program_id(1) * tl.num_programs(2) + tl.program_id(2)
        tl.store(grad_bias + tile * (3 * WIDTH) + head * D + tl.arange(0, D), tl.sum(dq, 0))


@triton.jit
def _attention_backward_keys(
    queries, keys, grads, cu_seqlens, hashes, channels, log_sums, grad_qkv, grad_bias, deltas, tokens,
    SCALE: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BIAS: tl.constexpr, THRESHOLD: tl.constexpr, KEEP_SCALE: tl.constexpr,
    LENGTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dk and dv of a tile of keys."""
    head = tl.program_id(0)
    start, length = _row(cu_seqlens, tl.program_id(1))
    first = tl.program_id(2) * BLOCK_N
    if first >= length:
        return
    WIDTH: tl.constexpr = HEADS * D
    key = first + tl.arange(0, BLOCK_N)
    there = key[:, None] < length
    k = keys.load([start + first, WIDTH + head * D])
    v = keys.load([start + first, 2 * WIDTH + head * D])
    multiplier = _load_hash(channels + head * LENGTH + key, key < length)
    shift = _load_hash(channels + (HEADS + head) * LENGTH + key, key < length)
    dk = tl.zeros([BLOCK_N, D], tl.float32)
    dv = tl.zeros([BLOCK_N, D], tl.float32)
    for m in range(0, length, BLOCK_M):
        query = m + tl.arange(0, BLOCK_M)
        valid = query < length
        q = queries.load([start + m, head * D])
        do = grads.load([start + m, head * D])
        stats = head * tokens + start + query
        log_sum = tl.load(log_sums + stats, mask=valid, other=float("inf"))
        delta = tl.load(deltas + stats, mask=valid, other=0.0)
        rows = _load_hash(hashes + start + query, valid)
        # Keys past the end spoil only their own rows, which are not stored.
        p, ds = _gradients(
            q, k, v, do, log_sum, delta, rows, multiplier, shift, there,
            SCALE, THRESHOLD, KEEP_SCALE, False, PRECISION,
        )  # fmt: skip
        dv = tl.dot(p, do, dv, input_precision=PRECISION)
        dk = tl.dot(ds, q, dk, input_precision=PRECISION)
    dk *= SCALE
    dv = tl.where(there, dv * KEEP_SCALE, 0.0)
    target = _place(grad_qkv, start, key, head * D, 3 * WIDTH, D)
    tl.store(target + WIDTH, dk.to(k.dtype), mask=there)
    tl.store(target + 2 * WIDTH, dv.to(k.dtype), mask=there)
    if BIAS:
        tile = tl.program_id(1) * tl.num_programs(2) + tl.program_id(2)
        tl.store(
            grad_bias + tile * (3 * WIDTH) + 2 * WIDTH + head * D + tl.arange(0, D), tl.sum(dv, 0)
        )


# Tile sizes and warps, measured on an H100 with heads of 64 (bench/results/speed.md).
SHORT = 128
FORWARD_SHORT: dict[str, Any] = {"BLOCK_M": 128, "BLOCK_N": 64, "num_warps": 4, "num_stages": 2}
FORWARD_LONG: dict[str, Any] = {"BLOCK_M": 128, "BLOCK_N": 64, "num_warps": 4, "num_stages": 3}
BACKWARD_SHORT: dict[str, Any] = {"BLOCK_N": 32, "num_warps": 4, "num_stages": 2}
QUERIES: dict[str, Any] = {"BLOCK_M": 128, "BLOCK_N": 64, "num_warps": 4, "num_stages": 3}
KEYS: dict[str, Any] = {"BLOCK_M": 32, "BLOCK_N": 128, "num_warps": 4, "num_stages": 3}


_TABLES: dict[tuple[Any, ...], Tensor] = {}


def hashes(
    token_keys: Tensor, p: float, site: int, seed: int, heads: int, first_head: int, max_length: int
) -> tuple[Tensor, Tensor]:
    """(row hashes of this site int32 [T], channel table int32 [2, heads, length]); see `hashing`.

    Made once, since inside the attention kernels they cost a quarter of their arithmetic. The
    table is the same for all layers and steps.
    """
    if p == 0.0:
        return token_keys, token_keys
    length = triton.next_power_of_2(max_length)
    key = (token_keys.device, heads, first_head, length)
    if key not in _TABLES:
        table = torch.empty(2, heads, length, dtype=torch.int32, device=token_keys.device)
        _hash_channels[(heads,)](table, first_head, heads, LENGTH=length, HEAD_STRIDE=HEAD_STRIDE)
        _TABLES[key] = table
    rows = torch.empty_like(token_keys)
    tokens = len(token_keys)
    salt = signed(stream(seed, site))
    _hash_rows[(triton.cdiv(tokens, 1024),)](token_keys, rows, salt, tokens, BLOCK=1024)
    return rows, _TABLES[key]


def _constants(qkv: Tensor, p: float, max_length: int) -> dict[str, Any]:
    _, _, heads, width = qkv.shape
    return {
        "SCALE": 1.0 / math.sqrt(width),
        "HEADS": heads,
        "D": width,
        "THRESHOLD": threshold(p),
        "KEEP_SCALE": keep_scale(p),
        "LENGTH": triton.next_power_of_2(max_length),
        "PRECISION": "ieee" if qkv.dtype == torch.float32 else "tf32",
    }


def _tiles(x: Tensor, rows: int, width: int) -> TensorDescriptor:
    return TensorDescriptor.from_tensor(x.view(x.shape[0], -1), [rows, width])


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
    """Returns (out [T, heads * d], base-2 log-sums fp32 [heads, T])."""
    tokens, _, heads, width = qkv.shape
    if max_length <= short:
        tile = max(16, triton.next_power_of_2(max_length))
        options = FORWARD_SHORT | options
        options |= {size: min(tile, options[size]) for size in ("BLOCK_M", "BLOCK_N")}
    else:
        options = FORWARD_LONG | options
    m, n = options["BLOCK_M"], options["BLOCK_N"]
    out = qkv.new_empty(tokens, heads * width)
    log_sums = torch.empty(heads, tokens, dtype=torch.float32, device=qkv.device)
    _attention_forward[(heads, cu_seqlens.shape[0] - 1, triton.cdiv(max_length, m))](
        _tiles(qkv, m, width), _tiles(qkv, n, width), cu_seqlens, rows_hash, channels, out, log_sums,
        tokens, SINGLE=max_length <= n, **_constants(qkv, p, max_length), **options,
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
    constants = _constants(qkv, p, max_length) | {"BIAS": biased}

    def tiles(m: int, n: int) -> tuple[TensorDescriptor, ...]:
        sizes = ((qkv, m), (qkv, n), (grad_out, m), (out, m))
        return tuple(_tiles(x, size, width) for x, size in sizes)

    if max_length <= short:
        options = (
            BACKWARD_SHORT | {"BLOCK_M": max(16, triton.next_power_of_2(max_length))} | options
        )
        options["BLOCK_N"] = min(options["BLOCK_M"], options["BLOCK_N"])
        partial = torch.zeros(rows if biased else 0, 3, heads, width, **fp32)
        _attention_backward[(heads, rows)](
            *tiles(options["BLOCK_M"], options["BLOCK_N"]), cu_seqlens, rows_hash, channels,
            log_sums, grad_qkv, partial, tokens, **constants, **options,
        )  # fmt: skip
        return grad_qkv, partial if biased else None
    queries, keys = QUERIES | (queries or {}), KEYS | (keys or {})
    counts = [triton.cdiv(max_length, queries["BLOCK_M"]), triton.cdiv(max_length, keys["BLOCK_N"])]
    deltas = torch.empty_like(log_sums)
    partial = torch.zeros(rows * max(counts) if biased else 0, 3, heads, width, **fp32)
    _attention_backward_queries[(heads, rows, counts[0])](
        *tiles(queries["BLOCK_M"], queries["BLOCK_N"]), cu_seqlens, rows_hash, channels,
        log_sums, grad_qkv, partial, deltas, tokens, **constants, **queries,
    )  # fmt: skip
    _attention_backward_keys[(heads, rows, counts[1])](
        *tiles(keys["BLOCK_M"], keys["BLOCK_N"])[:3], cu_seqlens, rows_hash, channels,
        log_sums, grad_qkv, partial, deltas, tokens, **constants, **keys,
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
