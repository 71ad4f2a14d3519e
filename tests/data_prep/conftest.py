"""Speed: a disk's own cache is not what these tests are about."""

from __future__ import annotations

import os

import pytest


@pytest.fixture(autouse=True)
def no_fsync(monkeypatch: pytest.MonkeyPatch) -> None:
    """Flushing to the disk takes 20 ms each time and changes nothing a test can see."""
    monkeypatch.setattr(os, "fsync", lambda handle: None)
