"""Runs a function in a world of gloo processes and hands back what each returned."""

from __future__ import annotations

import importlib
import pickle
import tempfile
import time
from pathlib import Path

from tests import forked


def world(size: int, function: str, *arguments, timeout: float = 1200) -> list:
    """[what `function` ("module:name") returned on rank 0, 1, ...]; it is called with `arguments`
    inside an initialised process group. A failing rank's output is in the error."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        processes = []
        for rank in range(size):
            env = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size)}
            job = (folder, rank, size, function, arguments)
            processes.append(forked.start(_run, *job, log=folder / f"{rank}.log", **env))
        try:
            end = time.monotonic() + timeout
            while any(p.exitcode is None for p in processes) and time.monotonic() < end:
                if any(p.exitcode not in (None, 0) for p in processes):
                    end = min(end, time.monotonic() + 5)  # the others wait for the failed one
                time.sleep(0.05)
        finally:
            for process in processes:
                process.kill()
                process.join()
        logs = [(folder / f"{rank}.log").read_text()[-4000:] for rank in range(size)]
        codes = [p.exitcode or 0 for p in processes]
        if any(codes):  # a killed one waited for a failed one: show the failed one
            bad = [r for r, code in enumerate(codes) if code > 0] or list(range(size))
            raise AssertionError("\n".join(f"--- rank {r} failed ---\n{logs[r]}" for r in bad[:2]))
        return [pickle.loads((folder / f"{r}.result").read_bytes()) for r in range(size)]


def _run(folder: Path, rank: int, size: int, function: str, arguments: tuple) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=size)
    module, _, name = function.partition(":")
    value = getattr(importlib.import_module(module), name)(*arguments)
    (folder / f"{rank}.result").write_bytes(pickle.dumps(value))
    dist.barrier()
    dist.destroy_process_group()
