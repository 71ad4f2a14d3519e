"""Pretrained weights into a task model, with the proof that the encoder really came from them."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from configs import UserError, say
from pretrain.convert.vocabulary import TOKENIZER_FILES

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

RANDOM = "random:"
_OF_TOKENIZERS = (*TOKENIZER_FILES, "vocab.json", "merges.txt", "added_tokens.json", "*.model")
# What transformers raises for a folder that is incomplete or damaged.
_REFUSALS = (OSError, ValueError, RuntimeError, KeyError, TypeError, AttributeError)
_FETCH = "run `hf download {} --local-dir FOLDER` where there is a network, copy it, name FOLDER"


def split_random(model: str) -> tuple[str, bool]:
    """`random:FOLDER` -> (FOLDER, True): its shape and tokenizer, but not its weights."""
    return (model.removeprefix(RANDOM), True) if model.startswith(RANDOM) else (model, False)


def load_tokenizer(model: str, max_length: int = 0) -> PreTrainedTokenizerFast:
    """The fast tokenizer of a model folder or hub name.

    Raises:
        UserError: absent, of another size than the model, or the model has fewer positions than
            the `max_length` tokens of a row.
    """
    from transformers import AutoConfig, AutoTokenizer

    name, _ = split_random(model)
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, use_fast=True)
        config = AutoConfig.from_pretrained(name)
    except _REFUSALS as error:
        why = _why(error)
        raise UserError(f"{name}: no model with a tokenizer ({why})", _way_out(name, why)) from None
    if len(tokenizer) > config.vocab_size:
        raise UserError(
            f"{name}: the tokenizer has {len(tokenizer)} entries, the model {config.vocab_size}",
            "tokenizer and weights are of different models",
        )
    positions = getattr(config, "max_position_embeddings", 0) or max_length
    if max_length > positions:
        raise UserError(
            f"{name}: has {positions} positions, the task's rows up to {max_length} tokens",
            f"pass --max-length {positions}",
        )
    return cast("PreTrainedTokenizerFast", tokenizer)


def load_for_task(auto_class: Any, model: str, **settings: Any) -> PreTrainedModel:
    """`auto_class.from_pretrained(model)` that stops when an encoder weight was not loaded (B53).

    Only the task head may be new, and the pooler where the pretraining had none (no NSP). The
    counts of loaded, new and unused tensors are printed. Weights are fp32 whatever the file has:
    most updates of a fine-tuning are smaller than a rounding of bf16.

    Args:
        model: folder or hub name; `random:FOLDER` gives fresh weights in that shape.
        settings: passed on to the config (num_labels, id2label, ...).

    Raises:
        UserError: nothing to load there, or an encoder weight is missing or of another shape.
    """
    import torch
    from transformers import AutoConfig

    name, random = split_random(model)
    settings["dtype"] = torch.float32
    if random:
        fresh: PreTrainedModel = auto_class.from_config(
            AutoConfig.from_pretrained(name, **settings)
        )
        say(f"{name}: shape only, all {len(fresh.state_dict())} tensors drawn at random")
        return fresh
    try:
        loaded, info = auto_class.from_pretrained(name, output_loading_info=True, **settings)
    except _REFUSALS as error:
        why = _why(error)
        raise UserError(f"{name}: not loaded ({why})", _way_out(name, why)) from None
    encoder = f"{loaded.base_model_prefix}."
    if not hasattr(loaded, loaded.base_model_prefix):
        encoder = ""  # a bare encoder: all that it has
    missing = sorted(info["missing_keys"])
    mismatched = [str(entry[0]) for entry in info["mismatched_keys"]]
    lost = [key for key in missing if key.startswith(encoder) and "pooler." not in key]
    new_pooler = [key for key in missing if key.startswith(encoder) and "pooler." in key]
    if new_pooler and "BertForMaskedLM" not in (loaded.config.architectures or []):
        lost += new_pooler
    wrong = [key for key in mismatched if key.startswith(encoder)]
    total = len(loaded.state_dict())
    say(
        f"{name}: {total - len(missing)} of {total} tensors loaded, {len(missing)} new"
        + (f" ({', '.join(missing)})" if missing else "")
        + f", {len(info['unexpected_keys'])} in the file not used by this task"
    )
    if lost or wrong:
        raise UserError(
            f"{name}: {len(lost) + len(wrong)} encoder weights were not loaded, first {(lost + wrong)[0]}",
            f"names in the file must start with {loaded.base_model_prefix}. and fit its config; only"
            " the task head may be new",
        )
    return loaded


def _why(error: Exception) -> str:
    """In a line; of a damaged file transformers may say no more than a key."""
    plain = isinstance(error, OSError | ValueError | RuntimeError) and str(error)
    return (plain or repr(error)).splitlines()[0]


def _way_out(name: str, why: str) -> str:
    """What to do about a model that was not loaded: a folder, a hub name without a network, or
    one that the hub does not know."""
    if Path(name).is_dir():
        return "an incomplete folder: export it again, or name a run"
    if "connect" not in why.lower():
        return "the hub's names are owner/name; a private model needs `hf auth login`"
    from huggingface_hub.constants import HF_HUB_OFFLINE

    if HF_HUB_OFFLINE:
        return f"HF_HUB_OFFLINE is set and the cache lacks it: unset it, or {_FETCH.format(name)}"
    return f"no network: {_FETCH.format(name)}"


def weights_digest(model: str) -> str:
    """SHA-256 over the weight files of a folder, so that results name the weights they came from."""
    name, random = split_random(model)
    return _digest(name, ("*.safetensors", "*.bin", "config.json"), RANDOM if random else "")


def tokenizer_digest(model: str) -> str:
    """SHA-256 over the files that a folder's tokenizer is read from: other pieces or casing of the
    same text give other scores to the same weights."""
    return _digest(split_random(model)[0], _OF_TOKENIZERS)


def _digest(name: str, patterns: Sequence[str], start: str = "") -> str:
    """Of a folder's files, or of a hub name as such."""
    digest = hashlib.sha256(start.encode())
    folder = Path(name)
    if not folder.is_dir():
        digest.update(name.encode())
    for file in sorted({file for pattern in patterns for file in folder.glob(pattern)}):
        with file.open("rb") as handle:
            digest.update(hashlib.file_digest(handle, "sha256").digest())
    return digest.hexdigest()[:16]
