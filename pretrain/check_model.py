"""Whether a recipe's model fits its layout and its shards."""

from __future__ import annotations

from collections.abc import Mapping

from configs.errors import UserError
from configs.model import ModelConfig, padded_vocab, resolve_model
from configs.objectives import check_labels, check_rows
from configs.schema import Recipe
from data_prep.shards import Shards


def check_model(
    recipe: Recipe, first: Shards, shards: Mapping[str, Shards]
) -> tuple[ModelConfig, list[str]]:
    """The model of a recipe with the sizes that come from its shards, and notes of what is odd.

    Args:
        first: the set of the first phase; its tokenizer gives the vocabulary size.
        shards: every set that a phase trains on, by its name in the recipe.

    Raises:
        UserError: vocabulary, heads or MLP against tp; rows longer than the positions; rows of
            pairs without token types; an NSP head on rows that are no pairs, or have one label; an empty set.
    """
    model = resolve_model(recipe.model, first.vocab_size)
    tp = recipe.parallel.tp
    if model.vocab_size != first.vocab_size:
        raise UserError(
            f"model.vocab_size={model.vocab_size}, the tokenizer has {first.vocab_size} ids",
            "leave model.vocab_size at 0: it comes from the tokenizer, and "
            "model.vocab_pad_multiple rounds it up",
        )
    for name in ("num_heads", "intermediate_size"):
        value = getattr(model, name)
        if value % tp:
            raise UserError(
                f"model.{name}={value} is not divisible by parallel.tp={tp}",
                f"tp must divide {value}",
            )
    if padded_vocab(model, tp) % tp:
        raise UserError(
            f"the padded vocabulary {padded_vocab(model, tp)} is not divisible by parallel.tp={tp}",
            "choose a vocab_pad_multiple of at least 1",
        )
    notes = []
    for name, s in shards.items():
        check_rows(model, name, s.objective, s.max_length)
        if not s.num_rows:
            raise UserError(f"{s.folder} holds no rows", "give the recipe more text")
        notes += check_labels(
            model, name, s.index["labels"], s.built_from.get("pair_max_length", 0)
        )
    return model, notes
