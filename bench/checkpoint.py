"""How long a checkpoint holds up training, and how long it takes to write and to read.

    python -m bench.checkpoint [--preset bert-large] [--folder DIR] [--json]

One process holds the whole state (fp32 masters and both moments). The stall is what `save` takes
before training may go on (the second save; the first also makes the staging buffers); reading
checks every checksum. Beside them stand a plain copy in memory and a plain write of the same bytes.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from configs.loading import to_dict
from configs.model import ModelConfig, parameter_count, resolve_model
from pretrain.checkpoint import latest
from pretrain.checkpoint.reader import Reader, load_shard
from pretrain.checkpoint.writer import Writer
from pretrain.model import build
from pretrain.parallel.groups import SINGLE
from pretrain.parallel.slices import Shard, make_slices


def seconds(call: Callable[[], object]) -> float:
    start = time.monotonic()
    call()
    return time.monotonic() - start


def plain_write(path: Path, tensor: torch.Tensor) -> None:
    with open(path, "wb", buffering=0) as file:
        file.write(memoryview(tensor.numpy().data).cast("B"))
        os.fsync(file.fileno())
    path.unlink()


def measure(preset: str, folder: Path) -> dict[str, float | str]:
    """Seconds of every part, and GB of the checkpoint."""
    config = resolve_model(ModelConfig(preset=preset), 30522)
    model, pieces = build(config, init=False)
    held, at = [], 0
    for p in model.parameters():
        held.append((p, 0, p.numel(), at))
        at += p.numel()
    master, m, v = (torch.ones(at) for _ in range(3))
    shard = Shard(master, m, v, make_slices(pieces, held), whole=True)
    meta = {"model": to_dict(config), "tensors": {p.name: list(p.logical_shape) for p in pieces}}
    writer = Writer(folder, SINGLE, 2, "bench")
    out: dict[str, float | str] = {"preset": preset, "gb": 12 * parameter_count(config) / 1e9}
    for number in (1, 2):
        out[f"stall_{number}_s"] = seconds(lambda n=number: writer.save(n, shard, meta))
        out[f"write_{number}_s"] = seconds(writer.wait)
    writer.close()
    copy = torch.empty_like(master)
    out["copy_s"] = 3 * seconds(lambda: copy.copy_(master))
    out["plain_write_s"] = 3 * seconds(lambda: plain_write(folder / "plain", copy))
    with Reader(latest(folder) or folder) as reader:
        out["read_s"] = seconds(lambda: load_shard(reader, shard))
    return out


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--preset", default="bert-large")
    parser.add_argument(
        "--folder", default="", help="where to write; a temporary folder when empty"
    )
    parser.add_argument("--json", action="store_true", help="one JSON line last")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(dir=options.folder or None))
    try:
        found = measure(options.preset, folder)
    finally:
        shutil.rmtree(folder)
    for key, value in found.items():
        print(f"{key:14} {value:.2f}" if isinstance(value, float) else f"{key:14} {value}")
    if options.json:
        print(json.dumps(found))


if __name__ == "__main__":
    main()
