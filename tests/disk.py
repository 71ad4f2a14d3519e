"""What goes to the disk, in its order: for tests that a crash leaves things whole or absent."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest


def disk_events(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """From here on ("sync", path) of every fsync and ("name", path) of every renaming."""
    events: list[tuple[str, str]] = []
    sync = os.fsync

    def fsync(handle: int) -> None:
        sync(handle)
        events.append(("sync", str(Path(f"/proc/self/fd/{handle}").readlink())))

    def renaming(do: Any) -> Any:
        def renamed(source: Any, target: Any, **options: Any) -> None:
            do(source, target, **options)
            events.append(("name", os.fspath(target)))

        return renamed

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "rename", renaming(os.rename))
    monkeypatch.setattr(os, "replace", renaming(os.replace))
    return events
