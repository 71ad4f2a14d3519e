"""Learning rates: a function of the update count alone."""

from __future__ import annotations

import inspect
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from configs import UserError
from configs.schema import PhaseConfig, ScheduleConfig
from pretrain.optim.schedule import KINDS, check_schedule, lr_at, warmup_steps


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
    first = phase(7038, lr=6e-3, warmup=0.2843, power=0.5)
    assert warmup_steps(first) == 2001
    assert lr_at(first, 2001) == 6e-3
    assert lr_at(first, 4520) == pytest.approx(6e-3 * math.sqrt(1 - 2519 / 5037))
    second = phase(1563, lr=4e-3, warmup=0.128, power=0.5)
    assert warmup_steps(second) == 200 and lr_at(second, 1563) == 0


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
    st.sampled_from(KINDS),
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
    with pytest.raises(UserError, match=r"phases\[0\].schedule.kind=step"):
        check_schedule(ScheduleConfig(kind="step"), 10, "phases[0].schedule")
    with pytest.raises(UserError, match="warmup=20 does not fit into 10"):
        check_schedule(ScheduleConfig(warmup=20), 10, "phases[0].schedule")
    with pytest.raises(UserError, match="lr=0"):
        check_schedule(ScheduleConfig(lr=0.0), 10, "phases[0].schedule")
    check_schedule(ScheduleConfig(), 10, "phases[0].schedule")
