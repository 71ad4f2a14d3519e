"""The real text that the benches read."""

from __future__ import annotations

import os
from pathlib import Path

REPO = Path(__file__).resolve().parents[1]


def data_folder() -> Path:
    """$LAMBERT_DATA, or ../shared/data beside the checkout, from wherever a bench is started."""
    return Path(os.environ.get("LAMBERT_DATA", REPO.parent / "shared" / "data")).resolve()
