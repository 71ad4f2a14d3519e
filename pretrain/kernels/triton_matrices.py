"""The passes over memory of `pretrain.kernels.matrices`, every slice in one launch each.

Momentum: 14 bytes a weight (read gradient and momentum; write the momentum and its bf16 direction).
Norms: 6. Apply: 12. The norms are summed in a fixed order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pretrain.kernels.matrices import MatrixTable
from pretrain.kernels.triton_lamb import sum_chunks

Tensor = torch.Tensor
CHUNK = 4096
BLOCK = 1024


@triton.jit
def _momentum(
    grad, exp_avg, out, starts, places, sizes, grad_scale, beta1,
    CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    chunk = tl.program_id(0)
    start = tl.load(starts + chunk)
    place = tl.load(places + chunk)
    size = tl.load(sizes + chunk)
    scale = tl.load(grad_scale)
    if scale == scale:  # not NaN
        for i in range(0, CHUNK, BLOCK):
            at = i + tl.arange(0, BLOCK)
            valid = at < size
            g = tl.load(grad + start + at, mask=valid, other=0.0).to(tl.float32) * scale
            m = tl.load(exp_avg + start + at, mask=valid, other=0.0)
            m += (g - m) * (1 - beta1)
            tl.store(exp_avg + start + at, m, mask=valid)
            x = m + (g - m) * (1 - beta1)
            tl.store(out + place + at, x.to(out.dtype.element_ty), mask=valid)


@triton.jit
def _norms(
    param, direction, partial, starts, places, sizes, owners, scales, decays, chunks,
    CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    chunk = tl.program_id(0)
    start = tl.load(starts + chunk)
    place = tl.load(places + chunk)
    size = tl.load(sizes + chunk)
    owner = tl.load(owners + chunk)
    scale = tl.load(scales + owner)
    decay = tl.load(decays + owner)
    weights = tl.zeros([BLOCK], tl.float32)
    updates = tl.zeros([BLOCK], tl.float32)
    for i in range(0, CHUNK, BLOCK):
        at = i + tl.arange(0, BLOCK)
        valid = at < size
        p = tl.load(param + start + at, mask=valid, other=0.0)
        u = tl.load(direction + place + at, mask=valid, other=0.0).to(tl.float32) * scale
        u += decay * p
        weights += p * p
        updates += u * u
    tl.store(partial + chunk, tl.sum(weights, 0))
    tl.store(partial + chunks + chunk, tl.sum(updates, 0))


@triton.jit
def _apply(
    param, direction, low, starts, places, sizes, owners, scales, decays, rates,
    LOW: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    chunk = tl.program_id(0)
    start = tl.load(starts + chunk)
    place = tl.load(places + chunk)
    size = tl.load(sizes + chunk)
    owner = tl.load(owners + chunk)
    scale = tl.load(scales + owner)
    decay = tl.load(decays + owner)
    rate = tl.load(rates + owner)
    if rate == rate:  # not NaN
        for i in range(0, CHUNK, BLOCK):
            at = i + tl.arange(0, BLOCK)
            valid = at < size
            p = tl.load(param + start + at, mask=valid, other=0.0)
            u = tl.load(direction + place + at, mask=valid, other=0.0).to(tl.float32) * scale
            p -= rate * (u + decay * p)
            tl.store(param + start + at, p, mask=valid)
            if LOW:
                tl.store(low + start + at, p.to(low.dtype.element_ty), mask=valid)


def _chunks(table: MatrixTable, device: torch.device) -> tuple[Tensor, ...]:
    """(start, place, size, slice) of each chunk, (first chunk, scale, decay) of each slice, made once."""
    cached = getattr(table, "_chunks", None)
    if cached is None or cached[0].device != device:
        starts, places, sizes, owners, firsts = [], [], [], [], [0]
        for i, (start, numel, place) in enumerate(zip(table.starts, table.numels, table.places)):
            for offset in range(0, numel, CHUNK):
                starts.append(start + offset)
                places.append(place + offset)
                sizes.append(min(CHUNK, numel - offset))
                owners.append(i)
            firsts.append(len(starts))
        columns = (starts, places, sizes, owners, firsts, table.scales, table.decays)
        kinds = (*[torch.int64] * 2, *[torch.int32] * 3, *[torch.float32] * 2)
        cached = tuple(torch.tensor(c, dtype=t, device=device) for c, t in zip(columns, kinds))
        table._chunks = cached  # type: ignore[attr-defined]
    return cached


@torch.no_grad()
def matrix_momentum(grad, exp_avg, table, out, *, beta1, grad_scale):
    """See `matrices.matrix_momentum`."""
    starts, places, sizes, *_ = _chunks(table, exp_avg.device)
    if starts.numel():
        _momentum[(starts.numel(),)](
            grad, exp_avg, out, starts, places, sizes, grad_scale, beta1,
            CHUNK=CHUNK, BLOCK=BLOCK, num_warps=4,
        )  # fmt: skip


@torch.no_grad()
def matrix_norms(param, direction, table):
    """See `matrices.matrix_norms`."""
    starts, places, sizes, owners, firsts, scales, decays = _chunks(table, param.device)
    chunks = starts.numel()
    partial = torch.empty(2, chunks, dtype=torch.float32, device=param.device)
    if chunks:
        _norms[(chunks,)](
            param, direction, partial, starts, places, sizes, owners, scales, decays, chunks,
            CHUNK=CHUNK, BLOCK=BLOCK, num_warps=4,
        )  # fmt: skip
    return sum_chunks(partial, firsts)


@torch.no_grad()
def matrix_apply(param, direction, table, rates, low=None):
    """See `matrices.matrix_apply`."""
    starts, places, sizes, owners, _, scales, decays = _chunks(table, param.device)
    if starts.numel():
        _apply[(starts.numel(),)](
            param, direction, param if low is None else low, starts, places, sizes, owners, scales,
            decays, rates, LOW=low is not None, CHUNK=CHUNK, BLOCK=BLOCK, num_warps=4,
        )  # fmt: skip
