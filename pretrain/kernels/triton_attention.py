"""Attention inside packed rows, forward and backward, with dropout regenerated from counters.

Rows of at most one tile: a program of the backward pass owns a whole (row, head), reads each value
once and finds all three gradients. Longer rows: one kernel for the queries' and one for the keys'
and values' gradients. Neither uses atomics, so that results are bit-equal from run to run.

Tiles are read through tensor descriptors (the copy engine on Hopper): what lies behind a row's end
is the next row, so every sum over keys or queries masks the probabilities, never the tiles.
"""

from __future__ import annotations

import triton
import triton.language as tl

from pretrain.kernels.triton_hash import channel_hash, keep, row_hash

LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)


@triton.jit(do_not_specialize=["stream", "tokens"])
def hash_rows(token_keys, hashes, stream, tokens, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    keys = tl.load(token_keys + at, mask=at < tokens, other=0)
    tl.store(hashes + at, row_hash(keys, stream).to(tl.int32, bitcast=True), mask=at < tokens)


@triton.jit
def hash_channels(table, first_head, heads, LENGTH: tl.constexpr, HEAD_STRIDE: tl.constexpr):
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
def attention_forward(
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
def attention_backward(
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
def attention_backward_queries(
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
def attention_backward_keys(
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
