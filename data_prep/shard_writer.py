"""Writes shard folders: parts, lengths and, last, the index. Everything appears by rename."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa

from configs.files import publish
from data_prep.shard_index import (
    FORMAT,
    INDEX,
    LENGTHS,
    VERSION,
    digest,
    file_digest,
)
from data_prep.shards import (
    Layout,
    Rows,
    numpy_type,
    offsets_of,
    ragged_index,
)

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "vocab.txt")

README = """---
configs:
- config_name: default
  data_files:
{files}---

Training rows for BERT, made by lambert's `python -m data_prep build`.
`index.json` says what is in them; `datasets.Dataset.from_file("part-00000.arrow")` opens one part
without copying it.
"""


def publish_bytes(path: Path, data: bytes) -> None:
    publish(path, lambda file: file.write(data))


def publish_json(path: Path, value: Any) -> None:
    publish_bytes(path, (json.dumps(value, indent=1, ensure_ascii=False) + "\n").encode())


def take(rows: Rows, ids: np.ndarray) -> Rows:
    """The rows `ids` of a batch in memory, in this order."""

    def ragged(values: np.ndarray, offsets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        counts = offsets[ids + 1] - offsets[ids]
        return values[ragged_index(offsets[ids], counts)], offsets_of(counts)

    tokens, offsets = ragged(rows.tokens, rows.offsets)
    out = Rows(tokens, offsets, rows.segment_b[ids], rows.next_sentence_label[ids])
    if rows.masked_offsets is not None:
        assert rows.masked_positions is not None and rows.masked_labels is not None
        out.masked_positions, out.masked_offsets = ragged(
            rows.masked_positions, rows.masked_offsets
        )
        out.masked_labels, _ = ragged(rows.masked_labels, rows.masked_offsets)
    return out


def concatenate(pieces: list[Rows]) -> Rows:
    """Several batches as one; at least one must be given."""

    def joined(name: str) -> np.ndarray:
        return np.concatenate([getattr(p, name) for p in pieces])

    out = Rows(
        joined("tokens"),
        offsets_of(np.concatenate([p.lengths for p in pieces])),
        joined("segment_b"),
        joined("next_sentence_label"),
    )
    if pieces[0].masked_offsets is not None:
        out.masked_positions, out.masked_labels = (
            joined("masked_positions"),
            joined("masked_labels"),
        )
        counts = [np.diff(p.masked_offsets) for p in pieces if p.masked_offsets is not None]
        out.masked_offsets = offsets_of(np.concatenate(counts))
    return out


def record_batch(rows: Rows, layout: Layout) -> pa.RecordBatch:
    """An Arrow batch without nulls; its buffers hold nothing but the rows (so bytes are stable)."""
    schema = layout.schema()

    def flat(values: np.ndarray, kind: pa.DataType) -> pa.Array:
        # From buffers: pa.array would import pandas, 0.3 s, only to learn that this is no Series.
        buffer = pa.py_buffer(np.ascontiguousarray(values, numpy_type(kind)))
        return pa.Array.from_buffers(kind, len(values), [None, buffer])

    def ragged(values: np.ndarray, offsets: np.ndarray, kind: pa.DataType) -> pa.Array:
        ends = pa.py_buffer(offsets.astype(np.int32))
        inner = flat(values, kind.value_type)
        return pa.Array.from_buffers(kind, len(offsets) - 1, [None, ends], children=[inner])

    columns = [
        ragged(rows.tokens, rows.offsets, schema.field("input_ids").type),
        flat(rows.segment_b, pa.uint16()),
        flat(rows.next_sentence_label, pa.uint8()),
    ]
    if layout.static_masks:
        assert rows.masked_positions is not None and rows.masked_labels is not None
        assert rows.masked_offsets is not None
        for name, values in (
            ("masked_positions", rows.masked_positions),
            ("masked_labels", rows.masked_labels),
        ):
            columns.append(ragged(values, rows.masked_offsets, schema.field(name).type))
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def write_part(
    path: Path, layout: Layout, stamp: str, rows: Rows, order: np.ndarray
) -> dict[str, Any]:
    """Writes rows[order] as a part and returns its index entry.

    stamp: the build's identity, stored in the schema so that a foreign part is known by itself.
    """
    schema = layout.schema().with_metadata({"lambert": f"{stamp}/{path.name}"})
    lengths = rows.lengths[order]

    def write(file: BinaryIO) -> None:
        with pa.ipc.new_stream(file, schema) as stream:
            for first in range(0, len(order), layout.rows_per_batch):
                piece = take(rows, order[first : first + layout.rows_per_batch])
                batch = record_batch(piece, layout)
                stream.write_batch(pa.RecordBatch.from_arrays(batch.columns, schema=schema))

    publish(path, write)
    pairs = order[rows.segment_b[order] > 0]  # a single segment has no label
    labels = np.bincount(rows.next_sentence_label[pairs], minlength=2)
    return {
        "file": path.name,
        "rows": len(order),
        "tokens": int(lengths.sum()),
        "bytes": path.stat().st_size,
        "sha256": file_digest(path),
        "labels": [int(n) for n in labels[:2]],
        # counts of rows by length, in 32 equal bins up to max_length
        "length_histogram": np.histogram(lengths, 32, (0, layout.max_length))[0].tolist(),
    }


def finish_folder(
    folder: Path,
    layout: Layout,
    stamp: str,
    parts: list[dict[str, Any]],
    lengths: Iterable[np.ndarray],
    *,
    objective: str,
    mask_cap: int,
    settings: dict[str, Any],
    tokenizer: dict[str, Any],
    tokenizer_folder: Path | None,
    sources: list[dict[str, Any]],
    counts: dict[str, Any],
    held_out: bool,
) -> dict[str, Any]:
    """Joins the parts' `lengths`, puts tokenizer and README in place and writes index.json last."""

    def join(file: BinaryIO) -> None:
        for piece in lengths:
            file.write(piece.astype(np.uint16).tobytes())

    publish(folder / LENGTHS, join)
    names = [LENGTHS, "README.md"]
    splits = [("train", "part-*.arrow")]
    if held_out:
        splits.append(("validation", "held-out/part-*.arrow"))
    lines = "".join(f"  - split: {s}\n    path: {p}\n" for s, p in splits)
    publish_bytes(folder / "README.md", README.format(files=lines).encode())
    for name in TOKENIZER_FILES if tokenizer_folder else ():
        assert tokenizer_folder is not None
        if (tokenizer_folder / name).is_file():
            publish_bytes(folder / name, (tokenizer_folder / name).read_bytes())
            names.append(name)
    index: dict[str, Any] = {
        "format": FORMAT,
        "version": VERSION,
        "stamp": stamp,
        "fingerprint": digest([stamp, [p["sha256"] for p in parts]]),
        "objective": objective,
        "max_length": layout.max_length,
        "mask_cap": mask_cap,
        "static_masks": layout.static_masks,
        "token_type": layout.token_type,
        "rows": sum(p["rows"] for p in parts),
        "tokens": sum(p["tokens"] for p in parts),
        "labels": [sum(p["labels"][k] for p in parts) for k in (0, 1)],
        "held_out": held_out,
        "tokenizer": tokenizer,
        "sources": sources,
        "counts": counts,
        "files": {
            n: {"bytes": (folder / n).stat().st_size, "sha256": file_digest(folder / n)}
            for n in names
        },
        "parts": parts,
        "settings": settings,
    }
    index["index_sha256"] = digest(index)
    publish_json(folder / INDEX, index)
    return index


def write_folder(
    folder: Path, layout: Layout, stamp: str, batches: Iterable[Rows], **meta: Any
) -> dict[str, Any]:
    """A whole folder in one go, one part per batch given: for small sets and for tests."""
    folder.mkdir(parents=True, exist_ok=True)
    parts, lengths = [], []
    for number, rows in enumerate(batches):
        lengths.append(rows.lengths)
        path = folder / f"part-{number:05d}.arrow"
        parts.append(write_part(path, layout, stamp, rows, np.arange(len(rows))))
    return finish_folder(folder, layout, stamp, parts, lengths, **meta)


def remove(path: Path) -> None:
    """Deletes a file or a folder if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
