"""What all ranks agree on in an update, by one small collective and one transfer to the host."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from pretrain.data.batches import GlobalBatch
from pretrain.guard import LossGuard, StopSignals
from pretrain.optim.budget import TimeBudget
from pretrain.starting import Run

_NUMBERS = 8  # four sums of losses, three of the host's, the gradient norm


class Agreement:
    """The `Verdict` on one update after the other: losses of the whole global batch, whether any rank
    was told to stop, and the time spent, which is rank 0's clock.

    The device applies an update if its losses and gradient norm are finite, which is also when the
    guard says yes. values: figures of the update. stopping: a signal has reached some rank.
    """

    def __init__(self, run: Run, guard: LossGuard, budget: TimeBudget, stop: StopSignals) -> None:
        self.run, self.guard, self.budget, self.stop = run, guard, budget, stop
        self.stopping = False
        self.values: dict[str, float] = {}
        gpu = run.device.type == "cuda"
        self.copied = torch.cuda.Event() if gpu else None
        self.host = torch.empty(_NUMBERS, dtype=torch.float64, pin_memory=gpu)

    def on(self, batch: GlobalBatch, sums: Tensor) -> Agreement:
        """Turns to the update of run.step + 1. sums: [4] of this rank, as of `micro.Micro`."""
        # Not the batch: its tensors would stay on the device beside the next two.
        self.labelled = sum(micro.labelled for micro in batch.micros)
        # Tensor-parallel ranks hold equal sums, so the world's sum has each one tp times.
        self.masked = batch.masked_total * self.run.plan.tp
        self.rows = batch.rows_total * self.run.plan.tp
        self.sums = sums
        return self

    def asked(self, norm: Tensor) -> Tensor:
        """Starts the transfer; bool scalar on the device, equal on all ranks. norm: scalar there."""
        plan = self.run.plan
        clock = self.budget.clock if plan.rank == 0 else 0.0
        more = torch.tensor([bool(self.stop.received), clock, self.labelled], dtype=torch.float64)
        if self.copied:  # a copy of unpinned memory would wait for the device
            more = more.pin_memory()
        vector = torch.cat([self.sums.double(), more.to(self.sums.device, non_blocking=True)])
        if plan.world > 1:
            dist.all_reduce(vector)
        vector = torch.cat([vector, norm.double().view(1)])  # equal on all ranks already
        self.host.copy_(vector, non_blocking=True)
        if self.copied:
            self.copied.record()
        return torch.isfinite(vector[:2].sum() + vector[-1])

    def heard(self) -> bool:
        """Waits for the transfer and fills `values` and `stopping`; was the update applied?

        Raises:
            TrainingStopped: from the guard.

        nsp_loss and nsp_accuracy are of rows that have a label, and are left out without any, or
        without a head. In the loss their sum counts over all rows, so that single segments among
        pairs lower its weight; train.nsp_weight multiplies it.
        """
        if self.copied:
            self.copied.synchronize()
        run, masked, rows = self.run, self.masked, self.rows
        mlm, nsp, mlm_right, nsp_right, told, self.budget.spent, labelled, norm = self.host.tolist()
        self.stopping = told > 0
        self.values = {
            "loss": mlm / masked + run.plan.recipe.train.nsp_weight * nsp / rows,
            "mlm_loss": mlm / masked,
            "mlm_accuracy": mlm_right / masked,
            "grad_norm": norm,
        }
        if labelled and run.plan.model.nsp_head:
            self.values |= {"nsp_loss": nsp / labelled, "nsp_accuracy": nsp_right / labelled}
        step = run.step + 1
        apply, odd = self.guard.check(step, self.values["loss"], norm)
        if odd:
            run.telemetry.event(step, odd)
            run.say(odd)
        return apply
