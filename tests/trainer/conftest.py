import pytest

from tests.convert.conftest import minilm
from tests.trainer.runs import fresh, make_run

__all__ = ["minilm"]


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("base") / "run")


@pytest.fixture
def run(base, tmp_path):
    return fresh(base, tmp_path / "run")
