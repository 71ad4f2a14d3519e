"""The engines: they hold weights, gradients and optimiser state, and make one update of them.

`LeanEngine` here is plain torch: gradients are added up in flat fp32 buffers and reduced once per
global batch, bucket by bucket while the last backward pass still runs; under ZeRO-1 each rank
updates its part of every bucket and the weights are gathered. `pretrain.engine_deepspeed` does the
same with DeepSpeed's ZeRO optimisers. Both offer a `Shard`, which LAMB and checkpoints work on.
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from configs.schema import Recipe
from pretrain.guard import LossScaler
from pretrain.optim.lamb import Lamb, Update, Verdict
from pretrain.parallel.groups import Groups
from pretrain.parallel.pieces import Piece
from pretrain.parallel.slices import Shard, make_slices

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
DTYPES["fp8"] = torch.bfloat16  # fp8 is a choice of the kernels; weights and activations are bf16
BUCKET = 25_000_000  # elements of a gradient bucket: 100 MB in fp32
ALIGN = 128  # elements; a parameter starts on a 256-byte boundary in bf16


class Engine(ABC):
    """What the trainer uses. `model` is called directly; its weights have the training dtype."""

    model: nn.Module
    shard: Shard
    lamb: Lamb

    def __init__(self, recipe: Recipe, pieces: list[Piece], groups: Groups) -> None:
        self.pieces, self.groups = pieces, groups
        self.scaler = LossScaler(recipe.guard) if recipe.train.precision == "fp16" else None

    @property
    def loss_scale(self) -> float:
        return self.scaler.scale if self.scaler else 1.0

    @abstractmethod
    def backward(self, loss: Tensor, last: bool) -> None:
        """Adds the gradient of `loss` (this micro-batch's share of the update's loss, to be
        summed over ranks). last: no more follow in this update; gradients are reduced."""

    @abstractmethod
    def step(self, lr: float, verdict: Verdict | None = None) -> Update:
        """Applies the reduced gradients and forgets them.

        verdict: whether to apply (by default if the gradient norm is finite). Raises what it
        raises, and TrainingStopped when fp16 has skipped too many updates in a row.
        """

    @abstractmethod
    def refresh(self) -> None:
        """Fills the model's weights from the masters (after loading a checkpoint)."""

    def state(self) -> dict[str, Any]:
        """The scalars that resume needs, for JSON."""
        scaler = self.scaler.state() if self.scaler else None
        return {"optimizer_steps": self.lamb.steps, "scaler": scaler}

    def load(self, state: dict[str, Any]) -> None:
        self.lamb.steps = int(state["optimizer_steps"])
        if self.scaler and state.get("scaler"):
            self.scaler.load(state["scaler"])
        self.shard.zero_padding()
        self.refresh()


@dataclass
class Bucket:
    """A range of the flat buffers that is reduced as one; `shard_at`: of this rank's part of it in
    the flat optimiser tensors."""

    begin: int
    end: int
    params: list[nn.Parameter]
    shard_at: int
    waiting: int = 0
    work: Any = None


class LeanEngine(Engine):
    """ZeRO-0 and ZeRO-1 in any precision, with LAMB as the optimiser."""

    def __init__(
        self,
        recipe: Recipe,
        model: nn.Module,
        pieces: list[Piece],
        groups: Groups,
        kernels: Any,
        device: torch.device,
    ) -> None:
        super().__init__(recipe, pieces, groups)
        self.model = model
        dtype = DTYPES[recipe.train.precision]
        self.sharded = recipe.parallel.zero_stage > 0 and groups.dp > 1
        self.ranks = groups.dp if self.sharded else 1
        params = list(model.parameters())
        self.buckets, self.places = _layout(params, self.ranks)
        total = self.buckets[-1].end
        self.weights = torch.zeros(total, dtype=dtype, device=device)
        self.grads = torch.zeros(total, dtype=torch.float32, device=device)
        self._move_in(params, dtype)
        self.shard = self._make_shard(dtype)
        self.grads.zero_()
        if recipe.optimizer.implementation == "lambert":
            self.lamb = Lamb(pieces, self.shard, recipe.optimizer, groups, kernels)
        else:
            from pretrain.optim.whole import WholeTensorLamb

            self.lamb = WholeTensorLamb(pieces, self.shard, recipe.optimizer, groups, kernels)
        # The rounded copy of this rank's masters, which the others gather, be it of a first update
        # that is refused.
        self.low: Tensor | None = None
        if dtype != torch.float32:
            self.low = self.shard.master.to(dtype) if self.sharded else self.weights
        self.reduced = torch.zeros_like(self.shard.master) if self.sharded else self.grads
        self._last = False

    def _move_in(self, params: Sequence[nn.Parameter], dtype: torch.dtype) -> None:
        self._bucket_of = {p: b for b in self.buckets for p in b.params}
        self._main: dict[int, Tensor] = {}
        me = weakref.ref(self)
        for p in params:
            at = self.places[id(p)]
            view = self.weights[at : at + p.numel()].view(p.shape)
            self._main[id(p)] = self.grads[at : at + p.numel()].view(p.shape)
            # The gradients' buffer holds the fp32 values until the masters are made of them.
            self._main[id(p)].copy_(p.data)
            view.copy_(p.data)
            p.data = view
            bucket = self._bucket_of[p]
            if dtype == torch.float32:
                p.grad = self._main[id(p)]
            else:  # for products that add into it themselves (pretrain.kernels.triton_linear)
                p.main_grad = self._main[id(p)]  # type: ignore[attr-defined]
                p.main_grad_arrived = lambda b=bucket: self._count(b)  # type: ignore[attr-defined]
            # Autograd's hooks are out of the garbage collector's sight: nothing strong in them.
            p.register_post_accumulate_grad_hook(lambda p: me()._arrived(p))  # type: ignore

    def _make_shard(self, dtype: torch.dtype) -> Shard:
        """The masters keep what rounding to `dtype` takes away: from values that lie on the coarse
        grid, the first small updates would never reach the rounded weights."""
        if self.sharded:
            master = torch.cat([self._part(self.grads, b) for b in self.buckets])
        else:
            master = self.weights if dtype == torch.float32 else self.grads.clone()
        held = []
        for bucket in self.buckets:
            size = (bucket.end - bucket.begin) // self.ranks
            low = bucket.begin + (self.groups.dp_rank if self.sharded else 0) * size
            for p in bucket.params:
                at = self.places[id(p)]
                begin, end = max(at, low), min(at + p.numel(), low + size)
                if begin < end:
                    held.append((p, begin - at, end - at, bucket.shard_at + begin - low))
        slices = make_slices(self.pieces, held)
        return Shard(
            master, torch.zeros_like(master), torch.zeros_like(master), slices, not self.sharded
        )

    def _part(self, flat: Tensor, bucket: Bucket, rank: int | None = None) -> Tensor:
        size = (bucket.end - bucket.begin) // self.ranks
        begin = bucket.begin + (self.groups.dp_rank if rank is None else rank) * size
        return flat[begin : begin + size]

    def _arrived(self, p: nn.Parameter) -> None:
        """Runs when autograd has finished a parameter's gradient of this micro-batch; torch 2.13
        runs it without one too, where a kernel has added it and `main_grad_arrived` counted it."""
        if p.grad is None:
            return
        main = self._main[id(p)]
        if p.grad.data_ptr() != main.data_ptr():
            main.add_(p.grad)
            p.grad = None
        self._count(self._bucket_of[p])

    def _count(self, bucket: Bucket) -> None:
        """One more of the bucket's gradients is there; the last one sends it off."""
        if self._last and self.groups.dp > 1:
            bucket.waiting -= 1
            if bucket.waiting == 0:
                self._reduce(bucket)

    def _reduce(self, bucket: Bucket) -> None:
        whole = self.grads[bucket.begin : bucket.end]
        group = self.groups.dp_group
        if not self.sharded:
            bucket.work = dist.all_reduce(whole, group=group, async_op=True)
            return
        size = whole.numel() // self.ranks
        mine = self.reduced[bucket.shard_at : bucket.shard_at + size]
        bucket.work = dist.reduce_scatter_tensor(mine, whole, group=group, async_op=True)

    def backward(self, loss: Tensor, last: bool) -> None:
        self._begin(last)
        (loss * self.loss_scale if self.scaler else loss).backward()
        self._end()

    def accumulate(self, loss: Tensor, last: bool) -> None:
        """`backward` of a loss that is scaled already, without autograd's hooks, whose streams a
        CUDA graph cannot record. The last one's reductions are recorded with it: most gradients
        arrive from kernels during the pass, so that buckets leave while it runs."""
        self._begin(last)
        params = list(self._bucket_of)
        for p, gradient in zip(params, torch.autograd.grad(loss, params, allow_unused=True)):
            if gradient is not None:
                self._main[id(p)].add_(gradient)
                self._count(self._bucket_of[p])
        self._end()

    def warm_up(self) -> None:
        """The first use of a communicator, which cannot be recorded: reduces gradients while they
        are still zero."""
        self._begin(last=True)
        self._end()

    def _begin(self, last: bool) -> None:
        self._last = last
        if last:
            for bucket in self.buckets:
                bucket.waiting = len(bucket.params)

    def _end(self) -> None:
        if self._last and self.groups.dp > 1:
            for bucket in self.buckets:
                if bucket.work is None:  # a parameter without a gradient in the last micro-batch
                    self._reduce(bucket)
            for bucket in self.buckets:
                bucket.work.wait()
                bucket.work = None

    def step(self, lr: float, verdict: Verdict | None = None) -> Update:
        scale = 1.0 / self.loss_scale
        update = self.lamb.step(self.reduced, lr, scale, self.low, verdict, self._finish)
        if self.scaler:
            self.scaler.update(update.skipped)
        return update

    def _finish(self) -> None:
        """What follows an update on the device, be it applied or not."""
        self._gather()
        self.grads.zero_()

    def _gather(self) -> None:
        """Every rank's updated part of every bucket -> the whole weights."""
        if not self.sharded:
            return
        source = self.shard.master if self.low is None else self.low
        works = []
        for bucket in self.buckets:
            size = (bucket.end - bucket.begin) // self.ranks
            mine = source[bucket.shard_at : bucket.shard_at + size]
            whole = self.weights[bucket.begin : bucket.end]
            works.append(
                dist.all_gather_into_tensor(whole, mine, group=self.groups.dp_group, async_op=True)
            )
        for work in works:
            work.wait()

    def refresh(self) -> None:
        if self.low is not None:
            self.low.copy_(self.shard.master)
        self._gather()


def _layout(params: Sequence[nn.Parameter], ranks: int) -> tuple[list[Bucket], dict[int, int]]:
    """Buckets in the order in which the backward pass finishes them, and where each parameter lies.
    A bucket's size is a multiple of ranks x ALIGN."""
    buckets: list[Bucket] = []
    places: dict[int, int] = {}
    at = shard_at = 0
    current: list[nn.Parameter] = []
    begin = 0
    for number, p in enumerate(reversed(params)):
        places[id(p)] = at
        at += -(-p.numel() // ALIGN) * ALIGN
        current.append(p)
        if at - begin >= BUCKET or number == len(params) - 1:
            unit = ranks * ALIGN
            at = begin + -(-(at - begin) // unit) * unit
            buckets.append(Bucket(begin, at, current, shard_at))
            shard_at += (at - begin) // ranks
            begin, current = at, []
    return buckets, places
