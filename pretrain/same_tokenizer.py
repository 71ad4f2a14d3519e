"""Whether two folders hold the same tokenizer. Standard library only, so that it comes early."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from configs.errors import UserError


def vocabulary(file: Path) -> Any:
    """The entries of a tokenizer.json with their ids; raises UserError when it cannot be read."""
    try:
        return json.loads(file.read_text(encoding="utf-8"))["model"]["vocab"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise UserError(f"{file}: no readable tokenizer ({error!r})", "restore it") from None


def is_another(file: Path, kept: Path) -> bool:
    """Whether two tokenizer.json have other entries or ids, however they are written."""
    return file.read_bytes() != kept.read_bytes() and vocabulary(file) != vocabulary(kept)


def _fault(file: Path) -> str:
    """Why it cannot be read, "" if it can."""
    try:
        vocabulary(file)
    except UserError as error:
        return error.what
    return ""


def anew_with(file: Path | str) -> str:
    """The remedy for shards of another tokenizer than `file`: a vocabulary that is there stays."""
    return (
        f"build the shards with the model's own in a new work_dir, both with vocab.file={file}: "
        "python -m data_prep vocab RECIPE, then build RECIPE"
    )


def check_run_tokenizer(file: Path, shards: Path) -> None:
    """The run's tokenizer.json goes into the exported model: it must be that of the shards, or the
    mistake would come out after the training.

    Raises:
        UserError: it cannot be read, or has other entries than the one kept with the shards.
    """
    kept = shards / file.name
    if not kept.is_file() or file.read_bytes() == kept.read_bytes():
        return
    right = f"put the right one back: cp {kept} {file}"
    back = f"put it back: cp {file} {kept}, or delete {shards} and build it anew"
    broken, kept_broken = _fault(file), _fault(kept)
    if kept_broken:  # only one that can be read is copied over the other
        raise UserError(kept_broken, f"restore it and {file}" if broken else back)
    if broken:
        raise UserError(broken, right)
    if is_another(file, kept):
        raise UserError(f"{file} is not the tokenizer that {shards} was built with", right)


def check_origin_tokenizer(file: Path, shards: Path) -> None:
    """Weights to start from belong to the tokenizer.json beside them: with another one of the same
    size every embedding would be of another word.

    Raises:
        UserError: the shards were built with other entries; either cannot be read.
    """
    kept = shards / file.name
    if kept.is_file() and is_another(file, kept):
        raise UserError(
            f"checkpoint.init_from: {file} is not the tokenizer that {shards} was built with",
            anew_with(file),
        )
