"""Gradients of parameters, added where the optimiser reads them.

An engine may give a parameter `main_grad` (fp32, the sum over micro-batches) and a function
`main_grad_arrived`. The kernels then add to it themselves and hand autograd None: one small launch
for a kernel's biases and norm weights instead of a sum, a cast and an addition for each.

A kernel must keep the parameter itself for this (ctx.weight = weight): where activations are
recomputed, autograd gives back another tensor of the same values, without its attributes.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import triton
import triton.language as tl
from torch import Tensor

from pretrain.kernels.plain import sum_of_products


@triton.jit(do_not_specialize=["n"])
def _collect(
    partial, main0, main1, main2, n, width, stride, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """main_i += sum over n of partial [n, stride / width, width], in a fixed order."""
    which = tl.program_id(1)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(0, n, ROWS):
        row = start + tl.arange(0, ROWS)
        place = partial + row[:, None] * stride + which * width + column[None, :]
        total += tl.load(place, mask=(row[:, None] < n) & (column[None, :] < width), other=0.0)
    main = main0
    if which == 1:
        main = main1
    if which == 2:
        main = main2
    old = tl.load(main + column, mask=column < width, other=0.0)
    tl.store(main + column, old + tl.sum(total, 0), mask=column < width)


def has_main(parameter: Tensor | None) -> bool:
    """Whether an engine wants this parameter's gradient added to `main_grad`."""
    return getattr(parameter, "main_grad", None) is not None


def collect(partial: Tensor | None, *parameters: Tensor | None) -> list[Tensor | None]:
    """Gradients of up to three parameters of one size from fp32 partial sums [n, 3 or fewer, size].

    Adds them to `main_grad` and returns Nones where the parameters have it, else returns them.
    """
    if partial is None:
        return [None] * len(parameters)
    given = [p for p in parameters if p is not None]
    partial = partial.view(len(partial), len(given), given[0].numel())
    if not all(has_main(p) for p in given):
        sums = partial.sum(0)
        return [
            None if p is None else sums[i].to(p.dtype).view(p.shape)
            for i, p in enumerate(parameters)
        ]
    n, _, width = partial.shape
    mains = [p.main_grad for p in given]  # type: ignore[attr-defined]
    mains += mains[:1] * (3 - len(mains))
    _collect[(triton.cdiv(width, 32), len(given))](
        partial, *mains, n, width, partial.stride(0), ROWS=128, COLUMNS=32, num_warps=4
    )
    for p in given:
        p.main_grad_arrived()  # type: ignore[attr-defined]
    return [None] * len(parameters)


def weight_gradient(weight: Tensor, grad: Tensor, x: Tensor, last: bool = True) -> Tensor | None:
    """grad^T x, added inside the product where the weight has a `main_grad`.

    last=False: more comes for this weight in the same pass.
    """
    return weight_gradients(weight, [(grad, x)], last)


def weight_gradients(
    weight: Tensor, pairs: Iterable[tuple[Tensor, Tensor]], last: bool = True
) -> Tensor | None:
    """The sum of grad^T x over (grad, x), which may be made one after the other; see above."""
    if not has_main(weight):
        return sum_of_products(weight, pairs)
    main = weight.main_grad  # type: ignore[attr-defined]
    for grad, x in pairs:
        torch.addmm(main, grad.t(), x, out_dtype=torch.float32, out=main)
    if last:
        weight.main_grad_arrived()  # type: ignore[attr-defined]
    return None
