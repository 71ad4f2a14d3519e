"""Pseudo-log-likelihood against the plain definition, and the scoring of pairs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from configs import UserError
from pretrain.convert.hf import read_hf
from pretrain.convert.native import to_model
from pretrain.downstream.blimp import (
    Pairs,
    probe,
    read_pairs,
    score_pairs,
    summary,
)
from pretrain.downstream.pseudo import of_sentences

SENTENCES = ["the cat sat", "a very good film", "dog", "", "who is not the cat", "the dog sat"]


@pytest.fixture(scope="module")
def model(tiny_model: Path):
    source = read_hf(tiny_model)
    return to_model(source.config, source.tensors)


def one_by_one(tiny_model: Path, tokenizer, sentence: str) -> float:
    """The definition, by transformers: mask each piece in turn, one forward pass a piece."""
    from transformers import BertForMaskedLM

    reference = BertForMaskedLM.from_pretrained(tiny_model).eval()
    ids = tokenizer(sentence)["input_ids"]
    total = 0.0
    for place in range(1, len(ids) - 1):
        masked = torch.tensor([ids])
        masked[0, place] = tokenizer.mask_token_id
        with torch.no_grad():
            logits = reference(masked).logits[0, place]
        total += torch.log_softmax(logits.double(), -1)[ids[place]].item()
    return total


@pytest.mark.parametrize("budget", [8, 33, 4096])
def test_scores_are_the_definition_for_any_batch(model, tiny_model, tokenizer, budget: int) -> None:
    wanted = [one_by_one(tiny_model, tokenizer, s) for s in SENTENCES]
    got = of_sentences(model, tokenizer, SENTENCES, budget)
    np.testing.assert_allclose(got, wanted, atol=1e-4)
    assert got[3] == 0


def blimp_file(folder: Path, uids: int = 3, pairs: int = 20) -> Path:
    rng = np.random.default_rng(1)
    words = np.array(
        ["good", "bad", "film", "the", "is", "very", "not", "who", "cat", "dog", "sat"]
    )
    rows = [
        {
            "linguistics_term": f"t{u % 2}",
            "UID": f"u{u}",
            "sentence_good": " ".join(rng.choice(words, 4)),
            "sentence_bad": " ".join(rng.choice(words, 4)),
            "pair_id": p,
        }
        for u in range(uids)
        for p in range(pairs)
    ]
    pq.write_table(pa.Table.from_pylist(rows), folder / "blimp.parquet")
    return folder / "blimp.parquet"


def test_probe_shares_of_ranks_add_up(tmp_path: Path, model, tokenizer) -> None:
    file = blimp_file(tmp_path)
    pairs, few = read_pairs(file, about=30), read_pairs(file, about=3)
    whole = probe(model, tokenizer, pairs)
    shares = [probe(model, tokenizer, pairs, share=(r, 4)) for r in range(4)]
    assert whole == tuple(map(sum, zip(*shares))) and whole[1] == 30
    model.train()
    many = [probe(model, tokenizer, few, share=(r, 8)) for r in range(8)]
    assert sum(scored for _, scored in many) == 3 and many[-1] == (0, 0)
    probe(model, tokenizer, few)
    assert model.training
    model.eval()


def test_sample_takes_the_same_share_of_every_kind(tmp_path: Path) -> None:
    file = blimp_file(tmp_path)
    sample = read_pairs(file, 0.25)
    assert {u: int((sample.uid == u).sum()) for u in np.unique(sample.uid)} == {
        "u0": 5,
        "u1": 5,
        "u2": 5,
    }
    assert sample.good == read_pairs(file, 0.25).good == read_pairs(file, about=15).good
    assert len(read_pairs(file, about=10**6)) == 60
    assert sample.good != read_pairs(file, 0.25, seed=1).good


def test_equal_sentences_can_only_be_wrong(model, tokenizer) -> None:
    pairs = Pairs(["the cat sat"], ["the cat sat"], np.array(["u"]), np.array(["t"]))
    assert score_pairs(model, tokenizer, pairs).tolist() == [False]


def test_summary_weighs_kinds_alike() -> None:
    pairs = Pairs(["x"] * 4, ["y"] * 4, np.array(["a", "a", "a", "b"]), np.array(["t"] * 4))
    result = summary(pairs, np.array([True, True, False, False]))
    assert result["accuracy"] == pytest.approx((200 / 3 + 0) / 2)
    assert result["by_term"] == {"t": 50.0}


def test_the_real_file(real_data: Path) -> None:
    pairs = read_pairs(real_data / "blimp/blimp.parquet", 0.05)
    assert len(pairs) == 67 * 50 and len(np.unique(pairs.term)) == 13


def test_files_that_are_not_blimp_are_named(tmp_path: Path) -> None:
    (tmp_path / "x.parquet").write_text("no")
    for about in (None, 3):
        with pytest.raises(UserError, match="x.parquet"):
            read_pairs(tmp_path / "x.parquet", about=about)
    pq.write_table(pa.table({"UID": ["a"]}), tmp_path / "y.parquet")
    with pytest.raises(UserError, match="no column linguistics_term"):
        read_pairs(tmp_path / "y.parquet")
    table = pq.read_table(blimp_file(tmp_path))
    pq.write_table(table.slice(0, 0), tmp_path / "z.parquet")
    for about in (None, 3):
        with pytest.raises(UserError, match="holds no pairs"):
            read_pairs(tmp_path / "z.parquet", about=about)
    for name in ("UID", "sentence_bad"):
        at = table.column_names.index(name)
        holed = pa.array([None, *table.column(name).to_pylist()[1:]])
        pq.write_table(table.set_column(at, name, holed), tmp_path / "z.parquet")
        with pytest.raises(UserError, match=f"nulls in {name}"):
            read_pairs(tmp_path / "z.parquet")
