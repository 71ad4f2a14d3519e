"""How many CPUs this process may use, which in a job or a container is not what the machine has."""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Sequence
from pathlib import Path

_CGROUPS, _OWN = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def own_cpus() -> set[int]:
    """Numbers of the CPUs in this process's affinity mask; all of them where there is none (macOS)."""
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


def usable_cpus(here: Sequence[Collection[int]] = ()) -> int:
    """CPUs in this process's affinity mask, but no more than its cgroup gives time for; at least 1.

    here: the masks of all processes that work together on this machine, its own included. Those that
    overlap with its own share it (torchrun, containers); mpirun and srun may give each its own.
    """
    own = own_cpus()
    sharing = sum(not own.isdisjoint(mask) for mask in here) or 1
    return max(1, int(min(len(own) / sharing, cpu_quota() / (len(here) or 1))))


def cpu_quota(cgroups: Path = _CGROUPS, own: Path = _OWN) -> float:
    """CPUs' worth of time that the cgroup and those above it allow (`docker --cpus=2`); inf: all."""
    try:
        lines = own.read_text(errors="surrogateescape").splitlines()
    except OSError:
        return math.inf
    found = math.inf
    for line in lines:
        kinds, _, path = line.partition(":")[2].partition(":")
        if kinds and "cpu" not in kinds.split(","):
            continue
        # A container sees its own limits at the root, whatever path its host calls it by.
        top = cgroups / "cpu" if kinds else cgroups
        inner = top / path.lstrip("/")
        for folder in (f for f in (inner, *inner.parents) if f.is_relative_to(top)):
            found = min(found, _limit(folder))
    return found


def _limit(folder: Path) -> float:
    """Of one cgroup: `max 100000` and -1 are no limit, nor is a file that is not there."""
    try:
        if (folder / "cpu.max").is_file():
            quota, period = (folder / "cpu.max").read_text().split()
        else:
            quota, period = (
                (folder / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period")
            )
        return int(quota) / int(period) if int(quota) > 0 else math.inf
    except (OSError, ValueError, ZeroDivisionError):
        return math.inf
