"""Phases with a masking rate of their own (phases.N.mask_probability)."""

from __future__ import annotations

import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from configs.errors import UserError
from configs.masking import check_rate
from configs.schema import MaskingConfig, PhaseConfig
from pretrain.objectives.masking import Masker, mask_counts
from pretrain.starting import _evaluator
from pretrain.trainer import batches_of
from tests.synthetic import make_shards
from tests.trainer.runs import evaluations, fresh, losses, output, plan, train

# Falls inside the second set as well, and is the usual one for a phase.
RATES = (
    "phases=[{shards: len32, global_batch: 24, steps: 3, mask_probability: 0.16},"
    " {shards: len48, global_batch: 16, steps: 3, mask_probability: 0.12},"
    " {shards: len48, global_batch: 16, steps: 2, mask_probability: 0.05},"
    " {shards: len48, global_batch: 16, steps: 2}]"
)
ONE = SimpleNamespace(dp_rank=0, dp=1, dp_group=None)


def test_the_batches_of_a_phase_are_masked_at_its_rate(run: Path) -> None:
    found = plan(run, RATES)
    for index, rate in enumerate((0.16, 0.12, 0.05, 0.15)):
        shards = found.shards[found.recipe.phases[index].shards]
        here: Any = SimpleNamespace(plan=found, groups=ONE, device="cpu")
        batches = batches_of(here, index, 2)
        for step in range(2):
            batch = batches.update(step)
            lengths = shards.lengths[batches.row_ids(step)[1]]
            wanted = int(mask_counts(lengths, rate, shards.mask_cap).sum())
            assert batch.masked_total == sum(m.masked for m in batch.micros) == wanted
            assert wanted / batch.tokens_total == pytest.approx(rate, abs=0.02)
        batches.close()


def test_held_out_rows_are_masked_alike_in_all_phases(run: Path) -> None:
    """Or the losses of two phases could not be compared."""

    def masked(*overrides: str) -> list[list[int]]:
        evaluator: Any = _evaluator(plan(run, *overrides), ONE, "cpu")  # type: ignore[arg-type]
        return [m.masked_positions.tolist() for m in evaluator.batches()]

    assert masked(RATES) == masked()
    assert masked(RATES, "masking.probability=0.05") != masked()


def test_a_kill_inside_a_phase_changes_nothing(run: Path, base: Path, tmp_path: Path) -> None:
    other = fresh(base, tmp_path / "other")
    options = (RATES, "checkpoint.every=2")
    assert train(run, *options) == [0], output(run)
    assert train(other, *options, accident="update:6") == [-signal.SIGKILL], output(other)
    assert train(other, *options) == [0], output(other)
    for key in ("loss", "mlm_loss", "mlm_accuracy", "grad_norm", "lr"):
        assert losses(other, key) == losses(run, key), key
    assert evaluations(other) == evaluations(run)


def test_a_rate_of_rows_that_are_masked_already_is_refused(run: Path, tmp_path: Path) -> None:
    """Also where only the set knows."""
    for length in (32, 48):
        folder = tmp_path / "static" / f"len{length}"
        make_shards(folder, rows=90, max_length=length, vocab_size=203, static_masks=True)
    where = f"train.shards_dir={tmp_path / 'static'}"
    plan(run, where)
    with pytest.raises(UserError, match=r"phases\.1\.mask_probability=0\.1, .*len48 were masked"):
        plan(run, where, "phases.1.mask_probability=0.1")


@given(st.integers(1, 999), st.integers(8, 600), st.integers(1, 600))
def test_a_rate_is_refused_where_full_rows_would_get_fewer_masks(
    permille: int, length: int, cap: int
) -> None:
    phase = PhaseConfig(mask_probability=permille / 1000)
    shards: Any = SimpleNamespace(
        mask_cap=cap, max_length=length, special_ids={"mask": 4, "unk": 1}, vocab_size=9,
        word_start=np.ones(9, np.bool_),
    )  # fmt: skip
    told = Masker(MaskingConfig(probability=permille / 1000), shards, 0, 0).warning()
    if told:
        with pytest.raises(UserError, match=r"phases\.3\.mask_probability") as refused:
            check_rate(3, phase, length, cap, static=False)
        assert "shards.len128.mask_cap=" in refused.value.remedy
    else:
        check_rate(3, phase, length, cap, static=False)
