"""index.json of a shard folder: what is in the parts, and checks of itself."""

from __future__ import annotations

import base64
import hashlib
import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import numpy as np

from configs.errors import UserError

FORMAT = "lambert-shards"
VERSION = 1
INDEX, LENGTHS, HELD_OUT = "index.json", "lengths.u16", "held-out"
SPECIAL = ("pad", "unk", "cls", "sep", "mask")
REBUILD = "delete it and run `python -m data_prep build RECIPE` again"
REMAKE = "run `python -m data_prep build RECIPE` again, which makes what is missing"


def pack_bools(flags: np.ndarray) -> str:
    """bool [n] as base64 text of its bits."""
    return base64.b64encode(np.packbits(flags).tobytes()).decode()


def unpack_bools(text: str, count: int) -> np.ndarray:
    bits = np.unpackbits(np.frombuffer(base64.b64decode(text), np.uint8))
    return bits[:count].astype(np.bool_)


def digest(value: Any) -> str:
    """sha256 of the canonical JSON form."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()


def file_digest(path: Path) -> str:
    """sha256 of a file's bytes, read in pieces."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# Every key of index.json a reader relies on, with its type.
_INDEX_KEYS: dict[str, type] = {
    "stamp": str, "fingerprint": str, "settings": dict, "objective": str, "max_length": int,
    "mask_cap": int, "static_masks": bool, "rows": int, "tokens": int, "labels": list,
    "tokenizer": dict, "parts": list, "files": dict, "sources": list, "counts": dict,
    "held_out": bool,
}  # fmt: skip
_TOKENIZER_KEYS: dict[str, type] = {
    "vocab_size": int, "fingerprint": str, "special_ids": dict, "word_start": str,
}  # fmt: skip
_PART_KEYS: dict[str, type] = {"file": str, "rows": int, "tokens": int, "bytes": int, "sha256": str}


def unreadable(path: Path, error: OSError) -> UserError:
    """Of a file that the system does not let us read: it may well be whole."""
    reason = os.strerror(error.errno or 0)  # Arrow's errors name the file in theirs
    return UserError(
        f"{path}: cannot be read ({reason})", "check its rights, and the disk it lies on"
    )


def read_index(folder: Path) -> dict[str, Any]:
    """index.json of a shard folder, checked by itself (not against the files it names).

    Raises:
        UserError: no folder, no index, no right to read it, broken JSON, another version, a missing
            or wrong key, an index whose own checksum does not hold.
    """
    path = folder / INDEX
    if not folder.is_dir():
        raise UserError(
            f"{folder}: no such shard folder", "python -m data_prep build RECIPE makes it"
        )
    if not path.is_file():
        why, remedy = "a build was not finished", "python -m data_prep build RECIPE goes on"
        if not is_set(folder):
            why, sets = "not a shard folder", [str(one) for one in sets_below(folder)]
            remedy = "name a folder that `python -m data_prep build` made: WORK_DIR/shards/SET"
            if sets:
                more = f" (or one of {len(sets) - 4} more)" if len(sets) > 4 else ""
                remedy = f"name a set below it: {', '.join(sets[:4])}{more}"
        raise UserError(f"{path} is missing: {why}", remedy)
    try:
        index = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise unreadable(path, error) from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: not valid JSON: {error}", REBUILD) from None
    if not isinstance(index, dict) or index.get("format") != FORMAT:
        raise UserError(f"{path}: not an index of {FORMAT}", REBUILD)
    if index.get("version") != VERSION:
        raise UserError(
            f"{path}: format version {index.get('version')}, this program reads {VERSION}",
            REBUILD,
        )
    _check_keys(path, index, _INDEX_KEYS, "")
    _check_keys(path, index["tokenizer"], _TOKENIZER_KEYS, "tokenizer.")
    for number, part in enumerate(index["parts"]):
        _check_keys(path, part, _PART_KEYS, f"parts[{number}].")
        if part["file"] != f"part-{number:05d}.arrow":
            raise UserError(f"{path}: parts[{number}] is called {part['file']!r}", REBUILD)
    special = index["tokenizer"]["special_ids"]
    for name in SPECIAL:
        value = special.get(name)
        if not isinstance(value, int) or not 0 <= value < index["tokenizer"]["vocab_size"]:
            raise UserError(f"{path}: tokenizer.special_ids.{name} is {value}", REBUILD)
    if digest({k: v for k, v in index.items() if k != "index_sha256"}) != index.get("index_sha256"):
        raise UserError(f"{path}: changed after it was written (its checksum differs)", REBUILD)
    if sum(p["rows"] for p in index["parts"]) != index["rows"]:
        raise UserError(f"{path}: rows of the parts do not add up to {index['rows']}", REBUILD)
    return cast(dict[str, Any], index)


# What the rows of sets were made with that were built before a recipe could say so.
_BEFORE: dict[str, Any] = {"single_prob": 0.0, "pair_max_length": 0}


def built_shards(index: dict[str, Any]) -> dict[str, Any]:
    """recipe.shards.NAME as the set was built from it; {} of rows that no recipe made."""
    there: dict[str, Any] = index["settings"].get("shards", {})
    return _BEFORE | there if there else {}


def is_set(folder: Path) -> bool:
    """Whether a folder is a shard folder, be it one that lacks its index or all of its parts."""
    if (folder / LENGTHS).is_file() or any(folder.glob("part-*.arrow")):
        return True
    index = folder / INDEX  # a checkpoint has one too
    return index.is_file() and FORMAT.encode() in index.read_bytes()


def sets_below(folder: Path) -> list[Path]:
    """Shard folders in a run or in its shards/; [] where there are none. Not their held-out/."""
    found = []
    for one in sorted([*folder.glob("*"), *folder.glob("shards/*")]):
        with suppress(OSError):  # somebody else's, as lost+found
            if is_set(one):
                found.append(one)
    return found


def _check_keys(path: Path, values: Any, keys: dict[str, type], prefix: str) -> None:
    for key, kind in keys.items():
        value = values.get(key) if isinstance(values, dict) else None
        fits = isinstance(value, kind) and not (kind is int and isinstance(value, bool))
        if not fits or (isinstance(value, int) and value < 0):
            raise UserError(f"{path}: {prefix}{key} is missing or not a {kind.__name__}", REBUILD)
