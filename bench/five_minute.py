"""The five-minute BERT beside transformers' Trainer: `make five-minute`, or

    python -m bench.five_minute --cards 0,1 --stages prepare,tries,finals,finetune,report

prepare   vocabulary and shards from $LAMBERT_DATA (books, encyclopedia: ../shared/data)
tries     the short runs of both sides (left out by default: the recipe and FINALS came of them)
finals    the full time, then held-out loss and BLiMP; with --runs of the runs named there
finetune  the downstream sets: the best of the finals of either side, and ours drawn at random (a
          side goes on with it as soon as its finals are scored)
report    WORK/report.md

With one card the sides take turns, with two or more they train at the same time on cards of their
own. A stage whose files are there already is done again; everything it made is kept in WORK.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import time
from pathlib import Path
from typing import Any

from bench.data import data_folder
from bench.five_minute_report import write_report
from bench.five_minute_runs import Workplace, run_all
from bench.five_minute_tries import FINALS, SIDES, TRIES, named
from configs import UserError, say
from configs.cli import run_cli

STAGES = ("prepare", "tries", "finals", "finetune", "report")


def main() -> None:
    options = _parser().parse_args()
    options.until = time.time() + options.limit_s
    stages = [stage.strip() for stage in options.stages.split(",")]
    unknown = [stage for stage in stages if stage not in STAGES]
    if unknown:
        raise UserError(f"--stages {unknown[0]} is not known", f"known: {', '.join(STAGES)}")
    finals = named(options.runs.split(",")) if options.runs else FINALS
    data = data_folder()
    if not (data / "books").is_dir():
        raise UserError(
            f"no data at {data}", "set LAMBERT_DATA to the folder with books/ and wiki/"
        )
    os.environ["LAMBERT_DATA"] = str(data)
    cards = options.cards.split(",") if options.cards else _cards()
    trains = {"tries", "finals", "finetune"} & set(stages)
    if (
        cards == [""]
        and trains
        and not any(o.startswith("train.precision=") for o in options.overrides)
    ):
        raise UserError(
            "no GPU: nvidia-smi names none",
            "for a rehearsal on a CPU: --minutes 0.1 --quick train.precision=fp32",
        )
    place = Workplace(Path(options.work), cards, options.overrides, options.rival.split())
    blimp = data / "blimp" / "blimp.parquet"

    def then(side: str, best: str) -> None:
        (place.work / f"best-{side}.json").write_text(json.dumps(best), encoding="utf-8")
        if "finetune" in stages:
            fine_tune(place, side, best, data, options)

    def again(side: str) -> None:
        if side in best:
            then(side, best[side])

    for stage in (s for s in stages if s != "finetune" or "finals" not in stages):
        say(f"--- {stage}")
        if stage == "prepare":
            place.prepare()
        elif stage == "tries":
            tries = {side: {f"try-{side}-{n}": o for n, o in TRIES[side].items()} for side in SIDES}
            run_all(place, stage, tries, options.try_minutes, blimp, 0.02, options.rows)
        elif stage == "finals":
            run_all(
                place, stage, finals, options.minutes, blimp, options.sample, options.rows, then
            )
        elif stage == "finetune":
            best = trained(place.work, finals, bool(options.runs))
            place.both(again)
        else:
            say(write_report(place.work))


def trained(work: Path, runs: dict[str, dict[str, list[str]]], asked: bool) -> dict[str, str]:
    """side -> the best run of its finals, of the sides that have one. asked: for `runs`, of which it
    must then be.

    Raises:
        UserError: there is none.
    """
    files = {side: work / f"best-{side}.json" for side in runs}
    best = {side: _json(file) for side, file in files.items() if file.is_file()}
    missing = [side for side in runs if asked and best.get(side) not in runs[side]]
    if missing or not best:
        of = ", ".join(name for side in missing or runs for name in runs[side])
        raise UserError(
            f"the last finals in {work} had no run of {of}",
            "train and score them first: --stages finals,finetune",
        )
    return best


def fine_tune(
    place: Workplace, side: str, best: str, data: Path, options: argparse.Namespace
) -> None:
    """A side's best run on every downstream set; with ours also random weights in its shape."""
    folder = place.export(best)
    models = [f"{side}={folder}:{options.seeds}"]
    if side == "ours" and options.random_seeds:
        models.append(f"random=random:{folder}:{options.random_seeds}")
    cards = place.cards[side]
    place.command(
        f"finetune-{side}",
        *("-m", "bench.five_minute_finetune", *models, "--data", str(data)),
        *("--out", str(place.work / best / "finetune"), "--cards", ",".join(cards)),
        *("--workers", str(options.workers * len(cards)), "--until", str(options.until)),
        *(["--quick"] if options.quick else []),
    )


def _json(file: Path) -> Any:
    return json.loads(file.read_text(encoding="utf-8"))


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
    add(
        "--runs",
        default="",
        help="names of bench/five_minute_tries.py, with commas; default: FINALS",
    )
    add("--work", default="runs/five-minute")
    add("--stages", default="prepare,finals,finetune,report")
    add("--cards", default="", help="GPU numbers, e.g. 0,1; default: all")
    add("--minutes", type=float, default=5.0)
    add("--try-minutes", type=float, default=0.75)
    add("--rows", type=int, default=0, help="held-out rows scored; 0 = all")
    add("--sample", type=float, default=1.0, help="share of BLiMP in the finals")
    add("--seeds", type=int, default=3, help="of fine-tuning")
    add("--random-seeds", type=int, default=3, help="of fine-tuning from random weights")
    add("--workers", type=int, default=5, help="fine-tuning processes a card")
    add("--limit-s", type=float, default=1e6, help="seconds from now when fine-tuning must end")
    add("--quick", action="store_true", help="fine-tune on 1%% of the examples: a rehearsal")
    add("--rival", default="", help="options for every run of the rival, in one string")
    return parser


if __name__ == "__main__":
    run_cli(main)
