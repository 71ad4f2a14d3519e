"""Which jobs a recipe becomes on a site: prepare, one job a phase, export, evaluate."""

from __future__ import annotations

import hashlib
import json
import shlex
from dataclasses import dataclass, field
from pathlib import Path

from configs import UserError
from configs.loading import to_dict
from configs.model import parameter_count, resolve_model
from configs.objectives import check_objective
from configs.schema import Profile, Recipe

STARTERS = ("srun", "torchrun", "deepspeed")


@dataclass
class Step:
    """One command of a job. where: one (a single task) | tasks (all) | mpi (all, wired up) | nodes."""

    title: str
    command: list[str]
    where: str = "one"


@dataclass
class Job:
    """One sbatch script. `steps` run in order; `trains` jobs survive signals and lost ranks."""

    name: str
    nodes: int
    tasks_per_node: int
    gpus_per_node: int
    cpus_per_task: int
    time_limit: str
    steps: list[Step]
    trains: bool = False
    stage: list[tuple[str, str]] = field(default_factory=list)  # shard folder -> node-local copy
    depends_on: str = ""  # digest of what its result follows from besides the commands

    @property
    def tasks(self) -> int:
        return self.nodes * self.tasks_per_node


def tasks_per_node(profile: Profile) -> int:
    """Training processes on a node: one per GPU unless the profile says otherwise."""
    return profile.tasks_per_node or profile.gpus_per_node or 1


def build_chain(recipe: Recipe, recipe_file: Path, profile: Profile) -> list[Job]:
    """The jobs in order, each after the one before.

    Raises:
        UserError: world size not divisible by parallel.tp, unknown starter, odd numbers.
    """
    per_node = tasks_per_node(profile)
    world = profile.nodes * per_node
    _check(recipe, profile, per_node, world)
    file, gpus, cpus = str(recipe_file), profile.gpus_per_node, profile.cpus_per_task

    many = profile.prep_nodes * profile.prep_tasks_per_node > 1
    build = ["-m", "data_prep", "build", file] + (["prep.executor=mpi"] if many else [])
    # A task of the MPI build is one process; a single task spreads over the node's cores by itself.
    prep_cpus = 1 if many and profile.prep_tasks_per_node > 1 else cpus * per_node
    jobs = [
        Job(
            "prep",
            profile.prep_nodes,
            profile.prep_tasks_per_node,
            0,
            prep_cpus,
            profile.prep_time_limit,
            [
                Step("vocabulary", ["-m", "data_prep", "vocab", file]),
                Step("shards", build, "mpi" if many else "one"),
            ],
            depends_on=data_digest(recipe),
        )
    ]
    updates = 0
    for phase in recipe.phases:
        updates += phase.steps
        command = ["-m", "pretrain", "train", file, f"train.stop_at={updates}"]
        if profile.signal not in ("USR1", "TERM"):
            command.append(f"guard.save_signals=[SIGTERM,SIG{profile.signal}]")
        stage = []
        if profile.stage_shards_to:
            local = f"{profile.stage_shards_to}/{recipe.name}"
            stage = [(f"{recipe.work_dir}/shards/{phase.shards}", f"{local}/{phase.shards}")]
            command.append(f"train.shards_dir={local}")
        steps = [Step(f"training, phase {phase.name}", *_start(command, profile, per_node))]
        if profile.preflight:
            size = checkpoint_bytes(recipe)
            check = ["-m", "cluster", "preflight", "--folder", recipe.work_dir]
            check += [
                "--gpus",
                str(gpus),
                "--need-gb",
                f"{size * (recipe.checkpoint.keep + 1) / 1e9:.1f}",
            ]
            steps.insert(0, Step("preflight", check, "tasks"))
        jobs.append(
            Job(
                f"train-{phase.name}",
                profile.nodes,
                per_node,
                gpus,
                cpus,
                profile.time_limit,
                steps,
                True,
                stage,
            )
        )
    last = [("export", ["-m", "pretrain", "export", recipe.work_dir, f"{recipe.work_dir}/hf"])]
    scored = f"{recipe.work_dir}/shards/{recipe.phases[-1].shards}"
    last += [
        ("evaluate", ["-m", "pretrain", "evaluate", f"{recipe.work_dir}/hf", "--shards", scored])
    ]
    jobs += [
        Job(name, 1, 1, min(gpus, 1), cpus, profile.prep_time_limit, [Step(name, command)])
        for name, command in last
    ]
    return jobs


def data_digest(recipe: Recipe) -> str:
    """Of the recipe's part that vocabulary and shards are made of: prepared again when it changes."""
    values = to_dict(recipe)
    part = {key: values[key] for key in ("seed", "sources", "vocab", "prep", "shards")}
    text = json.dumps(part, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def checkpoint_bytes(recipe: Recipe) -> int:
    """One checkpoint: fp32 master and two moments for each parameter (vocabulary as configured)."""
    return 12 * parameter_count(resolve_model(recipe.model, recipe.vocab.size))


def seconds_of(time_limit: str) -> int | None:
    """SLURM's minutes, minutes:seconds, hours:minutes:seconds, days-hours[:minutes[:seconds]].

    None for anything else (UNLIMITED): SLURM itself is asked about it before the job is queued.
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


def _start(command: list[str], profile: Profile, per_node: int) -> tuple[list[str], str]:
    if profile.starter == "srun":
        return command, "tasks"
    launch = ["-m", "cluster", "launch", "--starter", profile.starter, "--processes", str(per_node)]
    return [*launch, "--", profile.python, *command], "nodes"


def _check(recipe: Recipe, profile: Profile, per_node: int, world: int) -> None:
    if profile.starter not in STARTERS:
        raise UserError(
            f"profile {profile.name}: starter={profile.starter} is not known",
            f"one of {', '.join(STARTERS)}",
        )
    for key in ("nodes", "prep_nodes", "prep_tasks_per_node"):
        if getattr(profile, key) < 1:
            raise UserError(f"profile {profile.name}: {key}={getattr(profile, key)}", "at least 1")
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
    if world % tp:
        raise UserError(
            f"parallel.tp={tp} does not divide {profile.nodes} nodes x {per_node} processes = {world}",
            "choose nodes and tasks_per_node so that tp divides their product",
        )
    if tp > per_node:
        raise UserError(
            f"parallel.tp={tp} is larger than the {per_node} processes of a node",
            "keep tp within a node: its collectives run in every layer",
        )
    _check_recipe(recipe, world)
    names = [phase.name for phase in recipe.phases]
    if len(set(names)) < len(names) or any(shlex.quote(n) != n or "/" in n for n in names):
        raise UserError(
            f"phases are called {', '.join(names)}",
            "give each a name of its own, letters and digits",
        )


def _check_recipe(recipe: Recipe, world: int) -> None:
    """What the training would refuse after a day of queueing and the data preparation."""
    parallel = recipe.parallel
    if not recipe.checkpoint.resume:
        raise UserError(
            "checkpoint.resume=false: a requeued job and the next phase's would start anew",
            "leave it true, and give a new training a work_dir of its own",
        )
    if parallel.zero_stage not in (0, 1, 2):
        raise UserError(f"parallel.zero_stage={parallel.zero_stage}", "use 0, 1 or 2")
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
        sets = recipe.shards
        longest = sets[phase.shards].max_length if phase.shards in sets else 0
        if phase.shards in sets:
            check_objective(model, phase.shards, sets[phase.shards].objective)
        if 0 < parallel.micro_batch_tokens < longest:
            raise UserError(
                f"parallel.micro_batch_tokens={parallel.micro_batch_tokens} is below the {longest} "
                f"tokens of a row of shards.{phase.shards}",
                f"use at least {longest}, or 0 for the largest that fits",
            )
