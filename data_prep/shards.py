"""The shard format and its reader: the one thing training imports from here.

A shard folder holds
    part-NNNNN.arrow   Arrow IPC streams, one row per training example, shuffled over the whole set
    lengths.u16        the length of every row, in order, so that planning a batch touches no part
    index.json         what is in the parts, and their checksums; written last
    tokenizer.json     the tokenizer the ids come from (with its vocab.txt and tokenizer_config.json)
    README.md          lets `datasets.load_dataset(folder)` read the parts

Columns: input_ids (list of uint16, or int32 for more than 65,536 ids) = [CLS] A [SEP] B [SEP];
segment_b (start of B, 0 = one segment); next_sentence_label (0 = B follows A; for `sop` 0 = in
order; of one segment 0, without meaning); with static masks masked_positions and masked_labels.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from configs.errors import UserError
from data_prep.shard_index import (
    HELD_OUT,
    INDEX,
    LENGTHS,
    REBUILD,
    REMAKE,
    built_shards,
    read_index,
    unpack_bools,
    unreadable,
)

_GATHER = 4096  # rows gathered at once: their index arrays stay in the cache


@dataclass
class Rows:
    """n training rows, ragged, in the order asked for."""

    tokens: np.ndarray  # int32 [sum of lengths]
    offsets: np.ndarray  # int64 [n + 1], into tokens
    segment_b: np.ndarray  # int32 [n], start of B inside the row, 0 = one segment
    next_sentence_label: np.ndarray  # int32 [n], 0 = B follows A
    masked_positions: np.ndarray | None = None  # int32 [sum of masks], inside the row
    masked_labels: np.ndarray | None = None  # int32 [sum of masks], the true ids
    masked_offsets: np.ndarray | None = None  # int64 [n + 1]

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def lengths(self) -> np.ndarray:
        return np.diff(self.offsets)


def ragged_index(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """[s, s+1, .. s+l-1] for every (s, l), joined: int64 [sum of lengths]."""
    ends = np.cumsum(lengths)
    index = np.repeat(starts - (ends - lengths), lengths)
    index += np.arange(len(index))
    return index


def offsets_of(lengths: np.ndarray) -> np.ndarray:
    """int64 [n + 1] running sums from 0."""
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


@dataclass(frozen=True)
class Layout:
    """What fixes the columns of a part and the size of its record batches."""

    max_length: int
    vocab_size: int
    static_masks: bool = False

    @property
    def token_type(self) -> str:
        return "uint16" if self.vocab_size <= 65536 else "int32"

    @property
    def rows_per_batch(self) -> int:
        """A power of two whose full-length rows take at most 16 MB: 65,536 at length 128."""
        full = self.max_length * np.dtype(self.token_type).itemsize
        return int(1 << max(8, ((16 << 20) // full).bit_length() - 1))

    def schema(self) -> pa.Schema:
        ids = pa.list_(pa.uint16() if self.token_type == "uint16" else pa.int32())
        columns = [
            ("input_ids", ids),
            ("segment_b", pa.uint16()),
            ("next_sentence_label", pa.uint8()),
        ]
        if self.static_masks:
            columns += [("masked_positions", pa.list_(pa.uint16())), ("masked_labels", ids)]
        return pa.schema([pa.field(name, kind, nullable=False) for name, kind in columns])


def numpy_type(kind: pa.DataType) -> np.dtype:
    """As kind.to_pandas_dtype(), which imports pandas."""
    return np.dtype(str(kind))


class _Part:
    """One memory-mapped part: where each batch's buffers lie in the file."""

    def __init__(self, path: Path, entry: dict[str, Any], layout: Layout, stamp: str) -> None:
        self.path = path
        try:
            self._map = pa.memory_map(str(path))
            base = self._map.read_buffer(self._map.size())
            raw = np.frombuffer(base, np.uint8)
            stream = pa.ipc.open_stream(base)
            if not stream.schema.equals(layout.schema()):
                raise UserError(f"{path}: other columns than its index says", REBUILD)
            seen = (stream.schema.metadata or {}).get(b"lambert", b"").decode()
            if seen != f"{stamp}/{entry['file']}":
                raise UserError(f"{path}: a part of another build ({seen or 'unmarked'})", REBUILD)
            batches = list(stream)
        except (pa.ArrowInvalid, OSError) as error:
            if isinstance(error, OSError) and error.errno:  # of the system; Arrow's own have none
                raise unreadable(path, error) from None
            raise UserError(f"{path}: not a readable Arrow stream: {error}", REBUILD) from None
        if sum(b.num_rows for b in batches) != entry["rows"]:
            raise UserError(
                f"{path}: holds {sum(b.num_rows for b in batches)} rows, index.json says {entry['rows']}",
                REBUILD,
            )
        if any(b.num_rows != layout.rows_per_batch for b in batches[:-1]):
            raise UserError(f"{path}: record batches of another size than the format's", REBUILD)
        words = len(raw) // 4 * 4
        self._as_int32 = raw[:words].view(np.int32)
        self._per_batch = layout.rows_per_batch
        self._ragged: dict[str, tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]] = {}
        self._flat: dict[str, tuple[np.ndarray, np.ndarray]] = {}
        for column, field in enumerate(layout.schema()):
            arrays = [batch.column(column) for batch in batches]
            if pa.types.is_list(field.type):
                kind = numpy_type(field.type.value_type)
                item = kind.itemsize
                buffers = [(a.buffers()[1], a.values.buffers()[1]) for a in arrays]
                self._ragged[field.name] = (
                    np.array([(o.address - base.address) // 4 for o, _ in buffers], np.int64),
                    np.array([(v.address - base.address) // item for _, v in buffers], np.int64),
                    np.array([v.size // item for _, v in buffers], np.int64),
                    raw[: len(raw) // item * item].view(kind),
                )
            else:
                kind = numpy_type(field.type)
                places = [(a.buffers()[1].address - base.address) // kind.itemsize for a in arrays]
                self._flat[field.name] = (
                    np.array(places, np.int64),
                    raw[: len(raw) // kind.itemsize * kind.itemsize].view(kind),
                )

    def flat(self, column: str, rows: np.ndarray) -> np.ndarray:
        places, values = self._flat[column]
        return values[places[rows // self._per_batch] + rows % self._per_batch]

    def spans(self, column: str, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Starts (into `values`) and lengths of the rows' lists; int64 [n] both."""
        offsets, values, sizes, _ = self._ragged[column]
        batch = rows // self._per_batch
        at = offsets[batch] + rows % self._per_batch
        start = self._as_int32[at].astype(np.int64)
        end = self._as_int32[at + 1].astype(np.int64)
        if np.any(start < 0) or np.any(end < start) or np.any(end > sizes[batch]):
            raise UserError(f"{self.path}: offsets of {column} are damaged", REBUILD)
        return values[batch] + start, end - start

    def values(self, column: str) -> np.ndarray:
        return self._ragged[column][3]


class Shards:
    """A memory-mapped shard folder; see `open_shards`."""

    def __init__(self, folder: Path, index: dict[str, Any]) -> None:
        self.folder, self.index = folder, index
        self.num_rows: int = index["rows"]
        self.max_length: int = index["max_length"]
        self.mask_cap: int = index["mask_cap"]
        self.objective: str = index["objective"]
        self.fingerprint: str = index["fingerprint"]
        tokenizer = index["tokenizer"]
        self.vocab_size: int = tokenizer["vocab_size"]
        self.tokenizer_fingerprint: str = tokenizer["fingerprint"]
        self.special_ids: dict[str, int] = tokenizer["special_ids"]
        # bool [vocab_size]: the token starts a word (for whole-word masking)
        self.word_start = unpack_bools(tokenizer["word_start"], self.vocab_size)
        self.layout = Layout(self.max_length, self.vocab_size, index["static_masks"])
        self.lengths = (
            np.memmap(folder / LENGTHS, np.uint16, "r") if self.num_rows else np.zeros(0, np.uint16)
        )
        # recipe.shards.NAME as the set was built from it; {} of rows that no recipe made
        self.built_from = built_shards(index)
        self._starts = offsets_of(np.array([p["rows"] for p in index["parts"]], np.int64))
        self._parts: dict[int, _Part] = {}

    def __len__(self) -> int:
        return self.num_rows

    def part_of(self, ids: np.ndarray) -> np.ndarray:
        """The number of the part each row lies in: int64 [n]."""
        return np.searchsorted(self._starts, ids, side="right") - 1

    def part(self, number: int) -> _Part:
        """Opens a part on first use (parts are independent files, so that an open is instant)."""
        if number not in self._parts:
            entry = self.index["parts"][number]
            self._parts[number] = _Part(
                self.folder / entry["file"], entry, self.layout, self.index["stamp"]
            )
        return self._parts[number]

    def rows(self, ids: np.ndarray) -> Rows:
        """The rows with these numbers, in this order; duplicates allowed. About 1 us a row.

        Raises:
            UserError: a part is missing or damaged; names it.
            IndexError: an id outside 0 .. num_rows - 1.
        """
        ids = np.asarray(ids, np.int64)
        if len(ids) and (ids.min() < 0 or ids.max() >= self.num_rows):
            raise IndexError(f"row ids must lie in 0..{self.num_rows - 1}")
        lengths = self.lengths[ids].astype(np.int64)
        offsets = offsets_of(lengths)
        out = Rows(
            np.empty(offsets[-1], np.int32),
            offsets,
            np.empty(len(ids), np.int32),
            np.empty(len(ids), np.int32),
        )
        groups = self._by_part(ids)
        for number, chosen in groups:
            part, local = self.part(number), ids[chosen] - self._starts[number]
            out.segment_b[chosen] = part.flat("segment_b", local)
            out.next_sentence_label[chosen] = part.flat("next_sentence_label", local)
            starts, counts = part.spans("input_ids", local)
            if not np.array_equal(counts, lengths[chosen]):
                raise UserError(f"{part.path}: row lengths differ from {LENGTHS}", REBUILD)
            _gather(part.values("input_ids"), starts, counts, out.tokens, offsets[chosen])
        if len(out.tokens) and not 0 <= out.tokens.min() <= out.tokens.max() < self.vocab_size:
            wrong = np.argmax((out.tokens < 0) | (out.tokens >= self.vocab_size))
            part = self.part(int(self.part_of(ids)[np.searchsorted(offsets, wrong, "right") - 1]))
            raise UserError(
                f"{part.path}: token {out.tokens[wrong]}, the vocabulary has {self.vocab_size}",
                REBUILD,
            )
        if self.layout.static_masks:
            self._static_masks(ids, groups, out)
        return out

    def static_mask_counts(self, ids: np.ndarray) -> np.ndarray:
        """Static masks of these rows, int64 [n], without reading the rows; for shards that have them.

        Raises:
            UserError: a part is missing or damaged; names it.
        """
        counts = np.zeros(len(ids), np.int64)
        for number, chosen in self._by_part(ids):
            local = ids[chosen] - self._starts[number]
            counts[chosen] = self.part(number).spans("masked_positions", local)[1]
        return counts

    def _by_part(self, ids: np.ndarray) -> list[tuple[int, np.ndarray]]:
        """(part, places in `ids` of its rows) for every part that has some."""
        where = self.part_of(ids)
        return [(int(p), np.flatnonzero(where == p)) for p in np.unique(where)]

    def _static_masks(
        self, ids: np.ndarray, groups: list[tuple[int, np.ndarray]], out: Rows
    ) -> None:
        counts = self.static_mask_counts(ids)
        out.masked_offsets = offsets_of(counts)
        out.masked_positions = np.empty(out.masked_offsets[-1], np.int32)
        out.masked_labels = np.empty(out.masked_offsets[-1], np.int32)
        for number, chosen in groups:
            part, local = self.part(number), ids[chosen] - self._starts[number]
            for column, to in (
                ("masked_positions", out.masked_positions),
                ("masked_labels", out.masked_labels),
            ):
                starts, n = part.spans(column, local)
                if not np.array_equal(n, counts[chosen]):
                    raise UserError(f"{part.path}: masks without labels", REBUILD)
                _gather(part.values(column), starts, n, to, out.masked_offsets[chosen])


def _gather(
    values: np.ndarray, starts: np.ndarray, counts: np.ndarray, to: np.ndarray, at: np.ndarray
) -> None:
    """to[at[i] : at[i] + counts[i]] = values[starts[i] : starts[i] + counts[i]] for every i."""
    for first in range(0, len(starts), _GATHER):
        piece = slice(first, first + _GATHER)
        n = counts[piece]
        source = ragged_index(starts[piece], n)
        if np.array_equal(at[piece][1:], at[piece][:-1] + n[:-1]):  # rows lie side by side
            begin = int(at[piece][0])
            to[begin : begin + len(source)] = values[source]
        else:
            to[ragged_index(at[piece], n)] = values[source]


def open_shards(folder: str | Path) -> Shards:
    """Opens a shard folder without reading its parts (140 million rows in well under a second).

    Checks index.json, and the presence and size of every file it names; what is inside them is
    checked when rows are read, and all at once by `python -m data_prep verify`.

    Raises:
        UserError: naming the missing, truncated or foreign file.
    """
    folder = Path(folder)
    index = read_index(folder)
    expected = {p["file"]: p["bytes"] for p in index["parts"]}
    expected |= {name: entry["bytes"] for name, entry in index["files"].items()}
    if LENGTHS not in expected or expected[LENGTHS] != 2 * index["rows"]:
        raise UserError(f"{folder / INDEX}: does not account for {LENGTHS}", REBUILD)
    for name, size in expected.items():
        path = folder / name
        if not path.is_file():
            raise UserError(f"{path} is missing (index.json lists it)", REMAKE)
        if path.stat().st_size != size:
            raise UserError(
                f"{path}: {path.stat().st_size} bytes, index.json says {size}: truncated or replaced",
                REBUILD,
            )
    return Shards(folder, index)


def held_out(folder: str | Path) -> Shards:
    """The held-out rows that lie inside a shard folder; errors as `open_shards`."""
    inside = Path(folder) / HELD_OUT
    if not inside.exists() and not read_index(Path(folder))["held_out"]:
        raise UserError(f"{folder}: no rows were held out", "build it with a larger prep.held_out")
    return open_shards(inside)
