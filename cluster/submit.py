"""`python -m cluster submit RECIPE --profile SITE`: the whole recipe as one chain of SLURM jobs."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from pathlib import Path

import yaml

from cluster.slurm import client
from cluster.slurm.chain import RECORD, Job, build_chain
from cluster.slurm.render import render, work_key
from configs import UserError, load_profile, load_recipe, say
from configs.cli import add_recipe
from configs.files import publish_text, read_json
from configs.loading import to_dict
from configs.schema import Profile, Recipe

UNFINISHED = ("PENDING", "RUNNING", "CONFIGURING", "COMPLETING", "SUSPENDED", "REQUEUED")


def main(argv: list[str]) -> int | None:
    parser = argparse.ArgumentParser(
        prog="python -m cluster submit",
        description=__doc__,
        epilog="Jobs: prep, one a training phase, export, evaluate; each starts when the one before "
        "has succeeded. Scripts, logs and states are kept in WORK_DIR/slurm. The same command again "
        "queues what is not finished.",
    )
    add_recipe(parser, "changes to the recipe")
    parser.add_argument("--profile", required=True, help="a YAML file, or one of configs/profiles")
    parser.add_argument(
        "--set", action="append", default=[], metavar="key=value", help="a change to the profile"
    )
    parser.add_argument("--dry-run", action="store_true", help="print the scripts, queue nothing")
    arguments = parser.parse_intermixed_args(argv)
    profile = load_profile(arguments.profile, arguments.set)
    recipe = load_recipe(arguments.recipe, arguments.overrides)
    recipe.work_dir = str(Path(recipe.work_dir).absolute())
    folder = Path(recipe.work_dir) / "slurm"
    jobs = build_chain(recipe, folder / "recipe.yaml", profile)
    scripts = {job.name: render(job, recipe, profile, folder, Path.cwd()) for job in jobs}
    if arguments.dry_run:
        for name, script in scripts.items():
            print(f"# {'=' * 20} {folder / name}.sbatch {'=' * 20}\n{script}")
        return None
    client.check_site(profile)
    _refuse_queued(folder)
    todo = unfinished(folder, jobs)
    _write(folder, recipe, scripts)
    for job in todo:
        client.test_only(folder / f"{job.name}.sbatch")
    _queue(folder, jobs, todo, recipe, profile, argv)
    return None


def unfinished(folder: Path, jobs: list[Job]) -> list[Job]:
    """The first job that is not finished and all after it, whose input it makes anew."""
    done = next((n for n, job in enumerate(jobs) if not _is_done(folder, job)), len(jobs))
    return jobs[done:]


def _is_done(folder: Path, job: Job) -> bool:
    marker = folder / f"{job.name}.done"
    return marker.exists() and marker.read_text().strip() == work_key(job)


def _refuse_queued(folder: Path) -> None:
    record = folder / "chain.json"
    if not record.exists():
        return
    remedy = f"see squeue for what is queued; then delete {record}"
    for job in read_json(record, remedy, RECORD)["jobs"]:
        fields = client.job_fields(job["id"]) if job["id"] else {}
        ours = fields.get("Command", "").startswith(str(folder))
        if ours and fields.get("JobState") in UNFINISHED:
            raise UserError(
                f"job {job['id']} ({job['name']}) of this run is {fields['JobState']}",
                f"watch it: python -m cluster status {folder.parent}; or end it: scancel {job['id']}",
            )


def _write(folder: Path, recipe: Recipe, scripts: dict[str, str]) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        text = yaml.safe_dump(to_dict(recipe), sort_keys=False, allow_unicode=True)
        publish_text(folder / "recipe.yaml", "# The recipe as submitted, all keys.\n" + text)
        for name, script in scripts.items():
            publish_text(folder / f"{name}.sbatch", script)
    except OSError as error:
        raise UserError(
            f"the run folder {folder} cannot be written: {error.strerror}",
            "choose a work_dir on a disk that all nodes share and you may write to",
        ) from None


def _queue(
    folder: Path,
    jobs: list[Job],
    todo: list[Job],
    recipe: Recipe,
    profile: Profile,
    argv: list[str],
) -> None:
    ids: dict[str, str] = {}
    after = ""
    try:
        for job in todo:
            after = ids[job.name] = client.sbatch(folder / f"{job.name}.sbatch", after)
    except UserError:
        for job_id in reversed(ids.values()):  # half a chain is worse than none
            client.call(["scancel", job_id])
        raise
    record = {
        "run": recipe.name,
        "profile": profile.name,
        "command": shlex.join([Path(sys.executable).name, "-m", "cluster", "submit", *argv]),
        "jobs": [{"name": job.name, "id": ids.get(job.name, "")} for job in jobs],
    }
    publish_text(folder / "chain.json", json.dumps(record, indent=1) + "\n")
    for job in jobs:
        state = f"job {ids[job.name]}" if job.name in ids else "finished before"
        say(f"{job.name:<20} {state:<16} {folder / job.name}.sbatch")
    say(f"watch it: python -m cluster status {recipe.work_dir}")
