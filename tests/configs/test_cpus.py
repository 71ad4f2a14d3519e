"""Threads and workers follow what a process may use, not what the machine has."""

from __future__ import annotations

import math
import os
import re
import runpy
import sys
from pathlib import Path

import pytest

from configs import cpus
from configs.cpus import cpu_quota, usable_cpus
from data_prep.executor import Executor, make_executor


@pytest.fixture
def masked(monkeypatch: pytest.MonkeyPatch):
    def be(mask: set[int], quota: float = math.inf) -> None:
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: mask)
        monkeypatch.setattr(cpus, "cpu_quota", lambda: quota)

    return be


def test_without_affinity_masks_all_cpus_count(monkeypatch):
    """macOS has none: a trial on a laptop ended in an AttributeError."""
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: 6)
    monkeypatch.setattr(cpus, "cpu_quota", lambda: math.inf)
    assert usable_cpus() == 6


@pytest.mark.parametrize(
    "mask, quota, here, expected",
    [
        (range(8), math.inf, [], 8),
        (range(8), 2.5, [], 2),
        (range(8), 0.5, [], 1),
        (range(8), math.inf, [range(8)] * 4, 2),  # torchrun: one mask for all
        (range(8), math.inf, [range(8 * n, 8 * n + 8) for n in range(4)], 8),  # srun: one each
        (range(8), math.inf, [range(8), range(8), range(8, 16), range(8, 16)], 4),  # by socket
        (range(8), 8.0, [range(8 * n, 8 * n + 8) for n in range(4)], 2),
        ([5], math.inf, [[5]] * 3, 1),
    ],
)
def test_usable_cpus(masked, mask, quota, here, expected) -> None:
    masked(set(mask), quota)
    assert usable_cpus([set(other) for other in here]) == expected


def test_a_process_held_to_one_cpu_counts_one() -> None:
    """A real mask, which is what `taskset`, SLURM and `docker --cpuset-cpus` set."""
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(before)})
        assert usable_cpus() == 1
        assert type(make_executor("processes", 0)) is Executor
    finally:
        os.sched_setaffinity(0, before)


def test_workers_keep_to_the_quota(masked) -> None:
    masked(set(range(64)), 3.0)
    assert make_executor("processes", 0).workers == 3
    assert make_executor("processes", 5).workers == 5


def test_commands_start_as_many_threads_as_the_quota_feeds(masked, monkeypatch) -> None:
    """Those without ranks too: a container of 3 CPUs on a machine of 64 would run 64 threads."""
    masked(set(range(64)), 3.0)
    monkeypatch.setattr(sys, "argv", ["pretrain", "--help"])
    for said in ("", "7"):
        monkeypatch.setenv("OMP_NUM_THREADS", said)
        if not said:
            monkeypatch.delenv("OMP_NUM_THREADS")
        with pytest.raises(SystemExit):
            runpy.run_module("pretrain", run_name="__main__")
        assert os.environ["OMP_NUM_THREADS"] == (said or "3")


@pytest.mark.parametrize(
    "own, files, expected",
    [
        ("0::/\n", {"cpu.max": "200000 100000\n"}, 2.0),
        ("0::/\n", {"cpu.max": "max 100000\n"}, math.inf),
        ("0::/a/b\n", {"a/b/cpu.max": "max 100000", "a/cpu.max": "150000 100000"}, 1.5),
        ("0::/of/the/host\n", {"cpu.max": "400000 100000"}, 4.0),
        (
            "4:cpuset:/x\n3:cpu,cpuacct:/x\n",
            {"cpu/x/cpu.cfs_quota_us": "50000\n", "cpu/x/cpu.cfs_period_us": "100000\n"},
            0.5,
        ),
        (
            "3:cpu,cpuacct:/\n",
            {"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"},
            math.inf,
        ),
        ("0::/\n", {"cpu.max": ""}, math.inf),
        ("0::/\n", {}, math.inf),
        ("", {}, math.inf),
    ],
)
def test_quota_of_a_cgroup(tmp_path: Path, own, files, expected) -> None:
    (tmp_path / "own").write_text(own)
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert cpu_quota(tmp_path, tmp_path / "own") == expected
    assert cpu_quota(tmp_path, tmp_path / "none") == math.inf


@pytest.mark.parametrize("own", ["", "\n", "0::/\n\n", "x", "0:::/a:b", "0::/\udcff", "0::/../up"])
@pytest.mark.parametrize(
    "text", ["", "max", "5", "5 0", "0 5", "-5 5", "1.5 5", "5 5 5", "a b", "\udcff"]
)
def test_files_that_say_nothing_are_no_limit(tmp_path: Path, own, text) -> None:
    (tmp_path / "own").write_text(own, errors="surrogateescape")
    (tmp_path / "cpu").mkdir()
    for name in ("cpu.max", "cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us"):
        (tmp_path / name).write_text(text, errors="surrogateescape")
    assert cpu_quota(tmp_path, tmp_path / "own") == math.inf


def test_nobody_counts_the_machine(repo: Path) -> None:
    rooms = ("configs", "data_prep", "pretrain", "cluster", "bench")
    counting = [
        str(file.relative_to(repo))
        for room in rooms
        for file in (repo / room).rglob("*.py")
        if re.search("cpu_count|sched_getaffinity", file.read_text())
    ]
    assert counting == ["configs/cpus.py"]
