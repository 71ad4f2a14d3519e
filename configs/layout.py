"""Whether so many processes can share out the model and its state as a recipe asks: by arithmetic, for
training and for the chain of jobs that leads to it."""

from __future__ import annotations

from configs.errors import UserError
from configs.schema import Recipe


def check_layout(recipe: Recipe, world: int) -> None:
    """Raises UserError: they cannot; names the key. world: processes."""
    tp, stage, parallel = recipe.parallel.tp, recipe.parallel.zero_stage, recipe.parallel
    if tp < 1 or world % tp:
        raise UserError(
            f"parallel.tp={tp} does not divide the {world} processes of this job",
            f"start a multiple of {max(tp, 1)} processes, or choose another tp",
        )
    if parallel.engine == "lean" and stage == 2 and world > tp:
        raise UserError(
            "parallel.engine=lean has no zero_stage=2", "use zero_stage=1, or engine=deepspeed"
        )
    if recipe.optimizer.implementation != "lambert":
        _check_implementation(recipe, world)


def _check_implementation(recipe: Recipe, world: int) -> None:
    """Other LAMBs see whole tensors or are wrong: refuses them, with the reason, where they are."""
    name, optimizer = recipe.optimizer.implementation, recipe.optimizer
    tp = recipe.parallel.tp
    if (
        tp > 1
        or (recipe.parallel.zero_stage > 0 and world > 1)
        or recipe.parallel.engine == "deepspeed"
    ):
        raise UserError(
            f"optimizer.implementation={name} takes each tensor's norm on one rank, which is wrong "
            f"where tensors are cut (engine={recipe.parallel.engine}, tp={tp}, "
            f"zero_stage={recipe.parallel.zero_stage}, {world} processes)",
            "use optimizer.implementation=lambert, or parallel.engine=lean with parallel.tp=1 and "
            "parallel.zero_stage=0",
        )
    if optimizer.orthogonal_lr > 0 and name in ("deepspeed", "apex"):
        raise UserError(
            f"optimizer.implementation={name} knows no optimizer.orthogonal_lr",
            "use optimizer.implementation=lambert, or set optimizer.orthogonal_lr=0",
        )
    if name == "deepspeed" and optimizer.bias_correction:
        raise UserError(
            "optimizer.implementation=deepspeed: FusedLamb corrects the bias after the trust ratio, "
            "which is not LAMB (1904.00962, algorithm 2)",
            "use optimizer.implementation=lambert, or optimizer.bias_correction=false",
        )
    if name == "deepspeed" and not optimizer.adapt_bias_and_norm:
        raise UserError(
            "optimizer.implementation=deepspeed adapts every tensor",
            "set optimizer.adapt_bias_and_norm=true",
        )
    if name == "apex" and (optimizer.trust_ratio_min or optimizer.trust_ratio_max):
        raise UserError(
            "optimizer.implementation=apex: FusedLAMB has no limits of the trust ratio",
            "set optimizer.trust_ratio_min=0 and optimizer.trust_ratio_max=0",
        )
