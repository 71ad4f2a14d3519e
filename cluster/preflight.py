"""`python -m cluster preflight`: checks every node of a job before its long part starts.

Run by each process of the job (srun ... python -m cluster preflight). The processes report to rank
0 over plain TCP, so a node that cannot be reached is named as well; then torch times an all-reduce.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import time
from pathlib import Path

from cluster.checks import NodeReport, compare, examine
from cluster.environment import distributed_environment
from cluster.nodes import expand, fold
from configs import UserError, say


def main(argv: list[str]) -> int | None:
    parser = argparse.ArgumentParser(
        prog="python -m cluster preflight",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--folder", default=".", help="the run folder, where checkpoints are written"
    )
    parser.add_argument("--gpus", type=int, default=0, help="GPUs each node must have")
    parser.add_argument("--checkpoint-gb", type=float, default=0.0, help="size of a checkpoint")
    parser.add_argument("--keep", type=int, default=0, help="checkpoints that the run keeps")
    parser.add_argument(
        "--wait", type=float, default=60.0, help="seconds to wait for all processes"
    )
    parser.add_argument("--megabytes", type=int, default=64, help="size of the timed all-reduce")
    parser.add_argument("--no-all-reduce", action="store_true", help="skip what needs torch")
    arguments = parser.parse_args(argv)
    env = distributed_environment()
    rank, world = int(env["RANK"]), int(env["WORLD_SIZE"])
    # One process a node looks at the GPUs, so that nvidia-smi is not asked eight times at once.
    gpus = arguments.gpus if int(os.environ.get("SLURM_LOCALID", env["LOCAL_RANK"])) == 0 else 0
    report = examine(rank, Path(arguments.folder), gpus, arguments.checkpoint_gb, arguments.keep)
    problems = meet(report, env, arguments.wait)
    if rank == 0 and problems:
        nodes = int(os.environ.get("SLURM_NNODES", "1"))
        raise UserError("preflight: " + "\n           ".join(problems), remedy_of(problems, nodes))
    if problems:
        return 2
    if arguments.no_all_reduce or world == 1:
        return None
    from cluster.bandwidth import all_reduce

    return all_reduce(env, arguments.megabytes, bool(arguments.gpus))


def meet(report: NodeReport, env: dict[str, str], wait_s: float) -> list[str]:
    """Gathers all reports on rank 0; every rank returns the list of problems.

    Raises:
        UserError: on a rank that cannot reach rank 0's node.
    """
    rank, world = int(env["RANK"]), int(env["WORLD_SIZE"])
    if rank:
        return _report_to_lead(report, env, wait_s)
    reports = [report]
    peers = []
    deadline = time.monotonic() + wait_s
    with socket.create_server(("", int(env["MASTER_PORT"])), backlog=1024) as server:
        while len(reports) < world and (left := deadline - time.monotonic()) > 0:
            server.settimeout(left)
            try:
                peer, _ = server.accept()
                peer.settimeout(10)
                reports.append(NodeReport(**json.loads(peer.makefile().readline())))
                peers.append(peer)
            except (TimeoutError, ValueError, TypeError):
                continue
    problems = [f"{r.host}: {p}" for r in sorted(reports, key=lambda r: r.rank) for p in r.problems]
    problems += compare(reports) + _missing(reports, world, wait_s)
    problems = list(dict.fromkeys(problems))
    for peer in peers:
        peer.sendall(json.dumps(problems).encode() + b"\n")
        peer.close()
    if not problems:
        hosts = {r.host for r in reports}
        free = min(r.free_gb for r in reports)
        cards = f", {len(report.gpus)} x {report.gpus[0]} each" if report.gpus else ""
        say(
            f"preflight: {world} processes on {len(hosts)} nodes{cards}, versions equal "
            f"(torch {report.versions['torch']}), {free:.0f} GB free"
        )
    return problems


def remedy_of(problems: list[str], nodes: int) -> str:
    """What to do about `HOST: problem` lines of a job on so many nodes."""
    bad = sorted({p.split(": ")[0] for p in problems if ": " in p})
    if not bad:
        return "see which of the processes above did not start: the job's log has their last lines"
    if len(bad) >= nodes and all("checkpoints to come" in p for p in problems):
        return "no node is to blame: free some disk where work_dir is, or give another work_dir"
    return f"mend or leave out {', '.join(bad)}: sbatch_options: {{exclude: '{fold(bad)}'}} in the profile"


def _report_to_lead(report: NodeReport, env: dict[str, str], wait_s: float) -> list[str]:
    address = (env["MASTER_ADDR"], int(env["MASTER_PORT"]))
    deadline = time.monotonic() + wait_s
    while True:
        try:
            with socket.create_connection(address, timeout=5) as lead:
                lead.sendall(json.dumps(report.to_json()).encode() + b"\n")
                lead.settimeout(wait_s + 30)
                return list(json.loads(lead.makefile().readline() or '["lost the first node"]'))
        except OSError as error:
            if time.monotonic() > deadline:
                raise UserError(
                    f"preflight: {report.host} cannot reach the first node {address[0]}:{address[1]}: {error}",
                    "check the name in /etc/hosts or DNS, the firewall between the nodes, and "
                    "NCCL_SOCKET_IFNAME; another MASTER_ADDR may be exported in the profile",
                ) from None
            time.sleep(0.2)


def _missing(reports: list[NodeReport], world: int, wait_s: float) -> list[str]:
    absent = sorted(set(range(world)) - {report.rank for report in reports})
    if not absent:
        return []
    nodes = os.environ.get("SLURM_STEP_NODELIST") or os.environ.get("SLURM_JOB_NODELIST") or ""
    silent = sorted(set(expand(nodes)) - {r.host.split(".")[0] for r in reports}) if nodes else []
    ranks = ", ".join(map(str, absent[:8])) + (", ..." if len(absent) > 8 else "")
    said = f"no word from rank {ranks} in {wait_s:.0f} s"
    return [f"{node}: {said}" for node in silent] or [said]
