"""Who this process is among tp x dp, and the process groups of both directions.

World = dp x tp, tensor-parallel ranks next to each other (so that they share a node). Megatron-core
makes the groups; with tp 1 nothing of it is imported.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Groups:
    """With tp 1 or dp 1 no collective of that direction is ever called, and its group may be None."""

    tp: int
    dp: int
    tp_rank: int
    dp_rank: int
    tp_group: Any = None
    dp_group: Any = None

    @property
    def rank(self) -> int:
        return self.dp_rank * self.tp + self.tp_rank

    @property
    def world(self) -> int:
        return self.tp * self.dp


SINGLE = Groups(1, 1, 0, 0)


def make_groups(tp: int, world: int, rank: int) -> Groups:
    """Groups of this process; torch.distributed must be initialised when world > 1."""
    if world == 1:
        return SINGLE
    import torch.distributed as dist

    if tp == 1:
        return Groups(1, world, 0, rank, None, dist.group.WORLD)
    from megatron.core import parallel_state

    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    with warnings.catch_warnings():
        # Megatron-core gives each group's timeout twice; torch 2.11 says so for every one of them.
        warnings.filterwarnings("ignore", "backend_options._timeout", UserWarning)
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=tp,
            create_gloo_process_groups=False,
            # On GPUs its kernels get the first multiprocessors that come free.
            high_priority_stream_groups=["tp"] if dist.get_backend() == "nccl" else None,
        )
    dp = world // tp
    return Groups(
        tp,
        dp,
        parallel_state.get_tensor_model_parallel_rank(),
        parallel_state.get_data_parallel_rank(),
        parallel_state.get_tensor_model_parallel_group(),
        parallel_state.get_data_parallel_group(),
    )
