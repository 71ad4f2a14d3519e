"""What a build says of a finished set: the numbers, and loudly what makes it less than it looks."""

from __future__ import annotations

from pathlib import Path

from configs import say
from configs.objectives import PAIR_OBJECTIVES, balance_remedy, one_sided
from data_prep.shard_index import HELD_OUT, read_index


def report(folder: Path) -> None:
    """Prints the summary of a shard folder, notes last."""
    index = read_index(folder)
    full = index["tokens"] / max(1, index["rows"] * index["max_length"])
    labels = index["labels"]
    say(
        f"{folder}: {index['rows']:,} rows, {index['tokens']:,} tokens in {len(index['parts'])} parts,"
        f" {100 * full:.0f}% full, labels {labels[0]:,} / {labels[1]:,}"
    )
    for source in index["sources"]:
        dropped = ", ".join(f"{k} {v:,}" for k, v in source["dropped"].items())
        say(
            f"  {source['name']}: {source['documents_trained_on']:,} documents,"
            f" {source['documents_held_out']:,} held out"
            + (f"; dropped: {dropped}" if dropped else "")
        )
    if index["held_out"]:
        say(f"  held out: {read_index(folder / HELD_OUT)['rows']:,} rows")
    counts = ", ".join(f"{name} {count:,}" for name, count in index["counts"].items())
    if counts:
        say(f"  {counts}")
    wrong = one_sided(labels) if index["objective"] in PAIR_OBJECTIVES else ""
    if wrong:
        say(
            f"note: {folder.name}: {wrong}, so that a next-sentence head would learn one answer"
            f"\n  -> {balance_remedy(folder.name, labels)}"
        )
