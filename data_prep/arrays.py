"""Intermediate results on disk: named numpy arrays with a JSON header and a checksum.

Unlike .npz they can be memory-mapped, unlike .npy one file is one finished unit of work, and
nothing is pickled. Layout: a magic line, header length, header JSON, arrays at multiples of 64.
"""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from configs.errors import UserError
from configs.files import publish

_MAGIC = b"lambert-arrays-1\n"
_ALIGN = 64
_CHUNK = 1 << 22


def save_arrays(path: Path, arrays: dict[str, np.ndarray], meta: dict[str, Any]) -> None:
    """Publishes the arrays and `meta` (JSON) as one file, by rename."""
    table: dict[str, Any] = {}
    place, crc = 0, 0
    for name, array in arrays.items():
        array = np.ascontiguousarray(array)
        place = -(-place // _ALIGN) * _ALIGN
        table[name] = {"dtype": array.dtype.str, "shape": list(array.shape), "at": place}
        place += array.nbytes
        crc = zlib.crc32(array.reshape(-1).view(np.uint8).data, crc)
    header = json.dumps({"arrays": table, "bytes": place, "crc32": crc, "meta": meta}).encode()
    head = _MAGIC + len(header).to_bytes(8, "little") + header
    start = -(-len(head) // _ALIGN) * _ALIGN

    def write(file: BinaryIO) -> None:
        file.write(head)
        for name, array in arrays.items():
            file.seek(start + table[name]["at"])
            file.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
        file.truncate(start + place)

    publish(path, write)


def load_meta(path: Path) -> dict[str, Any]:
    """The `meta` of a file, without touching its arrays; errors as `load_arrays`."""
    meta: dict[str, Any] = _header(path)[0]["meta"]
    return meta


def load_arrays(path: Path) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Memory-mapped, read-only arrays and the meta.

    Raises:
        UserError: missing, truncated or foreign file.
    """
    header, start = _header(path)
    raw = np.memmap(path, np.uint8, "r") if header["bytes"] else np.zeros(0, np.uint8)
    arrays = {}
    for name, entry in header["arrays"].items():
        kind = np.dtype(entry["dtype"])
        count = int(np.prod(entry["shape"], dtype=np.int64))
        at = start + entry["at"]
        piece = raw[at : at + count * kind.itemsize] if count else np.zeros(0, np.uint8)
        arrays[name] = piece.view(kind).reshape(entry["shape"])
    return arrays, header["meta"]


def is_whole(path: Path) -> bool:
    """Whether the file is there, complete, and its checksum holds (reads it once)."""
    if not path.is_file():
        return False
    try:
        header, _ = _header(path)
        arrays, _ = load_arrays(path)
    except (UserError, KeyError, TypeError):
        return False
    crc = 0
    for array in arrays.values():
        flat = array.reshape(-1).view(np.uint8)
        for first in range(0, len(flat), _CHUNK):
            crc = zlib.crc32(flat[first : first + _CHUNK].data, crc)
    return bool(crc == header["crc32"])


def _header(path: Path) -> tuple[dict[str, Any], int]:
    remedy = "delete it and run the same command again"
    try:
        with path.open("rb") as file:
            magic = file.read(len(_MAGIC))
            size = int.from_bytes(file.read(8), "little")
            if magic != _MAGIC or size > 1 << 30:
                raise UserError(f"{path}: not an intermediate file of this program", remedy)
            header = json.loads(file.read(size))
    except FileNotFoundError:
        raise UserError(f"{path} is missing", "run the same command again") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: damaged: {error}", remedy) from None
    start = -(-(len(_MAGIC) + 8 + size) // _ALIGN) * _ALIGN
    if path.stat().st_size != start + header["bytes"]:
        raise UserError(f"{path}: truncated", remedy)
    return header, start
