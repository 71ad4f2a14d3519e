"""Learning rates: a function of the update count alone."""

from __future__ import annotations

import inspect
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from configs import UserError, load_recipe
from configs.model import resolve_model
from configs.phases import check_schedule
from configs.ranges import CHOICES
from configs.schema import PhaseConfig, ScheduleConfig
from pretrain.optim.schedule import lr_at, warmup_steps


def phase(steps=1000, **schedule) -> PhaseConfig:
    return PhaseConfig(steps=steps, schedule=ScheduleConfig(**schedule))


def test_b31_peak_at_100_zero_at_1000_whatever_the_layout() -> None:
    p = phase(lr=6e-3, warmup=100)
    assert list(inspect.signature(lr_at).parameters) == ["phase", "step"]  # no layout to depend on
    assert lr_at(p, 1) == pytest.approx(6e-5)
    assert lr_at(p, 50) == pytest.approx(3e-3)
    assert lr_at(p, 100) == 6e-3
    assert lr_at(p, 550) == pytest.approx(3e-3)
    assert lr_at(p, 1000) == 0
    assert lr_at(p, 1500) == 0
    assert max(lr_at(p, k) for k in range(1, 1001)) == 6e-3


def test_published_recipes_of_64k_and_32k() -> None:
    first, second = load_recipe("bert-large-64k").phases
    assert (first.global_batch, first.steps, warmup_steps(first)) == (65536, 7038, 2001)
    assert lr_at(first, 2001) == 6e-3
    assert lr_at(first, 4520) == pytest.approx(6e-3 * math.sqrt(1 - 2519 / 5037))
    assert (second.global_batch, second.steps, warmup_steps(second)) == (32768, 1563, 200)
    assert lr_at(second, 200) == 4e-3 and lr_at(second, 1563) == 0
    half = load_recipe("bert-large-32k").phases
    for whole, phase_ in zip((first, second), half):
        assert phase_.global_batch * phase_.steps == whole.global_batch * whole.steps
        assert phase_.schedule.lr == pytest.approx(whole.schedule.lr / math.sqrt(2), rel=1e-3)


@pytest.mark.parametrize("name", ["bert-base", "megatron-1.3b", "megatron-3.9b", "megatron-8.3b"])
def test_shipped_recipes_can_be_followed(name) -> None:
    recipe = load_recipe(name)
    assert not recipe.optimizer.adapt_bias_and_norm  # as where their rates come from
    model = resolve_model(recipe.model, 30522)
    assert model.num_heads % recipe.parallel.tp == 0
    for k, p in enumerate(recipe.phases):
        check_schedule(p.schedule, p.steps, f"phases[{k}].schedule")
        longest = recipe.shards[p.shards].max_length
        assert longest <= min(model.max_position_embeddings, recipe.parallel.micro_batch_tokens)


def test_kinds() -> None:
    cosine = phase(kind="cosine", lr=1.0, end_lr=0.1)
    assert lr_at(cosine, 500) == pytest.approx(0.55) and lr_at(cosine, 1000) == pytest.approx(0.1)
    linear = phase(kind="linear", lr=1.0, power=3.0)
    assert lr_at(linear, 500) == pytest.approx(0.5)
    constant = phase(kind="constant", lr=1.0, warmup=10)
    assert lr_at(constant, 5) == 0.5 and lr_at(constant, 10_000) == 1.0
    cubic = phase(kind="poly", lr=1.0, power=3.0)
    assert lr_at(cubic, 500) == pytest.approx(0.125)


@given(
    st.sampled_from(CHOICES["phases.*.schedule.kind"]),
    st.integers(1, 5000),
    st.floats(0, 0.999),
    st.floats(0.1, 4),
    st.floats(0, 1e-3),
)
def test_rises_to_the_peak_then_never_rises_again(kind, steps, warmup, power, end) -> None:
    p = phase(steps, kind=kind, lr=1e-2, warmup=warmup, power=power, end_lr=end)
    rates = [lr_at(p, k) for k in range(1, steps + 1)]
    assert all(0 <= r <= 1e-2 for r in rates)
    peak = max(0, warmup_steps(p) - 1)
    assert all(a < b for a, b in zip(rates[:peak], rates[1 : peak + 1]))
    assert all(a >= b for a, b in zip(rates[peak:], rates[peak + 1 :]))


def test_mistakes_are_named() -> None:
    with pytest.raises(UserError, match="warmup=20 does not fit into 10"):
        check_schedule(ScheduleConfig(warmup=20), 10, "phases[0].schedule")
    nan = float("nan")
    for odd, named in (
        ({"lr": 0.0}, "lr=0"),
        ({"lr": float("inf")}, "lr=inf"),
        ({"end_lr": nan}, "end_lr=nan"),
        ({"power": nan}, "power=nan"),
        ({"warmup": nan}, "warmup=nan does not fit"),
    ):
        with pytest.raises(UserError, match=named):
            check_schedule(ScheduleConfig(**odd), 10, "phases[0].schedule")
    check_schedule(ScheduleConfig(), 10, "phases[0].schedule")
