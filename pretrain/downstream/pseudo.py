"""Pseudo-log-likelihood and pseudo-perplexity (Salazar et al. 2020, 1910.14659).

The pseudo-log-likelihood of a text is the sum over its word pieces of log p(piece | all others),
each masked alone, in a copy of the text of its own; a corpus has the pseudo-perplexity exp(-sum /
word pieces). Unlike exp(loss) it does not depend on how many tokens are masked at a time. Copies of
equal length are packed together, so nothing is padded, and only masked positions reach the
vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from configs import Progress, UserError

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerFast

    from data_prep.shards import Shards
    from pretrain.data.batches import MicroBatch
    from pretrain.model import BertForPreTraining


def of_sentences(
    model: BertForPreTraining,
    tokenizer: PreTrainedTokenizerFast,
    sentences: list[str],
    batch_tokens: int = 65536,
    quiet: bool = True,
) -> np.ndarray:
    """float64 [len(sentences)]: each sentence's pseudo-log-likelihood in nats, of all tokens
    between [CLS] and [SEP].

    batch_tokens bounds one forward pass (copies x length); the model's own device is used.
    """
    if tokenizer.mask_token_id is None:
        raise UserError(
            "the tokenizer has no mask token", "its tokenizer_config.json must name one"
        )
    if not sentences:  # the share of a rank, where there are more ranks than pairs
        return np.zeros(0)
    encoded = encode(tokenizer, sentences, model.config.max_position_embeddings)
    inside = []
    for ids in encoded:
        scored = np.zeros(len(ids), bool)
        scored[1:-1] = True
        inside.append(scored)
    return log_likelihoods(
        model, tokenizer.mask_token_id, encoded, inside, None, batch_tokens, quiet
    )


def encode(
    tokenizer: PreTrainedTokenizerFast, sentences: list[str], positions: int
) -> list[np.ndarray]:
    """Word pieces of each sentence; UserError for one that has more than the model has positions."""
    encoded = [np.array(i) for i in tokenizer(sentences, return_attention_mask=False)["input_ids"]]
    if (longest := max(map(len, encoded))) > positions:
        raise UserError(
            f"a sentence of {longest} word pieces, the model has {positions} positions",
            "score sentences that fit, or a model of more positions",
        )
    return encoded


def pseudo_perplexity(
    model: BertForPreTraining, held_out: Shards, rows: int, batch_tokens: int = 65536
) -> tuple[float, int]:
    """(pseudo-perplexity, word pieces scored) of a fixed random choice of so many held-out rows.

    Every token but [CLS] and [SEP] is scored; rows of two segments keep their token types.
    """
    from pretrain.data.order import RowOrder

    count = min(rows, held_out.num_rows)
    read = held_out.rows(np.sort(RowOrder(held_out.num_rows, 0).rows(0, count)[1]))
    ids = np.split(read.tokens, read.offsets[1:-1])
    special = [held_out.special_ids["cls"], held_out.special_ids["sep"]]
    scored = [~np.isin(row, special) for row in ids]
    types = [
        np.arange(len(row)) >= start if start else np.zeros(len(row), bool)
        for row, start in zip(ids, read.segment_b.tolist())
    ]
    sums = log_likelihoods(
        model, held_out.special_ids["mask"], ids, scored, types, batch_tokens, quiet=False
    )
    pieces = int(sum(row.sum() for row in scored))
    return math.exp(min(-float(sums.sum()) / max(pieces, 1), 700.0)), pieces


def log_likelihoods(
    model: BertForPreTraining,
    mask_id: int,
    rows: Sequence[np.ndarray],
    scored: Sequence[np.ndarray],
    types: Sequence[np.ndarray] | None,
    batch_tokens: int,
    quiet: bool,
) -> np.ndarray:
    """float64 [len(rows)]: sum of log p over the scored tokens of each row, each masked alone.

    Args:
        rows: token ids. scored: bool, of the same lengths. types: token types; None = all 0.
    """
    import torch

    device = next(model.parameters()).device
    lengths = np.array([len(row) for row in rows])
    sums = torch.zeros(len(rows), dtype=torch.float64, device=device)
    was_training = model.training
    model.eval()
    total = int(sum(row.sum() for row in scored))
    with torch.no_grad(), Progress(total, "pseudo-log-likelihood", "masks", quiet=quiet) as bar:
        for length in np.unique(lengths):
            members = np.flatnonzero(lengths == length).tolist()
            row_of, place_of = np.nonzero(np.stack([scored[i] for i in members]))
            ids = torch.from_numpy(np.stack([rows[i] for i in members]).astype(np.int64)).to(device)
            kinds = torch.zeros_like(ids)
            if types is not None:
                kinds = torch.from_numpy(np.stack([types[i] for i in members])).to(ids)
            index = torch.tensor(members, device=device)
            for part in _slices(len(row_of), max(1, batch_tokens // max(1, int(length)))):
                row = torch.from_numpy(row_of[part]).to(device)
                place = torch.from_numpy(place_of[part]).to(device)
                found = _score(model, mask_id, ids[row], kinds[row], place)
                sums.index_add_(0, index[row], found.double())
                bar.update(len(row))
    model.train(was_training)
    return sums.cpu().numpy()


def _slices(count: int, most: int) -> Iterator[slice]:
    for start in range(0, count, most):
        yield slice(start, min(start + most, count))


def _score(
    model: BertForPreTraining,
    mask_id: int,
    copies: torch.Tensor,
    types: torch.Tensor,
    place: torch.Tensor,
) -> torch.Tensor:
    """log p of the token at `place` [n] of each of the copies [n, length], with it masked: [n]."""
    import torch

    at = torch.arange(len(copies), device=copies.device)
    targets = copies[at, place]
    copies[at, place] = mask_id
    # Some twice, so that tensor-parallel ranks can share out the tokens.
    tp = model.s.layers.tp
    every = torch.arange(-(-len(at) // tp) * tp, device=at.device) % len(at)
    hidden = model.encode(uniform_rows(copies[every], types[every]))
    logits = model.logits(hidden[at * copies.shape[1] + place]).float()
    return torch.log_softmax(logits, -1)[at, targets]


def uniform_rows(ids: torch.Tensor, types: torch.Tensor | None = None) -> MicroBatch:
    """[n, L] ids (no padding) as one packed micro-batch that nothing scores.

    types: [n, L] token types, all 0 when None.
    """
    import torch

    from pretrain.data.batches import MicroBatch

    n, length = ids.shape
    device = ids.device
    none, no_weight = ids.new_zeros(0), torch.zeros(0, device=device)
    starts = torch.arange(n + 1, device=device, dtype=torch.int32) * length
    return MicroBatch(
        input_ids=ids.reshape(-1),
        position_ids=torch.arange(length, device=device).repeat(n),
        token_type_ids=torch.zeros_like(ids).reshape(-1) if types is None else types.reshape(-1),
        token_keys=torch.zeros(n * length, dtype=torch.int32, device=device),
        cu_seqlens=starts,
        masked_positions=none,
        masked_labels=none,
        masked_weights=no_weight,
        first_positions=starts[:-1].long(),
        next_sentence_labels=none,
        row_weights=no_weight,
        max_length=length,
        tokens=n * length,
        rows=n,
        masked=0,
        labelled=0,
        sum_squared_lengths=n * length * length,
    )
