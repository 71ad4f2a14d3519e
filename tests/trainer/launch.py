"""Runs a function in a world of gloo processes and hands back what each returned.

Importing torch and DeepSpeed costs seconds a process, so a test module starts one world and runs
all of its layouts inside.
"""

from __future__ import annotations

import importlib
import os
import pickle
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from cluster.environment import free_port

REPO = Path(__file__).resolve().parents[2]


def world(size: int, function: str, *arguments, timeout: float = 600) -> list:
    """[what `function` ("module:name") returned on rank 0, 1, ...]; it is called with `arguments`
    inside an initialised process group. A failing rank's output is in the error."""
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        job = Path(folder) / "job"
        job.write_bytes(pickle.dumps((function, arguments)))
        processes = []
        for rank in range(size):
            env = {
                **os.environ,
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(size),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "OMP_NUM_THREADS": "1",
                "DS_ACCELERATOR": "cpu",
                "PYTHONPATH": os.pathsep.join([str(REPO), os.environ.get("PYTHONPATH", "")]),
            }
            command = [sys.executable, "-m", "tests.trainer.launch", str(job)]
            with open(Path(folder) / f"{rank}.log", "wb") as log:
                processes.append(
                    subprocess.Popen(command, env=env, cwd=REPO, stdout=log, stderr=log)
                )
        try:
            end = time.monotonic() + timeout
            while any(p.poll() is None for p in processes) and time.monotonic() < end:
                if any(p.poll() not in (None, 0) for p in processes):
                    end = min(end, time.monotonic() + 5)  # the others wait for the failed one
                time.sleep(0.05)
        finally:
            for process in processes:
                process.kill()
        logs = [(Path(folder) / f"{rank}.log").read_text()[-4000:] for rank in range(size)]
        codes = [p.wait() for p in processes]
        if any(codes):  # a killed one waited for a failed one: show the failed one
            bad = [r for r, code in enumerate(codes) if code > 0] or list(range(size))
            raise AssertionError("\n".join(f"--- rank {r} failed ---\n{logs[r]}" for r in bad[:2]))
        return [pickle.loads((Path(folder) / f"job.{r}").read_bytes()) for r in range(size)]


def _main(job: str) -> None:
    import torch
    import torch.distributed as dist

    function, arguments = pickle.loads(Path(job).read_bytes())
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    module, _, name = function.partition(":")
    result = getattr(importlib.import_module(module), name)(*arguments)
    Path(f"{job}.{dist.get_rank()}").write_bytes(pickle.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    _main(sys.argv[1])
