"""A dead or hung rank ends the job, and the message names that rank and not its victims."""

from __future__ import annotations

import json
import subprocess
import sys
import time

import pytest
import torch

from configs.errors import DIVERGED_EXIT, LOST_RANK_EXIT
from pretrain.watchdog import Watchdog


def run(repo, folder, fault: str, bad: int) -> tuple[list[int], str]:
    """(exit codes of the 3 ranks, standard error); a job that stays is a failure."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.train_data.watched_ranks", str(folder), fault, str(bad)],
        capture_output=True, text=True, timeout=60, cwd=repo,
    )  # fmt: skip
    return json.loads(done.stdout.splitlines()[-1]), done.stderr


def test_an_orderly_end_is_no_death(repo, tmp_path) -> None:
    codes, err = run(repo, tmp_path, "fine", -1)
    assert codes == [0, 0, 0] and "error" not in err and not (tmp_path / "stacks").exists()


@pytest.mark.parametrize("bad", [0, 2])
def test_an_exception_on_one_rank_ends_all_with_its_error(repo, tmp_path, bad) -> None:
    codes, err = run(repo, tmp_path, "raise", bad)
    assert all(codes)
    assert f"error: rank {bad} " in err and "failed in data" in err
    assert "ValueError: row 17 is broken" in err
    assert not [r for r in range(3) if r != bad and f"error: rank {r} " in err]


def test_a_rank_that_the_guard_stops_ends_all_with_the_guards_exit_code(repo, tmp_path) -> None:
    codes, err = run(repo, tmp_path, "diverge", 1)
    assert set(codes) == {DIVERGED_EXIT}
    assert "loss nan" in err and "Traceback" not in err and not (tmp_path / "stacks").exists()


def test_ranks_that_left_early_are_not_taken_for_dead(repo, tmp_path) -> None:
    codes, err = run(repo, tmp_path, "linger", 0)
    assert codes == [0, 0, 0] and "error" not in err


@pytest.mark.parametrize("bad", [0, 1])
def test_a_killed_rank_ends_all(repo, tmp_path, bad) -> None:
    codes, err = run(repo, tmp_path, "kill", bad)
    assert codes[bad] == -9 and all(codes)
    if bad:
        assert f"error: rank {bad} " in err and "no sign of life" in err
    else:
        assert "rank 0 is gone" in err


def test_a_hung_rank_is_named_with_its_stack(repo, tmp_path) -> None:
    codes, err = run(repo, tmp_path, "hang", 1)
    assert codes == [LOST_RANK_EXIT] * 3
    assert "error: rank 1 " in err and "hangs in data" in err
    assert "error: rank 0 " not in err and "error: rank 2 " not in err
    assert "lost_in_a_loop" in err
    assert "lost_in_a_loop" in (tmp_path / "stacks" / "rank-1.txt").read_text()
    assert "rank_main" in (tmp_path / "stacks" / "rank-0.txt").read_text()


@pytest.mark.slow
def test_a_rank_stuck_in_c_code_is_named_too(repo, tmp_path) -> None:
    codes, err = run(repo, tmp_path, "gil", 1)
    assert all(codes)
    assert "error: rank 1 " in err and "go_wrong" in err


@pytest.fixture
def left():
    return []


def watch(folder, left, timeout_s=0.8) -> Watchdog:
    return Watchdog(folder, timeout_s, poll_s=0.05, leave=left.append)


def wait_for(condition, seconds=10.0) -> bool:
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.02)
    return bool(condition())


def test_a_silent_rank_is_called_dead_also_where_the_patience_is_short(
    tmp_path, left, capfd
) -> None:
    """With 8 s of it a killed rank was said to hang "since 0 s"."""
    store = torch.distributed.HashStore()
    dog = Watchdog(tmp_path, 3.0, rank=0, world=2, store=store, poll_s=0.5, leave=left.append)
    sign = dog._sign() | {"name": "rank 1 (there)", "what": "forward", "dead": 1.2}
    store.set("rank/1", json.dumps(sign))
    dog.running()
    assert wait_for(lambda: left)
    assert "rank 1 (there) gave no sign of life for" in capfd.readouterr().err


def test_one_process_watches_itself(tmp_path, left, capfd) -> None:
    dog = watch(tmp_path, left)
    dog.beat("forward")
    dog.running()
    assert wait_for(lambda: left)
    assert left == [LOST_RANK_EXIT] and "hangs in forward" in capfd.readouterr().err
    dog.close()


def test_silence_is_allowed_before_the_first_update_and_where_patience_is_asked(tmp_path, left):
    dog = watch(tmp_path, left)
    time.sleep(1.2)  # building and compiling
    dog.running()
    with dog.patience(60):
        time.sleep(1.2)  # evaluating
    dog.beat("data")
    assert not left
    dog.close()


def test_a_machine_that_is_slow_in_every_step_is_not_hung(tmp_path, left) -> None:
    dog = watch(tmp_path, left, timeout_s=2.0)
    dog.running()
    for _ in range(3):  # the limit follows what is usual here
        time.sleep(1.0)
        dog.beat("forward")
    time.sleep(1.8)
    assert not left
    dog.close()


def test_zero_turns_it_off(tmp_path, left) -> None:
    dog = Watchdog(tmp_path, 0.0, leave=left.append)
    dog.running()
    dog.beat("data")
    dog.fail(ValueError())
    dog.close()
    assert not left
