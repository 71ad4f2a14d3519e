"""A training that has so many minutes instead of so many updates.

The learning rate follows the share of the time that is spent, so that it reaches its end when the
time does, on any card (24hBERT, 2104.07705; Cramming, 2212.14034). The clock starts after the first
FREE_UPDATES of a process, which compile. It counts training only, not evaluation nor saving.
With several phases each but the last ends after its updates, and the schedule of each is stretched
over all the minutes: equal schedules are one curve that the phases share.
"""

from __future__ import annotations

FREE_UPDATES = 10
CLOCK_STARTS = "the clock starts"  # an event of the log, at the end of the free updates


class TimeBudget:
    """Seconds of training, spent and left. With `minutes` 0 there is no limit.

    Args:
        spent: by earlier starts of the run, from its checkpoint.

    `clock` is this process's own count; `spent` is what all processes go by, which must be the
    same on all of them: the trainer sets it to rank 0's clock in each update.
    """

    def __init__(self, minutes: float, spent: float = 0.0) -> None:
        self.seconds = 60 * minutes
        self.clock = self.spent = spent
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

    @property
    def over(self) -> bool:
        return self.seconds > 0 and self.spent >= self.seconds
