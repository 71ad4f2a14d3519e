"""Which jobs a recipe becomes on a site: prepare, one job a phase, export, evaluate."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path

from cluster.planner.built import built_vocabulary
from cluster.slurm.check_chain import check_chain
from configs.loading import to_dict
from configs.masking import highest_rate
from configs.model import parameter_count, resolve_model
from configs.schema import MaskingConfig, Profile, Recipe

# slurm/chain.json, which `submit` writes: what it reads back of it, and `status` too.
RECORD = {"run": str, "profile": str, "command": str, "jobs": [{"name": str, "id": str}]}


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
    stage: list[tuple[str, str]] = field(default_factory=list)  # shard sets -> node-local copies
    depends_on: str = ""  # what its result follows from besides the commands

    @property
    def tasks(self) -> int:
        return self.nodes * self.tasks_per_node


def tasks_per_node(profile: Profile) -> int:
    """Training processes on a node: one per GPU unless the profile says otherwise."""
    return profile.tasks_per_node or profile.gpus_per_node or 1


def local_shards(recipe: Recipe, profile: Profile) -> str:
    """The node-local folder of a run's shards: its own, as another run of that name has other rows."""
    run = hashlib.sha256(recipe.work_dir.encode()).hexdigest()[:8]
    return f"{profile.stage_shards_to}/{recipe.name}-{run}"


def build_chain(recipe: Recipe, recipe_file: Path, profile: Profile) -> list[Job]:
    """The jobs in order, each after the one before.

    Raises:
        UserError: world size not divisible by parallel.tp, unknown starter, odd numbers.
    """
    per_node = tasks_per_node(profile)
    world = profile.nodes * per_node
    check_chain(recipe, profile, per_node, world)
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
    updates, stage, local = 0, [], local_shards(recipe, profile)
    if profile.stage_shards_to:
        # All sets in every job: a run's identity is that of all, held-out rows are of the first one,
        # and a phase that ends by the clock lets the same job go on with the next.
        names = dict.fromkeys(phase.shards for phase in recipe.phases)
        stage = [(f"{recipe.work_dir}/shards/{name}", f"{local}/{name}") for name in names]
    for phase in recipe.phases:
        updates += phase.steps
        command = ["-m", "pretrain", "train", file, f"train.stop_at={updates}"]
        if profile.signal not in ("USR1", "TERM"):
            command.append(f"guard.save_signals=[SIGTERM,SIGINT,SIG{profile.signal}]")
        if stage:
            command.append(f"train.shards_dir={local}")
        steps = [Step(f"training, phase {phase.name}", *_start(command, profile, per_node))]
        if profile.preflight:
            check = ["-m", "cluster", "preflight", "--folder", recipe.work_dir, "--gpus", str(gpus)]
            check += ["--keep", str(recipe.checkpoint.keep)]
            check += ["--checkpoint-gb", f"{checkpoint_bytes(recipe) / 1e9:.3f}"]
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
                # With more of it a finished job has work again. Its steps stand in its command.
                f"{recipe.train.max_minutes:g} minutes" if recipe.train.max_minutes else "",
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
    for name, shards in recipe.shards.items():  # the usual rate is left out: digests of before hold
        rate = highest_rate(recipe, name)
        if not shards.mask_cap and rate != MaskingConfig.probability:
            part[f"predictions of {name}"] = rate
        if shards.static_masks and recipe.masking != MaskingConfig():
            part[f"masks of {name}"] = values["masking"]
    text = json.dumps(part, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def checkpoint_bytes(recipe: Recipe) -> int:
    """One checkpoint: fp32 master and two moments for each parameter (vocabulary as configured until
    it is made)."""
    vocabulary = built_vocabulary(recipe) or recipe.vocab.size
    return 12 * parameter_count(resolve_model(recipe.model, vocabulary))


def _start(command: list[str], profile: Profile, per_node: int) -> tuple[list[str], str]:
    if profile.starter == "srun":
        return command, "tasks"
    launch = ["-m", "cluster", "launch", "--starter", profile.starter, "--processes", str(per_node)]
    return [*launch, "--", profile.python, *command], "nodes"
