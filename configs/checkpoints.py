"""Where a run's checkpoints lie and which are complete: for the trainer, and for the cluster's checks
and status, which know nothing else of it."""

from __future__ import annotations

import contextlib
import math
import re
from pathlib import Path

INDEX = "checkpoint.json"  # of a checkpoint; written last
_NAME = re.compile(r"step-(\d+)$")
_PARTIAL = re.compile(r"step-(\d+)\.partial-\w+$")


def checkpoints(train_dir: str | Path) -> list[tuple[int, Path]]:
    """(step, folder) of all complete checkpoints, by number, oldest first."""
    root = Path(train_dir) / "checkpoints"
    found = [(_NAME.match(p.name), p) for p in root.iterdir()] if root.is_dir() else []
    return sorted((int(m[1]), p) for m, p in found if m and (p / INDEX).is_file())


def incomplete(train_dir: str | Path) -> list[Path]:
    """What a killed save left behind."""
    root = Path(train_dir) / "checkpoints"
    return sorted(p for p in root.iterdir() if _PARTIAL.match(p.name)) if root.is_dir() else []


def saves_to_hold(train_dir: str | Path, keep: int, newest: float = math.inf) -> int:
    """Checkpoints that the disk must have room for beside those there: of up to update `newest`, one
    more than `keep`, as the oldest goes only after the new one is complete."""
    there = sum(0 < step <= newest for step, _ in checkpoints(train_dir))
    return max(1, keep + 1 - there)


def bytes_left_behind(train_dir: str | Path) -> int:
    """What `incomplete` saves take, which goes before the next one comes."""
    with contextlib.suppress(OSError):  # of a training that is running here
        return sum(f.stat().st_size for p in incomplete(train_dir) for f in p.iterdir())
    return 0
