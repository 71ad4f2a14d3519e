"""A checkpoint of any tp, ZeRO stage and precision is exported by one process without a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from pretrain.convert.export import export
from pretrain.convert.vocabulary import write_folder
from tests.convert.layout_worker import LAYOUTS, ids
from tests.trainer.launch import world
from tests.trainer.layouts import config


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, torch.Tensor]]:
    folder = tmp_path_factory.mktemp("layouts")
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    words += [f"w{i}" for i in range(len(words), config().vocab_size)]
    (folder / "vocab.txt").write_text("\n".join(words))
    write_folder(folder / "vocab.txt", folder / "vocab", None, config().max_position_embeddings)
    return folder, world(4, "tests.convert.layout_worker:save_all", str(folder))[0]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_exported_logits_are_those_of_the_training_model(trained, tmp_path: Path, layout) -> None:
    from transformers import AutoModelForPreTraining

    folder, logits = trained
    out = export(folder / str(layout), tmp_path / "out", vocab=folder / "vocab")
    model = AutoModelForPreTraining.from_pretrained(out).eval()
    with torch.no_grad():
        theirs = model(ids()).prediction_logits.flatten(0, 1)
    ours = logits[str(layout)]
    assert theirs.shape == ours.shape == (64, config().vocab_size)
    # In bf16 the training model computes with rounded weights; the checkpoint holds the masters.
    assert (theirs - ours).abs().max() < (1e-5 if layout.precision == "fp32" else 0.1)
    assert ours.abs().max() > 0.05
