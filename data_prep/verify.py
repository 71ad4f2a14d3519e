"""`python -m data_prep verify FOLDER`: checks every byte and every row of a shard folder.

Names each part that is damaged, missing, foreign or stale; exit code 1 if there is any. With a
recipe instead of a folder it checks all its sets, and that they are what the recipe asks for now;
with a folder above sets (runs/demo, runs/demo/shards) all sets below.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from configs import UserError, load_recipe, say
from data_prep.pipeline import make_plan
from data_prep.settings import set_changes, set_settings
from data_prep.shard_check import check_folder
from data_prep.shard_index import INDEX, is_set, read_index, sets_below


def main(argv: list[str]) -> int | None:
    parser = argparse.ArgumentParser(prog="python -m data_prep verify", description=__doc__)
    parser.add_argument("target", metavar="FOLDER|RECIPE", help="a shard folder, or a recipe")
    parser.add_argument(
        "overrides", nargs="*", default=[], metavar="key=value", help="with a recipe"
    )
    arguments = parser.parse_intermixed_args(argv)
    target = Path(arguments.target)
    recipe_like = target.is_file() or target.suffix in (".yaml", ".yml") or len(target.parts) < 2
    if target.is_dir() or not recipe_like:
        if arguments.overrides:
            raise UserError("overrides go with a recipe, not with a folder", "give the recipe")
        folders, problems = [target], []
        if not target.is_dir():
            read_index(target)  # refuses it
        if not is_set(target):
            folders = sets_below(target)
            if not folders:
                raise UserError(
                    f"{target}: not a shard folder, and none is below it",
                    "python -m data_prep build RECIPE makes them in work_dir/shards",
                )
    else:
        recipe = load_recipe(arguments.target, arguments.overrides)
        folders = [Path(recipe.work_dir) / "shards" / name for name in recipe.shards]
        problems = stale(recipe)
    for folder in folders:
        found = check_folder(folder, quiet=False)
        problems += found
        if not found:
            index = read_index(folder)
            say(f"{folder}: {index['rows']:,} rows in {len(index['parts'])} parts, all right")
    for problem in problems:
        say(f"PROBLEM {problem}")
    if problems:
        say(
            f"{len(problems)} problems. Delete the files named, where they are there, and run `python -m "
            "data_prep build RECIPE` again; what is stale or of another build goes with its whole folder."
        )
    return 1 if problems else 0


def stale(recipe: Any) -> list[str]:
    """Sets of a recipe that were built from other settings, vocabulary, sources or code."""
    plan = make_plan(recipe, list(recipe.shards))
    problems = []
    for name in recipe.shards:
        folder = Path(recipe.work_dir) / "shards" / name
        if (folder / INDEX).is_file():
            try:
                index = read_index(folder)
            except UserError:
                continue  # check_folder tells
            now = set_settings(recipe, name, plan.settings)
            changes = set_changes(index, now, recipe.shards[name])
            problems += [f"{folder}: stale: {change}" for change in changes]
    return problems
