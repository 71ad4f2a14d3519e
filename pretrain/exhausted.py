"""What has run out on this machine, as an error that says what to do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from configs.errors import UserError, refusal
from configs.sharing import SMALLEST
from pretrain.checks import Plan
from pretrain.data.packing import round_up

_SHARE_OUT = "raise parallel.tp, or use parallel.zero_stage=1, on more processes"


@contextmanager
def told(plan: Plan, setting_up: bool = False) -> Iterator[None]:
    """Raises UserError where GPU memory or the disk runs out inside, which other ranks are to hear of.

    Args:
        setting_up: before the first micro-batch.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        why = str(error).splitlines()[0]
        raise (_set_up(why) if setting_up else _trained(plan, why)) from None
    except OSError as error:
        if not (known := refusal(error)):
            raise
        raise known from None


def _set_up(why: str) -> UserError:
    return UserError(
        f"GPU memory ran out while the model and its optimiser were set up: {why}",
        f"end what else uses the card, or {_SHARE_OUT}",
    )


def _trained(plan: Plan, why: str) -> UserError:
    parallel, tokens = plan.recipe.parallel, plan.micro_batch_tokens
    longest = max(round_up(s.max_length, SMALLEST) for s in plan.shards.values())
    less = max(longest, tokens * 3 // 4 // SMALLEST * SMALLEST)
    ways = []
    if less < tokens:
        lower = " or lower" if less > longest else ", which is the longest row"
        ways.append(f"set parallel.micro_batch_tokens={less}{lower}")
    if not parallel.activation_checkpointing:
        ways.append("set parallel.activation_checkpointing=true")
    return UserError(
        f"GPU memory ran out with micro-batches of {tokens} tokens: {why}",
        f"{', or '.join([*ways, _SHARE_OUT])}; results do not depend on any of these",
    )
