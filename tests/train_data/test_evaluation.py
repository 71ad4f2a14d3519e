"""Held-out scoring: exact averages, each row once, the same for any number of ranks."""

from __future__ import annotations

import math

import numpy as np
import pytest

from configs.schema import MaskingConfig
from data_prep.shards import held_out, open_shards
from pretrain.evaluation import Evaluator, unigram
from tests.synthetic import make_shards
from tests.train_data.hashed_model import HashedModel
from tests.trainer.launch import world


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_shards(
        tmp_path_factory.mktemp("e") / "s", rows=500, vocab_size=300, held_out_rows=203
    )


def collect(evaluator: Evaluator) -> tuple[list, np.ndarray, int]:
    """(rows as token tuples, labels, micro-batches) of one rank."""
    rows, labels, count = [], [], 0
    for m in evaluator.batches():
        cu = m.cu_seqlens.tolist()
        rows += [tuple(m.input_ids[cu[k] : cu[k + 1]].tolist()) for k in range(m.rows)]
        labels.append(m.masked_labels[: m.masked].numpy())
        count += 1
    return rows, np.concatenate(labels), count


@pytest.mark.parametrize(("rows", "dp"), [(0, 1), (0, 2), (0, 7), (50, 3), (2, 4)])
def test_b27_every_held_out_row_once_and_equal_steps_on_all_ranks(folder, rows, dp) -> None:
    shards = held_out(folder)
    seen = [
        collect(
            Evaluator(shards, MaskingConfig(), rows, micro_batch_tokens=512, dp_rank=rank, dp=dp)
        )
        for rank in range(dp)
    ]
    alone = collect(Evaluator(shards, MaskingConfig(), rows, micro_batch_tokens=4096))
    assert sorted(row for part in seen for row in part[0]) == sorted(alone[0])
    assert len(alone[0]) == (rows or 203)
    assert sorted(np.concatenate([part[1] for part in seen])) == sorted(alone[1])
    assert len({part[2] for part in seen}) == 1


def test_averages_are_per_token_and_per_row(folder) -> None:
    model = HashedModel()
    shards = held_out(folder)
    results = [
        Evaluator(shards, MaskingConfig(), micro_batch_tokens=tokens).run(model)
        for tokens in (256, 1024, 65536)
    ]
    first = results[0]
    for other in results[1:]:
        assert other == pytest.approx(first, rel=1e-6)
    _, labels, _ = collect(Evaluator(shards, MaskingConfig()))
    assert first["mlm_loss"] == pytest.approx(np.mean(labels % 7), rel=1e-6)
    assert first["mlm_accuracy"] == pytest.approx(np.mean(labels % 2 == 0), rel=1e-6)
    assert first["mlm_perplexity"] == pytest.approx(math.exp(first["mlm_loss"]))
    assert first["rows"] == 203 and first["masked"] == len(labels)
    assert first["tokens"] == shards.lengths.sum()
    assert model.training and model.modes == {False}


@pytest.mark.parametrize("single", [0.0, 0.5, 1.0])
def test_next_sentence_scores_are_of_pairs(tmp_path, single) -> None:
    path = make_shards(tmp_path / "s", rows=20, vocab_size=90, held_out_rows=80, single=single)
    shards = held_out(path)
    rows = shards.rows(np.arange(80))
    labels = rows.next_sentence_label[rows.segment_b > 0]
    result = Evaluator(shards, MaskingConfig(), micro_batch_tokens=512).run(HashedModel())
    assert result["rows"] == 80 and (len(labels) == 80) == (single == 0)
    want = {"nsp_loss": labels.mean(), "nsp_accuracy": (labels == 0).mean()} if len(labels) else {}
    assert {k: v for k, v in result.items() if k.startswith("nsp")} == pytest.approx(want)
    headless = Evaluator(shards, MaskingConfig(), micro_batch_tokens=512, nsp=False)
    assert headless.run(HashedModel()) == {k: v for k, v in result.items() if k not in want}


def test_masks_are_fixed_whatever_the_run(folder) -> None:
    a, b = (collect(Evaluator(held_out(folder), MaskingConfig(), 64)) for _ in range(2))
    assert a[0] == b[0] and np.array_equal(a[1], b[1])


def test_unigram_loss_is_the_entropy_of_labels_under_training_counts(folder) -> None:
    train, shards = open_shards(folder), held_out(folder)
    tokens = train.rows(np.arange(train.num_rows)).tokens
    counts = np.bincount(tokens, minlength=300).astype(float) + 1
    counts[[0, 2, 3, 4]] = 0
    _, labels, _ = collect(Evaluator(shards, MaskingConfig()))
    want = -np.log(counts[labels] / counts.sum()).mean()
    result = Evaluator(shards, MaskingConfig(), unigram=unigram(train)).run(HashedModel())
    assert result["unigram_loss"] == pytest.approx(want)
    assert np.exp(unigram(train)).sum() == pytest.approx(1)


def test_two_processes_agree_with_one(folder) -> None:
    """Real ranks, each with its share of the rows."""
    alone = Evaluator(held_out(folder), MaskingConfig(), micro_batch_tokens=1024).run(HashedModel())
    first, second = world(2, "tests.train_data.hashed_model:score", folder)
    assert first == second
    assert first == pytest.approx(alone, rel=1e-6)
