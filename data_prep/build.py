"""`python -m data_prep build RECIPE`: a recipe's text as shard folders below its work_dir."""

from __future__ import annotations

import argparse
import os
import sys

from configs import load_recipe, say
from configs.cli import add_recipe


def main(argv: list[str]) -> int | None:
    parser = argparse.ArgumentParser(
        prog="python -m data_prep build",
        description=__doc__,
        epilog="Stopped at any moment, the same command goes on from what is finished. On several "
        "nodes: mpirun -n N (or srun --mpi=pmix) python -m data_prep build RECIPE prep.executor=mpi. "
        "The bytes are the same for any number of workers.",
    )
    add_recipe(parser, "e.g. prep.workers=8")
    parser.add_argument("--set", action="append", dest="sets", help="only this shard set (repeat)")
    arguments = parser.parse_intermixed_args(argv)
    recipe = load_recipe(arguments.recipe, arguments.overrides)
    names = arguments.sets or list(recipe.shards)

    from data_prep.executor import Mpi, make_executor

    executor = make_executor(recipe.prep.executor, recipe.prep.workers)
    from data_prep.pipeline import build_recipe

    try:
        folders = build_recipe(recipe, names, executor)
    except BaseException as error:
        if isinstance(executor, Mpi):  # the other ranks must not wait for this one
            executor.abort(error)
        raise
    if executor.is_lead:
        for folder in folders:
            say(f"made {folder}")
            say(f"  look at it: {python()} -m data_prep inspect {folder}")
    return None


def python() -> str:
    return os.path.basename(sys.executable) or "python"  # noqa: PTH119 (a name, not a path)
