"""Initial weights, the same for every layout: each logical tensor from a generator seeded by name."""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import sha256

import torch

from pretrain.parallel.pieces import Piece


@torch.no_grad()
def initialise(pieces: Iterable[Piece], std: float, seed: int) -> None:
    """Fills every piece: normal(0, std) cut at two standard deviations (BERT's own initialiser)
    for matrices, zero for biases, one for LayerNorm weights, zero for vocabulary padding."""
    for piece in pieces:
        block = piece.view(piece.param.view(-1))
        block.zero_()
        if len(piece.logical_shape) == 1:
            if piece.name.endswith("LayerNorm.weight"):
                block.fill_(1.0)
            continue
        digest = sha256(f"{seed}/{piece.name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))
        full = torch.empty(piece.logical_shape)
        torch.nn.init.trunc_normal_(full, 0.0, std, -2 * std, 2 * std, generator)
        theirs, ours = piece.clip(block)
        block[ours] = full[theirs].to(block.device, block.dtype)
