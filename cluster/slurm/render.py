"""Jobs as sbatch scripts that a person can read."""

from __future__ import annotations

import shlex
from pathlib import Path

import jinja2

from cluster.slurm.chain import Job, Step
from configs.errors import DIVERGED_EXIT, PREEMPTED_EXIT
from configs.schema import Profile, Recipe

_ENVIRONMENT = jinja2.Environment(
    loader=jinja2.FileSystemLoader(Path(__file__).parent / "templates"),
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
    undefined=jinja2.StrictUndefined,
    autoescape=False,
)
_ENVIRONMENT.filters["quote"] = lambda value: shlex.quote(str(value))
# Like a shell, sbatch splits its lines at blanks outside quotes; in paths it puts job numbers and names
# in for %j and the like.
_ENVIRONMENT.filters["sbatch_path"] = lambda value: shlex.quote(str(value).replace("%", "%%"))


def render(job: Job, recipe: Recipe, profile: Profile, folder: Path, cwd: Path) -> str:
    """The script of `job`; logs and state go to `folder`, commands run in `cwd`."""
    return _ENVIRONMENT.get_template("job.sh.j2").render(
        job=job,
        run=recipe.name,
        work_dir=recipe.work_dir,
        work_key=work_key(job),
        profile=profile,
        folder=folder,
        cwd=cwd,
        srun=lambda step: srun_line(step, job, recipe, profile),
        preempted=PREEMPTED_EXIT,
        diverged=DIVERGED_EXIT,
    )


def work_key(job: Job) -> str:
    """What the job does, without where it does it: a finished job with this key is not run again."""
    steps = [step for step in job.steps if step.title != "preflight"]
    commands = " && ".join(shlex.join(step.command) for step in steps)
    return f"{commands} # recipe {job.depends_on}" if job.depends_on else commands


def srun_line(step: Step, job: Job, recipe: Recipe, profile: Profile) -> str:
    """`srun ... python ...` for one step."""
    options = ["srun"]
    if step.where == "one":
        options += ["--nodes=1", "--ntasks=1", "--ntasks-per-node=1"]
    elif step.where == "nodes":
        options += [f"--ntasks={job.nodes}", "--ntasks-per-node=1"]
    else:
        options += [f"--ntasks={job.tasks}", f"--ntasks-per-node={job.tasks_per_node}"]
    if step.where == "mpi":  # the survivors of a failed rank would wait in a collective (B19)
        options += [f"--mpi={profile.mpi}", "--kill-on-bad-exit=1"]
    elif step.where != "one":
        # The first rank to leave may still be followed by others that are saving: they get time.
        options += ["--kill-on-bad-exit=0", f"--wait={max(recipe.guard.hang_timeout_s, 5)}"]
    if job.cpus_per_task:
        cpus = job.cpus_per_task * (job.tasks_per_node if step.where == "nodes" else 1)
        options.append(f"--cpus-per-task={cpus}")
    words = [shlex.join(options), profile.srun_options, profile.container, profile.python]
    return " ".join(word for word in (*words, shlex.join(step.command)) if word)
