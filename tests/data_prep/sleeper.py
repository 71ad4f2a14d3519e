"""A task that says where it runs and then takes long."""

from __future__ import annotations

import os
import time
from pathlib import Path


def sleep_long(folder: str, item: int) -> None:
    (Path(folder) / str(os.getpid())).touch()
    time.sleep(600)
