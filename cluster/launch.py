"""`python -m cluster launch -- COMMAND`: starts COMMAND with RANK, WORLD_SIZE, MASTER_ADDR, ... set.

Once per process under srun or mpirun (the default), or once per node with `--starter torchrun` or
`--starter deepspeed`, which start the processes of their node.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from cluster.environment import distributed_environment, job_port
from cluster.nodes import expand
from configs import UserError
from configs.errors import PREEMPTED_EXIT

SAVE_SIGNALS = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM, signal.SIGINT)


def main(argv: list[str]) -> int | None:
    parser = argparse.ArgumentParser(
        prog="python -m cluster launch",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="examples:\n"
        "  srun --ntasks=16 python -m cluster launch -- python -m pretrain train RECIPE\n"
        "  srun --ntasks-per-node=1 python -m cluster launch --starter torchrun --processes 8 -- \\\n"
        "       python -m pretrain train RECIPE",
    )
    parser.add_argument("--starter", choices=["none", "torchrun", "deepspeed"], default="none")
    parser.add_argument(
        "--processes", type=int, default=1, help="processes on each node, for a starter"
    )
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="-- COMMAND ...")
    arguments = parser.parse_args(argv)
    command = arguments.command[1:] if arguments.command[:1] == ["--"] else arguments.command
    if not command:
        raise UserError(
            "no command after --", "python -m cluster launch -- python -m pretrain train R"
        )
    if arguments.starter == "none":
        os.environ.update(distributed_environment())
        _exec(command)
    if arguments.processes < 1:
        raise UserError(f"--processes {arguments.processes}", "at least 1 on each node")
    nodes, index = _nodes()
    if arguments.starter == "torchrun":
        line = _torchrun(command, nodes, index, arguments.processes)
        return _supervise(line)
    with tempfile.TemporaryDirectory() as folder:
        hostfile = Path(folder) / "hostfile"
        hostfile.write_text("".join(f"{node} slots={arguments.processes}\n" for node in nodes))
        return _supervise(_deepspeed(command, nodes, index, hostfile))


def _exec(command: list[str]) -> None:
    try:
        os.execvp(command[0], command)
    except OSError as error:
        raise UserError(f"{command[0]}: {error.strerror}", "give a program after --") from None


def _nodes() -> tuple[list[str], int]:
    """The nodes of this SLURM step and which of them this is; alone outside of SLURM."""
    if "SLURM_STEP_ID" not in os.environ or "SLURM_JOB_NODELIST" not in os.environ:
        return ["127.0.0.1"], 0
    nodes = expand(os.environ.get("SLURM_STEP_NODELIST") or os.environ["SLURM_JOB_NODELIST"])
    if int(os.environ["SLURM_NTASKS"]) != len(nodes):
        raise UserError(
            f"{os.environ['SLURM_NTASKS']} tasks on {len(nodes)} nodes: a starter runs once a node",
            "srun --ntasks-per-node=1",
        )
    return nodes, int(os.environ["SLURM_NODEID"])


def _torchrun(command: list[str], nodes: list[str], index: int, processes: int) -> list[str]:
    line = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--no-python",
        "--signals-to-handle=SIGINT",
    ]
    line += [f"--nnodes={len(nodes)}", f"--node-rank={index}", f"--nproc-per-node={processes}"]
    line += [f"--master-addr={nodes[0]}"]
    return [*line, f"--master-port={job_port(os.environ)}", *command]


def _deepspeed(command: list[str], nodes: list[str], index: int, hostfile: Path) -> list[str]:
    line = ["deepspeed", "--no_ssh", f"--node_rank={index}", f"--hostfile={hostfile}"]
    line += [f"--master_addr={nodes[0]}", f"--master_port={job_port(os.environ)}"]
    return [*line, "--no_python", "--no_local_rank", *command]


def _supervise(line: list[str]) -> int:
    """Runs a starter; hands save signals to the training processes, past the starter.

    torchrun and deepspeed die of USR1 and give up their children. They also turn every exit code
    into 1, so an end after a signal is reported as PREEMPTED_EXIT.
    """
    signalled = False

    def forward(number: int, _frame: object) -> None:
        nonlocal signalled
        signalled = True
        for pid in training_processes(child.pid):
            os.kill(pid, number)

    # Ignored signals stay ignored in the starter; the training sets handlers of its own. Not so
    # Ctrl-C, which ends what does not listen to it yet.
    for number in set(SAVE_SIGNALS) - {signal.SIGINT}:
        signal.signal(number, signal.SIG_IGN)
    try:
        child = subprocess.Popen(
            line,
        )
    except FileNotFoundError:
        raise UserError(f"{line[0]} is not installed here", "pip install deepspeed") from None
    for number in SAVE_SIGNALS:
        signal.signal(number, forward)
    code = child.wait()
    if signalled and code != 0:
        return PREEMPTED_EXIT
    return code if code >= 0 else 128 - code


def training_processes(pid: int) -> list[int]:
    """The topmost descendants of `pid` that a starter gave a RANK."""
    found = []
    for child in _children(pid):
        if _has_rank(child):
            found.append(child)
        else:
            found += training_processes(child)
    return found


def _children(pid: int) -> list[int]:
    try:
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
        return [int(c) for task in tasks for c in (task / "children").read_text().split()]
    except OSError:
        return []  # it has just ended


def _has_rank(pid: int) -> bool:
    try:
        variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return False
    return any(variable.startswith(b"RANK=") for variable in variables)
