"""Which signals end a training in good order (guard.save_signals)."""

from __future__ import annotations

import signal

from configs.errors import UserError


def save_signal(name: str) -> signal.Signals:
    """SIGUSR1 of "USR1" or "SIGUSR1".

    Raises:
        UserError: no signal of this system, or one that cannot be caught.
    """
    try:
        number = signal.Signals[name if name.startswith("SIG") else f"SIG{name}"]
    except KeyError:
        raise UserError(
            f"guard.save_signals: {name} is not a signal of this system",
            "for example SIGTERM, SIGUSR1 or SIGUSR2",
        ) from None
    if number in (signal.SIGKILL, signal.SIGSTOP):
        raise UserError(f"guard.save_signals: {name} cannot be caught", "use SIGTERM or SIGUSR1")
    return number
