"""Whether the processes of a job can share out the model and its state as a recipe asks."""

from __future__ import annotations

from configs.errors import UserError
from configs.schema import Recipe
from pretrain.optim.choice import check_implementation


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
        check_implementation(recipe, world)
