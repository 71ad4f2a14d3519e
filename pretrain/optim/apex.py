"""Whether NVIDIA's apex is here."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from configs.errors import UserError

_APEX = "build NVIDIA apex with its CUDA extensions, or use optimizer.implementation=lambert"


def check_apex() -> None:
    """NVIDIA's apex with its compiled part; PyPI's `apex` is another package of that name (B35)."""
    if find_spec("apex") is None:
        raise UserError("optimizer.implementation=apex: apex is not installed", _APEX)
    if find_spec("amp_C") is None:
        foreign = not any(
            (Path(folder) / "optimizers" / "fused_lamb.py").is_file()
            for folder in (find_spec("apex").submodule_search_locations or [])  # type: ignore[union-attr]
        )
        what = "is not NVIDIA's" if foreign else "was installed without its CUDA part (amp_C)"
        raise UserError(f"optimizer.implementation=apex: the installed apex {what}", _APEX)
