"""Tells which layout a path holds, and reads it."""

from __future__ import annotations

from pathlib import Path

from configs import UserError
from pretrain.checkpoint.folder import resolve
from pretrain.convert.hf import read_hf
from pretrain.convert.megatron import megatron_folder, read_nvidia, refuse_megatron
from pretrain.convert.source import MLM_BIAS, WORDS, SourceModel
from pretrain.convert.tf import find_prefix, read_tf
from pretrain.convert.vocabulary import tokenizer_size

_TORCH_FILES = (".pt", ".pth", ".bin")
_FILES = (*_TORCH_FILES, ".index", ".ckpt", ".safetensors", ".h5", ".json", ".txt")
_HELP = (
    "expected a Hugging Face folder or hub name, a TensorFlow checkpoint prefix, or a .pt file of"
    " NVIDIA DeepLearningExamples"
)


def read_foreign(path: Path, vocab: Path | None = None, trim: bool = False) -> SourceModel:
    """The model at `path` whatever its layout, with a tokenizer of its size.

    Args:
        vocab: vocab.txt or tokenizer folder; None takes the one beside the weights.
        trim: cuts embedding rows beyond the tokenizer (padding) from layouts that do not say so.

    Raises:
        UserError: unknown, damaged or pre-LN layout; no tokenizer, or one of another size.
    """
    source = _read(path, vocab)
    source.tokenizer = vocab or source.tokenizer
    if source.tokenizer is None:
        raise UserError(f"{path}: no tokenizer beside the weights", "pass --vocab vocab.txt")
    entries = tokenizer_size(source.tokenizer)
    rows = source.config.vocab_size
    if entries < rows and trim:
        source.dropped[f"{WORDS}[{entries}:{rows}]"] = "rows beyond the tokenizer"
        for name in (WORDS, MLM_BIAS):
            if name in source.tensors:
                source.tensors[name] = source.tensors[name][:entries].clone()
        source.config.vocab_size = entries
    elif entries != rows:
        hint = "pass --trim-vocab if those rows are padding" if entries < rows else "name its own"
        raise UserError(
            f"{source.tokenizer}: {entries} ids, the embedding has {rows} rows",
            f"tokenizer and weights differ; {hint}",
        )
    return source


def _read(path: Path, vocab: Path | None) -> SourceModel:
    if path.is_dir():
        seen = megatron_folder(path)
        if seen:
            raise refuse_megatron(path, seen)
        if not (path / "config.json").is_file() and _is_run(path):
            raise UserError(f"{path}: a run of ours", f"use checkpoint.init_from={path}")
        prefix = find_prefix(path)
        if prefix is not None and not (path / "config.json").is_file():
            return read_tf(prefix)
        return read_hf(path)
    prefix = find_prefix(path)
    if prefix is not None:
        return read_tf(prefix)
    if path.suffix in _TORCH_FILES and path.is_file():
        beside = path.parent / "vocab.txt"
        if vocab is None and not beside.is_file():
            raise UserError(
                f"{path}: its vocabulary is padded, so the tokenizer must be known",
                "pass --vocab vocab.txt",
            )
        source = read_nvidia(path, tokenizer_size(vocab or beside))
        source.tokenizer = beside if beside.is_file() else None
        return source
    if (
        not path.exists()
        and len(path.parts) == 2
        and not path.is_absolute()
        and path.suffix not in _FILES
        and not path.parent.is_dir()  # then it is meant to be in there
    ):
        return read_hf(_download(str(path)))
    raise UserError(f"{path}: {'unknown layout' if path.exists() else 'no such file'}", _HELP)


def _is_run(path: Path) -> bool:
    try:
        return resolve(path).is_dir()
    except UserError:
        return False


def _download(name: str) -> Path:
    """The files of a hub model, safetensors where it has them; UserError without such a model."""
    from huggingface_hub import HfApi, snapshot_download

    try:
        files = HfApi().list_repo_files(name)
        safe = any(f.startswith("model.safetensors") for f in files)
        weights = "model*.safetensors*" if safe else "pytorch_model*.bin*"
        return Path(snapshot_download(name, allow_patterns=["*.json", "vocab.txt", weights]))
    except Exception as error:  # the hub client raises a dozen kinds, all of which mean this
        raise UserError(
            f"{name}: neither a path here nor a model of the hub ({type(error).__name__})",
            f"{_HELP}; for a hub name check the network and HF_HUB_OFFLINE",
        ) from None
