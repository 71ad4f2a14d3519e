"""Tokens on their way between tensor-parallel ranks, beside the products that wait for them.

Under sequence parallelism (2205.05198) every one of n ranks holds t = T / n tokens. A column layer
needs everybody's tokens, a row layer hands everybody sums over all ranks for its tokens:

    gather   [t, H] of every rank -> all ranks, who use tokens as soon as they are there
    sums     every rank makes [t, H] for every other one, who adds up what it gets

`Exchange` does both with the group's own collectives, on any hosts; `pretrain.parallel.peers` by the
copy engines of GPUs that reach each other's memory. Every rank makes the same exchanges in the same
order, at most two of them at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from configs.sharing import may_share


class Exchange:
    """By the collectives of a process group, whose size is a power of two.

    blocks: the other ranks, (first, behind the last), in the order in which their tokens come and,
    backwards, in which theirs are made: one neighbour, then twice as many, and so on, since large
    products are the faster ones. At any time everyone serves another one.
    """

    def __init__(self, group: Any) -> None:
        self.group, self.n, self.me = group, group.size(), group.rank()
        self.blocks: list[tuple[int, int]] = []
        size = 1
        while size < self.n:
            first = (self.me // size ^ 1) * size
            self.blocks.append((first, first + size))
            size *= 2
        self.others = [rank for block in self.blocks for rank in self.ranks(*block)]

    def __str__(self) -> str:
        return "tokens shared out by collectives"

    def own(self, t: int) -> slice:
        """This rank's among the tokens [n * t] of all."""
        return slice(self.me * t, (self.me + 1) * t)

    def ranks(self, first: int, end: int) -> list[int]:
        """Those of a block, in the order in which to serve them."""
        return sorted(range(first, end), key=lambda rank: rank ^ self.me)

    def gather(self, x: Tensor) -> Gather:
        """Starts to send x [t, H], which must stay as it is until the last tokens have arrived."""
        tokens = x.new_empty(self.n * x.shape[0], x.shape[1])
        work = dist.all_gather_into_tensor(tokens, x, group=self.group, async_op=True)
        return Gather(self, tokens, lambda rank: work.wait(), lambda: None)

    def sums(self, like: Tensor, t: int, width: int) -> Any:
        """Sums of [t, width] in the dtype and on the device of `like`."""
        return Sums(self, like.new_empty(self.n, t, width))


class Gather:
    """Tokens of the other ranks. tokens: [n * t, H], where this rank's own t rows are not written.

    arrived(rank): what is computed after it finds that rank's rows; finish(): after the last of them.
    """

    def __init__(
        self,
        exchange: Exchange,
        tokens: Tensor,
        arrived: Callable[[int], None],
        finish: Callable[[], None],
    ) -> None:
        self.exchange, self.tokens, self.t = exchange, tokens, tokens.shape[0] // exchange.n
        self._arrived, self._finish = arrived, finish
        self._coming = list(exchange.blocks)

    def each(self) -> Iterator[tuple[slice, Tensor]]:
        """(which tokens, they) of the other ranks in the order of arrival."""
        while self._coming:
            first, end = self._coming.pop(0)
            for rank in range(first, end):
                self._arrived(rank)
            if not self._coming:
                self._finish()
            which = slice(first * self.t, end * self.t)
            yield which, self.tokens[which]

    def pieces(
        self, own: Tensor, use: Callable[[slice, Tensor], None] = lambda which, rows: None
    ) -> Iterator[tuple[slice, Tensor]]:
        """All tokens in one or two pieces; `own` is this rank's part. use: told of what has not yet
        come out of `each`, as that would give it."""
        if self.exchange.n > 2:
            for which, rows in self.each():
                use(which, rows)
            self.tokens[self.exchange.own(self.t)] = own
            yield slice(0, len(self.tokens)), self.tokens
            return
        yield self.exchange.own(self.t), own
        for which, rows in self.each():
            use(which, rows)
            yield which, rows


class Sums:
    """What this rank adds to the others' tokens. parts: [n, t, width]."""

    def __init__(self, exchange: Exchange, parts: Tensor) -> None:
        self.exchange, self.parts = exchange, parts
        self.filled = [0] * exchange.n

    def send(self, rank: int, rows: Tensor) -> None:
        """The next rows of what `rank` gets from this one."""
        at = self.filled[rank]
        self.filled[rank] += rows.shape[0]
        self.parts[rank, at : at + rows.shape[0]] = rows

    def place(self) -> Tensor:
        """Where to write this rank's own share of its sums, [t, width]."""
        return self.parts[self.exchange.me]

    def collected(self) -> Tensor:
        """The sums [t, width], or what adds up to them, [n, t, width]: good for the next kernel only.
        `place` is written before."""
        out = torch.empty_like(self.place())
        dist.reduce_scatter_tensor(out, self.parts.flatten(0, 1), group=self.exchange.group)
        return out

    def total(self, own: Tensor) -> Tensor:
        """own [t, width] (may be overwritten) + everything that the others made for this rank."""
        self.place().copy_(own)
        return self.collected()


def make_exchange(
    group: Any, wanted: bool | None, device: torch.device, kernels: Any, size: int
) -> Exchange | None:
    """How the ranks of a tensor-parallel group share out tokens; None: every rank keeps all of them.

    Args:
        wanted: `parallel.sequence_parallel`. None: only between GPUs that reach each other's memory.
            True: else by collectives, which hide less than sums over whole activations do, but need
            less memory. kernels: from `pretrain.kernels.select`.
        size: bytes of one [T, H] activation of the largest micro-batch.
    Collective over the group. The rule is `configs.sharing`'s.
    """
    if group is None or not may_share(group.size(), wanted):
        return None
    if device.type == "cuda" and hasattr(kernels, "add_parts"):
        from pretrain.parallel.peers import connect

        peers = connect(group, device, size, kernels.add_parts)
        if peers is not None:
            return peers
    return Exchange(group) if wanted else None
