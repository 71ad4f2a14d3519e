"""When training must skip an update, save and leave, or stop: decisions without collectives.

Everything here is fed with numbers that are equal on all ranks (all-reduced losses and norms), so
that all ranks decide alike; only a signal reaches ranks at different times: whether any of them has
one travels in the trainer's all-reduced figures.
"""

from __future__ import annotations

import math
import os
import signal
import time
from collections import deque
from collections.abc import Sequence
from statistics import median
from types import FrameType
from typing import Any

from configs import UserError
from configs.errors import DIVERGED_EXIT
from configs.schema import GuardConfig
from configs.signals import save_signal

_HISTORY = 101  # losses of the running median
_ENOUGH = 20  # of them before a spike can be told
_SAME_S = 3.0  # one Ctrl-C may come twice: from the terminal and passed on by a launcher


class TrainingStopped(UserError):
    """The guard's patience is over; what was saved before stays as it is."""

    exit_code = DIVERGED_EXIT


class LossScaler:
    """fp16's dynamic loss scale (1710.03740, section 3.2) as a state machine.

    A skipped update still counts as an update: the learning rate and the data go on, so that all
    precisions see the same rows at the same rate.
    """

    GROWTH_INTERVAL = 1000  # good updates before the scale doubles
    CEILING = 2.0**24

    def __init__(self, config: GuardConfig) -> None:
        self.floor, self.max_skipped = config.min_loss_scale, config.max_skipped_updates
        self.scale = max(config.initial_loss_scale, self.floor)
        self.good = self.skipped = 0

    def update(self, overflow: bool) -> None:
        """Takes the outcome of a backward pass, of which an overflow is skipped.

        Raises:
            TrainingStopped: `max_skipped_updates` were skipped in a row.
        """
        if not overflow:
            self.skipped, self.good = 0, self.good + 1
            if self.good >= self.GROWTH_INTERVAL:
                self.good, self.scale = 0, min(self.scale * 2, max(self.CEILING, self.floor))
            return
        self.good, self.skipped = 0, self.skipped + 1
        self.scale = max(self.scale / 2, self.floor)
        if self.skipped >= self.max_skipped:
            raise TrainingStopped(
                f"fp16 gradients overflowed in {self.skipped} updates in a row (loss scale {self.scale:g})",
                "lower phases.N.schedule.lr, or train with train.precision=bf16; "
                "guard.max_skipped_updates is the patience",
            )

    def state(self) -> dict[str, Any]:
        """For the checkpoint: plain numbers."""
        return {"scale": self.scale, "good": self.good, "skipped": self.skipped}

    def load(self, state: dict[str, Any]) -> None:
        """The inverse of `state`; the scale is never below the floor of this run."""
        self.scale = max(float(state["scale"]), self.floor)
        self.good, self.skipped = int(state["good"]), int(state["skipped"])


class LossGuard:
    """Watches the loss and the gradient norm of the whole global batch.

    With a loss scaler (fp16) values that are not finite are the scaler's business and only skip.
    """

    def __init__(self, config: GuardConfig, scaled: bool = False) -> None:
        self.config, self.scaled = config, scaled
        self.recent: deque[float] = deque(maxlen=_HISTORY)
        self.bad = self.spikes = 0

    @property
    def doubtful(self) -> bool:
        """Updates are being skipped, and it may end in a stop; not of fp16, which skips as it goes."""
        return self.bad > 0 and not self.scaled

    def check(self, step: int, loss: float, grad_norm: float) -> tuple[bool, str]:
        """(is this update applied?, what was odd about it or ""). The device decides by the same rule
        and may be ahead: no more is saved of an update that this raises for.

        Raises:
            TrainingStopped: nan_patience or spike_patience is used up; says which number.
        """
        if not (math.isfinite(loss) and math.isfinite(grad_norm)):
            self.bad += 1
            odd = f"update {step} skipped: loss {loss}, gradient norm {grad_norm}"
            if not self.scaled and self.bad >= self.config.nan_patience:
                raise TrainingStopped(
                    f"{odd}: {self.bad} in a row (guard.nan_patience={self.config.nan_patience})",
                    f"go on from a checkpoint of before update {step - self.bad + 1}, with a lower "
                    "phases.N.schedule.lr or a longer phases.N.schedule.warmup",
                )
            return False, odd
        self.bad = 0
        usual = median(self.recent) if len(self.recent) >= _ENOUGH else math.inf
        if loss <= self.config.spike_factor * usual:
            self.spikes = 0
            self.recent.append(loss)  # a spike does not become the measure of the next
            return True, ""
        self.spikes += 1
        odd = f"update {step}: loss {loss:.4g} is {loss / usual:.1f} times the median {usual:.4g}"
        if self.config.spike_patience and self.spikes >= self.config.spike_patience:
            raise TrainingStopped(
                f"{odd}: {self.spikes} in a row (guard.spike_patience={self.config.spike_patience})",
                "go back to an earlier checkpoint, lower phases.N.schedule.lr or lengthen "
                "phases.N.schedule.warmup",
            )
        return True, odd

    def state(self) -> dict[str, Any]:
        """For the checkpoint: plain numbers."""
        return {"recent": list(self.recent), "bad": self.bad, "spikes": self.spikes}

    def load(self, state: dict[str, Any]) -> None:
        """The inverse of `state`."""
        self.recent = deque((float(x) for x in state["recent"]), maxlen=_HISTORY)
        self.bad, self.spikes = int(state["bad"]), int(state["spikes"])


class StopSignals:
    """Notes the first of the configured signals; training saves at its next update and leaves.

    Later ones are ignored, so that a scheduler that sends TERM twice does not cut the save off;
    only a second SIGINT (Ctrl-C) means what it says: KeyboardInterrupt.

    Raises:
        UserError: a name that is no signal, or one that cannot be caught.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self.numbers = [save_signal(name) for name in names]
        self.received, self._at = "", 0.0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopSignals:
        self._before = {number: signal.signal(number, self._note) for number in self.numbers}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def ignore(self) -> None:
        """From now to the end of the process: a second TERM must not change the exit code."""
        for number in self.numbers:
            signal.signal(number, signal.SIG_IGN)
        self._before = dict.fromkeys(self.numbers, signal.SIG_IGN)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if not self.received:
            self.received, self._at = signal.Signals(number).name, time.monotonic()
            # os.write: a handler may interrupt a print to the same stream
            os.write(2, f"{self.received}: saving at the next update, then leaving\n".encode())
        elif number == signal.SIGINT and time.monotonic() - self._at > _SAME_S:
            raise KeyboardInterrupt
