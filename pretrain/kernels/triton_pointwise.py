"""What lies between the matrix products, each in one pass over memory in each direction.

LayerNorm(dropout(x + bias) + residual), GELU(x + bias) and dropout. Masks are regenerated in
the backward pass. Gradients of weights and biases are summed per program in fp32 and then over
the programs, in a fixed order.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from pretrain.kernels.hashing import keep_scale, signed, stream, threshold
from pretrain.kernels.triton_gradients import collect
from pretrain.kernels.triton_hash import channel_hash, keep, row_hash

Tensor = torch.Tensor


@triton.jit(do_not_specialize=["stream"])
def _norm_forward(
    x, bias, residual, weight, norm_bias, token_keys, y, summed, means, scales, tokens, stream, eps,
    H: tl.constexpr, BLOCK: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr,
    THRESHOLD: tl.constexpr, KEEP_SCALE: tl.constexpr,
):  # fmt: skip
    column = tl.arange(0, BLOCK)
    valid = column < H
    w = tl.load(weight + column, mask=valid, other=0.0).to(tl.float32)
    nb = tl.load(norm_bias + column, mask=valid, other=0.0).to(tl.float32)
    if BIAS:
        b = tl.load(bias + column, mask=valid, other=0.0).to(tl.float32)
    if THRESHOLD > 0:
        multiplier, shift = channel_hash(column)
    for t in range(tl.program_id(0), tokens, tl.num_programs(0)):
        offset = (tl.full([], 0, tl.int64) + t) * H + column
        z = tl.load(x + offset, mask=valid, other=0.0).to(tl.float32)
        if RESIDUAL:
            r = tl.load(residual + offset, mask=valid, other=0.0).to(tl.float32)
        if BIAS:
            z += b
        if THRESHOLD > 0:
            rows = row_hash(tl.load(token_keys + t), stream)
            z = tl.where(keep(rows, multiplier, shift, THRESHOLD), z * KEEP_SCALE, 0.0)
        if RESIDUAL:
            # Rounded as it is kept for the backward pass, so that both see one value.
            z = (z + r).to(summed.dtype.element_ty)
            tl.store(summed + offset, z, mask=valid)
            z = z.to(tl.float32)
        mean = tl.sum(z, 0) / H
        centred = tl.where(valid, z - mean, 0.0)
        scale = 1.0 / tl.sqrt(tl.sum(centred * centred, 0) / H + eps)
        tl.store(y + offset, (centred * scale * w + nb).to(y.dtype.element_ty), mask=valid)
        tl.store(means + t, mean)
        tl.store(scales + t, scale)


@triton.jit(do_not_specialize=["stream"])
def _norm_backward(
    grad, summed, weight, means, scales, token_keys, grad_x, grad_residual, partial, tokens, stream,
    H: tl.constexpr, BLOCK: tl.constexpr, BIAS: tl.constexpr,
    THRESHOLD: tl.constexpr, KEEP_SCALE: tl.constexpr,
):  # fmt: skip
    column = tl.arange(0, BLOCK)
    valid = column < H
    w = tl.load(weight + column, mask=valid, other=0.0).to(tl.float32)
    if THRESHOLD > 0:
        multiplier, shift = channel_hash(column)
    sum_w = tl.zeros([BLOCK], tl.float32)
    sum_nb = tl.zeros([BLOCK], tl.float32)
    sum_b = tl.zeros([BLOCK], tl.float32)
    for t in range(tl.program_id(0), tokens, tl.num_programs(0)):
        offset = (tl.full([], 0, tl.int64) + t) * H + column
        dy = tl.load(grad + offset, mask=valid, other=0.0).to(tl.float32)
        z = tl.load(summed + offset, mask=valid, other=0.0).to(tl.float32)
        scale = tl.load(scales + t)
        normed = tl.where(valid, (z - tl.load(means + t)) * scale, 0.0)
        sum_w += dy * normed
        sum_nb += dy
        dn = dy * w
        # d z = scale * (dn - mean(dn) - normed * mean(dn * normed))
        dz = scale * (dn - tl.sum(dn, 0) / H - normed * (tl.sum(dn * normed, 0) / H))
        if THRESHOLD > 0:
            tl.store(grad_residual + offset, dz.to(grad_residual.dtype.element_ty), mask=valid)
            rows = row_hash(tl.load(token_keys + t), stream)
            dz = tl.where(keep(rows, multiplier, shift, THRESHOLD), dz * KEEP_SCALE, 0.0)
        tl.store(grad_x + offset, dz.to(grad_x.dtype.element_ty), mask=valid)
        if BIAS:
            sum_b += dz
    target = partial + tl.program_id(0) * ((3 if BIAS else 2) * H) + column
    tl.store(target, sum_w, mask=valid)
    tl.store(target + H, sum_nb, mask=valid)
    if BIAS:
        tl.store(target + 2 * H, sum_b, mask=valid)


def _programs(device: torch.device, each: int) -> int:
    if device.type != "cuda":  # interpreted
        return 3
    return torch.cuda.get_device_properties(device).multi_processor_count * each


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x, bias, residual, weight, norm_bias, eps, p, token_keys, site, seed):
        tokens, hidden = x.shape
        block = triton.next_power_of_2(hidden)
        y = torch.empty_like(x)
        summed = x if residual is None else torch.empty_like(x)
        means = torch.empty(tokens, dtype=torch.float32, device=x.device)
        scales = torch.empty_like(means)
        salt = signed(stream(seed, site))
        _norm_forward[(_programs(x.device, 16),)](
            x, x if bias is None else bias, x if residual is None else residual, weight, norm_bias,
            x if token_keys is None else token_keys, y, summed, means, scales, tokens, salt, eps,
            H=hidden, BLOCK=block, BIAS=bias is not None, RESIDUAL=residual is not None,
            THRESHOLD=threshold(p), KEEP_SCALE=keep_scale(p), num_warps=max(1, min(8, block // 256)),
        )  # fmt: skip
        ctx.save_for_backward(summed, weight, means, scales, token_keys)
        ctx.parameters = (weight, norm_bias, bias)
        ctx.rest = (salt, p, residual is not None)
        return y

    @staticmethod
    def backward(ctx: Any, grad):
        summed, weight, means, scales, token_keys = ctx.saved_tensors
        salt, p, has_residual = ctx.rest
        bias = ctx.parameters[2]
        tokens, hidden = summed.shape
        block = triton.next_power_of_2(hidden)
        programs = _programs(summed.device, 8)
        partial = torch.empty(
            programs,
            3 if bias is not None else 2,
            hidden,
            dtype=torch.float32,
            device=summed.device,
        )
        grad_x = torch.empty_like(summed)
        grad_residual = torch.empty_like(summed) if p > 0 else grad_x
        _norm_backward[(programs,)](
            grad.contiguous(), summed, weight, means, scales,
            summed if token_keys is None else token_keys, grad_x, grad_residual, partial, tokens, salt,
            H=hidden, BLOCK=block, BIAS=bias is not None, THRESHOLD=threshold(p),
            KEEP_SCALE=keep_scale(p), num_warps=max(1, min(8, block // 1024)),
        )  # fmt: skip
        grad_weight, grad_norm_bias, grad_bias = collect(partial, *ctx.parameters)
        grads = (grad_x, grad_bias, grad_residual if has_residual else None)
        return *grads, grad_weight, grad_norm_bias, *(None,) * 5


def bias_dropout_add_norm(x, bias, residual, weight, norm_bias, eps, p, token_keys, site, seed):
    """See `plain.bias_dropout_add_norm`."""
    return _Norm.apply(
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
    flat = x.reshape(-1, x.shape[-1])
    return _Norm.apply(flat, None, None, weight, bias, eps, 0.0, None, 0, 0).view(x.shape)


@triton.jit
def _normal(x):
    """(Phi(x), phi(x)): distribution and density of the standard normal.

    erf by Abramowitz & Stegun 7.1.26 (absolute error 1.5e-7, that of fp32), whose exponential
    is the density's own.
    """
    half = tl.abs(x) * 0.7071067811865476
    t = 1.0 / (1.0 + 0.3275911 * half)
    gauss = tl.exp(-half * half)
    poly = t * (
        0.254829592 + t * (-0.284496736 + t * (1.421413741 + t * (-1.453152027 + t * 1.061405429)))
    )
    tail = 0.5 * poly * gauss
    return tl.where(x > 0, 1.0 - tail, tail), 0.3989422804014327 * gauss


@triton.jit
def _gelu_forward(x, bias, y, tokens, C: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    valid = (row[:, None] < tokens) & (column[None, :] < C)
    offset = row[:, None] * C + column[None, :]
    b = tl.load(bias + column, mask=column < C, other=0.0).to(tl.float32)
    z = tl.load(x + offset, mask=valid, other=0.0).to(tl.float32) + b[None, :]
    below, _ = _normal(z)
    tl.store(y + offset, (z * below).to(y.dtype.element_ty), mask=valid)


@triton.jit
def _gelu_backward(
    grad, x, bias, grad_x, partial, tokens, each,
    C: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    b = tl.load(bias + column, mask=column < C, other=0.0).to(tl.float32)
    sums = tl.zeros([BLOCK], tl.float32)
    first = tl.program_id(0).to(tl.int64) * each
    for start in range(0, each, ROWS):
        row = first + start + tl.arange(0, ROWS)
        valid = (row[:, None] < tokens) & (column[None, :] < C)
        offset = row[:, None] * C + column[None, :]
        z = tl.load(x + offset, mask=valid, other=0.0).to(tl.float32) + b[None, :]
        dy = tl.load(grad + offset, mask=valid, other=0.0).to(tl.float32)
        below, density = _normal(z)
        dz = dy * (below + z * density)
        tl.store(grad_x + offset, dz.to(grad_x.dtype.element_ty), mask=valid)
        sums += tl.sum(dz, 0)
    tl.store(partial + tl.program_id(0) * C + column, sums, mask=column < C)


class _BiasGelu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x, bias):
        tokens, channels = x.shape
        y = torch.empty_like(x)
        grid = (triton.cdiv(tokens, 2), triton.cdiv(channels, 1024))
        _gelu_forward[grid](x, bias, y, tokens, C=channels, ROWS=2, BLOCK=1024, num_warps=4)
        ctx.save_for_backward(x, bias)
        ctx.bias = bias
        return y

    @staticmethod
    def backward(ctx: Any, grad):
        x, bias = ctx.saved_tensors
        tokens, channels = x.shape
        each = 128
        chunks = triton.cdiv(tokens, each)
        partial = torch.empty(chunks, channels, dtype=torch.float32, device=x.device)
        grad_x = torch.empty_like(x)
        _gelu_backward[(chunks, triton.cdiv(channels, 1024))](
            grad.contiguous(), x, bias, grad_x, partial, tokens, each,
            C=channels, ROWS=2, BLOCK=1024, num_warps=4,
        )  # fmt: skip
        return grad_x, *collect(partial, ctx.bias)


def bias_gelu(x, bias):
    """See `plain.bias_gelu`."""
    return _BiasGelu.apply(x.contiguous(), bias)


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
