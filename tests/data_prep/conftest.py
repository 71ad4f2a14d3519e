"""Small units, so that small texts make several, and no waiting for the disk."""

from __future__ import annotations

import os

import pytest

import data_prep.groups
import data_prep.sources.base


@pytest.fixture(autouse=True)
def no_fsync(monkeypatch: pytest.MonkeyPatch) -> None:
    """Flushing to the disk takes 20 ms each time and changes nothing a test can see."""
    monkeypatch.setattr(os, "fsync", lambda handle: None)


@pytest.fixture
def small_units(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several units and groups out of a few kilobytes of text."""
    monkeypatch.setattr(data_prep.sources.base, "SMALL_UNIT", 3000)
    monkeypatch.setattr(data_prep.groups, "GROUP_TOKENS", 4000)
    monkeypatch.setattr(data_prep.groups, "GROUP_DOCUMENTS", 2)
