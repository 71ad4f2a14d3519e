"""How a process of `forked` begins; imports nothing, since pytest's own process imports it too."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path


def run(
    target: Callable[..., object],
    arguments: tuple,
    log: Path,
    folder: Path,
    environment: dict[str, str],
) -> None:
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    target(*arguments)
