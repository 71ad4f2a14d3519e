"""The five-minute BERT beside transformers' Trainer: `make five-minute`, or

    python -m bench.five_minute --cards 0,1 --stages prepare,tries,finals,finetune,report

prepare   vocabulary and shards from $LAMBERT_DATA (books, encyclopedia: ../shared/data)
tries     short runs of both sides (left out by default: CHOSEN and the recipe hold what they gave)
finals    the full time, then held-out loss and BLiMP
finetune  the downstream sets: ours, the rival, and ours drawn at random
report    WORK/report.md

With one card the sides take turns, with two or more they train at the same time on cards of their
own. A stage whose files are there already is done again; everything it made is kept in WORK.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
from pathlib import Path

from bench.five_minute_report import write_report
from bench.five_minute_runs import REPO, SIDES, Workplace, run_finals, run_tries
from configs import UserError, say
from configs.cli import run_cli

STAGES = ("prepare", "tries", "finals", "finetune", "report")


def main() -> None:
    options = _parser().parse_args()
    stages = options.stages.split(",")
    unknown = [stage for stage in stages if stage not in STAGES]
    if unknown:
        raise UserError(f"--stages {unknown[0]} is not known", f"known: {', '.join(STAGES)}")
    data = Path(os.environ.get("LAMBERT_DATA", REPO.parent / "shared" / "data")).resolve()
    if not (data / "books").is_dir():
        raise UserError(
            f"no data at {data}", "set LAMBERT_DATA to the folder with books/ and wiki/"
        )
    os.environ["LAMBERT_DATA"] = str(data)
    cards = options.cards.split(",") if options.cards else _cards()
    place = Workplace(Path(options.work), cards, options.overrides, options.rival.split())
    blimp = data / "blimp" / "blimp.parquet"
    for stage in stages:
        say(f"--- {stage}")
        if stage == "prepare":
            place.prepare()
        elif stage == "tries":
            run_tries(place, options.try_minutes, blimp, options.rows)
        elif stage == "finals":
            run_finals(place, options.minutes, blimp, options.sample, options.rows)
        elif stage == "finetune":
            fine_tune(place, cards, data, options)
        else:
            say(write_report(place.work))


def fine_tune(place: Workplace, cards: list[str], data: Path, options: argparse.Namespace) -> None:
    """The best run of each side and random weights in the shape of ours, on every downstream set."""
    best = json.loads((place.work / "best.json").read_text(encoding="utf-8"))
    ours, rival = (place.export(best[side]) for side in SIDES)
    models = [f"ours={ours}:{options.seeds}", f"rival={rival}:{options.seeds}"]
    if options.random_seeds:
        models.append(f"random=random:{ours}:{options.random_seeds}")
    place.command(
        "finetune",
        *("-m", "bench.five_minute_finetune", *models, "--data", str(data)),
        *("--out", str(place.work / "finetune"), "--cards", ",".join(cards)),
        *("--workers", str(options.workers * len(cards)), "--limit-s", str(options.limit_s)),
        *(["--quick"] if options.quick else []),
    )


def _cards() -> list[str]:
    """All GPUs of this machine; [""] without one (a CPU: for a rehearsal only)."""
    command = ["nvidia-smi", "--query-gpu=index", "--format=csv,noheader"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    except (OSError, subprocess.CalledProcessError):
        found = []
    return found or [""]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench.five_minute",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("overrides", nargs="*", metavar="key=value", help="of the recipe, for every run of ours")
    add("--work", default="runs/five-minute")
    add("--stages", default="prepare,finals,finetune,report")
    add("--cards", default="", help="GPU numbers, e.g. 0,1; default: all")
    add("--minutes", type=float, default=5.0)
    add("--try-minutes", type=float, default=0.75)
    add("--rows", type=int, default=0, help="held-out rows scored; 0 = all")
    add("--sample", type=float, default=1.0, help="share of BLiMP in the finals")
    add("--seeds", type=int, default=3, help="of fine-tuning")
    add("--random-seeds", type=int, default=1, help="of fine-tuning from random weights")
    add("--workers", type=int, default=5, help="fine-tuning processes a card")
    add("--limit-s", type=float, default=3600.0, help="seconds after which fine-tuning stops")
    add("--quick", action="store_true", help="fine-tune on 1%% of the examples: a rehearsal")
    add("--rival", default="", help="options for every run of the rival, in one string")
    return parser


if __name__ == "__main__":
    run_cli(main)
