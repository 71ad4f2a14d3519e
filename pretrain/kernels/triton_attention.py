"""Attention inside packed rows, forward and backward, with dropout regenerated from counters.

One program of the backward pass owns a whole (row, head): with rows of at most one tile nothing
but qkv, the output gradient and the result touches memory, and longer rows collect dq in fp32
scratch that stays in the second-level cache, without atomics, so that results are bit-equal
from run to run. The gradient of the qkv bias comes out as one partial sum a row.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl

from pretrain.kernels.hashing import HEAD_STRIDE, keep_scale, signed, stream, threshold
from pretrain.kernels.triton_hash import attention_keep, mix, row_hash

Tensor = torch.Tensor


@triton.jit
def _column_hash(head, positions, HEAD_STRIDE: tl.constexpr):
    return mix(((head // 2) * HEAD_STRIDE + positions).to(tl.uint32))


@triton.jit
def _load_tile(
    base, bias, part, token, valid, d, HEADS: tl.constexpr, D: tl.constexpr, BIAS: tl.constexpr
):
    """[BLOCK, D] of q (part 0), k (1) or v (2) for one head; `base` points at row start and head."""
    offsets = token[:, None] * (3 * HEADS * D) + part * HEADS * D + d[None, :]
    tile = tl.load(base + offsets, mask=valid[:, None], other=0.0)
    if BIAS:
        tile = (
            tile.to(tl.float32) + tl.load(bias + part * HEADS * D + d).to(tl.float32)[None, :]
        ).to(tile.dtype)
    return tile


@triton.jit(do_not_specialize=["stream", "first_head"])
def _forward(
    qkv, bias, cu_seqlens, token_keys, out, log_sums, stream, first_head, tokens,
    SCALE: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    SINGLE: tl.constexpr, BIAS: tl.constexpr, THRESHOLD: tl.constexpr, KEEP_SCALE: tl.constexpr,
    STRIDE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0)
    row = tl.program_id(1)
    first = tl.program_id(2) * BLOCK_M
    start = tl.load(cu_seqlens + row)
    length = tl.load(cu_seqlens + row + 1) - start
    if first >= length:
        return
    base = qkv + start.to(tl.int64) * (3 * HEADS * D) + head * D
    bias += head * D
    d = tl.arange(0, D)
    query = first + tl.arange(0, BLOCK_M)
    q = _load_tile(base, bias, 0, query, query < length, d, HEADS, D, BIAS)
    if THRESHOLD > 0:
        keys = tl.load(token_keys + start + query, mask=query < length, other=0)
        rows = row_hash(keys, stream)
        odd = (head + first_head) % 2
    largest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, D], tl.float32)
    # A static single turn lets the compiler drop the loop and its running rescale.
    stop = BLOCK_N if SINGLE else length
    for n in range(0, stop, BLOCK_N):
        key = n + tl.arange(0, BLOCK_N)
        k = _load_tile(base, bias, 1, key, key < length, d, HEADS, D, BIAS)
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION) * (SCALE * 1.4426950408889634)
        s = tl.where(key[None, :] < length, s, float("-inf"))
        new = tl.maximum(largest, tl.max(s, 1))
        p = tl.exp2(s - new[:, None])
        shrink = tl.exp2(largest - new)
        total = total * shrink + tl.sum(p, 1)
        if THRESHOLD > 0:
            columns = _column_hash(head + first_head, key, STRIDE)
            p = tl.where(attention_keep(rows[:, None], columns[None, :], odd, THRESHOLD), p, 0.0)
        v = _load_tile(base, bias, 2, key, key < length, d, HEADS, D, BIAS)
        acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None], input_precision=PRECISION)
        largest = new
    acc *= (KEEP_SCALE / total)[:, None]
    destination = out + (start.to(tl.int64) + query[:, None]) * (HEADS * D) + head * D + d[None, :]
    tl.store(destination, acc.to(out.dtype.element_ty), mask=query[:, None] < length)
    tl.store(
        log_sums + head * tokens + start + query, largest + tl.log2(total), mask=query < length
    )


@triton.jit(do_not_specialize=["stream", "first_head"])
def _backward(
    qkv, bias, cu_seqlens, token_keys, out, log_sums, grad_out, grad_qkv, grad_bias, scratch, deltas,
    stream, first_head, tokens,
    SCALE: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    SINGLE: tl.constexpr, BIAS: tl.constexpr, THRESHOLD: tl.constexpr, KEEP_SCALE: tl.constexpr,
    STRIDE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0)
    row = tl.program_id(1)
    start = tl.load(cu_seqlens + row)
    length = tl.load(cu_seqlens + row + 1) - start
    if length == 0:
        return
    first = start.to(tl.int64)
    base = qkv + first * (3 * HEADS * D) + head * D
    bias += head * D
    grad_base = grad_qkv + first * (3 * HEADS * D) + head * D
    out_base = first * (HEADS * D) + head * D
    stats = head * tokens + start
    d = tl.arange(0, D)
    odd = (head + first_head) % 2
    if not SINGLE:
        for m in range(0, length, BLOCK_M):
            query = m + tl.arange(0, BLOCK_M)
            valid = query < length
            offsets = out_base + query[:, None] * (HEADS * D) + d[None, :]
            o = tl.load(out + offsets, mask=valid[:, None], other=0.0).to(tl.float32)
            do = tl.load(grad_out + offsets, mask=valid[:, None], other=0.0).to(tl.float32)
            tl.store(deltas + stats + query, tl.sum(o * do, 1), mask=valid)
        tl.debug_barrier()
    sum_dq = tl.zeros([D], tl.float32)
    sum_dk = tl.zeros([D], tl.float32)
    sum_dv = tl.zeros([D], tl.float32)
    stop_n = BLOCK_N if SINGLE else length
    stop_m = BLOCK_M if SINGLE else length
    for n in range(0, stop_n, BLOCK_N):
        key = n + tl.arange(0, BLOCK_N)
        k = _load_tile(base, bias, 1, key, key < length, d, HEADS, D, BIAS)
        v = _load_tile(base, bias, 2, key, key < length, d, HEADS, D, BIAS)
        dk = tl.zeros([BLOCK_N, D], tl.float32)
        dv = tl.zeros([BLOCK_N, D], tl.float32)
        if THRESHOLD > 0:
            columns = _column_hash(head + first_head, key, STRIDE)
        for m in range(0, stop_m, BLOCK_M):
            query = m + tl.arange(0, BLOCK_M)
            valid = query < length
            q = _load_tile(base, bias, 0, query, valid, d, HEADS, D, BIAS)
            offsets = out_base + query[:, None] * (HEADS * D) + d[None, :]
            do = tl.load(grad_out + offsets, mask=valid[:, None], other=0.0)
            # Queries past the end get probability exp2(-inf) = 0, hence no gradient from them.
            log_sum = tl.load(log_sums + stats + query, mask=valid, other=float("inf"))
            # Keys run down and queries across, so that three of the five products take the
            # probabilities as they lie in registers.
            s = tl.dot(k, tl.trans(q), input_precision=PRECISION) * (SCALE * 1.4426950408889634)
            p = tl.where(key[:, None] < length, tl.exp2(s - log_sum[None, :]), 0.0)
            dp = tl.dot(v, tl.trans(do), input_precision=PRECISION)
            if THRESHOLD > 0:
                keys = tl.load(token_keys + start + query, mask=valid, other=0)
                rows = row_hash(keys, stream)
                keep = attention_keep(rows[None, :], columns[:, None], odd, THRESHOLD)
                dp = tl.where(keep, dp * KEEP_SCALE, 0.0)
                dropped = tl.where(keep, p * KEEP_SCALE, 0.0)
            else:
                dropped = p
            dv = tl.dot(dropped.to(v.dtype), do, dv, input_precision=PRECISION)
            if SINGLE:
                delta = tl.sum(p * dp, 0)
            else:
                delta = tl.load(deltas + stats + query, mask=valid, other=0.0)
            ds = (p * (dp - delta[None, :]) * SCALE).to(k.dtype)
            dk = tl.dot(ds, q, dk, input_precision=PRECISION)
            dq = tl.dot(tl.trans(ds), k, input_precision=PRECISION)
            target = grad_base + query[:, None] * (3 * HEADS * D) + d[None, :]
            if SINGLE:
                tl.store(target, dq.to(q.dtype), mask=valid[:, None])
                if BIAS:
                    sum_dq += tl.sum(dq, 0)
            else:
                # The same threads load and store the same places, in turn n after n.
                if n > 0:
                    dq += tl.load(scratch + offsets, mask=valid[:, None], other=0.0)
                if n + BLOCK_N >= length:
                    tl.store(target, dq.to(q.dtype), mask=valid[:, None])
                    if BIAS:
                        sum_dq += tl.sum(dq, 0)
                else:
                    tl.store(scratch + offsets, dq, mask=valid[:, None])
        target = grad_base + key[:, None] * (3 * HEADS * D) + d[None, :]
        tl.store(target + HEADS * D, dk.to(k.dtype), mask=key[:, None] < length)
        tl.store(target + 2 * HEADS * D, dv.to(k.dtype), mask=key[:, None] < length)
        if BIAS:
            sum_dk += tl.sum(dk, 0)
            sum_dv += tl.sum(dv, 0)
        if not SINGLE:
            tl.debug_barrier()
    if BIAS:
        partial = grad_bias + (row * 3 * HEADS + head) * D + d
        tl.store(partial, sum_dq)
        tl.store(partial + HEADS * D, sum_dk)
        tl.store(partial + 2 * HEADS * D, sum_dv)


def _constants(qkv: Tensor, p: float) -> dict[str, Any]:
    _, _, heads, width = qkv.shape
    return {
        "SCALE": 1.0 / math.sqrt(width),
        "HEADS": heads,
        "D": width,
        "THRESHOLD": threshold(p),
        "KEEP_SCALE": keep_scale(p),
        "STRIDE": HEAD_STRIDE,
        "PRECISION": "ieee" if qkv.dtype == torch.float32 else "tf32",
    }


def _block(max_length: int, largest: int) -> int:
    return min(largest, max(16, triton.next_power_of_2(max_length)))


def forward(qkv, bias, cu_seqlens, max_length, token_keys, p, site, seed, first_head, **options):
    """Returns (out [T, heads * d], base-2 log-sums fp32 [heads, T])."""
    tokens, _, heads, width = qkv.shape
    rows = cu_seqlens.shape[0] - 1
    block_n = options.pop("BLOCK_N", None) or _block(max_length, 128)
    block_m = options.pop("BLOCK_M", None) or _block(max_length, 128)
    out = qkv.new_empty(tokens, heads * width)
    log_sums = torch.empty(heads, tokens, dtype=torch.float32, device=qkv.device)
    grid = (heads, rows, triton.cdiv(max_length, block_m))
    options.setdefault("num_warps", 8 if block_m * block_n > 64 * 64 else 4)
    options.setdefault("num_stages", 1 if max_length <= block_n else 2)
    _forward[grid](
        qkv, qkv if bias is None else bias, cu_seqlens, token_keys, out, log_sums,
        signed(stream(seed, site)), first_head, tokens,
        BLOCK_M=block_m, BLOCK_N=block_n, SINGLE=max_length <= block_n, BIAS=bias is not None,
        **_constants(qkv, p), **options,
    )  # fmt: skip
    return out, log_sums


def backward(
    grad_out,
    qkv,
    bias,
    cu_seqlens,
    max_length,
    token_keys,
    out,
    log_sums,
    p,
    site,
    seed,
    first_head,
    **options,
):
    """Returns (gradient of qkv, gradient of bias fp32 [3, heads, d] or None)."""
    tokens, _, heads, width = qkv.shape
    rows = cu_seqlens.shape[0] - 1
    block_n = options.pop("BLOCK_N", None) or _block(max_length, 128)
    block_m = options.pop("BLOCK_M", None) or _block(max_length, 128)
    single = max_length <= min(block_m, block_n)
    grad_qkv = torch.empty_like(qkv)
    partial = torch.zeros(
        rows if bias is not None else 0, 3, heads, width, dtype=torch.float32, device=qkv.device
    )
    fp32 = {"dtype": torch.float32, "device": qkv.device}
    scratch = torch.empty(0 if single else tokens * heads * width, **fp32)
    deltas = torch.empty(0 if single else tokens * heads, **fp32)
    options.setdefault("num_warps", 8 if block_m * block_n > 64 * 64 else 4)
    options.setdefault("num_stages", 1)
    _backward[(heads, rows)](
        qkv, qkv if bias is None else bias, cu_seqlens, token_keys, out, log_sums,
        grad_out.contiguous(), grad_qkv, partial, scratch, deltas,
        signed(stream(seed, site)), first_head, tokens,
        BLOCK_M=block_m, BLOCK_N=block_n, SINGLE=single, BIAS=bias is not None,
        **_constants(qkv, p), **options,
    )  # fmt: skip
    return grad_qkv, None if bias is None else partial.sum(0)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, qkv, bias, cu_seqlens, max_length, token_keys, p, site, seed, first_head):
        out, log_sums = forward(
            qkv, bias, cu_seqlens, max_length, token_keys, p, site, seed, first_head
        )
        ctx.save_for_backward(qkv, bias, cu_seqlens, token_keys, out, log_sums)
        ctx.rest = (max_length, p, site, seed, first_head)
        return out

    @staticmethod
    def backward(ctx: Any, grad_out):
        qkv, bias, cu_seqlens, token_keys, out, log_sums = ctx.saved_tensors
        max_length, p, site, seed, first_head = ctx.rest
        grad_qkv, grad_bias = backward(
            grad_out,
            qkv,
            bias,
            cu_seqlens,
            max_length,
            token_keys,
            out,
            log_sums,
            p,
            site,
            seed,
            first_head,
        )
        if grad_bias is not None:
            grad_bias = grad_bias.to(bias.dtype)
        return grad_qkv, grad_bias, *(None,) * 7


def attention(qkv, cu_seqlens, max_length, token_keys, p, site, seed, first_head=0, bias=None):
    """See `plain.attention`."""
    return _Attention.apply(
        qkv.contiguous(), bias, cu_seqlens, max_length, token_keys, p, site, seed, first_head
    )
