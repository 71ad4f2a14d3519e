"""LAMB in two passes over memory, every tensor of a flat partition in one launch each.

24 bytes a parameter in the first pass (read gradient, weight, two moments; write the moments),
18 in the second (read weight and moments; write weight and its bf16 copy). Norms are summed per
chunk and then per tensor in a fixed order, so that results are bit-equal from run to run.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pretrain.kernels.plain import LambTable

Tensor = torch.Tensor
CHUNK = 4096
BLOCK = 1024


@triton.jit
def _update(p, m, v, decay, eps, correction1, correction2):
    return (m / correction1) / (tl.sqrt(v / correction2) + eps) + decay * p


@triton.jit
def _moments(
    param, grad, exp_avg, exp_avg_sq, chunk_start, chunk_size, chunk_decay, partial, grad_scale,
    chunks, beta1, beta2, eps, correction1, correction2, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    chunk = tl.program_id(0)
    start = tl.load(chunk_start + chunk)
    size = tl.load(chunk_size + chunk)
    decay = tl.load(chunk_decay + chunk)
    scale = tl.load(grad_scale)
    if scale == scale:  # not NaN
        weights = tl.zeros([BLOCK], tl.float32)
        updates = tl.zeros([BLOCK], tl.float32)
        for i in range(0, CHUNK, BLOCK):
            at = i + tl.arange(0, BLOCK)
            valid = at < size
            place = start + at
            g = tl.load(grad + place, mask=valid, other=0.0).to(tl.float32) * scale
            p = tl.load(param + place, mask=valid, other=0.0)
            m = tl.load(exp_avg + place, mask=valid, other=0.0)
            v = tl.load(exp_avg_sq + place, mask=valid, other=0.0)
            m = beta1 * m + (1 - beta1) * g
            v = beta2 * v + (1 - beta2) * g * g
            tl.store(exp_avg + place, m, mask=valid)
            tl.store(exp_avg_sq + place, v, mask=valid)
            u = _update(p, m, v, decay, eps, correction1, correction2)
            weights += p * p
            updates += u * u
        tl.store(partial + chunk, tl.sum(weights, 0))
        tl.store(partial + chunks + chunk, tl.sum(updates, 0))


@triton.jit
def _reduce(partial, first_chunk, norms, chunks, tensors, BLOCK: tl.constexpr):
    tensor = tl.program_id(0)
    first = tl.load(first_chunk + tensor)
    last = tl.load(first_chunk + tensor + 1)
    for which in range(2):
        total = tl.zeros([BLOCK], tl.float32)
        for c in range(first, last, BLOCK):
            at = c + tl.arange(0, BLOCK)
            total += tl.load(partial + which * chunks + at, mask=at < last, other=0.0)
        tl.store(norms + which * tensors + tensor, tl.sum(total, 0))


@triton.jit
def _apply(
    param, exp_avg, exp_avg_sq, low, chunk_start, chunk_size, chunk_decay, chunk_tensor, ratios,
    lr, eps, correction1, correction2, LOW: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    chunk = tl.program_id(0)
    start = tl.load(chunk_start + chunk)
    size = tl.load(chunk_size + chunk)
    decay = tl.load(chunk_decay + chunk)
    rate = tl.load(ratios + tl.load(chunk_tensor + chunk)) * lr
    if rate == rate:  # not NaN
        for i in range(0, CHUNK, BLOCK):
            at = i + tl.arange(0, BLOCK)
            valid = at < size
            place = start + at
            p = tl.load(param + place, mask=valid, other=0.0)
            m = tl.load(exp_avg + place, mask=valid, other=0.0)
            v = tl.load(exp_avg_sq + place, mask=valid, other=0.0)
            p -= rate * _update(p, m, v, decay, eps, correction1, correction2)
            tl.store(param + place, p, mask=valid)
            if LOW:
                tl.store(low + place, p.to(low.dtype.element_ty), mask=valid)


def _chunks(table: LambTable, device: torch.device) -> tuple[Tensor, ...]:
    """(chunk start, size, decay, tensor, first chunk of each tensor) on `device`, made once."""
    cached = getattr(table, "_chunks", None)
    if cached is None or cached[0].device != device:
        start, size, decay, tensor, first = [], [], [], [], [0]
        for i, (begin, numel, rate) in enumerate(zip(table.starts, table.numels, table.decays)):
            for offset in range(0, numel, CHUNK):
                start.append(begin + offset)
                size.append(min(CHUNK, numel - offset))
                decay.append(rate)
                tensor.append(i)
            first.append(len(start))
        kinds = (torch.int64, torch.int32, torch.float32, torch.int32, torch.int32)
        columns = (start, size, decay, tensor, first)
        cached = tuple(torch.tensor(c, dtype=t, device=device) for c, t in zip(columns, kinds))
        table._chunks = cached  # type: ignore[attr-defined]
    return cached


def sum_chunks(partial: Tensor, first: Tensor) -> Tensor:
    """fp32 [2, tensors] of [2, chunks], in a fixed order. first: the first chunk of each tensor, and
    the end, int32 [tensors + 1]."""
    tensors, chunks = first.numel() - 1, partial.shape[1]
    norms = partial.new_zeros(2, tensors)
    if chunks:
        _reduce[(tensors,)](partial, first, norms, chunks, tensors, BLOCK=256, num_warps=2)
    return norms


@torch.no_grad()
def lamb_moments(
    param,
    grad,
    exp_avg,
    exp_avg_sq,
    table,
    *,
    beta1,
    beta2,
    eps,
    correction1,
    correction2,
    grad_scale,
):
    """See `plain.lamb_moments`."""
    start, size, decay, _, first = _chunks(table, param.device)
    chunks = start.numel()
    partial = torch.empty(2, chunks, dtype=torch.float32, device=param.device)
    if chunks:
        _moments[(chunks,)](
            param, grad, exp_avg, exp_avg_sq, start, size, decay, partial, grad_scale, chunks,
            beta1, beta2, eps, correction1, correction2, CHUNK=CHUNK, BLOCK=BLOCK, num_warps=4,
        )  # fmt: skip
    return sum_chunks(partial, first)


@torch.no_grad()
def lamb_apply(
    param, exp_avg, exp_avg_sq, table, ratios, *, lr, eps, correction1, correction2, low=None
):
    """See `plain.lamb_apply`."""
    start, size, decay, tensor, _ = _chunks(table, param.device)
    if start.numel():
        _apply[(start.numel(),)](
            param, exp_avg, exp_avg_sq, param if low is None else low, start, size, decay, tensor,
            ratios, lr, eps, correction1, correction2,
            LOW=low is not None, CHUNK=CHUNK, BLOCK=BLOCK, num_warps=4,
        )  # fmt: skip
