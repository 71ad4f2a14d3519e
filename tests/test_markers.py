"""What `conftest` does with tests of things that a machine may lack."""

from __future__ import annotations

import shutil

import pytest
import torch

from tests.conftest import pytest_runtest_setup


@pytest.mark.parametrize("mark, reason", [("gpu", "needs a CUDA GPU"), ("mpi", "mpirun is not")])
def test_what_a_machine_lacks_is_skipped_with_a_reason(request, monkeypatch, mark, reason) -> None:
    pytest_runtest_setup(request.node)  # no mark, no question
    request.node.add_marker(mark)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(pytest.skip.Exception, match=reason):
        pytest_runtest_setup(request.node)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    pytest_runtest_setup(request.node)
