"""Checkpoints of NVIDIA DeepLearningExamples (converted) and of Megatron (refused, with the reason).

DeepLearningExamples/PyTorch/LanguageModeling/BERT is post-LN BERT with erf GELU: only names
differ, and its vocabulary is padded to a multiple of 8. Megatron-LM's and megatron-core's BERT is
pre-LN: LayerNorm sits before each block and a final one after the last, so that no renaming makes
it a BERT. Its fused query-key-value rows moreover lie in three different orders by version.
"""

from __future__ import annotations

import pickletools
import re
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from configs import UserError
from pretrain.convert.hf import config_from_hf, hf_json, load_weights_only, normalise, state_dict
from pretrain.convert.source import MLM_BIAS, WORDS, SourceModel, finish

if TYPE_CHECKING:
    import torch

_MEGATRON_WORDS = ("query_key_value", "language_model", "linear_qkv", "lm_head.dense")
_MEGATRON_FILES = (
    "latest_checkpointed_iteration.txt",
    "mp_rank_*",
    "iter_*",
    "*.distcp",
    "common.pt",
)


def refuse_megatron(path: Path, seen: str) -> UserError:
    """The refusal for a Megatron layout; `seen` is the name that gave it away."""
    return UserError(
        f"{path}: a Megatron checkpoint ({seen})",
        "Megatron's BERT is pre-LN and computes another function than BERT with the same weights;"
        " use it through transformers' MegatronBertModel, or train again here",
    )


def megatron_folder(folder: Path) -> str | None:
    """The file or folder name by which `folder` is seen to be a Megatron checkpoint."""
    for pattern in _MEGATRON_FILES:
        for found in folder.glob(pattern):
            return found.name
    return None


def read_nvidia(file: Path, true_vocab: int) -> SourceModel:
    """A DeepLearningExamples checkpoint (`ckpt_8601.pt`), bert_config.json beside it.

    Args:
        true_vocab: entries of the tokenizer; rows beyond it are padding and are cut.

    Raises:
        UserError: a Megatron or unknown layout, needs unpickling, no bert_config.json.
    """
    strings = _pickled_strings(file)
    given_away = [word for word in _MEGATRON_WORDS if any(word in text for text in strings)]
    if given_away:
        raise refuse_megatron(file, given_away[0])
    state = load_weights_only(file)
    if isinstance(state, dict) and isinstance(state.get("model"), dict):
        state = state["model"]
    state = state_dict(state, file)
    config_file = next(
        (p for p in (file.parent / "bert_config.json", file.parent / "config.json") if p.is_file()),
        file.parent / "bert_config.json",
    )
    config = config_from_hf(hf_json(config_file), config_file)
    tensors, dropped = normalise(rename_nvidia(state), file)
    rows = len(tensors[WORDS]) if WORDS in tensors else config.vocab_size
    if true_vocab > rows:
        raise UserError(
            f"{file}: {rows} embedding rows for a tokenizer of {true_vocab} entries",
            "the tokenizer belongs to another model",
        )
    for name in (WORDS, MLM_BIAS):
        if name in tensors and len(tensors[name]) > true_vocab:
            dropped[f"{name}[{true_vocab}:{len(tensors[name])}]"] = "vocabulary padding"
            tensors[name] = tensors[name][:true_vocab].clone()
    config.vocab_size = true_vocab
    return finish(config, tensors, "nvidia-deeplearningexamples", file, dropped)


def rename_nvidia(state: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """DeepLearningExamples' names -> Hugging Face's: `module.` and `dense_act` go."""
    renamed = {}
    for name, tensor in state.items():
        new = re.sub(r"^module\.", "", name)
        renamed[new.replace(".dense_act.", ".dense.")] = tensor
    return renamed


def _pickled_strings(file: Path) -> list[str]:
    """The strings in a torch file's pickle, parsed without running it; [] if it is no such file."""
    try:
        with zipfile.ZipFile(file) as archive:
            names = [name for name in archive.namelist() if name.endswith("/data.pkl")]
            data = archive.read(names[0]) if names else b""
        return [arg for _, arg, _ in pickletools.genops(data) if isinstance(arg, str)]
    except (zipfile.BadZipFile, OSError, ValueError, IndexError, KeyError):
        return []
