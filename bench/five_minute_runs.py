"""Runs of the five-minute BERT and of its rival: how they are started and scored.

Every run is a process of its own with one card. Each side takes its cards from a list of its own,
so that both train at the same time where there are cards enough.
"""

from __future__ import annotations

import json
import os
import queue
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from bench.data import REPO
from bench.five_minute_tries import SIDES
from configs import UserError, load_recipe, say
from pretrain.checkpoint.folder import INDEX, latest

RECIPE = "five-minute"


class Workplace:
    """Folders below `work`: the recipe's own (vocab, shards), then one a run.

    Args:
        overrides: of the recipe, for every command. cards: GPU numbers, "" for a CPU.
        rival: options for every run of the rival (tests make it tiny).
    """

    def __init__(
        self,
        work: Path,
        cards: Sequence[str],
        overrides: Sequence[str] = (),
        rival: Sequence[str] = (),
    ) -> None:
        self.work, self.overrides, self.rival_options = work.resolve(), list(overrides), list(rival)
        half = max(1, len(cards) // 2)
        self.cards = {"ours": list(cards[:half]), "rival": list(cards[half:] or cards)}
        self.shared = len(cards) < 2  # the sides take turns

    def command(self, name: str, *arguments: str, card: str = "") -> float:
        """Runs `python ARGUMENTS` with its output in work/logs/NAME.log; returns the seconds.

        Raises:
            UserError: it failed; holds the end of the log.
        """
        log_file = self.work / "logs" / f"{name}.log"
        log_file.parent.mkdir(parents=True, exist_ok=True)
        environment = dict(os.environ)
        if card:
            environment["CUDA_VISIBLE_DEVICES"] = card
        start = time.monotonic()
        with log_file.open("w", encoding="utf-8") as log:
            done = subprocess.run(
                [sys.executable, *arguments],
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
                cwd=REPO,
            )
        seconds = time.monotonic() - start
        if done.returncode:
            end = log_file.read_text(encoding="utf-8", errors="replace").splitlines()[-15:]
            raise UserError(f"{name} failed ({done.returncode})", "\n  ".join(end))
        say(f"{name}: done in {seconds:.0f} s")
        return seconds

    def prepare(self) -> None:
        """Vocabulary and shards; a no-op where they are finished."""
        for what in ("vocab", "build"):
            where = [RECIPE, f"work_dir={self.work}", *self.overrides]
            self.command(f"prep-{what}", "-m", "data_prep", what, *where)

    def ours(self, name: str, minutes: float, options: Sequence[str], card: str) -> None:
        """Trains the recipe through the real trainer, in work/NAME; first builds rows that are not
        the recipe's."""
        run = self.work / name
        run.mkdir(parents=True, exist_ok=True)
        settings = [*options, *self.overrides, f"work_dir={run}"]
        own_rows = any(option.startswith("shards.") for option in options)
        for shared in ("vocab",) if own_rows else ("vocab", "shards"):
            if not (run / shared).exists():
                (run / shared).symlink_to(self.work / shared)
        timed = f"train.max_minutes={minutes}"
        if own_rows:
            phases = load_recipe(RECIPE, [*settings, timed]).phases
            sets = [word for s in sorted({p.shards for p in phases}) for word in ("--set", s)]
            self.command(
                f"{name}-build", "-m", "data_prep", "build", *sets, RECIPE, *settings, timed
            )
        self.command(
            f"{name}-train", "-m", "pretrain", "train", RECIPE, *settings, timed, card=card
        )
        newest, made = latest(run / "train"), run / "hf" / "lambert.json"
        trained = (newest / INDEX).stat().st_mtime_ns if newest else 0
        if made.is_file() and made.stat().st_mtime_ns < trained:  # it went on, or started anew
            self.forget(name)

    def rival(self, name: str, minutes: float, options: Sequence[str], card: str) -> None:
        """Trains the rival into work/NAME/hf, for the same time."""
        self.forget(name)
        self.command(
            f"{name}-train",
            *("-m", "bench.five_minute_rival", "--rows", str(self.work / "shards" / "dense")),
            *("--tokenizer", str(self.work / "vocab"), "--out", str(self.work / name / "hf")),
            *("--seconds", str(60 * minutes), *options, *self.rival_options),
            card=card,
        )

    def forget(self, name: str) -> None:
        """Removes what was made of a run's earlier weights: its HF folder, its fine-tuned scores."""
        for made in ("finetune", "hf"):
            shutil.rmtree(self.work / name / made, ignore_errors=True)

    def score(
        self, names: Sequence[str], out: str, card: str, blimp: Path, sample: float, rows: int
    ) -> dict[str, dict[str, float]]:
        """Held-out loss and BLiMP of every run; also left in work/OUT.json."""
        file = self.work / f"{out}.json"
        self.command(
            f"{out}-score",
            *("-m", "bench.five_minute_score", "--out", str(file), "--blimp", str(blimp)),
            *("--held-out", str(self.work / "shards" / "rows"), "--rows", str(rows)),
            *("--sample", str(sample), *(f"{name}={self.weights(name)}" for name in names)),
            card=card,
        )
        scores: dict[str, dict[str, float]] = json.loads(file.read_text(encoding="utf-8"))
        for name, score in scores.items():
            say(f"{name}: loss {score['mlm_loss']:.4f}, BLiMP {score.get('blimp', 0):.2f}")
        return scores

    def weights(self, name: str) -> Path:
        """The HF folder of a run, or the run itself before its export."""
        folder = self.work / name / "hf"
        return folder if folder.is_dir() else folder.parent

    def export(self, name: str) -> Path:
        """Makes work/NAME/hf of our run (the rival's is there), ready to fine-tune."""
        folder = self.work / name / "hf"
        if not folder.is_dir():
            self.command(
                f"{name}-export", "-m", "pretrain", "export", str(folder.parent), str(folder)
            )
        ready_to_finetune(folder)
        return folder

    def both(self, side: Callable[[str], None]) -> None:
        """side("ours") and side("rival"), at the same time if each has cards of its own.

        One's failure does not stop the other; the first is raised at the end.
        """
        errors: list[Exception] = []

        def guarded(name: str) -> None:
            try:
                side(name)
            except Exception as error:
                say(f"error: {error}")
                errors.append(error)

        with ThreadPoolExecutor(1 if self.shared else 2) as pool:
            list(pool.map(guarded, SIDES))
        if errors:
            raise errors[0]

    def train_all(self, side: str, runs: dict[str, list[str]], minutes: float) -> list[str]:
        """Trains the runs of a side, one on each of its cards at a time; names of those that
        finished (one that diverges is a result too, and is said)."""
        free: queue.Queue[str] = queue.Queue()
        for card in self.cards[side]:
            free.put(card)
        done: list[str] = []

        def one(name: str) -> None:
            card = free.get()
            try:
                getattr(self, side)(name, minutes, runs[name], card)
                done.append(name)
            except UserError as error:
                say(f"{name}: {error}")
            finally:
                free.put(card)

        with ThreadPoolExecutor(len(self.cards[side])) as pool:
            list(pool.map(one, runs))
        if not done:
            raise UserError(f"no run of {side} finished", f"see {self.work / 'logs'}")
        return sorted(done)


def run_all(
    place: Workplace,
    stage: str,
    runs: dict[str, dict[str, list[str]]],
    minutes: float,
    blimp: Path,
    sample: float,
    rows: int,
    then: Callable[[str, str], None] | None = None,
) -> None:
    """Trains and scores the runs of the sides that have any, into work/STAGE-SIDE.json; then(side,
    best run) goes on with a side while the other may still train."""

    def of_side(side: str) -> None:
        if side not in runs:
            return
        done = place.train_all(side, runs[side], minutes)
        scores = place.score(done, f"{stage}-{side}", place.cards[side][0], blimp, sample, rows)
        best = min(scores, key=lambda n: scores[n]["mlm_loss"])
        if then:
            then(side, best)

    place.both(of_side)


def ready_to_finetune(folder: Path) -> None:
    """Gives a model folder BERT's dropout of 0.1, whatever it was pretrained with: fine-tuning is
    then the same for all."""
    file = folder / "config.json"
    config = json.loads(file.read_text(encoding="utf-8"))
    config |= {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1}
    file.write_text(json.dumps(config, indent=2), encoding="utf-8")
