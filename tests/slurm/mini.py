"""The mini cluster and runs submitted to it, for the tests here and for `python -m bench.cluster`."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

HERE = Path(__file__).resolve().parent
REPO = HERE.parent.parent
# libpmix-dev: srun --mpi=pmix loads libpmix.so
PACKAGES = ["slurm-wlm", "munge", "libpmix-dev", "pdsh"]
# Deadlines below are what two quiet cores need at most; a loaded or slow machine gets this much more.
PATIENCE = 4
# A node is a set of namespaces, and SLURM takes only character devices for GPUs.
NODE = 'unshare --pid --fork --mount --uts --mount-proc true && mknod "$0" c 1 3'


def why_not() -> str:
    """Why this machine cannot hold the cluster; empty when it can (SLURM may yet be missing)."""
    if os.geteuid() != 0:
        return "the mini SLURM needs root (namespaces, slurmd)"
    if not is_installed() and not shutil.which("apt-get"):
        return f"SLURM is missing and there is no apt-get for {' '.join(PACKAGES)}"
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            ["sh", "-c", NODE, f"{folder}/gpu0"], capture_output=True, text=True, timeout=60
        )
    if done.returncode:
        return f"the mini SLURM needs namespaces and mknod of its own: {done.stderr.strip()}"
    return ""


def is_installed() -> bool:
    """SLURM, munge, PMIx and pdsh are here."""
    pmix = any(Path("/usr/lib").glob("*/pmix2/lib/libpmix.so"))
    return pmix and all(map(shutil.which, ("slurmctld", "slurmd", "munged", "pdsh")))


def install() -> str:
    """Installs SLURM from Debian's packages where it is missing, and says so; returns why it failed."""
    if is_installed():
        return ""
    print(f"\ninstalling {' '.join(PACKAGES)} (Debian packages)", file=sys.__stderr__, flush=True)
    options: dict[str, Any] = {
        "capture_output": True,
        "text": True,
        "env": {**os.environ, "DEBIAN_FRONTEND": "noninteractive"},
    }
    subprocess.run(["apt-get", "update"], check=False, **options)
    line = ["apt-get", "install", "-y", "--no-install-recommends", *PACKAGES]
    done = subprocess.run(line, check=False, **options)
    if done.returncode == 0 and is_installed():
        return ""
    last = (done.stderr or done.stdout).strip().splitlines()[-1:]
    return f"{' '.join(line)} failed: {' '.join(last)}"


class Cluster:
    """The mini cluster; its commands work from this process, since SLURM_CONF is set."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        os.environ["SLURM_CONF"] = str(folder / "slurm.conf")
        # Names as sites have them: the list of all four is `alpha,gpu[08-10]`.
        os.environ |= {
            "MSL_NAMES": "gpu08 gpu09 gpu10 alpha",
            "MSL_GPUS": "2",
            # Only a node that dies makes these pass; the waits for it end with the event.
            "MSL_NODE_TIMEOUT": "8",
            "MSL_KILLWAIT": "8",
            "MSL_GRACE": "20",
            "MSL_START_TIMEOUT": str(30 * PATIENCE),
        }

    def do(self, *command: str) -> None:
        line = [str(HERE / "mini-slurm.sh"), command[0], str(self.folder), *command[1:]]
        done = subprocess.run(line, capture_output=True, text=True, timeout=120 * PATIENCE)
        assert done.returncode == 0, done.stderr + done.stdout

    def run(self, *command: str, timeout: float = 60, **options: Any) -> str:
        options |= {"capture_output": True, "text": True, "timeout": timeout * PATIENCE}
        done = subprocess.run(command, **options)
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def state(self, job: str) -> str:
        text = self.run("scontrol", "show", "job", "-o", job)
        return text.split("JobState=")[1].split()[0]


def wait_for(
    condition: Callable[[], Any], seconds: float, what: str, report: Callable[[], str] = str
) -> Any:
    end = time.monotonic() + seconds * PATIENCE
    while time.monotonic() < end:
        if value := condition():
            return value
        time.sleep(0.2)
    raise AssertionError(f"not within {seconds * PATIENCE} s: {what}\n{report()}")


class Run:
    """A submitted recipe."""

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        self.cluster, self.folder, self.repo = cluster, folder, REPO
        folder.mkdir(parents=True, exist_ok=True)
        self.recipe: dict[str, Any] = {
            "name": folder.name,
            "model": {"preset": "bert-tiny"},
            "phases": [{"name": "a", "steps": 30}, {"name": "b", "steps": 10}],
            "checkpoint": {"every": 10},
            "guard": {"hang_timeout_s": 10},
        }
        self.move("work")
        self.profile: dict[str, Any] = {
            "name": "mini",
            "partition": "main",
            "nodes": 2,
            "tasks_per_node": 1,
            "time_limit": "30",
            "prep_time_limit": "30",
            "python": sys.executable,
            "preflight": False,
            "environment": {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"},
        }

    def move(self, name: str) -> None:
        """Another work_dir, before the run is submitted."""
        self.work = self.folder / name
        self.recipe["work_dir"] = str(self.work)

    def standin(self, fault: str = "", update_s: float = 0.03) -> Run:
        """Training is the stand-in; prep, export and evaluation do nothing."""
        wrapper = self.folder / "python"
        wrapper.write_text(
            "#!/bin/sh\n"
            f'export STANDIN_FAULT="{fault}" STANDIN_UPDATE_S={update_s} PYTHONPATH="{self.repo}"\n'
            f'case "$*" in *"-m pretrain train"*) exec {sys.executable} {HERE}/standin.py "$@" ;;\n'
            f'*"-m cluster"*) exec {sys.executable} "$@" ;;\nesac\n'
        )
        wrapper.chmod(0o755)
        self.profile["python"] = str(wrapper)
        return self

    def submit(self, *arguments: str, fails: bool = False) -> str:
        """Submits; returns what was printed. `ids` maps a job's name to its number."""
        recipe, profile = self.folder / "recipe.yaml", self.folder / "profile.yaml"
        recipe.write_text(yaml.safe_dump(self.recipe))
        profile.write_text(yaml.safe_dump(self.profile))
        command = [
            sys.executable,
            "-m",
            "cluster",
            "submit",
            str(recipe),
            "--profile",
            str(profile),
        ]
        done = subprocess.run(
            [*command, *arguments],
            capture_output=True,
            text=True,
            cwd=self.repo,
            timeout=60 * PATIENCE,
        )
        if fails:
            assert done.returncode == 2, done.stdout + done.stderr
            assert "Traceback" not in done.stderr
            return done.stderr
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def cancel(self) -> None:
        if (self.work / "slurm" / "chain.json").exists():
            jobs = [job for job in self.ids.values() if job]
            subprocess.run(["scancel", *jobs], check=False)

    @property
    def ids(self) -> dict[str, str]:
        record = json.loads((self.work / "slurm" / "chain.json").read_text())
        return {job["name"]: job["id"] for job in record["jobs"]}

    def restarts(self, job: str = "train-a") -> int:
        text = self.cluster.run("scontrol", "show", "job", "-o", self.ids[job])
        return int(text.split("Restarts=")[1].split()[0])

    def log(self) -> list[dict[str, Any]]:
        path = self.work / "train" / "log.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("}")]

    def losses(self) -> dict[int, float]:
        """step -> loss; the later one where an update was done again."""
        return {
            line["step"]: line["loss"]
            for line in self.log()
            if line.get("kind", "train") == "train"
        }

    def step(self) -> int:
        return max(self.losses(), default=0)

    def lives(self, job: str) -> str:
        path = self.work / "slurm" / f"{job}.lives"
        return path.read_text() if path.exists() else ""

    def output(self, job: str) -> str:
        return (self.work / "slurm" / f"{job}.log").read_text()

    def wait_step(self, step: int, seconds: float = 60) -> None:
        def reached() -> bool:
            stopped = [j for j in self.ids if " stopped " in self.lives(j)]
            assert not stopped, self.report()
            return self.step() >= step

        wait_for(reached, seconds, f"update {step}", self.report)

    def wait_state(self, job: str, *states: str, seconds: float = 60) -> str:
        def reached() -> str:
            state = self.cluster.state(self.ids[job])
            assert state in states or state not in ("FAILED", "CANCELLED"), self.report()
            return state if state in states else ""

        return wait_for(reached, seconds, f"{job} in {states}", self.report)

    def finish(self, seconds: float = 90) -> None:
        """Waits for the last job of the chain to succeed."""
        ends = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
        state = self.wait_state(list(self.ids)[-1], *ends, seconds=seconds)
        assert state == "COMPLETED", self.report()

    def report(self) -> str:
        folder = self.work / "slurm"
        logs = [f"--- {p.name}\n{p.read_text()[-3000:]}" for p in sorted(folder.glob("*.log"))]
        queue = subprocess.run(["squeue", "-a"], capture_output=True, text=True).stdout
        return "\n".join([queue, *logs])
