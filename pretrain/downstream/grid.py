"""The grid of learning rates and seeds: trains each on transformers' Trainer, keeps what it scored."""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import numpy as np

from configs import UserError, make_folder, say
from configs.files import LOCK, lock_folder, publish_text, read_json
from pretrain.convert.hf import refused_writes
from pretrain.downstream import metrics
from pretrain.downstream.kinds import LABELLED, Choice, Classify, Feature, Kind, Regress, Row, Tag
from pretrain.downstream.loading import (
    RANDOM,
    load_for_task,
    load_tokenizer,
    split_random,
    tokenizer_digest,
    weights_digest,
)
from pretrain.downstream.questions import Question
from pretrain.downstream.tasks import Settings, Task

if TYPE_CHECKING:
    from transformers import Trainer

KINDS: dict[str, type[Kind]] = {
    "classify": Classify,
    "regress": Regress,
    "tag": Tag,
    "question": Question,
    "choice": Choice,
}
GRID = "grid.json"
_ASIDE = ("word_starts", "offsets", "example")  # kept for scoring, not for the model


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
    setting is refused, so that nothing is overwritten or mixed. One at a time in `out`.

    Args:
        model: HF folder, hub name, `random:FOLDER`, or a run or checkpoint, which is exported to
            `out`-model.
        layers: "" trains the whole model; last | sum | concat freezes it under a BiLSTM.

    Raises:
        UserError: another grid's results, other files or a running grid in `out`; a model or rows
            that do not fit the task.
    """
    results = []
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
        publish_text(out / GRID, json.dumps(identity, indent=2))
        best_seen = _best_so_far(out, task.metrics[0])
        for lr, seed in product(settings.lrs, settings.seeds):
            folder = out / "runs" / f"lr{lr:g}-seed{seed}"
            done = folder / "result.json"
            if not done.is_file():
                trainer, result = _train_one(
                    kind, place, splits, features, folder, lr, seed, layers
                )
                if save_best and not result["diverged"] and result[task.metrics[0]] > best_seen:
                    with refused_writes(out / "best"):
                        _save_best(trainer, kind, out / "best")
                publish_text(done, json.dumps(result, indent=2))
            numbers = dict.fromkeys(("lr", "seconds", *task.metrics), int | float)
            shape = {**numbers, "diverged": bool}
            result = read_json(done, "remove it, and this rate and seed are trained again", shape)
            diverged = result["diverged"]
            if not diverged:
                best_seen = max(best_seen, result[task.metrics[0]])
            results.append(result)
            scores = ", ".join(f"{name} {result[name]:.2f}" for name in task.metrics)
            note = ": DIVERGED, its model answers NaN" if diverged else ""
            say(f"{task.name} lr {lr:g} seed {seed}: {scores} ({result['seconds']:.0f} s){note}")
        table = summarise(task, results)
        publish_text(out / "results.json", json.dumps(table, indent=2))
        (out / "table.md").write_text(as_markdown(task, table), encoding="utf-8")
    return table


def summarise(task: Task, results: list[dict[str, Any]]) -> dict[str, Any]:
    """Mean and spread (sample standard deviation) over seeds for every lr; `best` by the mean, among
    the rates at which the fewest seeds diverged."""
    rows = []
    for lr in dict.fromkeys(result["lr"] for result in results):
        of_lr = [result for result in results if result["lr"] == lr]
        diverged = sum(result["diverged"] for result in of_lr)
        row: dict[str, Any] = {"lr": lr, "seeds": len(of_lr), "diverged": diverged}
        for name in task.metrics:
            row[name], row[f"{name}_spread"] = metrics.mean_and_spread([r[name] for r in of_lr])
        rows.append(row)
    best = max(rows, key=lambda row: (-row["diverged"], row[task.metrics[0]]))
    return {"task": task.name, "metrics": list(task.metrics), "rows": rows, "best": best}


def as_markdown(task: Task, table: dict[str, Any]) -> str:
    """The table as Markdown, the best learning rate in bold."""
    lines = [
        f"| {task.name}: lr | seeds | " + " | ".join(task.metrics) + " |",
        "| --- | --- |" + " --- |" * len(task.metrics),
    ]
    for row in table["rows"]:
        bold = "**" if row is table["best"] or row == table["best"] else ""
        scores = " | ".join(_score(row, name) for name in task.metrics)
        lines.append(f"| {bold}{row['lr']:g}{bold} | {row['seeds']} | {scores} |")
    return "\n".join(lines) + "\n"


def _score(row: Mapping[str, Any], name: str) -> str:
    spread = row[f"{name}_spread"]
    return f"{row[name]:.2f}" + ("" if spread is None else f" ± {spread:.2f}")


def _train_one(
    kind: Kind,
    model: str,
    splits: dict[str, list[Row]],
    features: dict[str, list[Feature]],
    folder: Path,
    lr: float,
    seed: int,
    layers: str,
) -> tuple[Trainer, dict[str, Any]]:
    import torch
    from transformers import Trainer, set_seed
    from transformers.utils import logging

    logging.set_verbosity_error()  # load_for_task says what was loaded, and stops if it must
    logging.disable_progress_bar()
    set_seed(seed)
    net = _build(kind, model, layers)
    given = {
        split: [{k: v for k, v in f.items() if k not in _ASIDE} for f in features[split]]
        for split in features
    }
    start = time.monotonic()
    trainer = Trainer(
        model=net,
        args=_arguments(kind.settings, folder, lr, seed, torch.cuda.is_available()),
        train_dataset=given["train"],
        data_collator=kind.collator(),
        processing_class=kind.tokenizer,
    )
    trainer.train()
    result: dict[str, Any] = {"task": kind.task.name, "lr": lr, "seed": seed, "diverged": False}
    make_folder(folder)
    for split in ["dev", *(s for s in given if s not in LABELLED)]:
        # Labels stay at home: logits are scored here, with rows and windows put together again.
        blind = [
            {**{k: v for k, v in f.items() if k != "labels"}, **kind.blind} for f in given[split]
        ]
        output = trainer.predict(blind)  # type: ignore[arg-type]
        parts = (
            output.predictions if isinstance(output.predictions, tuple) else [output.predictions]
        )
        result["diverged"] |= not all(np.isfinite(part).all() for part in parts)
        scores, predictions = kind.score(splits[split], features[split], output.predictions, split)
        result |= scores if split == "dev" else {f"{split}_{k}": v for k, v in scores.items()}
        _write_lines(folder / f"predictions-{split}.jsonl", predictions)
    result["seconds"] = round(time.monotonic() - start, 2)
    shutil.rmtree(folder / "trainer", ignore_errors=True)
    return trainer, result


def _build(kind: Kind, model: str, layers: str) -> Any:
    if not layers:
        rates = ("hidden_dropout_prob", "attention_probs_dropout_prob")
        dropout = kind.settings.dropout
        changed = {} if dropout is None else dict.fromkeys(rates, dropout)
        return load_for_task(kind.auto_class(), model, **kind.model_settings(), **changed)
    from transformers import AutoModel

    from pretrain.downstream.features import FrozenTagger

    return FrozenTagger(load_for_task(AutoModel, model), layers, len(kind.labels))


def _arguments(settings: Settings, folder: Path, lr: float, seed: int, gpu: bool) -> Any:
    import torch
    from transformers import TrainingArguments

    arguments = TrainingArguments(
        output_dir=str(folder / "trainer"),
        learning_rate=lr,
        seed=seed,
        num_train_epochs=settings.epochs,
        per_device_train_batch_size=settings.batch,
        per_device_eval_batch_size=128,
        warmup_steps=settings.warmup,  # a float below 1 is a share of the steps
        weight_decay=settings.weight_decay,
        lr_scheduler_type="linear",
        bf16=gpu and torch.cuda.is_bf16_supported(),
        use_cpu=not gpu,
        save_strategy="no",
        eval_strategy="no",
        logging_steps=50,
        report_to="none",
        disable_tqdm=not sys.stderr.isatty(),
        remove_unused_columns=False,
        dataloader_pin_memory=gpu,
    )
    if arguments.n_gpu > 1:  # each would get a batch of its own: another batch than was asked for
        arguments._n_gpu = 1
    return arguments


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
    export(Path(run), Path(target), accept=lambda fresh: claim(f"{RANDOM * random}{fresh}"))


def _claim(out: Path, identity: dict[str, Any]) -> TextIO:
    """`out` as this grid's own; other processes stay out of it until the file returned is closed."""
    _refuse_others(out, identity)
    held = lock_folder(out, "fine-tuning", "name another --out")
    _refuse_others(out, identity)  # who was faster may have left other results
    return held


def _refuse_others(out: Path, identity: dict[str, Any]) -> None:
    if (out / GRID).is_file():
        before = read_json(out / GRID, "name another --out")
        changed = [k for k in identity if before.get(k) != identity[k]]
        if changed:
            raise UserError(
                f"{out}: holds results with another {changed[0]}"
                f" ({before.get(changed[0])!r}, now {identity[changed[0]]!r})",
                "name another --out"
                + (", or the step-... folder they are of" if changed[0] == "weights" else ""),
            )
    elif out.exists() and any(path.name != LOCK for path in out.iterdir()):
        raise UserError(f"{out}: not empty and no fine-tuning folder", "name another --out")


def _best_so_far(out: Path, metric: str) -> float:
    """The score of best/: of all rates and seeds that this folder has seen, not only of those asked for
    this time; minus infinity without one."""
    files = (out / "runs").glob("*/result.json") if (out / "best").is_dir() else ()
    shape = {metric: int | float, "diverged": bool}
    results = [read_json(file, "remove it", shape) for file in files]
    good = [result[metric] for result in results if not result["diverged"]]
    return max(good, default=-float("inf"))


def _save_best(trainer: Trainer, kind: Kind, folder: Path) -> None:
    fresh = folder.with_name(f".{folder.name}.new")
    shutil.rmtree(fresh, ignore_errors=True)
    model: Any = trainer.model
    if hasattr(model, "save_pretrained"):
        model.save_pretrained(fresh)
    else:  # a tagger on a frozen encoder: what was trained, without the encoder
        from safetensors.torch import save_file

        fresh.mkdir(parents=True)
        state = {
            k: v.contiguous() for k, v in model.state_dict().items() if not k.startswith("encoder.")
        }
        about = {"format": "pt", "labels": json.dumps(kind.labels), "layers": model.layers}
        save_file(state, fresh / "tagger.safetensors", metadata=about)
    kind.tokenizer.save_pretrained(str(fresh))
    shutil.rmtree(folder, ignore_errors=True)
    fresh.rename(folder)


def _write_lines(file: Path, values: list[Any]) -> None:
    with file.open("w", encoding="utf-8") as handle:
        handle.writelines(json.dumps(value, ensure_ascii=False) + "\n" for value in values)
