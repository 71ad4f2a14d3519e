"""`python -m cluster demo`: text to a Hugging Face BERT on two CPU cores, every step a real command.

The training starts with tensor parallelism 2 and is resumed, from the same checkpoint, as data
parallelism 2 with ZeRO-1. Each step is a command that a person can run alone; finished work is
kept, so after Ctrl-C the same command goes on.
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
import time
from pathlib import Path

from configs import Recipe, UserError, load_recipe, say
from configs.console import duration
from configs.log import LOG, read_log

FILL_MASK = """
import sys, warnings
warnings.filterwarnings("ignore")
from transformers import pipeline
from transformers.utils import logging
logging.set_verbosity_error()
logging.disable_progress_bar()
fill = pipeline("fill-mask", model=sys.argv[1])
for text in sys.argv[2:]:
    best = fill(text.replace("[MASK]", fill.tokenizer.mask_token), top_k=3)
    print("  " + text + "  ->  " + ", ".join(f"{b['token_str']} ({b['score']:.2f})" for b in best))
"""
SENTENCES = [
    "he went to the [MASK] and sat down .",
    "she looked at him with her [MASK] .",
    "it was one of the [MASK] of the world .",
    "the first [MASK] of the war was in 1914 .",
    "they did not [MASK] what to do .",
]


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m cluster demo",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument("recipe", nargs="?", default="demo", help="recipe (default: demo)")
    parser.add_argument(
        "overrides", nargs="*", default=[], metavar="key=value", help="e.g. phases.0.steps=60"
    )
    options = parser.parse_args(argv)
    if "=" in options.recipe:
        options.recipe, options.overrides = "demo", [options.recipe, *options.overrides]
    recipe = load_recipe(options.recipe, options.overrides)
    if not recipe.prep.held_out:
        raise UserError(
            "prep.held_out=0: the demo ends with scores of held-out rows", "set it above 0"
        )
    Demo(recipe, options.recipe, options.overrides).run()
    return 0


class Demo:
    def __init__(self, recipe: Recipe, name: str, overrides: list[str]) -> None:
        self.work = Path(recipe.work_dir)
        self.recipe, self.name, self.overrides = recipe, name, overrides
        self.start = time.monotonic()
        self.step = 0

    def run(self) -> None:
        work, steps = self.work, sum(phase.steps for phase in self.recipe.phases)
        text = self._text_folder()
        two = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        if text is not None:
            self.command("real text", ["-m", "data_prep", "sample", str(text)], text)
        self.command("vocabulary", ["-m", "data_prep", "vocab", *self.args()], work / "vocab")
        self.command("shards", ["-m", "data_prep", "build", *self.args()], work / "shards")
        self.command(
            "training, tensor parallel 2",
            [*two, "-m", "pretrain", "train", *self.args(), "parallel.tp=2", "parallel.zero_stage=0",
             f"train.stop_at={steps // 2}"],
            work / "train",
        )  # fmt: skip
        self.command(
            "training resumed by DeepSpeed, data parallel 2 with ZeRO-1",
            [*two, "-m", "pretrain", "train", *self.args(), "parallel.tp=1", "parallel.zero_stage=1",
             "parallel.engine=deepspeed"],
            work / "train",
        )  # fmt: skip
        self.command(
            "report", ["-m", "pretrain", "report", str(work)], work / "train" / "report.html"
        )
        self.command(
            "Hugging Face model",
            ["-m", "pretrain", "export", str(work), str(work / "hf")],
            work / "hf",
        )
        self.command("five masked words", ["-c", FILL_MASK, str(work / "hf"), *SENTENCES], None)
        self.summary()

    def args(self) -> list[str]:
        return [self.name, *self.overrides]

    def _text_folder(self) -> Path | None:
        """The folder `data_prep sample` fills: the one under work_dir that the sources name, if any."""
        text = self.work / "text"
        named = any(Path(source.path).is_relative_to(text) for source in self.recipe.sources)
        return text if named else None

    def command(self, title: str, arguments: list[str], made: Path | None) -> None:
        """Runs one step with the terminal passed on, so that its progress bars show."""
        self.step += 1
        shown = shlex.join(["python", *(a if a != FILL_MASK else "..." for a in arguments)])
        say(f"\n[{self.step}] {title}\n    {shown}")
        began = time.monotonic()
        environment = {
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            "TF_CPP_MIN_LOG_LEVEL": "3",
            **os.environ,
        }
        with subprocess.Popen([sys.executable, *arguments], env=environment) as process:
            try:
                code = process.wait()
            except KeyboardInterrupt:  # the terminal told the step as well: a training saves first
                process.wait()
                raise
        if code:
            raise UserError(
                f"step {self.step} ({title}) failed with exit code {code}",
                "its message is above; after mending it the same command goes on from here",
            )
        where = f"made {made}, " if made else ""
        say(f"    {where}{duration(time.monotonic() - began)}")

    def summary(self) -> None:
        first, last = self._evaluations()
        say(f"\nHeld-out rows                  before      after {last['step']} updates")
        for key, label in (
            ("mlm_loss", "MLM loss (nat)"),
            ("mlm_accuracy", "MLM accuracy"),
            ("nsp_accuracy", "NSP accuracy"),
        ):
            if key in last:  # without a next-sentence head there is none
                say(f"  {label:<28} {first[key]:>8.3f} {last[key]:>12.3f}")
        unigram = last["unigram_loss"]
        say(f"  {'unigram distribution (nat)':<28} {unigram:>8.3f}")
        say(f"  below the unigram loss by      {unigram - last['mlm_loss']:.2f} nat")
        say(
            f"\nLoss curve   {self.work / 'train' / 'loss.png'}   (tensorboard --logdir {self.work / 'train' / 'tensorboard'})"
        )
        say(f"Model        {self.work / 'hf'}   (AutoModelForPreTraining.from_pretrained)")
        say(f"Took         {duration(time.monotonic() - self.start)}")
        say(
            "\nThe next bigger thing, on one GPU: BERT-base on Wikipedia and books\n"
            "    python -m data_prep vocab bert-base && python -m data_prep build bert-base\n"
            "    python -m pretrain train bert-base\n"
            "and on a cluster: python -m cluster submit bert-large-64k --profile gpu-srun"
        )

    def _evaluations(self) -> tuple[dict[str, float], dict[str, float]]:
        """The first and the last held-out evaluation in the training log."""
        log = self.work / "train" / LOG
        found = [record for record in read_log(log) if record.get("kind") == "eval"]
        if not found:
            raise UserError(
                f"{log}: no held-out evaluation", "set prep.held_out above 0, in a new work_dir"
            )
        return found[0], found[-1]
