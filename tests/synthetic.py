"""Shard folders with random rows, made by the real writer, for tests that need no text."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np

from data_prep.shard_check import check_folder
from data_prep.shard_index import HELD_OUT, pack_bools
from data_prep.shard_writer import write_folder
from data_prep.shards import Layout, Rows, Shards, offsets_of, open_shards

SPECIAL_IDS = {"pad": 0, "unk": 1, "cls": 2, "sep": 3, "mask": 4}


def make_rows(
    rng: np.random.Generator,
    rows: int,
    max_length: int,
    vocab_size: int,
    pairs: bool = True,
    static_masks: bool = False,
    single: float = 0.0,
) -> Rows:
    """Random rows [CLS] A [SEP] B [SEP]; 70% nearly full, the rest of any length.

    Tokens follow each other (id + 1, wrapping) half of the time, so that a model can learn
    something from them. With `pairs` False: [CLS] A [SEP], segment_b 0, label 0; so is a share
    `single` of the pairs.
    """
    shortest = 5 if pairs else 3
    lengths = np.where(
        rng.random(rows) < 0.7,
        rng.integers(max(shortest, int(0.9 * max_length)), max_length + 1, rows),
        rng.integers(shortest, max_length + 1, rows),
    )
    offsets = offsets_of(lengths)
    first, last = 5, vocab_size
    tokens = rng.integers(first, last, offsets[-1])
    follow = rng.random(offsets[-1]) < 0.5
    previous = np.roll(tokens, 1)
    tokens = np.where(follow, (previous - first + 1) % (last - first) + first, tokens)
    tokens[offsets[:-1]] = SPECIAL_IDS["cls"]
    tokens[offsets[1:] - 1] = SPECIAL_IDS["sep"]
    segment_b = np.zeros(rows, np.int64)
    labels = np.zeros(rows, np.int64)
    if pairs:
        segment_b = 3 + (rng.random(rows) * (lengths - 4)).astype(np.int64)
        labels = rng.integers(0, 2, rows)
        if single:
            segment_b[rng.random(rows) < single] = 0
            labels[segment_b == 0] = 0
        has_b = segment_b > 0
        tokens[(offsets[:-1] + segment_b - 1)[has_b]] = SPECIAL_IDS["sep"]
    out = Rows(tokens.astype(np.int32), offsets, segment_b, labels)
    if static_masks:
        positions = [[1] if n < 10 else [1, 3] for n in lengths]
        positions = [[p for p in row if p != b - 1] for row, b in zip(positions, segment_b)]
        out.masked_offsets = offsets_of(np.array([len(row) for row in positions], np.int64))
        out.masked_positions = np.array([p for row in positions for p in row], np.int32)
        at = np.repeat(offsets[:-1], np.diff(out.masked_offsets)) + out.masked_positions
        out.masked_labels = out.tokens[at].copy()
        out.tokens[at] = SPECIAL_IDS["mask"]
    return out


def make_shards(
    folder: str | Path,
    rows: int = 1000,
    max_length: int = 128,
    vocab_size: int = 1000,
    seed: int = 0,
    parts: int = 2,
    pairs: bool = True,
    held_out_rows: int = 64,
    static_masks: bool = False,
    single: float = 0.0,
) -> Path:
    """A complete shard folder (with held-out/ inside) of random rows; returns the folder.

    Ids 0..4 are pad, unk, cls, sep, mask; of the others every third continues a word.
    """
    folder = Path(folder)
    rng = np.random.default_rng(seed)
    layout = Layout(max_length, vocab_size, static_masks)
    word_start = np.arange(vocab_size) % 3 != 1
    meta = {
        "objective": "nsp" if pairs else "single",
        "mask_cap": math.ceil(0.15 * max_length),
        "settings": {"seed": seed, "synthetic": True}
        | ({"shards": {"single_prob": single}} if single else {}),
        "tokenizer": {
            "kind": "wordpiece",
            "vocab_size": vocab_size,
            "fingerprint": f"synthetic-{vocab_size}",
            "special_ids": SPECIAL_IDS,
            "word_start": pack_bools(word_start),
        },
        "tokenizer_folder": None,
        "sources": [],
        "counts": {},
    }
    for where, count, pieces in ((folder / HELD_OUT, held_out_rows, 1), (folder, rows, parts)):
        if count == 0 and where != folder:
            continue
        sizes = [count // pieces + (k < count % pieces) for k in range(pieces)]
        batches = [
            make_rows(rng, n, max_length, vocab_size, pairs, static_masks, single)
            for n in sizes
            if n
        ]
        stamp = f"synthetic-{seed}"
        write_folder(
            where, layout, stamp, batches, held_out=held_out_rows > 0 and where == folder, **meta
        )
    return folder


def open_checked(folder: Path) -> Shards:
    """The shards of a folder in which every byte and row is right."""
    assert check_folder(folder) == []
    return open_shards(folder)
