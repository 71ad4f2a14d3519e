"""Processes that begin with torch and the trainer loaded, which take seconds to import each time.

They come from a fork server: a process of this module's own that has imported them and started no
thread. `tests.trainer.test_training` starts whole interpreters as well, by every launcher.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent
_SERVER = get_context("forkserver")
_SERVER.set_forkserver_preload(["tests.loaded"])


def start(
    target: Callable[..., object], *arguments: object, log: Path, **environment: str
) -> BaseProcess:
    """`target(*arguments)` in a process of its own below the repo; what it says goes to `log`."""
    everything = {**os.environ, **environment}
    process = _SERVER.Process(target=_child, args=(target, arguments, str(log), everything))
    process.start()
    return process


def finish(processes: list[BaseProcess], timeout: float = 600) -> list[int | None]:
    """Exit codes; kills what is left after the time-out."""
    end = time.monotonic() + timeout
    try:
        for p in processes:
            p.join(max(0.1, end - time.monotonic()))
        return [p.exitcode for p in processes]
    finally:
        for p in processes:
            p.kill()


def _child(
    target: Callable[..., object], arguments: tuple, log: str, environment: dict[str, str]
) -> None:
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(REPO)
    target(*arguments)
