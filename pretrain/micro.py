"""Forward and backward pass of one micro-batch: run as they are, or recorded once as a CUDA graph.

A BERT layer is some forty kernel launches each way. Launched one by one from Python they take as
long as the kernels themselves on a fast GPU; replayed as a graph they cost nothing. One graph is
recorded for each shape (a few a phase: packing rounds tokens, rows and predictions up), all sharing
one memory pool, which is safe since they run one after the other. Both ways run the same kernels: the same bits.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pretrain.data.batches import GlobalBatch, MicroBatch


class Micro:
    """Adds a micro-batch's gradient to the engine's. Calling it returns the loss sums, fp32 [4]:
    mlm loss, nsp loss, mlm correct, nsp correct (see LossSums)."""

    def __init__(self, model: Any, engine: Any, nsp_weight: float = 1.0) -> None:
        self.model, self.engine, self.nsp_weight = model, engine, nsp_weight

    def __call__(self, micro: MicroBatch, batch: GlobalBatch, last: bool) -> Tensor:
        """last: no more follow in this update."""
        shares = micro.masked_weights.new_tensor(self.shares(batch))
        sums = self.model(micro)
        self.engine.backward(_loss(sums, shares), last)
        return torch.stack([x.detach().float() for x in sums])

    def shares(self, batch: GlobalBatch) -> tuple[float, float]:
        """What a masked token's loss, and a row's next-sentence loss, count in the update's."""
        return 1 / batch.masked_total, self.nsp_weight / batch.rows_total

    def close(self) -> None:
        """Before the process groups go, whatever ended the run: nothing to let go of."""


def _loss(sums: Any, shares: Tensor) -> Tensor:
    return sums.mlm_sum * shares[0] + sums.nsp_sum * shares[1]


class RecordedMicro(Micro):
    """The same through CUDA graphs: for the lean engine. Collectives are recorded too, those of
    tensor parallelism and the reduction of gradients that the last micro-batch overlaps; where it
    has one, a shape's last micro-batch has a graph of its own."""

    def __init__(self, model: Any, engine: Any, nsp_weight: float = 1.0) -> None:
        super().__init__(model, engine, nsp_weight)
        self.graphs: dict[tuple[int, ...], _Recording] = {}
        self.pool: Any = None
        self.max_length = 0

    def __call__(self, micro: MicroBatch, batch: GlobalBatch, last: bool) -> Tensor:
        if micro.max_length != self.max_length:
            # Rows of another length: the first run compiles kernels and makes what they keep.
            self.graphs.clear()
            torch.cuda.empty_cache()
            self.pool, self.max_length = torch.cuda.graph_pool_handle(), micro.max_length
            self.engine.warm_up()
            return super().__call__(micro, batch, last)
        reduces = last and self.engine.groups.dp > 1
        key = (int(reduces), *(t.numel() for t in micro.tensors().values()))
        if key not in self.graphs:
            self.graphs[key] = _Recording(self.model, self.engine, micro, self.pool, reduces)
        scale = self.engine.loss_scale
        return self.graphs[key].run(micro, *(scale * share for share in self.shares(batch)))

    def close(self) -> None:
        """Frees the graphs: a communicator waits for ever for those that recorded it. Does not wait
        for the GPU, which after a failure may wait for a lost rank."""
        self.graphs.clear()
        self.pool, self.max_length = None, 0


class _Recording:
    def __init__(
        self, model: Any, engine: Any, micro: MicroBatch, pool: Any, reduces: bool
    ) -> None:
        self.micro = micro.map(torch.clone)
        self.inputs = _by_dtype(self.micro)
        self.shares = torch.zeros(2, device=micro.input_ids.device)
        self.mlm_share, self.nsp_share = self.shares.unbind()
        self.graph = torch.cuda.CUDAGraph()
        # Other threads (prefetching of batches) go on using the GPU meanwhile.
        with torch.cuda.graph(self.graph, pool=pool, capture_error_mode="thread_local"):
            sums = model(self.micro)
            engine.accumulate(_loss(sums, self.shares), reduces)
            self.sums = torch.stack([x.detach().float() for x in sums])

    def run(self, micro: MicroBatch, mlm_share: float, nsp_share: float) -> Tensor:
        for ours, theirs in zip(self.inputs, _by_dtype(micro)):
            torch._foreach_copy_(ours, theirs)  # one launch each: the GPU waits for this
        self.mlm_share.fill_(mlm_share)
        self.nsp_share.fill_(nsp_share)
        self.graph.replay()
        return self.sums.clone()


def _by_dtype(micro: MicroBatch) -> list[list[Tensor]]:
    """Its tensors, those of one dtype together."""
    groups: dict[torch.dtype, list[Tensor]] = {}
    for tensor in micro.tensors().values():
        groups.setdefault(tensor.dtype, []).append(tensor)
    return list(groups.values())
