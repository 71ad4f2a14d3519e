"""`python -m pretrain finetune TASK`: the grid of learning rates and seeds on one downstream task."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from configs import UserError, say
from configs.files import named
from pretrain.downstream.loading import split_random
from pretrain.downstream.splits import read_splits
from pretrain.downstream.tasks import TASKS, Settings, Task, find_task

_LAYERS = ("last", "sum", "concat")


def main(argv: Sequence[str]) -> int:
    """Fine-tunes; refuses wrong arguments and broken data before torch is imported."""
    options = _parser().parse_args(argv)
    task = find_task(options.task)
    columns = {
        name: (column,)
        for name in ("first", "second", "label")
        if (column := getattr(options, f"{name}_column"))
    }
    task = replace(task, **columns)  # type: ignore[arg-type]
    name = split_random(options.model)[0]
    if not Path(name).exists() and (name.startswith((".", "/")) or name.count("/") != 1):
        raise UserError(
            f"{name}: no such folder", "give an HF folder, a run, or owner/name of the hub"
        )
    settings = _settings(task, options)
    _refuse_idle(task, options)
    layers = options.feature_based or ""
    if layers and task.kind != "tag":
        raise UserError(
            f"--feature-based {layers} on {task.name}", "it is for tagging: ner, wnut-17"
        )
    if layers and options.dropout is not None:
        raise UserError("--dropout with --feature-based", "leave it out: the model is frozen")
    if layers and not options.lr:
        settings = replace(
            settings, lrs=(1e-3,)
        )  # the BiLSTM is new: it takes an ordinary Adam rate
    files = {split: getattr(options, split) or "" for split in ("train", "dev", "test")}
    splits = read_splits(task, options.data, files, options.skip_bad_rows)
    sizes = ", ".join(f"{len(rows)} {split}" for split, rows in splits.items())
    say(f"{task.name}: {sizes} examples; lr {settings.lrs} x seeds {settings.seeds}")
    out = named(options.out)

    from pretrain.downstream.grid import run_grid
    from pretrain.downstream.results import as_markdown

    table = run_grid(task, settings, splits, options.model, out, layers, not options.no_model)
    print(as_markdown(task, table), end="")
    say(f"table, results.json and predictions are in {out}")
    return 0


def _refuse_idle(task: Task, options: Any) -> None:
    """Options that this kind of task would take no notice of."""
    of_pairs, of_texts = ("classify", "regress"), ("classify", "regress", "tag")
    for option, kinds in (
        ("doc_stride", ("question",)),
        ("first_column", of_texts),
        ("second_column", of_pairs),
        ("label_column", (*of_texts, "choice")),
    ):
        if getattr(options, option) and task.kind not in kinds:
            raise UserError(
                f"--{option.replace('_', '-')} on {task.name}",
                f"leave it out: it is for tasks as {', '.join(n for n, t in TASKS.items() if t.kind in kinds)}",
            )


def _settings(task: Task, options: Any) -> Settings:
    changes = {
        "lrs": options.lr,
        "seeds": options.seeds,
        "epochs": options.epochs,
        "batch": options.batch,
        "max_length": options.max_length,
        "doc_stride": options.doc_stride,
        "dropout": options.dropout,
    }
    settings = replace(task.settings, **{k: v for k, v in changes.items() if v is not None})
    for option, values in (("--lr", settings.lrs), ("--seeds", settings.seeds)):
        if not values:
            raise UserError(f"{option} names no number", "give some, as 1,2,3, or leave it out")
    for option, value, low in (
        ("--epochs", settings.epochs, 0),
        ("--batch", settings.batch, 0),
        ("--lr", min(settings.lrs), 0),
        ("--doc-stride", settings.doc_stride, 0),
        ("--max-length", settings.max_length, 7),  # [CLS] a [SEP] b [SEP] and a little text
        ("--seeds", min(settings.seeds), -1),
    ):
        if not low < value:
            raise UserError(f"{option} {value}", f"give numbers above {low}")
    if settings.dropout is not None and not 0 <= settings.dropout < 1:
        raise UserError(f"--dropout {settings.dropout}", "give a share from 0 to below 1, as 0.1")
    if not all(map(math.isfinite, (*settings.lrs, settings.epochs))):
        raise UserError("--lr or --epochs is not finite", "give ordinary numbers")
    if max(settings.seeds) >= 2**32:
        raise UserError(f"--seeds {max(settings.seeds)}", "give numbers below 2^32")
    return settings


def _numbers(kind: type) -> Any:
    def parse(text: str) -> tuple[Any, ...]:
        return tuple(dict.fromkeys(kind(part) for part in text.split(",") if part))

    parse.__name__ = f"comma-separated {kind.__name__}"
    return parse


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m pretrain finetune",
        description="Trains TASK on a pretrained model for every learning rate and seed.",
        epilog=f"tasks: {', '.join(TASKS)}. `classify` takes a CSV or JSONL of your own.",
    )
    add = parser.add_argument
    add("task", metavar="TASK")
    add("--model", required=True, help="HF folder, run, hub name, or random:FOLDER (shape only)")
    add("--out", required=True, help="results folder; a run that was cut goes on")
    add(
        "--data",
        default="",
        help="folder of files, or hub name[:config]; default: the task's hub set",
    )
    for split in ("train", "dev", "test"):
        add(
            f"--{split}",
            metavar="FILE",
            help=f"the {split} file (.tsv .csv .jsonl .conll, also .gz)",
        )
    add(
        "--lr",
        type=_numbers(float),
        help="default: the published grid, e.g. 5e-5,4e-5,3e-5,2e-5 (1e-3 with --feature-based)",
    )
    add("--seeds", type=_numbers(int), help="default: 1")
    add("--epochs", type=float)
    add("--batch", type=int)
    add("--max-length", type=int)
    add("--doc-stride", type=int)
    add("--dropout", type=float, help="default: as the model's config says (BERT's is 0.1)")
    add("--first-column", help="column of the text, or of a pair's first half")
    add("--second-column", help="column of a pair's second half")
    add("--label-column")
    add("--feature-based", choices=_LAYERS, help="frozen layers under a BiLSTM tagger")
    add(
        "--skip-bad-rows",
        action="store_true",
        help="leave out TSV lines with too many or few columns",
    )
    add("--no-model", action="store_true", help="do not keep the best model")
    return parser
