"""What ranks find out about each other when a training comes up."""

from __future__ import annotations

import os

import torch.distributed as dist

from tests.trainer.launch import world

MASKS = [range(8), range(8), range(8, 14)]


def threads() -> int:
    from pretrain import starting

    os.sched_getaffinity = lambda _: set(MASKS[dist.get_rank()])  # type: ignore[assignment]
    return starting._threads()


def test_ranks_share_the_cpus_that_both_may_use_and_no_others() -> None:
    assert world(3, "tests.trainer.test_starting:threads") == [4, 4, 6]
