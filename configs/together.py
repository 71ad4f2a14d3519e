"""What keys of a recipe must be to one another, said when it is loaded: before jobs are queued, shards
are built or torch is imported.

Bounds of single keys are in configs/ranges.py, what the number of processes allows in
configs/layout.py. What depends on the shards or on the machine is checked by the room that reads it.
"""

from __future__ import annotations

import re

from configs.errors import UserError
from configs.masking import check_masking, check_rate
from configs.objectives import check_single
from configs.phases import check_schedule, check_shares
from configs.schema import Recipe
from configs.sharing import SMALLEST


def check_together(recipe: Recipe) -> None:
    """Raises UserError: keys contradict one another; names them."""
    _check_sets(recipe)
    _check_phases(recipe)
    check_masking(recipe.masking)
    _check_layout(recipe)
    low, high = recipe.optimizer.trust_ratio_min, recipe.optimizer.trust_ratio_max
    if high and low > high:
        raise UserError(
            f"optimizer.trust_ratio_min={low} is above trust_ratio_max={high}",
            "lower it, or set trust_ratio_max=0 for no ceiling",
        )


def _check_sets(recipe: Recipe) -> None:
    for name, shards in recipe.shards.items():
        if not re.fullmatch(r"\w[\w.-]*", name):
            raise UserError(
                f"shards.{name}: no name for its folder",
                "take letters, digits, `_`, `-` and `.`, a letter or digit first",
            )
        check_single(name, shards)
        if shards.mask_cap >= shards.max_length:
            raise UserError(
                f"shards.{name}.mask_cap={shards.mask_cap} is not below max_length={shards.max_length}",
                "lower it; 0 = what the masking rates need",
            )
        if shards.static_masks and recipe.masking.kind != "token":
            raise UserError(
                f"shards.{name}.static_masks with masking.kind={recipe.masking.kind}",
                "static masks are drawn per token; leave static_masks off for other kinds",
            )


def _check_phases(recipe: Recipe) -> None:
    for number, phase in enumerate(recipe.phases):
        if phase.shards not in recipe.shards:
            raise UserError(
                f"phases.{number}.shards={phase.shards} is not a set under `shards`",
                f"known sets: {', '.join(recipe.shards)}",
            )
        shards = recipe.shards[phase.shards]
        cap = shards.mask_cap or shards.max_length  # 0: follows the rates
        check_rate(number, phase, shards.max_length, cap, shards.static_masks)
        check_schedule(phase.schedule, phase.steps, f"phases.{number}.schedule")
    check_shares(recipe)


def _check_layout(recipe: Recipe) -> None:
    parallel = recipe.parallel
    tp, stage = parallel.tp, parallel.zero_stage
    if stage not in (0, 1, 2):
        why = "would cut tensors that LAMB's trust ratios need" if stage == 3 else "is not a stage"
        raise UserError(f"parallel.zero_stage={stage} {why}", "use 0, 1 or 2")
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
