"""Started by test_watchdog: gloo ranks that train on nothing, one of which goes wrong."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import torch
import torch.distributed as dist

from configs import UserError
from pretrain.guard import TrainingStopped
from pretrain.watchdog import Watchdog, connect

WORLD, TIMEOUT_S, STEPS = 3, 12.0, 6


def rank_main(rank: int, folder: Path, fault: str, bad: int) -> None:
    dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=WORLD)
    dog = Watchdog(folder, TIMEOUT_S, rank, WORLD, connect(rank, WORLD), poll_s=0.2)
    try:
        for step in range(STEPS):
            dog.beat("data")
            if rank == bad and step == 3:
                go_wrong(fault)
            if fault == "suspend" and step == 3:
                (folder / f"{rank}.there").touch()
                while rank == 0 and not (folder / "stop").exists():  # the others wait in the sum
                    time.sleep(0.01)
                if rank == 0:
                    time.sleep(0.5)
            dog.beat("update")
            dist.all_reduce(torch.ones(1))
            dog.running()
            time.sleep(0.1)
    except UserError as error:
        dog.fail(error)
        os._exit(error.exit_code)
    except BaseException as error:
        dog.fail(error)
        raise
    if fault == "linger" and rank == bad:
        time.sleep(6)  # more than a dead rank is given, less than a hung one
    dog.close()
    dist.destroy_process_group()


def go_wrong(fault: str) -> None:
    if fault == "raise":
        raise ValueError("row 17 is broken")
    if fault == "diverge":
        raise TrainingStopped("loss nan", "lower lr")
    if fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == "hang":
        lost_in_a_loop()
    if fault == "gil":  # C code that never gives the interpreter back
        import ctypes

        ctypes.PyDLL(None).sleep(600)


def lost_in_a_loop() -> None:
    while True:
        time.sleep(0.1)
