"""Tasks for the executors, in a module that a worker imports at once."""

from __future__ import annotations

import errno
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from configs import UserError


@dataclass(frozen=True)
class Job:
    value: int

    @property
    def label(self) -> str:
        return f"job {self.value} (file-{self.value}.txt)"


def square(context: int, job: Job) -> int:
    return context + job.value**2


def fail_on_three(context: Any, job: Job) -> int:
    if job.value == 3:
        raise ValueError("something odd")
    if job.value > 3:
        time.sleep(0.2)
    return job.value


def refuse_three(context: Any, job: Job) -> int:
    if job.value == 3:
        raise UserError("file-3.txt: not text", "give text")
    return job.value


def fill_the_disk(context: Any, job: Job) -> int:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "part")


def die_on_three(context: Any, job: Job) -> int:
    if job.value == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return job.value


def sleep_long(folder: str, item: int) -> None:
    """Says where it runs and takes long."""
    (Path(folder) / str(os.getpid())).touch()
    time.sleep(600)
