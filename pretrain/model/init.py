"""Initial weights, the same for every layout: each logical tensor from a generator seeded by name."""

from __future__ import annotations

import math
from collections.abc import Iterable
from hashlib import sha256

import numpy as np
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


@torch.no_grad()
def start_at_unigram(pieces: Iterable[Piece], log_probabilities: np.ndarray) -> None:
    """Sets the bias of the MLM head to these log probabilities, less their mean (which the softmax
    does not see, and LAMB's trust ratio should not); tokens that never occur get the lowest.

    Args:
        log_probabilities: [vocab_size], -inf allowed; see `pretrain.evaluation.unigram`.
    """
    finite = np.isfinite(log_probabilities)
    values = np.where(finite, log_probabilities, log_probabilities[finite].min())
    bias = torch.from_numpy(values - values.mean())
    for piece in pieces:
        if piece.name == "cls.predictions.bias":
            block = piece.view(piece.param.view(-1))
            theirs, ours = piece.clip(block)
            block[ours] = bias[theirs].to(block.device, block.dtype)


@torch.no_grad()
def start_at_sinusoids(pieces: Iterable[Piece], std: float) -> None:
    """Sets the position embeddings to sines and cosines with root mean square `std`; wavelengths go
    from 2 pi to 2 pi times the number of positions."""
    for piece in pieces:
        if piece.name == "bert.embeddings.position_embeddings.weight":
            count, hidden = piece.logical_shape
            rates = float(count) ** -torch.linspace(0, 1, hidden // 2)
            angles = torch.arange(count)[:, None] * rates
            waves = torch.zeros(count, hidden)
            waves[:, : 2 * len(rates)] = torch.cat((angles.sin(), angles.cos()), 1)
            block = piece.view(piece.param.view(-1))
            theirs, ours = piece.clip(block)
            block[ours] = (std * math.sqrt(2) * waves)[theirs].to(block.device, block.dtype)
