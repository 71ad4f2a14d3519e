"""What a build says of a finished set: the numbers, and loudly what makes it less than it looks."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from configs import say
from configs.objectives import PAIR_OBJECTIVES, balance_remedy, one_sided
from data_prep.shard_index import HELD_OUT, built_shards, read_index

SAID_UNKNOWN, TOO_UNKNOWN = 0.01, 0.1  # shares of a source's tokens; English under its own: 0.0001
EXAMPLES = 5  # of unknown words


def report(folder: Path) -> None:
    """Prints the summary of a shard folder, notes last."""
    index = read_index(folder)
    full = index["tokens"] / max(1, index["rows"] * index["max_length"])
    labels, pairs = index["labels"], index["objective"] in PAIR_OBJECTIVES
    say(
        f"{folder}: {index['rows']:,} rows, {index['tokens']:,} tokens in {len(index['parts'])} parts,"
        f" {100 * full:.0f}% full" + (_labels(index["rows"], labels) if pairs else "")
    )
    for source in index["sources"]:
        say(_source(source))
    if index["held_out"]:
        say(f"  held out: {read_index(folder / HELD_OUT)['rows']:,} rows")
    counts = ", ".join(f"{name} {count:,}" for name, count in index["counts"].items())
    if counts:
        say(f"  {counts}")
    for source in index["sources"]:
        if _unknown(source) > TOO_UNKNOWN:
            words = " ".join(list(source["unknowns"])[:EXAMPLES])
            say(
                f"note: {folder.name}: the vocabulary does not know {100 * _unknown(source):.0f}% of the"
                f" tokens of {source['name']} ({words})\n  -> train one on this text"
                " (vocab.file=''), or give one of its language as vocab.file, in another work_dir"
            )
    wrong = one_sided(labels) if pairs else ""
    if wrong:
        remedy = balance_remedy(folder.name, labels, built_shards(index).get("pair_max_length", 0))
        say(
            f"note: {folder.name}: {wrong}, so that a next-sentence head would learn one answer"
            f"\n  -> {remedy}"
        )


def _labels(rows: int, labels: list[int]) -> str:
    alone = rows - sum(labels)
    return f", labels {labels[0]:,} / {labels[1]:,}" + (f", {alone:,} without" if alone else "")


def _source(source: dict[str, Any]) -> str:
    parts = [
        f"  {source['name']}: {source['documents_trained_on']:,} documents,"
        f" {source['documents_held_out']:,} held out"
    ]
    for key, what in (("dropped", "dropped"), ("replaced", "not UTF-8")):
        if counts := counted(source.get(key, {}), source.get("first", {})):
            parts.append(f"{what}: {counts}")
    if _unknown(source) > SAID_UNKNOWN:
        parts.append(f"unknown tokens {100 * _unknown(source):.1f}%")
    return "; ".join(parts)


def counted(counts: Mapping[str, int], first: Mapping[str, str]) -> str:
    """`redirect 3, files that are no text 2 (first news/a.bin)`."""
    return ", ".join(
        f"{reason} {count:,}" + (f" (first {first[reason]})" if reason in first else "")
        for reason, count in counts.items()
    )


def _unknown(source: dict[str, Any]) -> float:
    """The share of [UNK] among a source's tokens."""
    return float(source["unknown_tokens"] / max(1, source["tokens"]))
