"""Linear + cross-entropy over the masked positions, with logits kept once, in low precision."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
import triton
import triton.language as tl

from pretrain.kernels.triton_gradients import weight_gradient


@triton.jit
def _row_stats(
    logits, labels, stats, start, valid_columns, M, V: tl.constexpr, BLOCK: tl.constexpr
):
    """stats fp32 [3, M]: largest, sum of exp(logit - largest), logit of the label (-inf if elsewhere)."""
    row = tl.program_id(0)
    base = logits + row.to(tl.int64) * V
    largest = tl.full([BLOCK], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    for c in range(0, valid_columns, BLOCK):
        column = c + tl.arange(0, BLOCK)
        x = tl.load(base + column, mask=column < valid_columns, other=float("-inf")).to(tl.float32)
        new = tl.maximum(largest, x, propagate_nan=tl.PropagateNan.ALL)
        # -inf - -inf is NaN: a lane that has seen nothing yet adds nothing.
        seen = new != float("-inf")
        total = tl.where(seen, total * tl.exp(largest - new) + tl.exp(x - new), 0.0)
        largest = new
    top = tl.max(largest, 0)
    total = tl.sum(tl.where(largest != float("-inf"), total * tl.exp(largest - top), 0.0), 0)
    label = (tl.load(labels + row) - start).to(tl.int32)
    mine = (label >= 0) & (label < valid_columns)
    target = tl.load(base + label, mask=mine, other=float("-inf")).to(tl.float32)
    tl.store(stats + row, top)
    tl.store(stats + M + row, total)
    tl.store(stats + 2 * M + row, target)


@triton.jit
def _gradient(
    logits,
    labels,
    log_sums,
    weights,
    grad_loss,
    start,
    valid_columns,
    V: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """logits become (softmax - one-hot) * weight * grad_loss, in place; padding becomes 0."""
    row = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    place = logits + row.to(tl.int64) * V + column
    x = tl.load(place, mask=column < valid_columns, other=float("-inf")).to(tl.float32)
    label = (tl.load(labels + row) - start).to(tl.int32)
    factor = tl.load(weights + row) * tl.load(grad_loss)
    grad = tl.exp(x - tl.load(log_sums + row)) - tl.where(column == label, 1.0, 0.0)
    tl.store(place, (grad * factor).to(logits.dtype.element_ty), mask=column < V)


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden, weight, bias, labels, weights, start, true_vocab, group):
        logits = F.linear(hidden, weight, bias)
        rows, vocab = logits.shape
        columns = max(0, min(vocab, true_vocab - start))
        stats = torch.empty(3, rows, dtype=torch.float32, device=hidden.device)
        if rows:
            _row_stats[(rows,)](
                logits, labels, stats, start, columns, rows, V=vocab, BLOCK=2048, num_warps=8
            )
        largest, total, target = stats
        if group is not None:
            local = largest.clone()
            dist.all_reduce(largest, dist.ReduceOp.MAX, group)
            dist.all_reduce(target, dist.ReduceOp.MAX, group)
            total *= (local - largest).exp()
            dist.all_reduce(total, group=group)
        log_sums = largest + total.log()
        loss = ((log_sums - target) * weights).sum()
        correct = ((target == largest) & (weights > 0)).sum().float()
        ctx.save_for_backward(hidden, weight, bias, logits, labels, weights, log_sums)
        ctx.rest = (start, columns)
        ctx.weight = weight
        ctx.mark_non_differentiable(correct)
        return loss, correct

    @staticmethod
    def backward(ctx: Any, grad_loss, _):
        hidden, weight, bias, grad, labels, weights, log_sums = ctx.saved_tensors
        start, columns = ctx.rest
        rows, vocab = grad.shape
        if rows:
            _gradient[(rows, triton.cdiv(vocab, 2048))](
                grad,
                labels,
                log_sums,
                weights,
                grad_loss,
                start,
                columns,
                V=vocab,
                BLOCK=2048,
                num_warps=4,
            )
        # The weight is the word embeddings', whose own gradient comes last.
        grad_weight = weight_gradient(ctx.weight, grad, hidden, last=False)
        return grad @ weight, grad_weight, grad.sum(0).to(bias.dtype), *(None,) * 5


def linear_cross_entropy(
    hidden, weight, bias, labels, weights, vocab_start, true_vocab, tp_group=None
):
    """See `plain.linear_cross_entropy`. The backward pass can run once: it overwrites the logits."""
    return _LinearCrossEntropy.apply(
        hidden, weight, bias, labels, weights.float(), vocab_start, true_vocab, tp_group
    )
