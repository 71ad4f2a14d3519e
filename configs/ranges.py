"""The bounds of a recipe's numbers, and the words some keys may have: a value outside is named before
anything is imported or made.

What depends on another key, on the shards or on the machine is checked by the room that reads it.
"""

from __future__ import annotations

import math
from dataclasses import fields, is_dataclass
from typing import Any

from configs.errors import UserError
from configs.objectives import OBJECTIVES

_ANY = float("inf")
_SHARE = (0.0, 1.0)

# Key as it is below its section -> (lowest, highest), both allowed. Lists and named sets: `*`.
BOUNDS: dict[str, tuple[float, float]] = {
    "seed": (0, 2**63 - 1),
    "sources.*.weight": (1e-9, 10**6),
    "sources.*.window_sentences": (2, _ANY),  # one makes no pair
    "vocab.size": (6, 10**7),  # five special tokens and one of the text
    "vocab.min_frequency": (1, 2**31 - 1),
    "vocab.sample_mb": (0, 10**9),
    "shards.*.max_length": (8, 65535),  # lengths are uint16 in a shard
    "shards.*.dupe_factor": (1, 10**6),
    "shards.*.short_seq_prob": _SHARE,
    "shards.*.single_prob": (0, 0.999),
    "shards.*.pair_max_length": (0, 65535),
    "shards.*.mask_cap": (0, _ANY),
    "prep.held_out": (0, 0.999),
    "prep.workers": (0, _ANY),
    "prep.part_mb": (1, 10**6),
    "model.hidden_dropout": (0, 0.999),
    "model.attention_dropout": (0, 0.999),
    "model.num_layers": (0, _ANY),
    "model.num_heads": (0, _ANY),
    "model.hidden_size": (0, _ANY),
    "model.intermediate_size": (0, _ANY),
    "model.vocab_size": (0, _ANY),
    "model.type_vocab_size": (1, _ANY),
    "model.layer_norm_eps": (0, 1),
    "model.initializer_range": (1e-9, 10),
    "model.vocab_pad_multiple": (1, 2**20),
    "masking.probability": (1e-9, 1),
    "masking.replace_mask": _SHARE,
    "masking.replace_random": _SHARE,
    "masking.span_max": (1, 65535),
    "masking.span_p": (1e-9, 0.999999),
    "parallel.tp": (1, _ANY),
    "parallel.micro_batch_tokens": (0, _ANY),
    "optimizer.beta1": (0, 0.999999),
    "optimizer.beta2": (0, 0.999999),
    "optimizer.eps": (1e-16, 1),  # with 0, an element without a gradient would become 0 / 0
    "optimizer.weight_decay": (0, _ANY),
    "optimizer.max_grad_norm": (0, _ANY),
    "optimizer.trust_ratio_min": (0, _ANY),
    "optimizer.trust_ratio_max": (0, _ANY),
    "optimizer.orthogonal_lr": (0, _ANY),
    "phases.*.global_batch": (1, 2**24),
    "phases.*.steps": (1, _ANY),
    "phases.*.until": (0, 0.999),
    "phases.*.mask_probability": (0, 0.999),
    "checkpoint.every": (0, _ANY),
    "checkpoint.keep": (1, _ANY),
    "guard.max_skipped_updates": (1, _ANY),
    "guard.initial_loss_scale": (2.0**-24, 2.0**127),
    "guard.min_loss_scale": (2.0**-24, 2.0**127),
    "guard.nan_patience": (1, _ANY),
    "guard.spike_factor": (1, _ANY),
    "guard.spike_patience": (0, _ANY),
    "guard.hang_timeout_s": (0, 10**8),
    "train.stop_at": (0, _ANY),
    "train.max_minutes": (0, _ANY),
    "train.nsp_weight": (1e-9, _ANY),  # without pairs: model.nsp_head=false
    "train.eval_every": (0, _ANY),
    "train.eval_rows": (0, _ANY),
    "train.probe_pairs": (0, _ANY),
    "train.log_every": (1, _ANY),
    "train.threads": (0, 4096),
}


# Keys below their section -> the words they may have, of those that are read after hours of queueing.
CHOICES: dict[str, tuple[str, ...]] = {
    "masking.kind": ("token", "whole-word", "span"),
    "optimizer.implementation": ("lambert", "deepspeed", "apex", "reference"),
    "parallel.engine": ("auto", "deepspeed", "lean"),
    "phases.*.schedule.kind": ("poly", "linear", "cosine", "constant"),
    "shards.*.objective": OBJECTIVES,
    "train.kernels": ("auto", "plain"),
    "train.precision": ("fp32", "bf16", "fp16", "fp8"),
}


def _text(bound: float) -> str:
    """A bound as it can be given: exactly, and a whole number without an exponent."""
    short = f"{bound:g}"
    return short if float(short) == bound and "e" not in short else str(bound)


def check_ranges(config: Any, key: str = "", pattern: str = "") -> None:
    """Walks a recipe; UserError names the first number outside its bounds or not finite, or the first
    word that is not known."""
    if is_dataclass(config):
        items = [(f.name, f.name, getattr(config, f.name)) for f in fields(config)]
    elif isinstance(config, list):
        items = [(str(i), "*", value) for i, value in enumerate(config)]
    elif isinstance(config, dict):
        items = [(name, "*", value) for name, value in config.items()]
    else:
        low, high = BOUNDS.get(pattern, (-_ANY, _ANY))
        odd = pattern in BOUNDS and config is not None and not low <= config <= high
        if odd or (isinstance(config, float) and not math.isfinite(config)):
            ends = (
                f" of {_text(low)} or more"
                if high == _ANY
                else f" from {_text(low)} to {_text(high)}"
            )
            ends = ends if pattern in BOUNDS else ""
            raise UserError(f"{key}={config} is out of range", f"give a finite number{ends}")
        words = CHOICES.get(pattern, (config,))
        if config not in words:
            raise UserError(f"{key}={config} is not known", f"known: {', '.join(words)}")
        return
    for name, general, value in items:
        dot = "." if key else ""
        check_ranges(value, f"{key}{dot}{name}", f"{pattern}{dot}{general}")
