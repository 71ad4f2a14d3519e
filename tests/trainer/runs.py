"""A small recipe on synthetic shards, and the train command on it in processes of its own."""

from __future__ import annotations

import os
import signal
import time
from multiprocessing.process import BaseProcess
from pathlib import Path

from cluster.environment import free_port
from configs.loading import load_recipe
from configs.log import read_log
from pretrain import checks
from tests import forked
from tests.synthetic import make_shards
from tests.trainer import sabotage

RECIPE = """
name: small
seed: 5
shards: {len32: {max_length: 32}, len48: {max_length: 48}}
model: {preset: bert-tiny, hidden_size: 32, num_heads: 4, max_position_embeddings: 48, vocab_pad_multiple: 16}
parallel: {micro_batch_tokens: 256, tp: 1, zero_stage: 1}
phases:
  - {name: one, shards: len32, global_batch: 24, steps: 24, schedule: {kind: poly, lr: 0.01, warmup: 0.25, power: 0.5}}
  - {name: two, shards: len48, global_batch: 16, steps: 12, schedule: {kind: linear, lr: 0.004, warmup: 2}}
train: {precision: fp32, eval_rows: 32, threads: 1}
checkpoint: {every: 5, keep: 3}
guard: {hang_timeout_s: 30}
"""
UPDATES = 36


def make_run(folder: Path, vocab: int = 203) -> Path:
    """A work_dir with shards, a stand-in for the vocabulary, and recipe.yaml; returns it."""
    make_shards(folder / "shards" / "len32", rows=150, max_length=32, vocab_size=vocab)
    make_shards(folder / "shards" / "len48", rows=90, max_length=48, vocab_size=vocab, seed=1)
    (folder / "vocab").mkdir()
    (folder / "vocab" / "tokenizer.json").write_text("{}")
    (folder / "recipe.yaml").write_text(RECIPE + f"work_dir: {folder}\n")
    return folder


def fresh(base: Path, folder: Path) -> Path:
    """Another work_dir over the same shards, without a training."""
    folder.mkdir()
    for name in ("shards", "vocab"):
        (folder / name).symlink_to(base / name)
    text = (base / "recipe.yaml").read_text()
    (folder / "recipe.yaml").write_text(
        text.replace(f"work_dir: {base}\n", f"work_dir: {folder}\n")
    )
    return folder


def spell(folder: Path) -> None:
    """A tokenizer that knows a few words and spells the others."""
    from tokenizers import BertWordPieceTokenizer
    from transformers import PreTrainedTokenizerFast

    words = [
        "[PAD]",
        "[UNK]",
        "[CLS]",
        "[SEP]",
        "[MASK]",
        *(f"##{c}" for c in "abcdefghijklmnopqrstuvwxyz"),
    ]
    words += list("abcdefghijklmnopqrstuvwxyz'.,") + ["the", "a", "who", "is", "was"]
    wordpiece = BertWordPieceTokenizer({w: i for i, w in enumerate(words)})
    marks = {f"{k}_token": f"[{k.upper()}]" for k in ("pad", "unk", "cls", "sep", "mask")}
    PreTrainedTokenizerFast(tokenizer_object=wordpiece._tokenizer, **marks).save_pretrained(folder)


def start(run: Path, *overrides: str, size: int = 1, accident: str = "none:0") -> list[BaseProcess]:
    """The ranks of a training, each with its output in run/rank-N.out."""
    port = str(free_port())
    out = []
    for rank in range(size):
        env = {}
        if size > 1:
            env |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size)}
            env |= {"LOCAL_WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        arguments = (accident, [str(run / "recipe.yaml"), *overrides])
        out.append(forked.start(sabotage.train, *arguments, log=run / f"rank-{rank}.out", **env))
    return out


def train(run: Path, *overrides: str, size: int = 1, accident: str = "none:0") -> list[int | None]:
    return forked.finish(start(run, *overrides, size=size, accident=accident))


def output(run: Path, rank: int = 0) -> str:
    return (run / f"rank-{rank}.out").read_text()


def losses(run: Path, key: str = "loss") -> dict[int, float]:
    """step -> value of the train log."""
    return {
        r["step"]: r[key] for r in read_log(run / "train" / "log.jsonl") if r["kind"] == "train"
    }


def evaluations(run: Path) -> dict[int, float]:
    records = read_log(run / "train" / "log.jsonl")
    return {r["step"]: r["mlm_loss"] for r in records if r["kind"] == "eval"}


def wait_for_step(run: Path, step: int, timeout: float = 300) -> None:
    """Until the log shows this update."""
    log = run / "train" / "log.jsonl"
    end = time.monotonic() + timeout
    while time.monotonic() < end:
        if log.is_file() and f'"step": {step},' in log.read_text():
            return
        time.sleep(0.02)
    raise AssertionError(f"update {step} was not reached:\n{output(run)}")


def interrupt(processes: list[BaseProcess], number: int = signal.SIGTERM) -> None:
    for p in processes:
        os.kill(p.pid, number)


def plan(run: Path, *overrides: str, world: int = 1) -> checks.Plan:
    """What the checks make of a run in one of `world` processes."""
    env = {"RANK": "0", "WORLD_SIZE": str(world), "LOCAL_RANK": "0"}
    return checks.check(load_recipe(run / "recipe.yaml", overrides), env)
