"""Map task 2: tokenised documents -> rows sorted by a random key. Reduce task: rows -> a part.

Every row has a 64-bit random key. A group's file holds its rows in the order of their keys, and
part p of P takes the keys from p/P to (p+1)/P: a contiguous piece of every file. Sorted by key the
parts in a row are one uniform random permutation of the whole set, whoever builds them.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from configs.objectives import PAIR_OBJECTIVES
from configs.schema import MaskingConfig, ShardsConfig
from data_prep.arrays import is_whole, load_arrays, load_meta, save_arrays
from data_prep.documents import Context, forget, select
from data_prep.masks import static_masks
from data_prep.pairs import Plan, Pool, assemble, plan_rows
from data_prep.shard_index import file_digest
from data_prep.shard_writer import concatenate, write_part
from data_prep.shards import Layout, Rows, offsets_of

HELD_OUT, TRAIN = "held-out", "train"
_ROWS_AT_ONCE = 32768  # rows assembled at once


@dataclass
class SetContext:
    """What the row tasks need to know, the same in every worker."""

    documents: Context
    shards: ShardsConfig
    masking: MaskingConfig
    mask_cap: int
    seed: int
    layout: Layout
    special_ids: dict[str, int]
    stamp: str
    work: Path  # intermediate files of this set
    folder: Path  # the shard folder

    def folder_of(self, kind: str) -> Path:
        return self.folder / HELD_OUT if kind == HELD_OUT else self.folder


@dataclass(frozen=True)
class Group:
    """Units whose documents make rows together: the pool a random B is drawn from."""

    kind: str  # train | held-out
    number: int
    units: tuple[int, ...]
    first_pass: int  # passes over the documents, [first, end)
    end_pass: int
    tokens: int  # of the documents over these passes: the size of the work

    @property
    def label(self) -> str:
        return f"{self.kind} rows of units {self.units[0]}..{self.units[-1]}"

    def file(self, context: SetContext) -> Path:
        return context.work / f"{self.kind}-{self.number:05d}.arrays"


def build_group(context: SetContext, group: Group) -> dict[str, Any]:
    """Makes and publishes the rows of a group; returns their counts."""
    path = group.file(context)
    if is_whole(path):
        return load_meta(path)
    forget()
    pool, copies, names = _load_pool(context, group)
    shards = context.shards
    plan = Plan()
    for number in range(group.first_pass, group.end_pass):
        chosen = np.flatnonzero(copies > number).tolist()
        key = f"{context.seed} {shards.objective} {shards.max_length} {number} "

        def rng_of(document: int, key: str = key) -> Random:
            text = key + names[document]
            return Random(blake2b(text.encode(), digest_size=16).digest())

        plan_rows(
            pool, chosen, rng_of, shards.objective, shards.max_length, shards.short_seq_prob, plan,
            shards.single_prob, shards.pair_max_length,
        )  # fmt: skip
    keys = _row_keys(context.seed, group, len(plan))
    order = np.argsort(keys, kind="stable")
    pairs = shards.objective in PAIR_OBJECTIVES
    pieces = []
    for first in range(0, max(len(order), 1), _ROWS_AT_ONCE):
        chosen_rows = order[first : first + _ROWS_AT_ONCE]
        special = context.special_ids
        rows = assemble(pool.tokens, plan, chosen_rows, special["cls"], special["sep"], pairs)
        if shards.static_masks:
            static_masks(
                rows, keys[chosen_rows], special, context.layout.vocab_size, context.mask_cap,
                context.masking,
            )  # fmt: skip
        pieces.append(_narrow(rows))
    rows = concatenate(pieces)
    counts = Counter(plan.counts)
    lengths = rows.lengths
    meta = {
        "rows": len(rows),
        "tokens": int(lengths.sum()),
        "documents": len(pool.documents),
        "counts": {k: v for k, v in sorted(counts.items()) if v},
    }
    arrays = {
        "keys": keys[order],
        "lengths": lengths.astype(np.uint16),
        "segment_b": rows.segment_b,
        "next_sentence_label": rows.next_sentence_label,
        "tokens": rows.tokens,
    }
    if rows.masked_offsets is not None:
        assert rows.masked_positions is not None and rows.masked_labels is not None
        arrays["masks"] = np.diff(rows.masked_offsets).astype(np.uint16)
        arrays["masked_positions"] = rows.masked_positions
        arrays["masked_labels"] = rows.masked_labels
    save_arrays(path, arrays, meta)
    return meta


def _narrow(rows: Rows) -> Rows:
    """The same with the columns as small as the shard's, so that memory stays small."""
    rows.segment_b = rows.segment_b.astype(np.uint16)
    rows.next_sentence_label = rows.next_sentence_label.astype(np.uint8)
    return rows


def _load_pool(context: SetContext, group: Group) -> tuple[Pool, np.ndarray, list[str]]:
    """The group's chosen documents, side by side; copies wanted of each; a name for its draws."""
    tokens: list[np.ndarray] = []
    sentences: list[np.ndarray] = []
    documents, hashes, copies, places = [], [], [], []
    names: list[str] = []
    reached_end = False
    for unit in group.units:
        arrays, _ = load_arrays(context.documents.unit_file(unit))
        selection = select(context.documents, unit, context.shards.dupe_factor)
        chosen = selection.of(group.kind)
        for kept, flat, counts in (
            (tokens, "tokens", arrays["document_tokens"]),
            (sentences, "sentence_tokens", arrays["document_sentences"]),
        ):
            starts = offsets_of(counts)[chosen]
            kept.append(_copy_spans(arrays[flat], starts, counts[chosen]))
        documents.append(arrays["document_sentences"][chosen])
        hashes.append(arrays["hashes"][chosen])
        copies.append(selection.copies[chosen])
        # Pieces of one file that follow each other have one family and numbers in a row; the last
        # of a unit is followed by the first of the next.
        end = len(selection.copies) - 1
        follows = np.zeros(len(chosen), bool)
        follows[1:] = np.diff(chosen) == 1
        follows[:1] = reached_end & (chosen[:1] == 0)
        reached_end = bool(len(chosen) and chosen[-1] == end)
        places.append((arrays["families"][chosen], follows))
        names += [f"{unit}/{number}" for number in chosen.tolist()]
    bounds = offsets_of(np.concatenate(documents)).tolist()
    families, follows = (np.concatenate(part) for part in zip(*places))
    follows[1:] &= families[1:] == families[:-1]
    _, content = np.unique(np.concatenate(hashes), axis=0, return_inverse=True)
    pool = Pool(
        np.concatenate(tokens),
        offsets_of(np.concatenate(sentences)).tolist(),
        list(zip(bounds[:-1], bounds[1:])),
        content.reshape(-1).tolist(),
        follows.tolist(),
    )
    return pool, np.concatenate(copies), names


def _copy_spans(values: np.ndarray, starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """The spans joined. Neighbouring spans are copied as one, so that keeping all costs one copy."""
    if not len(starts):
        return values[:0]
    joint = np.flatnonzero(starts[1:] != starts[:-1] + lengths[:-1]) + 1
    first = np.concatenate([[0], joint])
    last = np.concatenate([joint, [len(starts)]]) - 1
    ends = starts[last] + lengths[last]
    return np.concatenate([values[a:b] for a, b in zip(starts[first].tolist(), ends.tolist())])


def mix64(values: np.ndarray) -> np.ndarray:
    """splitmix64's finaliser over uint64."""
    with np.errstate(over="ignore"):
        z = values + np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return z ^ (z >> np.uint64(31))


def _row_keys(seed: int, group: Group, count: int) -> np.ndarray:
    name = f"{seed} {group.kind} {group.number}".encode()
    base = np.frombuffer(blake2b(name, digest_size=8).digest(), "<u8")
    with np.errstate(over="ignore"):
        return mix64(mix64(base) + np.arange(count, dtype=np.uint64))


@dataclass(frozen=True)
class PartTask:
    kind: str
    number: int
    total: int  # parts of this kind
    groups: tuple[Group, ...]

    @property
    def name(self) -> str:
        return f"part-{self.number:05d}.arrow"

    @property
    def label(self) -> str:
        return f"{self.kind} {self.name}"

    def receipt(self, context: SetContext) -> Path:
        """Says that the part is finished: its index entry and the lengths of its rows."""
        return context.work / f"{self.kind}-part-{self.number:05d}.arrays"


def build_part(context: SetContext, task: PartTask) -> dict[str, Any]:
    """Collects a part's rows from every group, shuffles and publishes them; its index entry."""
    path, receipt = context.folder_of(task.kind) / task.name, task.receipt(context)
    if is_whole(receipt) and path.is_file():
        entry = load_meta(receipt)
        if path.stat().st_size == entry["bytes"] and file_digest(path) == entry["sha256"]:
            return entry
    columns = _collect(context, task)
    order = np.argsort(columns["keys"], kind="stable")
    rows = Rows(
        columns["tokens"],
        offsets_of(columns["lengths"]),
        columns["segment_b"],
        columns["next_sentence_label"],
    )
    if "masks" in columns:
        rows.masked_positions = columns["masked_positions"]
        rows.masked_labels = columns["masked_labels"]
        rows.masked_offsets = offsets_of(columns["masks"])
    entry = write_part(path, context.layout, context.stamp, rows, order)
    lengths = rows.lengths[order].astype(np.uint16)
    save_arrays(receipt, {"lengths": lengths}, entry)
    return entry


def _collect(context: SetContext, task: PartTask) -> dict[str, np.ndarray]:
    """A part's rows from every group's file, column by column, in the order of the groups.

    One file is mapped at a time, and the columns are allocated once: a worker holds the part and
    no more.
    """
    low = -(-(task.number << 64) // task.total)
    high = -(-((task.number + 1) << 64) // task.total)
    spans, kinds = [], {}
    for group in task.groups:
        arrays, _ = load_arrays(group.file(context))
        first = int(np.searchsorted(arrays["keys"], np.uint64(low)))
        last = len(arrays["keys"])
        if high < 1 << 64:
            last = int(np.searchsorted(arrays["keys"], np.uint64(high)))
        spans.append({name: _span(arrays, name, first, last) for name in arrays})
        kinds = {name: array.dtype for name, array in arrays.items()}
    columns = {
        name: np.empty(sum(s[name].stop - s[name].start for s in spans), kind)
        for name, kind in kinds.items()
    }
    filled = dict.fromkeys(columns, 0)
    for group, span in zip(task.groups, spans):
        arrays, _ = load_arrays(group.file(context))
        for name, column in columns.items():
            piece = arrays[name][span[name]]
            column[filled[name] : filled[name] + len(piece)] = piece
            filled[name] += len(piece)
    return columns


def _span(arrays: dict[str, np.ndarray], name: str, first: int, last: int) -> slice:
    """Where rows first..last lie in a column: tokens and masks have several entries a row."""
    counts = {"tokens": "lengths", "masked_positions": "masks", "masked_labels": "masks"}
    if name not in counts:
        return slice(first, last)
    per_row = arrays[counts[name]]
    begin = int(per_row[:first].sum(dtype=np.int64))
    return slice(begin, begin + int(per_row[first:last].sum(dtype=np.int64)))
