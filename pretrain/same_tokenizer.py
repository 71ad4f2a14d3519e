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
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{file}: no readable tokenizer ({error!r})", "restore it") from None


def check_run_tokenizer(file: Path, shards: Path) -> None:
    """The run's tokenizer.json goes into the exported model: it must be that of the shards, or the
    mistake would come out after the training.

    Raises:
        UserError: it cannot be read, or has other entries than the one kept with the shards.
    """
    kept = shards / file.name
    if not kept.is_file() or file.read_bytes() == kept.read_bytes():
        return
    remedy = f"put the right one back: cp {kept} {file}"
    try:
        ours = vocabulary(file)
    except UserError as error:
        raise UserError(error.what, remedy) from None
    if ours != vocabulary(kept):
        raise UserError(f"{file} is not the tokenizer that {shards} was built with", remedy)
