"""What decides the bytes of a build: the settings a folder is stamped with."""

from __future__ import annotations

import hashlib
import math
import shutil
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

from configs import Recipe, UserError, say
from configs.loading import difference
from configs.masking import highest_rate
from configs.schema import ShardsConfig, SourceConfig
from data_prep.shard_index import built_shards

# Modules that cannot change what a build writes.
_NO_INFLUENCE = {
    "executor.py",
    "build.py",
    "verify.py",
    "shard_check.py",
    "summary.py",
    "inspect.py",
    "audit.py",
    "sample.py",
    "__main__.py",
}
# SourceConfig keys that say where the text lies or how it is read; its content is hashed instead.
_NOT_CONTENT = {"path", "streaming", "weight"}


@cache
def code_digest() -> str:
    """sha256 over the source text of what makes documents and rows: changed code is stale work."""
    here = Path(__file__).parent
    digest = hashlib.sha256()
    for path in sorted(
        p for p in here.rglob("*") if p.suffix in (".py", ".c", ".cpp", ".pyx", ".rs")
    ):
        if path.parent == here and path.name in _NO_INFLUENCE:
            continue
        digest.update(
            path.relative_to(here).as_posix().encode() + b"\0" + path.read_bytes() + b"\0"
        )
    return digest.hexdigest()[:16]


def document_settings(
    sources: list[SourceConfig], names: list[str], inputs: list[str], tokenizer: dict[str, Any],
    abbreviations: str,
) -> dict[str, Any]:  # fmt: skip
    """What decides the tokenised documents. inputs: a digest of each source's content."""
    words = hashlib.sha256(Path(abbreviations).read_bytes()).hexdigest() if abbreviations else ""
    return {
        "code": code_digest(),
        "tokenizer": tokenizer,
        "abbreviations": words,
        "sources": {
            f"{number} {name}": {k: v for k, v in asdict(s).items() if k not in _NOT_CONTENT and k != "name"}
            | {"content": content}
            for number, (s, name, content) in enumerate(zip(sources, names, inputs))
        },
    }  # fmt: skip


def set_settings(recipe: Recipe, name: str, documents: dict[str, Any]) -> dict[str, Any]:
    """What decides the rows of the set `name`."""
    shards = recipe.shards[name]
    settings: dict[str, Any] = {
        "documents": documents,
        "weights": {
            title: source.weight for title, source in zip(documents["sources"], recipe.sources)
        },
        "seed": recipe.seed,
        "shards": asdict(shards) | {"mask_cap": mask_cap(recipe, name)},
        "held_out": recipe.prep.held_out,
        "part_mb": recipe.prep.part_mb,
        "drop_duplicates": recipe.prep.drop_duplicates,
    }
    if shards.static_masks:
        settings["masking"] = asdict(recipe.masking)
    return settings


def set_changes(index: dict[str, Any], now: dict[str, Any], shards: ShardsConfig) -> list[str]:
    """How the settings that a finished set was built from differ from those it would have now. Where
    no cap is asked for and masks are drawn in training, a higher one serves: the rows are the same."""
    cap = index["mask_cap"]
    if not shards.mask_cap and not shards.static_masks and cap > now["shards"]["mask_cap"]:
        now = now | {"shards": now["shards"] | {"mask_cap": cap}}
    there = index["settings"] | {"shards": built_shards(index)}
    return difference(there, now)


def mask_cap(recipe: Recipe, name: str) -> int:
    """Predictions a row of the set `name` at most: as the recipe says, or what its rates need."""
    return recipe.shards[name].mask_cap or _needed(highest_rate(recipe, name), recipe.shards[name])


def _needed(rate: float, shards: ShardsConfig) -> int:
    """ceil(rate x max_length): 20 of 128 and 77 of 512 for 15%."""
    return math.ceil(rate * shards.max_length - 1e-9)


def leaves(settings: dict[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    """Every leaf as (dotted key, value)."""
    found: list[tuple[str, Any]] = []
    for key, value in settings.items():
        if isinstance(value, dict):
            found += leaves(value, f"{prefix}{key}.")
        else:
            found.append((f"{prefix}{key}", value))
    return found


def check_recipe(recipe: Recipe, names: list[str]) -> None:
    """Refuses what no build can work with and the loading of a recipe lets pass, before anything is read.

    Raises:
        UserError: names the key and its value.
    """
    if not recipe.sources:
        raise UserError(
            "the recipe has no sources", "add `sources:` with at least one kind and path"
        )
    words = recipe.prep.abbreviations
    if words and not Path(words).is_file():
        raise UserError(
            f"prep.abbreviations={words}: no such file",
            "name a file with one abbreviation a line, or leave it empty",
        )
    for name in names:
        if name not in recipe.shards:
            known = ", ".join(recipe.shards)
            raise UserError(f"the recipe has no shard set {name!r}", f"known sets: {known}")
        _tell_low_cap(recipe, name)


def _tell_low_cap(recipe: Recipe, name: str) -> None:
    shards, rate = recipe.shards[name], recipe.masking.probability
    cap, length = shards.mask_cap, shards.max_length
    if cap and cap < _needed(rate, shards):
        say(
            f"warning: shards.{name}.mask_cap={cap} masks at most {100 * cap / length:.1f}% of a row of "
            f"{length}, not {100 * rate:.0f}%; 0 would give "
            f"{_needed(highest_rate(recipe, name), shards)}"
        )


def check_disk(folder: Path, need: int, what: str) -> None:
    """Says how much disk a step needs and refuses when it is not there."""
    free = shutil.disk_usage(folder).free
    say(f"disk: {what} needs about {gigabytes(need)}, {gigabytes(free)} free at {folder}")
    if need > free:
        raise UserError(
            f"{folder}: {what} needs about {gigabytes(need)}, only {gigabytes(free)} are free",
            "set work_dir to a larger disk, or lower shards.NAME.dupe_factor or a source's weight where "
            "they are above 1",
        )


def gigabytes(count: int) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 1e7 else f"{count / 1e6:.2f} MB"
