"""The train command with an accident.

It is kind:number[:rank], for this process if its RANK is `rank` (default: any):
    update:7    kill -9 before update 7            save:2     kill -9 in the middle of the 2nd save
    full:2      the disk is full in the 2nd save
    nan:7       the loss is NaN from update 7 on   nan:7-9    in updates 7 to 9
    hang:7      the process stops doing anything before update 7
    oom:7       GPU memory runs out in update 7, or (oom:0) before the first one
    none:0      nothing happens
    read:7      the thread that reads rows, or (pass:7) a forward pass, is stuck in update 7
    weights:7   update 7 leaves a weight that is NaN
    card:128    no accident, but a card for micro-batches of so many tokens
    clock:1     no accident, but an update takes so many seconds of train.max_minutes, the first ones
                too; on other ranks than 0 it takes more
    peers:0     no accident, but GPUs: tensor-parallel ranks write into each other's memory, and
                passes of one shape use the same slots each time, as recorded ones do
fp16 runs on the CPU here, as if a GPU had been found.
"""

from __future__ import annotations

import errno
import os
import signal
import sys
import time
from dataclasses import replace
from typing import Any

from configs.errors import run_cli


def arm(what: str) -> None:
    """Puts the accident in place; imports torch."""
    import torch

    import pretrain.checkpoint.writer as writer
    import pretrain.checks as checks
    import pretrain.micro as micro
    from pretrain.data.batches import Batches
    from pretrain.engine import Engine
    from pretrain.optim.budget import TimeBudget
    from pretrain.trainer import Trainer

    kind, numbers, *rank = what.split(":")
    if rank and os.environ.get("RANK", "0") != rank[0]:
        return
    first, _, last = numbers.partition("-")
    begin, end = int(first), int(last) if last else (10**9 if kind == "nan" else int(first))
    if kind == "card":
        checks.CPU_MICRO_BATCH = begin
        return

    def tick(self: TimeBudget, seconds: float) -> bool:
        self.clock += begin * (1 + int(os.environ.get("RANK", "0")))
        return False

    if kind == "clock":
        TimeBudget.add = tick  # type: ignore[method-assign]
        return
    update, write, call = Trainer.update, writer.write_boxes, micro.Micro.__call__
    build = Batches._build
    saves = 0

    def kill() -> None:
        sys.stdout.flush()
        os.kill(os.getpid(), signal.SIGKILL)

    def run_out(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")

    if kind == "oom" and begin == 0:
        Engine.__init__ = run_out  # type: ignore[method-assign]

    def before_update(self: Trainer, *arguments: Any) -> None:
        self.run.micro.armed = begin <= self.run.step + 1 <= end  # type: ignore[attr-defined]
        if self.run.micro.armed and kind == "update":  # type: ignore[attr-defined]
            kill()
        if self.run.micro.armed and kind == "hang":  # type: ignore[attr-defined]
            time.sleep(1000)
        if self.run.micro.armed and kind == "oom":  # type: ignore[attr-defined]
            run_out()
        update(self, *arguments)
        if self.run.micro.armed and kind == "weights":  # type: ignore[attr-defined]
            self.run.engine.shard.master[0] = float("nan")

    def half(path: Any, boxes: Any) -> Any:
        nonlocal saves
        saves += 1
        if kind == "full" and saves == begin:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if kind == "save" and saves == begin:
            write(path, boxes[: len(boxes) // 2])
            kill()
        return write(path, boxes)

    def spoiled(self: Any, *arguments: Any, **named: Any) -> Any:
        if kind == "pass" and self.armed:
            time.sleep(1000)
        if kind == "nan" and self.armed:
            model = self.model
            self.model = lambda m: type(out := model(m))(
                *(x * float("nan") for x in out[:2]), *out[2:]
            )
            try:
                return call(self, *arguments, **named)
            finally:
                self.model = model
        return call(self, *arguments, **named)

    def stuck(self: Batches, step_in_phase: int) -> Any:
        if kind == "read" and step_in_phase == begin - 1:
            time.sleep(1000)
        return build(self, step_in_phase)

    Batches._build = stuck  # type: ignore[method-assign]
    Trainer.update = before_update  # type: ignore[method-assign]
    writer.write_boxes = half
    micro.Micro.__call__ = spoiled  # type: ignore[method-assign]


def reach_each_other() -> None:
    """Tensor-parallel ranks exchange tokens as GPUs of one host do, through files."""
    from pathlib import Path

    import torch.distributed as dist

    import pretrain.micro as micro
    import pretrain.starting as starting
    from pretrain.parallel.peers import ALIGN, Peers
    from tests.trainer.exchanges import Inline, SharedFiles, add

    starts: dict[tuple[int, ...], int] = {}
    call = micro.Micro.__call__

    def make(group: Any, wanted: bool | None, device: Any, kernels: Any, size: int) -> Peers:
        first = dist.get_global_rank(group, 0)
        folder = Path(os.environ["SHARED_FILES"]) / str(first)
        folder.mkdir(parents=True, exist_ok=True)
        capacity = -(-size // ALIGN) * ALIGN
        memory = SharedFiles(folder, group.rank(), group.size(), capacity)
        return Peers(group, memory, capacity, Inline(), add)

    def recorded(self: Any, batch: Any, *arguments: Any, **named: Any) -> Any:
        exchange = self.model.s.layers.exchange
        key = (batch.max_length, *(t.numel() for t in batch.tensors().values()))
        if key not in starts:
            starts[key] = exchange.turn
            return call(self, batch, *arguments, **named)
        turn, exchange.turn = exchange.turn, starts[key]
        try:
            return call(self, batch, *arguments, **named)
        finally:
            exchange.turn = turn

    starting.make_exchange = make  # type: ignore[assignment]
    micro.Micro.__call__ = recorded  # type: ignore[method-assign]


def train(accident: str, argv: list[str]) -> None:
    """Leaves the process with the exit code of the train command."""
    from pretrain.train import main

    if "train.precision=fp16" in argv:
        import pretrain.checks as checks

        check = checks.check
        checks._cards = lambda: [80 * 2**30]
        checks.check = lambda *arguments: replace(check(*arguments), device="cpu")
    if accident.startswith("peers"):
        reach_each_other()
    else:
        arm(accident)
    run_cli(lambda: main(argv))
