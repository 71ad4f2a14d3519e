"""Counter-based dropout: which values are kept is a function of integers, not of a generator.

    stream = mix(seed ^ mix(site))                     one integer for a dropout place in a run
    bits   = mix(token_key ^ stream) * (mix(channel) | 1) + mix(channel + GOLDEN)
    keep   = bits >= threshold(p)

so a mask is the same on CPU and GPU, for any tensor-parallel or data-parallel size and any
micro-batch, and the backward pass and a resumed run regenerate it instead of storing it. The
channel is the hidden index, or head * 65536 + key position for attention probabilities.

`mix` is the lowbias32 finaliser. Only the two vectors are mixed; a value of the mask costs one
multiply-add and one comparison, which matters: at length 512 a stronger hash of every value took
as long as the attention itself. Multiply-shift hashing is pairwise nearly independent; means,
pair, triple and four-point correlations and the largest singular value of such masks are those of
random ones (tests/kernels). p is rounded to a multiple of 1/65536 (0.1 becomes 0.100006) and kept
values are divided by the rounded 1 - p, so that the expectation is exact.

All arithmetic is modulo 2**32: torch does it in wrapping int32, Triton in uint32, with equal
results.
"""

from __future__ import annotations

import torch

from pretrain.data.counter import GOLDEN, MASK, MULTIPLY_1, MULTIPLY_2, mix

HEAD_STRIDE = 65536


def threshold(p: float) -> int:
    """p in units of 2**-16; raises ValueError outside [0, 1)."""
    if not 0.0 <= p < 1.0:
        raise ValueError(f"dropout probability {p} is not in [0, 1)")
    return min(round(p * 65536), 65535)


def keep_scale(p: float) -> float:
    """What kept values are multiplied by: 1 / (1 - rounded p)."""
    return 65536.0 / (65536 - threshold(p))


def stream(seed: int, site: int) -> int:
    """The 32-bit number of a dropout place, the same for the whole run."""
    return mix((seed ^ mix(site + 0x51ED27)) & MASK)


def signed(x: int) -> int:
    """The int32 with the same bits as the 32-bit x."""
    return x - (1 << 32) if x >= 1 << 31 else x


def _mix(x: torch.Tensor) -> torch.Tensor:
    """`counter.mix` on int32, in place; shifts are made logical by masking off the copied sign bits."""
    x ^= (x >> 16) & 0xFFFF
    x *= MULTIPLY_1
    x ^= (x >> 15) & 0x1FFFF
    x *= signed(MULTIPLY_2)
    x ^= (x >> 16) & 0xFFFF
    return x


def _keep(token_keys: torch.Tensor, channels: torch.Tensor, p: float, seed: int, site: int):
    """bool [*token_keys.shape, *channels.shape]"""
    rows = _mix(token_keys.to(torch.int32) ^ signed(stream(seed, site)))
    multiplier = _mix(channels.clone()) | 1
    bits = rows.reshape(*rows.shape, *[1] * channels.dim()) * multiplier
    bits += _mix(channels + signed(GOLDEN))
    return ((bits >> 16) & 0xFFFF) >= threshold(p)


def hidden_keep(token_keys: torch.Tensor, channels: int, p: float, seed: int, site: int):
    """bool [T, channels]: True where hidden dropout keeps a value."""
    columns = torch.arange(channels, dtype=torch.int32, device=token_keys.device)
    return _keep(token_keys, columns, p, seed, site)


def attention_keep(
    token_keys: torch.Tensor,
    heads: int,
    first_head: int,
    positions: int,
    p: float,
    seed: int,
    site: int,
) -> torch.Tensor:
    """bool [..., heads, positions] for token_keys [...] of the queries: True where kept.

    heads: how many this rank holds; first_head: the global index of its first; positions: of keys.
    """
    device = token_keys.device
    head = torch.arange(first_head, first_head + heads, dtype=torch.int32, device=device)
    position = torch.arange(positions, dtype=torch.int32, device=device)
    return _keep(token_keys, head[:, None] * HEAD_STRIDE + position, p, seed, site)
