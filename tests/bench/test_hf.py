"""The Hugging Face baseline of bench.step."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F

from bench import hf
from configs.model import ModelConfig, resolve_model


def test_attention_gets_no_mask_when_compiled():
    """With one, torch cannot take flash attention."""
    config = resolve_model(ModelConfig(preset="bert-tiny", vocab_size=30522, num_layers=1))
    model, data = hf.build(config, "cpu", "compiled, no mask"), hf.inputs(32, 4, 128, "cpu")
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
    monkeypatch.setattr(hf.sys, "executable", str(script))
    result = """echo '{"ms": 5.0, "memory": 7}'"""
    for lines, expected in (
        (f"echo noise; echo built; read go; {result}; sleep 60", (5.0, 7)),
        ("echo built; read go; sleep 60", None),
        ("echo built; read go; exit 1", None),
        ("exit 1", None),
    ):
        script.write_text(f"#!/bin/sh\n{lines}\n")
        script.chmod(0o755)
        rival = hf.Apart(128, 20, "compiled")
        rival.built()
        assert rival.result(1) == expected
        assert rival.process.returncode is not None
