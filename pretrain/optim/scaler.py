"""Dynamic loss scale for fp16 (1710.03740): halved on overflow, doubled after calm updates."""

from __future__ import annotations


class LossScaler:
    """scale stays 1 where `enabled` is False (fp32, bf16).

    Args:
        initial, floor: first and smallest scale. calm: updates without overflow before doubling.
    """

    def __init__(self, enabled: bool, initial: float, floor: float, calm: int = 1000) -> None:
        self.enabled, self.floor, self.calm_needed = enabled, floor, calm
        self.scale = initial if enabled else 1.0
        self.calm = 0
        self.skipped = 0  # updates skipped in a row

    def update(self, skipped: bool) -> None:
        """Called once per update, on every rank with the same answer."""
        self.skipped = self.skipped + 1 if skipped else 0
        self.calm = 0 if skipped else self.calm + 1
        if not self.enabled:
            return
        if skipped:
            self.scale = max(self.floor, self.scale / 2)
        elif self.calm >= self.calm_needed:
            self.scale, self.calm = self.scale * 2, 0

    def state(self) -> dict[str, float]:
        return {"scale": self.scale, "calm": self.calm, "skipped": self.skipped}

    def load(self, state: dict[str, float]) -> None:
        if self.enabled:
            self.scale = max(self.floor, float(state["scale"]))
            self.calm, self.skipped = int(state["calm"]), int(state["skipped"])
