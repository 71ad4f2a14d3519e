"""How much of a row is masked: masking.probability, or a phase's own rate (mask_probability).

A rate that falls during training is that of 2305.15096.
"""

from __future__ import annotations

from dataclasses import replace

from configs.errors import UserError
from configs.schema import MaskingConfig, PhaseConfig, Recipe


def masking_of(recipe: Recipe, phase: PhaseConfig) -> MaskingConfig:
    """`masking` at the rate of a phase."""
    rate = phase.mask_probability or recipe.masking.probability
    return replace(recipe.masking, probability=rate)


def highest_rate(recipe: Recipe, name: str = "") -> float:
    """Of what the set `name` ("": any) is used for: its phases, and evaluation at masking.probability."""
    own = [phase.mask_probability for phase in recipe.phases if name in ("", phase.shards)]
    return max([recipe.masking.probability, *own])


def check_rate(number: int, phase: PhaseConfig, max_length: int, cap: int, static: bool) -> None:
    """A phase's own rate must be one that its rows can have.

    Args:
        number: of the phase, from 0. max_length, cap, static: longest row of its set, predictions a
            row at most, whether the masks stand in the set already.

    Raises:
        UserError: full rows would get fewer predictions than the rate asks for, or their masks are
            drawn already.
    """
    rate, shards = phase.mask_probability, f"shards.{phase.shards}"
    what = f"phases.{number}.mask_probability={rate:g}"
    if rate and static:
        raise UserError(
            f"{what}, and the rows of {shards} were masked when it was built (static_masks)",
            f"leave it out, or build the set with {shards}.static_masks=false",
        )
    wanted = round(rate * max_length)  # half to even, as masks are counted
    if wanted > cap:
        raise UserError(
            f"{what} is {wanted} tokens of a row of {max_length}, and {shards} keeps {cap} "
            "predictions a row (mask_cap)",
            f"lower it, or build the set anew with {shards}.mask_cap=0 (what the highest rate needs)",
        )


def check_masking(config: MaskingConfig) -> None:
    """Raises UserError: what is put in place of a masked token comes to more than all of them."""
    if (total := config.replace_mask + config.replace_random) > 1 + 1e-9:
        raise UserError(
            f"masking.replace_mask + masking.replace_random = {total:g}",
            "both are shares and leave the rest unchanged: 0.8 and 0.1 as published",
        )
