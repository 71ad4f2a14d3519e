"""Attention inside packed rows, forward and backward, with dropout regenerated from counters.

Rows of at most one tile: a program of the backward pass owns a whole (row, head), reads each value
once and finds all three gradients. Longer rows: one kernel for the queries' and one for the keys'
and values' gradients. Neither uses atomics, so that results are bit-equal from run to run.

Tiles are read through tensor descriptors (the copy engine on Hopper): what lies behind a row's end
is the next row, so every sum over keys or queries masks the probabilities, never the tiles. The
forward pass lowers its log-sums by log2(KEEP_SCALE), so that the backward kernels find every
probability p already scaled: with D = 1 where kept, else 0, and delta = sum(out * grad_out),
dv = (D p)' do and dscores = D p * (do v') - p * delta / KEEP_SCALE.
"""

from __future__ import annotations

import triton
import triton.language as tl

from pretrain.kernels.triton_hash import drop

LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)


@triton.jit
def _channels(table, head, n, HEADS: tl.constexpr, BLOCK: tl.constexpr):
    """(multipliers, offsets) of BLOCK keys from n on, through a descriptor: no masks, no addresses."""
    multiplier = table.load([head, n]).reshape(BLOCK).to(tl.uint32, bitcast=True)
    shift = table.load([HEADS + head, n]).reshape(BLOCK).to(tl.uint32, bitcast=True)
    return multiplier, shift


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
    FEW: tl.constexpr, THRESHOLD: tl.constexpr, KEEP_SCALE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Program (tile of queries, head, row): the tiles of a row run side by side and share its keys.

    queries, keys: descriptors of qkv [T, 3 * WIDTH] with tiles of BLOCK_M and BLOCK_N rows;
    channels: of the hashes' table [2 * HEADS, length].
    """
    head = tl.program_id(1)
    start, length = _row(cu_seqlens, tl.program_id(2))
    first = tl.program_id(0) * BLOCK_M
    if first >= length:
        return
    WIDTH: tl.constexpr = HEADS * D
    query = first + tl.arange(0, BLOCK_M)
    q = queries.load([start + first, head * D])
    rows = _load_hash(hashes + start + query, query < length)
    largest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, D], tl.float32)
    for n in range(0, length, BLOCK_N):
        k = keys.load([start + n, WIDTH + head * D])
        v = keys.load([start + n, 2 * WIDTH + head * D])
        s = tl.dot(q, k.T, input_precision=PRECISION)
        key = n + tl.arange(0, BLOCK_N)
        # With few tiles a branch would cost more registers than it saves time.
        if FEW or n + BLOCK_N > length:
            s = tl.where(key[None, :] < length, s, float("-inf"))
        new = tl.maximum(largest, tl.max(s, 1) * (SCALE * LOG2_E))
        p = tl.exp2(s * (SCALE * LOG2_E) - new[:, None])
        shrink = tl.exp2(largest - new)
        total = total * shrink + tl.sum(p, 1)
        if THRESHOLD > 0:
            multiplier, shift = _channels(channels, head, n, HEADS, BLOCK_N)
            p = drop(p, rows[:, None], multiplier[None, :], shift[None, :], THRESHOLD)
        acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None], input_precision=PRECISION)
        largest = new
    total *= 1 / KEEP_SCALE
    acc *= (1 / total)[:, None]
    target = _place(out, start, query, head * D, WIDTH, D)
    tl.store(target, acc.to(out.dtype.element_ty), mask=query[:, None] < length)
    place = log_sums + head * tokens + start + query
    tl.store(place, largest + tl.log2(total), mask=query < length)


@triton.jit
def _delta(out, grad_out, KEEP_SCALE: tl.constexpr):
    return tl.sum(out.to(tl.float32) * grad_out.to(tl.float32), 1) * (1 / KEEP_SCALE)


@triton.jit
def _add_key_gradients(
    q, k, v, do, dk, dv, log_sum, delta, rows, multiplier, shift, key_valid,
    SCALE: tl.constexpr, THRESHOLD: tl.constexpr, MASK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """(dk / SCALE, dv, gradient of the scores). Keys down, queries across, so that both sums take
    the results as they lie in registers; the sum into dv stands between the two products of scores,
    since that needs the fewest registers. MASK: keys outside key_valid count as absent."""
    s = tl.dot(k, q.T, input_precision=PRECISION)
    p = tl.exp2(s * (SCALE * LOG2_E) - log_sum[None, :])
    if MASK:
        p = tl.where(key_valid[:, None], p, 0.0)
    less = p * delta[None, :]
    if THRESHOLD > 0:
        p = drop(p, rows[None, :], multiplier[:, None], shift[:, None], THRESHOLD)
    dv = tl.dot(p.to(q.dtype), do, dv, input_precision=PRECISION)
    dp = tl.dot(v, do.T, input_precision=PRECISION)
    ds = (p * dp - less).to(q.dtype)
    dk = tl.dot(ds, q, dk, input_precision=PRECISION)
    return dk, dv, ds


@triton.jit
def attention_backward(
    queries, keys, grads, outs, cu_seqlens, hashes, channels, log_sums, grad_qkv, grad_bias, tokens,
    SCALE: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BIAS: tl.constexpr, THRESHOLD: tl.constexpr, KEEP_SCALE: tl.constexpr, PRECISION: tl.constexpr,
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
    delta = _delta(outs.load([start, head * D]), do, KEEP_SCALE)
    # Queries past the end get probability exp2(-inf) = 0, hence nothing comes from them.
    log_sum = tl.load(log_sums + head * tokens + start + query, mask=valid, other=float("inf"))
    rows = _load_hash(hashes + start + query, valid)
    dq = tl.zeros([BLOCK_M, D], tl.float32)
    sum_dv = tl.zeros([D], tl.float32)
    for n in range(0, length, BLOCK_N):
        key = n + tl.arange(0, BLOCK_N)
        k = keys.load([start + n, WIDTH + head * D])
        v = keys.load([start + n, 2 * WIDTH + head * D])
        multiplier, shift = _channels(channels, head, n, HEADS, BLOCK_N)
        none = tl.zeros([BLOCK_N, D], tl.float32)
        dk, dv, ds = _add_key_gradients(
            q, k, v, do, none, none, log_sum, delta, rows, multiplier, shift, key < length,
            SCALE, THRESHOLD, True, PRECISION,
        )  # fmt: skip
        dq = tl.dot(ds.T, k, dq, input_precision=PRECISION)
        dk *= SCALE
        target = _place(grad_qkv, start, key, head * D, 3 * WIDTH, D)
        there = key[:, None] < length
        tl.store(target + 2 * WIDTH, dv.to(k.dtype), mask=there)
        tl.store(target + WIDTH, dk.to(k.dtype), mask=there)
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
def _add_query_gradients(
    q, do, dq, keys, channels, start, length, n, head, rows, log_sum, delta,
    SCALE: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, BLOCK_N: tl.constexpr,
    THRESHOLD: tl.constexpr, MASK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dq / SCALE and what comes from the tile of keys at n."""
    k = keys.load([start + n, HEADS * D + head * D])
    v = keys.load([start + n, 2 * HEADS * D + head * D])
    s = tl.dot(q, k.T, input_precision=PRECISION)
    p = tl.exp2(s * (SCALE * LOG2_E) - log_sum[:, None])
    if MASK:
        key = n + tl.arange(0, BLOCK_N)
        p = tl.where(key[None, :] < length, p, 0.0)
    less = p * delta[:, None]
    if THRESHOLD > 0:
        multiplier, shift = _channels(channels, head, n, HEADS, BLOCK_N)
        p = drop(p, rows[:, None], multiplier[None, :], shift[None, :], THRESHOLD)
    dp = tl.dot(do, v.T, input_precision=PRECISION)
    ds = p * dp - less
    return tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)


@triton.jit
def _stats(stats, head, HEADS: tl.constexpr, LENGTH: tl.constexpr):
    """(place of this program's row and head, size of a plane) in stats [3, HEADS, rows, LENGTH]."""
    rows = tl.num_programs(2)
    return stats + (head * rows + tl.program_id(2)) * LENGTH, HEADS * rows * LENGTH


@triton.jit
def attention_backward_queries(
    queries, keys, grads, outs, cu_seqlens, hashes, channels, log_sums, grad_qkv, grad_bias, stats, tokens,
    SCALE: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BIAS: tl.constexpr, THRESHOLD: tl.constexpr, KEEP_SCALE: tl.constexpr,
    LENGTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dq of a tile of queries, and what the kernel below needs of each, for that kernel.

    stats fp32 [3, heads, rows, LENGTH]: log-sums, deltas, hashes. There every row starts at a
    multiple of a vector, and queries past its end are told to have no part.
    """
    head = tl.program_id(1)
    start, length = _row(cu_seqlens, tl.program_id(2))
    first = tl.program_id(0) * BLOCK_M
    if first >= length:
        return
    WIDTH: tl.constexpr = HEADS * D
    query = first + tl.arange(0, BLOCK_M)
    valid = query < length
    q = queries.load([start + first, head * D])
    do = grads.load([start + first, head * D])
    delta = _delta(outs.load([start + first, head * D]), do, KEEP_SCALE)
    log_sum = tl.load(log_sums + head * tokens + start + query, mask=valid, other=float("inf"))
    rows = _load_hash(hashes + start + query, valid)
    place, plane = _stats(stats, head, HEADS, LENGTH)
    tl.store(place + query, log_sum)
    tl.store(place + plane + query, tl.where(valid, delta, 0.0))
    tl.store(place + 2 * plane + query, rows.to(tl.float32, bitcast=True))
    dq = tl.zeros([BLOCK_M, D], tl.float32)
    # Masks in the loop cost a quarter of its time: only the last tile, if cut short, has one.
    whole = length // BLOCK_N * BLOCK_N
    for n in range(0, whole, BLOCK_N):
        dq = _add_query_gradients(
            q, do, dq, keys, channels, start, length, n, head, rows, log_sum, delta,
            SCALE, HEADS, D, BLOCK_N, THRESHOLD, False, PRECISION,
        )  # fmt: skip
    if whole < length:
        dq = _add_query_gradients(
            q, do, dq, keys, channels, start, length, whole, head, rows, log_sum, delta,
            SCALE, HEADS, D, BLOCK_N, THRESHOLD, True, PRECISION,
        )  # fmt: skip
    dq *= SCALE
    target = _place(grad_qkv, start, query, head * D, 3 * WIDTH, D)
    tl.store(target, dq.to(q.dtype), mask=valid[:, None])
    if BIAS:
        tile = tl.program_id(2) * tl.num_programs(0) + tl.program_id(0)
        tl.store(grad_bias + tile * (3 * WIDTH) + head * D + tl.arange(0, D), tl.sum(dq, 0))


@triton.jit
def attention_backward_keys(
    queries, keys, grads, cu_seqlens, channels, grad_qkv, grad_bias, stats,
    SCALE: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BIAS: tl.constexpr, THRESHOLD: tl.constexpr, LENGTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dk and dv of a tile of keys. channels: a pointer to the table [2, HEADS, LENGTH]."""
    head = tl.program_id(1)
    start, length = _row(cu_seqlens, tl.program_id(2))
    first = tl.program_id(0) * BLOCK_N
    if first >= length:
        return
    WIDTH: tl.constexpr = HEADS * D
    key = first + tl.arange(0, BLOCK_N)
    there = key < length
    k = keys.load([start + first, WIDTH + head * D])
    v = keys.load([start + first, 2 * WIDTH + head * D])
    multiplier = _load_hash(channels + head * LENGTH + key, there)
    shift = _load_hash(channels + (HEADS + head) * LENGTH + key, there)
    dk = tl.zeros([BLOCK_N, D], tl.float32)
    dv = tl.zeros([BLOCK_N, D], tl.float32)
    place, plane = _stats(stats, head, HEADS, LENGTH)
    # Keys past the end spoil only their own rows, which are not stored.
    for m in range(0, length, BLOCK_M):
        at = place + m + tl.arange(0, BLOCK_M)
        rows = tl.load(at + 2 * plane).to(tl.uint32, bitcast=True)
        dk, dv, _ = _add_key_gradients(
            queries.load([start + m, head * D]), k, v, grads.load([start + m, head * D]), dk, dv,
            tl.load(at), tl.load(at + plane), rows, multiplier, shift, there,
            SCALE, THRESHOLD, False, PRECISION,
        )  # fmt: skip
    dk *= SCALE
    target = _place(grad_qkv, start, key, head * D, 3 * WIDTH, D)
    tl.store(target + WIDTH, dk.to(k.dtype), mask=there[:, None])
    tl.store(target + 2 * WIDTH, dv.to(k.dtype), mask=there[:, None])
    if BIAS:
        dv = tl.where(there[:, None], dv, 0.0)
        tile = tl.program_id(2) * tl.num_programs(0) + tl.program_id(0)
        tl.store(
            grad_bias + tile * (3 * WIDTH) + 2 * WIDTH + head * D + tl.arange(0, D), tl.sum(dv, 0)
        )
