"""The learning rate as a pure function of the update count: nothing to save, nothing to resume.

Micro-batches, processes and skipped fp16 updates do not enter.
"""

from __future__ import annotations

import math

from configs.schema import PhaseConfig


def warmup_steps(phase: PhaseConfig) -> int:
    """Updates of the linear warmup: a share of the phase's steps below 1, otherwise a count."""
    warmup = phase.schedule.warmup
    return round(warmup * phase.steps) if warmup < 1 else int(warmup)


def lr_at(phase: PhaseConfig, step: float) -> float:
    """The rate of update `step` of a phase, counted from 1: the peak is reached at the end of the
    warmup, `end_lr` at the last update; later updates keep it. Between two
    updates (a time budget's place in the schedule) it is in between.

    poly: end + (peak - end) (1 - t)^power with t the share of the updates after the warmup that is
    done (1904.00962 uses power 1, NVIDIA's LAMB recipe 0.5); cosine: half a wave (1608.03983).
    """
    schedule, warm = phase.schedule, warmup_steps(phase)
    if step < warm:
        return schedule.lr * step / warm
    if schedule.kind == "constant":
        return schedule.lr
    done = min(1.0, (step - warm) / max(1, phase.steps - warm))
    if schedule.kind == "cosine":
        share = 0.5 * (1 + math.cos(math.pi * done))
    else:
        share = (1 - done) ** (schedule.power if schedule.kind == "poly" else 1.0)
    return schedule.lr * share + schedule.end_lr * (1 - share)
