"""What a launch costs over bare srun, and how long a dead node keeps a training from going on.

`python -m bench.cluster [--json]` on a real SLURM of four nodes on this machine (root, Debian).
The trainer is the tests' stand-in, so that only the machinery around it is measured.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.slurm.mini import REPO, Cluster, Run, install, wait_for, why_not

ROUNDS = 5


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.cluster", description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON line last")
    arguments = parser.parse_args(argv)
    if reason := why_not() or install():
        sys.exit(reason)
    with tempfile.TemporaryDirectory() as folder:
        cluster = Cluster(Path(folder) / "slurm")
        cluster.folder.mkdir()
        cluster.do("start", "4")
        try:
            result = launch_times(cluster, Path(folder)) | node_death(cluster, Path(folder))
        finally:
            cluster.do("stop")
    for name, value in result.items():
        print(f"{name:<58} {value:6.2f} s")
    if arguments.json:
        print(json.dumps(result))
    return 0


def launch_times(cluster: Cluster, folder: Path) -> dict[str, float]:
    """sbatch to the first line of the program on every task, 2 nodes x 1 task, medians in turn."""
    program = folder / "program.py"
    program.write_text("import time; print('begins', time.time(), flush=True)\n")
    run = Run(cluster, folder / "overhead")
    wrapper = folder / "python"
    wrapper.write_text(
        f'#!/bin/sh\ncase "$*" in *"-m pretrain train"*) exec {sys.executable} {program} ;; esac\n'
        f'exec {sys.executable} "$@"\n'
    )
    wrapper.chmod(0o755)
    run.profile["python"] = str(wrapper)
    bare = folder / "bare.sh"
    bare.write_text(f"#!/bin/sh\nsrun -N2 -n2 {sys.executable} {program}\n")
    times: dict[str, list[float]] = {
        "bare srun": [],
        "our script": [],
        "our script with preflight": [],
    }
    scripts = {}
    for name, preflight in (("our script", False), ("our script with preflight", True)):
        run.profile["preflight"] = preflight
        (run.folder / "recipe.yaml").write_text(json.dumps(run.recipe))
        (run.folder / "profile.yaml").write_text(json.dumps(run.profile))
        run.submit()
        scripts[name] = run.folder / f"{preflight}.sbatch"
        scripts[name].write_text((run.work / "slurm" / "train-a.sbatch").read_text())
        run.cancel()
    scripts["bare srun"] = bare
    for _ in range(ROUNDS):
        for name, taken in times.items():
            taken.append(begins_after(scripts[name], folder / "log"))
    medians = {name: statistics.median(taken) for name, taken in times.items()}
    return {
        "sbatch to the first line of each task: bare srun": medians["bare srun"],
        "the same through our script": medians["our script"],
        "overhead of our script": medians["our script"] - medians["bare srun"],
        "the same with preflight (torch, all-reduce)": medians["our script with preflight"],
    }


def begins_after(script: Path, log: Path) -> float:
    log.unlink(missing_ok=True)
    begin = time.time()
    line = ["sbatch", "-W", "-N2", "--ntasks-per-node=1", "-o", str(log), str(script)]
    subprocess.run(line, check=True, cwd=REPO, capture_output=True)
    return (
        max(float(t.split()[1]) for t in log.read_text().splitlines() if t.startswith("begins"))
        - begin
    )


def node_death(cluster: Cluster, folder: Path) -> dict[str, float]:
    """A power cut in the middle of a training."""
    run = Run(cluster, folder / "cut").standin(update_s=0.2)
    run.recipe["phases"] = [{"name": "a", "steps": 1000}]
    run.submit()
    run.wait_step(12)
    nodes = run.lives("train-a").split("started on ")[1].split()[0]
    last = cluster.run("scontrol", "show", "hostnames", nodes).split()[-1]
    cluster.do("kill-node", last)
    cut = time.time()
    wait_for(lambda: run.restarts() == 1, 120, "the requeue", run.report)
    noticed = time.time()
    again = wait_for(
        lambda: next((r["time"] for r in run.log() if r["time"] > noticed), 0),
        120,
        "training again",
        run.report,
    )
    run.cancel()
    return {
        "power cut to SLURM's requeue": noticed - cut,
        "requeue to the next update (5 s of it SLURM's own delay)": again - noticed,
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
