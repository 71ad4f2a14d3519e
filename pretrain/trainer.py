"""The training loop: batches in, updates out, checkpoints and figures on the way."""

from __future__ import annotations

import time
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist

from configs.console import say, time_goal
from configs.errors import PREEMPTED_EXIT
from configs.masking import masking_of
from configs.schema import PhaseConfig
from pretrain.agreement import Agreement
from pretrain.checkpoint.folder import folder_of
from pretrain.checks import Plan
from pretrain.data.batches import Batches, GlobalBatch
from pretrain.exhausted import told
from pretrain.guard import LossGuard, StopSignals, TrainingStopped
from pretrain.optim.budget import CLOCK_STARTS
from pretrain.optim.lamb import Update
from pretrain.optim.schedule import lr_at
from pretrain.starting import Run, begin

EVALUATION_S = COMPILATION_S = 900.0  # silence that is no hang
SAVING_S = 1800.0
QUANTILES = {"min": 0.0, "10": 0.1, "50": 0.5, "90": 0.9, "max": 1.0}


def train(plan: Plan) -> int:
    """Trains from the last checkpoint to `plan.end` updates; returns the exit code."""
    run = begin(plan)
    with StopSignals(plan.recipe.guard.save_signals) as stop:
        try:
            with told(plan):
                code = Trainer(run, stop).run_all()
        except BaseException as error:
            run.writer.give_up()
            run.watchdog.fail(error)
            run.micro.close()
            raise
        if code == PREEMPTED_EXIT:
            stop.ignore()
        with run.watchdog.patience(SAVING_S):  # the others wait here for rank 0's last write
            run.close()
    if plan.rank == 0:
        folder = folder_of(plan.train_dir, run.step)
        say(f"checkpoint after {_made(run)}: {folder}")
    return code


def _made(run: Run) -> str:
    """The updates made, of how many or of which time."""
    if not run.budget.seconds or run.step >= run.plan.total:
        return f"{run.step} of {run.plan.total} updates"
    goal = time_goal(run.step, run.budget.seconds, run.budget.spent)
    return f"{goal.count} updates ({goal.share})"


def batches_of(run: Run, index: int, steps: int) -> Batches:
    """The first `steps` updates of phase `index` (from 0) for this rank."""
    plan, recipe = run.plan, run.plan.recipe
    made = [end - begin for begin, end in pairwise([0, *plan.ends])]  # updates of each phase
    phase = recipe.phases[index]
    return Batches(
        plan.shards[phase.shards],
        replace(phase, steps=steps),  # reads no further ahead
        index,
        masking_of(recipe, phase),
        recipe.seed,
        run.groups.dp_rank,
        run.groups.dp,
        plan.micro_batch_tokens,
        run.device,
        first_row=sum(
            made[number] * before.global_batch
            for number, before in enumerate(recipe.phases[:index])
            if before.shards == phase.shards
        ),
    )


class Trainer:
    """Runs the updates from `run.step` on."""

    def __init__(self, run: Run, stop: StopSignals) -> None:
        self.run, self.plan, self.stop = run, run.plan, stop
        self.recipe = run.plan.recipe
        self.guard = LossGuard(self.recipe.guard, scaled=self.recipe.train.precision == "fp16")
        if run.state:
            self.guard.load(run.state["guard"])
        self.budget = run.budget
        self.agreement = Agreement(run, self.guard, self.budget, stop)
        self.saved = run.step if run.state else -1

    def run_all(self) -> int:
        """All phases; 0 at the end, PREEMPTED_EXIT after a signal."""
        run, plan = self.run, self.plan
        if run.step == 0:
            self.evaluate()
        for index in range(len(plan.phase_ends), len(self.recipe.phases)):
            self.run_phase(index)
            if run.step >= plan.end or self.agreement.stopping or self.budget.over:
                break
            self.leave_phase(index)
        if self.saved != run.step:
            self.save()
        with run.watchdog.patience(SAVING_S):
            run.writer.close()
        if self.agreement.stopping:
            run.telemetry.event(run.step, f"stopped by {self.stop.received or 'a signal'}, saved")
            return PREEMPTED_EXIT
        return 0

    def run_phase(self, index: int) -> None:
        """The updates of one phase that are still to be made, which may be none."""
        run, phase = self.run, self.recipe.phases[index]
        first, end = [0, *self.plan.ends][index], min(self.plan.end, self.plan.ends[index])
        if run.step >= end or self.ends_early(phase):
            return
        batches = batches_of(run, index, end - first)
        if batches.warning:
            run.say(batches.warning)
        shapes: set[int] = set()
        while run.step < end and not self.ends_early(phase):
            start, number = time.monotonic(), run.step - first
            run.watchdog.beat("data")
            batch = batches.update(number)
            size = len(batch.micros[0].input_ids)
            with run.watchdog.patience(0.0 if size in shapes else COMPILATION_S):
                lr = lr_at(phase, self.budget.position(number + 1, phase.steps))
                self.update(batch, lr, start, batches)
            shapes.add(size)
            run.watchdog.running()
            self.after_update(run.step == end or self.ends_early(phase))
        batches.close()  # also of what it has read ahead

    def ends_early(self, phase: PhaseConfig) -> bool:
        """Before its steps: told to stop, or by the time. The same on all ranks."""
        return self.agreement.stopping or self.budget.over or self.budget.reached(phase.until)

    def leave_phase(self, index: int) -> None:
        """Notes where a phase has ended, the next one begins there. A checkpoint of this update, if
        one was made, was made before: it tells steps and time, by which the phase ends again, unless
        a new start gives it more of either."""
        run, plan = self.run, self.plan
        phase, planned = self.recipe.phases[index], plan.ends[index]
        plan.phase_ends.append(min(run.step, planned))
        if run.step < planned:
            run.telemetry.expect(plan.end)
            text = f"phase {phase.name} ends by time: until={phase.until:g}"
            run.telemetry.event(run.step, text)
            run.say(f"{text}, after {run.step} updates")

    def update(self, batch: GlobalBatch, lr: float, start: float, batches: Batches) -> None:
        """One optimiser update over a global batch, the last one that `batches` gave."""
        run, engine = self.run, self.run.engine
        sums = torch.zeros(4, device=run.device)
        for number, micro in enumerate(batch.micros):
            run.watchdog.beat("forward")
            sums += run.micro(micro, batch, last=number == len(batch.micros) - 1)
        run.watchdog.beat("data")
        batches.prefetch()
        run.watchdog.beat("update")  # ranks wait for one another in here
        result = engine.step(lr, self.agreement.on(batch, sums))
        run.step += 1
        values = self.agreement.values
        if run.telemetry.wants(run.step):
            values |= self.figures(result, lr)
        seconds = time.monotonic() - start
        if self.budget.add(seconds):
            run.telemetry.event(run.step, CLOCK_STARTS)
        run.telemetry.update(run.step, values, batch, seconds, batches.waited())

    def figures(self, result: Update, lr: float) -> dict[str, float]:
        out = {"lr": lr, "skipped": float(result.skipped)}
        if self.run.engine.scaler:
            out["loss_scale"] = self.run.engine.loss_scale
        if result.ratios is not None:
            at = torch.tensor(list(QUANTILES.values()), device=result.ratios.device)
            values = torch.quantile(result.ratios.float(), at).tolist()
            out.update({f"trust_ratio_{name}": v for name, v in zip(QUANTILES, values)})
        return out

    def after_update(self, ended: bool) -> None:
        """What is due: an evaluation, a checkpoint. ended: the phase, or this start within it."""
        run, recipe = self.run, self.recipe
        run.writer.look()  # a save that failed is not worth training on until the next
        every, last = recipe.train.eval_every, run.step >= self.plan.end or self.budget.over
        if last or (every and run.step % every == 0):
            self.evaluate()
        due = recipe.checkpoint.every and run.step % recipe.checkpoint.every == 0
        # Not while updates are skipped: before the guard stops the run, such checkpoints would push
        # out the good ones. A periodic save is left out then; what a start ends with is saved.
        if (due or ended) and not self.guard.doubtful:
            self.save()

    def save(self) -> None:
        """Starts a checkpoint of this moment (and waits for it if so configured).

        Raises:
            TrainingStopped: on all ranks, if a weight or a moment is not finite.
        """
        run = self.run
        with run.watchdog.patience(SAVING_S):
            self.refuse_damage()
            run.writer.save(run.step, run.engine.shard, self.meta())
            if not self.recipe.checkpoint.asynchronous:
                run.writer.wait()
        self.saved = run.step

    def refuse_damage(self) -> None:
        """The guard sees an update's loss and gradient before it is applied, so what the last one
        did to the weights shows only here."""
        run, shard = self.run, self.run.engine.shard
        lowest, highest = zip(*(torch.aminmax(shard.tensor(kind)) for kind in shard.kinds))
        damaged = (~torch.isfinite(torch.stack(lowest + highest))).any().float()
        if self.plan.world > 1:
            dist.all_reduce(damaged)
        if damaged.item():
            raise TrainingStopped(
                f"update {run.step} left weights or moments that are not finite: not saved",
                "whatever was saved is from before; lower phases.N.schedule.lr or lengthen "
                "phases.N.schedule.warmup",
            )

    def meta(self) -> dict[str, Any]:
        """Everything besides tensors that going on bit for bit needs, and what it must match."""
        run = self.run
        return {
            **run.identity,
            "state": {
                **run.engine.state(),
                "guard": self.guard.state(),
                "spent_s": self.budget.clock,
                "agreed_s": self.budget.spent,
                "phase_ends": list(self.plan.phase_ends),  # written later, in a thread
            },
        }

    def evaluate(self) -> None:
        """Held-out scores, and the zero-shot probe if the recipe names one."""
        run = self.run
        with run.watchdog.patience(EVALUATION_S):
            values = run.evaluate()
        if values:
            run.telemetry.evaluation(run.step, values)
            shown = ", ".join(f"{k} {v:.4f}" for k, v in values.items() if isinstance(v, float))
            run.say(f"held-out after {run.step} updates: {shown}")
