"""The passes over memory of `pretrain.kernels.matrices`, every matrix of one shape in one launch.

Momentum: 14 bytes a weight (read gradient and momentum; write the momentum and its bf16 direction).
Norms: 6. Apply: 12. The norms are summed in a fixed order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pretrain.kernels.matrices import MatrixTable

Tensor = torch.Tensor
CHUNK = 4096
BLOCK = 1024


@triton.jit
def _momentum(
    grad, exp_avg, out, starts, grad_scale, numel, chunks, beta1,
    CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    matrix = tl.program_id(0) // chunks
    first = (tl.program_id(0) % chunks) * CHUNK
    start = tl.load(starts + matrix)
    scale = tl.load(grad_scale)
    if scale == scale:  # not NaN
        for i in range(0, CHUNK, BLOCK):
            at = first + i + tl.arange(0, BLOCK)
            valid = at < numel
            g = tl.load(grad + start + at, mask=valid, other=0.0).to(tl.float32) * scale
            m = tl.load(exp_avg + start + at, mask=valid, other=0.0)
            m += (g - m) * (1 - beta1)
            tl.store(exp_avg + start + at, m, mask=valid)
            x = m + (g - m) * (1 - beta1)
            place = out + matrix.to(tl.int64) * numel + at
            tl.store(place, x.to(out.dtype.element_ty), mask=valid)


@triton.jit
def _norms(
    param, direction, partial, starts, numel, chunks, scale, decay,
    CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    matrix = tl.program_id(0) // chunks
    first = (tl.program_id(0) % chunks) * CHUNK
    start = tl.load(starts + matrix)
    weights = tl.zeros([BLOCK], tl.float32)
    updates = tl.zeros([BLOCK], tl.float32)
    for i in range(0, CHUNK, BLOCK):
        at = first + i + tl.arange(0, BLOCK)
        valid = at < numel
        p = tl.load(param + start + at, mask=valid, other=0.0)
        place = direction + matrix.to(tl.int64) * numel + at
        x = tl.load(place, mask=valid, other=0.0).to(tl.float32)
        u = x * scale + decay * p
        weights += p * p
        updates += u * u
    tl.store(partial + tl.program_id(0), tl.sum(weights, 0))
    tl.store(partial + tl.num_programs(0) + tl.program_id(0), tl.sum(updates, 0))


@triton.jit
def _apply(
    param, direction, low, starts, rates, numel, chunks, scale, decay,
    LOW: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    matrix = tl.program_id(0) // chunks
    first = (tl.program_id(0) % chunks) * CHUNK
    start = tl.load(starts + matrix)
    rate = tl.load(rates + matrix)
    if rate == rate:  # not NaN
        for i in range(0, CHUNK, BLOCK):
            at = first + i + tl.arange(0, BLOCK)
            valid = at < numel
            p = tl.load(param + start + at, mask=valid, other=0.0)
            place = direction + matrix.to(tl.int64) * numel + at
            x = tl.load(place, mask=valid, other=0.0).to(tl.float32)
            p -= rate * (x * scale + decay * p)
            tl.store(param + start + at, p, mask=valid)
            if LOW:
                tl.store(low + start + at, p.to(low.dtype.element_ty), mask=valid)


def _layout(table: MatrixTable, device: torch.device) -> tuple[Tensor, int]:
    """(starts on `device`, made once; chunks of a matrix)."""
    starts = getattr(table, "_starts", None)
    if starts is None or starts.device != device:
        starts = torch.tensor(table.starts, dtype=torch.int64, device=device)
        table._starts = starts  # type: ignore[attr-defined]
    return starts, triton.cdiv(table.numel, CHUNK)


@torch.no_grad()
def matrix_momentum(grad, exp_avg, table, *, beta1, grad_scale):
    """See `matrices.matrix_momentum`; in bf16."""
    starts, chunks = _layout(table, exp_avg.device)
    shape = (len(table.starts), table.rows, table.columns)
    out = torch.empty(shape, dtype=torch.bfloat16, device=exp_avg.device)
    _momentum[(shape[0] * chunks,)](
        grad, exp_avg, out, starts, grad_scale, table.numel, chunks, beta1,
        CHUNK=CHUNK, BLOCK=BLOCK, num_warps=4,
    )  # fmt: skip
    return out


@torch.no_grad()
def matrix_norms(param, direction, table):
    """See `matrices.matrix_norms`."""
    starts, chunks = _layout(table, param.device)
    n = len(table.starts)
    partial = torch.empty(2, n, chunks, dtype=torch.float32, device=param.device)
    _norms[(n * chunks,)](
        param, direction, partial, starts, table.numel, chunks, table.scale, table.decay,
        CHUNK=CHUNK, BLOCK=BLOCK, num_warps=4,
    )  # fmt: skip
    return partial.sum(-1)


@torch.no_grad()
def matrix_apply(param, direction, table, rates, low=None):
    """See `matrices.matrix_apply`."""
    starts, chunks = _layout(table, param.device)
    _apply[(len(table.starts) * chunks,)](
        param, direction, param if low is None else low, starts, rates, table.numel, chunks,
        table.scale, table.decay, LOW=low is not None, CHUNK=CHUNK, BLOCK=BLOCK, num_warps=4,
    )  # fmt: skip
