"""Single segments among the pairs of a training: what the label of a pair counts for, and that
layouts and resumption change nothing."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path

import numpy as np
import pytest

from configs.log import read_log
from data_prep.shards import open_shards
from tests.synthetic import make_shards
from tests.trainer.runs import evaluations, fresh, losses, make_run, output, train

ROWS = 120  # an update is an epoch, so that each has the same pairs
SETTINGS = (
    "shards.len32.single_prob=0.6",
    f"phases=[{{shards: len32, global_batch: {ROWS}, steps: 6, schedule: {{lr: 0.01, warmup: 2}}}}]",
)
KEYS = ("loss", "mlm_loss", "nsp_loss", "nsp_accuracy", "grad_norm")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = make_run(tmp_path_factory.mktemp("single") / "run")
    folder = run / "shards" / "len32"
    shutil.rmtree(folder)
    make_shards(folder, rows=ROWS, max_length=32, vocab_size=203, single=0.6)
    assert train(run, *SETTINGS) == [0], output(run)
    return run


def test_the_loss_is_that_of_pairs_at_their_share_of_the_rows(whole: Path) -> None:
    rows = open_shards(whole / "shards" / "len32").rows(np.arange(ROWS))
    share = float((rows.segment_b > 0).mean())
    assert 0.3 < share < 0.5
    loss, mlm, nsp = (losses(whole, key) for key in KEYS[:3])
    assert loss == pytest.approx({k: mlm[k] + share * nsp[k] for k in loss}, rel=1e-6)
    assert nsp[1] == pytest.approx(np.log(2), abs=0.05)  # a head that knows nothing yet
    ones = losses(whole, "nsp_accuracy")[1] * share * ROWS
    assert ones == pytest.approx(round(ones), abs=1e-3)


def test_the_weight_of_the_label_is_in_loss_and_gradient(whole: Path, tmp_path: Path) -> None:
    """The squared norm of the first gradient is quadratic in the weight, the loss linear."""
    squares, sums = {1.0: losses(whole, "grad_norm")[1] ** 2}, {1.0: losses(whole, "loss")[1]}
    for weight in (0.5, 4.0, 9.0):
        run = fresh(whole, tmp_path / f"run-{weight}")
        asked = (f"train.nsp_weight={weight}", "train.stop_at=1")
        assert train(run, *SETTINGS, *asked) == [0], output(run)
        squares[weight], sums[weight] = losses(run, "grad_norm")[1] ** 2, losses(run, "loss")[1]
        assert losses(run, "nsp_loss")[1] == losses(whole, "nsp_loss")[1]
    for values, degree in ((squares, 2), (sums, 1)):
        known = sorted(values)[: degree + 1]
        curve = np.polyfit(known, [values[w] for w in known], degree)
        assert values[9.0] == pytest.approx(float(np.polyval(curve, 9.0)), rel=1e-3)
    assert squares[9.0] > 1.1 * squares[1.0]


def test_a_kill_changes_nothing(whole: Path, tmp_path: Path) -> None:
    run = fresh(whole, tmp_path / "run")
    every = (*SETTINGS, "checkpoint.every=2")
    assert train(run, *every, accident="update:4") == [-signal.SIGKILL], output(run)
    assert train(run, *every) == [0], output(run)
    for key in KEYS:
        assert losses(run, key) == losses(whole, key), key
    assert evaluations(run) == evaluations(whole)


@pytest.mark.parametrize("layout", ["parallel.tp=1", "parallel.tp=2"])
def test_two_processes_log_the_same(whole: Path, tmp_path: Path, layout: str) -> None:
    run = fresh(whole, tmp_path / "run")
    assert train(run, *SETTINGS, layout, size=2) == [0, 0], output(run)
    for key in KEYS:
        assert losses(run, key) == pytest.approx(losses(whole, key), rel=1e-3), key


def test_without_a_head_no_score_of_it_is_logged(whole: Path, tmp_path: Path) -> None:
    run = fresh(whole, tmp_path / "run")
    assert train(run, *SETTINGS, "model.nsp_head=false", "train.stop_at=1") == [0], output(run)
    for folder, there in ((run, False), (whole, True)):
        records = [r for r in read_log(folder / "train" / "log.jsonl") if "mlm_loss" in r]
        assert {r["kind"] for r in records} == {"train", "eval"}
        assert {key in r for r in records for key in ("nsp_loss", "nsp_accuracy")} == {there}
