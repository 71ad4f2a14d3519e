"""BLiMP (Warstadt et al. 2020): does the model find the grammatical sentence of a pair likelier?

A sentence's score is its pseudo-log-likelihood (Salazar et al. 2020, 1910.14659): the sum over its
word pieces of log p(piece | all others), each masked once in a copy of its own. Copies of equal
length are packed together, so nothing is padded, and only masked positions reach the vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from configs import Progress, UserError

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerFast

    from pretrain.data.batches import MicroBatch
    from pretrain.model import BertForPreTraining

_COLUMNS = ("linguistics_term", "UID", "sentence_good", "sentence_bad")


@dataclass
class Pairs:
    """n minimal pairs. good, bad: sentences; uid, term: what each pair tests."""

    good: list[str]
    bad: list[str]
    uid: np.ndarray
    term: np.ndarray

    def __len__(self) -> int:
        return len(self.good)


def read_pairs(parquet: str | Path, sample: float = 1.0, seed: int = 0) -> Pairs:
    """BLiMP from its parquet file. sample: share of the pairs of every UID, drawn by `seed`.

    Raises:
        UserError: no such file, no parquet, a column missing.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.read_table(parquet)
    except (OSError, pa.ArrowInvalid) as error:
        raise UserError(
            f"{parquet}: {str(error).splitlines()[0]}", "expected BLiMP as parquet"
        ) from None
    absent = [name for name in _COLUMNS if name not in table.column_names]
    if absent:
        raise UserError(f"{parquet}: no column {absent[0]}", f"expected {', '.join(_COLUMNS)}")
    term, uid, good, bad = (table.column(name).to_pylist() for name in _COLUMNS)
    uids = np.array(uid)
    draw = np.random.default_rng(seed)
    taken: list[int] = []
    for name in np.unique(uids):
        of_uid = np.flatnonzero(uids == name)
        taken += draw.permutation(of_uid)[: max(1, round(sample * len(of_uid)))].tolist()
    taken.sort()
    return Pairs(
        [good[i] for i in taken],
        [bad[i] for i in taken],
        np.array([uid[i] for i in taken]),
        np.array([term[i] for i in taken]),
    )


def pseudo_log_likelihood(
    model: BertForPreTraining,
    tokenizer: PreTrainedTokenizerFast,
    sentences: list[str],
    batch_tokens: int = 65536,
    quiet: bool = True,
) -> np.ndarray:
    """float64 [len(sentences)]: each sentence's pseudo-log-likelihood in nats.

    batch_tokens bounds one forward pass (copies x length); the model's own device is used.
    """
    import torch

    if tokenizer.mask_token_id is None:
        raise UserError(
            "the tokenizer has no mask token", "its tokenizer_config.json must name one"
        )
    device = next(model.parameters()).device
    encoded = tokenizer(sentences, return_attention_mask=False)["input_ids"]
    lengths = np.array([len(ids) for ids in encoded])
    scores = torch.zeros(len(sentences), dtype=torch.float64, device=device)
    was_training = model.training
    model.eval()
    total = int((lengths - 2).clip(min=0).sum())
    with torch.no_grad(), Progress(total, "pseudo-log-likelihood", "masks", quiet=quiet) as bar:
        for length in np.unique(lengths):
            places = int(length) - 2  # without [CLS] and [SEP]
            if places < 1:
                continue
            members = np.flatnonzero(lengths == length)
            ids = torch.tensor([encoded[i] for i in members], device=device)
            index = torch.from_numpy(members).to(device)
            for copies in _slices(len(members) * places, max(1, batch_tokens // int(length))):
                row, place = copies // places, copies % places + 1
                scored = _score(model, tokenizer.mask_token_id, ids, row, place)
                scores.index_add_(0, index[torch.from_numpy(row).to(device)], scored.double())
                bar.update(len(copies))
    model.train(was_training)
    return scores.cpu().numpy()


def _slices(count: int, most: int) -> Iterator[np.ndarray]:
    for start in range(0, count, most):
        yield np.arange(start, min(start + most, count))


def _score(
    model: BertForPreTraining, mask_id: int, ids: torch.Tensor, row: np.ndarray, place: np.ndarray
) -> torch.Tensor:
    """log p of the piece at `place` of each copy of `ids[row]`, with that piece masked: [copies]."""
    import torch

    rows = torch.from_numpy(row).to(ids.device)
    places = torch.from_numpy(place).to(ids.device)
    copies = ids[rows]
    at = torch.arange(len(rows), device=ids.device)
    targets = copies[at, places]
    copies[at, places] = mask_id
    hidden = model.encode(uniform_rows(copies))
    logits = model.logits(hidden[at * copies.shape[1] + places]).float()
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
        sum_squared_lengths=n * length * length,
    )


def score_pairs(
    model: BertForPreTraining,
    tokenizer: PreTrainedTokenizerFast,
    pairs: Pairs,
    batch_tokens: int = 65536,
    quiet: bool = True,
) -> np.ndarray:
    """bool [len(pairs)]: the good sentence scores higher (a tie, 7 equal pairs, is wrong)."""
    sentences = pairs.good + pairs.bad
    scores = pseudo_log_likelihood(model, tokenizer, sentences, batch_tokens, quiet)
    return scores[: len(pairs)] > scores[len(pairs) :]


def summary(pairs: Pairs, right: np.ndarray) -> dict[str, Any]:
    """Accuracy in percent: overall (mean over the UIDs), by term and by UID."""
    by_uid = {str(u): 100 * float(right[pairs.uid == u].mean()) for u in np.unique(pairs.uid)}
    by_term = {str(t): 100 * float(right[pairs.term == t].mean()) for t in np.unique(pairs.term)}
    overall = float(np.mean(list(by_uid.values())))
    return {"accuracy": overall, "pairs": len(pairs), "by_term": by_term, "by_uid": by_uid}


def probe(
    model: BertForPreTraining,
    tokenizer: PreTrainedTokenizerFast,
    parquet: str | Path,
    pairs: int = 1000,
    batch_tokens: int = 16384,
    share: tuple[int, int] = (0, 1),
) -> tuple[int, int]:
    """(right, scored) of a fixed sample, for a probe during training; no gradient, eval mode.

    Args:
        pairs: about so many, the same number of every UID, the same ones at each call.
        share: (rank, ranks) of data parallelism: this rank scores every ranks-th pair, and the
            caller sums the two counts. Ranks of one tensor-parallel group must pass the same.
    """
    import pyarrow.parquet as pq

    keep = read_pairs(parquet, min(1.0, pairs / pq.read_metadata(parquet).num_rows))
    mine = slice(share[0], None, share[1])
    part = Pairs(keep.good[mine], keep.bad[mine], keep.uid[mine], keep.term[mine])
    return int(score_pairs(model, tokenizer, part, batch_tokens).sum()), len(part)
