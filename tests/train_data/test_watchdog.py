"""A dead or hung rank ends the job, and the message names that rank and not its victims."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from configs.errors import DIVERGED_EXIT, LOST_RANK_EXIT
from pretrain import watchdog
from pretrain.watchdog import Watchdog
from tests import forked
from tests.train_data.watched_ranks import TIMEOUT_S, WORLD, rank_main

FAULTS = [("fine", -1), ("raise", 0), ("raise", 2), ("diverge", 1), ("linger", 0), ("kill", 0), ("kill", 1), ("hang", 1), ("suspend", -1)]  # fmt: skip


def begin(folder: Path, fault: str, bad: int) -> list[BaseProcess]:
    return [
        forked.start(rank_main, rank, folder, fault, bad, log=folder / f"{rank}.out")
        for rank in range(WORLD)
    ]


def end(folder: Path, ranks: list[BaseProcess]) -> tuple[list[int | None], str]:
    codes = forked.finish(ranks)
    return codes, "".join((folder / f"{rank}.out").read_text() for rank in range(WORLD))


def suspend(folder: Path, ranks: list[BaseProcess]) -> None:
    """One after the other, as the nodes of a job are, while some wait for the rest in a collective."""
    assert wait_for(lambda: all((folder / f"{rank}.there").exists() for rank in range(WORLD)))
    time.sleep(0.3)
    (folder / "stop").touch()
    for process in ranks:
        os.kill(process.pid, signal.SIGTSTP)
        time.sleep(0.3)


def go_on_after(seconds: float, processes: list[BaseProcess]) -> None:
    """Lets processes that were stopped go on."""
    state = lambda p: Path(f"/proc/{p.pid}/stat").read_text().rsplit(") ", 1)[1][0]  # noqa: E731
    assert wait_for(lambda: all(state(p) == "T" for p in processes))
    time.sleep(seconds)
    for p in processes:
        os.kill(p.pid, signal.SIGCONT)


@pytest.fixture(scope="module")
def outcome(tmp_path_factory) -> Callable[[str, int], tuple[list[int | None], str, Path]]:
    """(exit codes, what the ranks said, stacks) of a job; all run at once, since they mostly wait."""
    folders = {fault: tmp_path_factory.mktemp("job") for fault in FAULTS}
    jobs = {fault: begin(folder, *fault) for fault, folder in folders.items()}
    suspend(folders["suspend", -1], jobs["suspend", -1])
    go_on_after(TIMEOUT_S + 2, jobs["suspend", -1])
    done = {
        fault: (*end(folders[fault], job), folders[fault] / "stacks") for fault, job in jobs.items()
    }
    return lambda *fault: done[fault]


def test_an_orderly_end_is_no_death(outcome) -> None:
    codes, err, stacks = outcome("fine", -1)
    assert codes == [0, 0, 0] and "error" not in err and not stacks.exists()


@pytest.mark.parametrize("bad", [0, 2])
def test_an_exception_on_one_rank_ends_all_with_its_error(outcome, bad) -> None:
    codes, err, _ = outcome("raise", bad)
    assert all(codes)
    assert f"error: rank {bad} " in err and "failed in data" in err
    assert "ValueError: row 17 is broken" in err
    assert not [r for r in range(3) if r != bad and f"error: rank {r} " in err]


def test_a_rank_that_the_guard_stops_ends_all_with_the_guards_exit_code(outcome) -> None:
    codes, err, stacks = outcome("diverge", 1)
    assert set(codes) == {DIVERGED_EXIT}
    assert "loss nan" in err and "Traceback" not in err and not stacks.exists()


def test_ranks_that_left_early_are_not_taken_for_dead(outcome) -> None:
    codes, err, _ = outcome("linger", 0)
    assert codes == [0, 0, 0] and "error" not in err


def test_ranks_that_were_suspended_go_on(outcome) -> None:
    codes, err, stacks = outcome("suspend", -1)
    assert codes == [0, 0, 0] and not err and not stacks.exists()


def test_a_process_that_was_suspended_goes_on_and_is_watched(tmp_path) -> None:
    """Its timer had run out: it ended with exit code 1 as soon as it went on."""
    process = forked.start(stop_and_hang, tmp_path, log=tmp_path / "out")
    go_on_after(4.0, [process])
    assert forked.finish([process]) == [LOST_RANK_EXIT], (tmp_path / "out").read_text()
    assert "hangs in forward" in (tmp_path / "out").read_text()


def stop_and_hang(folder: Path) -> None:
    dog = Watchdog(folder, 3.0, poll_s=0.1)
    dog.beat("data")
    dog.running()
    os.kill(os.getpid(), signal.SIGTSTP)
    for _ in range(10):  # no longer than it may be silent
        time.sleep(0.1)
    dog.beat("forward")
    time.sleep(60)


@pytest.mark.parametrize("bad", [0, 1])
def test_a_killed_rank_ends_all(outcome, bad) -> None:
    codes, err, _ = outcome("kill", bad)
    assert codes[bad] == -9 and all(codes)
    if bad:
        assert f"error: rank {bad} " in err and "no sign of life" in err
    else:
        assert "rank 0 is gone" in err


def test_a_hung_rank_is_named_with_its_stack(outcome) -> None:
    codes, err, stacks = outcome("hang", 1)
    assert codes == [LOST_RANK_EXIT] * 3
    assert "error: rank 1 " in err and "hangs in data" in err
    assert "error: rank 0 " not in err and "error: rank 2 " not in err
    assert "lost_in_a_loop" in err
    assert "lost_in_a_loop" in (stacks / "rank-1.txt").read_text()
    assert "rank_main" in (stacks / "rank-0.txt").read_text()


@pytest.mark.slow
def test_a_rank_stuck_in_c_code_is_named_too(tmp_path) -> None:
    codes, err = end(tmp_path, begin(tmp_path, "gil", 1))
    assert all(codes)
    assert "error: rank 1 " in err and "go_wrong" in err


@pytest.fixture
def left():
    return []


@pytest.fixture
def clock(monkeypatch):
    """What the watchdog takes for the time, moved by hand: a busy machine is not taken for a hang."""
    clock = SimpleNamespace(now=1000.0, sleep=time.sleep)
    clock.monotonic = lambda: clock.now
    monkeypatch.setattr(watchdog, "time", clock)
    monkeypatch.setattr(watchdog.faulthandler, "dump_traceback_later", lambda *_, **__: None)
    return clock


def watch(folder, left, timeout_s=0.8) -> Watchdog:
    return Watchdog(folder, timeout_s, poll_s=0.02, leave=left.append)


def wait_for(condition, seconds=60.0) -> bool:
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.01)
    return bool(condition())


def pass_by(dog: Watchdog, clock, seconds: float) -> None:
    """Time in which the watchdog has looked."""
    clock.now += seconds
    seen = dog._ticks
    assert wait_for(lambda: dog._ticks > seen + 1 or not dog._thread.is_alive())


def test_a_silent_rank_is_called_dead_also_where_the_patience_is_short(
    tmp_path, left, clock, capfd
) -> None:
    """With 8 s of it a killed rank was said to hang "since 0 s"."""
    store = torch.distributed.HashStore()
    dog = Watchdog(tmp_path, 3.0, rank=0, world=2, store=store, poll_s=0.2, leave=left.append)
    sign = dog._sign() | {"name": "rank 1 (there)", "what": "forward", "dead": 1.2}
    store.set("rank/1", json.dumps(sign))
    dog.running()
    pass_by(dog, clock, 0.0)
    assert not left
    pass_by(dog, clock, 1.5)
    assert wait_for(lambda: left)
    assert "rank 1 (there) gave no sign of life for" in capfd.readouterr().err


def test_one_process_watches_itself(tmp_path, left, clock, capfd) -> None:
    dog = watch(tmp_path, left)
    dog.beat("forward")
    dog.running()
    pass_by(dog, clock, 0.9)
    assert wait_for(lambda: left)
    assert left == [LOST_RANK_EXIT] and "hangs in forward" in capfd.readouterr().err
    dog.close()


def test_silence_is_allowed_before_the_first_update_and_where_patience_is_asked(
    tmp_path, left, clock
):
    dog = watch(tmp_path, left)
    pass_by(dog, clock, 1000)  # building and compiling
    dog.running()
    with dog.patience(60):
        pass_by(dog, clock, 59)  # evaluating
    dog.beat("data")
    pass_by(dog, clock, 0.5)
    assert not left
    pass_by(dog, clock, 0.5)
    assert wait_for(lambda: left)
    dog.close()


def test_a_machine_that_is_slow_in_every_step_is_not_hung(tmp_path, left, clock) -> None:
    dog = watch(tmp_path, left, timeout_s=2.0)
    dog.running()
    for _ in range(3):  # the limit follows what is usual here
        pass_by(dog, clock, 1.0)
        dog.beat("forward")
    pass_by(dog, clock, 1.9)
    assert not left
    pass_by(dog, clock, 0.2)
    assert wait_for(lambda: left)
    dog.close()


def test_a_process_that_catches_its_error_is_left_alone(tmp_path) -> None:
    """A notebook, or a script that tries the next recipe: it was ended a minute later."""
    process = forked.start(catch_and_go_on, tmp_path, log=tmp_path / "out")
    assert forked.finish([process]) == [0], (tmp_path / "out").read_text()
    assert "error" not in (tmp_path / "out").read_text()


def test_a_host_that_hears_of_its_signals_itself_goes_on_doing_so(tmp_path) -> None:
    """As a notebook's event loop does."""
    read, write = os.pipe()
    os.set_blocking(write, False)
    before = signal.set_wakeup_fd(write)
    try:
        dog = Watchdog(tmp_path, 30.0)
        dog.close()
        assert signal.set_wakeup_fd(before) == write
    finally:
        signal.set_wakeup_fd(before)
        os.close(read)
        os.close(write)


def catch_and_go_on(folder: Path) -> None:
    dog = Watchdog(folder, 1.0, poll_s=0.1)
    dog.running()
    try:
        raise ValueError("this recipe does not work")
    except ValueError as error:
        dog.fail(error)
    time.sleep(2.5)  # longer than a watchdog still at work would let it be silent


def test_zero_turns_it_off(tmp_path, left) -> None:
    dog = Watchdog(tmp_path, 0.0, leave=left.append)
    dog.running()
    dog.beat("data")
    dog.fail(ValueError())
    dog.close()
    assert not left
