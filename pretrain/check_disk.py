"""Whether the disk has room for the checkpoints to come."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

from configs.checkpoints import bytes_left_behind, saves_to_hold
from configs.errors import UserError
from configs.files import make_folder
from configs.model import parameter_count
from configs.schema import Recipe

if TYPE_CHECKING:
    from pretrain.checks import Plan


def check_disk(recipe: Recipe, plan: Plan) -> None:
    """Looked at by rank 0.

    Raises:
        UserError: there is not; says what they take and what is free.
    """
    if plan.rank != 0:
        return
    make_folder(plan.train_dir)
    every, keep = recipe.checkpoint.every, recipe.checkpoint.keep
    to_come = sum(end > plan.newest for end in plan.ends) + (
        (plan.end - plan.newest) // every if every else 0
    )
    saves = min(to_come, saves_to_hold(plan.train_dir, keep, plan.newest))
    need = 12 * parameter_count(plan.model) * saves
    free = shutil.disk_usage(plan.train_dir).free + bytes_left_behind(plan.train_dir)
    if need > free:
        fewer = saves > 1 and keep > 1  # else keep is not what makes them many
        held = f" (checkpoint.keep={keep} and one in the making)" if fewer else ""
        raise UserError(
            f"{plan.train_dir}: {saves} more checkpoint{'s' * (saves > 1)}{held} "
            f"take{'s' * (saves == 1)} {need / 1e9:.3g} GB, {free / 1e9:.3g} GB are free",
            f"free some disk, {'lower checkpoint.keep, ' * fewer}or put work_dir on another disk",
        )
