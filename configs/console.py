"""Progress for people: a bar with an ETA on a terminal, a plain line now and then in a log."""

from __future__ import annotations

import math
import sys
import time
from dataclasses import dataclass
from typing import Protocol


def say(message: str) -> None:
    """Prints one line at once, so that logs of several processes stay readable."""
    print(message, flush=True)


def duration(seconds: float) -> str:
    """3725 -> '1:02:05', 65 -> '1:05'; '?' for inf."""
    if seconds == math.inf:
        return "?"
    minutes, s = divmod(int(seconds + 0.5), 60)
    hours, m = divmod(minutes, 60)
    return f"{hours}:{m:02d}:{s:02d}" if hours else f"{m}:{s:02d}"


class Clock(Protocol):
    """Time that work may take: `spent` of so many `seconds`; without a limit they are 0."""

    seconds: float
    spent: float


@dataclass
class Goal:
    """What work goes towards: a number of units, or the end of a time.

    timed: the latter. count: '40/150' or, timed, '40'. share: '27%' or '27% of 5 min'. reached: 1 at
    the end. left: seconds, inf = unknown.
    """

    timed: bool
    count: str
    share: str
    reached: float
    left: float


def units_goal(n: int, total: int, rate: float) -> Goal:
    """rate: units a second, 0 = unknown."""
    reached = n / total if total else 1.0
    left = max(total - n, 0) / rate if rate > 0 else math.inf
    return Goal(False, f"{n}/{total}", f"{100 * reached:.0f}%", reached, left)


def time_goal(n: int, seconds: float, spent: float) -> Goal:
    """n: units made in the time that is spent."""
    reached = min(spent / seconds, 1.0)
    share = f"{100 * reached:.0f}% of {seconds / 60:g} min"
    return Goal(True, str(n), share, reached, max(seconds - spent, 0.0))


class Progress:
    """Counts towards `total` units. On a terminal tqdm draws it; elsewhere one line each `every_s`.

    `done` units count as finished before the start (a resumed run), so that the rate and the ETA
    speak of this run alone. With the limit of a `clock` the goal is whichever ends the work first.
    """

    def __init__(
        self,
        total: int,
        what: str,
        unit: str = "it",
        done: int = 0,
        every_s: float = 10.0,
        quiet: bool = False,
        clock: Clock | None = None,
    ) -> None:
        self.total, self.what, self.unit, self.n, self.start_n = total, what, unit, done, done
        self.every_s, self.quiet, self.clock = every_s, quiet, clock
        self.start = self.last_line = time.monotonic()
        self._bar = None
        if sys.stderr.isatty() and not quiet:
            from tqdm import tqdm

            self._bar = tqdm(
                total=total, desc=what, unit=unit, initial=done, dynamic_ncols=True, unit_scale=True
            )
            self._aim()
            self._bar.refresh()

    def update(self, n: int = 1, note: str = "") -> None:
        """Advances by `n` units; `note` (a loss, a file name) is shown beside the count."""
        self.n += n
        if self._bar is not None:
            if note:
                self._bar.set_postfix_str(note, refresh=False)
            self._aim()
            self._bar.update(n)
            return
        now, goal = time.monotonic(), self.goal
        if not self.quiet and (now - self.last_line >= self.every_s or goal.reached >= 1):
            self.last_line = now
            tail = f" | {note}" if note else ""
            say(
                f"{self.what}: {goal.count} {self.unit} ({goal.share}), {self.rate:.3g} {self.unit}/s, "
                f"ETA {duration(goal.left)}{tail}"
            )

    def expect(self, total: int) -> None:
        """Counts towards another number from now on."""
        self.total = total

    @property
    def rate(self) -> float:
        """Of this run, units a second."""
        return (self.n - self.start_n) / max(time.monotonic() - self.start, 1e-9)

    @property
    def goal(self) -> Goal:
        """The nearer one."""
        units = units_goal(self.n, self.total, self.rate)
        if self.clock is None or not self.clock.seconds:
            return units
        timed = time_goal(self.n, self.clock.seconds, self.clock.spent)
        return min(units, timed, key=lambda goal: goal.left)

    def _aim(self) -> None:
        """The bar is drawn towards the goal: of a time in its words, of units in tqdm's own."""
        if self._bar is None:
            return
        goal = self.goal
        of_time = goal.timed and goal.reached > 0
        self._bar.total = self.n / goal.reached if of_time else self.total
        words = f"{goal.share}|{{bar}}| {{n_fmt}} [{{elapsed}}<{duration(goal.left)}, {{rate_fmt}}"
        self._bar.bar_format = f"{{desc}}: {words}{{postfix}}]" if goal.timed else None

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
