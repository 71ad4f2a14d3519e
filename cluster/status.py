"""`python -m cluster status RUN`: one screen about a run; needs neither slurmdbd nor sacct.

A run that was started without SLURM has no jobs to show, but its training is shown all the same.
"""

from __future__ import annotations

import argparse
import math
import os
import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from cluster.slurm import client
from cluster.slurm.chain import RECORD
from configs import UserError
from configs.checkpoints import INDEX, checkpoints
from configs.console import duration, time_goal, units_goal
from configs.files import read_json
from configs.log import LOG, read_log

LOG_TAIL_BYTES = 200_000
REMEDY = "the command that wrote it (cluster submit, pretrain train) writes it anew"
ENDED_BADLY = (
    "FAILED",
    "CANCELLED",
    "TIMEOUT",
    "NODE_FAIL",
    "OUT_OF_MEMORY",
    "STOPPED",
    "DEADLINE",
)


@dataclass
class JobStatus:
    """One row of the screen."""

    name: str
    job_id: str
    state: str
    nodes: str = ""
    ran: str = ""
    restarts: int = 0
    note: str = ""


def main(argv: list[str]) -> int | None:
    parser = argparse.ArgumentParser(prog="python -m cluster status", description=__doc__)
    parser.add_argument("run", help="the run's work_dir, or the recipe's name below runs/")
    arguments = parser.parse_args(argv)
    folder = find_run(arguments.run)
    print(screen(folder), end="")
    return None


def find_run(text: str) -> Path:
    """The work_dir meant by `text`; raises UserError when nothing was submitted or trained there."""
    for folder in (Path(text), Path(text).parent, Path("runs") / text):
        if (folder / "slurm" / "chain.json").is_file() or (folder / "train" / LOG).is_file():
            return folder
    raise UserError(
        f"{text}: neither slurm/chain.json nor train/{LOG} is there: nothing submitted, nothing trained",
        "give the run's work_dir; python -m cluster submit RECIPE --profile SITE starts one",
    )


def screen(folder: Path) -> str:
    """The whole screen as text."""
    record = folder / "slurm" / "chain.json"
    chain, why = None, "this run was not submitted with SLURM"
    try:
        chain = read_json(record, REMEDY, RECORD) if record.is_file() else None
    except UserError as error:
        why = str(error)
    lines = (
        chain_screen(folder, chain)
        if chain
        else [str(folder), "", f"no jobs are known: {why}", "", *progress(folder)]
    )
    return "\n".join(lines) + "\n"


def chain_screen(folder: Path, chain: dict[str, Any]) -> list[str]:
    """The jobs of a submitted chain, its training, and why it stopped."""
    slurm, jobs, trouble = folder / "slurm", [], ""
    for job in chain["jobs"]:
        try:
            jobs.append(job_status(slurm, job["name"], job["id"]))
        except UserError as error:  # no controller: the files still tell most
            trouble = error.what.splitlines()[0]
            jobs.append(from_files(slurm, job["name"], job["id"]))
    lines = [f"{chain['run']}  {folder}  (profile {chain['profile']})", ""]
    if trouble:
        lines += [f"SLURM does not answer ({trouble}); from the run's files:", ""]
    lines.append(f"{'job':<18} {'id':<9} {'state':<14} {'time':<12} {'restarts':<9} nodes")
    for j in jobs:
        rest = " ".join(filter(None, (j.nodes, j.note)))
        lines.append(
            f"{j.name:<18} {j.job_id:<9} {j.state:<14} {j.ran:<12} {j.restarts:<9} {rest}".rstrip()
        )
    lines += ["", *progress(folder)]
    events = [line for job in jobs for line in tail(slurm / f"{job.name}.lives")]
    lines += ["", "last events:", *("  " + line for line in sorted(events)[-4:])] if events else []
    failed = next((j for j in jobs if j.state in ENDED_BADLY), None)
    if failed:
        lines += ["", f"last lines of {slurm / failed.name}.log:"]
        lines += ["  " + line for line in tail(slurm / f"{failed.name}.log")[-12:]]
        lines += ["", f"mend the cause, then the same command goes on: {chain['command']}"]
    return lines


def job_status(slurm: Path, name: str, job_id: str) -> JobStatus:
    """From `scontrol show job`; from the files once SLURM has forgotten the job (MinJobAge)."""
    fields = client.job_fields(job_id) if job_id else {}
    if not fields or not fields.get("Command", "").startswith(str(slurm.absolute())):
        return from_files(slurm, name, job_id)
    state, reason = fields["JobState"], fields.get("Reason", "None")
    nodes = fields.get("NodeList", "(null)")
    return JobStatus(
        name,
        job_id,
        state,
        "" if nodes == "(null)" else nodes,
        fields.get("RunTime", ""),
        int(fields.get("Restarts", 0)),
        f"({reason})" if reason != "None" and state != "COMPLETED" else "",
    )


def from_files(slurm: Path, name: str, job_id: str) -> JobStatus:
    """What the job's own event lines say; of one that was not queued again, its marker."""
    lives = tail(slurm / f"{name}.lives")
    mine = [line for line in lives if f" job={job_id} " in line] if job_id else lives
    restarts = max(
        (int(m[1]) for line in mine if (m := re.search(r" life=(\d+)", line))), default=0
    )
    # The marker of a job that was queued is of an earlier chain until the job itself has finished.
    marked = not job_id and (slurm / f"{name}.done").exists()
    if marked or (mine and mine[-1].endswith(" finished")):
        return JobStatus(name, job_id or "-", "COMPLETED", restarts=restarts)
    if mine and " stopped " in mine[-1]:
        reason = mine[-1].split(" stopped ", 1)[1]
        return JobStatus(name, job_id, "STOPPED", restarts=restarts, note=f"({reason})")
    last = mine[-1].split(" step=")[0] if mine else ""
    return JobStatus(
        name, job_id or "-", "UNKNOWN", restarts=restarts, note=f"last word {last}" if last else ""
    )


def progress(folder: Path) -> list[str]:
    """Step, loss, speed and ETA from the trainer's log."""
    records = read_log(folder / "train" / LOG, LOG_TAIL_BYTES)
    updates = [r for r in records if r.get("kind", "train") == "train" and "loss" in r]
    if not updates:
        return ["training: no update yet"]
    last, (total, seconds, trouble) = updates[-1], limits(folder)
    step, pace = last["step"], seconds_per_update(updates)
    goals = [units_goal(step, total, 1 / pace if pace else 0.0)] if total else []
    if seconds and "spent_s" in last:
        goals.append(time_goal(step, seconds, last["spent_s"]))
    goal = min(goals, key=lambda goal: goal.left, default=None)
    lines = [f"training: update {f'{goal.count} ({goal.share})' if goal else f'{step}/?'}"]
    lines[0] += (
        f", loss {last['loss']:.4f}, lr {last.get('lr', 0):.3g}, {last.get('tokens_per_s', 0):,.0f} tokens/s"
    )
    if goal and 0 < goal.left < math.inf:
        lines[0] += f", ETA {duration(goal.left)} of running"
    lines += [f"  {trouble}"] if trouble else []
    if "time" in last:
        lines.append(f"  last update {duration(max(time.time() - last['time'], 0))} ago")
    evals = [r for r in records if r.get("kind") == "eval"]
    if evals:
        shown = {k: v for k, v in evals[-1].items() if isinstance(v, float) and k != "time"}
        lines.append(
            f"  held out at {evals[-1]['step']}: "
            + ", ".join(f"{k} {v:.4g}" for k, v in shown.items())
        )
    if saved := checkpoints(folder / "train"):
        lines.append(f"  last checkpoint: {saved[-1][1]}")
    return lines


def seconds_per_update(updates: list[dict[str, Any]]) -> float:
    """Median over the last updates, so that restarts and evaluations do not count; 0 = unknown."""
    recent = updates[-51:]
    gaps = [
        (b["time"] - a["time"]) / (b["step"] - a["step"])
        for a, b in zip(recent, recent[1:])
        if b["step"] > a["step"] and "time" in a and "time" in b
    ]
    return sorted(gaps)[len(gaps) // 2] if gaps else 0.0


def limits(folder: Path) -> tuple[int, float, str]:
    """(updates of all phases of the recipe as submitted, or as the training noted it, less those
    that it has left out; 0 = unknown, seconds of training; 0 = no limit, which file is damaged)."""
    trouble = ""
    for name in ("slurm/recipe.yaml", "train/recipe.json"):  # JSON is YAML
        file = folder / name
        if file.is_file():
            try:
                recipe = yaml.safe_load(file.read_text())
                steps = [phase["steps"] for phase in recipe["phases"]]
                total = sum(steps) - left_out(folder, steps)
                seconds = 60.0 * recipe.get("train", {}).get("max_minutes", 0)
                if isinstance(total, int) and total > 0 and 0 <= seconds < math.inf:
                    return total, seconds, trouble
            except (
                yaml.YAMLError,
                ValueError,
                KeyError,
                TypeError,
                AttributeError,
                RecursionError,
            ):
                pass
            trouble = f"{file} is damaged: {REMEDY}"
    return 0, 0.0, trouble


def left_out(folder: Path, steps: list[int]) -> int:
    """Updates that phases did not make because time had ended them (phases.N.until), by the newest
    checkpoint; one of before that key does not tell."""
    shape = {"body": {"state": {"phase_ends": [int]}}}
    try:
        meta = read_json(checkpoints(folder / "train")[-1][1] / INDEX, REMEDY, shape)
    except (IndexError, OSError, UserError):
        return 0
    ended = meta["body"]["state"]["phase_ends"]
    return max(0, sum(steps[: len(ended)]) - ended[-1]) if ended else 0


def tail(path: Path) -> list[str]:
    """The last lines of a file, which may be long or missing."""
    try:
        with open(path, "rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(file.tell() - LOG_TAIL_BYTES, 0))
            return file.read().decode(errors="replace").splitlines()
    except (OSError, ValueError):  # of a name that no file can have
        return []
