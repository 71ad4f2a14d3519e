"""Static masks: drawn once when the shard is built (BERT's own way), per token."""

from __future__ import annotations

import numpy as np

from configs.schema import MaskingConfig
from data_prep.shards import Rows, offsets_of


def static_masks(
    rows: Rows,
    keys: np.ndarray,
    special: dict[str, int],
    vocab_size: int,
    cap: int,
    masking: MaskingConfig,
) -> None:
    """Masks rows in place and fills masked_positions, masked_labels, masked_offsets.

    n = min(cap, max(1, round_half_even(probability x length))) tokens of a row that are not
    [CLS] or [SEP] (fewer only if there are fewer); of these 80% become [MASK], 10% a random id,
    10% stay. keys: uint64 [rows], a random number of each row: what is drawn depends on it and on
    the position alone.
    """
    lengths = rows.lengths
    row_of = np.repeat(np.arange(len(lengths)), lengths)
    position = np.arange(len(row_of)) - np.repeat(rows.offsets[:-1], lengths)
    draws = _hash(keys[row_of], position)
    candidate = (rows.tokens != special["cls"]) & (rows.tokens != special["sep"])
    wanted = np.clip(np.rint(masking.probability * lengths).astype(np.int64), 1, cap)
    places = np.flatnonzero(candidate)
    order = places[np.lexsort((draws[places], row_of[places]))]
    per_row = np.bincount(row_of[order], minlength=len(lengths))
    rank = np.arange(len(order)) - np.repeat(offsets_of(per_row)[:-1], per_row)
    chosen = np.sort(order[rank < np.repeat(np.minimum(wanted, per_row), per_row)])
    rows.masked_offsets = offsets_of(np.bincount(row_of[chosen], minlength=len(lengths)))
    rows.masked_positions = position[chosen].astype(np.uint16)
    rows.masked_labels = rows.tokens[chosen]
    how = _hash(draws[chosen], 1).astype(np.float64) * 2.0**-64
    ids = np.setdiff1d(np.arange(vocab_size), list(special.values()))
    random_ids = ids[(_hash(draws[chosen], 2) % np.uint64(len(ids))).astype(np.int64)]
    masked = rows.masked_labels.copy()
    use_random = (how >= masking.replace_mask) & (
        how < masking.replace_mask + masking.replace_random
    )
    masked[use_random] = random_ids[use_random]
    masked[how < masking.replace_mask] = special["mask"]
    rows.tokens[chosen] = masked


def _hash(keys: np.ndarray, salt: np.ndarray | int) -> np.ndarray:
    """Counter-based random uint64 of (key, salt): two rounds of splitmix64's finaliser."""
    with np.errstate(over="ignore"):
        z = keys + (np.asarray(salt, np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            z = (z ^ (z >> np.uint64(shift))) * np.uint64(factor)
        return z ^ (z >> np.uint64(31))
