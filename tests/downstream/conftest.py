"""A tiny model whose vocabulary covers the letters, so that any text becomes word pieces."""

from __future__ import annotations

import string
from pathlib import Path

import pytest
import torch

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
WORDS = [
    "good",
    "bad",
    "film",
    "a",
    "the",
    "is",
    "very",
    "not",
    "who",
    "where",
    "cat",
    "dog",
    "sat",
]


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An HF folder: BertForPreTraining of 2 layers of 32, random weights, WordPiece of letters."""
    from transformers import BertConfig, BertForPreTraining

    from pretrain.convert.vocabulary import write_folder

    base = tmp_path_factory.mktemp("model")
    letters = string.ascii_lowercase + string.digits + string.punctuation
    entries = [*SPECIAL, *WORDS, *(c for c in letters if c != "a"), *(f"##{c}" for c in letters)]
    (base / "vocab.txt").write_text("\n".join(entries) + "\n")
    folder = base / "hf"
    write_folder(base / "vocab.txt", folder, None, 128)
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(entries),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=128,
        initializer_range=0.2,
    )
    BertForPreTraining(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def tokenizer(tiny_model: Path):
    from pretrain.downstream.loading import load_tokenizer

    return load_tokenizer(str(tiny_model))
