"""What lies between the matrix products, each in one pass over memory in each direction.

LayerNorm(dropout(x + bias) + residual) and dropout; GELU(x + bias) is in triton_gelu. Masks are
regenerated in the backward pass. Gradients of weights and biases are summed per program in fp32
and then over the programs, in a fixed order.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from pretrain.kernels.hashing import keep_scale, signed, stream, threshold
from pretrain.kernels.triton_gradients import collect
from pretrain.kernels.triton_hash import channel_hash, keep, row_hash
from pretrain.kernels.triton_scales import power_of_two

# Rows that a program works on at a time, warps, programs of a multiprocessor: the fastest of those
# tried on an H200 at hidden size 1024, or within 2 % of it.
FORWARD: dict[str, Any] = {"ROWS": 2, "num_warps": 4}
BACKWARD: dict[str, Any] = {"ROWS": 2, "num_warps": 4}
FORWARD_PROGRAMS, BACKWARD_PROGRAMS = 16, 4
# Where 8-bit values are stored, a warp's part of a row is twice as long: two rows would be split.
FORWARD8: dict[str, Any] = {"ROWS": 1, "num_warps": 2}
BACKWARD8: dict[str, Any] = {"ROWS": 1, "num_warps": 4}
BACKWARD8_PROGRAMS = 5


@triton.jit(do_not_specialize=["stream"])
def _norm_forward(
    x, bias, residual, weight, norm_bias, token_keys, y, summed, means, scales, y8, stats,
    tokens, stream, eps,
    H: tl.constexpr, ROOT: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
    BIAS: tl.constexpr, RESIDUAL: tl.constexpr, PARTS: tl.constexpr, EIGHT: tl.constexpr,
    THRESHOLD: tl.constexpr, KEEP_SCALE: tl.constexpr,
):  # fmt: skip
    column = tl.arange(0, BLOCK)
    valid = column < H
    w = tl.load(weight + column, mask=valid, other=0.0).to(tl.float32)[None, :]
    nb = tl.load(norm_bias + column, mask=valid, other=0.0).to(tl.float32)[None, :]
    if BIAS:
        b = tl.load(bias + column, mask=valid, other=0.0).to(tl.float32)[None, :]
    if EIGHT:
        # No normed value exceeds sqrt(H), nor does their 2-norm: known before the first is seen.
        scale8 = power_of_two(tl.max(ROOT * tl.abs(w) + tl.abs(nb), 1))
        bound = ROOT * tl.max(tl.abs(w), 1) + tl.sqrt(tl.sum(nb * nb, 1))
    if THRESHOLD > 0:
        multiplier, shift = channel_hash(column[None, :])
    for first in range(tl.program_id(0) * ROWS, tokens, tl.num_programs(0) * ROWS):
        row = first + tl.arange(0, ROWS)
        there = row < tokens
        at = row.to(tl.int64)[:, None] * H + column[None, :]
        mask = there[:, None] & valid[None, :]
        z = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
        for part in tl.static_range(1, PARTS):
            more = x + (tl.full([], part, tl.int64) * tokens) * H + at
            z += tl.load(more, mask=mask, other=0.0).to(tl.float32)
        if RESIDUAL:
            r = tl.load(residual + at, mask=mask, other=0.0).to(tl.float32)
        if BIAS:
            z += b
        if THRESHOLD > 0:
            rows = row_hash(tl.load(token_keys + row, mask=there, other=0), stream)[:, None]
            z = tl.where(keep(rows, multiplier, shift, THRESHOLD), z * KEEP_SCALE, 0.0)
        if RESIDUAL:
            # Rounded as it is kept for the backward pass, so that both see one value.
            z = (z + r).to(summed.dtype.element_ty)
            tl.store(summed + at, z, mask=mask)
            z = z.to(tl.float32)
        mean = tl.sum(z, 1) / H
        centred = tl.where(valid[None, :], z - mean[:, None], 0.0)
        scale = 1.0 / tl.sqrt(tl.sum(centred * centred, 1) / H + eps)
        result = centred * scale[:, None] * w + nb
        tl.store(y + at, result.to(y.dtype.element_ty), mask=mask)
        if EIGHT:
            tl.store(y8 + at, (result * (1.0 / scale8)[:, None]).to(tl.float8e4nv), mask=mask)
            tl.store(stats + row, tl.broadcast_to(scale8, [ROWS]), mask=there)
            tl.store(stats + tokens + row, tl.broadcast_to(bound, [ROWS]), mask=there)
        tl.store(means + row, mean, mask=there)
        tl.store(scales + row, scale, mask=there)


@triton.jit(do_not_specialize=["stream"])
def _norm_backward(
    grad, beside, summed, weight, means, scales, token_keys, grad_x, stats, grad_residual, partial,
    tokens, stream,
    H: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, BIAS: tl.constexpr,
    BESIDE: tl.constexpr, EIGHT: tl.constexpr, APART: tl.constexpr,
    THRESHOLD: tl.constexpr, KEEP_SCALE: tl.constexpr,
):  # fmt: skip
    column = tl.arange(0, BLOCK)
    valid = column < H
    w = tl.load(weight + column, mask=valid, other=0.0).to(tl.float32)[None, :]
    if THRESHOLD > 0:
        multiplier, shift = channel_hash(column[None, :])
    sum_w = tl.zeros([BLOCK], tl.float32)
    sum_nb = tl.zeros([BLOCK], tl.float32)
    sum_b = tl.zeros([BLOCK], tl.float32)
    step = tl.num_programs(0) * ROWS
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    at = row.to(tl.int64)[:, None] * H + column[None, :]
    mask = (row < tokens)[:, None] & valid[None, :]
    next_dy = tl.load(grad + at, mask=mask, other=0.0)
    next_z = tl.load(summed + at, mask=mask, other=0.0)
    if BESIDE:
        next_beside = tl.load(beside + at, mask=mask, other=0.0)
    for first in range(tl.program_id(0) * ROWS, tokens, step):
        # The next rows are on their way while these are worked on.
        dy, z = next_dy.to(tl.float32), next_z.to(tl.float32)
        if BESIDE:
            dy += next_beside.to(tl.float32)
        row = first + tl.arange(0, ROWS)
        there = row < tokens
        at = row.to(tl.int64)[:, None] * H + column[None, :]
        mask = there[:, None] & valid[None, :]
        after = at + step * H
        next_mask = (row + step < tokens)[:, None] & valid[None, :]
        next_dy = tl.load(grad + after, mask=next_mask, other=0.0)
        next_z = tl.load(summed + after, mask=next_mask, other=0.0)
        if BESIDE:
            next_beside = tl.load(beside + after, mask=next_mask, other=0.0)
        scale = tl.load(scales + row, mask=there, other=0.0)[:, None]
        mean = tl.load(means + row, mask=there, other=0.0)[:, None]
        normed = tl.where(valid[None, :], (z - mean) * scale, 0.0)
        sum_w += tl.sum(dy * normed, 0)
        sum_nb += tl.sum(dy, 0)
        dn = dy * w
        # d z = scale * (dn - mean(dn) - normed * mean(dn * normed))
        mean_dn = tl.sum(dn, 1)[:, None] / H
        slope = tl.sum(dn * normed, 1)[:, None] / H
        dz = scale * (dn - mean_dn - normed * slope)
        if APART:
            tl.store(grad_residual + at, dz.to(grad_residual.dtype.element_ty), mask=mask)
        if THRESHOLD > 0:
            rows = row_hash(tl.load(token_keys + row, mask=there, other=0), stream)[:, None]
            dz = tl.where(keep(rows, multiplier, shift, THRESHOLD), dz * KEEP_SCALE, 0.0)
        if EIGHT:
            scale8 = power_of_two(tl.max(tl.abs(dz), 1))
            tl.store(grad_x + at, (dz * (1.0 / scale8)[:, None]).to(tl.float8e4nv), mask=mask)
            tl.store(stats + row, scale8, mask=there)
            tl.store(stats + tokens + row, tl.sqrt(tl.sum(dz * dz, 1)), mask=there)
        else:
            tl.store(grad_x + at, dz.to(grad_x.dtype.element_ty), mask=mask)
        if BIAS:
            sum_b += tl.sum(dz, 0)
    target = partial + tl.program_id(0) * ((3 if BIAS else 2) * H) + column
    tl.store(target, sum_w, mask=valid)
    tl.store(target + H, sum_nb, mask=valid)
    if BIAS:
        tl.store(target + 2 * H, sum_b, mask=valid)


def _programs(device: torch.device, each: int) -> int:
    if device.type != "cuda":  # interpreted
        return 3
    return torch.cuda.get_device_properties(device).multi_processor_count * each


class Norm(torch.autograd.Function):
    """y; with `eight` also y again, whose gradient is added to the first's, and y in e4m3 with its
    stats fp32 [2, tokens] (see `triton_fp8_rounding.Eight`). from_eight(like, e4m3, stats): given where x
    takes its gradient in 8 bits alone; makes of them what autograd hands on."""

    @staticmethod
    def forward(
        ctx: Any, x, bias, residual, weight, norm_bias, eps, p, token_keys, site, seed,
        eight=False, from_eight=None,
    ):  # fmt: skip
        tokens, hidden = x.shape[-2:]
        block = triton.next_power_of_2(hidden)
        y = x.new_empty(tokens, hidden)
        summed = x if residual is None else torch.empty_like(y)
        means = torch.empty(tokens, dtype=torch.float32, device=x.device)
        scales = torch.empty_like(means)
        y8 = torch.empty_like(y, dtype=torch.float8_e4m3fn) if eight else y
        stats = torch.empty(2, tokens, dtype=torch.float32, device=x.device) if eight else means
        salt = signed(stream(seed, site))
        _norm_forward[(_programs(x.device, FORWARD_PROGRAMS),)](
            x, x if bias is None else bias, x if residual is None else residual, weight, norm_bias,
            x if token_keys is None else token_keys, y, summed, means, scales, y8, stats,
            tokens, salt, eps,
            H=hidden, ROOT=hidden**0.5, BLOCK=block, BIAS=bias is not None,
            RESIDUAL=residual is not None,
            PARTS=x.shape[0] if x.dim() == 3 else 1, EIGHT=eight,
            THRESHOLD=threshold(p), KEEP_SCALE=keep_scale(p), **(FORWARD8 if eight else FORWARD),
        )  # fmt: skip
        ctx.save_for_backward(summed, weight, means, scales, token_keys)
        ctx.parameters = (weight, norm_bias, bias)
        ctx.rest = (salt, p, residual is not None, from_eight, x.shape)
        ctx.set_materialize_grads(False)
        if not eight:
            return y
        ctx.mark_non_differentiable(y8, stats)
        # Not a view, which would keep y, which is given the other as an attribute.
        return y, y.new_empty(0).set_(y.untyped_storage(), 0, y.shape, y.stride()), y8, stats

    @staticmethod
    def backward(ctx: Any, grad, beside=None, *_):
        summed, weight, means, scales, token_keys = ctx.saved_tensors
        salt, p, has_residual, from_eight, shape = ctx.rest
        bias = ctx.parameters[2]
        if grad is None:
            grad, beside = beside, None
        tokens, hidden = summed.shape
        block = triton.next_power_of_2(hidden)
        eight = from_eight is not None
        programs = _programs(summed.device, BACKWARD8_PROGRAMS if eight else BACKWARD_PROGRAMS)
        f32: dict[str, Any] = {"dtype": torch.float32, "device": summed.device}
        partial = torch.empty(programs, 3 if bias is not None else 2, hidden, **f32)
        grad_x = torch.empty_like(summed, dtype=torch.float8_e4m3fn if eight else summed.dtype)
        stats = torch.empty(2, tokens, **f32) if eight else means
        apart = p > 0 or eight
        grad_residual = torch.empty_like(summed) if apart else grad_x
        grad = grad.contiguous()
        _norm_backward[(programs,)](
            grad, grad if beside is None else beside.contiguous(), summed, weight, means, scales,
            summed if token_keys is None else token_keys, grad_x, stats, grad_residual, partial,
            tokens, salt,
            H=hidden, BLOCK=block, BIAS=bias is not None, BESIDE=beside is not None,
            EIGHT=eight, APART=apart, THRESHOLD=threshold(p),
            KEEP_SCALE=keep_scale(p), **(BACKWARD8 if eight else BACKWARD),
        )  # fmt: skip
        if eight:
            grad_x = from_eight(grad_residual, grad_x, stats)
        grad_weight, grad_norm_bias, grad_bias = collect(partial, *ctx.parameters)
        if len(shape) == 3:
            grad_x = grad_x.expand(shape)  # alike for all that was added up
        grads = (grad_x, grad_bias, grad_residual if has_residual else None)
        return *grads, grad_weight, grad_norm_bias, *(None,) * 7


def bias_dropout_add_norm(x, bias, residual, weight, norm_bias, eps, p, token_keys, site, seed):
    """See `plain.bias_dropout_add_norm`."""
    return Norm.apply(
        x.contiguous(),
        bias,
        residual.contiguous(),
        weight,
        norm_bias,
        eps,
        p,
        token_keys,
        site,
        seed,
    )


def layer_norm(x, weight, bias, eps):
    """See `plain.layer_norm`."""
    flat = x.reshape(-1, x.shape[-1]).contiguous()
    return Norm.apply(flat, None, None, weight, bias, eps, 0.0, None, 0, 0).view(x.shape)


@triton.jit(do_not_specialize=["stream"])
def _dropout(
    x,
    token_keys,
    y,
    stream,
    H: tl.constexpr,
    BLOCK: tl.constexpr,
    THRESHOLD: tl.constexpr,
    KEEP_SCALE: tl.constexpr,
):
    t = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    offset = (tl.full([], 0, tl.int64) + t) * H + column
    value = tl.load(x + offset, mask=column < H, other=0.0).to(tl.float32)
    rows = row_hash(tl.load(token_keys + t), stream)
    multiplier, shift = channel_hash(column)
    kept = keep(rows, multiplier, shift, THRESHOLD)
    tl.store(
        y + offset, tl.where(kept, value * KEEP_SCALE, 0.0).to(y.dtype.element_ty), mask=column < H
    )


class _Dropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x, p, token_keys, salt):
        ctx.save_for_backward(token_keys)
        ctx.rest = (p, salt)
        y = torch.empty_like(x)
        _dropout[(x.shape[0],)](
            x, token_keys, y, salt, H=x.shape[1], BLOCK=triton.next_power_of_2(x.shape[1]),
            THRESHOLD=threshold(p), KEEP_SCALE=keep_scale(p), num_warps=4,
        )  # fmt: skip
        return y

    @staticmethod
    def backward(ctx: Any, grad):
        p, salt = ctx.rest
        return _Dropout.apply(grad.contiguous(), p, ctx.saved_tensors[0], salt), None, None, None


def dropout(x, p, token_keys, site, seed):
    """See `plain.dropout`."""
    if p == 0.0:
        return x
    return _Dropout.apply(x.contiguous(), p, token_keys, signed(stream(seed, site)))
