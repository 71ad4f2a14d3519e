"""Counter-based dropout: which values are kept is a function of integers, not of a generator.

    stream  = mix(seed ^ mix(site))                    one integer for a dropout place in a run
    bits    = scramble(mix(token_key ^ stream) + mix(channel))
    keep    = sixteen of the bits >= threshold(p)

so a mask is the same on CPU and GPU, for any tensor-parallel or data-parallel size and any
micro-batch, and the backward pass and a resumed run regenerate it instead of storing it.
Hidden dropout takes the upper sixteen bits, channel = the hidden index. Attention takes
channel = (head // 2) * 65536 + key position: even heads the upper sixteen bits, odd heads the
lower, so that one hash serves two heads. p is rounded to a multiple of 1/65536 (0.1 becomes
0.100006), and kept values are divided by the rounded 1 - p: the expectation is exact.

`mix` is the lowbias32 finaliser (two multiplications, three xor-shifts); `scramble` is the same
without its last step, which only the lower bits need. All arithmetic is modulo 2**32; torch
does it in wrapping int32, Triton in uint32, with equal results.
"""

from __future__ import annotations

import torch

MASK = 0xFFFFFFFF
MULTIPLY_1 = 0x7FEB352D
MULTIPLY_2 = 0x846CA68B
HEAD_STRIDE = 65536


def threshold(p: float) -> int:
    """p in units of 2**-16; raises ValueError outside [0, 1)."""
    if not 0.0 <= p < 1.0:
        raise ValueError(f"dropout probability {p} is not in [0, 1)")
    return min(round(p * 65536), 65535)


def keep_scale(p: float) -> float:
    """What kept values are multiplied by: 1 / (1 - rounded p)."""
    return 65536.0 / (65536 - threshold(p))


def mix(x: int) -> int:
    """lowbias32 on a Python integer."""
    x &= MASK
    x ^= x >> 16
    x = x * MULTIPLY_1 & MASK
    x ^= x >> 15
    x = x * MULTIPLY_2 & MASK
    return x ^ x >> 16


def stream(seed: int, site: int) -> int:
    """The 32-bit number of a dropout place, the same for the whole run."""
    return mix(seed ^ mix(site + 0x51ED27))


def signed(x: int) -> int:
    """The int32 with the same bits as the 32-bit x."""
    return x - (1 << 32) if x >= 1 << 31 else x


def _scramble(x: torch.Tensor) -> torch.Tensor:
    """In place on int32; the shifts are made logical by masking off the copied sign bits."""
    x ^= (x >> 16) & 0xFFFF
    x *= MULTIPLY_1
    x ^= (x >> 15) & 0x1FFFF
    x *= signed(MULTIPLY_2)
    return x


def _mix(x: torch.Tensor) -> torch.Tensor:
    x = _scramble(x)
    x ^= (x >> 16) & 0xFFFF
    return x


def hidden_keep(token_keys: torch.Tensor, channels: int, p: float, seed: int, site: int):
    """bool [T, channels]: True where hidden dropout keeps a value."""
    rows = _mix(token_keys.to(torch.int32) ^ signed(stream(seed, site)))
    columns = _mix(torch.arange(channels, dtype=torch.int32, device=token_keys.device))
    bits = _scramble(rows[:, None] + columns[None, :])
    return ((bits >> 16) & 0xFFFF) >= threshold(p)


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
    rows = _mix(token_keys.to(torch.int32) ^ signed(stream(seed, site)))
    keys = torch.arange(positions, dtype=torch.int32, device=device)
    first_pair = first_head // 2
    pairs = torch.arange(first_pair, (first_head + heads + 1) // 2, dtype=torch.int32)
    columns = _mix(pairs.to(device)[:, None] * HEAD_STRIDE + keys)
    bits = _scramble(rows[..., None, None] + columns)
    upper = (bits >> 16) & 0xFFFF
    both = torch.stack((upper, (bits & 0xFFFF) ^ upper), dim=-2).flatten(-3, -2)
    offset = first_head - 2 * first_pair
    return both[..., offset : offset + heads, :] >= threshold(p)
