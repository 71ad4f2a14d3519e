"""What the rows of a shard set are (shards.*.objective), and which model fits them."""

from __future__ import annotations

from configs.errors import UserError
from configs.model import ModelConfig

PAIR_OBJECTIVES = ("nsp", "sop")  # rows of two segments and a label
OBJECTIVES = (*PAIR_OBJECTIVES, "full-sentences", "doc-sentences", "single")


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
