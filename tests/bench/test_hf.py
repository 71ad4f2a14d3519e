"""The Hugging Face baseline of bench.step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional as F

from bench import hf
from configs.model import ModelConfig, resolve_model


@pytest.fixture
def tiny():
    config = resolve_model(ModelConfig(preset="bert-tiny", vocab_size=30522, num_layers=1))
    return hf.build(config, "cpu"), hf.inputs(32, 4, 128, "cpu")


def test_attention_gets_no_mask_when_compiled(tiny):
    """Or torch could not take flash attention: the baseline would be slower than people's."""
    model, data = tiny
    masks: list[Any] = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        for node in graph.graph.nodes:
            if node.target is F.scaled_dot_product_attention:
                masks.append(node.kwargs["attn_mask"])
        return graph.forward

    loss = torch.compile(model, backend=backend)(**data).loss
    assert masks == [None] and loss.isfinite()
    torch._dynamo.reset()


def test_a_process_that_fails_or_is_slow_gives_what_it_has(tmp_path, monkeypatch):
    script = tmp_path / "python"
    result = '{"what": "HF compiled", "ms": 5.0, "memory": 7}'
    monkeypatch.setattr(hf.sys, "executable", str(script))
    for ending, expected in (("sleep 60", {"HF compiled": (5.0, 7)}), ("exit 1", None)):
        lines = f"echo noise; echo built; read go; echo '{result}'; {ending}"
        script.write_text(f"#!/bin/sh\n{lines if expected else ending}\n")
        script.chmod(0o755)
        rival = hf.Apart(128, 20, ["compiled"])
        rival.built()
        assert rival.results(1) == (expected or {})
        assert rival.process.returncode is not None
