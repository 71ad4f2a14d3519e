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

from typing import Any

import torch
import torch.distributed as dist
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from pretrain.kernels.triton_fp8_rounding import Eight, quantise, quantise_columns, turned
from pretrain.kernels.triton_gradients import has_main, weight_gradient
from pretrain.parallel.sequence import gather_tokens, reduce_scatter_tokens


@triton.jit
def _weight_gradient8(
    a_desc, b_desc, main, a_scale, b_scale, M, N, K,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """main fp32 [M, N] += a [M, K] b [N, K]^T.

    Hopper's 8-bit products are summed with 14 bits, here over all K tokens of a micro-batch, and what
    does not fit is cut off. Where all tokens pull one way, the sum comes out too small by 1.1% at 16384
    tokens and 4% at 65536 (computed, not measured; LAMB takes no notice of a factor that a whole tensor
    has in every update). Smaller parallel.micro_batch_tokens make it less.
    """
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


def _product(a: Eight, b: Eight, dtype: torch.dtype, bias: Tensor | None = None) -> Tensor:
    """a [n, k] times b [m, k]^T."""
    scales = a.stats[0].unsqueeze(1), b.stats[0].unsqueeze(0)
    return torch._scaled_mm(
        a.values, b.values.t(), *scales, bias=bias, out_dtype=dtype, use_fast_accum=True
    )


def _add_weight_gradient(weight: Tensor, grad: Eight, x: Eight) -> Tensor | None:
    """grad^T x, added to the weight's `main_grad` where it has one; see `weight_gradient`."""
    main = weight.main_grad if has_main(weight) else torch.zeros_like(weight, dtype=torch.float32)  # type: ignore[attr-defined]
    (a, a_scale), (b, b_scale) = turned(grad), turned(x)
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
    """Whether 8-bit products save more than rounding costs, which the narrow side decides (forward
    from a ratio of 2 on, backward from 4), and have sizes that the matrix units take."""
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


def gathered_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, exchange: Any
) -> tuple[Tensor, Tensor]:
    """See `plain.gathered_linear`; the whole is gathered before it is rounded."""
    return linear(gather_tokens(x, exchange.group), weight, bias), x


def scattered_linear(x: Tensor, weight: Tensor, exchange: Any) -> Tensor:
    """See `plain.scattered_linear`."""
    return reduce_scatter_tokens(linear(x, weight), exchange.group)
