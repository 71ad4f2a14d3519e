"""Opens what a user may call a model: a run, a checkpoint of it, or a Hugging Face folder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from configs import UserError
from configs.files import read_json
from configs.model import ModelConfig
from pretrain.convert.source import hf_shapes

if TYPE_CHECKING:
    import torch

PROVENANCE = "lambert.json"
# What an export writes there of a checkpoint's own record.
RECORDED = ("step", "recipe", "state", "imported", "origin", "tokenizer_fingerprint", "format")


@dataclass
class Opened:
    """A whole model under Hugging Face names, with its tokenizer's folder.

    meta is the checkpoint's (step, recipe, ...); of a Hugging Face folder what our export recorded
    in it, with `scores`, or nothing.
    """

    config: ModelConfig
    tensors: dict[str, torch.Tensor]
    tokenizer: Path
    path: Path
    meta: dict[str, Any] = field(default_factory=dict)

    @property
    def random_heads(self) -> list[str]:
        """Tensors that an import drew at random; the checkpoint of a training has none."""
        return list(self.meta.get("imported", {}).get("new_heads", []))


def open_model(path: Path, vocab: Path | None = None) -> Opened:
    """The model at `path`: work_dir, train folder, checkpoint folder, or HF folder with its MLM head.

    Args:
        vocab: tokenizer folder; None finds the run's.

    Raises:
        UserError: nothing there, damaged, of another format, without tokenizer or MLM head.
    """
    if not path.exists():  # before torch is imported
        raise UserError(
            f"{path}: no such folder", "give a work_dir, a checkpoint or a Hugging Face folder"
        )
    if (path / "config.json").is_file():
        return _open_hf(path, vocab)
    from pretrain.checkpoint import Damaged, load_logical, read_meta, resolve

    folder = resolve(path)
    try:
        meta = read_meta(folder)
        tensors = load_logical(folder)
    except Damaged as error:
        raise UserError(
            f"{folder}: damaged: {error}", "name an older step-... folder of the run"
        ) from None
    config = config_from_meta(meta["model"], folder)
    check_complete(config, tensors, folder)
    return Opened(config, tensors, vocab or find_vocab(folder, meta), folder, meta)


def config_from_meta(values: Mapping[str, Any], folder: Path) -> ModelConfig:
    """ModelConfig stored in a checkpoint; UserError for keys that this version does not know."""
    known = {f.name for f in fields(ModelConfig)}
    unknown = sorted(set(values) - known)
    if unknown:
        raise UserError(
            f"{folder}: the model has the unknown setting {unknown[0]}",
            "use the Lambert version that wrote it",
        )
    return ModelConfig(**values)


def check_complete(config: ModelConfig, tensors: Mapping[str, torch.Tensor], folder: Path) -> None:
    """Every tensor of the config is there in its shape, and no other; UserError names the first."""
    shapes = hf_shapes(config)
    for name in shapes.keys() ^ tensors.keys():
        what = "lacks" if name in shapes else "holds the unknown tensor"
        raise UserError(f"{folder}: {what} {name}", "the checkpoint is not of this model")
    for name, shape in shapes.items():
        if tuple(tensors[name].shape) != shape:
            raise UserError(
                f"{folder}: {name} is {list(tensors[name].shape)}, the model needs {list(shape)}",
                "the checkpoint is not of this model",
            )


def find_vocab(folder: Path, meta: Mapping[str, Any]) -> Path:
    """The run's vocab/ folder: above the checkpoint, else in the recipe's work_dir.

    Above is where its path says and, where parts of that are links, where it really lies.
    """
    above = [*folder.absolute().parents[:3], *folder.resolve().parents[:3]]
    places = [parent / "vocab" for parent in above]
    work_dir = (meta.get("recipe") or {}).get("work_dir")
    if work_dir:
        places.append(Path(work_dir) / "vocab")
    for place in places:
        if (place / "tokenizer.json").is_file():
            return place
    raise UserError(
        f"{folder}: no tokenizer in {places[min(2, len(places) - 1)]}",
        "pass --vocab FOLDER with the tokenizer.json that the shards were built with",
    )


def _open_hf(path: Path, vocab: Path | None) -> Opened:
    from pretrain.convert.layouts import read_foreign
    from pretrain.convert.native import with_new_heads

    source = read_foreign(path, vocab)
    lost = [name for name in source.missing_heads if name.startswith("cls.predictions")]
    if lost:
        raise UserError(
            f"{path}: no masked-LM head ({lost[0]})", "use an exported pretraining model"
        )
    tensors = source.tensors
    if source.missing_heads:  # a masked-LM model with a pooler: NSP scores would be noise
        source.config.nsp_head = False
        tensors = {k: v for k, v in tensors.items() if k in hf_shapes(source.config)}
    assert source.tokenizer is not None
    said = read_json(path / PROVENANCE, "delete it") if (path / PROVENANCE).is_file() else {}
    meta = {key: said[key] for key in (*RECORDED, "scores") if key in said}
    whole = with_new_heads(source.config, tensors, 0)
    return Opened(source.config, whole, source.tokenizer, path, meta)
