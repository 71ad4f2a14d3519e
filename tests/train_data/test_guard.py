"""The guard's decisions: what is skipped, what stops a run, which signals count."""

from __future__ import annotations

import json
import math
import os
import re
import signal
from dataclasses import asdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from configs import UserError
from configs.errors import DIVERGED_EXIT
from configs.schema import GuardConfig, PhaseConfig
from pretrain.guard import LossGuard, LossScaler, StopSignals, TrainingStopped


def test_b33_three_overflows_recover_and_the_scale_grows_back() -> None:
    scaler = LossScaler(GuardConfig(initial_loss_scale=1024))
    skipped = []
    for k in range(20):
        scaler.update(k in (5, 6, 7))
        skipped.append(scaler.skipped)
    assert skipped == [0] * 5 + [1, 2, 3] + [0] * 12 and scaler.scale == 128
    for _ in range(LossScaler.GROWTH_INTERVAL):
        scaler.update(False)
    assert scaler.scale == 256


def test_b33_endless_overflow_stops_within_50_skips_at_a_scale_of_1() -> None:
    scaler = LossScaler(GuardConfig())
    for _ in range(20):
        scaler.update(False)
    scales = []
    with pytest.raises(TrainingStopped, match="50 updates in a row") as stop:
        while True:
            scaler.update(True)
            scales.append(scaler.scale)
    assert len(scales) == 49 and min(scales) == 1 == scaler.scale
    assert stop.value.exit_code == DIVERGED_EXIT != 0


@given(st.lists(st.booleans(), max_size=200), st.integers(0, 200))
def test_a_scaler_goes_on_from_its_state_as_if_never_stopped(overflows, cut) -> None:
    config = GuardConfig(max_skipped_updates=1000)
    whole, first, second = (LossScaler(config) for _ in range(3))
    for overflow in overflows:
        whole.update(overflow)
    for overflow in overflows[:cut]:
        first.update(overflow)
    second.load(json.loads(json.dumps(first.state())))
    for overflow in overflows[cut:]:
        second.update(overflow)
    assert second.state() == whole.state() and 1 <= whole.scale <= LossScaler.CEILING


def test_nan_is_skipped_and_stops_the_run_when_it_stays() -> None:
    guard = LossGuard(GuardConfig(nan_patience=3))
    assert guard.check(1, 5.0, 1.0) == (True, "")
    apply, odd = guard.check(2, math.nan, 1.0)
    assert not apply and "update 2" in odd
    assert guard.check(3, 5.0, math.inf)[0] is False
    assert guard.check(4, 5.0, 1.0)[0] is True  # the count starts again
    assert not guard.doubtful
    guard.check(5, math.nan, math.nan)
    guard.check(6, math.inf, 1.0)
    assert guard.doubtful
    with pytest.raises(TrainingStopped, match="nan_patience=3") as stop:
        guard.check(7, math.nan, 1.0)
    assert "a checkpoint of before update 5" in stop.value.remedy


def test_with_a_loss_scaler_nan_is_the_scalers_business() -> None:
    guard = LossGuard(GuardConfig(nan_patience=3), scaled=True)
    assert [guard.check(k, math.nan, math.nan)[0] for k in range(40)] == [False] * 40
    assert not guard.doubtful


def test_remedies_name_keys_that_exist() -> None:
    scaler = LossScaler(GuardConfig(max_skipped_updates=1))
    guards = [LossGuard(GuardConfig(nan_patience=1)), LossGuard(GuardConfig(spike_patience=1))]
    for k in range(40):
        guards[1].check(k, 2.0, 1.0)
    known = asdict(PhaseConfig())
    for stop in (
        lambda: scaler.update(True),
        lambda: guards[0].check(1, math.nan, 1.0),
        lambda: guards[1].check(40, 99.0, 1.0),
    ):
        with pytest.raises(TrainingStopped) as stopped:
            stop()
        keys = re.findall(r"phases\.N\.schedule\.(\w+)", stopped.value.remedy)
        assert keys and set(keys) <= set(known["schedule"])


def test_spikes_are_reported_and_stop_only_if_asked() -> None:
    report_only = LossGuard(GuardConfig(spike_factor=3))
    strict = LossGuard(GuardConfig(spike_factor=3, spike_patience=2))
    assert strict.check(0, 100.0, 1.0) == (True, "")  # too early to tell
    for guard in (report_only, strict):
        for k in range(40):
            assert guard.check(k, 2.0 + 0.1 * (k % 3), 1.0) == (True, "")
    for k in range(10):
        apply, odd = report_only.check(40 + k, 9.0, 1.0)
        assert apply and "times the median" in odd
    strict.check(40, 9.0, 1.0)
    restored = LossGuard(GuardConfig(spike_factor=3, spike_patience=2))
    restored.load(json.loads(json.dumps(strict.state())))
    with pytest.raises(TrainingStopped, match="spike_patience=2"):
        restored.check(41, 9.0, 1.0)


@pytest.mark.parametrize(
    "names, sent",
    [(["USR2"], "SIGUSR2"), (["SIGTERM", "SIGUSR1"], "SIGTERM"), (["SIGUSR1"], "SIGUSR1")],
)
def test_b51_the_first_signal_is_noted_and_the_second_ignored(names, sent, capfd) -> None:
    before = signal.getsignal(signal.Signals[sent])
    with StopSignals(names) as stop:
        assert stop.received == ""
        os.kill(os.getpid(), signal.Signals[sent])
        assert stop.received == sent
        os.kill(os.getpid(), signal.Signals[sent])  # would end the process if it were not caught
        assert stop.received == sent
    assert capfd.readouterr().err.count("saving at the next update") == 1
    assert signal.getsignal(signal.Signals[sent]) == before


def test_only_a_second_interrupt_some_time_after_the_first_leaves_at_once(monkeypatch) -> None:
    with StopSignals(["SIGINT", "SIGTERM"]) as stop:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)  # the same one, passed on by a launcher
        assert stop.received == "SIGINT"
        monkeypatch.setattr("pretrain.guard._SAME_S", -1.0)
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def test_signals_that_are_none_are_refused() -> None:
    with pytest.raises(UserError, match="SIGFOO"):
        StopSignals(["SIGFOO"])
    with pytest.raises(UserError, match="cannot be caught"):
        StopSignals(["KILL"])
