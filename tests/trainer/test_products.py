"""Tensor-parallel products whose collectives run beside them equal the plain ones."""

from __future__ import annotations

import pytest
import torch

from tests.trainer.launch import world


def test_hidden_collectives_change_no_result_and_no_gradient(monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # on CPU tensors, GPU or not
    for rank in world(2, "tests.trainer.products:both"):
        for plain, fused in rank:
            for wanted, got in zip(plain, fused):
                torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-12)
