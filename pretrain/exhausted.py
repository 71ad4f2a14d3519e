"""What has run out on this machine, as an error that says what to do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from configs.errors import UserError
from pretrain.checks import Plan


@contextmanager
def memory_told(plan: Plan, setting_up: bool = False) -> Iterator[None]:
    """Raises UserError where GPU memory runs out inside. setting_up: before the first micro-batch."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        why = str(error).splitlines()[0]
        raise (_set_up(why) if setting_up else _trained(plan, why)) from None


def _set_up(why: str) -> UserError:
    return UserError(
        f"GPU memory ran out while the model and its optimiser were set up: {why}",
        "end what else uses the card, or raise parallel.tp, or use parallel.zero_stage=1, "
        "on more processes",
    )


def _trained(plan: Plan, why: str) -> UserError:
    tokens = plan.micro_batch_tokens
    return UserError(
        f"GPU memory ran out with micro-batches of {tokens} tokens: {why}",
        f"set parallel.micro_batch_tokens={max(128, tokens * 3 // 4 // 128 * 128)} or lower, or "
        "parallel.activation_checkpointing=true; results do not depend on either",
    )
