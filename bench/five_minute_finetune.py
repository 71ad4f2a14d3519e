"""Fine-tuning of several models on the downstream sets, as many at a time as the cards take.

The same settings and the same rule for every model: the first seed tries the learning rates, and
the other seeds are trained at the one of them that scored best on dev (1810.04805, appendix A.3);
BERT's dropout. The models go side by side, all first seeds before the second ones, random weights
last, so that what is finished when the time is up can be compared. With --long, the small sets of
pairs are then trained longer as well, at the rate already chosen: three epochs of so few examples
may end before a model has begun to compare the two sentences (2006.04884 takes 20 epochs). They
are told apart and are not in the mean. A job leaves OUT/MODEL/TASK/RATE-SEED/results.json;
`collect` reads what there is.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import json
import math
import multiprocessing
import os
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import replace
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from configs import say
from configs.cli import run_cli

# Above the published 5e-5 to 2e-5: models this small and this raw take more.
RATES = (1e-4, 2e-4)
# task -> folder below DATA/downstream, and what is changed of the published settings: lengths that
# cut no more than a sentence in a thousand; SST-2 has 67,000 sentences: one pass in larger batches.
# The longest first.
TASKS: dict[str, tuple[str, dict[str, Any]]] = {
    "rt-polarity": ("rt-polarity", {"max_length": 64}),
    "sts-b": ("glue/STS-B", {}),
    "cola": ("glue/CoLA", {"max_length": 48}),
    "sst-2": ("glue/SST-2", {"epochs": 1.0, "batch": 128, "max_length": 64}),
    "mrpc": ("glue/MRPC", {}),
    "wnut-17": ("wnut17", {"max_length": 96}),
    "rte": ("glue/RTE", {}),
}
# The sets that --long trains again, as TASK-long.
LONG = ("sts-b", "mrpc", "rte")
LONG_EPOCHS = 10.0


def score_of(task: str, best: dict[str, Any]) -> float:
    """One figure a task, in percent, as GLUE takes it: MRPC is the mean of F1 and accuracy."""
    task = _of(task)
    if task == "mrpc":
        return (float(best["f1"]) + float(best["accuracy"])) / 2
    names = {"cola": "matthews", "sts-b": "spearman", "wnut-17": "f1"}
    return float(best[names.get(task, "accuracy")])


def _of(task: str) -> str:
    """sts-b of sts-b-long."""
    return task.removesuffix("-long")


def fine_tune(
    model: str, task_name: str, rate: float, seed: int, data: str, out: str, quick: bool
) -> str:
    """One job, in a worker process. Returns "" or what went wrong."""
    from pretrain.downstream.grid import run_grid
    from pretrain.downstream.splits import read_splits
    from pretrain.downstream.tasks import find_task

    folder, changes = TASKS[_of(task_name)]
    task = find_task(_of(task_name))
    if task_name.endswith("-long"):
        changes = changes | {"epochs": LONG_EPOCHS}
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
    until: float = math.inf,
    quick: bool = False,
    rates: Sequence[float] = RATES,
    tasks: Sequence[str] = tuple(TASKS),
    long: bool = False,
) -> None:
    """Fine-tunes every model on every task: the first seed at every rate, the others at the best.

    Args:
        models: name -> folder or random:FOLDER. seeds: name -> how many.
        cards: GPU numbers, "" for none. workers: processes in all. until: the time.time() at which the
            rest is given up. long: pretrained models also take the sets of LONG for longer.
    """
    start = time.monotonic()
    context = multiprocessing.get_context("spawn")
    given = context.Manager().Queue()
    for number in range(workers):
        given.put(cards[number % len(cards)])
    pool = ProcessPoolExecutor(workers, context, _start, (given,))
    running: dict[Future[str], tuple[str, str, float, int]] = {}
    # Waiting: a heap by seed; behind the last one of the pretrained models, first seeds before
    # second ones again, the long runs and random weights.
    behind = max(seeds.values(), default=0)
    later: list[tuple[float, int, tuple[str, str, float, int]]] = []
    numbers = itertools.count()

    def add(name: str, task: str, rate: float, seed: int) -> None:
        random = models[name].startswith("random:")
        turn = seed + (behind + 0.5 * random if random or task.endswith("-long") else 0)
        heapq.heappush(later, (turn, next(numbers), (name, task, rate, seed)))

    for task in tasks:
        for rate in rates:
            for name in models:
                add(name, task, rate, 1)
    while (later or running) and (left := until - time.time()) > 0:
        while later and len(running) < workers:
            job = heapq.heappop(later)[-1]
            name, task, rate, seed = job
            where = str(out / name / task / f"{rate:g}-{seed}")
            future = pool.submit(fine_tune, models[name], task, rate, seed, data, where, quick)
            running[future] = job
        timeout = left if math.isfinite(left) else None
        done, _ = wait(running, timeout=timeout, return_when=FIRST_COMPLETED)
        for future in done:
            name, task, rate, seed = running.pop(future)
            error = future.exception() or future.result()
            score = _scores(out / name / task).get(rate, {}).get(seed, float("nan"))
            told = f": {error}" if error else f": {score:.2f}"
            say(f"{time.monotonic() - start:.0f} s: {name} {task} {rate:g} seed {seed}{told}")
            others = [j for j in running.values() if j[:2] == (name, task) and j[3] == 1]
            queued = [j for *_, j in later if j[:2] == (name, task) and j[3] == 1]
            if seed > 1 or others or queued or task not in TASKS:
                continue
            if found := _scores(out / name / task):
                best = _best(found, found)
                for more in range(2, seeds[name] + 1):
                    add(name, task, best, more)
                if long and task in LONG and not models[name].startswith("random:"):
                    for number in range(1, seeds[name] + 1):
                        add(name, f"{task}-long", best, number)
    if left_over := [*running.values(), *(job for *_, job in later)]:
        say("time is up; not done: " + ", ".join(f"{n} {t} {s}" for n, t, _, s in left_over))
        for process in list((pool._processes or {}).values()):
            process.terminate()
    pool.shutdown(wait=not running, cancel_futures=True)


def _scores(folder: Path) -> dict[float, dict[int, float]]:
    """rate -> seed -> score of one model on one task."""
    found: dict[float, dict[int, float]] = {}
    for file in sorted(folder.glob("*/results.json")):
        best = json.loads(file.read_text(encoding="utf-8"))["best"]
        seed = int(file.parent.name.rpartition("-")[2])
        found.setdefault(best["lr"], {})[seed] = score_of(folder.name, best)
    return found


def _best(found: dict[float, dict[int, float]], among: Iterable[float]) -> float:
    """The rate whose first seed scored best; the lower one of equals."""
    return max(sorted(among), key=lambda rate: found.get(rate, {}).get(1, -math.inf))


def collect(*outs: Path) -> dict[str, dict[str, Any]]:
    """model -> task -> {mean, spread, seeds, rate}, in percent, and `mean` over the tasks that all
    pretrained models have (random weights only if they have them, too). outs: of `run_jobs`.

    The rate is the model's best of the first seed, among those that all pretrained models have
    finished (of a long set the one it was trained at); the seeds are those that all of these have
    at theirs.
    """
    found: dict[str, dict[str, dict[float, dict[int, float]]]] = {}
    for folder in (folder for out in outs for folder in sorted(out.glob("*/*"))):
        if scores := _scores(folder):
            found.setdefault(folder.parent.name, {})[folder.name] = scores
    result: dict[str, dict[str, Any]] = {}
    for model, tasks in found.items():
        peers = [model] if model == "random" else [name for name in found if name != "random"]
        for task, by_rate in tasks.items():
            of_peers = [found[peer][task] for peer in peers if task in found[peer]]
            shared = {r for r in by_rate if all(1 in scores.get(r, {}) for scores in of_peers)}
            if task.endswith("-long"):
                shared = set().union(*of_peers)
            if not shared:
                continue
            chosen = [scores[_best(scores, shared & set(scores))] for scores in of_peers]
            seeds = sorted(set.intersection(*(set(scores) for scores in chosen)))
            if not seeds:
                continue
            rate = _best(by_rate, shared & set(by_rate))
            values = [by_rate[rate][seed] for seed in seeds]
            result.setdefault(model, {})[task] = {
                "mean": mean(values),
                "spread": stdev(values) if len(values) > 1 else 0.0,
                "seeds": len(values),
                "rate": rate,
            }
    common = set(TASKS).intersection(*(set(t) for name, t in result.items() if name != "random"))
    for table in [t for t in result.values() if common and common <= set(t)]:
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
    parser.add_argument("--until", type=float, default=math.inf, help="seconds since 1970")
    parser.add_argument("--rates", default=",".join(f"{rate:g}" for rate in RATES))
    parser.add_argument("--tasks", default=",".join(TASKS))
    parser.add_argument("--long", action="store_true", help=f"{', '.join(LONG)} for longer as well")
    parser.add_argument("--quick", action="store_true", help="a rehearsal on 1%% of the data")
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
        long=options.long,
    )


if __name__ == "__main__":
    run_cli(main)
