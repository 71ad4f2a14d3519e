"""The grid of learning rates and seeds: trains each pair that its folder lacks, keeps what it scored."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Any, TextIO

from configs import UserError, say
from configs.files import LOCK, lock_folder, publish_text, read_json
from pretrain.convert.hf import refused_writes
from pretrain.downstream.kinds import Choice, Classify, Kind, Regress, Row, Tag
from pretrain.downstream.loading import (
    RANDOM,
    load_tokenizer,
    split_random,
    tokenizer_digest,
    weights_digest,
)
from pretrain.downstream.questions import Question
from pretrain.downstream.results import (
    BEST,
    RESULT,
    Result,
    Results,
    as_markdown,
    pair_name,
    summarise,
)
from pretrain.downstream.tasks import Settings, Task
from pretrain.downstream.training import save_model, train_one

KINDS: dict[str, type[Kind]] = {
    "classify": Classify,
    "regress": Regress,
    "tag": Tag,
    "question": Question,
    "choice": Choice,
}
GRID = "grid.json"


def run_grid(
    task: Task,
    settings: Settings,
    splits: dict[str, list[Row]],
    model: str,
    out: Path,
    layers: str = "",
    save_best: bool = True,
) -> dict[str, Any]:
    """Trains and scores every (lr, seed); returns and writes the table with mean and spread.

    A pair that `out` already holds is not trained again, and a folder of another model, data or
    setting is refused, so that nothing is overwritten or mixed. One at a time in `out`. The table
    is of all results that `out` holds; of them best/ gets the model of the highest score on dev,
    trained again where it was not kept.

    Args:
        model: HF folder, hub name, `random:FOLDER`, or a run or checkpoint, which is exported to
            `out`-model.
        layers: "" trains the whole model; last | sum | concat freezes it under a BiLSTM.
        save_best: False leaves best/ as it is.

    Raises:
        UserError: another grid's results, other files or a running grid in `out`; a model or rows
            that do not fit the task.
    """
    place = _place(model, out)
    identity = _identity(task, settings, splits, place, layers)
    with ExitStack() as held:

        def claim(folder: str) -> None:
            identity["weights"] = weights_digest(folder)
            identity["tokenizer"] = tokenizer_digest(folder)
            held.enter_context(_claim(out, identity))

        if out.exists():  # refused before the work
            _claim(out, identity).close()
        if place != model:
            _export(model, place, claim)
        tokenizer = load_tokenizer(place, settings.max_length)
        kind = KINDS[task.kind](task, settings, tokenizer)
        kind.learn_labels(splits["train"], f"{task.name} train")
        features = {split: kind.encode(rows, split) for split, rows in splits.items()}
        if place == model:  # no earlier: what is refused makes no folder
            claim(place)
        if not _holds_results(out):
            shutil.rmtree(out / "runs", ignore_errors=True)  # of a pair that was cut
        publish_text(out / GRID, json.dumps(identity, indent=2))
        results = Results(out, task)

        def train(lr: float, seed: int, number: str, keep: bool = False) -> Result:
            folder, what = results.folder(lr, seed), f"{pair_name(task, lr, seed)}, {number}"
            best = results.best()
            trainer, result = train_one(
                kind, place, splits, features, folder, lr, seed, layers, what
            )
            as_good = best is None or results.score(result) >= results.score(best)
            if save_best and not result["diverged"] and (keep or as_good):
                with refused_writes(out / BEST):
                    save_model(trainer, kind, result, out / BEST)
            publish_text(folder / RESULT, json.dumps(result, indent=2))
            return result

        pairs = list(product(settings.lrs, settings.seeds))
        for number, (lr, seed) in enumerate(pairs, 1):
            result = results.find(lr, seed) or train(lr, seed, f"run {number} of {len(pairs)}")
            scores = ", ".join(f"{name} {result[name]:.2f}" for name in task.metrics)
            note = ": DIVERGED, its model answers NaN" if result["diverged"] else ""
            say(f"{pair_name(task, lr, seed)}: {scores} ({result['seconds']:.0f} s){note}")
        if save_best and not results.best_is_kept() and (best := results.best()):
            say(
                f"the best, {pair_name(task, best['lr'], best['seed'])}, was not kept: trained again"
            )
            train(best["lr"], best["seed"], "again", keep=True)
        _say_kept(results)
        table = summarise(task, results.all())
        publish_text(out / "results.json", json.dumps(table, indent=2))
        (out / "table.md").write_text(as_markdown(task, table), encoding="utf-8")
    return table


def _say_kept(results: Results) -> None:
    """Which model best/ holds: after a grid that kept none it may be a worse one than the table's."""
    folder, kept = results.out / BEST, results.kept()
    if not folder.is_dir():
        return
    name = "an unknown pair" if kept is None else pair_name(results.task, kept["lr"], kept["seed"])
    if results.best_is_kept():
        say(f"{folder}: the model of {name}, the best on dev")
    else:
        say(f"{folder}: the model of {name}, not the best, which was not kept")


def _identity(
    task: Task, settings: Settings, splits: dict[str, list[Row]], model: str, layers: str
) -> dict[str, Any]:
    import hashlib

    fixed = {k: v for k, v in asdict(settings).items() if k not in ("lrs", "seeds")}
    data = hashlib.sha256(json.dumps(splits, sort_keys=True, default=str).encode()).hexdigest()[:16]
    return {
        "task": task.name,
        "model": split_random(model)[0],
        "data": data,
        "layers": layers,
        "columns": [list(names) for names in (task.first, task.second, task.label)],
        **fixed,
    }


def _place(model: str, out: Path) -> str:
    """An HF folder or hub name as it is; of a run or checkpoint, where its export goes."""
    name, random = split_random(model)
    if not Path(name).exists() or (Path(name) / "config.json").is_file():
        return model
    exported = str(out.with_name(out.name + "-model"))
    return RANDOM + exported if random else exported


def _export(model: str, place: str, claim: Callable[[str], None]) -> None:
    """A run or checkpoint to `place`, once the results' folder is claimed for its weights. Always anew:
    an export left from another checkpoint would be scored in this one's name (B53)."""
    from pretrain.convert.export import export

    run, random = split_random(model)
    target, _ = split_random(place)
    export(
        Path(run),
        Path(target),
        accept=lambda fresh: claim(f"{RANDOM * random}{fresh}"),
        elsewhere="name another --out (the run is exported to OUT-model)",
    )


def _claim(out: Path, identity: dict[str, Any]) -> TextIO:
    """`out` as this grid's own; other processes stay out of it until the file returned is closed."""
    _refuse_others(out, identity)
    held = lock_folder(out, "fine-tuning", "name another --out")
    _refuse_others(out, identity)  # who was faster may have left other results
    return held


def _refuse_others(out: Path, identity: dict[str, Any]) -> None:
    if out.exists() and not out.is_dir():
        raise UserError(f"{out}: a file, not a folder", "name another --out")
    if (out / GRID).is_file():
        before = read_json(out / GRID, "name another --out")
        # What a model is called decides nothing: its digests do.
        changed = [k for k in identity if k != "model" and before.get(k) != identity[k]]
        if changed and _holds_results(out):
            old, new = (
                f"{grid.get(changed[0])!r}"
                + (f" of {grid.get('model')}" if changed[0] in ("weights", "tokenizer") else "")
                for grid in (before, identity)
            )
            raise UserError(
                f"{out}: holds results with another {changed[0]} ({old}, now {new})",
                "name another --out"
                + (", or the step-... folder they are of" if changed[0] == "weights" else ""),
            )
    elif out.exists() and any(path.name != LOCK for path in out.iterdir()):
        raise UserError(f"{out}: not empty and no fine-tuning folder", "name another --out")


def _holds_results(out: Path) -> bool:
    return (out / BEST).exists() or any((out / "runs").glob(f"*/{RESULT}"))
