"""One real SLURM cluster of four nodes for all tests here."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from .mini import HERE, Cluster, Run, install, why_not


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.slurm)


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    if reason := why_not() or install():
        pytest.skip(reason)
    mini = Cluster(tmp_path_factory.mktemp("slurm"))
    mini.do("start", "4")
    try:
        yield mini
    finally:
        mini.do("stop")


@pytest.fixture
def new_run(cluster: Cluster, tmp_path: Path) -> Iterator[Callable[[str], Run]]:
    runs: list[Run] = []

    def make(name: str) -> Run:
        runs.append(Run(cluster, tmp_path / name))
        return runs[-1]

    yield make
    for run in runs:
        run.cancel()
