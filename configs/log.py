"""train/log.jsonl: one JSON object a line, written by a training, read by reports and status screens.

A reader meets lines that are being written, were cut by a kill or hit by a bad disk: it leaves out
what is no record, so that a log never stops a training or a report of it.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from configs.files import publish

LOG = "log.jsonl"
_NOT_JSON = {text: float(text) for text in ("nan", "inf", "-inf")}


def read_log(path: Path, last_bytes: int | None = None) -> list[dict[str, Any]]:
    """The records of a log, oldest first; [] where there is none.

    Args:
        last_bytes: read no more than this from the end (a long log, of which the end is wanted).
    """
    try:
        with path.open("rb") as file:
            if last_bytes is not None:
                file.seek(max(path.stat().st_size - last_bytes, 0))
            return [record for line in file if (record := _record(line))]
    except OSError:
        return []


def cut_log(path: Path, step: int) -> None:
    """Drops lines of later updates than `step`, and lines that are no records."""
    if not path.is_file():
        return
    lines = path.read_bytes().splitlines(keepends=True)
    kept = [line for line in lines if (record := _record(line)) and record["step"] <= step]
    if kept != lines:
        publish(path, lambda file: file.writelines(kept))


def _record(line: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except ValueError:
        return None
    if not isinstance(record, dict) or not isinstance(record.get("step"), int):
        return None
    if line[-1:] != b"\n":  # whole by chance: the rest of its last number may be missing
        return None
    texts = {k: v for k, v in record.items() if isinstance(v, str)}
    record |= {k: _NOT_JSON[v] for k, v in texts.items() if v in _NOT_JSON}
    kind = record.get("kind", "train")
    figures = {k: v for k, v in record.items() if k == "time" or (kind == "train" and k != "kind")}
    numbers = all(isinstance(v, int | float) for v in figures.values())
    if not isinstance(kind, str) or not numbers or not math.isfinite(record.get("time", 0.0)):
        return None
    return record
