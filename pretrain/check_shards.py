"""Whether a recipe's shard sets are what it says now: their index tells what was asked for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from configs.errors import UserError
from configs.loading import difference
from configs.schema import Recipe
from data_prep.shards import Shards


def check_built(recipe: Recipe, shards: Mapping[str, Shards]) -> list[str]:
    """Compares with what `build` recorded; needs no text, only the index of each set.

    Args:
        shards: opened sets by their name in the recipe.

    Returns:
        Notes of sets whose sources the recipe names otherwise now: their text may lie elsewhere, or
        the set come from another recipe on purpose.

    Raises:
        UserError: a set was built with another length, objective, ... than recipe.shards says; the
            training would be on other rows than its recipe tells ever after.
    """
    notes = []
    for name, opened in shards.items():
        built = opened.index["settings"]
        changes = _changes(opened.built_from, _asked(recipe, name), f"shards.{name}.")
        if changes:
            raise UserError(
                f"{opened.folder} was built with other settings:\n  " + "\n  ".join(changes),
                "drop the override to train on what is there, or build it anew: in another work_dir, "
                "or after deleting the folder",
            )
        text, now = _sources_of(built), [asdict(s) | {"name": s.title} for s in recipe.sources]
        if text and now:
            lines = [f"{len(text)} there, {len(now)} now"] if len(text) != len(now) else []
            for number, (a, b) in enumerate(zip(text, now)):
                lines += _changes(a, b, f"sources.{number}.")
            if lines:
                notes.append(f"{opened.folder} was built from other sources: {'; '.join(lines)}")
    return notes


def _asked(recipe: Recipe, name: str) -> dict[str, Any]:
    asked = asdict(recipe.shards[name])
    if not asked["mask_cap"]:  # 0 comes to what the masking rates were; the trainer reads it there
        del asked["mask_cap"]
    return asked


def _sources_of(built: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The sources in their order, with the names and weights that lie beside them."""
    entries = built.get("documents", {}).get("sources", {})
    weights = built.get("weights", {})
    numbered = sorted((int(key.split(" ")[0]), key) for key in entries)
    return [
        {**entries[key], "name": key.partition(" ")[2], "weight": weights.get(key, 1.0)}
        for _, key in numbered
    ]


def _changes(there: Mapping[str, Any], now: Mapping[str, Any], prefix: str) -> list[str]:
    """Lines of the keys that both know: an index of another version may have more, or fewer."""
    known = there.keys() & now.keys()
    return difference({k: there[k] for k in known}, {k: now[k] for k in known}, prefix)
