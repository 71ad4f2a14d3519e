"""Data and tensor parallelism on the GPUs of one host, weak scaling, dense rows of length 128.

    torchrun --nproc-per-node 4 -m bench.scaling [--out FILE] [--quick]

One world measures all layouts that fit it, one after the other; a layout of fewer GPUs than the
world runs on all of them side by side. A step is 8 micro-batches and one update. --out appends a
JSON line a layout, as the planner reads them (bench/results/measured.jsonl).
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from bench import harness as h
from cluster.environment import distributed_environment
from configs.model import ModelConfig, resolve_model
from pretrain.parallel.groups import SINGLE, Groups

LENGTH, MASKED = 128, 20
# preset, layers (0 = all), tokens a micro-batch, [(tp, dp, sequence_parallel)]
RUNS: list[tuple[str, int, int, list[tuple[int, int, bool]]]] = [
    ("bert-large", 0, 32768, [(1, 1, False), (1, 2, False), (1, 4, False), (2, 1, False)]),
    ("megatron-1.3b", 0, 16384, [(1, 1, False), (2, 1, False), (2, 1, True)]),
    ("megatron-3.9b", 12, 16384, [(1, 1, False), (4, 1, False)]),
]


def make_groups(tp: int, dp: int, rank: int, world: int) -> Groups:
    """This rank's groups where blocks of tp x dp neighbours do the same thing side by side."""
    if tp * dp == 1:
        return SINGLE
    mine: dict[str, Any] = {"tp": None, "dp": None}
    for block in range(0, world, tp * dp):
        ranks = range(block, block + tp * dp)
        lines = {"tp": [ranks[i : i + tp] for i in range(0, tp * dp, tp)] if tp > 1 else []}
        lines["dp"] = [ranks[i::tp] for i in range(tp)] if dp > 1 else []
        for kind, members in ((k, list(line)) for k, ls in lines.items() for line in ls):
            group = dist.new_group(members)
            if rank in members:
                mine[kind] = group
    inside = rank % (tp * dp)
    return Groups(tp, dp, inside % tp, inside // tp, mine["tp"], mine["dp"])


def measure(
    config: ModelConfig, tokens: int, groups: Groups, sequence: bool, count: int, recorded: bool
) -> dict[str, Any]:
    gc.collect()  # engine, parameters and their hooks hold each other
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    training = h.Training(
        config, "bf16", recorded=recorded, groups=groups, sequence_parallel=sequence
    )
    first = groups.dp_rank * count
    micros = [h.fixed_rows(LENGTH, MASKED, tokens, first + i) for i in range(count)]
    losses = [float(training.step(micros)) for _ in range(1)]
    dist.barrier()
    ms = torch.tensor(h.median_ms(lambda: training.step(micros), 2, 1), device="cuda")
    dist.all_reduce(ms, dist.ReduceOp.MAX)
    per_gpu = h.flops(config, micros) / float(ms) * 1e-9 / groups.tp
    memory = torch.cuda.max_memory_allocated()
    training.micro.close()
    return {
        "step_ms": round(float(ms), 1),
        "tflops_per_gpu": round(per_gpu, 1),
        "peak_memory_gb": round(memory / 1e9, 2),
        "loss": round(losses[-1], 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="append JSON lines here")
    parser.add_argument("--eager", action="store_true", help="without CUDA graphs")
    parser.add_argument("--micro-batches", type=int, default=h.MICRO_BATCHES)
    parser.add_argument("--quick", action="store_true", help="only BERT-large")
    options = parser.parse_args()
    env = distributed_environment()
    rank, world = int(env["RANK"]), int(env["WORLD_SIZE"])
    torch.cuda.set_device(int(env["LOCAL_RANK"]))
    dist.init_process_group("nccl", device_id=torch.device("cuda", int(env["LOCAL_RANK"])))
    start = time.time()
    for preset, layers, tokens, layouts in RUNS[:1] if options.quick else RUNS:
        config = resolve_model(ModelConfig(preset=preset, vocab_size=h.VOCAB))
        config = replace(config, num_layers=layers or config.num_layers)
        base = 0.0
        for tp, dp, sequence in layouts:
            if world % (tp * dp):
                continue
            record: dict[str, Any] = {
                "model": preset if not layers else f"{preset}, {layers} layers",
                "gpus": tp * dp, "tp": tp, "dp": dp, "zero_stage": int(dp > 1),
                "sequence_parallel": sequence, "length": LENGTH, "micro_batch_tokens": tokens,
                "micro_batches": options.micro_batches,
            }  # fmt: skip
            try:
                groups = make_groups(tp, dp, rank, world)
                got = measure(
                    config,
                    tokens,
                    groups,
                    sequence,
                    options.micro_batches,
                    not options.eager and dp == 1,
                )
            except (RuntimeError, torch.OutOfMemoryError) as error:
                print(rank, record, "failed:", str(error)[:300], flush=True)
                raise
            base = base or got["tflops_per_gpu"]
            record |= got | {"rate_over_one_gpu": round(got["tflops_per_gpu"] / base, 3)}
            record |= {**h.stamp(), "card": "H100" if "H100" in h.card() else h.card()}
            if rank == 0:
                print(f"{time.time() - start:.0f} s", json.dumps(record), flush=True)
                if options.out:
                    with options.out.open("a") as file:
                        file.write(json.dumps(record) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
