"""Names and meta data of checkpoint folders. Standard library only, so that checks come early."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from zlib import crc32

from configs.checkpoints import INDEX, checkpoints
from configs.errors import UserError
from configs.files import publish
from configs.log import LOG

FORMAT = 1
KINDS = ("master", "exp_avg", "exp_avg_sq")


class Damaged(Exception):
    """This checkpoint cannot be trusted; an older one may be."""


def folder_of(train_dir: Path, step: int) -> Path:
    return train_dir / "checkpoints" / f"step-{step:08d}"


def latest(train_dir: str | Path) -> Path | None:
    """The newest complete checkpoint of a run, None if there is none."""
    found = checkpoints(train_dir)
    return found[-1][1] if found else None


def resolve(run: str | Path) -> Path:
    """The checkpoint meant by a work_dir, a train folder or a checkpoint folder.

    Raises:
        UserError: nothing there is a complete checkpoint.
    """
    path = Path(run)
    if (path / INDEX).is_file():
        return path
    for train_dir in (path / "train", path):
        found = latest(train_dir)
        if found:
            return found
    raise UserError(
        f"{path}: no complete checkpoint",
        "give a work_dir, its train folder, or a step-... folder that has a checkpoint.json",
    )


def write_json(path: Path, values: dict[str, Any], durable: bool = True) -> None:
    """Writes and fsyncs JSON with its own checksum, atomically. durable: see `configs.files.publish`."""
    body = json.dumps(values, sort_keys=True)
    text = f'{{"crc32": {crc32(body.encode())}, "body": {body}}}\n'
    publish(path, lambda file: file.write(text.encode()), durable)


def read_json(path: Path) -> dict[str, Any]:
    """The inverse of write_json; raises Damaged."""
    try:
        outer = json.loads(path.read_text(encoding="utf-8"))
        body: dict[str, Any] = outer["body"]
        good = outer["crc32"] == crc32(json.dumps(body, sort_keys=True).encode())
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise Damaged(f"{path}: {error}") from None
    if not good:
        raise Damaged(f"{path}: its checksum does not fit")
    return body


def read_meta(folder: str | Path) -> dict[str, Any]:
    """The meta data of a checkpoint: step, recipe, model, tensors, files, state, ...

    Raises:
        Damaged: unreadable. UserError: of a format that this version does not know.
    """
    path = Path(folder) / INDEX
    meta = read_json(path)
    if meta.get("format") != FORMAT:
        raise UserError(
            f"{path}: format {meta.get('format')!r}; this version reads format {FORMAT}",
            "use the Lambert version that wrote it, or export it there to a Hugging Face folder",
        )
    missing = {"step", "tensors", "kinds", "files", "model"} - set(meta)
    if missing:
        raise Damaged(f"{path}: lacks {', '.join(sorted(missing))}")
    return meta


def check_sizes(folder: Path, meta: dict[str, Any]) -> None:
    """Raises Damaged for a file of the checkpoint that is missing or was cut."""
    for name, part in meta["files"].items():
        path = folder / name
        if not path.is_file():
            raise Damaged(f"{path} is missing")
        if path.stat().st_size != part["bytes"]:
            raise Damaged(f"{path} has {path.stat().st_size} bytes instead of {part['bytes']}")


def set_aside(train_dir: Path) -> Path | None:
    """Moves the checkpoints and the log of an earlier training out of the way of a new one, which
    the next start would take for older; returns where they are now, None without any."""
    root = train_dir / "checkpoints"
    if not checkpoints(train_dir):
        return None
    if (train_dir / LOG).is_file():
        (train_dir / LOG).rename(root / LOG)
    number = 1
    while (aside := root.with_name(f"checkpoints-before-{number}")).exists():
        number += 1
    root.rename(aside)
    return aside


def prune(train_dir: Path, keep: int, step: int) -> None:
    """Removes all but the newest `keep` checkpoints up to `step`, oldest first (by number, not by
    name). Later ones could not be read when this training went on from an older one: they count
    for nothing, and a save of their number replaces them."""
    until = [folder for number, folder in checkpoints(train_dir) if number <= step]
    for folder in until[: -max(keep, 1)]:
        # Without its index a folder is no checkpoint: a kill in the middle leaves nothing half.
        (folder / INDEX).unlink()
        shutil.rmtree(folder)


def missing_kinds(meta: dict[str, Any], wanted: Sequence[str]) -> list[str]:
    return [kind for kind in wanted if kind not in meta["kinds"]]
