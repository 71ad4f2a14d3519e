"""A training that has so many minutes instead of so many updates.

The learning rate follows the share of the time that is spent, so that it reaches its end when the
time does, on any card (24hBERT, 2104.07705; Cramming, 2212.14034). The clock starts after the first
FREE_UPDATES of a process, which compile. It counts training only, not evaluation nor saving.
With several phases each but the last ends after its updates or at its share of the minutes (`until`),
whichever is first, and the schedule of each is stretched over all the minutes: equal schedules are
one curve that the phases share.
"""

from __future__ import annotations

FREE_UPDATES = 10
CLOCK_STARTS = "the clock starts"  # an event of the log, at the end of the free updates


class TimeBudget:
    """Seconds of training, spent and left. With `minutes` 0 there is no limit.

    Args:
        clock, spent: by earlier starts of the run, from its checkpoint; spent: None = as the clock.

    `clock` is this process's own count; `spent` is what all processes go by, which must be the
    same on all of them: the trainer sets it to rank 0's clock in each update, as it stood before.
    """

    def __init__(self, minutes: float, clock: float = 0.0, spent: float | None = None) -> None:
        self.seconds = 60 * minutes
        self.clock = clock
        self.spent = clock if spent is None else spent
        self._updates = 0

    def add(self, seconds: float) -> bool:
        """Counts one finished update; the free ones count nothing. True for the last free one of a
        limited training: the clock starts."""
        self._updates += 1
        if self._updates > FREE_UPDATES:
            self.clock += seconds
        return self.seconds > 0 and self._updates == FREE_UPDATES

    def position(self, update: int, steps: int) -> float:
        """Where the schedule of a phase of so many steps stands at its `update` (from 1): in
        updates, not whole."""
        if not self.seconds:
            return update
        return 1 + min(1.0, self.spent / self.seconds) * (steps - 1)

    def reached(self, share: float) -> bool:
        """Is so much of the time spent? Never without a limit, nor for a share of 0 (none is set)."""
        return self.seconds > 0 and share > 0 and self.spent >= share * self.seconds

    @property
    def over(self) -> bool:
        return self.reached(1.0)
