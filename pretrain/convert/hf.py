"""Hugging Face BERT folders: any of the bare, pretraining and masked-LM forms in, one form out."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from configs import UserError
from configs.files import read_json
from configs.model import ModelConfig
from pretrain.convert.source import MLM_BIAS, WORDS, SourceModel, finish

if TYPE_CHECKING:
    import torch

# Settings that change the function BERT computes; other values need code that Lambert lacks.
_FIXED = {
    "hidden_act": "gelu",
    "position_embedding_type": "absolute",
    "is_decoder": False,
    "add_cross_attention": False,
}
_TASK_HEADS = ("classifier.", "qa_outputs.", "dropout.")
SHARD_BYTES = 2 * 1024**3  # safetensors files above this are split, so that hubs take them


def config_from_hf(values: Mapping[str, Any], origin: Path) -> ModelConfig:
    """ModelConfig out of a config.json; UserError for an architecture that is not post-LN BERT."""
    kind = values.get("model_type", "bert")  # Google's bert_config.json has no model_type
    if kind != "bert":
        hint = {
            "megatron-bert": "Megatron's BERT is pre-LN: the same weights compute something else here",
            "roberta": "RoBERTa shifts positions and has another head; it is not converted",
        }.get(str(kind), "only post-LN BERT can be imported")
        raise UserError(f"{origin}: model_type={kind}", hint)
    for key, wanted in _FIXED.items():
        if values.get(key, wanted) != wanted:
            raise UserError(
                f"{origin}: {key}={values[key]!r}", f"only {key}={wanted!r} is supported"
            )
    if values.get("tie_word_embeddings", True) is not True:
        raise UserError(f"{origin}: tie_word_embeddings=false", "BERT's decoder is its embedding")
    names = {
        "vocab_size": "vocab_size",
        "hidden_size": "hidden_size",
        "num_hidden_layers": "num_layers",
        "num_attention_heads": "num_heads",
        "intermediate_size": "intermediate_size",
        "max_position_embeddings": "max_position_embeddings",
        "type_vocab_size": "type_vocab_size",
    }
    shares = {  # Google's bert_config.json has no layer_norm_eps
        "hidden_dropout_prob": ("hidden_dropout", 0.1),
        "attention_probs_dropout_prob": ("attention_dropout", 0.1),
        "initializer_range": ("initializer_range", 0.02),
        "layer_norm_eps": ("layer_norm_eps", 1e-12),
    }
    for key in names:
        if type(values.get(key)) is not int or values[key] < 1:
            raise UserError(
                f"{origin}: {key} is missing or no whole number above 0", "restore the config"
            )
    given: dict[str, Any] = {ours: values[theirs] for theirs, ours in names.items()}
    for key, (ours, usual) in shares.items():
        value = values.get(key, usual)
        if type(value) not in (int, float) or not 0 <= value < 1:
            raise UserError(f"{origin}: {key}={value!r}", "expected a number from 0 to below 1")
        given[ours] = float(value)
    config = ModelConfig(**given)
    if config.hidden_size % config.num_heads:
        raise UserError(
            f"{origin}: hidden_size={config.hidden_size} is not divisible by"
            f" num_attention_heads={config.num_heads}",
            "restore the config",
        )
    return config


def config_to_hf(
    config: ModelConfig, dtype: str = "float32", pad_token_id: int = 0
) -> dict[str, Any]:
    """The config.json values of transformers' BertConfig."""
    return {
        "architectures": ["BertForPreTraining" if config.nsp_head else "BertForMaskedLM"],
        "model_type": "bert",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "intermediate_size": config.intermediate_size,
        "max_position_embeddings": config.max_position_embeddings,
        "type_vocab_size": config.type_vocab_size,
        "hidden_act": "gelu",
        "hidden_dropout_prob": config.hidden_dropout,
        "attention_probs_dropout_prob": config.attention_dropout,
        "initializer_range": config.initializer_range,
        "layer_norm_eps": config.layer_norm_eps,
        "pad_token_id": pad_token_id,
        "dtype": dtype,
    }


def read_hf(folder: Path) -> SourceModel:
    """Reads BertModel, BertForPreTraining or BertForMaskedLM, with or without the `bert.` prefix.

    Raises:
        UserError: no weights, unreadable or cut weights, another architecture, wrong shapes.
    """
    config = config_from_hf(hf_json(folder / "config.json"), folder / "config.json")
    found: dict[str, torch.Tensor] = {}
    files, placed = weight_files(folder)
    for file in files:
        for name, tensor in read_tensors(file):
            if name in found:
                raise UserError(f"{file}: {name} is in two weight files", "remove the foreign file")
            if (said := placed.get(name, file.name)) != file.name:
                raise UserError(
                    f"{file}: holds {name}, which the index says is in {said}",
                    "index and shards may be of two models; copy the whole folder again",
                )
            found[name] = tensor
    lost = sorted(
        n for n in placed.keys() - found.keys() if not n.startswith("cls.predictions.decoder.")
    )
    if lost:
        raise UserError(
            f"{folder}: the index names {len(lost)} tensors that no file holds, first {lost[0]}",
            "copy the whole folder again",
        )
    tensors, dropped = normalise(found, folder)
    source = finish(config, tensors, "hf", folder, dropped)
    source.tokenizer = folder if _has_tokenizer(folder) else None
    return source


def normalise(
    found: Mapping[str, torch.Tensor], origin: Path
) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """HF names of any BERT class -> BertForPreTraining's; second: what was left out, and why."""
    import torch

    bare = not any(name.startswith(("bert.", "cls.")) for name in found)
    tensors: dict[str, torch.Tensor] = {}
    dropped: dict[str, str] = {}
    for name, tensor in found.items():
        if name.endswith("position_ids"):
            dropped[name] = "a constant"
            continue
        if name.startswith(_TASK_HEADS):
            dropped[name] = "head of a fine-tuned task"
            continue
        new = f"bert.{name}" if bare else name
        # Names before transformers 0.6, still inside old files.
        new = re.sub(r"LayerNorm\.gamma$", "LayerNorm.weight", new)
        new = re.sub(r"LayerNorm\.beta$", "LayerNorm.bias", new)
        tensors[new] = tensor
    decoder = tensors.pop("cls.predictions.decoder.weight", None)
    if decoder is not None:
        if WORDS in tensors and not torch.equal(decoder, tensors[WORDS]):
            raise UserError(
                f"{origin}: cls.predictions.decoder.weight differs from the word embedding",
                "an untied decoder cannot be kept; BERT's is its embedding",
            )
        dropped["cls.predictions.decoder.weight"] = "tied to the word embedding"
    bias = tensors.pop("cls.predictions.decoder.bias", None)
    if bias is not None:
        if not torch.equal(tensors.setdefault(MLM_BIAS, bias), bias):
            raise UserError(
                f"{origin}: cls.predictions.decoder.bias and {MLM_BIAS} differ",
                "they are one tensor in BERT; the file is damaged",
            )
        dropped["cls.predictions.decoder.bias"] = f"the same as {MLM_BIAS}"
    return tensors, dropped


def weight_files(folder: Path) -> tuple[list[Path], dict[str, str]]:
    """The weight files of an HF folder: safetensors before .bin, shards through their index; and of
    each tensor the name of the file that the index says it is in (none without an index)."""
    for single in ("model.safetensors", "pytorch_model.bin"):
        index = folder / f"{single}.index.json"
        if (folder / single).is_file():
            return [folder / single], {}
        if index.is_file():
            placed = hf_json(index).get("weight_map")
            if not isinstance(placed, dict) or not all(isinstance(n, str) for n in placed.values()):
                raise UserError(
                    f"{index}: weight_map does not say which tensor is in which file",
                    "copy the whole folder again",
                )
            placed = {tensor: Path(name).name for tensor, name in placed.items()}
            files = [folder / name for name in sorted(set(placed.values()))]
            gone = [file.name for file in files if not file.is_file()]
            if gone or not files:
                raise UserError(
                    f"{index}: shard {gone[0] if gone else '(none named)'} is missing",
                    "copy the whole folder again",
                )
            return files, placed
    raise UserError(
        f"{folder}: neither model.safetensors nor pytorch_model.bin", "name a Hugging Face folder"
    )


def read_tensors(file: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Name and tensor of a .safetensors file, or of a .bin read with weights_only."""
    if file.suffix == ".safetensors":
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(file, framework="pt") as handle:
                for name in handle.keys():  # noqa: SIM118 (not a dict)
                    yield name, handle.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise UserError(f"{file}: damaged: {error}", "copy or export it again") from None
        return
    yield from state_dict(load_weights_only(file), file).items()


def state_dict(state: Any, file: Path) -> dict[str, torch.Tensor]:
    """`state`, if it is names and tensors; UserError with what else `file` holds."""
    import torch

    if not isinstance(state, dict) or not state:
        raise UserError(f"{file}: holds no state dict", "expected names and tensors")
    for name, value in state.items():
        if not isinstance(name, str) or not isinstance(value, torch.Tensor):
            kind = type(value).__name__
            raise UserError(f"{file}: {name!r:.80} is a {kind}", "expected names and tensors")
    return state


def load_weights_only(file: Path) -> Any:
    """torch.load that runs no code of the file; UserError when it would need to or is damaged."""
    import pickle
    import zipfile

    import torch

    try:
        return torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise UserError(
            f"{file}: holds more than tensors ({str(error).strip().splitlines()[-1][:120]})",
            "nothing is unpickled here; save its state dict as safetensors where it was made",
        ) from None
    except (RuntimeError, EOFError, OSError, zipfile.BadZipFile, ValueError) as error:
        raise UserError(
            f"{file}: damaged: {(str(error) or repr(error)).splitlines()[0][:120]}", "copy it again"
        ) from None


def hf_json(file: Path) -> dict[str, Any]:
    """A JSON object of a Hugging Face folder; UserError names the file when it is missing or broken."""
    if not file.is_file():
        raise UserError(f"{file}: no such file", "a Hugging Face folder has one")
    return read_json(file, "restore the file")


def write_weights(
    tensors: Mapping[str, torch.Tensor], folder: Path, shard_bytes: int = SHARD_BYTES
) -> None:
    """model.safetensors, or numbered shards with an index once they exceed `shard_bytes`."""
    shards: list[dict[str, torch.Tensor]] = [{}]
    filled = total = 0
    for name, tensor in tensors.items():
        size = tensor.numel() * tensor.element_size()
        if shards[-1] and filled + size > shard_bytes:
            shards.append({})
            filled = 0
        shards[-1][name] = tensor.contiguous()
        filled += size
        total += size
    if len(shards) == 1:
        _save(shards[0], folder / "model.safetensors")
        return
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        _save(shard, folder / file)
        weight_map |= dict.fromkeys(shard, file)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(
        json.dumps(index, indent=2), encoding="utf-8"
    )


def _save(tensors: Mapping[str, torch.Tensor], file: Path) -> None:
    from safetensors.torch import save_file

    # `format: pt` is what transformers looks for before it reads a tensor.
    with refused_writes(file):
        save_file(dict(tensors), file, metadata={"format": "pt"})
    shutil.copymode(file.parent, file)  # safetensors makes files that only their owner may read
    file.chmod(file.stat().st_mode & 0o666)


@contextmanager
def refused_writes(path: Path) -> Iterator[None]:
    """A full disk as a UserError that names `path`: safetensors says it in an error of its own."""
    from safetensors import SafetensorError

    try:
        yield
    except SafetensorError as error:
        raise UserError(
            f"{path}: not written ({error})", "free some disk, then give the same command again"
        ) from None


def sync_tree(folder: Path) -> None:
    """fsync of every file and of the folder, before a rename publishes it."""
    for path in [*folder.rglob("*"), folder]:
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _has_tokenizer(folder: Path) -> bool:
    return (folder / "tokenizer.json").is_file() or (folder / "vocab.txt").is_file()
