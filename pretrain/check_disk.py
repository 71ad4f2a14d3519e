"""Whether the disk has room for the checkpoints to come."""

from __future__ import annotations

import contextlib
import shutil
from typing import TYPE_CHECKING

from configs.errors import UserError
from configs.files import make_folder
from configs.model import parameter_count
from configs.schema import Recipe
from pretrain.checkpoint.folder import checkpoints, incomplete

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
    # One more than is kept: the old one goes only after the new one is complete.
    every, keep = recipe.checkpoint.every, recipe.checkpoint.keep
    to_come = sum(end > plan.newest for end in plan.ends) + (
        (plan.end - plan.newest) // every if every else 0
    )
    there = [step for step, _ in checkpoints(plan.train_dir) if 0 < step <= plan.newest]
    saves = min(to_come, max(1, keep + 1 - len(there)))
    need = 12 * parameter_count(plan.model) * saves
    left = 0
    with contextlib.suppress(OSError):  # of a training that is running here, which is told later
        left = sum(f.stat().st_size for p in incomplete(plan.train_dir) for f in p.iterdir())
    free = shutil.disk_usage(plan.train_dir).free + left  # what a killed save left goes first
    if need > free:
        raise UserError(
            f"{plan.train_dir}: {saves} more checkpoints (checkpoint.keep={keep} and one in the "
            f"making) take {need / 1e9:.3g} GB, {free / 1e9:.3g} GB are free",
            "free some disk, lower checkpoint.keep, or put work_dir on another disk",
        )
