"""Runs of the five-minute BERT and of its rival: what was tried, and how one run is started.

Every run is a process of its own with one card. Each side takes its cards from a list of its own,
so that both train at the same time where there are cards enough.
"""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from configs import UserError, say

RECIPE = "five-minute"
REPO = Path(__file__).resolve().parent.parent
SIDES = ("ours", "rival")

_BF16 = "train.precision=bf16"  # all runs of ours before the recipe took fp8
# The short tries, with their whole schedule each (bench/RESULTS.md says what came of
# them). They were made before the recipe had its shape, rows and start; `base` and `small` set
# what they had.
_THEN = [
    _BF16,
    "model.nsp_head=false",
    "train.unigram_bias=false",
    "train.sinusoidal_positions=false",
    "phases.0.shards=rows",
    "phases.0.global_batch=256",
    "optimizer.weight_decay=0.1",
    "optimizer.eps=1e-6",
]
_SMALL = [*_THEN, "model.preset=bert-medium", "model.num_layers=12"]
_BASE = [*_THEN, "model.preset=bert-base", "model.num_layers=12"]
TRIES: dict[str, dict[str, list[str]]] = {
    "ours": {
        "base-lr-5e-3": [*_BASE, "phases.0.schedule.lr=0.005"],
        "base-lr-1e-2": [*_BASE, "phases.0.schedule.lr=0.01"],
        "small-lr-1e-2": [*_SMALL, "phases.0.schedule.lr=0.01"],
        "small-lr-2e-2": [*_SMALL, "phases.0.schedule.lr=0.02"],
    },
    "rival": {
        "base-lr-5e-4": ["--shape=768x12", "--lr=5e-4", "--batch=256"],
        "base-lr-5e-4-batch-128": ["--shape=768x12", "--lr=5e-4", "--batch=128", "--dropout=0"],
        "small-lr-1e-3": ["--shape=512x12", "--lr=1e-3", "--batch=256", "--dropout=0"],
        "small-lr-1e-3-batch-128": ["--shape=512x12", "--lr=1e-3", "--batch=128", "--dropout=0"],
    },
}
# Later tries, of one minute to five (bench/RESULTS.md says which): what pairs cost, other rows,
# other shapes and rates of the rival. long: nearly full rows after the first 5,000 updates.
_SCHEDULE = "schedule: {kind: linear, lr: 4.0e-3, warmup: 0.06}"
_LONG = [
    "shards.long={max_length: 128, objective: nsp, single_prob: 0.75, short_seq_prob: 0.1, "
    "mask_cap: 64, dupe_factor: 4}",
    f"phases=[{{name: short, shards: mixed, global_batch: 384, steps: 5000, {_SCHEDULE}}}, "
    f"{{name: long, shards: long, global_batch: 256, steps: 20000, {_SCHEDULE}}}]",
]
_DROPOUT = ["model.hidden_dropout=0.1", "model.attention_dropout=0.1"]
_UNADAPTED = "optimizer.adapt_bias_and_norm=false"
TRIES_LATER: dict[str, dict[str, list[str]]] = {
    "ours": {
        "pairs-only": [_BF16, "shards.mixed.single_prob=0"],
        "single-only": [
            _BF16,
            "shards.mixed.objective=doc-sentences",
            "shards.mixed.single_prob=0",
            "model.nsp_head=false",
        ],
        "long-dropout": [_BF16, *_LONG, *_DROPOUT],
        "long-mask-0.3": [_BF16, *_LONG, "masking.probability=0.3"],
    },
    "rival": {
        "512x8-lr-5e-4": ["--shape=512x8", "--lr=5e-4", "--batch=256", "--dropout=0"],
        "768x6-lr-3e-4": ["--shape=768x6", "--lr=3e-4", "--batch=256", "--dropout=0"],
        "512x8-lr-7e-4": ["--shape=512x8", "--lr=7e-4", "--batch=128", "--dropout=0"],
        "512x6-lr-5e-4": ["--shape=512x6", "--lr=5e-4", "--batch=256", "--dropout=0"],
        "512x6-lr-7e-4": ["--shape=512x6", "--lr=7e-4", "--batch=256", "--dropout=0"],
        "512x6-lr-1.4e-3": ["--shape=512x6", "--lr=1.4e-3", "--batch=256", "--dropout=0"],
        "512x5-lr-7e-4": ["--shape=512x5", "--lr=7e-4", "--batch=256", "--dropout=0"],
    },
}
_CROPS = "shards.mixed.dupe_factor=16"
_FEWER_PAIRS = ["shards.mixed.single_prob=0.88", "shards.mixed.short_seq_prob=0.75"]


def _shape(hidden_size: int, num_layers: int) -> list[str]:
    return [
        f"model.hidden_size={hidden_size}",
        f"model.num_layers={num_layers}",
        f"model.num_heads={hidden_size // 64}",
        f"model.intermediate_size={4 * hidden_size}",
    ]


def _falling_masks(steps: int) -> str:
    """Masks of 0.3 for `steps` updates, then of 0.15 (2305.15096 lets the rate fall)."""
    rest = f"shards: mixed, global_batch: 384, {_SCHEDULE}"
    return (
        f"phases=[{{name: more, mask_probability: 0.3, steps: {steps}, {rest}}}, "
        f"{{name: fewer, mask_probability: 0.15, steps: 30000, {rest}}}]"
    )


# Changes of the recipe as it was in bf16, one each, in the whole time; then, all in fp8, two rates in
# 160 s, and changes that were added up, in 160 s or the whole time (bench/RESULTS.md says which).
# None was taken over but fp8, for its speed.
ABLATIONS: dict[str, list[str]] = {
    "bf16": [_BF16],
    "bf16-dropout": [_BF16, *_DROPOUT],
    "bf16-decay-0.3": [_BF16, "optimizer.weight_decay=0.3"],
    "bf16-lr-2.5e-3": [_BF16, "phases.0.schedule.lr=2.5e-3"],
    "bf16-unadapted-lr-3e-3": [_BF16, _UNADAPTED, "phases.0.schedule.lr=3e-3"],
    "bf16-unadapted-lr-6e-3": [_BF16, _UNADAPTED, "phases.0.schedule.lr=6e-3"],
    "bf16-unadapted-lr-1e-2": [_BF16, _UNADAPTED, "phases.0.schedule.lr=1e-2"],
    "lr-5.5e-3": ["phases.0.schedule.lr=5.5e-3"],
    "lr-7.5e-3": ["phases.0.schedule.lr=7.5e-3"],
    "crops-16": [_CROPS],
    "1024x4": [_CROPS, *_shape(1024, 4)],
    "1280x4": [_CROPS, *_shape(1280, 4)],
    "1024x4-falling-masks": [_CROPS, *_shape(1024, 4), _falling_masks(7000)],
    "1024x4-fewer-pairs-160s": [_CROPS, *_shape(1024, 4), _falling_masks(7000), *_FEWER_PAIRS],
    "1024x4-fewer-pairs": [_CROPS, *_shape(1024, 4), _falling_masks(15500), *_FEWER_PAIRS],
}
# The runs of the full time: the recipe, and the rival's settings with the best held-out loss and BLiMP.
FINALS: dict[str, dict[str, list[str]]] = {
    "ours": {"ours-768x6": []},
    "rival": {
        "rival-512x6": ["--shape=512x6", "--lr=1e-3", "--batch=256", "--dropout=0"],
    },
}


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
        """Trains the recipe through the real trainer, in work/NAME."""
        run = self.work / name
        run.mkdir(parents=True, exist_ok=True)
        for shared in ("vocab", "shards"):
            if not (run / shared).exists():
                (run / shared).symlink_to(self.work / shared)
        settings = [*options, *self.overrides, f"work_dir={run}", f"train.max_minutes={minutes}"]
        train = ["-m", "pretrain", "train", RECIPE, *settings]
        self.command(f"{name}-train", *train, card=card)

    def rival(self, name: str, minutes: float, options: Sequence[str], card: str) -> None:
        """Trains the rival into work/NAME/hf, for the same time."""
        self.command(
            f"{name}-train",
            *("-m", "bench.five_minute_rival", "--rows", str(self.work / "shards" / "dense")),
            *("--tokenizer", str(self.work / "vocab"), "--out", str(self.work / name / "hf")),
            *("--seconds", str(60 * minutes), *options, *self.rival_options),
            card=card,
        )

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
    """Trains and scores the runs of both sides, into work/STAGE-SIDE.json; then(side, best run) goes
    on with a side while the other may still train."""

    def of_side(side: str) -> None:
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
