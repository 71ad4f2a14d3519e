"""Whether a checkpoint is of the model, the tokenizer and the shards that a training would give it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from configs.errors import UserError
from configs.loading import to_dict
from configs.schema import Recipe
from pretrain.checkpoint.folder import Damaged, read_meta, resolve
from pretrain.same_tokenizer import anew_with, check_origin_tokenizer

if TYPE_CHECKING:
    from pretrain.checks import Plan


def check_origin(recipe: Recipe, plan: Plan) -> None:
    """The weights that checkpoint.init_from names, noted in the plan.

    Raises:
        UserError: no checkpoint, a damaged one, or one of another model or tokenizer.
    """
    named = recipe.checkpoint.init_from
    try:
        folder = resolve(named)
    except UserError as error:
        raise UserError(
            f"checkpoint.init_from={error.what}",
            f"{error.remedy}; of a model of others `python -m pretrain import {named} OUT` makes one",
        ) from None
    try:
        meta = read_meta(folder)
    except Damaged as error:
        raise UserError(
            f"checkpoint.init_from: {error}", "name an older step-... folder of that run"
        ) from None
    where = f"checkpoint.init_from={folder}"
    file = (folder.resolve() / "../../../vocab/tokenizer.json").resolve()
    anew = anew_with(file if file.is_file() else "...")
    odd = _odd_sizes(meta, plan)
    if odd:
        raise UserError(
            f"{where} holds another model: {'; '.join(odd)}",
            anew
            if odd[0].startswith("vocab_size")
            else "use its model keys, or leave checkpoint.init_from out",
        )
    _check_fingerprint(meta, plan, where, anew)
    plan.origin = str(meta.get("imported", {}).get("from", folder))
    # An imported model knows no fingerprint, but its tokenizer lies beside it.
    if not meta.get("tokenizer_fingerprint") and file.is_file():
        for shards in plan.shards.values():
            check_origin_tokenizer(file, shards.folder)


def check_same(meta: Mapping[str, Any], plan: Plan, where: str) -> None:
    """The meta data of a checkpoint to go on from; UserError if it is of something else."""
    odd = _odd_sizes(meta, plan)
    if odd:
        raise UserError(
            f"{where} holds another model: {'; '.join(odd)}",
            "use its model keys, or a new work_dir",
        )
    _check_fingerprint(meta, plan, where, "use the shards it was trained on, or a new work_dir")
    for name, fingerprint in meta.get("shards", {}).items():
        here = plan.shards.get(name)
        if here is not None and here.fingerprint != fingerprint:
            raise UserError(
                f"{where} was trained on shards/{name} with fingerprint {fingerprint}; "
                f"{here.folder} has {here.fingerprint}",
                "put those shards back, or use a new work_dir (checkpoint.init_from keeps the weights)",
            )


def _odd_sizes(meta: Mapping[str, Any], plan: Plan) -> list[str]:
    theirs, ours = meta["model"], to_dict(plan.model)
    shape = ("vocab_size", "hidden_size", "num_layers", "num_heads", "intermediate_size",
             "max_position_embeddings", "type_vocab_size", "nsp_head")  # fmt: skip
    return [
        f"{k}: {theirs[k]} there, {ours[k]} here"
        for k in shape
        if theirs.get(k, ours[k]) != ours[k]
    ]


def _check_fingerprint(meta: Mapping[str, Any], plan: Plan, where: str, remedy: str) -> None:
    ours = next(iter(plan.shards.values())).tokenizer_fingerprint
    theirs = meta.get("tokenizer_fingerprint")
    if theirs not in (None, ours):
        raise UserError(
            f"{where} was trained with tokenizer {theirs}, the shards have {ours}", remedy
        )
