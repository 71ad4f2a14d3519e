"""Progress for people: a bar with an ETA on a terminal, a plain line now and then in a log."""

from __future__ import annotations

import sys
import time


def say(message: str) -> None:
    """Prints one line at once, so that logs of several processes stay readable."""
    print(message, flush=True)


def duration(seconds: float) -> str:
    """3725 -> '1:02:05', 65 -> '1:05'."""
    minutes, s = divmod(int(seconds + 0.5), 60)
    hours, m = divmod(minutes, 60)
    return f"{hours}:{m:02d}:{s:02d}" if hours else f"{m}:{s:02d}"


class Progress:
    """Counts towards `total` units. On a terminal tqdm draws it; elsewhere one line each `every_s`.

    `done` units count as finished before the start (a resumed run), so that the rate and the ETA
    speak of this run alone.
    """

    def __init__(
        self,
        total: int,
        what: str,
        unit: str = "it",
        done: int = 0,
        every_s: float = 10.0,
        quiet: bool = False,
    ) -> None:
        self.total, self.what, self.unit, self.n, self.start_n = total, what, unit, done, done
        self.every_s, self.quiet = every_s, quiet
        self.start = self.last_line = time.monotonic()
        self._bar = None
        if sys.stderr.isatty() and not quiet:
            from tqdm import tqdm

            self._bar = tqdm(
                total=total, desc=what, unit=unit, initial=done, dynamic_ncols=True, unit_scale=True
            )

    def update(self, n: int = 1, note: str = "") -> None:
        """Advances by `n` units; `note` (a loss, a file name) is shown beside the count."""
        self.n += n
        if self._bar is not None:
            if note:
                self._bar.set_postfix_str(note, refresh=False)
            self._bar.update(n)
            return
        now = time.monotonic()
        if not self.quiet and (now - self.last_line >= self.every_s or self.n >= self.total):
            self.last_line = now
            rate = (self.n - self.start_n) / max(now - self.start, 1e-9)
            eta = duration((self.total - self.n) / rate) if rate > 0 else "?"
            share = 100 * self.n / self.total if self.total else 100
            tail = f" | {note}" if note else ""
            say(
                f"{self.what}: {self.n}/{self.total} {self.unit} ({share:.0f}%), {rate:.3g} {self.unit}/s, ETA {eta}{tail}"
            )

    def expect(self, total: int) -> None:
        """Counts towards another number from now on."""
        self.total = total
        if self._bar is not None:
            self._bar.total = total

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
