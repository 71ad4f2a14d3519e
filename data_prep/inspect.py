"""`python -m data_prep inspect FOLDER`: rows as a person wants to see them."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np

from configs import UserError, say
from configs.objectives import pairs_at_most
from data_prep.shards import Rows, Shards, held_out, open_shards

MEANING = {
    "nsp": ("B follows A", "B is from another document"),
    "sop": ("A and B in order", "A and B swapped"),
}


def main(argv: list[str]) -> int | None:
    parser = argparse.ArgumentParser(prog="python -m data_prep inspect", description=__doc__)
    parser.add_argument("folder", help="a shard folder")
    parser.add_argument(
        "--rows", type=int, default=3, metavar="N", help="N rows spread over the set"
    )
    parser.add_argument("--row", type=int, nargs="+", default=[], metavar="ID", help="these rows")
    parser.add_argument("--held-out", action="store_true", help="of the held-out rows")
    parser.add_argument("--ids", action="store_true", help="token ids too")
    arguments = parser.parse_args(argv)
    folder = Path(arguments.folder)
    shards = held_out(folder) if arguments.held_out else open_shards(folder)
    if arguments.rows < 0:
        raise UserError(f"--rows {arguments.rows}", "a number of rows")
    count = min(arguments.rows, shards.num_rows)
    wanted = arguments.row or np.linspace(0, shards.num_rows - 1, count).astype(int).tolist()
    for number in wanted:
        if not 0 <= number < shards.num_rows:
            raise UserError(f"--row {number}", f"rows go from 0 to {shards.num_rows - 1}")
    say(overview(shards))
    names = token_names(shards.folder)
    rows = shards.rows(np.array(wanted, np.int64))
    for position, number in enumerate(wanted):
        say(show(shards, rows, position, number, names, arguments.ids))
    return None


def token_names(folder: Path) -> list[str]:
    """The text of every token id, from the tokenizer beside the parts."""
    from data_prep.tokenizer import load

    return load(folder).tokens


def overview(shards: Shards) -> str:
    """A few lines about the whole set."""
    index = shards.index
    full = index["tokens"] / max(1, index["rows"] * shards.max_length)
    short = shards.built_from.get("pair_max_length", 0)
    lines = [
        f"{shards.folder}: {shards.objective}, {shards.num_rows:,} rows of at most "
        f"{shards.max_length} tokens{pairs_at_most(short)} in {len(index['parts'])} parts",
        f"  {index['tokens']:,} tokens ({100 * full:.0f}% of the length is used), at most "
        f"{shards.mask_cap} predictions a row, masks {'static' if index['static_masks'] else 'drawn in training'}",
    ]
    if shards.objective in MEANING:
        kinds = list(zip(index["labels"], MEANING[shards.objective]))
        if singles := index["rows"] - sum(index["labels"]):
            kinds.append((singles, "one segment"))
        lines.append("  " + ", ".join(f"{n:,} x {m}" for n, m in kinds))
    for source in index["sources"]:
        lines.append(
            f"  from {source['name']}: {source['documents_trained_on']:,} documents, "
            f"{source['documents_held_out']:,} held out"
        )
    return "\n".join(lines)


def show(
    shards: Shards, rows: Rows, position: int, number: int, names: list[str], ids: bool
) -> str:
    """One row as text: its segments, its masks as [was -> shown], its label."""
    tokens = rows.tokens[rows.offsets[position] : rows.offsets[position + 1]]
    masks: dict[int, int] = {}
    if rows.masked_offsets is not None:
        assert rows.masked_positions is not None and rows.masked_labels is not None
        span = slice(rows.masked_offsets[position], rows.masked_offsets[position + 1])
        masks = dict(zip(rows.masked_positions[span].tolist(), rows.masked_labels[span].tolist()))
    part = int(shards.part_of(np.array([number]))[0])
    lines = [f"\nrow {number}: {len(tokens)} tokens, in {shards.index['parts'][part]['file']}"]
    start_b = int(rows.segment_b[position])
    if shards.objective in MEANING and start_b:
        label = int(rows.next_sentence_label[position])
        lines[0] += f", label {label}: {MEANING[shards.objective][label]}"
    spans = [("A", 0, start_b), ("B", start_b, len(tokens))] if start_b else [(" ", 0, len(tokens))]
    for name, first, last in spans:
        words = [_word(names, tokens, masks, i) for i in range(first, last)]
        lines.append(f"  {name}  {join_words(words)}")
    if masks:
        lines.append(f"  {len(masks)} masks at {sorted(masks)}")
    if ids:
        lines.append(f"  ids {tokens.tolist()}")
    return "\n".join(lines)


def _word(names: list[str], tokens: np.ndarray, masks: dict[int, int], position: int) -> str:
    shown = names[int(tokens[position])]
    return f"[{names[masks[position]]} -> {shown}]" if position in masks else shown


def join_words(words: list[Any]) -> str:
    """WordPiece and SentencePiece tokens as running text."""
    if any(w.startswith(("▁", "Ġ")) for w in words):
        return "".join(w.replace("▁", " ").replace("Ġ", " ") for w in words).strip()
    text = ""
    for word in words:
        text += word[2:] if word.startswith("##") and len(word) > 2 else f" {word}"
    return text.strip()
