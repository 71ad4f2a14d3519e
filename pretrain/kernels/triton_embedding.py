"""Embedding lookup whose gradient is summed in fp32, in a fixed order, where the optimiser reads it.

torch's writes one in low precision for the whole table, most of whose rows stay zero, to be added
to the sum afterwards. Here the tokens are sorted by id and each run of equal ids is added to its
row; tables of a few rows (token types) are summed without sorting.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from pretrain.kernels.triton_gradients import collect, has_main

FEW = 4  # rows of a table that is summed without sorting
EACH = 128  # tokens of a partial sum there
PART = 64  # tokens of one where ids are sorted


@triton.jit(do_not_specialize=["tokens"])
def _add_runs(
    grad, ids, order, main, partial, tokens,
    H: tl.constexpr, PART: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """main [id] += sum of grad [order] over the run of `id` in the sorted ids, up to a multiple of
    PART; what lies between two multiples goes to partial fp32 [tokens / PART, H]."""
    start = tl.program_id(0)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    index = tl.load(ids + start).to(tl.int32)
    before = tl.load(ids + start - 1, mask=start > 0, other=-1).to(tl.int32)
    if (index != before) | (start % PART == 0):
        end = tl.minimum((start // PART + 1) * PART, tokens)
        place = partial + (start // PART).to(tl.int64) * H + column
        total = tl.zeros([ROWS, COLUMNS], tl.float32)
        alike = ROWS
        while alike == ROWS:
            row = start + tl.arange(0, ROWS)
            same = tl.load(ids + row, mask=row < end, other=-1).to(tl.int32) == index
            token = tl.load(order + row, mask=same, other=0).to(tl.int64)
            valid = same[:, None] & (column[None, :] < H)
            at = token[:, None] * H + column[None, :]
            total += tl.load(grad + at, mask=valid, other=0.0).to(tl.float32)
            alike = tl.sum(same.to(tl.int32), 0)
            start += ROWS
        result = tl.sum(total, 0)
        if index != before:
            place = main + index.to(tl.int64) * H + column
            result += tl.load(place, mask=column < H, other=0.0)
        tl.store(place, result, mask=column < H)


@triton.jit(do_not_specialize=["tokens"])
def _add_parts(
    ids, main, partial, tokens,
    H: tl.constexpr, PART: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """main [id] += partial: by the program of the first multiple of PART inside the run of `id`."""
    part = tl.program_id(0) + 1
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    start = part * PART
    index = tl.load(ids + start).to(tl.int32)
    before = tl.load(ids + start - 1).to(tl.int32)
    earlier = tl.load(ids + start - PART - 1, mask=part > 1, other=-1).to(tl.int32)
    if (index == before) & (index != earlier):
        total = tl.zeros([ROWS, COLUMNS], tl.float32)
        alike = ROWS
        while alike == ROWS:
            row = part + tl.arange(0, ROWS)
            same = tl.load(ids + row * PART, mask=row * PART < tokens, other=-1).to(tl.int32)
            same = same == index
            valid = same[:, None] & (column[None, :] < H)
            at = row.to(tl.int64)[:, None] * H + column[None, :]
            total += tl.load(partial + at, mask=valid, other=0.0)
            alike = tl.sum(same.to(tl.int32), 0)
            part += ROWS
        place = main + index.to(tl.int64) * H + column
        old = tl.load(place, mask=column < H, other=0.0)
        tl.store(place, old + tl.sum(total, 0), mask=column < H)


@triton.jit(do_not_specialize=["tokens"])
def _sums(
    grad, ids, partial, tokens,
    H: tl.constexpr, EACH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """partial fp32 [chunks, rows of the table, H]: sums of grad over EACH tokens, those of one id."""
    index = tl.program_id(2)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(0, EACH, ROWS):
        row = tl.program_id(0) * EACH + start + tl.arange(0, ROWS)
        same = tl.load(ids + row, mask=row < tokens, other=-1) == index
        valid = same[:, None] & (column[None, :] < H)
        at = row.to(tl.int64)[:, None] * H + column[None, :]
        total += tl.load(grad + at, mask=valid, other=0.0).to(tl.float32)
    place = partial + (tl.program_id(0) * tl.num_programs(2) + index) * H + column
    tl.store(place, tl.sum(total, 0), mask=column < H)


def _gradient(weight: Tensor, ids: Tensor, grad: Tensor) -> Tensor | None:
    (tokens, hidden), device = grad.shape, grad.device
    fp32: dict[str, Any] = {"dtype": torch.float32, "device": device}
    block = min(1024, triton.next_power_of_2(hidden))
    blocks = triton.cdiv(hidden, block)
    if len(weight) <= FEW:
        chunks = triton.cdiv(tokens, EACH)
        partial = torch.empty(chunks, len(weight), hidden, **fp32)
        _sums[(chunks, blocks, len(weight))](
            grad, ids, partial, tokens, H=hidden, EACH=EACH, ROWS=8, COLUMNS=block, num_warps=4
        )
        return collect(partial, weight)[0]
    # Fewer bits, fewer passes of the sort.
    narrow = torch.int16 if len(weight) < 1 << 15 else torch.int32
    ids, order = ids.to(narrow).sort(stable=True)
    ours = has_main(weight)
    main = weight.main_grad if ours else torch.zeros_like(weight, dtype=torch.float32)  # type: ignore[attr-defined]
    partial = torch.empty(triton.cdiv(tokens, PART), hidden, **fp32)
    sizes: dict[str, Any] = {"H": hidden, "PART": PART, "COLUMNS": block, "num_warps": 4}
    _add_runs[(tokens, blocks)](grad, ids, order, main, partial, tokens, ROWS=4, **sizes)
    if len(partial) > 1:
        _add_parts[(len(partial) - 1, blocks)](ids, main, partial, tokens, ROWS=8, **sizes)
    if not ours:
        return main.to(weight.dtype)
    weight.main_grad_arrived()  # type: ignore[attr-defined]
    return None


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ids: Tensor, weight: Tensor):
        ctx.save_for_backward(ids)
        ctx.weight = weight
        return F.embedding(ids, weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor):
        (ids,) = ctx.saved_tensors
        return None, _gradient(ctx.weight, ids, grad.contiguous())


def embedding(ids: Tensor, weight: Tensor) -> Tensor:
    """See `plain.embedding`."""
    return _Embedding.apply(ids, weight)
