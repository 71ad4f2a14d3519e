"""Which units make rows together, and what became of every source's documents.

A group is the pool a random B is drawn from: neighbouring units of one source, until there are
documents enough. It depends on the units alone, never on who builds it.
"""

from __future__ import annotations

from collections import Counter
from typing import Any, NamedTuple

from data_prep.arrays import load_arrays
from data_prep.documents import Unit, select
from data_prep.rows import HELD_OUT, TRAIN, Group, SetContext

# Enough documents for a random B, small enough to keep every worker busy.
GROUP_DOCUMENTS, GROUP_TOKENS = 16, 1 << 20
# Documents of tens of megabytes: two will do, since a worker holds a whole group.
LARGEST_GROUP = 16 << 20
TOKENS_AT_ONCE = 32 << 20  # of one group over its passes: bounds a worker's memory
UNKNOWN_WORDS = 100  # of a source, kept for the audit


class Share(NamedTuple):
    """What a unit gives to the training rows, or to the held-out rows."""

    unit: int
    source: int
    documents: int
    tokens: int
    copies: int  # passes over the document that is used most often


def make_groups(
    context: SetContext, units: list[Unit], names: list[str], counts: list[dict[str, Any]]
) -> tuple[list[Group], list[dict[str, Any]]]:
    """Groups of units for training and held-out rows; the index's entry of every source.

    names: of the sources. counts: what `tokenise_unit` returned of each unit.
    """
    used: list[dict[str, Any]] = [
        {
            "name": name, "kind": source.kind, "weight": source.weight, "units": 0, "documents": 0,
            "sentences": 0, "tokens": 0, "bytes": 0, "unknown_tokens": 0, "documents_trained_on": 0,
            "documents_held_out": 0, "tokens_trained_on": 0, "tokens_held_out": 0,
            "dropped": Counter(), "unknowns": Counter(), "replaced": Counter(), "first": {},
        }
        for name, source in zip(names, context.documents.sources)
    ]  # fmt: skip
    shares: dict[str, list[Share]] = {TRAIN: [], HELD_OUT: []}
    for unit, count in zip(units, counts):
        entry = used[unit.source]
        entry["units"] += 1
        for key in ("documents", "sentences", "tokens", "bytes", "unknown_tokens"):
            entry[key] += count[key]
        entry["dropped"].update(count["dropped"])
        entry["replaced"].update(count["replaced"])
        entry["first"] = count["first"] | entry["first"]
        entry["unknowns"].update(count["unknowns"])
        selection = select(context.documents, unit.number, context.shards.dupe_factor)
        unused = int((selection.copies == 0).sum())
        entry["dropped"]["duplicates"] += selection.duplicates
        entry["dropped"]["left out by weight"] += unused - selection.duplicates
        lengths = load_arrays(context.documents.unit_file(unit.number))[0]["document_tokens"]
        for kind, name in ((TRAIN, "trained_on"), (HELD_OUT, "held_out")):
            chosen = selection.of(kind)
            tokens = int(lengths[chosen].sum())
            entry[f"documents_{name}"] += len(chosen)
            entry[f"tokens_{name}"] += tokens
            copies = int(selection.copies[chosen].max(initial=0))
            if len(chosen):
                shares[kind].append(Share(unit.number, unit.source, len(chosen), tokens, copies))
    for entry in used:
        entry["dropped"] = {k: v for k, v in sorted(entry["dropped"].items()) if v}
        entry["replaced"] = dict(sorted(entry["replaced"].items()))
        for key in ("replaced", "first"):
            if not entry[key]:  # as nearly always
                del entry[key]
        words = sorted(entry["unknowns"].items(), key=lambda item: (-item[1], item[0]))
        entry["unknowns"] = dict(words[:UNKNOWN_WORDS])
    groups: list[Group] = []
    for kind in (TRAIN, HELD_OUT):
        groups += _groups_of(kind, shares[kind])
    return groups, used


def _groups_of(kind: str, shares: list[Share]) -> list[Group]:
    """Groups, each cut into runs of passes that a worker can hold."""
    groups: list[Group] = []
    for members in join_units(shares):
        copies = max(m.copies for m in members)
        tokens = sum(m.tokens for m in members)
        step = max(1, TOKENS_AT_ONCE // max(tokens, 1))
        units = tuple(m.unit for m in members)
        for first in range(0, copies, step):
            end = min(first + step, copies)
            groups.append(Group(kind, len(groups), units, first, end, tokens * (end - first)))
    return groups


def join_units(shares: list[Share]) -> list[list[Share]]:
    """Neighbouring units of a source, until a group has documents and tokens enough.

    What is left at a source's end joins the group before it; a group of a single document joins a
    neighbour of another source, since a random B must come from another document.
    """
    groups: list[list[Share]] = []
    full = True
    for share in shares:
        if full or groups[-1][-1].source != share.source:
            groups.append([])
        groups[-1].append(share)
        full = _enough(groups[-1])
    joined: list[list[Share]] = []
    for group in groups:
        same = joined and joined[-1][-1].source == group[0].source
        alone = joined and 1 in (_documents(group), _documents(joined[-1]))
        if joined and ((same and not _enough(group)) or alone):
            joined[-1] += group
        else:
            joined.append(group)
    return joined


def _documents(group: list[Share]) -> int:
    return sum(share.documents for share in group)


def _enough(group: list[Share]) -> bool:
    documents, tokens = _documents(group), sum(share.tokens for share in group)
    if documents >= 2 and tokens >= LARGEST_GROUP:
        return True
    return documents >= GROUP_DOCUMENTS and tokens >= GROUP_TOKENS
