"""BLiMP (Warstadt et al. 2020): does the model find the grammatical sentence of a pair likelier?

A sentence's score is its pseudo-log-likelihood (pretrain.downstream.pseudo).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from configs import UserError
from pretrain.downstream.pseudo import encode, of_sentences

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

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


def read_pairs(
    parquet: str | Path, sample: float = 1.0, seed: int = 0, about: int | None = None
) -> Pairs:
    """BLiMP from its parquet file. sample: share of the pairs of every UID, drawn by `seed`; or the
    share that makes `about` so many.

    Raises:
        UserError: no such file, no parquet, a column missing, nulls in one, no pairs.
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
    holes = [name for name in _COLUMNS if table.column(name).null_count]
    if holes or not table.num_rows:
        what = f"nulls in {holes[0]}" if holes else "holds no pairs"
        raise UserError(f"{parquet}: {what}", "copy it again")
    if about is not None:
        sample = min(1.0, about / table.num_rows)
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


def open_pairs(
    parquet: str | Path,
    tokenizer: PreTrainedTokenizerFast,
    positions: int,
    sample: float = 1.0,
    about: int | None = None,
) -> Pairs:
    """`read_pairs`, for a model of so many positions: what cannot be scored is refused before any
    work is done.

    Raises:
        UserError: begins with the file; as `read_pairs`, and for a sentence that is too long.
    """
    pairs = read_pairs(parquet, sample, about=about)
    # A piece has a byte or more, so that the many short sentences need not be tokenised twice.
    long = [text for text in pairs.good + pairs.bad if len(text.encode()) + 2 > positions]
    try:
        if long:
            encode(tokenizer, long, positions)
    except UserError as error:
        raise UserError(f"{parquet}: {error.what}", error.remedy) from None
    return pairs


def score_pairs(
    model: BertForPreTraining,
    tokenizer: PreTrainedTokenizerFast,
    pairs: Pairs,
    batch_tokens: int = 65536,
    quiet: bool = True,
) -> np.ndarray:
    """bool [len(pairs)]: the good sentence scores higher (a tie, 7 equal pairs, is wrong)."""
    sentences = pairs.good + pairs.bad
    scores = of_sentences(model, tokenizer, sentences, batch_tokens, quiet)
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
    pairs: Pairs,
    batch_tokens: int = 16384,
    share: tuple[int, int] = (0, 1),
) -> tuple[int, int]:
    """(right, scored) of some pairs, for a probe during training; no gradient, eval mode.

    Args:
        share: (rank, ranks) of data parallelism: this rank scores every ranks-th pair, and the
            caller sums the two counts. Ranks of one tensor-parallel group must pass the same.
    """
    mine = slice(share[0], None, share[1])
    part = Pairs(pairs.good[mine], pairs.bad[mine], pairs.uid[mine], pairs.term[mine])
    return int(score_pairs(model, tokenizer, part, batch_tokens).sum()), len(part)
