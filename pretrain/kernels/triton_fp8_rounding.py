"""Matrices in e4m3: rounding, and turning what is rounded."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from pretrain.kernels.triton_scales import power_of_two


class Eight(NamedTuple):
    """A matrix [n, k] in e4m3."""

    values: Tensor  # e4m3 [n, k]
    stats: Tensor  # fp32 [2, n]: scale of each row; a bound of its 2-norm
    peaks: Tensor | None = None  # fp32 [2], the largest of both
    across: tuple[Tensor, Tensor] | None = None  # e4m3 [k, n] and its one scale, fp32 [1]

    def largest(self) -> Tensor:
        return self.stats.amax(1) if self.peaks is None else self.peaks


@triton.jit
def _quantise(x, y, stats, n, K: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    at = row.to(tl.int64) * K + column
    v = tl.load(x + at, mask=column < K, other=0.0).to(tl.float32)
    scale = power_of_two(tl.max(tl.abs(v), 0))
    tl.store(y + at, (v * (1.0 / scale)).to(tl.float8e4nv), mask=column < K)
    tl.store(stats + row, scale)
    tl.store(stats + n + row, tl.sqrt(tl.sum(v * v, 0)))


@triton.jit
def _quantise_columns(
    x, y, stats, n, K: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    """x [n, K] -> y [K, n], a scale for each column of x."""
    row = tl.arange(0, ROWS)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    valid = (row[:, None] < n) & (column[None, :] < K)
    v = tl.load(x + row[:, None] * K + column[None, :], mask=valid, other=0.0).to(tl.float32)
    scale = power_of_two(tl.max(tl.abs(v), 0))
    rounded = (v * (1.0 / scale)[None, :]).to(tl.float8e4nv)
    valid_across = (column[:, None] < K) & (row[None, :] < n)
    tl.store(y + column[:, None] * n + row[None, :], tl.trans(rounded), mask=valid_across)
    tl.store(stats + column, scale, mask=column < K)
    tl.store(stats + K + column, tl.sqrt(tl.sum(v * v, 0)), mask=column < K)


@triton.jit
def _across(x, stats, peak, y, n, K: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """e4m3 x [n, K] with a scale for each row -> y [K, n] with one."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    valid = (row[:, None] < n) & (column[None, :] < K)
    at = row.to(tl.int64)[:, None] * K + column[None, :]
    v = tl.load(x + at, mask=valid, other=0.0).to(tl.float32)
    share = tl.load(stats + row, mask=row < n, other=0.0) / tl.load(peak)
    at = column.to(tl.int64)[:, None] * n + row[None, :]
    valid = (column[:, None] < K) & (row[None, :] < n)
    tl.store(y + at, tl.trans((v * share[:, None]).to(tl.float8e4nv)), mask=valid)


def _empty8(rows: int, columns: int, x: Tensor) -> tuple[Tensor, Tensor]:
    values = torch.empty(rows, columns, dtype=torch.float8_e4m3fn, device=x.device)
    return values, torch.empty(2, rows, dtype=torch.float32, device=x.device)


def quantise(x: Tensor) -> Eight:
    """x [n, k] -> itself in e4m3, a scale for each row."""
    (n, k), x = x.shape, x.detach().contiguous()
    y, stats = _empty8(n, k, x)
    block = triton.next_power_of_2(k)
    _quantise[(n,)](x, y, stats, n, K=k, BLOCK=block, num_warps=max(1, min(8, block // 512)))
    return Eight(y, stats)


def quantise_columns(x: Tensor) -> Eight:
    """x [n, k] -> x^T [k, n] in e4m3, a scale for each of its rows."""
    n, k = x.shape
    y, stats = _empty8(k, n, x)
    rows = triton.next_power_of_2(n)
    columns = max(4, 16384 // rows)
    _quantise_columns[(triton.cdiv(k, columns),)](
        x, y, stats, n, K=k, ROWS=rows, COLUMNS=columns, num_warps=8
    )
    return Eight(y, stats)


def turned(x: Eight) -> tuple[Tensor, Tensor]:
    """x^T with one scale: of a product over the rows of x."""
    if x.across is not None:
        return x.across
    n, k = x.values.shape
    y, peak = torch.empty_like(x.values).view(k, n), x.largest()[:1]
    _across[(triton.cdiv(n, 128), triton.cdiv(k, 128))](
        x.values, x.stats, peak, y, n, K=k, ROWS=128, COLUMNS=128, num_warps=4
    )
    return y, peak
