"""Runs that were measured, beside what the planner says of them: its claim to be believed."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster.planner.cards import NETWORK, find_card
from cluster.planner.layouts import memory_parts
from cluster.planner.step_time import Layout, update_time
from configs import UserError
from configs.model import ModelConfig, resolve_model

MEMORY_WITHIN, TIME_WITHIN = 0.10, 0.15
REQUIRED = ("model", "card", "gpus", "length", "micro_batch_tokens", "step_ms")


@dataclass
class Comparison:
    """One measured run. Times in ms for a whole update, memory in GB (1e9 bytes)."""

    what: str
    step_ms: float
    predicted_ms: float
    memory_gb: float  # 0: not measured
    predicted_gb: float

    @property
    def time_error(self) -> float:
        return self.predicted_ms / self.step_ms - 1

    @property
    def memory_error(self) -> float:
        return self.predicted_gb / self.memory_gb - 1 if self.memory_gb else 0.0

    @property
    def holds(self) -> bool:
        return abs(self.time_error) <= TIME_WITHIN and abs(self.memory_error) <= MEMORY_WITHIN


def compare_all(path: Path) -> list[Comparison]:
    """One entry a line of `path` (JSON lines as the benches write them); none if it is missing.

    Raises:
        UserError: a line that is not JSON or lacks a field.
    """
    if not path.is_file():
        return []
    out = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
            missing = [key for key in REQUIRED if key not in record]
        except ValueError:
            record, missing = {}, ["JSON"]
        if missing:
            raise UserError(
                f"{path}:{number}: {', '.join(missing)} missing", "measure that run again"
            )
        out.append(compare(record))
    return out


def compare(record: dict[str, Any]) -> Comparison:
    """A run with rows of `length` real tokens, `micro_batches` of `micro_batch_tokens` an update.

    record["model"] is a preset's name or the keys of a ModelConfig.
    """
    tp = record.get("tp", 1)
    dp = record.get("dp", record["gpus"] // tp)
    shape = record["model"] if isinstance(record["model"], dict) else {"preset": record["model"]}
    model = resolve_model(ModelConfig(**shape), record.get("vocab_size", 30522))
    layout = Layout(
        tp,
        dp,
        record.get("zero_stage", 1 if dp > 1 else 0),
        record["micro_batch_tokens"],
        record.get("activation_checkpointing", False),
        8,
        record.get("precision", "bf16"),
        record.get("sequence_parallel", False),
        record.get("engine", "lean"),
        record.get("peers", False),
    )
    micros = record.get("micro_batches", 8)
    tokens = float(record["micro_batch_tokens"] * micros * dp)
    card = find_card(record["card"])
    seconds = update_time(model, layout, card, NETWORK, tokens, record["length"]).seconds
    parts = memory_parts(model, layout)
    if record.get("memory", "allocated") == "allocated":  # what torch counts, not the whole card
        del parts["context and allocator"]
    cut = f" of {model.num_layers} layers" if "num_layers" in shape else ""
    what = f"{model.preset}{cut} @{record['length']} {record['card']} tp {tp} x dp {dp} zero {layout.zero_stage}"
    what += f" {layout.precision} {micros} x {record['micro_batch_tokens']}"
    what += " peers" if layout.peers else " sp" if layout.sequence_parallel else ""
    return Comparison(
        what,
        record["step_ms"],
        1000 * seconds,
        record.get("peak_memory_gb", 0.0),
        sum(parts.values()) / 1e9,
    )
