"""Fine-tuning of several models on the downstream sets, as many at a time as the cards take.

The same settings for every model: three seeds, a grid of learning rates of which the best on dev is
taken (1810.04805, appendix A.3), BERT's dropout. Jobs go by rate, then by seed, the models side by
side, so that what is finished when the time is up is a whole table with fewer rates or seeds. A job
leaves OUT/MODEL/TASK/RATE-SEED/results.json; `collect` reads what there is.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import time
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import replace
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from configs import say
from configs.cli import run_cli

# Above the published 5e-5 to 2e-5: models this small and this raw take more.
RATES = (1e-4, 2e-4, 5e-5)
# task -> folder below DATA/downstream, and what is changed of the published settings: more passes
# over the small sets; SST-2 has 67,000 sentences: one pass in larger batches. The longest first.
TASKS: dict[str, tuple[str, dict[str, Any]]] = {
    "rt-polarity": ("rt-polarity", {"max_length": 64}),
    "sts-b": ("glue/STS-B", {"epochs": 5.0}),
    "cola": ("glue/CoLA", {"max_length": 48}),
    "sst-2": ("glue/SST-2", {"epochs": 1.0, "batch": 128, "max_length": 64}),
    "mrpc": ("glue/MRPC", {"epochs": 5.0}),
    "wnut-17": ("wnut17", {"epochs": 5.0, "max_length": 96}),
    "rte": ("glue/RTE", {"epochs": 5.0}),
}


def score_of(task: str, best: dict[str, Any]) -> float:
    """One figure a task, in percent, as GLUE takes it: MRPC is the mean of F1 and accuracy."""
    if task == "mrpc":
        return (float(best["f1"]) + float(best["accuracy"])) / 2
    names = {"cola": "matthews", "sts-b": "spearman", "wnut-17": "f1"}
    return float(best[names.get(task, "accuracy")])


def fine_tune(
    model: str, task_name: str, rate: float, seed: int, data: str, out: str, quick: bool
) -> str:
    """One job, in a worker process. Returns "" or what went wrong."""
    from pretrain.downstream.grid import run_grid
    from pretrain.downstream.readers import read_splits
    from pretrain.downstream.tasks import find_task

    folder, changes = TASKS[task_name]
    task = find_task(task_name)
    settings = replace(task.settings, **changes, lrs=(rate,), seeds=(seed,))
    splits = read_splits(task, str(Path(data) / "downstream" / folder), {}, False)
    splits = {name: rows for name, rows in splits.items() if name in ("train", "dev")}
    if quick:  # a rehearsal: does everything run?
        splits = {name: rows[::97] for name, rows in splits.items()}
    try:
        run_grid(task, settings, splits, model, Path(out), save_best=False)
    except Exception as error:  # the other jobs go on
        return f"{type(error).__name__}: {error}"
    return ""


def _start(cards: Any) -> None:
    os.environ["CUDA_VISIBLE_DEVICES"] = cards.get()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    os.environ["OMP_NUM_THREADS"] = "1"


def run_jobs(
    models: dict[str, str],
    seeds: dict[str, int],
    data: str,
    out: Path,
    cards: list[str],
    workers: int,
    until: float,
    quick: bool = False,
    rates: Sequence[float] = RATES,
    tasks: Sequence[str] = tuple(TASKS),
) -> None:
    """Fine-tunes every model on every task, at every rate, with every seed.

    Args:
        models: name -> folder or random:FOLDER. seeds: name -> how many.
        cards: GPU numbers, "" for none. workers: processes in all. until: the time.time() at which the
            rest is given up.
    """
    jobs = [
        (name, task, rate, seed)
        for rate in rates
        for seed in range(1, max(seeds.values()) + 1)
        for task in tasks
        for name in models
        if seed <= seeds[name]
    ]
    start = time.monotonic()
    context = multiprocessing.get_context("spawn")
    given = context.Manager().Queue()
    for number in range(workers):
        given.put(cards[number % len(cards)])
    pool = ProcessPoolExecutor(workers, context, _start, (given,))
    waiting: dict[Future[str], str] = {}
    for name, task, rate, seed in jobs:
        where = str(out / name / task / f"{rate:g}-{seed}")
        future = pool.submit(fine_tune, models[name], task, rate, seed, data, where, quick)
        waiting[future] = f"{name} {task} {rate:g} seed {seed}"
    while waiting and (left := until - time.time()) > 0:
        done, _ = wait(waiting, timeout=left, return_when=FIRST_COMPLETED)
        for future in done:
            label = waiting.pop(future)
            error = future.exception() or future.result()
            say(f"{time.monotonic() - start:.0f} s: {label}{f': {error}' if error else ''}")
    if waiting:
        say(f"time is up; not done: {', '.join(waiting.values())}")
        for process in list((pool._processes or {}).values()):
            process.terminate()
    pool.shutdown(wait=not waiting, cancel_futures=True)


def collect(out: Path) -> dict[str, dict[str, Any]]:
    """model -> task -> {mean, spread, seeds, rate}, in percent, and `mean` over tasks that all have.

    The rate is the model's best on dev (mean over seeds), of those rates that all pretrained models
    have finished with equally many seeds; random weights choose of what they have.
    """
    found: dict[str, dict[str, dict[float, list[float]]]] = {}
    for file in sorted(out.glob("*/*/*/results.json")):
        model, task = file.parts[-4], file.parts[-3]
        best = json.loads(file.read_text(encoding="utf-8"))["best"]
        by_rate = found.setdefault(model, {}).setdefault(task, {})
        by_rate.setdefault(best["lr"], []).append(score_of(task, best))
    result: dict[str, dict[str, Any]] = {}
    for model, tasks in found.items():
        peers = [model] if model == "random" else [name for name in found if name != "random"]
        for task, by_rate in tasks.items():
            full = max(len(scores) for scores in by_rate.values())
            shared = {
                rate: scores
                for rate, scores in by_rate.items()
                if all(len(found[p].get(task, {}).get(rate, ())) == full for p in peers)
            }
            rate, scores = max((shared or by_rate).items(), key=lambda item: mean(item[1]))
            result.setdefault(model, {})[task] = {
                "mean": mean(scores),
                "spread": stdev(scores) if len(scores) > 1 else 0.0,
                "seeds": len(scores),
                "rate": rate,
            }
    common = set(TASKS).intersection(*(set(tasks) for tasks in result.values()))
    for table in result.values() if common else ():
        table["mean"] = mean(table[task]["mean"] for task in common)
        table["tasks in the mean"] = sorted(common)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.five_minute_finetune")
    parser.add_argument("models", nargs="+", help="NAME=FOLDER:SEEDS, FOLDER may be random:FOLDER")
    parser.add_argument("--data", required=True)
    parser.add_argument("--out", required=True)
    parser.add_argument("--cards", default="", help="e.g. 0,1")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--until", type=float, default=1e12, help="seconds since 1970")
    parser.add_argument("--rates", default=",".join(f"{rate:g}" for rate in RATES))
    parser.add_argument("--tasks", default=",".join(TASKS))
    parser.add_argument("--quick", action="store_true", help="a rehearsal on 1% of the data")
    options = parser.parse_args()
    models, seeds = {}, {}
    for text in options.models:
        name, _, rest = text.partition("=")
        models[name], _, count = rest.rpartition(":")
        seeds[name] = int(count)
    out = Path(options.out)
    run_jobs(
        *(models, seeds, options.data, out, options.cards.split(",")),
        *(options.workers, options.until, options.quick),
        rates=[float(rate) for rate in options.rates.split(",")],
        tasks=options.tasks.split(","),
    )


if __name__ == "__main__":
    run_cli(main)
