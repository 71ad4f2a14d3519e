"""Which LAMB may be used where: the others are refused, with the reason, where they are not exact."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from configs.errors import UserError
from configs.schema import Recipe

_APEX = "build NVIDIA apex with its CUDA extensions, or use optimizer.implementation=lambert"


def check_implementation(recipe: Recipe, world: int) -> None:
    """Other LAMBs see whole tensors or are wrong: refuses them, with the reason, where they are."""
    name, optimizer = recipe.optimizer.implementation, recipe.optimizer
    tp = recipe.parallel.tp
    if (
        tp > 1
        or (recipe.parallel.zero_stage > 0 and world > 1)
        or recipe.parallel.engine == "deepspeed"
    ):
        raise UserError(
            f"optimizer.implementation={name} takes each tensor's norm on one rank, which is wrong "
            f"where tensors are cut (tp={tp}, zero_stage={recipe.parallel.zero_stage}, {world} processes)",
            "use optimizer.implementation=lambert, or tp=1 with zero_stage=0",
        )
    if optimizer.orthogonal_lr > 0 and name in ("deepspeed", "apex"):
        raise UserError(
            f"optimizer.implementation={name} knows no optimizer.orthogonal_lr",
            "use optimizer.implementation=lambert, or set orthogonal_lr to 0",
        )
    if name == "deepspeed" and optimizer.bias_correction:
        raise UserError(
            "optimizer.implementation=deepspeed: FusedLamb corrects the bias after the trust ratio, "
            "which is not LAMB (1904.00962, algorithm 2)",
            "use optimizer.implementation=lambert, or optimizer.bias_correction=false",
        )
    if name == "deepspeed" and not optimizer.adapt_bias_and_norm:
        raise UserError(
            "optimizer.implementation=deepspeed adapts every tensor",
            "set optimizer.adapt_bias_and_norm=true",
        )
    if name == "apex":
        if optimizer.trust_ratio_min or optimizer.trust_ratio_max:
            raise UserError(
                "optimizer.implementation=apex: FusedLAMB has no limits of the trust ratio",
                "set trust_ratio_min and trust_ratio_max to 0",
            )
        check_apex()


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
