"""The kernels in plain torch: exact, differentiable by autograd, and the oracle for the others."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from pretrain.kernels import exchanged
from pretrain.kernels.hashing import attention_keep, hidden_keep, keep_scale
from pretrain.kernels.matrices import matrix_apply as matrix_apply
from pretrain.kernels.matrices import matrix_momentum as matrix_momentum
from pretrain.kernels.matrices import matrix_norms as matrix_norms

Tensor = torch.Tensor


def dropout(x: Tensor, p: float, token_keys: Tensor, site: int, seed: int) -> Tensor:
    """x [T, H] with values zeroed with probability p and the rest scaled up; the mask is counted."""
    if p == 0.0:
        return x
    keep = hidden_keep(token_keys, x.shape[-1], p, seed, site)
    return x * keep * keep_scale(p)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """LayerNorm over the last dimension (1607.06450)."""
    return F.layer_norm(x, weight.shape, weight, bias, eps)


def bias_gelu(x: Tensor, bias: Tensor) -> Tensor:
    """GELU(x + bias) through the error function (1606.08415, the exact form)."""
    return F.gelu(x + bias)


def bias_dropout_add_norm(
    x: Tensor,
    bias: Tensor,
    residual: Tensor,
    weight: Tensor,
    norm_bias: Tensor,
    eps: float,
    p: float,
    token_keys: Tensor,
    site: int,
    seed: int,
) -> Tensor:
    """LayerNorm(dropout(x + bias) + residual), the end of both halves of a post-LN layer. [T, H]; x may
    be [n, T, H], to be added up."""
    if x.dim() == 3:
        x = x.sum(0)
    summed = dropout(x + bias, p, token_keys, site, seed) + residual
    return layer_norm(summed, weight, norm_bias, eps)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, group: Any = None) -> Tensor:
    """x weight^T + bias; x [T, in], weight [out, in].

    group: of tensor-parallel ranks that hold equal x and other rows of the weight; the gradient of
    x is summed over them. (The fused version computes the weight's gradient meanwhile.)
    """
    return F.linear(x if group is None else copy_to_group(x, group), weight, bias)


def forked_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, group: Any = None
) -> tuple[Tensor, Tensor]:
    """(linear(x, weight, bias, group), x): for an input that goes on beside the product, as a
    residual, alike on all ranks of a group.

    The fused version adds the residual's gradient inside the product of the backward pass.
    """
    return linear(x, weight, bias, group), x


def summed_linear(x: Tensor, weight: Tensor, group: Any) -> Tensor:
    """x weight^T summed over the ranks of a group, each of which holds other columns of both.

    The fused version multiplies some rows while the sums of others travel.
    """
    from megatron.core.tensor_parallel import mappings

    return mappings.reduce_from_tensor_model_parallel_region(F.linear(x, weight), group=group)


def gathered_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, exchange: Any
) -> tuple[Tensor, Tensor]:
    """(x weight^T + bias [T, out], x) from this rank's tokens x [t, in] of sequence parallelism: all
    ranks' tokens are multiplied. exchange: a `pretrain.parallel.exchange.Exchange`."""
    return exchanged.gathered_linear(x, weight, bias, exchange, sum_of_products)


def scattered_linear(x: Tensor, weight: Tensor, exchange: Any) -> Tensor:
    """This rank's tokens [t, out] of x weight^T summed over the ranks, or [n, t, out] to be added up by
    `bias_dropout_add_norm`; x [T, in]."""
    return exchanged.scattered_linear(x, weight, exchange, sum_of_products)


def sum_of_products(weight: Tensor, pairs: Iterable[tuple[Tensor, Tensor]]) -> Tensor:
    """The sum of grad^T x over (grad, x), of which there is one at least: a gradient of `weight`."""
    total: Tensor | None = None
    for grad, x in pairs:
        total = grad.t() @ x if total is None else total.addmm_(grad.t(), x)
    assert total is not None
    return total


def copy_to_group(x: Tensor, group: Any) -> Tensor:
    """x, whose gradient is summed over the group: Megatron-core's mapping."""
    from megatron.core.tensor_parallel import mappings

    return mappings.copy_to_tensor_model_parallel_region(x, group=group)


def embedding(ids: Tensor, weight: Tensor) -> Tensor:
    """weight[ids]; ids int64 [T], weight [V, H] -> [T, H]."""
    return F.embedding(ids, weight)


def attention(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_length: int,
    token_keys: Tensor,
    p: float,
    site: int,
    seed: int,
    first_head: int = 0,
    bias: Tensor | None = None,
) -> Tensor:
    """softmax(q k^T / sqrt(d)) v inside each packed row, with dropout of the probabilities.

    Args:
        qkv: [T, 3, heads, d] of this rank's heads.
        bias: [3 * heads * d], which qkv includes already but detached: its gradient, the sum of
            qkv's over the tokens, is collected here. (The fused kernel has it at hand, while on
            its own it is one more pass over memory.) That of the key's is zero in exact
            arithmetic and may be returned as zero.
        cu_seqlens: int32 [R + 1], where rows start; rows may be empty; none is longer than
            `max_length`; the last entry is T.
        first_head: global index of this rank's first head (dropout must not depend on tp).
    Returns:
        [T, heads * d]
    """
    if bias is not None:
        qkv = qkv + (bias - bias.detach()).view(3, *qkv.shape[2:])
    tokens, _, heads, width = qkv.shape
    lengths = cu_seqlens.diff().long()
    rows, device = len(lengths), qkv.device
    # A padded copy [rows, max_length] is exact, since padding keys get no weight.
    row = torch.repeat_interleave(torch.arange(rows, device=device), lengths, output_size=tokens)
    position = torch.arange(tokens, device=device) - cu_seqlens.long()[row]
    slot = row * max_length + position
    padded = qkv.new_zeros(rows * max_length, 3, heads, width).index_copy(0, slot, qkv)
    q, k, v = padded.view(rows, max_length, 3, heads, width).permute(2, 0, 3, 1, 4)
    # An empty row looks at its first (zero) key, lest softmax over nothing give NaN gradients.
    visible = torch.arange(max_length, device=device) < lengths.clamp(min=1)[:, None]
    mask = visible[:, None, None, :]
    if p == 0.0:
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    else:
        scores = (q @ k.transpose(-1, -2)) / math.sqrt(width)
        scores = scores.masked_fill(~mask, float("-inf"))
        wide = torch.promote_types(scores.dtype, torch.float32)
        probabilities = scores.softmax(-1, dtype=wide)
        keys = token_keys.new_zeros(rows * max_length).index_copy(0, slot, token_keys)
        keep = attention_keep(keys, heads, first_head, max_length, p, seed, site)
        keep = keep.view(rows, max_length, heads, max_length).transpose(1, 2)
        out = (probabilities * keep * keep_scale(p)).to(v.dtype) @ v
    return out.transpose(1, 2).reshape(rows * max_length, heads * width).index_select(0, slot)


class _VocabularyLoss(torch.autograd.Function):
    """Cross-entropy over logits split by vocabulary over a group (or whole, group None)."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, weights: Tensor, start: int, group: Any):
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        local = labels - start
        mine = (local >= 0) & (local < wide.shape[1])
        index = torch.where(mine, local, 0)[:, None]
        target = torch.where(mine, wide.gather(1, index)[:, 0], float("-inf"))
        # A shard may hold padding alone, so only the maximum over the group is known finite.
        largest = wide.amax(1)
        if group is not None:
            dist.all_reduce(largest, dist.ReduceOp.MAX, group)
            dist.all_reduce(target, dist.ReduceOp.MAX, group)
        exponents = (wide - largest[:, None]).exp_()
        total = exponents.sum(1)
        if group is not None:
            dist.all_reduce(total, group=group)
        loss = ((total.log() + largest - target) * weights).sum()
        correct = ((target == largest) & (weights > 0)).sum().to(wide.dtype)
        ctx.save_for_backward(exponents.div_(total[:, None]), index, mine, weights)
        ctx.dtype = logits.dtype
        ctx.mark_non_differentiable(correct)
        return loss, correct

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor, _: Tensor):
        probabilities, index, mine, weights = ctx.saved_tensors
        scale = grad_loss * weights
        grad = probabilities * scale[:, None]
        # One element a row: a scatter over [M, V] would copy it once more.
        grad[torch.arange(len(index), device=grad.device), index[:, 0]] -= scale * mine
        return grad.to(ctx.dtype), None, None, None, None


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor,
    labels: Tensor,
    weights: Tensor,
    vocab_start: int,
    true_vocab: int,
    tp_group: Any = None,
) -> tuple[Tensor, Tensor]:
    """Weighted sum of -log softmax(hidden weight^T + bias)[label], and how many were right.

    Args:
        hidden: [M, H]. Under tensor parallelism it must have come through
            copy_to_tensor_model_parallel_region: its gradient here is this rank's part.
        weight, bias: [V_local, H], [V_local], rows vocab_start.. of the padded vocabulary.
        labels: int64 [M], global. weights: [M] (0 = padding).
        true_vocab: columns from here on are padding and get no probability.
    Returns:
        (loss sum, count of positions with weight whose label has the largest logit), both of
        the whole vocabulary, equal on every rank of `tp_group`.
    """
    logits = F.linear(hidden, weight, bias)
    padding = vocab_start + weight.shape[0] - true_vocab
    if padding > 0:
        columns = torch.arange(weight.shape[0], device=logits.device) + vocab_start
        logits = logits.masked_fill(columns >= true_vocab, float("-inf"))
    return _VocabularyLoss.apply(logits, labels, weights, vocab_start, tp_group)


@dataclass
class LambTable:
    """Which slices of a flat partition are which tensor.

    starts, numels: of each slice, in elements of the flat tensors; slices do not overlap. A slice
    may be part of a tensor (ZeRO) or empty; its index is the tensor's index in `norms`.
    decays: weight decay of each.
    """

    starts: list[int]
    numels: list[int]
    decays: list[float]

    def __post_init__(self) -> None:
        if not len(self.starts) == len(self.numels) == len(self.decays):
            raise ValueError("starts, numels and decays differ in length")


# Elements worked on at a time: a dozen passes over them stay in a core's cache.
LAMB_BLOCK = 1 << 15


def _update(p, m, v, decay, eps, correction1, correction2, out, denominator):
    """(m / correction1) / (sqrt(v / correction2) + eps) + decay * p into `out`."""
    torch.sqrt(v, out=denominator)
    denominator.mul_(correction2**-0.5).add_(eps)
    torch.div(m, denominator, out=out)
    out.mul_(1 / correction1)
    return out.add_(p, alpha=decay) if decay else out


def _blocks(table: LambTable, like: Tensor):
    """(index of the tensor, slice of the flat tensors, decay, two scratch tensors) of each block."""
    scratch = like.new_empty(2, min(LAMB_BLOCK, max(table.numels, default=0)))
    for i, (start, numel, decay) in enumerate(zip(table.starts, table.numels, table.decays)):
        for offset in range(start, start + numel, LAMB_BLOCK):
            end = min(offset + LAMB_BLOCK, start + numel)
            yield i, slice(offset, end), decay, *scratch[:, : end - offset]


@torch.no_grad()
def lamb_moments(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    table: LambTable,
    *,
    beta1: float,
    beta2: float,
    eps: float,
    correction1: float,
    correction2: float,
    grad_scale: Tensor,
) -> Tensor:
    """First pass of LAMB (1904.00962): moments in place, squared norms of weights and updates.

    Args:
        param, exp_avg, exp_avg_sq: flat fp32 [N]. grad: flat [N], fp32 or lower.
        correction1, correction2: 1 - beta ** step, or 1.0 without bias correction.
        grad_scale: fp32 scalar tensor the gradient is multiplied by first (clipping, unscaling).
            NaN: nothing is changed, and what is returned means nothing.
    Returns:
        fp32 [2, tensors]: squared norms of this slice of the weight, and of its update. Sum them
        over the ranks that hold slices, then `lamb_apply` with ratio = sqrt(first / second).
    """
    norms = torch.zeros(2, len(table.starts), dtype=param.dtype, device=param.device)
    if grad_scale.isnan():
        return norms
    for i, at, decay, update, g in _blocks(table, param):
        p, m, v = param[at], exp_avg[at], exp_avg_sq[at]
        torch.mul(grad[at], grad_scale, out=g)
        m.mul_(beta1).add_(g, alpha=1 - beta1)
        v.mul_(beta2).addcmul_(g, g, value=1 - beta2)
        _update(p, m, v, decay, eps, correction1, correction2, update, g)
        norms[0, i] += p.dot(p)
        norms[1, i] += update.dot(update)
    return norms


@torch.no_grad()
def lamb_apply(
    param: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    table: LambTable,
    ratios: Tensor,
    *,
    lr: float,
    eps: float,
    correction1: float,
    correction2: float,
    low: Tensor | None = None,
) -> None:
    """Second pass: param -= lr * ratio * update, and its rounded copy into `low` if given. A tensor
    whose ratio is NaN is left as it is."""
    rates = (ratios * -lr).tolist()
    for i, at, decay, update, denominator in _blocks(table, param):
        if math.isnan(rates[i]):
            continue
        p = param[at]
        _update(
            p,
            exp_avg[at],
            exp_avg_sq[at],
            decay,
            eps,
            correction1,
            correction2,
            update,
            denominator,
        )
        p.add_(update, alpha=rates[i])
        if low is not None:
            low[at].copy_(p)
