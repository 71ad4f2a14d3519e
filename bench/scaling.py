"""Data and tensor parallelism on the GPUs of one host, weak scaling, dense rows of length 128.

    torchrun --nproc-per-node 4 -m bench.scaling [MODEL ...] [--out FILE]

One world measures all layouts that fit it, one after the other; a layout of fewer GPUs than the
world runs on all of them side by side, so that every row is measured on equally busy cards. A step
is 8 micro-batches and one update. --out appends a JSON line a layout, at once, as the planner reads
them (bench/results/measured.jsonl). A layout that fails is reported and the others go on.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from bench import harness as h
from cluster.environment import distributed_environment
from configs.model import ModelConfig, resolve_model
from pretrain.parallel.groups import SINGLE, Groups
from pretrain.parallel.peers import Peers

LENGTH, MASKED = 128, 20
REPEATS = 3
ONE = (1, 1, None)
# preset: layers (0 = all), tokens a micro-batch, [(tp, dp, parallel.sequence_parallel)]. The first layout
# is the base of the others' shares; where it comes again it shows what the clocks did meanwhile.
RUNS: dict[str, tuple[int, int, list[tuple[int, int, bool | None]]]] = {
    "bert-large": (0, 32768, [ONE, (1, 2, None), (1, 4, None), (2, 1, None), ONE]),
    "megatron-1.3b": (0, 16384, [ONE, (2, 1, None), (2, 1, False), (2, 2, None)]),
    "megatron-3.9b": (12, 16384, [ONE, (4, 1, None), (4, 1, False)]),
}


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
            options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=kind == "tp")
            group = dist.new_group(members, pg_options=options)
            if rank in members:
                mine[kind] = group
    inside = rank % (tp * dp)
    return Groups(tp, dp, inside % tp, inside // tp, mine["tp"], mine["dp"])


def measure(
    config: ModelConfig,
    tokens: int,
    groups: Groups,
    sequence: bool | None,
    options: argparse.Namespace,
) -> dict[str, Any]:
    """Figures of this rank's part; step_ms is its own time."""
    torch.cuda.reset_peak_memory_stats()
    training = h.Training(
        config,
        "bf16",
        recorded=not options.eager,
        groups=groups,
        sequence_parallel=sequence,
        tokens=tokens,
    )
    try:
        count = options.micro_batches
        first = groups.dp_rank * count
        micros = [h.fixed_rows(LENGTH, MASKED, tokens, first + i) for i in range(count)]
        loss = float(training.step(micros))
        ms = h.median_ms(lambda: training.step(micros), REPEATS, 1)
        memory = torch.cuda.max_memory_allocated()
        engine = training.engine
        update = h.median_ms(lambda: engine.step(1e-4), REPEATS, 1)
        lamb = h.median_ms(
            lambda: engine.lamb.step(engine.reduced, 1e-4, 1.0, engine.low), REPEATS, 1
        )
        return {
            "step_ms": round(ms, 1),
            "tflops_per_gpu": round(h.flops(config, micros) / ms * 1e-9 / groups.tp, 1),
            "peak_memory_gb": round(memory / 1e9, 2),
            "update_ms": round(update, 2),
            "lamb_ms": round(lamb, 2),
            "loss": round(loss, 4),
            "sequence_parallel": training.exchange is not None,
            "peers": isinstance(training.exchange, Peers),
        }
    finally:
        training.micro.close()


def attempt(*arguments: Any) -> dict[str, Any]:
    """`measure`, or why it failed, and the memory handed back either way."""
    try:
        return measure(*arguments)
    except (RuntimeError, torch.OutOfMemoryError) as error:
        return {"failed": str(error).splitlines()[0][:300]}
    finally:
        gc.collect()  # engine, parameters and their hooks hold each other
        torch.cuda.empty_cache()


def together(results: list[dict[str, Any]]) -> dict[str, Any]:
    """One layout's figures from all ranks': the slowest card decides, the others are told, too."""
    failed = [f"rank {i}: {r['failed']}" for i, r in enumerate(results) if "failed" in r]
    if failed:
        return {"failed": failed[0]}
    slowest = max(results, key=lambda r: r["step_ms"])
    out = dict(slowest)
    for key in ("peak_memory_gb", "update_ms", "lamb_ms"):
        out[key] = max(r[key] for r in results)
    mean = sum(r["tflops_per_gpu"] for r in results) / len(results)
    return out | {
        "mean_tflops_per_gpu": round(mean, 1),
        "step_ms_of_cards": [r["step_ms"] for r in results],
        "loss": results[0]["loss"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("models", nargs="*", metavar="MODEL", help=f"of {', '.join(RUNS)}")
    parser.add_argument("--out", type=Path, help="append JSON lines here")
    parser.add_argument("--eager", action="store_true", help="without CUDA graphs")
    parser.add_argument("--micro-batches", type=int, default=h.MICRO_BATCHES)
    options = parser.parse_args()
    unknown = set(options.models) - set(RUNS)
    if unknown:
        parser.error(f"{', '.join(sorted(unknown))}: not one of {', '.join(RUNS)}")
    if not torch.cuda.is_available():
        raise SystemExit("bench.scaling needs CUDA GPUs, one a process")
    env = distributed_environment()
    rank, world = int(env["RANK"]), int(env["WORLD_SIZE"])
    torch.cuda.set_device(int(env["LOCAL_RANK"]))
    dist.init_process_group(
        "nccl",
        device_id=torch.device("cuda", int(env["LOCAL_RANK"])),
        timeout=timedelta(seconds=60),
    )
    talk = dist.new_group(backend="gloo")  # the ranks agree even when a GPU is out of memory
    start = time.time()
    for preset in options.models or RUNS:
        layers, tokens, layouts = RUNS[preset]
        config = resolve_model(ModelConfig(preset=preset, vocab_size=h.VOCAB))
        config = replace(config, num_layers=layers or config.num_layers)
        base: dict[str, Any] = {}
        for tp, dp, sequence in layouts:
            if world % (tp * dp):
                continue
            record: dict[str, Any] = {
                "model": {"preset": preset, "num_layers": layers} if layers else preset,
                "card": next((name for name in ("H100", "H200") if name in h.card()), h.card()),
                "gpus": tp * dp, "tp": tp, "dp": dp, "zero_stage": int(dp > 1),
                "length": LENGTH, "micro_batch_tokens": tokens,
                "micro_batches": options.micro_batches,
            }  # fmt: skip
            groups = make_groups(tp, dp, rank, world)
            results: list[Any] = [None] * world
            got = attempt(config, tokens, groups, sequence, options)
            dist.all_gather_object(results, got, group=talk)
            record |= together(results)
            if "failed" not in record:
                base = base or record
                for share, rate in (
                    ("rate_over_one_gpu", "tflops_per_gpu"),
                    ("mean_rate_over_one_gpu", "mean_tflops_per_gpu"),
                ):
                    record[share] = round(record[rate] / base[rate], 3)
            record |= {"commit": h.commit(), "from": "bench.scaling"}
            if rank == 0:
                print(f"{time.time() - start:.0f} s", json.dumps(record), flush=True)
                if options.out and "failed" not in record:
                    with options.out.open("a") as file:
                        file.write(json.dumps(record) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
