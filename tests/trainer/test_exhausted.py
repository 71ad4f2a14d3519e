"""Memory or a disk that runs out in the middle of a training, alone and among several ranks."""

from __future__ import annotations

import pytest

from tests.trainer.runs import output, train


@pytest.mark.parametrize(
    ("accident", "size", "what", "remedy"),
    [
        ("oom:2", 1, "with micro-batches of 256 tokens", "micro_batch_tokens=128 or lower"),
        ("oom:2:1", 2, "with micro-batches of 256 tokens", "micro_batch_tokens=128 or lower"),
        ("oom:0", 1, "while the model and its optimiser were set up", "raise parallel.tp"),
        ("oom:0:0", 2, "while the model and its optimiser were set up", "raise parallel.tp"),
    ],
)
def test_gpu_memory_running_out_is_a_message(accident, size, what, remedy, run):
    """On the other ranks, too: "a rank was lost" would start the same again."""
    assert train(run, size=size, accident=accident) == [2] * size, output(run)
    for rank in range(size):
        assert f"GPU memory ran out {what}" in output(run, rank)
        assert remedy in output(run, rank)
        assert "Traceback" not in output(run, rank)
