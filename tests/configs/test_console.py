"""Progress: lines of a log and the bar of a terminal, towards a number of units or a time's end."""

from __future__ import annotations

import io
import math
import re
import sys
from types import SimpleNamespace

import pytest

from configs import console
from configs.console import Progress, duration


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The time that a progress sees, which a test sets."""
    time = SimpleNamespace(s=100.0)
    monkeypatch.setattr(console, "time", SimpleNamespace(monotonic=lambda: time.s))
    return time


@pytest.mark.parametrize(
    ("total", "done", "made", "took", "spent", "line"),
    [
        # no limit of time
        (1000, 0, 100, 50, None, "100/1000 updates (10%), 2 updates/s, ETA 7:30"),
        (1000, 900, 20, 10, None, "920/1000 updates (92%), 2 updates/s, ETA 0:40"),
        (1000, 900, 0, 10, None, "900/1000 updates (90%), 0 updates/s, ETA ?"),
        (1000, 900, 100, 50, None, "1000/1000 updates (100%), 2 updates/s, ETA 0:00"),
        # five minutes, in which the updates cannot be made; the first ones cost none of them
        (45198, 0, 22901, 317, 297.6, "22901 updates (99% of 5 min), 72.2 updates/s, ETA 0:02"),
        (45198, 0, 10, 60, 0.0, "10 updates (0% of 5 min), 0.167 updates/s, ETA 5:00"),
        (45198, 0, 0, 60, 0.0, "0 updates (0% of 5 min), 0 updates/s, ETA 5:00"),
        (45198, 0, 23099, 320, 300.1, "23099 updates (100% of 5 min), 72.2 updates/s, ETA 0:00"),
        # resumed on a slower machine: what the earlier ones made says nothing of the end
        (45198, 20000, 60, 60, 240.0, "20060 updates (80% of 5 min), 1 updates/s, ETA 1:00"),
        # the updates (of train.stop_at, or few) end before the time does
        (1000, 0, 500, 50, 50.0, "500/1000 updates (50%), 10 updates/s, ETA 0:50"),
        (20100, 20000, 60, 60, 240.0, "20060/20100 updates (100%), 1 updates/s, ETA 0:40"),
        (1000, 0, 1000, 50, 50.0, "1000/1000 updates (100%), 20 updates/s, ETA 0:00"),
    ],
)
def test_a_line_goes_towards_what_ends_the_work_first(
    now, capsys, total, done, made, took, spent, line
) -> None:
    clock = None if spent is None else SimpleNamespace(seconds=300.0, spent=0.0)
    with Progress(total, "train", "updates", done=done, every_s=0, clock=clock) as progress:
        now.s += took
        if clock:
            clock.spent = spent
        progress.update(made, "loss 2")
    assert capsys.readouterr().out == f"train: {line} | loss 2\n"


def test_a_clock_without_a_limit_is_none(now, capsys) -> None:
    unlimited = SimpleNamespace(seconds=0.0, spent=70.0)
    with Progress(4, "train", "updates", every_s=0, clock=unlimited) as progress:
        now.s += 2
        progress.update()
    assert capsys.readouterr().out == "train: 1/4 updates (25%), 0.5 updates/s, ETA 0:06\n"


def test_lines_come_now_and_then_and_at_the_end_of_either(now, capsys) -> None:
    for seconds in (0.0, 20.0):
        clock = SimpleNamespace(seconds=seconds, spent=0.0)
        with Progress(10**6 if seconds else 20, "train", "updates", clock=clock) as progress:
            for clock.spent in range(1, 21):
                now.s += 1
                progress.update()
        shares = re.findall(r"\((\d+)%", capsys.readouterr().out)
        assert shares == ["50", "100"]


def test_another_number_of_units_may_be_expected(now, capsys) -> None:
    with Progress(100, "train", "updates", every_s=0) as progress:
        progress.expect(20)
        now.s += 10
        progress.update(10)
    assert capsys.readouterr().out == "train: 10/20 updates (50%), 1 updates/s, ETA 0:10\n"


def terminal(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    screen = io.StringIO()
    screen.isatty = lambda: True  # type: ignore[method-assign]
    monkeypatch.setattr(sys, "stderr", screen)
    return screen


def test_the_bar_of_a_terminal_goes_the_same_way(now, monkeypatch) -> None:
    screen = terminal(monkeypatch)

    def drawn() -> str:
        assert progress._bar is not None
        progress._bar.refresh()
        return screen.getvalue().split("\r")[-1]

    clock = SimpleNamespace(seconds=300.0, spent=0.0)
    with Progress(45198, "train", "updates", clock=clock) as progress:
        assert re.search(r"train: 0% of 5 min\| +\| 0\.00 \[.*<5:00, ", drawn())
        now.s, clock.spent = 250, 150.0
        progress.update(11000, "loss 2")
        assert re.search(r"train: 50% of 5 min\|#{5} {5}\| 11\.0k \[.*<2:30, .*, loss 2\]", drawn())
        progress.expect(11100)  # in two seconds
        progress.update(0)
        assert re.search(r"train: +99%\|.*\| 11\.0k/11\.1k \[.*, loss 2\]", drawn())


def test_the_bar_without_a_clock_is_tqdms_own(now, monkeypatch) -> None:
    screen = terminal(monkeypatch)
    with Progress(40, "read", "parts", done=10) as progress:
        progress.update(10)
        progress.expect(80)
        progress.update(10)
        assert progress._bar is not None
        progress._bar.refresh()
    assert re.search(r"read: +38%\|.*\| 30\.0/80\.0 \[", screen.getvalue())


def test_durations() -> None:
    assert [duration(s) for s in (0, 65, 3725, math.inf)] == ["0:00", "1:05", "1:02:05", "?"]
