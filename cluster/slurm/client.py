"""SLURM's commands, called so that they work without slurmdbd and fail with a remedy."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

from configs import UserError
from configs.schema import Profile


def call(command: Sequence[str], timeout_s: float = 30) -> str:
    """Standard output of a SLURM command.

    Raises:
        UserError: the command is not installed, fails, or the controller does not answer.
    """
    if shutil.which(command[0]) is None:
        raise UserError(
            f"{command[0]} is not installed here",
            "run this on a login node of the cluster; `submit --dry-run` needs no SLURM, and without "
            "a scheduler `torchrun -m pretrain train RECIPE` does the same work",
        )
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s)
    except subprocess.TimeoutExpired:
        raise UserError(
            f"{command[0]}: no answer in {timeout_s:.0f} s", "`scontrol ping`"
        ) from None
    if done.returncode:
        text = (done.stderr or done.stdout).strip()
        raise UserError(f"{' '.join(command[:2])}: {text}", _remedy(text))
    return done.stdout


def _remedy(text: str) -> str:
    lower = text.lower()
    if "contact" in lower or "connect" in lower or "timed out" in lower:
        return "the controller does not answer: `scontrol ping`, then try again"
    if "configuration source" in lower:
        return "SLURM is installed here, but knows no cluster: run this on a login node, or set SLURM_CONF"
    if "partition" in lower:
        return "`sinfo -s` lists the partitions; set `partition` in the profile"
    if "account" in lower or "qos" in lower:
        return (
            "set `account` and `qos` in the profile; `sacctmgr show assoc user=$USER` lists yours"
        )
    if "time limit" in lower:
        return "lower `time_limit` in the profile: the chain goes on in further jobs by itself"
    return "see the message of SLURM above"


@dataclass
class Partition:
    """What `sinfo` says of one partition."""

    name: str
    is_default: bool
    nodes: int
    cpus: int  # of its largest node
    gpus: int  # of its largest node
    state: str


def partitions() -> dict[str, Partition]:
    """All partitions this user sees."""
    found: dict[str, Partition] = {}
    for line in call(["sinfo", "-h", "-o", "%P|%a|%D|%c|%G"]).splitlines():
        name, state, nodes, cpus, gres = line.split("|", 4)
        bare = name.rstrip("*")
        old = found.get(bare, Partition(bare, False, 0, 0, 0, state))
        found[bare] = Partition(
            bare,
            name.endswith("*"),
            old.nodes + int(nodes),
            max(old.cpus, int(cpus.rstrip("+"))),
            max(old.gpus, count_gpus(gres)),
            state,
        )
    return found


def count_gpus(gres: str) -> int:
    """`gpu:h100:8(S:0-1),nvme:2` -> 8; GPUs of several types add up."""
    return sum(int(n) for n in re.findall(r"(?:^|,)gpu(?::[^:,(]+)?:(\d+)", gres))


def check_site(profile: Profile) -> None:
    """Refuses what the site cannot give, by name, before anything is queued."""
    known = partitions()
    name = profile.partition or next((p.name for p in known.values() if p.is_default), "")
    if not name:
        raise UserError(
            "this cluster has no default partition", f"set `partition`: one of {', '.join(known)}"
        )
    if name not in known:
        near = get_close_matches(name, known, 1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise UserError(
            f"profile {profile.name}: partition={name} does not exist",
            f"{hint}partitions here: {', '.join(known)}",
        )
    there = known[name]
    if there.state != "up":
        raise UserError(f"partition {name} is {there.state}", "choose another one: `sinfo -s`")
    tasks = profile.tasks_per_node or profile.gpus_per_node or 1
    for key, wanted, have, of in (
        ("gpus_per_node", profile.gpus_per_node, there.gpus, "GPUs on its largest node"),
        ("nodes", profile.nodes, there.nodes, "nodes"),
        ("prep_nodes", profile.prep_nodes, there.nodes, "nodes"),
        ("tasks_per_node", tasks * max(profile.cpus_per_task, 1), there.cpus, "CPUs a node"),
        ("prep_tasks_per_node", profile.prep_tasks_per_node, there.cpus, "CPUs a node"),
    ):
        if wanted > have:
            unit = " CPUs" if key == "tasks_per_node" else ""
            raise UserError(
                f"profile {profile.name}: {key} asks for {wanted}{unit}, partition {name} has {have} {of}",
                f"lower {key} (or cpus_per_task), or choose another partition: `sinfo -N -o '%N %P %G %c'`",
            )


def sbatch(script: Path, after: str = "") -> str:
    """Queues `script`, to start when job `after` has succeeded; returns the job id."""
    command = ["sbatch", "--parsable"]
    if after:
        command += [f"--dependency=afterok:{after}", "--kill-on-invalid-dep=yes"]
    return call([*command, str(script)]).strip().split(";")[0]


def test_only(script: Path) -> None:
    """Asks SLURM whether it would take `script`; queues nothing."""
    call(["sbatch", "--test-only", str(script)])


def job_fields(job_id: str) -> dict[str, str]:
    """`scontrol show job` as a dict; empty when SLURM has forgotten the job."""
    try:
        text = call(["scontrol", "show", "job", "-o", job_id])
    except UserError as error:
        if "Invalid job id" in str(error):
            return {}
        raise
    return dict(re.findall(r"(?:^| )([A-Za-z][\w/:]*)=(.*?)(?= [A-Za-z][\w/:]*=|$)", text.strip()))
