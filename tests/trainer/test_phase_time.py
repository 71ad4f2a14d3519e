"""Phases that end at a share of train.max_minutes (phases.N.until); the clock is one of updates."""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from configs.errors import UserError
from configs.loading import load_recipe
from configs.log import read_log
from pretrain.checkpoint.folder import INDEX, checkpoints, folder_of, read_meta, write_json
from pretrain.data.order import RowOrder
from pretrain.optim.budget import TimeBudget
from pretrain.trainer import batches_of
from tests.trainer.runs import evaluations, fresh, losses, output, plan, train

ONE = SimpleNamespace(dp_rank=0, dp=1, dp_group=None)
CLOCK = "clock:1"  # after update k all ranks know of k - 1 seconds
SWITCHES = [10, 19]  # at 9 and at 18 of 30 seconds
END = 25


def options(last: int = END - SWITCHES[-1], **more: str) -> list[str]:
    """Two phases on one set, which the time ends, and one of `last` steps."""
    schedule = "schedule: {kind: linear, lr: 0.01, warmup: 0.2}"
    phases = (
        f"phases=[{{shards: len32, global_batch: 24, steps: 40, until: 0.3, {schedule}}},"
        f" {{shards: len32, global_batch: 16, steps: 40, until: 0.6, mask_probability: 0.1, {schedule}}},"
        f" {{shards: len48, global_batch: 16, steps: {last}, {schedule}}}]"
    )
    keys = {"train.max_minutes": "0.5", "checkpoint.every": "0", "checkpoint.keep": "99", **more}
    return [phases, *(f"{key}={value}" for key, value in keys.items())]


def saved(run: Path) -> list[int]:
    return [step for step, _ in checkpoints(run / "train")]


@pytest.fixture(scope="module")
def whole(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A training without a stop, saved after each update."""
    run = fresh(base, tmp_path_factory.mktemp("whole") / "run")
    every = options(**{"checkpoint.every": "1"})
    assert train(run, *every, accident=CLOCK) == [0], output(run)
    return run


def go_on_from(whole: Path, step: int, run: Path) -> None:
    """Makes `run` a training that was killed after it had saved this update."""
    shutil.copytree(folder_of(whole / "train", step), folder_of(run / "train", step))
    shutil.copy(whole / "train" / "log.jsonl", run / "train" / "log.jsonl")


def test_phases_end_at_their_shares(run: Path, whole: Path) -> None:
    """And the run after the last one's steps, with a held-out score and a checkpoint."""
    assert train(run, *options(), accident=CLOCK) == [0], output(run)
    assert saved(run) == [*SWITCHES, END]
    assert list(evaluations(run)) == [0, END]
    assert f"train: {END}/{END} updates (100%), " in output(run)
    assert f"checkpoint after {END} of {END} updates" in output(run)
    assert losses(run) == losses(whole)
    told = [r for r in read_log(run / "train/log.jsonl") if "ends by time" in r.get("text", "")]
    assert [r["step"] for r in told] == SWITCHES
    rows = {step: epoch * 150 for step, epoch in losses(run, "epoch").items()}
    assert [rows[n] for n in (10, 11, 19)] == pytest.approx([240, 256, 384])  # read on
    assert losses(run, "epoch")[20] * 90 == pytest.approx(16)  # of the other set
    assert train(run, *options(), accident=CLOCK) == [0]
    assert f"nothing to do: {END} of {END} updates are done" in output(run)


def test_the_last_update_is_logged_where_an_early_end_has_moved_it(run: Path) -> None:
    rare = options(**{"train.log_every": "100"})
    assert train(run, *rare, accident=CLOCK) == [0], output(run)
    assert list(losses(run)) == [1, END]


@pytest.mark.parametrize("step", [4, 9, 10, 11, 19, 22])
def test_a_resumed_training_is_the_whole_one(whole: Path, run: Path, step: int) -> None:
    """From a switch (10, 19), from the update before it, whose time is up already but which did not
    know, and from the middle of each phase."""
    go_on_from(whole, step, run)
    assert train(run, *options(), accident=CLOCK) == [0], output(run)
    assert f"goes on from update {step}" in output(run)
    for key in ("loss", "mlm_loss", "grad_norm", "lr", "epoch"):
        assert losses(run, key) == losses(whole, key), key
    assert evaluations(run) == evaluations(whole)
    assert saved(run) == [step, *(n for n in (*SWITCHES, END) if n > step)]


def test_the_time_ends_the_last_phase(run: Path) -> None:
    """Before its steps, as without shares; a stop inside a phase ends no phase."""
    long = options(last=40)
    assert train(run, *long, "train.stop_at=12", accident=CLOCK) == [0], output(run)
    assert saved(run) == [10, 12]
    assert "train: 12/12 updates (100%), " in output(run)
    assert "checkpoint after 12 updates (37% of 0.5 min): " in output(run)
    assert plan(run, *long).phase_ends == [10]
    assert train(run, *long, accident=CLOCK) == [0], output(run)
    assert saved(run) == [10, 12, 19, 31]
    assert re.search(r"train: 31 updates \(100% of 0.5 min\), .* updates/s, ETA 0:00 ", output(run))
    assert "checkpoint after 31 updates (100% of 0.5 min): " in output(run)
    assert losses(run, "spent_s") == {step: step - 1 for step in range(1, 32)}
    assert list(evaluations(run)) == [0, 12, 31]
    found = plan(run, *long)
    assert (found.out_of_time, found.ends, found.total) == (True, [10, 19, 59], 59)
    assert train(run, *long, accident=CLOCK) == [0]
    assert "nothing to do: train.max_minutes=0.5 are used up, after 31 updates; " in output(run)


def test_the_last_update_is_logged_whatever_ends_the_run(run: Path) -> None:
    assert train(run, *options(last=40), "train.log_every=7", accident=CLOCK) == [0], output(run)
    assert list(losses(run)) == [1, 7, 14, 21, 28, 31]
    assert losses(run, "spent_s")[31] == 30.0


def test_all_ranks_switch_at_the_same_update(run: Path) -> None:
    """The clock of the first one counts: that of the other is twice as fast."""
    assert train(run, *options(), size=2, accident=CLOCK) == [0, 0], output(run) + output(run, 1)
    assert saved(run) == [*SWITCHES, END]


def test_a_checkpoint_of_before_goes_on_by_steps(base: Path, run: Path, tmp_path: Path) -> None:
    short = ("phases.0.steps=4", "phases.1.steps=4", "checkpoint.every=1", "checkpoint.keep=99")
    assert train(run, *short) == [0], output(run)
    for step in (3, 4, 6):
        old = fresh(base, tmp_path / f"old-{step}")
        go_on_from(run, step, old)
        folder = folder_of(old / "train", step)
        meta = read_meta(folder)
        for key in ("phase_ends", "agreed_s"):
            del meta["state"][key]
        write_json(folder / INDEX, meta)
        assert train(old, *short) == [0], output(old)
        assert losses(old) == losses(run)


def test_rows_of_a_set_are_read_on_where_an_early_end_has_left_them(run: Path) -> None:
    found = plan(run, *options())
    found.phase_ends = SWITCHES[:1]
    here: Any = SimpleNamespace(plan=found, groups=ONE, device="cpu")
    read = []
    for index, updates in enumerate((SWITCHES[0], SWITCHES[1] - SWITCHES[0])):
        batches = batches_of(here, index, updates)
        read += [batches.row_ids(step) for step in range(updates)]
        batches.close()
    epochs, rows = (np.concatenate(part) for part in zip(*read))
    every = RowOrder(found.shards["len32"].num_rows, found.recipe.seed).rows(0, len(rows))
    assert np.array_equal(epochs, every[0]) and np.array_equal(rows, every[1])


@pytest.mark.parametrize(
    ("state", "phases", "ends"),
    [
        ({}, 3, [40, 80, 86]),
        ({"phase_ends": [10]}, 3, [10, 50, 56]),
        ({"phase_ends": [10, 19]}, 3, [10, 19, 25]),
        ({"phase_ends": [10, 19]}, 2, [10, 50]),  # the third has been taken out of the recipe
        ({"phase_ends": [10, 19]}, 1, [40]),
    ],
)
def test_where_phases_end(
    run: Path, state: Mapping[str, Any], phases: int, ends: list[int]
) -> None:
    found = plan(run, *options())
    del found.recipe.phases[phases:]
    found.goes_on_from(state)
    assert found.ends == ends and found.total == found.end == ends[-1]
    found.recipe.train.stop_at = 12
    assert found.end == 12


def test_shares_rise_from_phase_to_phase(run: Path) -> None:
    for first, second in ((0.6, 0.6), (0.7, 0.6)):
        shares = (f"phases.0.until={first}", f"phases.1.until={second}")
        with pytest.raises(
            UserError, match=rf"phases\.1\.until=0\.6 is .* phases\.0\.until={first}"
        ):
            load_recipe(run / "recipe.yaml", [*options(), *shares])
    load_recipe(run / "recipe.yaml", [*options(), "phases.0.until=0"])
    load_recipe(run / "recipe.yaml", [*options(), "phases.1.until=0"])


def test_a_share_of_the_time_is_reached_once_it_is_spent() -> None:
    budget = TimeBudget(1, 40.0, 36.0)
    assert budget.reached(0.6) and not budget.reached(0.61) and not budget.over
    assert not budget.reached(0.0), "no share is set"
    assert not TimeBudget(0, 40.0).reached(0.6), "no limit"
