"""Whether the processes of a job can share out the model and its state as a recipe asks."""

from __future__ import annotations

from configs.errors import UserError
from configs.schema import Recipe
from configs.sharing import SMALLEST
from pretrain.optim.choice import check_implementation


def check_layout(recipe: Recipe, world: int) -> None:
    """Raises UserError: they cannot; names the key. world: processes."""
    tp, stage, parallel = recipe.parallel.tp, recipe.parallel.zero_stage, recipe.parallel
    if tp < 1 or world % tp:
        raise UserError(
            f"parallel.tp={tp} does not divide the {world} processes of this job",
            f"start a multiple of {max(tp, 1)} processes, or choose another tp",
        )
    if stage not in (0, 1, 2):
        why = "would cut tensors that LAMB's trust ratios need" if stage == 3 else "is not a stage"
        raise UserError(f"parallel.zero_stage={stage} {why}", "use 0, 1 or 2")
    if parallel.engine == "lean" and stage == 2 and world > tp:
        raise UserError(
            "parallel.engine=lean has no zero_stage=2", "use zero_stage=1, or engine=deepspeed"
        )
    if parallel.engine == "deepspeed" and stage == 0:
        raise UserError(
            "parallel.engine=deepspeed with zero_stage=0 would accumulate in low precision",
            "use zero_stage=1 or 2, or engine=lean",
        )
    if parallel.sequence_parallel and tp == 1:
        raise UserError(
            "parallel.sequence_parallel=true has no meaning with parallel.tp=1",
            "set tp above 1 or sequence_parallel=false",
        )
    if parallel.sequence_parallel and SMALLEST % tp:
        raise UserError(
            f"parallel.sequence_parallel=true cannot share out tokens evenly over parallel.tp={tp}",
            f"choose a tp that divides {SMALLEST}, or sequence_parallel=false",
        )
    if recipe.optimizer.implementation != "lambert":
        check_implementation(recipe, world)
