"""One pair of a grid, a learning rate and a seed: trained with transformers' Trainer, scored, kept."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from configs import make_folder
from configs.files import publish_text
from pretrain.downstream.kinds import LABELLED, Feature, Kind, Row
from pretrain.downstream.loading import load_for_task
from pretrain.downstream.results import RESULT, Result
from pretrain.downstream.tasks import Settings

if TYPE_CHECKING:
    from transformers import Trainer

_ASIDE = ("word_starts", "offsets", "example")  # kept for scoring, not for the model


def train_one(
    kind: Kind,
    model: str,
    splits: dict[str, list[Row]],
    features: dict[str, list[Feature]],
    folder: Path,
    lr: float,
    seed: int,
    layers: str,
    what: str,
) -> tuple[Trainer, Result]:
    """Trains one pair of the grid and scores it on every split but train.

    Args:
        model: HF folder, hub name or `random:FOLDER`. layers: as `run_grid` takes them.
        features: what `kind.encode` made of `splits`.
        folder: gets predictions-SPLIT.jsonl.
        what: the pair, in the lines of progress.

    Returns:
        The trainer with the trained model; task, lr, seed, diverged (an answer is NaN), the metrics on
        dev (percent), those of other labelled splits as SPLIT_METRIC, and seconds.
    """
    import torch
    from transformers import PrinterCallback, Trainer, set_seed
    from transformers.utils import logging

    from pretrain.downstream.shown import Shown

    logging.set_verbosity_error()  # load_for_task says what was loaded, and stops if it must
    logging.disable_progress_bar()
    set_seed(seed)
    net = _build(kind, model, layers)
    given = {
        split: [{k: v for k, v in f.items() if k not in _ASIDE} for f in features[split]]
        for split in features
    }
    start, shown = time.monotonic(), Shown(what)
    trainer = Trainer(
        model=net,
        args=_arguments(kind.settings, folder, lr, seed, torch.cuda.is_available()),
        train_dataset=given["train"],
        data_collator=kind.collator(),
        processing_class=kind.tokenizer,
        callbacks=[shown],
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    result: dict[str, Any] = {"task": kind.task.name, "lr": lr, "seed": seed, "diverged": False}
    make_folder(folder, "name another --out")
    for split in ["dev", *(s for s in given if s not in LABELLED)]:
        # Labels stay at home: logits are scored here, with rows and windows put together again.
        blind = [
            {**{k: v for k, v in f.items() if k != "labels"}, **kind.blind} for f in given[split]
        ]
        shown.begin(-(-len(blind) // trainer.args.eval_batch_size), f"score {split}", "batches")
        output = trainer.predict(blind)  # type: ignore[arg-type]
        parts = (
            output.predictions if isinstance(output.predictions, tuple) else [output.predictions]
        )
        result["diverged"] |= not all(np.isfinite(part).all() for part in parts)
        scores, predictions = kind.score(splits[split], features[split], output.predictions, split)
        result |= scores if split == "dev" else {f"{split}_{k}": v for k, v in scores.items()}
        _write_lines(folder / f"predictions-{split}.jsonl", predictions)
    shown.close()
    result["seconds"] = round(time.monotonic() - start, 2)
    shutil.rmtree(folder / "trainer", ignore_errors=True)
    return trainer, result


def _build(kind: Kind, model: str, layers: str) -> Any:
    if not layers:
        rates = ("hidden_dropout_prob", "attention_probs_dropout_prob")
        dropout = kind.settings.dropout
        changed = {} if dropout is None else dict.fromkeys(rates, dropout)
        return load_for_task(kind.auto_class(), model, **kind.model_settings(), **changed)
    from transformers import AutoModel

    from pretrain.downstream.features import FrozenTagger

    return FrozenTagger(load_for_task(AutoModel, model), layers, len(kind.labels))


def _arguments(settings: Settings, folder: Path, lr: float, seed: int, gpu: bool) -> Any:
    import torch
    from transformers import TrainingArguments

    arguments = TrainingArguments(
        output_dir=str(folder / "trainer"),
        learning_rate=lr,
        seed=seed,
        num_train_epochs=settings.epochs,
        per_device_train_batch_size=settings.batch,
        per_device_eval_batch_size=128,
        warmup_steps=settings.warmup,  # a float below 1 is a share of the steps
        weight_decay=settings.weight_decay,
        lr_scheduler_type="linear",
        bf16=gpu and torch.cuda.is_bf16_supported(),
        use_cpu=not gpu,
        save_strategy="no",
        eval_strategy="no",
        logging_steps=50,
        report_to="none",
        disable_tqdm=True,  # `Shown` has bars of its own
        remove_unused_columns=False,
        dataloader_pin_memory=gpu,
    )
    if arguments.n_gpu > 1:  # each would get a batch of its own: another batch than was asked for
        arguments._n_gpu = 1
    return arguments


def save_model(trainer: Trainer, kind: Kind, result: Result, folder: Path) -> None:
    """What was trained, with its tokenizer and `result` (RESULT), in the place of `folder`."""
    fresh = folder.with_name(f".{folder.name}.new")
    shutil.rmtree(fresh, ignore_errors=True)
    model: Any = trainer.model
    if hasattr(model, "save_pretrained"):
        model.save_pretrained(fresh)
    else:  # a tagger on a frozen encoder: what was trained, without the encoder
        from safetensors.torch import save_file

        fresh.mkdir(parents=True)
        state = {
            k: v.contiguous() for k, v in model.state_dict().items() if not k.startswith("encoder.")
        }
        about = {"format": "pt", "labels": json.dumps(kind.labels), "layers": model.layers}
        save_file(state, fresh / "tagger.safetensors", metadata=about)
    kind.tokenizer.save_pretrained(str(fresh))
    publish_text(fresh / RESULT, json.dumps(result, indent=2))
    shutil.rmtree(folder, ignore_errors=True)
    fresh.rename(folder)


def _write_lines(file: Path, values: list[Any]) -> None:
    with file.open("w", encoding="utf-8") as handle:
        handle.writelines(json.dumps(value, ensure_ascii=False) + "\n" for value in values)
