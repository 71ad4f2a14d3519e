"""Every byte and every row of a shard folder against the format and the folder's own index."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from configs import Progress, UserError
from configs.objectives import PAIR_OBJECTIVES
from data_prep.shard_index import HELD_OUT, INDEX, LENGTHS, built_shards, file_digest, read_index
from data_prep.shards import Layout

# Files a shard folder may hold beside what its index names.
_EXPECTED = {INDEX, HELD_OUT, ".build", "README.md"}


def check_folder(folder: Path, quiet: bool = True) -> list[str]:
    """Every problem of a shard folder and its held-out/, as `path: what is wrong`; [] if none."""
    try:
        index = read_index(folder)
    except UserError as error:
        return [error.what]
    problems = list(_check_files(folder, index)) + list(_check_tokenizer(folder, index))
    problems += _check_parts(folder, index, quiet)
    held_out = folder / HELD_OUT
    if index["held_out"]:
        problems += check_folder(held_out, quiet)
        try:
            other = read_index(held_out)
        except UserError:
            return problems
        if other["stamp"] != index["stamp"]:
            problems.append(f"{held_out}: of another build than {folder / INDEX}")
        if other["tokenizer"]["fingerprint"] != index["tokenizer"]["fingerprint"]:
            problems.append(f"{held_out}: made with another tokenizer than {folder / INDEX}")
    elif held_out.exists():
        problems.append(f"{held_out}: foreign: {folder / INDEX} knows of no held-out rows")
    return problems


def _check_files(folder: Path, index: dict[str, Any]) -> Iterator[str]:
    entries = {p["file"]: p for p in index["parts"]} | index["files"]
    if LENGTHS not in entries:
        yield f"{folder / INDEX}: does not account for {LENGTHS}"
    for name, entry in entries.items():
        path = folder / name
        if not path.is_file():
            yield f"{path}: missing"
        elif path.stat().st_size != entry["bytes"]:
            yield f"{path}: {path.stat().st_size} bytes instead of {entry['bytes']}"
        elif file_digest(path) != entry["sha256"]:
            yield f"{path}: damaged (its checksum differs)"
    for path in sorted(folder.iterdir()):
        if path.name not in entries and path.name not in _EXPECTED:
            yield f"{path}: foreign: {INDEX} does not list it"


def _check_tokenizer(folder: Path, index: dict[str, Any]) -> Iterator[str]:
    """The tokenizer beside the parts, and the recipe's vocabulary where the folder lies in one."""
    from data_prep.tokenizer import load

    wanted = index["tokenizer"]["fingerprint"]
    vocab = folder.absolute().parent.parent / "vocab"
    for place in (folder, vocab):
        if (place / "tokenizer.json").is_file():
            try:
                seen = load(place).fingerprint
            except UserError as error:
                yield error.what  # names the file
                continue
            if seen != wanted and place == folder:
                yield f"{place / 'tokenizer.json'}: not the tokenizer of {folder}"
            elif seen != wanted:
                yield f"{folder}: stale: made with another tokenizer than {place / 'tokenizer.json'}"


def _check_parts(folder: Path, index: dict[str, Any], quiet: bool) -> list[str]:
    layout = Layout(index["max_length"], index["tokenizer"]["vocab_size"], index["static_masks"])
    problems = []
    try:
        lengths = np.fromfile(folder / LENGTHS, np.uint16)
    except OSError:
        lengths = None
    first = 0
    size = sum(p["bytes"] for p in index["parts"])
    with Progress(max(size, 1), f"verify {folder}", "B", quiet=quiet) as bar:
        for entry in index["parts"]:
            path = folder / entry["file"]
            last = first + entry["rows"]
            known = lengths[first:last] if lengths is not None else None
            first = last
            if path.is_file():
                try:
                    problems += [
                        f"{path}: {p}" for p in _check_part(path, entry, index, layout, known)
                    ]
                except (pa.ArrowException, OSError, ValueError, IndexError) as error:
                    problems.append(f"{path}: not a readable Arrow stream: {error}")
            bar.update(entry["bytes"])
    return problems


def _check_part(
    path: Path,
    entry: dict[str, Any],
    index: dict[str, Any],
    layout: Layout,
    known: np.ndarray | None,
) -> Iterator[str]:
    """Rows against the format's rules and the index's numbers; one line for each rule broken."""
    rows = tokens = 0
    labels = np.zeros(2, np.int64)  # of rows of two segments
    broken: dict[str, int] = {}
    with pa.memory_map(str(path)) as file, pa.ipc.open_stream(file) as stream:
        if not stream.schema.equals(layout.schema()):
            yield "other columns than the format's"
            return
        mark = (stream.schema.metadata or {}).get(b"lambert", b"").decode()
        if mark != f"{index['stamp']}/{entry['file']}":
            yield f"foreign: made as {mark or 'something unknown'}"
        short = False
        for batch in stream:
            batch.validate(full=True)
            if short:
                broken.setdefault("a record batch follows a shorter one", rows)
            short = batch.num_rows != layout.rows_per_batch
            for rule, row in _check_rows(batch, index):
                broken.setdefault(rule, rows + row)
            lengths = np.diff(batch.column(0).offsets.to_numpy())
            if known is not None:
                same = known[rows : rows + len(lengths)]
                if len(same) != len(lengths) or not np.array_equal(same, lengths):
                    broken.setdefault(f"row lengths differ from {LENGTHS}", rows)
            of_pairs = batch.column(2).to_numpy()[batch.column(1).to_numpy() > 0]
            labels += np.bincount(of_pairs, minlength=2)[:2]
            rows += batch.num_rows
            tokens += int(lengths.sum())
    for rule, row in broken.items():
        yield f"{rule} (first in row {row})"
    found: list[tuple[str, Any, Any]] = [
        ("rows", rows, entry["rows"]),
        ("tokens", tokens, entry["tokens"]),
    ]
    if index["objective"] in PAIR_OBJECTIVES:
        found.append(("pairs by label", labels.tolist(), entry.get("labels")))
    for what, seen, wanted in found:
        if seen != wanted:
            yield f"{seen} {what}, {INDEX} says {wanted}"


def _check_rows(batch: pa.RecordBatch, index: dict[str, Any]) -> Iterator[tuple[str, int]]:
    """(rule, first row that breaks it) of a record batch."""
    special = index["tokenizer"]["special_ids"]
    ids = batch.column(0)
    offsets = ids.offsets.to_numpy().astype(np.int64)
    values = ids.values.to_numpy().astype(np.int64)
    lengths = np.diff(offsets)
    segment_b = batch.column(1).to_numpy().astype(np.int64)
    label = batch.column(2).to_numpy()
    row_of = np.repeat(np.arange(len(lengths)), lengths)

    def first(bad: np.ndarray) -> int | None:
        return int(np.argmax(bad)) if bad.any() else None

    flat = values[offsets[0] : offsets[-1]]
    outside = first((flat < 0) | (flat >= index["tokenizer"]["vocab_size"]))
    if outside is not None:
        yield "a token id outside the vocabulary", int(row_of[outside])
    padded = first(flat == special["pad"])
    if padded is not None:
        yield "padding inside a row", int(row_of[padded])
    rules = [
        ("a row longer than max_length", lengths > index["max_length"]),
        ("a row without a token", lengths < 3),
        ("a label that is not 0 or 1", label > 1),
        ("a second segment that starts outside the row", segment_b >= np.maximum(lengths - 1, 1)),
    ]
    for rule, bad in rules:
        row = first(bad)
        if row is not None:
            yield rule, row
            return  # what follows looks inside rows
    rules = [
        ("a row that does not start with [CLS]", values[offsets[:-1]] != special["cls"]),
        ("a row that does not end with [SEP]", values[offsets[1:] - 1] != special["sep"]),
    ]
    pairs = index["objective"] in PAIR_OBJECTIVES
    if pairs:
        asked = built_shards(index)
        mixed = asked.get("single_prob", 0) > 0
        longest = asked.get("pair_max_length", 0) or index["max_length"]
        rules.append(("a pair longer than pair_max_length", (segment_b > 0) & (lengths > longest)))
        alone = (segment_b == 0) & mixed
        rules.append(("a pair without a second segment", (segment_b < 3) & ~alone))
        before = values[offsets[:-1] + np.maximum(segment_b, 1) - 1]
        rules.append(("no [SEP] before the second segment", (before != special["sep"]) & ~alone))
        rules.append(("a label without a second segment", alone & (label != 0)))
    else:
        rules.append(("a second segment where none belongs", segment_b != 0))
    for rule, bad in rules:
        row = first(bad)
        if row is not None:
            yield rule, row
    if index["static_masks"]:
        yield from _check_masks(batch, values, offsets, index)


def _check_masks(
    batch: pa.RecordBatch, values: np.ndarray, offsets: np.ndarray, index: dict[str, Any]
) -> Iterator[tuple[str, int]]:
    positions, labels = batch.column(3), batch.column(4)
    ends = positions.offsets.to_numpy().astype(np.int64)
    if not np.array_equal(ends, labels.offsets.to_numpy()):
        yield "masks and their labels differ in number", 0
        return
    counts = np.diff(ends)
    row_of = np.repeat(np.arange(len(counts)), counts)
    at = positions.values.to_numpy().astype(np.int64)
    if (counts > index["mask_cap"]).any():
        yield "more masks than mask_cap", int(np.argmax(counts > index["mask_cap"]))
    outside = at >= np.diff(offsets)[row_of]
    if outside.any():
        yield "a mask outside its row", int(row_of[np.argmax(outside)])
        return
    special = index["tokenizer"]["special_ids"]
    shown = values[offsets[row_of] + at]
    if np.isin(shown, [special["cls"], special["sep"]]).any():
        yield (
            "a mask on [CLS] or [SEP]",
            int(row_of[np.argmax(np.isin(shown, [special["cls"], special["sep"]]))]),
        )
    wrong = labels.values.to_numpy().astype(np.int64) >= index["tokenizer"]["vocab_size"]
    if wrong.any():
        yield "a masked label outside the vocabulary", int(row_of[np.argmax(wrong)])
