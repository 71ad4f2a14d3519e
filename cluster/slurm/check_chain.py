"""What a profile or a recipe asks for that no job could do, said before anything is queued.

SLURM itself is asked about the rest (cluster/slurm/client.py), which a dry run does without.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from configs import UserError
from configs.layout import check_layout
from configs.model import resolve_model
from configs.objectives import check_rows
from configs.schema import Profile, Recipe
from configs.sharing import SMALLEST
from configs.signals import save_signal

STARTERS = ("srun", "torchrun", "deepspeed")
SIGNALS = ("USR1", "USR2", "TERM")  # what cluster/launch.py passes on
ENDLESS = ("UNLIMITED", "INFINITE")
LEAST = {
    "nodes": 1,
    "prep_nodes": 1,
    "prep_tasks_per_node": 1,
    "gpus_per_node": 0,
    "tasks_per_node": 0,
    "cpus_per_task": 0,
    "signal_lead_s": 0,
    "max_restarts": 0,
}


def check_chain(recipe: Recipe, profile: Profile, per_node: int, world: int) -> None:
    """per_node: training processes on a node; world: all of them.

    Raises:
        UserError: naming the key of the profile or the recipe.
    """
    _check_profile(profile)
    if profile.gpus_per_node and per_node > profile.gpus_per_node:
        raise UserError(
            f"profile {profile.name}: tasks_per_node={per_node} on gpus_per_node={profile.gpus_per_node}",
            "one process per GPU: lower tasks_per_node",
        )
    limit = seconds_of(profile.time_limit)
    if limit is not None and profile.signal_lead_s >= limit:
        raise UserError(
            f"profile {profile.name}: signal_lead_s={profile.signal_lead_s} is not below "
            f"time_limit={profile.time_limit}",
            "every job would be told to save as soon as it starts: lengthen time_limit",
        )
    tp = recipe.parallel.tp
    if tp > per_node:
        raise UserError(
            f"parallel.tp={tp} is larger than the {per_node} processes of a node",
            "keep tp within a node: its collectives run in every layer",
        )
    check_layout(recipe, world)
    _check_recipe(recipe, world)
    _check_machine(recipe, profile)
    names = [phase.name for phase in recipe.phases]
    if not names:
        raise UserError("phases is empty", "give at least one phase")
    if len(set(names)) < len(names) or any(shlex.quote(n) != n or "/" in n for n in names):
        raise UserError(
            f"phases are called {', '.join(names)}",
            "give each a name of its own, letters and digits",
        )


def _check_profile(profile: Profile) -> None:
    for key, known in (("starter", STARTERS), ("signal", SIGNALS)):
        if getattr(profile, key) not in known:
            raise UserError(
                f"profile {profile.name}: {key}={getattr(profile, key)} is not known",
                f"one of {', '.join(known)}",
            )
    for key, least in LEAST.items():
        if getattr(profile, key) < least:
            raise UserError(
                f"profile {profile.name}: {key}={getattr(profile, key)}", f"at least {least}"
            )
    for key in ("time_limit", "prep_time_limit"):
        text = getattr(profile, key)
        if seconds_of(text) is None and text.upper() not in ENDLESS:
            raise UserError(
                f"profile {profile.name}: {key}={text} is no time",
                'write it as SLURM does: "90" (minutes), "24:00:00", "2-12" (days-hours), UNLIMITED',
            )
    # They stand in a script that a shell reads.
    for key, pattern in (("environment", r"[A-Za-z_]\w*"), ("sbatch_options", r"[A-Za-z][\w-]*")):
        for name in getattr(profile, key):
            if not re.fullmatch(pattern, name, re.ASCII):
                raise UserError(
                    f"profile {profile.name}: {key}.{name!r} is not a name",
                    'a name and its value, as `NCCL_SOCKET_IFNAME: ib0` or `exclusive: ""`',
                )


def _check_recipe(recipe: Recipe, world: int) -> None:
    """What the training would refuse after a day of queueing and the data preparation."""
    parallel = recipe.parallel
    if not recipe.checkpoint.resume:
        raise UserError(
            "checkpoint.resume=false: a requeued job and the next phase's would start anew",
            "leave it true, and give a new training a work_dir of its own",
        )
    model = resolve_model(recipe.model, recipe.vocab.size)
    for key, value in (
        ("num_heads", model.num_heads),
        ("intermediate_size", model.intermediate_size),
    ):
        if value % parallel.tp:
            raise UserError(
                f"model.{key}={value} is not divisible by parallel.tp={parallel.tp}",
                f"tp must divide {value}",
            )
    dp = world // parallel.tp
    for number, phase in enumerate(recipe.phases):
        if phase.global_batch < dp:
            raise UserError(
                f"phases.{number}.global_batch={phase.global_batch} rows cannot be shared out over "
                f"{dp} data-parallel processes",
                f"use at least {dp} rows, or fewer processes",
            )
        shards = recipe.shards[phase.shards]
        check_rows(model, phase.shards, shards.objective, shards.max_length)
        longest = -(-shards.max_length // SMALLEST) * SMALLEST
        if 0 < parallel.micro_batch_tokens < longest:
            raise UserError(
                f"parallel.micro_batch_tokens={parallel.micro_batch_tokens} is below the {longest} "
                f"tokens (a multiple of {SMALLEST}) of a row of shards.{phase.shards}",
                f"use at least {longest}, or 0 for the largest that fits",
            )


def _check_machine(recipe: Recipe, profile: Profile) -> None:
    """What the training's nodes would lack, as far as it can be told here."""
    for name in recipe.guard.save_signals:
        save_signal(name)
    if not profile.gpus_per_node:
        for key, value, others in (
            ("train.precision", recipe.train.precision, ("fp16", "fp8")),
            ("optimizer.implementation", recipe.optimizer.implementation, ("deepspeed", "apex")),
        ):
            if value in others:
                raise UserError(
                    f"{key}={value} needs a GPU; profile {profile.name}: gpus_per_node=0",
                    f"set gpus_per_node, or another {key}",
                )
    for key, path in (
        ("train.probe", recipe.train.probe),
        ("checkpoint.init_from", recipe.checkpoint.init_from),
    ):
        if path and not Path(path).exists():
            raise UserError(
                f"{key}={path}: not there", "name what is, on a disk that every node has"
            )


def seconds_of(time_limit: str) -> int | None:
    """SLURM's minutes, minutes:seconds, hours:minutes:seconds, days-hours[:minutes[:seconds]].

    None for anything else (UNLIMITED).
    """
    days, dash, rest = time_limit.rpartition("-")
    parts = rest.split(":")
    if not all(part.isdigit() for part in [*parts, days or "0"]) or len(parts) > 3:
        return None
    numbers = [int(part) for part in parts]
    if dash:
        hours, minutes, seconds = (*numbers, 0, 0)[:3]
    else:
        hours, minutes, seconds = {1: (0, *numbers, 0), 2: (0, *numbers), 3: tuple(numbers)}[
            len(numbers)
        ]
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds
