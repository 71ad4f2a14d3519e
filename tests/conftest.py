"""Fixtures shared by all tests. Threads are pinned, since losses depend on them in the last bits."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

REPO = Path(__file__).resolve().parent.parent
DATA = Path(os.environ.get("LAMBERT_DATA", REPO.parent / "shared" / "data"))


@pytest.fixture(scope="session")
def repo() -> Path:
    """The checkout's root: the folder commands are run in."""
    return REPO


@pytest.fixture(scope="session")
def real_data() -> Path:
    """Folder of real corpora (books/, wiki/, vocab/, downstream/, ...); the test is skipped without."""
    if not DATA.is_dir():
        pytest.skip(f"real data is not at {DATA}; set LAMBERT_DATA to its folder")
    return DATA
