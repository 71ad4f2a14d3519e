"""Times an all-reduce over all processes of a job, and each device's own matmul beside it."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist

from configs import UserError, say

# On GPUs: below this an all-reduce is surely not on NVLink or InfiniBand.
SLOW_GB_S = 1.0
# A device that multiplies at less than this share of the middle one is named.
SLOW_SHARE = 0.8


def all_reduce(env: dict[str, str], megabytes: int, on_gpu: bool) -> int:
    """Prints the bus bandwidth, 2 (n-1)/n x bytes / time as nccl-tests define it.

    Raises:
        UserError: on rank 0, naming the node whose sum is wrong. Other ranks then return 2.
    """
    os.environ.update(env)
    device = torch.device("cuda", int(env["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo", timeout=timedelta(seconds=120))
    rank, world = dist.get_rank(), dist.get_world_size()
    data = torch.ones(megabytes * 250_000, device=device)
    rounds = [_seconds(lambda: dist.all_reduce(data), device) for _ in range(4)]
    rate = 2 * (world - 1) / world * megabytes / 1000 / min(rounds[1:])
    wrong = float((data != float(world) ** 4).any())
    side = 4096 if on_gpu else 256
    factor = torch.randn(side, side, device=device)
    speed = 1 / min(_seconds(lambda: _multiply(factor), device) for _ in range(3))
    mine = torch.tensor([wrong, speed], device=device)
    table = [torch.zeros_like(mine) for _ in range(world)]
    dist.all_gather(table, mine)
    hosts = _all_hosts(world, device)
    dist.destroy_process_group()
    bad = [hosts[i] for i, row in enumerate(table) if row[0]]
    if rank:
        return 2 if bad else 0
    if bad:
        raise UserError(f"preflight: {', '.join(bad)} computed a wrong sum", f"leave out {bad[0]}")
    say(f"preflight: all-reduce of {megabytes} MB over {world} processes: {rate:.2f} GB/s")
    if on_gpu and rate < SLOW_GB_S:
        say(
            "preflight: warning: that is slow; do NCCL_SOCKET_IFNAME, NCCL_IB_HCA name the fast network?"
        )
    usual = sorted(float(row[1]) for row in table)[world // 2]
    for i, row in enumerate(table):
        if on_gpu and row[1] < SLOW_SHARE * usual:
            share = float(row[1]) / usual
            say(f"preflight: warning: {hosts[i]}: rank {i} multiplies at {share:.0%} of the others")
    return 0


def _multiply(factor: torch.Tensor) -> None:
    for _ in range(20):
        factor @ factor


def _seconds(work: Callable[[], object], device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def _all_hosts(world: int, device: torch.device) -> list[str]:
    """Host names of all ranks, as 64 bytes each: nothing is pickled."""
    name = socket.gethostname().encode()[:64].ljust(64, b"\0")
    mine = torch.tensor(list(name), dtype=torch.uint8, device=device)
    table = [torch.zeros_like(mine) for _ in range(world)]
    dist.all_gather(table, mine)
    return [bytes(row.tolist()).rstrip(b"\0").decode() for row in table]
