"""What is known of a recipe's vocabulary and rows once they are made, read without importing anything."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from configs.schema import Recipe


def built_vocabulary(recipe: Recipe) -> int:
    """Tokens of the vocabulary that the training will find: of its rows, else of work_dir/vocab.

    0: not made yet, or not readable."""
    for phase in recipe.phases[:1]:
        tokenizer = _read(_set_of(recipe, phase.shards) / "index.json").get("tokenizer")
        if isinstance(tokenizer, dict) and isinstance(tokenizer.get("vocab_size"), int):
            return int(tokenizer["vocab_size"])
    made = _read(Path(recipe.work_dir) / "vocab" / "tokenizer.json")
    try:
        vocab = made["model"]["vocab"]  # token -> id, or in Unigram pairs in their order
        ids = [*vocab.values()] if isinstance(vocab, dict) else [len(vocab) - 1]
        return int(max(ids + [token["id"] for token in made["added_tokens"]])) + 1
    except (KeyError, TypeError, ValueError):
        return 0


def built_fill(recipe: Recipe, name: str) -> float:
    """Mean over maximum length of the rows of the set `name`; 0: not built yet, or not readable."""
    try:
        parts = _read(_set_of(recipe, name) / "index.json")["parts"]
        rows, tokens = (sum(part[key] for part in parts) for key in ("rows", "tokens"))
        return float(tokens / (rows * recipe.shards[name].max_length))
    except (KeyError, TypeError, ZeroDivisionError):
        return 0.0


def _set_of(recipe: Recipe, name: str) -> Path:
    return Path(recipe.train.shards_dir or f"{recipe.work_dir}/shards") / name


def _read(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return values if isinstance(values, dict) else {}
