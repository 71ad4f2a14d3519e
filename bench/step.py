"""Training steps on one GPU against Hugging Face and against what the card can do.

    python -m bench.step [--json] [--shards FOLDER ...] [--skip hf,ours,packed,...]

In one run on one card: ceilings (matmul 8192^3 in bf16 and fp8, BERT-large's own shapes, copy);
ours in each precision, a time budget per kernel group, packed real rows (shard folders) against
the same rows padded; last, transformers' BertForPreTraining, dense, eager and compiled (bench.hf; on
the CPU meanwhile); each has `--hf-limit-s` from its turn on. A step is 8
micro-batches of 32768 tokens and one update, at (length 128, 20 masked) and (512, 80 masked).
Rates count model FLOP (configs.model.model_flops): padding, recomputation and work that is left
out earn nothing. Shares are of the 8192^3 rate in a burst and under load.
"""

from __future__ import annotations

import argparse
import gc
import os
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from bench import harness as h
from bench import hf
from configs.model import ModelConfig

TOKENS = 32768
SIZES = ((128, 20), (512, 80))
SHAPES = {"qkv": (3072, 1024), "out": (1024, 1024), "fc1": (4096, 1024), "fc2": (1024, 4096)}


def ceilings() -> dict[str, Any]:
    # A second of load first: the clock that a step of a second gets.
    peak = h.matmul_rate(8192, 8192, 8192, 50, 500)
    rates = {"bf16_8192": peak, "bf16_8192_burst": 0.0, "copy_tb_s": h.copy_rate()}
    time.sleep(2)  # and a pause: a burst is the rate of a card that has rested
    rates["bf16_8192_burst"] = h.matmul_rate(8192, 8192, 8192)
    rates["fp8_8192"] = h.fp8_rate(8192, 8192, 8192)
    for name, (out, inner) in SHAPES.items():
        rates[f"bf16_{name}"] = h.matmul_rate(TOKENS, out, inner)
        rates[f"fp8_{name}"] = h.fp8_rate(TOKENS, out, inner)
    return rates


def row(name: str, length: int, config: ModelConfig, ms: float, rates: dict, memory: float) -> dict:
    micros = [h.fixed_rows(length, dict(SIZES)[length], TOKENS, device="cpu")]
    rate = h.flops(config, micros) * h.MICRO_BATCHES / ms * 1e-9
    rows = TOKENS // length * h.MICRO_BATCHES
    return {
        "what": name,
        "length": length,
        "ms": round(ms, 1),
        "rows_per_s": round(rows / ms * 1e3),
        "tflops": round(rate, 1),
        "of_burst": round(rate / rates["bf16_8192_burst"], 3),
        "of_sustained": round(rate / rates["bf16_8192"], 3),
        "memory_gb": round(memory / 2**30, 1),
    }


def clear() -> float:
    """Lets go of the last model (engine, parameters and their hooks hold each other); GiB left."""
    torch.cuda.synchronize()
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated() / 2**30


def ours(
    precision: str, length: int, masked: int, dropout: float = 0.1, recorded: bool = True
) -> dict:
    """ms a step, the first step's seconds (compilation) and loss, peak bytes."""
    config = h.large()
    config.hidden_dropout = config.attention_dropout = dropout
    micros = [h.fixed_rows(length, masked, TOKENS, seed=i) for i in range(h.MICRO_BATCHES)]
    training = h.Training(config, precision, recorded=recorded)
    start = time.time()
    loss = float(training.step(micros))
    first = time.time() - start
    ms = h.median_ms(lambda: training.step(micros), 3, 1)
    memory = torch.cuda.max_memory_allocated()
    training.micro.close()
    return {"ms": ms, "loss": loss, "first_s": first, "memory": memory}


def packed(folder: Path) -> dict[str, Any]:
    """Real tokens a second of a shard folder's rows, packed and padded to the set's length."""
    from configs.schema import MaskingConfig, PhaseConfig
    from data_prep.shards import open_shards
    from pretrain.data.batches import Batches

    shards = open_shards(folder)
    fill = float(shards.lengths[:].mean()) / shards.max_length
    rows = min(shards.num_rows, int(TOKENS * h.MICRO_BATCHES / (fill * shards.max_length)))
    phase = PhaseConfig(global_batch=rows, steps=10)
    batches = Batches(
        shards,
        phase,
        0,
        MaskingConfig(),
        1,
        0,
        1,
        TOKENS,
        torch.device("cuda", torch.cuda.current_device()),
    )
    batch = batches.update(0)
    batches.close()
    training = h.Training(h.large(), "bf16")
    dense = [h.fixed_rows(shards.max_length, shards.mask_cap, TOKENS, seed=i) for i in range(4)]
    ms = h.median_ms(lambda: training.accumulate(batch.micros), 2, 2)
    padded = h.median_ms(lambda: training.accumulate(dense), 2, 2)
    training.micro.close()
    rate = batch.tokens_total / ms
    padded_rate = fill * TOKENS * len(dense) / padded
    return {
        "set": f"{folder.parts[-3]}/{folder.name}" if len(folder.parts) > 2 else folder.name,
        "length": shards.max_length,
        "fill": round(fill, 4),
        "waste": round(batch.waste, 4),
        "packed_tokens_s": round(rate * 1e3),
        "padded_tokens_s": round(padded_rate * 1e3),
        "gain": round(rate / padded_rate, 3),
        "goal": round(0.95 / fill, 3),
        "micro_batches": len(batch.micros),
    }


def time_budget(precision: str, length: int, masked: int) -> dict[str, Any]:
    """ms a micro-batch of each kernel group, and the update's; launches a micro-batch."""
    micro = h.fixed_rows(length, masked, TOKENS)
    training = h.Training(h.large(), precision)
    training.step([micro, micro])
    groups, kernels = h.budget(lambda: training.accumulate([micro]))
    update, _ = h.budget(lambda: training.engine.step(1e-4))
    groups["update"] = sum(update.values())
    training.micro.close()
    rounded: dict[str, Any] = {name: round(ms, 2) for name, ms in groups.items()}
    return {**rounded, "launches": sum(count for _, _, count in kernels)}


def run(
    skip: set[str], folders: list[Path], rivals: list[hf.Apart], hf_limit_s: float
) -> dict[str, Any]:
    config, rows = h.large(), []
    result: dict[str, Any] = {**h.stamp(), "transformers": version("transformers")}
    result["ceilings"] = ceilings()
    rates = result["ceilings"]
    print({k: round(v, 2) for k, v in rates.items()}, flush=True)

    def add(entry: dict[str, Any]) -> None:
        rows.append(entry)
        print(entry, flush=True)

    kinds = [("bf16", 0.1), ("fp8", 0.1), ("bf16", 0.0), ("fp16", 0.1)]
    for precision, dropout in kinds:
        if precision in skip or "ours" in skip:
            continue
        for length, masked in SIZES:
            left = clear()
            got = ours(precision, length, masked, dropout)
            name = precision if dropout else f"{precision}, no dropout"
            entry = row(name, length, config, got["ms"], rates, got["memory"])
            entry |= {"loss": round(got["loss"], 4), "first_step_s": round(got["first_s"], 1)}
            add({**entry, "left_before_gb": round(left, 2)})
    result["steps"] = rows
    if "budget" not in skip:
        result["budget_ms"] = {}
        for precision in ("bf16", "fp8"):
            for length, masked in SIZES:
                clear()
                budget = time_budget(precision, length, masked)
                result["budget_ms"][f"{precision} {length}"] = budget
                print(precision, length, budget, flush=True)
    if "packed" not in skip:
        result["packed"] = []
        for folder in folders:
            clear()
            result["packed"].append(packed(folder))
            print(result["packed"][-1], flush=True)
    clear()
    for rival in rivals:
        found = rival.result(hf_limit_s)
        if found is None:
            continue
        ms, memory = found
        for entry in rows:
            if entry["length"] == rival.length and not entry["what"].startswith("HF"):
                entry[f"times HF {rival.kind}"] = round(ms / entry["ms"], 3)
        add(row(f"HF {rival.kind}", rival.length, config, ms, rates, memory))
    return result


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print one JSON line last")
    parser.add_argument(
        "--skip",
        default="",
        help="parts to leave out: hf,eager,compiled,ours,bf16,fp16,fp8,packed,budget",
    )
    parser.add_argument("--shards", type=Path, nargs="*", default=[], help="shard folders to pack")
    parser.add_argument(
        "--hf-limit-s", type=float, default=180, help="of each run of Hugging Face, from its turn"
    )
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("bench.step needs a CUDA GPU; `make bench-optimizer` runs on a CPU too")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    skip = set(filter(None, options.skip.split(",")))
    kinds = [] if "hf" in skip else [k for k in hf.KINDS if k.split(",")[0] not in skip]
    rivals = [hf.Apart(*size, kind) for size in SIZES for kind in kinds]
    try:
        for rival in rivals:
            rival.built()
        result = run(skip, options.shards, rivals, options.hf_limit_s)
    finally:
        for rival in rivals:
            rival.close()
    if options.json:
        h.emit(result)


if __name__ == "__main__":
    main()
