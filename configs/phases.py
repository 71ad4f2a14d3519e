"""Where phases end: after their steps, or before, at a share of the time (phases.N.until). And whether
their schedules can be followed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from configs.errors import UserError
from configs.schema import PhaseConfig, Recipe, ScheduleConfig


def phase_ends(phases: Sequence[PhaseConfig], ended: Sequence[int] = ()) -> list[int]:
    """Updates of the whole run at which each phase ends. ended: where the first ones did; those
    behind them end after their steps, or earlier."""
    ends = list(ended)
    for phase in phases[len(ends) :]:
        ends.append((ends[-1] if ends else 0) + phase.steps)
    return ends


def updates_made(meta: Mapping[str, Any]) -> list[int]:
    """In each phase, up to the checkpoint that has this checkpoint.json."""
    ended, out, begin = (meta.get("state") or {}).get("phase_ends", []), [], 0
    for number, phase in enumerate((meta.get("recipe") or {}).get("phases", [])):
        end = ended[number] if number < len(ended) else begin + phase.get("steps", 0)
        out.append(max(0, min(meta.get("step", 0), end) - begin))
        begin = end
    return out


def check_shares(recipe: Recipe) -> None:
    """The shares of the time must be of a time, and leave some to each phase.

    Raises:
        UserError: there is no limit of time, the last phase has a share, or one is not above an
            earlier one.
    """
    before, where = 0.0, ""
    for number, phase in enumerate(recipe.phases):
        if not phase.until:
            continue
        key = f"phases.{number}.until"
        what = f"{key}={phase.until:g}"
        if number == len(recipe.phases) - 1:
            raise UserError(
                f"{what}, and the last phase ends when the time does",
                f"set {key}=0, and train.max_minutes to the time that the training has, if it has one",
            )
        if not recipe.train.max_minutes:
            raise UserError(
                f"{what} is a share of train.max_minutes, which is 0",
                f"set train.max_minutes, or {key}=0: the phase ends after its steps",
            )
        if phase.until <= before:
            raise UserError(
                f"{what} is not above {where}={before:g}: the phase would have no time",
                "let the shares rise from phase to phase: each counts from the training's start",
            )
        before, where = phase.until, key


def check_schedule(schedule: ScheduleConfig, steps: int, where: str) -> None:
    """Raises UserError, naming `where`, for a schedule that cannot be followed."""
    if not 0 <= schedule.warmup <= max(steps, 1):
        raise UserError(
            f"{where}.warmup={schedule.warmup:g} does not fit into {steps} steps",
            "below 1 it is a share of the steps, otherwise a number of steps",
        )
    finite = math.isfinite(schedule.lr + schedule.end_lr + schedule.power)
    if not finite or not (schedule.lr > 0 and schedule.end_lr >= 0 and schedule.power > 0):
        raise UserError(
            f"{where}: lr={schedule.lr:g}, end_lr={schedule.end_lr:g}, power={schedule.power:g}",
            "finite numbers: lr and power positive, end_lr 0 or more",
        )
