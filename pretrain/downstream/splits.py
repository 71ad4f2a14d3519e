"""The splits of a task: which local files they are, or which data set of the hub."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from configs import UserError
from pretrain.downstream.kinds import Row
from pretrain.downstream.readers import (
    check_columns,
    check_tags,
    lines_of,
    read_conll,
    read_csv,
    read_glue_tsv,
    read_jsonl,
    read_squad,
    read_text,
)
from pretrain.downstream.tasks import Task

_SUFFIXES = (".tsv", ".csv", ".jsonl", ".json", ".conll", ".txt", "")


def read_polarity(folder: Path) -> dict[str, list[Row]]:
    """rt-polarity.{neg,pos}: every tenth snippet of each class is dev, the others are train."""
    splits: dict[str, list[Row]] = {"train": [], "dev": []}
    for label in ("neg", "pos"):
        file = next(
            (p for p in sorted(folder.glob(f"*.{label}*"))), folder / f"rt-polarity.{label}"
        )
        for number, line in enumerate(lines_of(read_text(file))):
            row = {"text": line.strip(), "label": label}
            splits["dev" if number % 10 == 0 else "train"].append(row)
    return splits


def read_splits(
    task: Task, data: str, files: dict[str, str], skip_bad: bool
) -> dict[str, list[Row]]:
    """All splits of a task: explicit files first, else a local folder, else the hub.

    Args:
        data: folder, or a hub data set name (`name` or `name:config`), or "" for the task's own.
        files: split -> file given by name; they win over the folder.
        skip_bad: leave out lines of GLUE's TSV files with another number of columns.

    Raises:
        UserError: a split is missing or of another version, a file is damaged, a column absent or asked
            for twice, or no file takes notice of `skip_bad`.
    """
    if Path(data).is_file():
        raise UserError(f"{data}: a file, not a folder", "pass it as --train, and another as --dev")
    local = bool(data) and Path(data).is_dir()
    if data and not local and (data.startswith((".", "/")) or data.count("/") > 1):
        raise UserError(f"{data}: no such folder", "name a folder, or a hub data set as owner/name")
    found = {split: Path(file) for split, file in files.items() if file}
    polarity = task.name == "rt-polarity" and local and not found
    if local and not polarity:
        for split, stems in task.splits:
            file = _find(Path(data), stems)
            if file and split not in found:
                found[split] = file
    if skip_bad and not any(_is_glue_tsv(file, task) for file in found.values()):
        raise UserError(
            f"--skip-bad-rows on {', '.join(dict.fromkeys(map(str, found.values()))) or data or task.name}",
            "leave it out: it is for GLUE's .tsv files",
        )
    if polarity:
        return read_polarity(Path(data))
    if not found and not local:
        return _read_hub(task, data)
    for split in ("train", "dev"):
        if split not in found:
            named = " or ".join(f"{stem}.*" for stem in dict(task.splits)[split])
            if data and (others := sorted(Path(data).glob(f"{split}-v*.json*"))):
                raise UserError(
                    f"{others[0]}: not of the version that {task.name} takes ({named})",
                    f"name the task of that version, or pass --{split} FILE",
                )
            raise UserError(
                f"{data or task.name}: no {split} file" + (f" ({named})" if data else ""),
                f"pass --{split} FILE",
            )
    splits = {}
    for split, _ in task.splits:
        if file := found.get(split):
            splits[split] = read_file(file, task, skip_bad)
            check_columns(splits[split], task, str(file), split)
    return splits


def read_file(file: Path, task: Task, skip_bad: bool = False) -> list[Row]:
    """One local file by the task's kind and the file's suffix."""
    suffixes = [s for s in file.suffixes if s != ".gz"]
    suffix = suffixes[-1] if suffixes else ""
    readers: dict[str, Callable[[Path], list[Row]]] = {".jsonl": read_jsonl, ".csv": read_csv}
    if task.kind == "question":
        rows = read_squad(file)
    elif task.kind == "tag" and suffix not in readers:
        rows = read_conll(file)
    elif suffix in readers:
        rows = readers[suffix](file)
    elif _is_glue_tsv(file, task):
        rows = read_glue_tsv(file, task, skip_bad)
    elif suffix == ".tsv":
        rows = read_csv(file)
    else:
        raise UserError(f"{file}: unknown kind of file", "expected .tsv, .csv or .jsonl")
    if not rows:
        raise UserError(f"{file}: holds no examples", "copy it again")
    if task.kind == "tag":
        check_tags(rows, task, str(file))
    return rows


def _is_glue_tsv(file: Path, task: Task) -> bool:
    """Whether `read_file` reads it without quoting, as GLUE's are."""
    tsv = [s for s in file.suffixes if s != ".gz"][-1:] == [".tsv"]
    return tsv and bool(task.hub) and task.kind in ("classify", "regress")


def _find(folder: Path, stems: tuple[str, ...]) -> Path | None:
    for stem in stems:
        for suffix in _SUFFIXES:
            for zipped in ("", ".gz"):
                file = folder / f"{stem}{suffix}{zipped}"
                if file.is_file():
                    return file
    return None


def _read_hub(task: Task, data: str) -> dict[str, list[Row]]:
    name, _, config = data.partition(":")
    where = (name, *([config] if config else [])) if data else task.hub
    if not where:
        raise UserError(
            f"{task.name} has no hub data set of its own", "pass --data or --train and --dev"
        )
    from datasets import Dataset, load_dataset

    try:
        loaded = load_dataset(*where)
    except Exception as error:  # the hub client raises a dozen kinds, all of which mean this
        here = "no such folder here, and " if data else ""
        raise UserError(
            f"{'/'.join(where)}: {here}not loaded from the hub ({type(error).__name__}: {error})",
            "check name, network and HF_HUB_OFFLINE, or pass --data FOLDER with the files"
            " (pretrain/downstream/README.md names them)",
        ) from None
    splits = {}
    for split, names in task.splits:
        hub_split = next((n for n in names if n in loaded), None)
        if hub_split:
            table: Dataset = loaded[hub_split]
            splits[split] = [_plain(row, table.features) for row in table]
            if task.kind == "tag":
                check_tags(splits[split], task, f"{'/'.join(where)} {split}")
            check_columns(splits[split], task, f"{'/'.join(where)} {split}", split)
    for split in ("train", "dev"):
        if split not in splits:
            raise UserError(
                f"{'/'.join(where)}: no {split} split ({', '.join(dict(task.splits)[split])});"
                f" it has {', '.join(map(str, loaded))}",
                "save its splits as files, and pass --train and --dev",
            )
    return splits


def _plain(row: Row, features: Any) -> Row:
    """Hub rows in the shape of the file readers: SQuAD answers as pairs, tags by name."""
    if "context" in row and "answers" in row:
        pairs = list(zip(row["answers"]["text"], row["answers"]["answer_start"]))
        return {
            "id": row["id"],
            "context": row["context"],
            "question": row["question"],
            "answers": pairs,
        }
    for key in ("ner_tags", "tags"):
        names = getattr(getattr(features.get(key), "feature", None), "names", None)
        if names and key in row:
            row = {**row, key: [names[tag] for tag in row[key]]}
    return row
