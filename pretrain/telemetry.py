"""What a run leaves behind for people: train/log.jsonl, TensorBoard, and a line of progress.

log.jsonl holds one JSON object a line. `kind` is `train` (one update), `eval` (a held-out scoring)
or `event` (text: start, resume, save, guard). A resumed run appends; lines of updates after the one
it resumed from are cut off first, so that no update stands there twice.

Rates: model TFLOP/s and MFU count what `configs.model.model_flops` counts (real tokens, predicted
positions only, backward = twice forward, nothing for recomputation or padding), over the time from
one logged update to the next, per process of the world; MFU divides by the card's dense peak in the
precision of the run as its data sheet states it, and is left out for cards not listed here.
seconds is the time of the update itself, stretch_s that of all updates from the last logged one to it.
With train.max_minutes, spent_s is the time of them that was spent, as far as the update knew.
"""

from __future__ import annotations

import json
import math
import os
import re
import resource
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from configs import Progress, Recipe, make_folder
from configs.files import publish_text
from configs.loading import to_dict
from configs.log import LOG, cut_log
from configs.model import ModelConfig, model_flops

if TYPE_CHECKING:
    from pretrain.data.batches import GlobalBatch
    from pretrain.optim.budget import TimeBudget

# Dense peak in bf16 and fp16 (FLOP/s) by whole words of the device name, the first that fit ($: they
# end it, as a laptop's or a Ti's do not); data sheets.
_PEAKS = {"H200 NVL": 835e12, "H200": 989e12, "GH200": 989e12, "H100 PCIe": 756e12,
          "H100 NVL": 835e12, "H100": 989e12, "GB200": 2500e12, "B200": 2250e12, "A100": 312e12,
          "A10G": 70e12, "A10": 125e12, "A40": 150e12, "L40S": 362e12, "L4": 121e12,
          "V100-PCIE": 112e12, "V100": 125e12, "RTX 4090$": 165e12, "RTX 3090$": 71e12,
          "T4": 65e12}  # fmt: skip


def peak_flops(device_name: str, precision: str) -> float | None:
    """Dense peak of a card, FLOP/s; None where it is not known. fp8 is twice bf16."""
    if precision not in ("bf16", "fp16", "fp8"):
        return None
    found = (peak for words, peak in _PEAKS.items() if re.search(rf"\b{words}\b", device_name))
    peak = next(found, None)
    return peak and peak * (2 if precision == "fp8" else 1)


class Telemetry:
    """Writes on rank 0 and does nothing elsewhere.

    Args:
        train_dir: where log.jsonl and tensorboard/ lie. resumed: updates done before this start.
        total: the update at which this start ends. world: processes (tp x dp). device_name: of the GPU, or "".
        budget: its time, if that is limited.
    """

    def __init__(
        self,
        train_dir: str | Path,
        recipe: Recipe,
        model: ModelConfig,
        *,
        total: int,
        resumed: int = 0,
        rank: int = 0,
        world: int = 1,
        device_name: str = "",
        budget: TimeBudget | None = None,
    ) -> None:
        self.enabled = rank == 0
        self.every, self.total, self.model, self.world = recipe.train.log_every, total, model, world
        self.budget = budget
        self.peak = peak_flops(device_name, recipe.train.precision)
        self._work = self._zero()
        if not self.enabled:
            return
        folder = Path(train_dir)
        publish_text(make_folder(folder) / "recipe.json", json.dumps(to_dict(recipe), indent=1))
        cut_log(folder / LOG, resumed)
        self._log = (folder / LOG).open("a", encoding="utf-8")
        from torch.utils.tensorboard import SummaryWriter

        self._board = SummaryWriter(str(folder / "tensorboard"), purge_step=resumed + 1)
        self._progress = Progress(total, "train", "updates", done=resumed, clock=budget)

    @staticmethod
    def _zero() -> dict[str, float]:
        return dict.fromkeys(("seconds", "data_wait_s", "tokens", "rows", "flops", "computed"), 0.0)

    def expect(self, total: int) -> None:
        """The whole run has another number of updates than it had."""
        self.total = total
        if self.enabled:
            self._progress.expect(total)

    def wants(self, step: int) -> bool:
        """Whether update `step` (from 1), the newest, is logged: every so many, the first, and the
        last, which is that at which the time is up if it has one."""
        time_is_up = self.budget is not None and self.budget.over
        return step % self.every == 0 or step in (1, self.total) or time_is_up

    def update(
        self,
        step: int,
        values: dict[str, float],
        batch: GlobalBatch,
        seconds: float,
        data_wait_s: float = 0.0,
    ) -> None:
        """One finished update, every one in turn, from 1.

        Args:
            values: loss (= mlm_loss + train.nsp_weight x nsp_loss x share of the rows that are
                pairs), mlm_loss, nsp_loss, mlm_accuracy, nsp_accuracy, lr, grad_norm,
                trust_ratio_min/10/50/90/max, loss_scale, ...; may be {} where `wants` says no.
            seconds: of the whole update, data wait included. Derived rates are added here.
            data_wait_s: of them, spent waiting for rows; a GPU may have been at work meanwhile.
        """
        if not self.enabled:
            return
        work = self._work
        work["seconds"] += seconds
        work["data_wait_s"] += data_wait_s
        work["tokens"] += batch.tokens_total
        work["rows"] += batch.rows_total
        work["computed"] += batch.tokens_total / max(1e-9, 1 - batch.waste)
        work["flops"] += model_flops(
            self.model,
            batch.tokens_total,
            batch.sum_squared_lengths_total,
            batch.masked_total,
            batch.rows_total,
        )
        if not self.wants(step):
            self._progress.update()
            return
        took = max(work["seconds"], 1e-9)
        tflops = work["flops"] / took / self.world / 1e12
        record = {**values, "epoch": batch.epoch, "seconds": seconds, "stretch_s": work["seconds"],
                  "tokens_per_s": work["tokens"] / took, "sequences_per_s": work["rows"] / took,
                  "model_tflops": tflops, "packing_waste": 1 - work["tokens"] / work["computed"],
                  "data_wait": work["data_wait_s"] / took, "memory_gb": memory_gb()}  # fmt: skip
        if self.peak:
            record["mfu"] = tflops * 1e12 / self.peak
        if self.budget and self.budget.seconds:
            record["spent_s"] = self.budget.spent
        self._work = self._zero()
        self._write("train", step, record)
        loss = f"loss {values['loss']:.4f}, " if "loss" in values else ""
        lr = f"lr {values['lr']:.3g}, " if "lr" in values else ""
        self._progress.update(note=f"{loss}{lr}{record['tokens_per_s'] / 1e3:.1f}k tokens/s")

    def evaluation(self, step: int, values: dict[str, float]) -> None:
        """A held-out scoring after update `step`."""
        if self.enabled:
            self._write("eval", step, values)

    def event(self, step: int, text: str, **more: Any) -> None:
        """Something that happened: start, resume, save, spike, signal."""
        if self.enabled:
            self._append({"kind": "event", "step": step, "time": time.time(), "text": text, **more})

    def saved(self, step: int, stalled_s: float) -> None:
        """The checkpoint of this update is complete, later updates may stand in the log before it."""
        self.event(step, "checkpoint", stalled_s=stalled_s)

    def close(self) -> None:
        """Flushes and closes; the log ends with a whole line."""
        if self.enabled:
            self._progress.close()
            self._board.close()
            self._log.flush()
            os.fsync(self._log.fileno())
            self._log.close()

    def _write(self, kind: str, step: int, values: dict[str, Any]) -> None:
        self._append({"kind": kind, "step": step, "time": time.time(), **values})
        for name, value in values.items():
            if isinstance(value, int | float):
                self._board.add_scalar(f"{kind}/{name}", value, step)

    def _append(self, record: dict[str, Any]) -> None:
        # NaN and Infinity are not JSON: they are written as text
        clean = {
            k: str(v) if isinstance(v, float) and not math.isfinite(v) else v
            for k, v in record.items()
        }
        self._log.write(json.dumps(clean) + "\n")
        self._log.flush()


def memory_gb() -> float:
    """Peak memory in GB (1e9 bytes): of the GPU where there is one, otherwise of the process."""
    import torch

    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 1e9
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9
