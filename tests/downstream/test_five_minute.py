"""The five-minute BERT at tiny size: its clock, its start, its rival."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from bench import five_minute_rival as rival
from configs import UserError, load_recipe
from configs.model import ModelConfig, resolve_model
from data_prep.shards import open_shards
from pretrain.evaluation import unigram
from pretrain.model import build
from pretrain.model.init import start_at_sinusoids, start_at_unigram
from pretrain.optim.budget import FREE_UPDATES, TimeBudget
from pretrain.optim.schedule import lr_at
from tests.synthetic import make_shards


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dense")
    return make_shards(folder, rows=200, max_length=32, vocab_size=90, pairs=False)


def tiny(vocab_size: int = 90) -> ModelConfig:
    config = ModelConfig(
        preset="bert-tiny", hidden_size=64, num_heads=2, max_position_embeddings=32
    )
    return resolve_model(config, vocab_size)


def test_budget_stretches_the_schedule_over_the_time() -> None:
    phase = load_recipe("five-minute").phases[0]
    budget = TimeBudget(5)
    for _ in range(FREE_UPDATES):
        started = budget.add(60.0)  # they compile
    assert budget.clock == 0 and started
    rates = []
    while not budget.over:
        budget.add(1.5)
        budget.spent = budget.clock
        rates.append(lr_at(phase, budget.position(len(rates) + 1, phase.steps)))
    assert len(rates) == 200
    assert rates[11] == pytest.approx(phase.schedule.lr, rel=0.01)  # 6% of 200 warm up
    assert rates[105] == pytest.approx(phase.schedule.lr / 2, rel=0.01)
    assert rates[-1] == 0
    assert TimeBudget(5, spent=300.0).over  # a resumed run has no time left
    assert not TimeBudget(0).over and TimeBudget(0).position(7, 10) == 7


def test_phases_share_one_curve_over_the_time() -> None:
    first = load_recipe("five-minute").phases[0]
    last = dataclasses.replace(first, name="phase2", steps=first.steps // 2)
    budget = TimeBudget(5, spent=200.0)
    before, after = (lr_at(p, budget.position(1, p.steps)) for p in (first, last))
    assert before == pytest.approx(after, rel=1e-3)
    assert after == pytest.approx(first.schedule.lr * (1 - 200 / 300) / 0.94, rel=0.01)


def test_budget_refuses_what_it_cannot_keep() -> None:
    with pytest.raises(UserError, match=r"train.max_minutes=-1"):
        load_recipe("five-minute", ["train.max_minutes=-1"])


def test_the_model_starts_at_the_unigram(shards: Path) -> None:
    data = open_shards(shards)
    guess = unigram(data)
    model, pieces = build(tiny(), seed=3)
    start_at_unigram(pieces, guess)
    bias = dict(model.named_parameters())["cls.predictions.bias"][:90].detach()
    ordinary = np.isfinite(guess)
    probabilities = torch.softmax(bias, 0).numpy()[ordinary]
    expected = np.exp(guess[ordinary])
    assert np.allclose(probabilities / probabilities.sum(), expected / expected.sum(), atol=1e-6)
    assert abs(float(bias.mean())) < 1e-5


def test_sinusoids_depend_on_distance_alone() -> None:
    model, pieces = build(tiny(), seed=3)
    start_at_sinusoids(pieces, 0.02)
    table = model.bert.embeddings.position_embeddings.weight.detach()
    assert float(table.square().mean().sqrt()) == pytest.approx(0.02, rel=1e-3)
    products = table @ table.T
    for distance in (1, 5, 20):
        diagonal = products.diagonal(distance)
        assert torch.allclose(diagonal, diagonal[0].expand_as(diagonal), atol=1e-6)
        assert diagonal[0] < products[0, 0]


def test_blocks_of_the_rival_hold_every_token(shards: Path) -> None:
    data = open_shards(shards)
    blocks = rival.blocks(shards)
    everything = data.rows(np.arange(data.num_rows)).tokens
    assert blocks.shape[1] == 32
    assert 0 <= len(everything) - blocks.size < 32
    seen, all_of = (np.bincount(x.reshape(-1), minlength=90) for x in (blocks, everything))
    assert (all_of - seen >= 0).all()


def test_clock_of_the_rival(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(rival.time, "perf_counter", lambda: now[0])
    clock = rival.Clock(100.0, 0.1)
    assert clock.factor(0) < clock.factor(5) <= 0.01  # before its start
    now[0] = 50.0
    clock.start()
    factors = []
    for later in (55.0, 60.0, 105.0, 150.0, 160.0):
        now[0] = later
        factors.append(clock.factor(0))
    assert factors == pytest.approx([0.5, 1.0, 0.5, 0.0, 0.0])


def test_rival_trains_for_its_seconds(shards: Path, tiny_model: Path, tmp_path: Path) -> None:
    words = ["--rows", str(shards), "--tokenizer", str(tiny_model), "--out", str(tmp_path)]
    size = ["--shape", "64x1", "--batch", "4", "--workers", "0", "--seconds", "0.3"]
    result = rival.train(rival.parser().parse_args(words + size))
    assert result["updates"] > rival.FREE_UPDATES
    assert 0.3 <= result["seconds"] < 30
    assert (tmp_path / "model.safetensors").is_file()
    assert "Masked" in json.loads((tmp_path / "config.json").read_text())["architectures"][0]
