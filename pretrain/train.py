"""python -m pretrain train RECIPE [key=value ...]"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from configs.console import say
from configs.errors import UserError
from configs.files import lock_folder
from configs.loading import load_recipe

if TYPE_CHECKING:
    from pretrain.checks import Plan

HELP = """usage: python -m pretrain train RECIPE [key=value ...]

Trains a recipe on its shards; the same command goes on from the last checkpoint, also with another
number of processes, tp, ZeRO stage or micro-batch size. Start it once for one process, or with
torchrun, deepspeed, srun or mpirun for several:

  python -m pretrain train demo
  torchrun --nproc-per-node 2 -m pretrain train demo parallel.tp=2
  deepspeed --num_accelerators 2 --module pretrain train demo parallel.zero_stage=1

RECIPE is a YAML file or the name of one in configs/recipes. Useful overrides: train.stop_at=N,
train.precision=bf16, parallel.tp=N, parallel.micro_batch_tokens=0 (the largest that fits),
checkpoint.resume=false, work_dir=DIR. Exit codes: 0 done, 2 a mistake in what was asked, 75 saved
after a signal (run it again), 76 diverged, 77 a process was lost (run it again). Ctrl-Z and SIGTSTP
stop it for a while; after a SIGSTOP longer than guard.hang_timeout_s it ends with 1 (run it again).
"""


def main(argv: list[str]) -> int:
    if not argv or {"-h", "--help"} & set(argv):
        print(HELP)
        return 0 if argv else 2
    # Before anything imports torch. Threads that wait must not spin: on a shared CPU that made
    # updates four times slower.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    from cluster.environment import distributed_environment
    from pretrain.checks import check

    try:
        recipe = load_recipe(argv[0], argv[1:])
        env = distributed_environment()
        plan = check(recipe, env)
        lock = None
        if not plan.finished and plan.rank == 0:  # two would mix their checkpoints
            lock = lock_folder(Path(recipe.work_dir) / "train", "training")
    except UserError as error:
        if os.environ.get("LOCAL_RANK", "0") not in ("", "0"):
            sys.exit(error.exit_code)  # one process a node says it
        raise
    if plan.finished:
        if plan.rank == 0:
            folder = Path(recipe.work_dir) / "train" / "checkpoints" / f"step-{plan.newest:08d}"
            say(f"nothing to do: {_done(plan)}; checkpoint: {folder}")
        return 0
    os.environ.update(env)
    from pretrain.trainer import train

    try:
        return train(plan)
    finally:
        if lock is not None:
            lock.close()


def _done(plan: Plan) -> str:
    if plan.newest == plan.end:
        return f"{plan.newest} of {plan.end} updates are done"
    if plan.newest < plan.end:
        minutes = plan.recipe.train.max_minutes
        return f"train.max_minutes={minutes:g} are used up, after {plan.newest} updates"
    asked = "train.stop_at" if plan.end < plan.total else "the phases' steps together"
    return f"{plan.newest} updates are done already, {asked} is {plan.end}"
