"""Sequence-parallel products over each kind of exchange, run by the processes that tests start."""

from __future__ import annotations

import random
import time
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist

from pretrain.kernels import plain
from pretrain.parallel.exchange import Exchange
from pretrain.parallel.peers import SLOTS, Peers, connect

TOKENS, HIDDEN, INNER, LAYERS = 24, 8, 12, 3
CAPACITY = TOKENS * HIDDEN * 8


class SharedFiles:
    """Symmetric memory as torch's, on files that all processes map; ranks are late at random."""

    def __init__(self, folder: Path, rank: int, size: int, capacity: int = CAPACITY) -> None:
        self.rank, self.size, self.random = rank, size, random.Random(rank)
        self.memory = [self._map(folder / f"{r}.memory", SLOTS * capacity) for r in range(size)]
        self.pads = [self._map(folder / f"{r}.pad", 4096) for r in range(size)]

    @staticmethod
    def _map(path: Path, size: int) -> torch.Tensor:
        return torch.from_file(str(path), shared=True, size=size, dtype=torch.uint8)

    def get_buffer(self, rank: int, shape: tuple, dtype: torch.dtype, offset: int) -> torch.Tensor:
        size = torch.Size(shape).numel()
        return self.memory[rank].view(dtype)[offset : offset + size].view(shape)

    def put_signal(self, rank: int, channel: int) -> None:
        self._turn(rank, channel * self.size + self.rank, 0)

    def wait_signal(self, source: int, channel: int) -> None:
        self._turn(self.rank, channel * self.size + source, 1)
        if self.random.random() < 0.3:
            time.sleep(self.random.random() * 3e-3)

    def _turn(self, rank: int, flag: int, found: int) -> None:
        """Turns a flag as soon as it is found so."""
        pad = self.pads[rank].view(torch.int32)
        end = time.monotonic() + 60
        while pad[flag] != found:
            if time.monotonic() > end:
                raise TimeoutError(f"flag {flag} of {rank} does not become {found}")
            time.sleep(1e-5)
        pad[flag] = 1 - found


class Inline:
    """Copies at once: the earliest moment at which they could overwrite what is still read."""

    @contextmanager
    def after_products(self):
        yield

    def mark(self) -> Inline:
        return self

    def wait(self) -> None:
        pass


def add(own: torch.Tensor, parts: torch.Tensor) -> torch.Tensor:
    return own.add_(parts.sum(0))


def make(kind: str, folder: Path) -> Exchange:
    group = dist.group.WORLD
    if kind == "collectives":
        return Exchange(group)
    capacity = CAPACITY if kind == "peers" else 0
    memory = SharedFiles(folder, dist.get_rank(), dist.get_world_size())
    return Peers(group, memory, capacity, Inline(), add)


def weights() -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(1)
    shapes = [(INNER, HIDDEN), (INNER,), (HIDDEN, INNER)] * LAYERS
    return [torch.randn(s, generator=g, dtype=torch.float64) / 3 for s in shapes]


def inputs(step: int) -> torch.Tensor:
    g = torch.Generator().manual_seed(100 + step)
    return torch.randn(TOKENS, HIDDEN, generator=g, dtype=torch.float64)


def whole(step: int) -> list[torch.Tensor]:
    """On one process: the result, and the gradients of the input and of every weight."""
    x, parts = inputs(step).requires_grad_(), [w.requires_grad_() for w in weights()]
    y = x
    for layer in range(LAYERS):
        up, bias, down = parts[3 * layer : 3 * layer + 3]
        y = (y + (y @ up.t() + bias).sin() @ down.t()).tanh()
    (y * y).sum().backward()
    return [y.detach(), x.grad, *(w.grad for w in parts)]


DIMS = [0, 0, 1] * LAYERS  # in which the weights are cut


def sharded(exchange: Exchange, step: int, device: str = "cpu") -> list[torch.Tensor]:
    """This rank's shares of the same, from its shares of tokens and weights."""

    def cut(tensor: torch.Tensor, dim: int) -> torch.Tensor:
        return tensor.chunk(exchange.n, dim)[exchange.me].to(device, copy=True).requires_grad_()

    x, parts = cut(inputs(step), 0), [cut(w, d) for w, d in zip(weights(), DIMS)]
    y = x
    for layer in range(LAYERS):
        up, bias, down = parts[3 * layer : 3 * layer + 3]
        inner, residual = plain.gathered_linear(y, up, bias, exchange)
        added = plain.scattered_linear(inner.sin(), down, exchange)
        y = (residual + (added if added.dim() == 2 else added.sum(0))).tanh()
    (y * y).sum().backward()
    return [t.cpu() for t in (y.detach(), x.grad, *(w.grad for w in parts))]


def joined(tensor: torch.Tensor, dim: int) -> torch.Tensor:
    every = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(every, tensor.contiguous())
    return torch.cat(every, dim)


def both(kinds: list[str], folder: Path, steps: int) -> dict[str, list[tuple[list, list]]]:
    """kind: (one process, shared out) of every step; nothing waits between the steps."""
    wanted = [whole(step) for step in range(steps)]
    out = {}
    for kind in kinds:
        exchange = make(kind, folder)
        dist.barrier()
        shares = [sharded(exchange, step) for step in range(steps)]
        put = [[joined(t, d) for t, d in zip(share, [0, 0, *DIMS])] for share in shares]
        out[kind] = list(zip(wanted, put))
    return out


def refused(step: str) -> bool:
    """Whether a rank on which `step` fails leaves all of them without peers, and none waiting."""
    import torch.distributed._symmetric_memory as symmetric

    def fail(*_, **__):
        raise RuntimeError("out of memory")

    def fine(*_, **__):
        assert step != "empty", "waits for the rank that has no memory"
        return torch.empty(1)

    first = dist.get_rank() == 0
    symmetric.empty = fail if step == "empty" and first else lambda *_, **__: torch.empty(1)
    symmetric.rendezvous = fail if first else fine
    return connect(dist.group.WORLD, torch.device("cpu"), CAPACITY, add) is None


def on_gpus(steps: int) -> list[tuple[list, list]]:
    """The same between the GPUs of this host, one a rank."""
    device = torch.device("cuda", dist.get_rank())
    torch.cuda.set_device(device)
    exchange = connect(dist.new_group(backend="nccl"), device, CAPACITY, add)
    assert isinstance(exchange, Peers)
    shares = [sharded(exchange, step, "cuda") for step in range(steps)]
    put = [[joined(t, d) for t, d in zip(share, [0, 0, *DIMS])] for share in shares]
    return [(whole(step), got) for step, got in enumerate(put)]
