"""`python -m ROOM COMMAND ...`: finds the command's module only when it is called.

Each command is a module with `main(argv) -> int | None`, so that `--help` of one command does not
import what another needs.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path

from configs.errors import UserError, run_cli

ROOT = Path(__file__).resolve().parent.parent


def add_recipe(parser: argparse.ArgumentParser, overrides: str) -> None:
    """What every command that takes a recipe is given first. overrides: help, e.g. an example."""
    parser.add_argument("recipe", help="a YAML file, or the name of one in configs/recipes")
    parser.add_argument("overrides", nargs="*", default=[], metavar="key=value", help=overrides)


def dispatch(room: str, about: str, commands: Mapping[str, tuple[str, str]]) -> None:
    """Runs the command named by sys.argv[1]. commands: name -> (module with main(argv), one line)."""
    # `python pretrain/__main__.py` (deepspeed's slurm runner has no -m) puts the room's own folder
    # first on the path, where its modules would hide packages such as `evaluate`.
    sys.path[:] = [p for p in sys.path if Path(p or ".").resolve() != ROOT / room]

    def main() -> int | None:
        # The deepspeed launcher puts --local_rank=N in front; the environment says it as well.
        sys.argv[1:] = [a for a in sys.argv[1:] if not a.startswith("--local_rank=")]
        if len(sys.argv) < 2 or sys.argv[1] in ("-h", "--help"):
            width = max(map(len, commands))
            print(f"usage: python -m {room} COMMAND ...\n\n{about}\n\ncommands:")
            for name, (_, line) in commands.items():
                print(f"  {name:<{width}}  {line}")
            print(f"\n`python -m {room} COMMAND --help` says more about one.")
            return 0 if len(sys.argv) > 1 else 2
        name = sys.argv[1]
        if name not in commands:
            near = get_close_matches(name, commands, 1)
            hint = f"did you mean {near[0]}?" if near else f"commands: {', '.join(commands)}"
            raise UserError(f"python -m {room}: no command {name!r}", hint)
        result: int | None = import_module(commands[name][0]).main(sys.argv[2:])
        return result

    run_cli(main)
