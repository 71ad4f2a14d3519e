"""Exchanges between the GPUs of one host by their copy engines, through torch's symmetric memory.

A rank writes its tokens straight into a buffer of the rank that needs them and then raises a flag;
who needs them waits for the flag in line with its products. No multiprocessor works on any of this
but for the flags: products take all of them, and a kernel of NCCL's or a copy inside one GPU would
start only when they leave some.

Buffers are SLOTS slots used in turn, each as large as one [T, H] activation, for all layers. That a
slot is free is known without asking. At most two exchanges are under way at a time, so a rank that
starts the k-th has waited for the (k-2)-th to arrive from everyone; whoever sent that one had
finished with the (k-4)-th, whose slot it is, before. Where the turn jumps, between passes that were
recorded and others, the sum of the word embeddings over all ranks, with which each pass begins, keeps
them apart.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pretrain.parallel.exchange import Exchange, Gather

SLOTS = 4
ALIGN = 256  # bytes


class Lane:
    """A stream of copies beside the products of the current one."""

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device, priority=-1)

    @contextmanager
    def after_products(self) -> Iterator[None]:
        """What is started inside follows everything started before."""
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            yield

    def mark(self) -> Any:
        """An event: what is started after its wait() may overwrite what was copied so far."""
        return self.stream.record_event()


class Peers(Exchange):
    """handle: `_SymmetricMemory` over `memory`, SLOTS * capacity bytes. capacity: bytes of the largest
    exchange; larger ones go by collectives. add(own [t, H], parts [n - 1, t, H]) -> the sum of all.
    """

    def __init__(
        self,
        group: Any,
        handle: Any,
        capacity: int,
        lane: Any,
        add: Callable[[Tensor, Tensor], Tensor],
        memory: Tensor | None = None,
    ) -> None:
        super().__init__(group)
        self.handle, self.capacity, self.lane, self.add = handle, capacity, lane, add
        self.memory = memory  # lives as long as this does
        self.turn = 0

    def __str__(self) -> str:
        return "tokens shared out by copy engines"

    def slot(self, rank: int, turn: int, like: Tensor, shape: tuple[int, ...]) -> Tensor:
        """A rank's slot as [shape] of like's dtype."""
        offset = turn * self.capacity // like.element_size()
        return self.handle.get_buffer(rank, shape, like.dtype, offset)

    def next(self) -> int:
        self.turn = (self.turn + 1) % SLOTS
        return self.turn

    def push(self, rank: int, turn: int, rows: Tensor, there: Tensor, last: bool = True) -> None:
        """Copies rows into `there`, a place in a slot of `rank`; the last ones raise its flag."""
        with self.lane.after_products():
            there.copy_(rows, non_blocking=True)
            if last:
                self.handle.put_signal(rank, turn)

    def wait(self, rank: int, turn: int) -> None:
        """Products started next find what `rank` sent. Lowers the flag."""
        self.handle.wait_signal(rank, turn)

    def gather(self, x: Tensor) -> Gather:
        t, width = x.shape
        if self.n * x.nbytes > self.capacity:
            return super().gather(x)
        turn, shape = self.next(), (self.n * t, width)
        for rank in self.others:
            self.push(rank, turn, x, self.slot(rank, turn, x, shape)[self.own(t)])
        copied, tokens = self.lane.mark(), self.slot(self.me, turn, x, shape)
        return Gather(self, tokens, lambda rank: self.wait(rank, turn), copied.wait)

    def sums(self, like: Tensor, t: int, width: int) -> Any:
        if self.n * t * width * like.element_size() > self.capacity:
            return super().sums(like, t, width)
        return PeerSums(self, like, (self.n, t, width))


class PeerSums:
    """`exchange.Sums` through the slots of `peers`; shape: [n, t, width], a rank's own share last."""

    def __init__(self, peers: Peers, like: Tensor, shape: tuple[int, int, int]) -> None:
        self.peers, self.turn, self.like, self.shape = peers, peers.next(), like, shape
        self.filled = [0] * peers.n
        self.sent: list[Tensor] = []  # not to be overwritten before the copies are done

    def send(self, rank: int, rows: Tensor) -> None:
        peers, at = self.peers, self.filled[rank]
        self.filled[rank] = end = at + rows.shape[0]
        place = peers.me - (peers.me > rank)  # among those who send to `rank`
        there = peers.slot(rank, self.turn, self.like, self.shape)[place, at:end]
        peers.push(rank, self.turn, rows, there, end == self.shape[1])
        self.sent.append(rows)

    def place(self) -> Tensor:
        return self.peers.slot(self.peers.me, self.turn, self.like, self.shape)[-1]

    def collected(self) -> Tensor:
        peers = self.peers
        for rank in peers.others:
            peers.wait(rank, self.turn)
        peers.lane.mark().wait()
        return peers.slot(peers.me, self.turn, self.like, self.shape)

    def total(self, own: Tensor) -> Tensor:
        return self.peers.add(own, self.collected()[:-1])


def connect(
    group: Any, device: torch.device, size: int, add: Callable[[Tensor, Tensor], Tensor]
) -> Peers | None:
    """Peers of a group, or None where its GPUs do not reach each other's memory. Collective.

    The memory (SLOTS times `size` bytes) is freed with the last reference to it.
    """
    hosts: list[Any] = [None] * group.size()
    dist.all_gather_object(hosts, socket.gethostname(), group=group)
    if len(set(hosts)) > 1:
        return None
    import torch.distributed._symmetric_memory as symmetric

    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")  # nothing here uses it
    capacity = -(-size // ALIGN) * ALIGN
    memory: Any = None
    handle: Any = None
    with suppress(RuntimeError):  # a driver without such memory, or none left
        memory = symmetric.empty(SLOTS * capacity, dtype=torch.uint8, device=device)
    if not _everywhere(memory is not None, group, device):  # or the others would wait for this one
        return None
    with suppress(RuntimeError):  # no peer access, or containers that keep processes apart
        handle = symmetric.rendezvous(memory, group)
    if not _everywhere(handle is not None, group, device):
        return None
    return Peers(group, handle, capacity, Lane(device), add, memory)


def _everywhere(done: bool, group: Any, device: torch.device) -> bool:
    every = torch.tensor([done], dtype=torch.int32, device=device)
    dist.all_reduce(every, op=dist.ReduceOp.MIN, group=group)
    return bool(every.item())
