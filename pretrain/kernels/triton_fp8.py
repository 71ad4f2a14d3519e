"""Linear layers with 8-bit products (e4m3, 2209.05433), for `train.precision: fp8`.

Forward products of wide layers (qkv and both of the MLP), the input gradients and the weight
gradients of the MLP's run in e4m3. The square output projection (whose gain is less than the cost
of rounding its input), qkv's gradients, the heads and everything between stay in bf16.

A product over features has one scale for each token and each output channel; a weight gradient, a
product over tokens, has one for each of its operands. All scales are powers of two, so that one
version is made of the other exactly. There is no history to keep or to lose: they come from the
values themselves, or, where a kernel must round before it has seen all values, from a bound that
these cannot exceed (Cauchy and Schwarz: a product's values are at most the row's norm times the
weight's; a LayerNorm's at most sqrt(H) times its weight). e4m3 is as exact 2^14 below its largest
value as there, so a loose bound costs nothing.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from pretrain.kernels.triton_gradients import has_main, weight_gradient
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


@triton.jit
def _weight_gradient8(
    a_desc, b_desc, main, a_scale, b_scale, M, N, K,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """main fp32 [M, N] += a [M, K] b [N, K]^T."""
    tile = tl.program_id(0)
    wide = tl.cdiv(N, BN)
    first = tile // (GROUP * wide) * GROUP
    high = min(tl.cdiv(M, BM) - first, GROUP)
    m0 = (first + (tile % (GROUP * wide)) % high) * BM
    n0 = (tile % (GROUP * wide)) // high * BN
    total = tl.zeros([BM, BN], tl.float32)
    for k in range(0, K, BK):
        total = tl.dot(a_desc.load([m0, k]), b_desc.load([n0, k]).T, total)
    total *= tl.load(a_scale) * tl.load(b_scale)
    m, n = m0 + tl.arange(0, BM), n0 + tl.arange(0, BN)
    at = main + m.to(tl.int64)[:, None] * N + n[None, :]
    valid = (m[:, None] < M) & (n[None, :] < N)
    tl.store(at, tl.load(at, mask=valid) + total, mask=valid)


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


def _turned(x: Eight) -> tuple[Tensor, Tensor]:
    """x^T with one scale: of a product over the rows of x."""
    if x.across is not None:
        return x.across
    n, k = x.values.shape
    y, peak = torch.empty_like(x.values).view(k, n), x.largest()[:1]
    _across[(triton.cdiv(n, 128), triton.cdiv(k, 128))](
        x.values, x.stats, peak, y, n, K=k, ROWS=128, COLUMNS=128, num_warps=4
    )
    return y, peak


def _product(a: Eight, b: Eight, dtype: torch.dtype, bias: Tensor | None = None) -> Tensor:
    """a [n, k] times b [m, k]^T."""
    scales = a.stats[0].unsqueeze(1), b.stats[0].unsqueeze(0)
    return torch._scaled_mm(
        a.values, b.values.t(), *scales, bias=bias, out_dtype=dtype, use_fast_accum=True
    )


def _add_weight_gradient(weight: Tensor, grad: Eight, x: Eight) -> Tensor | None:
    """grad^T x, added to the weight's `main_grad` where it has one; see `weight_gradient`."""
    main = weight.main_grad if has_main(weight) else torch.zeros_like(weight, dtype=torch.float32)  # type: ignore[attr-defined]
    (a, a_scale), (b, b_scale) = _turned(grad), _turned(x)
    (m, k), n = a.shape, b.shape[0]
    bm, bn, bk = 128, 256, 128
    _weight_gradient8[(triton.cdiv(m, bm) * triton.cdiv(n, bn),)](
        TensorDescriptor.from_tensor(a, [bm, bk]), TensorDescriptor.from_tensor(b, [bn, bk]),
        main, a_scale, b_scale, m, n, k, BM=bm, BN=bn, BK=bk, GROUP=8, num_warps=8, num_stages=3,
    )  # fmt: skip
    if not has_main(weight):
        return main.to(weight.dtype)
    weight.main_grad_arrived()  # type: ignore[attr-defined]
    return None


def _rounded(x: Tensor) -> Eight:
    """The 8-bit version that the kernel before left with x, or made here."""
    found = getattr(x, "eight", None)
    return quantise(x) if found is None else found


def _pays(x: Tensor, weight: Tensor, ratio: int) -> bool:
    sizes = (*weight.shape, x.shape[0])
    return max(weight.shape) >= ratio * min(weight.shape) and all(n % 16 == 0 for n in sizes)


class _Linear8(torch.autograd.Function):
    """In 8 bits forward if `eight` (x) and `weight8` are given, backward too if `back`."""

    @staticmethod
    def forward(ctx: Any, x, weight, bias, eight, weight8, back, fork, group):
        ctx.weight, ctx.group, ctx.back = weight, group, back
        ctx.has_bias = bias is not None and bias.requires_grad
        if back:
            # Either way round will do for the weight gradient.
            kept = (
                (*eight[:3], None, None) if eight.across is None else (*[None] * 3, *eight.across)
            )
            ctx.save_for_backward(weight, *kept)
        else:
            ctx.save_for_backward(weight, x)
        ctx.set_materialize_grads(False)
        if eight is not None:
            y = _product(eight, weight8, weight.dtype, bias)
        else:
            y = x @ weight.t() if bias is None else torch.addmm(bias, x, weight.t())
        return (y, x.view_as(x)) if fork else y

    @staticmethod
    def backward(ctx: Any, grad: Tensor, beside: Tensor | None = None):
        weight, *kept = ctx.saved_tensors
        if ctx.group is not None and ctx.group.rank() > 0:
            beside = None  # alike on all ranks: one of them brings it into the sum
        if ctx.back:
            grad8, weight8 = _rounded(grad), quantise_columns(weight)
            grad_x = _product(grad8, weight8, weight.dtype)
            bounds = (grad8.stats[1], grad8.largest()[1:], weight8.stats[1].amax())
            grad_x = grad_x if beside is None else beside.add_(grad_x)
            if beside is None and ctx.group is None:  # a sum over ranks may exceed them
                grad_x.bounds = bounds  # type: ignore[attr-defined]
        else:
            grad_x = grad @ weight if beside is None else beside.addmm_(grad, weight)
        sent = None
        if ctx.group is not None:
            sent = dist.all_reduce(grad_x, group=ctx.group, async_op=True)
        grad_weight = None
        if ctx.needs_input_grad[1] and ctx.back:
            values, stats, peaks, *across = kept
            x8 = Eight(values, stats, peaks, None if across[0] is None else (across[0], across[1]))
            grad_weight = _add_weight_gradient(ctx.weight, grad8, x8)
        elif ctx.needs_input_grad[1]:
            grad_weight = weight_gradient(ctx.weight, grad, kept[0])
        if sent is not None:
            sent.wait()
        return grad_x, grad_weight, grad.sum(0) if ctx.has_bias else None, *(None,) * 5


def _apply(x: Tensor, weight: Tensor, bias: Tensor | None, fork: bool, group: Any) -> Any:
    if not _pays(x, weight, 2):
        return _Linear8.apply(x, weight, bias, None, None, False, fork, group)
    eight, weight8 = _rounded(x), quantise(weight)
    back = _pays(x, weight, 4) and bias is None
    result = _Linear8.apply(x, weight, bias, eight, weight8, back, fork, group)
    if back:
        y = result[0] if fork else result
        y.takes8 = True  # its gradient may come in 8 bits alone
        if eight.across is None:
            y.bounds = (eight.stats[1], eight.largest()[1:], weight8.stats[1].amax())
    return result


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, group: Any = None) -> Tensor:
    """See `plain.linear`."""
    return _apply(x, weight, bias, False, group)


def forked_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, group: Any = None
) -> tuple[Tensor, Tensor]:
    """See `plain.forked_linear`. Where a norm made x, that adds up both gradients."""
    fork = getattr(x, "fork", None)
    if fork is None:
        return _apply(x, weight, bias, True, group)
    return _apply(x, weight, bias, False, group), fork


def summed_linear(x: Tensor, weight: Tensor, group: Any) -> Tensor:
    """See `plain.summed_linear`."""
    from megatron.core.tensor_parallel import mappings

    return mappings.reduce_from_tensor_model_parallel_region(linear(x, weight), group=group)
