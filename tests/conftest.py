"""Fixtures shared by all tests, and the same environment for them wherever they are started."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest

# Whoever starts the tests may be a rank in a job, or have a mirror of the hub: none of theirs.
_OF_THE_SHELL = (
    *("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "TORCHELASTIC_", "SLURM", "OMPI_COMM_", "PMI"),
    *("MPI_LOCAL", "MV2_COMM_", "HF_", "BENCH_"),
)
for _name in [name for name in os.environ if name.startswith(_OF_THE_SHELL)]:
    del os.environ[_name]
os.environ |= {
    "OMP_NUM_THREADS": "1",  # losses depend on it in the last bits
    "DS_ACCELERATOR": "cpu",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}

REPO = Path(__file__).resolve().parent.parent
DATA = Path(os.environ.get("LAMBERT_DATA", REPO.parent / "shared" / "data"))


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Tests of what a machine lacks are skipped there, whether `-m` leaves them out or not."""
    if item.get_closest_marker("mpi") and shutil.which("mpirun") is None:
        pytest.skip("mpirun is not installed")
    if item.get_closest_marker("gpu"):
        import torch

        if not torch.cuda.is_available():
            pytest.skip("needs a CUDA GPU")


def pytest_collection_finish() -> None:
    if forked := sys.modules.get("tests.forked"):  # some test here starts such processes
        forked.serve()


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
