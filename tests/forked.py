"""Processes that begin with torch and the trainer loaded, which take seconds to import each time.

`tests.trainer.test_training` starts whole interpreters as well, by every launcher.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from multiprocessing import forkserver, get_context
from multiprocessing.process import BaseProcess
from pathlib import Path

from tests import forked_child

REPO = Path(__file__).resolve().parent.parent
_CONTEXT = get_context("forkserver")


def serve() -> None:
    """Begins to load. Before any test: a process has one server, and data_prep's loads less."""
    _CONTEXT.set_forkserver_preload(["tests.loaded"])
    forkserver.ensure_running()


def start(
    target: Callable[..., object], *arguments: object, log: Path, **environment: str
) -> BaseProcess:
    """`target(*arguments)` in a process of its own in the repo; what it says goes to `log`."""
    everything = {**os.environ, **environment}
    process = _CONTEXT.Process(
        target=forked_child.run, args=(target, arguments, log, REPO, everything), daemon=True
    )
    process.start()
    return process


def finish(processes: list[BaseProcess], timeout: float = 1200) -> list[int | None]:
    """Exit codes; kills what is left after the time-out."""
    end = time.monotonic() + timeout
    try:
        for p in processes:
            p.join(max(0.1, end - time.monotonic()))
        return [p.exitcode for p in processes]
    finally:
        for p in processes:
            p.kill()
