"""Workers and ranks: the same bytes for any number of them, and a failure ends the whole job."""

from __future__ import annotations

import gzip
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from configs import UserError
from data_prep.arrays import is_whole
from data_prep.executor import (
    Executor,
    Processes,
    TaskFailed,
    check_world,
    deal,
    make_executor,
)
from data_prep.shards import open_shards
from tests.data_prep.corpus import command, recipe_file, run, tree, write_texts
from tests.data_prep.tasks import (
    Job,
    die_on_three,
    fail_on_three,
    fill_the_disk,
    refuse_three,
    square,
)

JOBS = [Job(n) for n in range(7)]


@pytest.fixture
def executor(request: pytest.FixtureRequest) -> Executor:
    return Executor() if request.param == "one" else Processes(2)


@pytest.mark.parametrize("workers", [1, 2, 5])
def test_results_come_in_the_order_of_the_items(workers: int) -> None:
    executor = Processes(workers)
    sizes = [1, 9, 2, 8, 3, 7, 4]
    assert executor.map(square, 100, JOBS, sizes, "squares") == [100 + n * n for n in range(7)]
    assert executor.map(square, 5, JOBS[:3], sizes[:3], "squares") == [5, 6, 9]


@pytest.mark.parametrize("executor", ["one", "two"], indirect=True)
def test_a_failing_task_names_its_file(executor: Executor) -> None:
    with pytest.raises(TaskFailed) as error:
        executor.map(fail_on_three, None, JOBS, [1] * 7, "jobs")
    assert "file-3.txt" in error.value.what and "ValueError: something odd" in error.value.what
    assert "fail_on_three" in error.value.what  # the trace


@pytest.mark.parametrize("executor", ["one", "two"], indirect=True)
def test_a_users_mistake_comes_without_a_trace(executor: Executor) -> None:
    with pytest.raises(UserError) as error:
        executor.map(refuse_three, None, JOBS, [1] * 7, "jobs")
    assert (error.value.what, error.value.remedy) == ("file-3.txt: not text", "give text")


@pytest.mark.parametrize("executor", ["one", "two"], indirect=True)
def test_a_full_disk_comes_without_a_trace(executor: Executor) -> None:
    with pytest.raises(UserError) as error:
        executor.map(fill_the_disk, None, JOBS, [1] * 7, "jobs")
    assert "the disk is full" in error.value.remedy and "Traceback" not in error.value.what


def test_a_killed_worker_is_named() -> None:
    with pytest.raises(TaskFailed, match=r"file-3\.txt.*was killed by signal 9"):
        Processes(2).map(die_on_three, None, JOBS, [1] * 7, "jobs")


@given(st.lists(st.integers(0, 1000), max_size=60), st.integers(1, 9))
def test_deal_gives_every_item_to_one_worker(sizes: list[int], workers: int) -> None:
    hands = deal(sizes, workers)
    assert sorted(i for hand in hands for i in hand) == list(range(len(sizes)))
    loads = [sum(max(sizes[i], 1) for i in hand) for hand in hands]
    assert max(loads) - min(loads) <= max([*sizes, 1])


def test_unknown_executors_are_refused() -> None:
    with pytest.raises(UserError, match="prep.executor='threads'"):
        make_executor("threads", 1)
    with pytest.raises(UserError, match="prep.workers=-1"):
        make_executor("processes", -1)
    assert make_executor("processes", 3).workers == 3


def test_processes_started_by_a_launcher_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "3")
    with pytest.raises(UserError, match="3 processes were started, but prep.executor=processes"):
        make_executor("processes", 1)
    with pytest.raises(UserError, match="MPI sees 1 rank, the launcher started 3"):
        check_world(1)
    check_world(3)
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "1")
    check_world(1)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recipe over 20 files, each a unit of its own, with a finished vocabulary."""
    folder = tmp_path_factory.mktemp("corpus")
    text = write_texts(folder / "text", files=20, sentences=120)
    body = "shards: {a: {max_length: 64, dupe_factor: 2}, b: {max_length: 128, objective: sop}}\n"
    return recipe_file(folder, text, body)


@pytest.fixture(scope="module")
def expected(corpus: Path, repo: Path) -> dict[str, str]:
    vocab(corpus, repo, "one")
    result = run(command(corpus, f"work_dir={corpus.parent}/one"), repo)
    assert result.returncode == 0, result.stderr
    return tree(corpus.parent / "one" / "shards")


def vocab(corpus: Path, repo: Path, name: str) -> Path:
    """A work_dir of its own with the vocabulary in it."""
    work = corpus.parent / name
    first = corpus.parent / "one"
    if name == "one":
        arguments = [sys.executable, "-m", "data_prep", "vocab", str(corpus), f"work_dir={work}"]
        result = run(arguments, repo)
        assert result.returncode == 0, result.stderr
    else:
        shutil.copytree(first / "vocab", work / "vocab")
    return work


@pytest.mark.parametrize("workers", [2, 3, 8])
def test_same_bytes_for_any_number_of_workers(
    corpus: Path, repo: Path, expected: dict[str, str], workers: int
) -> None:
    work = vocab(corpus, repo, f"workers-{workers}")
    result = run(command(corpus, f"work_dir={work}", f"prep.workers={workers}"), repo)
    assert result.returncode == 0, result.stderr
    assert tree(work / "shards") == expected


def kill_and_resume(corpus: Path, repo: Path, work: Path, moments: int, seed: int) -> int:
    """Kills the build's whole group `moments` times at random moments; a last run finishes.

    A build that ended before its kill is begun anew, so that every kill strikes a running one
    whatever the machine's speed. Returns how many struck.
    """
    draw = random.Random(seed)
    arguments = command(corpus, f"work_dir={work}", "prep.workers=2")
    struck, longest, fresh = 0, 4.0, True
    for _ in range(10 * moments):
        if struck == moments:
            break
        process = subprocess.Popen(
            arguments, cwd=repo, start_new_session=True,
            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
        )  # fmt: skip
        began = time.monotonic()
        deadline = began + draw.uniform(0.3, 1.0) * longest
        while process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.01)
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        elapsed = time.monotonic() - began
        _, errors = process.communicate()
        assert process.returncode in (0, -signal.SIGKILL), errors.decode()
        if process.returncode == 0:
            longest = min(longest, elapsed) if fresh else longest  # a whole build's time
            shutil.rmtree(work / "shards")
        struck += process.returncode != 0
        fresh = process.returncode == 0
    result = run(arguments, repo)
    assert result.returncode == 0, result.stderr
    return struck


def test_b21_killed_three_times(corpus: Path, repo: Path, expected: dict[str, str]) -> None:
    work = vocab(corpus, repo, "killed-3")
    assert kill_and_resume(corpus, repo, work, 3, seed=1) == 3
    assert tree(work / "shards") == expected


@pytest.mark.slow
def test_b21_killed_at_twenty_random_moments(
    corpus: Path, repo: Path, expected: dict[str, str]
) -> None:
    work = vocab(corpus, repo, "killed-20")
    assert kill_and_resume(corpus, repo, work, 20, seed=2) == 20
    assert tree(work / "shards") == expected


def test_b21_finished_units_are_untouched_after_a_kill(
    corpus: Path, repo: Path, expected: dict[str, str]
) -> None:
    """kill -9 after 7 finished units, then after 15: what was finished keeps its times."""
    work = vocab(corpus, repo, "counted")
    arguments = command(corpus, f"work_dir={work}", "prep.workers=2")
    times: dict[Path, int] = {}
    for wanted in (7, 15):
        process = subprocess.Popen(
            arguments, cwd=repo, start_new_session=True, stdout=subprocess.DEVNULL
        )
        while process.poll() is None and len(list(work.rglob("unit-*.arrays"))) < wanted:
            time.sleep(0.002)
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        now = {p: p.stat().st_mtime_ns for p in work.rglob("unit-*.arrays")}
        assert {p: now.get(p) for p in times} == times or process.returncode == 0
        times = now
    result = run(arguments, repo)
    assert result.returncode == 0, result.stderr
    assert tree(work / "shards") == expected


def test_workers_end_with_a_killed_parent(corpus: Path, repo: Path, tmp_path: Path) -> None:
    """kill -9 of the parent alone leaves no worker behind."""
    code = (
        "import os, sys, time\n"
        "from data_prep.executor import Processes\n"
        "from tests.data_prep.tasks import sleep_long\n"
        "Processes(2).map(sleep_long, sys.argv[1], [1, 2], [1, 1], 'sleep')\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], cwd=repo)
    deadline = time.monotonic() + 300
    while len(list(tmp_path.glob("*"))) < 2 and time.monotonic() < deadline:
        time.sleep(0.02)
    workers = [int(p.name) for p in tmp_path.glob("*")]
    assert len(workers) == 2
    process.kill()
    process.wait()
    deadline = time.monotonic() + 300
    while any(alive(pid) for pid in workers) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not any(alive(pid) for pid in workers)


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return False
    return state != "Z"


MPIRUN = ["mpirun", "--oversubscribe", "--allow-run-as-root", "-n"]


def mpirun(ranks: int, arguments: list[str], repo: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*MPIRUN, str(ranks), *arguments], cwd=repo,
        capture_output=True, text=True, timeout=600,
    )  # fmt: skip


@pytest.mark.mpi
def test_mpi_writes_the_bytes_of_one_process(
    corpus: Path, repo: Path, expected: dict[str, str]
) -> None:
    work = vocab(corpus, repo, "mpi")
    result = mpirun(3, command(corpus, f"work_dir={work}", "prep.executor=mpi"), repo)
    assert result.returncode == 0, result.stderr
    assert tree(work / "shards") == expected


@pytest.mark.mpi
def test_b19_one_failing_rank_ends_the_job(
    corpus: Path, repo: Path, expected: dict[str, str], tmp_path: Path
) -> None:
    """4 ranks, one unreadable file: within 60 s all end, the file is named, finished work stays."""
    text = tmp_path / "text"
    shutil.copytree(corpus.parent / "text", text)
    bad = text / "013.txt.gz"
    bad.write_bytes(gzip.compress((text / "013.txt").read_bytes())[:-20])
    (text / "013.txt").unlink()
    work = vocab(corpus, repo, "failing")
    overrides = [f"sources.0.path={text}", f"work_dir={work}", "prep.executor=mpi"]
    process = subprocess.Popen(
        [*MPIRUN, "4", *command(corpus, *overrides)], cwd=repo,
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stderr is not None
    said = ""
    for line in process.stderr:
        said += line
        if "013.txt.gz" in line:
            break
    said += process.communicate(timeout=60)[1]  # from here on it may take 60 s
    assert process.returncode != 0
    assert "013.txt.gz" in said and "error (rank " in said
    units = list(work.rglob("unit-*.arrays"))
    assert units and all(is_whole(unit) for unit in units)
    bad.write_bytes(gzip.compress((corpus.parent / "text" / "013.txt").read_bytes(), mtime=0))
    result = mpirun(4, command(corpus, *overrides), repo)
    assert result.returncode == 0, result.stderr
    mended, plain = (open_shards(w / "shards" / "a") for w in (work, corpus.parent / "one"))
    everything = np.arange(plain.num_rows)
    assert np.array_equal(mended.rows(everything).tokens, plain.rows(everything).tokens)


@pytest.mark.mpi
def test_a_killed_rank_ends_the_job_and_processes_finish_it(
    corpus: Path, repo: Path, expected: dict[str, str]
) -> None:
    """kill -9 of one rank: the others end too; the build goes on without MPI to the same bytes."""
    work = vocab(corpus, repo, "rank-killed")
    arguments = command(corpus, f"work_dir={work}", "prep.executor=mpi")
    process = subprocess.Popen(
        [*MPIRUN, "3", *arguments], cwd=repo,
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    while process.poll() is None and not list(work.rglob("unit-*.arrays")):
        time.sleep(0.002)
    tasks = Path(f"/proc/{process.pid}/task").glob("*/children")
    ranks = [int(pid) for task in tasks for pid in task.read_text().split()]
    os.kill(ranks[-1], signal.SIGKILL)
    process.wait(timeout=600)
    assert process.returncode != 0
    result = run(command(corpus, f"work_dir={work}", "prep.workers=2"), repo)
    assert result.returncode == 0, result.stderr
    assert tree(work / "shards") == expected


@pytest.mark.mpi
def test_a_users_mistake_under_mpi_is_said_once(
    corpus: Path, repo: Path, expected: dict[str, str]
) -> None:
    work = vocab(corpus, repo, "mistake")
    arguments = command(corpus, f"work_dir={work}", "prep.executor=mpi", "sources.0.path=nowhere")
    result = mpirun(3, arguments, repo)
    assert result.returncode != 0
    assert result.stderr.count("error (rank ") == 1 and "nowhere" in result.stderr
    assert "Traceback" not in result.stderr
