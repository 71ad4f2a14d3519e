"""Whether tensor-parallel ranks share out the tokens between products: one rule for the trainer, its
checks before torch is imported, and the planner."""

from __future__ import annotations

from configs.schema import TrainConfig

SMALLEST = 16  # tokens: every micro-batch has a multiple of it (pretrain.data.packing)


def may_share(tp: int, wanted: bool | None) -> bool:
    """Whether tokens are shared out by copy engines where these reach, else by collectives if `wanted`.

    wanted: parallel.sequence_parallel. A tp that does not divide SMALLEST has no even shares.
    """
    return tp > 1 and wanted is not False and SMALLEST % tp == 0


def copy_engines_serve(train: TrainConfig) -> bool:
    """Whether the kernels on a GPU add up what copy engines bring: the fused ones, but for fp8's."""
    return train.kernels == "auto" and train.precision != "fp8"
