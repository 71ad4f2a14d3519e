"""GPU memory that runs out, alone and among several ranks."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from configs.errors import UserError
from configs.schema import Recipe
from pretrain.data.packing import round_up
from pretrain.exhausted import told
from tests.trainer.runs import output, plan, train


@pytest.mark.parametrize(
    ("accident", "size", "what", "remedy"),
    [
        ("oom:2", 1, "with micro-batches of 256 tokens", "micro_batch_tokens=192 or lower"),
        ("oom:2:1", 2, "with micro-batches of 256 tokens", "micro_batch_tokens=192 or lower"),
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


def remedy_of(found) -> str:
    with pytest.raises(UserError) as caught, told(found):
        raise torch.OutOfMemoryError("CUDA out of memory.\nmore")
    return caught.value.remedy


@given(st.integers(1, 600), st.integers(0, 70_000), st.booleans())
def test_what_is_advised_is_lower_than_now_and_holds_the_longest_row(length, more, recompute):
    """At rows of 512 tokens a micro-batch of 512 was to be set to 384, one of 128 to 128."""
    recipe = Recipe()
    recipe.parallel.activation_checkpointing = recompute
    longest = round_up(length, 16)
    sets = {"a": SimpleNamespace(max_length=length), "b": SimpleNamespace(max_length=1)}
    tokens = longest + more
    found = SimpleNamespace(recipe=recipe, micro_batch_tokens=tokens, shards=sets)
    remedy = remedy_of(found)
    advised = [int(n) for n in re.findall(r"micro_batch_tokens=(\d+)", remedy)]
    assert all(longest <= n < tokens for n in advised)
    assert bool(advised) == (tokens > longest)
    assert ("activation_checkpointing=true" in remedy) == (not recompute)
    assert "parallel.tp" in remedy and "zero_stage" in remedy


@pytest.mark.parametrize("tokens", [48, 49, 64, 100, 256])
def test_what_is_advised_is_accepted(tokens, run):
    found = plan(run, f"parallel.micro_batch_tokens={tokens}")
    for less in re.findall(r"parallel.micro_batch_tokens=\d+", remedy_of(found)):
        assert plan(run, less).micro_batch_tokens < tokens
