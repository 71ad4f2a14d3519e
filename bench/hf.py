"""transformers' BertForPreTraining as people train it, for bench.step: bf16 autocast, fused AdamW.

    python -m bench.hf LENGTH MASKED KIND     started by bench.step

Kinds: eager; compiled, as it comes; `compiled, no mask`, the same where transformers is new enough.
Each length and kind has a process of its own. Compiling a whole BERT-large takes one to two minutes
of CPU and no GPU, so all compile side by side, at low priority, while bench.step measures other
things; then each waits for its turn on the card.
"""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import torch

from bench import harness as h
from configs.model import ModelConfig

KINDS = ("compiled, no mask", "compiled", "eager")


def build(config: ModelConfig, device: str, kind: str) -> Any:
    """The model in training mode, fp32 weights.

    Rows are dense, so no mask is wanted, and one keeps torch from flash attention. transformers 5.24
    makes none; 5.17 does, while it is compiled (`is_tracing` in its masking_utils), unless the attention
    function is registered under a name of its own.

    Args:
        kind: one of KINDS.
    """
    from transformers import AttentionInterface, BertConfig, BertForPreTraining
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    AttentionInterface.register("sdpa_dense", sdpa_attention_forward)
    shape = BertConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        intermediate_size=config.intermediate_size,
        attn_implementation="sdpa_dense" if kind == "compiled, no mask" else "sdpa",
    )
    with torch.device(device):
        return BertForPreTraining(shape).train()


def inputs(length: int, masked: int, tokens: int, device: str) -> dict[str, torch.Tensor]:
    """What the model takes, with labels."""
    micro = h.fixed_rows(length, masked, tokens, device=device)
    labels = torch.full_like(micro.input_ids, -100)
    labels[micro.masked_positions] = micro.masked_labels
    return {
        "input_ids": micro.input_ids.view(-1, length),
        "token_type_ids": micro.token_type_ids.view(-1, length),
        "labels": labels.view(-1, length),
        "next_sentence_label": micro.next_sentence_labels,
    }


def compiled(model: Any, turn: Callable[[], None]) -> Any:
    """torch.compile(model), which calls `turn` when it has compiled and before it first runs."""
    from torch._functorch import config
    from torch._inductor.compile_fx import compile_fx

    if hasattr(config, "force_non_lazy_backward_lowering"):
        config.force_non_lazy_backward_lowering = True  # else compiled when it is first needed

    def backend(graph: Any, examples: Any) -> Any:
        run = compile_fx(graph, examples)
        turn()
        return run

    return torch.compile(model, backend=backend)


def measure(model: Any, run: Any, data: dict[str, torch.Tensor]) -> tuple[float, float]:
    """(ms a step, peak bytes) of training `model` through `run`."""
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step() -> None:
        for _ in range(h.MICRO_BATCHES):
            with torch.autocast("cuda", torch.bfloat16):
                loss = run(**data).loss / h.MICRO_BATCHES
            loss.backward()
        optimiser.step()
        optimiser.zero_grad()

    ms = h.median_ms(step, 2, 2)
    return ms, torch.cuda.max_memory_allocated()


def turn() -> None:
    """Waits until bench.step says that the card is free."""
    sys.stdin.readline()


def main() -> None:
    os.nice(10)
    length, masked, kind = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    model = build(h.large(), "cuda", kind)
    data = inputs(length, masked, 32768, "cuda")
    print("built", flush=True)
    if kind == "eager":
        turn()
        run = model
    else:
        run = compiled(model, turn)
    torch.cuda.reset_peak_memory_stats()
    ms, memory = measure(model, run, data)
    h.emit({"ms": ms, "memory": memory})


class Apart:
    """The process of one length and kind, which prepares itself and waits for its turn."""

    def __init__(self, length: int, masked: int, kind: str) -> None:
        self.length, self.kind = length, kind
        command = [sys.executable, "-m", "bench.hf", str(length), str(masked), kind]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)
        self.lines: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        for line in self.process.stdout or ():
            self.lines.put(line)
        self.lines.put("")

    def built(self) -> None:
        """Returns when the process leaves the card alone until its turn."""
        while (line := self.lines.get()) and line != "built\n":
            pass

    def result(self, limit_s: float) -> tuple[float, float] | None:
        """(ms a step, peak bytes); None if it has failed or takes longer than limit_s from now."""
        found, end = None, time.time() + limit_s
        try:
            assert self.process.stdin is not None
            self.process.stdin.write("go\n")
            self.process.stdin.flush()
            while line := self.lines.get(timeout=max(0.1, end - time.time())):
                if line.startswith("{"):
                    got = json.loads(line)
                    found = (got["ms"], got["memory"])
                    break
            else:
                print(f"HF {self.kind} at {self.length}: ended without a result", flush=True)
        except queue.Empty:
            print(f"HF {self.kind} at {self.length}: stopped after {limit_s:.0f} s", flush=True)
        except BrokenPipeError:
            print(f"HF {self.kind} at {self.length}: ended before its turn", flush=True)
        self.close()
        return found

    def close(self) -> None:
        self.process.kill()
        self.process.wait()


if __name__ == "__main__":
    main()
