"""Pretrained weights into a task model, with the proof that the encoder really came from them."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from configs import UserError, say
from configs.files import read_json
from pretrain.convert.hf import read_tensors, weight_files
from pretrain.convert.vocabulary import TOKENIZER_FILES

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

RANDOM = "random:"
_OF_TOKENIZERS = (*TOKENIZER_FILES, "vocab.json", "merges.txt", "added_tokens.json", "*.model")
# The classes whose encoder ends below the pooler.
_WITHOUT_POOLER = {"BertForMaskedLM", "BertForTokenClassification", "BertForQuestionAnswering"}
_FETCH = "run `hf download {} --local-dir FOLDER` where there is a network, copy it, name FOLDER"


def split_random(model: str) -> tuple[str, bool]:
    """`random:FOLDER` -> (FOLDER, True): its shape and tokenizer, but not its weights."""
    return (model.removeprefix(RANDOM), True) if model.startswith(RANDOM) else (model, False)


def load_tokenizer(model: str, max_length: int = 0) -> PreTrainedTokenizerFast:
    """The fast tokenizer of a model folder or hub name.

    Raises:
        UserError: absent or damaged, of another size than the model, or the model has fewer positions
            than the `max_length` tokens of a row.
    """
    from transformers import AutoConfig, AutoTokenizer

    name, _ = split_random(model)
    _check_small_files(Path(name))
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, use_fast=True)
        config = AutoConfig.from_pretrained(name)
    except Exception as error:  # of a damaged folder, a dozen kinds
        why = _why(error)
        raise UserError(f"{name}: no model with a tokenizer ({why})", _way_out(name, why)) from None
    if len(tokenizer) <= len(tokenizer.all_special_ids):  # transformers made one without any words
        raise UserError(
            f"{name}: no tokenizer beside the weights",
            "put the model's own tokenizer.json or vocab.txt there",
        )
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

    Only the task head may be new, as it is when the model's own is of another number of labels, and
    the pooler where there was none (pretraining without NSP, tagging, questions). The counts of
    loaded, new and unused tensors are printed. Weights are fp32 whatever the file has: most updates
    of a fine-tuning are smaller than a rounding of bf16.

    Args:
        model: folder or hub name; `random:FOLDER` gives fresh weights in that shape.
        settings: passed on to the config (num_labels, id2label, ...).

    Raises:
        UserError: nothing to load there, a damaged file, or an encoder weight that is missing or of
            another shape than config.json says.
    """
    import torch
    from transformers import AutoConfig

    name, random = split_random(model)
    _check_small_files(Path(name))
    settings["dtype"] = torch.float32
    if random:
        fresh: PreTrainedModel = auto_class.from_config(
            AutoConfig.from_pretrained(name, **settings)
        )
        say(f"{name}: shape only, all {len(fresh.state_dict())} tensors drawn at random")
        return fresh
    try:
        loaded, info = auto_class.from_pretrained(
            name, output_loading_info=True, ignore_mismatched_sizes=True, **settings
        )
    except Exception as error:  # of a damaged folder, a dozen kinds
        _check_weights(Path(name))
        why = _why(error)
        raise UserError(f"{name}: not loaded ({why})", _way_out(name, why)) from None
    encoder = f"{loaded.base_model_prefix}."
    if not hasattr(loaded, loaded.base_model_prefix):
        encoder = ""  # a bare encoder: all that it has
    shapes = {str(key): (list(file), list(own)) for key, file, own in info["mismatched_keys"]}
    if wrong := sorted(key for key in shapes if key.startswith(encoder)):
        file, own = shapes[wrong[0]]
        raise UserError(
            f"{name}: {len(wrong)} encoder weights are of another shape, first {wrong[0]}: {file} in"
            f" the file, {own} by config.json",
            "config.json and weights are of two models: copy or export the folder again",
        )
    missing = sorted(info["missing_keys"])
    lost = [key for key in missing if key.startswith(encoder) and "pooler." not in key]
    new_pooler = [key for key in missing if key.startswith(encoder) and "pooler." in key]
    if new_pooler and not _WITHOUT_POOLER.intersection(loaded.config.architectures or []):
        lost += new_pooler
    total, new = len(loaded.state_dict()), sorted({*missing, *shapes})
    say(
        f"{name}: {total - len(new)} of {total} tensors loaded, {len(new)} new"
        + (f" ({_first(new)})" if new else "")
        + f", {len(info['unexpected_keys'])} in the file not used by this task"
    )
    if shapes:
        say(f"{name}: its task head has other labels and is drawn anew: {_first(sorted(shapes))}")
    if lost:
        raise UserError(
            f"{name}: {len(lost)} encoder weights were not loaded, first {lost[0]}",
            f"names in the file must start with {loaded.base_model_prefix}. and fit its config; only"
            " the task head may be new",
        )
    return loaded


def _first(names: Sequence[str], most: int = 6) -> str:
    more = [f"... {len(names) - most} more"] if len(names) > most else []
    return ", ".join([*names[:most], *more])


def _check_small_files(folder: Path) -> None:
    """UserError that names the damaged one; transformers names none."""
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        if (folder / name).is_file():
            read_json(folder / name, "restore the file, or export the folder again")


def _check_weights(folder: Path) -> None:
    """UserError that names what is missing or damaged; transformers does not say which."""
    if folder.is_dir():
        for file in weight_files(folder)[0]:
            for _ in read_tensors(file):
                pass


def _why(error: Exception) -> str:
    """In a line; of a damaged file transformers may say no more than a key."""
    plain = isinstance(error, OSError | ValueError | RuntimeError) and str(error)
    return (plain or repr(error)).splitlines()[0]


def _way_out(name: str, why: str) -> str:
    """What to do about a model that was not loaded: a folder, a hub name without a network, or
    one that the hub does not know."""
    if Path(name).is_dir():
        return "an incomplete or damaged folder: copy or export it again, or name a run"
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
