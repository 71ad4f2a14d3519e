"""The rival of the five-minute BERT: transformers' Trainer as run_mlm.py uses it, tuned for speed.

    python -m bench.five_minute_rival --rows runs/five-minute/shards/dense \
        --tokenizer runs/five-minute/vocab --out runs/five-minute/rival --seconds 300

bf16 autocast, torch.compile, fused AdamW, SDPA attention without a mask (every block is full),
loader processes, no host synchronisation beyond a log line every 50 updates. The learning rate
follows the clock, as ours does: linear warmup, then linear to 0 when the time is up.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

import numpy as np

from configs.cli import run_cli
from configs.cpus import usable_cpus
from data_prep.shards import open_shards

FREE_UPDATES = 10  # the clock starts after so many: they compile (pretrain.optim.budget agrees)


class Clock:
    """Seconds since `start`; before it `share` is 0."""

    def __init__(self, seconds: float, warmup: float) -> None:
        self.seconds, self.warmup, self.began = seconds, warmup, 0.0

    def start(self) -> None:
        self.began = time.perf_counter()

    @property
    def elapsed(self) -> float:
        return time.perf_counter() - self.began if self.began else 0.0

    def factor(self, update: int) -> float:
        """Of the learning rate. The free updates climb the first steps of the warmup."""
        if not self.began:
            return 1e-2 * (update + 1) / FREE_UPDATES
        share = min(1.0, self.elapsed / self.seconds)
        if share < self.warmup:
            return max(1e-2, share / self.warmup)
        return (1 - share) / (1 - self.warmup)


def blocks(folder: Path) -> np.ndarray:
    """uint16 [n, max_length]: full rows as they are; shorter ones joined and cut, as run_mlm does."""
    shards = open_shards(folder)
    length = shards.max_length
    full = np.flatnonzero(shards.lengths == length)
    short = np.flatnonzero(shards.lengths < length)
    joined = shards.rows(short).tokens
    joined = joined[: len(joined) // length * length]
    whole = shards.rows(full).tokens
    return np.concatenate((whole, joined)).astype(np.uint16).reshape(-1, length)


def train(options: argparse.Namespace) -> dict[str, Any]:
    """Trains until the time is up, writes a BertForMaskedLM folder; returns what rival.json holds."""
    import torch
    from transformers import (
        AutoTokenizer,
        DataCollatorForLanguageModeling,
        Trainer,
        TrainerCallback,
        set_seed,
    )

    set_seed(options.seed)
    gpu = torch.cuda.is_available()
    torch.set_float32_matmul_precision("high")
    tokenizer = AutoTokenizer.from_pretrained(options.tokenizer)
    rows = blocks(Path(options.rows))
    special = np.isin(rows, [tokenizer.cls_token_id, tokenizer.sep_token_id])
    model = _model(options, tokenizer, rows.shape[1])
    clock = Clock(options.seconds, options.warmup)

    class Blocks(torch.utils.data.Dataset):
        def __len__(self) -> int:
            return len(rows)

        def __getitem__(self, i: int) -> dict[str, Any]:
            ids = torch.from_numpy(rows[i].astype(np.int64))
            return {"input_ids": ids, "special_tokens_mask": torch.from_numpy(special[i])}

    masking = DataCollatorForLanguageModeling(tokenizer, mlm_probability=options.masking)

    def collate(batch: list[dict[str, Any]]) -> dict[str, Any]:
        """The collator's own masking on stacked blocks: what it does after padding, no padding."""
        ids = torch.stack([item["input_ids"] for item in batch])
        marks = torch.stack([item["special_tokens_mask"] for item in batch])
        ids, labels = masking.torch_mask_tokens(ids, special_tokens_mask=marks)
        return {"input_ids": ids, "labels": labels}

    class Timed(TrainerCallback):
        began = time.perf_counter()
        compile_s = 0.0
        steps = 0

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            self.steps = state.global_step
            if state.global_step == FREE_UPDATES:
                if gpu:
                    torch.cuda.synchronize()
                self.compile_s = time.perf_counter() - self.began
                clock.start()
            if clock.began and clock.elapsed >= options.seconds:
                control.should_training_stop = True

    class ByTheClock(Trainer):
        def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
            chosen: Any = optimizer or self.optimizer
            self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(chosen, clock.factor)
            return self.lr_scheduler

    timed = Timed()
    trainer = ByTheClock(
        model=model,
        args=_arguments(options, gpu),
        train_dataset=Blocks(),
        data_collator=collate,
        callbacks=[timed],
    )
    trainer.train()
    if gpu:
        torch.cuda.synchronize()
    seconds = clock.elapsed
    model.save_pretrained(options.out)
    tokenizer.save_pretrained(options.out)
    timed_steps = timed.steps - FREE_UPDATES
    return {
        "options": {
            k: v for k, v in vars(options).items() if k not in ("rows", "tokenizer", "out")
        },
        "parameters": sum(p.numel() for p in model.parameters()),
        "updates": timed.steps,
        "seconds": seconds,
        "compile_seconds": timed.compile_s,
        "tokens_per_s": timed_steps * options.batch * rows.shape[1] / seconds,
        "epochs": timed.steps * options.batch / len(rows),
        "losses": [(e["step"], e["loss"]) for e in trainer.state.log_history if "loss" in e],
        "device": torch.cuda.get_device_name() if gpu else "cpu",
    }


def _model(options: argparse.Namespace, tokenizer: Any, length: int) -> Any:
    from transformers import BertConfig, BertForMaskedLM

    hidden, layers = (int(n) for n in options.shape.split("x"))
    return BertForMaskedLM(
        BertConfig(
            vocab_size=len(tokenizer),
            hidden_size=hidden,
            num_hidden_layers=layers,
            num_attention_heads=max(1, hidden // 64),
            intermediate_size=4 * hidden,
            max_position_embeddings=length,
            hidden_dropout_prob=options.dropout,
            attention_probs_dropout_prob=options.dropout,
            pad_token_id=tokenizer.pad_token_id,
        )
    )


def _arguments(options: argparse.Namespace, gpu: bool) -> Any:
    from transformers import TrainingArguments

    return TrainingArguments(
        output_dir=str(Path(options.out) / "trainer"),
        per_device_train_batch_size=options.batch,
        num_train_epochs=10_000,
        learning_rate=options.lr,
        weight_decay=options.weight_decay,
        adam_beta2=options.beta2,
        optim="adamw_torch_fused" if gpu else "adamw_torch",
        bf16=gpu,
        use_cpu=not gpu,
        torch_compile=gpu,
        dataloader_num_workers=options.workers,
        dataloader_persistent_workers=options.workers > 0,
        dataloader_prefetch_factor=8 if options.workers else None,
        dataloader_pin_memory=gpu,
        dataloader_drop_last=True,
        remove_unused_columns=False,
        logging_steps=50,
        logging_nan_inf_filter=False,  # a synchronisation every update
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        seed=options.seed,
    )


def parser() -> argparse.ArgumentParser:
    """The knobs of a try; defaults are where tuning started from."""
    out = argparse.ArgumentParser(prog="python -m bench.five_minute_rival", description=__doc__)
    add = out.add_argument
    add("--rows", required=True, help="shard folder of full blocks")
    add("--tokenizer", required=True)
    add("--out", required=True)
    add("--seconds", type=float, default=300.0)
    add("--shape", default="512x8", help="hidden size x layers")
    add("--batch", type=int, default=256)
    add("--lr", type=float, default=1e-3)
    add("--warmup", type=float, default=0.06, help="share of the time")
    add("--weight-decay", type=float, default=0.01)
    add("--beta2", type=float, default=0.98)
    add("--dropout", type=float, default=0.1)
    add("--masking", type=float, default=0.15)
    add("--workers", type=int, default=min(8, usable_cpus()))
    add("--seed", type=int, default=1)
    return out


def main() -> None:
    options = parser().parse_args()
    Path(options.out).mkdir(parents=True, exist_ok=True)
    result = train(options)
    (Path(options.out) / "rival.json").write_text(json.dumps(result, indent=1), encoding="utf-8")
    print(f"rival: {result['updates']} updates, {result['tokens_per_s']:.0f} tokens/s", flush=True)
    os._exit(0)  # an ordinary end waits up to five seconds for each loader process


if __name__ == "__main__":
    run_cli(main)
