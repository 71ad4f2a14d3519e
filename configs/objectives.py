"""What the rows of a shard set are (shards.*.objective), and which model fits them."""

from __future__ import annotations

from collections.abc import Sequence

from configs.errors import UserError
from configs.model import ModelConfig
from configs.schema import ShardsConfig

PAIR_OBJECTIVES = ("nsp", "sop")  # rows of two segments and a label (shards.*.single_prob: not all)
OBJECTIVES = (*PAIR_OBJECTIVES, "full-sentences", "doc-sentences", "single")
SHORTEST = 8  # room for a row's special tokens and some words
ONE_SIDED = 0.95  # share of one label from which a head learns little else than to answer it


def check_objective(model: ModelConfig, name: str, objective: str) -> None:
    """An NSP head (1810.04805, task 2) needs rows of pairs.

    Rows of one segment all carry the label 0: the head would learn that answer alone and the pooler
    saturate on it, so that nothing could be fine-tuned (bench/RESULTS.md, five minutes).

    Raises:
        UserError: model.nsp_head is on and the set `name` (of recipe.shards) has no pairs.
    """
    if model.nsp_head and objective not in PAIR_OBJECTIVES:
        raise UserError(
            f"shards.{name} has rows without a next sentence (objective {objective}), and "
            "model.nsp_head=true would learn one constant answer from them",
            f"set model.nsp_head=false, or shards.{name}.objective=nsp (or sop) and build again",
        )


def check_rows(model: ModelConfig, name: str, objective: str, max_length: int) -> None:
    """Rows of the set `name` (of recipe.shards), of up to max_length tokens, must fit the model.

    Raises:
        UserError: more tokens than positions, two segments for one token type, or as `check_objective`.
    """
    if max_length > model.max_position_embeddings:
        raise UserError(
            f"shards.{name} has rows of up to {max_length} tokens, "
            f"model.max_position_embeddings={model.max_position_embeddings}",
            f"set model.max_position_embeddings to {max_length} or more",
        )
    if objective in PAIR_OBJECTIVES and model.type_vocab_size < 2:
        raise UserError(
            f"shards.{name} has rows of two segments, model.type_vocab_size=1", "set it to 2"
        )
    check_objective(model, name, objective)


def check_single(name: str, shards: ShardsConfig) -> None:
    """single_prob mixes rows of one segment among pairs; pair_max_length is of the pairs among them.

    Raises:
        UserError: the set `name` (of recipe.shards) has no pairs, or pair_max_length is nothing that
            rows of such a mixture could have.
    """
    longest = shards.pair_max_length
    if shards.objective not in PAIR_OBJECTIVES:
        for key in ("single_prob", "pair_max_length"):
            if value := getattr(shards, key):
                raise UserError(
                    f"shards.{name}.{key}={value:g} with objective {shards.objective}, "
                    "whose rows are single segments anyway",
                    f"leave it out, or set shards.{name}.objective=nsp (or sop)",
                )
    if longest and not shards.single_prob:
        raise UserError(
            f"shards.{name}.pair_max_length={longest} with single_prob=0: all rows are pairs, so none "
            "would be longer",
            f"set shards.{name}.max_length instead and pair_max_length=0, or single_prob as well",
        )
    if longest and not SHORTEST <= longest <= shards.max_length:
        raise UserError(
            f"shards.{name}.pair_max_length={longest} is not from {SHORTEST} to "
            f"max_length={shards.max_length}",
            "0 = pairs as long as other rows",
        )


def pairs_at_most(pair_max_length: int) -> str:
    """Behind "rows of at most N tokens"."""
    return f" (pairs at most {pair_max_length})" if pair_max_length else ""


def one_sided(labels: Sequence[int]) -> str:
    """What is wrong with pairs of these labels ([B follows A, B is random]); "" if nothing is."""
    rows = sum(labels)
    if not rows:
        return "no row has two segments"
    if max(labels) <= ONE_SIDED * rows:
        return ""
    kind = "B follows A" if labels[0] > labels[1] else "B does not follow A"
    return f"{kind} in {max(labels):,} of {rows:,} pairs"


def balance_remedy(name: str, labels: Sequence[int], pair_max_length: int = 0) -> str:
    """What gives the rows of set `name`, built with that pair_max_length, both labels, or needs none."""
    if not sum(labels):
        need = f"lower shards.{name}.single_prob, or give more documents"
    elif labels[0] > labels[1]:
        need = "give more documents, of which a random B is taken, or cut them: sources.N.document=window"
    else:
        key = "max_length"
        if pair_max_length:
            key = "pair_max_length (and max_length with it, where they are the same)"
        need = f"give documents of several sentences, or a pair room for two: raise shards.{name}.{key}"
    pairs = ", pair_max_length=0" if pair_max_length else ""
    return (
        f"{need}; or train without a next sentence: model.nsp_head=false, with "
        f"shards.{name}.objective=full-sentences, single_prob=0{pairs} built anew"
    )


def check_labels(
    model: ModelConfig, name: str, labels: Sequence[int], pair_max_length: int = 0
) -> list[str]:
    """Notes of a set of pairs whose labels are nearly all the same.

    Raises:
        UserError: model.nsp_head is on and they are all the same, or there are none.
    """
    wrong = one_sided(labels) if model.nsp_head else ""
    if wrong and not min(labels):
        raise UserError(
            f"shards.{name} lacks a next-sentence label ({wrong}), and model.nsp_head=true would "
            "learn one constant answer from it",
            balance_remedy(name, labels, pair_max_length),
        )
    remedy = balance_remedy(name, labels, pair_max_length)
    return [f"shards.{name}: {wrong}; {remedy}"] if wrong else []
