"""Held-out scoring: exact averages per predicted token and per row, whatever the number of ranks.

The masks are fixed: they depend on the held-out rows alone, not on the seed of a run, so that the
figures of different runs over one set can be compared.
"""

from __future__ import annotations

import math
from typing import Any, Protocol

import numpy as np
import torch

from configs.schema import MaskingConfig
from data_prep.shards import Shards
from pretrain.data.batches import BatchBuilder, MicroBatch, make_packer
from pretrain.data.order import RowOrder

_SEED, _PHASE = 0, 1 << 20  # a phase that no training has
_MICROS = 16  # forward passes of a rank that are packed together
_UNIGRAM_ROWS = 200_000


class Scored(Protocol):
    """A model as `pretrain.model.bert.BertForPreTraining` is one: sums over a micro-batch."""

    training: bool

    def __call__(self, micro: MicroBatch) -> Any: ...  # mlm_sum, nsp_sum, mlm_correct, nsp_correct

    def train(self, mode: bool = True) -> Any: ...


class Evaluator:
    """Scores models on the held-out rows of a shard set; each row once, for any dp.

    Args:
        held_out: `data_prep.shards.held_out(folder)`. rows: how many; 0 = all. They are a fixed
            random choice, the same for every run.
        unigram: log probabilities of `unigram(train_shards)`; adds `unigram_loss` to the result.
        nsp: the model has a next-sentence head, whose scores are wanted.
        group: the data-parallel process group; None where dp is 1.

    Raises:
        UserError: from Packer: a row that is longer than micro_batch_tokens, ...
    """

    def __init__(
        self,
        held_out: Shards,
        masking: MaskingConfig,
        rows: int = 0,
        *,
        micro_batch_tokens: int = 8192,
        dp_rank: int = 0,
        dp: int = 1,
        device: torch.device | str = "cpu",
        group: Any = None,
        unigram: np.ndarray | None = None,
        nsp: bool = True,
    ) -> None:
        count = min(rows or held_out.num_rows, held_out.num_rows)
        self.rows = np.sort(RowOrder(held_out.num_rows, _SEED).rows(0, count)[1])
        self.dp_rank, self.dp, self.group, self.device = dp_rank, dp, group, device
        self.unigram, self.nsp = unigram, nsp
        tokens = int(held_out.lengths[self.rows].sum(dtype=np.int64))
        pieces = max(1, math.ceil(tokens / (dp * micro_batch_tokens * _MICROS)))
        self._pieces = np.array_split(self.rows, pieces)
        packer = make_packer(
            held_out, masking, max(dp, len(self._pieces[0])), dp, micro_batch_tokens
        )
        self._builder = BatchBuilder(held_out, masking, _SEED, _PHASE, packer)
        self.warning = self._builder.warning  # what keeps the masks from being as asked, or ""

    def batches(self) -> Any:
        """This rank's micro-batches (on the host), the same number on every rank."""
        for piece in self._pieces:
            plan, _, _ = self._builder.plan(piece)
            for number in range(plan.n_micro):
                rows = piece[plan.bin(self.dp_rank, number)]
                yield self._builder.micro(plan, np.zeros(len(rows), np.int64), rows)

    def run(self, model: Scored) -> dict[str, float]:
        """mlm_loss (nats a predicted token), mlm_accuracy, mlm_perplexity (exp of the loss, at the masking
        rate of `masking`: not the pseudo-perplexity), nsp_loss (nats a row of two segments) and
        nsp_accuracy if there are such rows, rows, tokens, masked; unigram_loss if asked for. Without
        dropout; leaves the model in the mode it was in. A collective over `group`.
        """
        sums = torch.zeros(9, dtype=torch.float64, device=self.device)
        was_training = model.training
        model.train(False)
        try:
            with torch.no_grad():
                for micro in self.batches():
                    guess = self._unigram_sum(micro)
                    out = model(micro.map(lambda t: t.to(self.device)))
                    scores = torch.stack([torch.as_tensor(x).double() for x in out[:4]])
                    counts = (micro.masked, micro.rows, micro.tokens, guess, micro.labelled)
                    sums[:4] += scores.to(sums.device)
                    sums[4:] += torch.tensor(counts, dtype=torch.float64, device=self.device)
        finally:
            model.train(was_training)
        if self.dp > 1:
            torch.distributed.all_reduce(sums, group=self.group)
        mlm, nsp, mlm_right, nsp_right, masked, rows, tokens, guess, labelled = sums.tolist()
        loss = mlm / max(masked, 1)
        result: dict[str, float] = {
            "mlm_loss": loss,
            "mlm_accuracy": mlm_right / max(masked, 1),
            "mlm_perplexity": math.exp(min(loss, 700.0)),
        }
        if labelled and self.nsp:
            result |= {"nsp_loss": nsp / labelled, "nsp_accuracy": nsp_right / labelled}
        result |= {"rows": int(rows), "tokens": int(tokens), "masked": int(masked)}
        if self.unigram is not None:
            result["unigram_loss"] = guess / max(masked, 1)
        return result

    def _unigram_sum(self, micro: MicroBatch) -> float:
        if self.unigram is None:
            return 0.0
        return float(-self.unigram[micro.masked_labels[: micro.masked].numpy()].sum())


def unigram(train_shards: Shards) -> np.ndarray:
    """Log probabilities of the tokens of the training rows, float64 [vocab_size]: the guess of a
    model that sees no context. Special tokens are left out, as they are never predicted ([UNK]
    is); every other token counts once more than it was seen. Of a large set every n-th row is read,
    200,000 to 400,000 of them.
    """
    step = max(1, train_shards.num_rows // _UNIGRAM_ROWS)
    ids = np.arange(0, train_shards.num_rows, step)
    counts = np.zeros(train_shards.vocab_size, np.int64)
    for first in range(0, len(ids), 8192):
        tokens = train_shards.rows(ids[first : first + 8192]).tokens
        counts += np.bincount(tokens, minlength=len(counts))
    counts += 1
    special = [i for name, i in train_shards.special_ids.items() if name != "unk"]
    counts[special] = 0
    with np.errstate(divide="ignore"):
        return np.log(counts / counts.sum())
