"""The progress of transformers' Trainer in this project's form."""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback

from configs import Progress


class Shown(TrainerCallback):
    """A bar or, without a terminal, a line now and then, of updates and then of batches scored.

    The Trainer's own callback prints dicts that say neither of which run they are nor how far it is.
    """

    def __init__(self, what: str) -> None:
        self.what = what
        self.bar: Progress | None = None

    def begin(self, total: int, what: str, unit: str) -> None:
        """Counts anew, up to `total`."""
        self.close()
        self.bar = Progress(total, f"{self.what}: {what}" if what else self.what, unit)

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.begin(state.max_steps, "", "updates")

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        loss = next((log["loss"] for log in reversed(state.log_history) if "loss" in log), None)
        self._advance("" if loss is None else f"loss {loss:.4f}")

    def on_prediction_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._advance()

    def close(self) -> None:
        if self.bar is not None:
            self.bar.close()

    def _advance(self, note: str = "") -> None:
        if self.bar is not None:
            self.bar.update(note=note)
