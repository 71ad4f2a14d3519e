"""`python -m cluster hostfile`: a hostfile for the deepspeed launcher and mpirun.

From the SLURM allocation it runs in, or from a node list.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from cluster.environment import expand_counts
from cluster.nodes import expand
from configs import UserError, say


def main(argv: list[str]) -> int | None:
    parser = argparse.ArgumentParser(
        prog="python -m cluster hostfile",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="example:\n  python -m cluster hostfile --nodes gpu[008-011] --slots 8 -o hostfile",
    )
    parser.add_argument("--nodes", default="", help="a node list; default: this SLURM allocation")
    parser.add_argument(
        "--slots", type=int, help="processes a node; default: as SLURM allotted, 1 without it"
    )
    parser.add_argument(
        "-o", "--output", default="", help="file to write; default: standard output"
    )
    arguments = parser.parse_args(argv)
    slots = slots_of(arguments.nodes, arguments.slots, dict(os.environ))
    text = "".join(f"{node} slots={count}\n" for node, count in slots.items())
    if not arguments.output:
        sys.stdout.write(text)
        return None
    try:
        Path(arguments.output).write_text(text)
    except OSError as error:
        raise UserError(f"{arguments.output}: {error.strerror}", "choose another file") from None
    first = next(iter(slots))
    tail = "pretrain/__main__.py train RECIPE"
    say(
        f"wrote {arguments.output}: {len(slots)} nodes, {sum(slots.values())} processes. Start with one of"
    )
    common = f"deepspeed --hostfile {arguments.output} --no_ssh_check --master_addr {first}"
    say(f"  {common} --force_multi --launcher slurm {tail}")
    say(
        f"  {common} --force_multi --launcher openmpi --launcher_args='-x MASTER_ADDR={first}' {tail}"
    )
    say(
        f"  deepspeed --hostfile {arguments.output} --launcher pdsh {tail}  # over ssh between the nodes"
    )
    return None


def slots_of(nodes: str, slots: int | None, environ: dict[str, str]) -> dict[str, int]:
    """Node -> processes, in the order of the list.

    Raises:
        UserError: no list and no allocation, a broken list, no count anywhere, one below 1.
    """
    if slots is not None and slots < 1:
        raise UserError(f"--slots {slots}", "give the number of processes on a node")
    if nodes:
        return dict.fromkeys(expand(nodes), slots or 1)
    if "SLURM_JOB_NODELIST" not in environ:
        raise UserError(
            "this is not a SLURM allocation (SLURM_JOB_NODELIST is not set)",
            "run it inside sbatch or salloc, or give --nodes gpu[008-011] --slots 8",
        )
    names = expand(environ["SLURM_JOB_NODELIST"])
    if slots:
        return dict.fromkeys(names, slots)
    counts = expand_counts(environ.get("SLURM_TASKS_PER_NODE", ""))
    if len(counts) != len(names):
        raise UserError(
            f"SLURM_TASKS_PER_NODE={environ.get('SLURM_TASKS_PER_NODE', '')} does not fit "
            f"{len(names)} nodes",
            "give --slots",
        )
    return dict(zip(names, counts))
