"""Time and memory of exporting a tensor-parallel checkpoint on a machine without a GPU.

    python -m bench.export [--preset bert-large] [--tp 4]

Writes a checkpoint as `tp` ranks would (masters and moments, sharded and padded), exports it in a
process of its own, self-check included, and prints seconds, CPU seconds and peak memory over the
size of the fp32 model. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from math import prod
from pathlib import Path

import torch

from bench.harness import commit
from configs.loading import to_dict
from configs.model import ModelConfig, padded_vocab, parameter_count, resolve_model
from pretrain.checkpoint.folder import KINDS, folder_of
from pretrain.checkpoint.writer import publish, write_boxes
from pretrain.convert.source import WORDS, hf_shapes
from pretrain.convert.vocabulary import SPECIAL, write_folder

COLUMN = ("query", "key", "value", "intermediate.dense", "word_embeddings", "predictions.bias")


def sharded_dim(name: str) -> int | None:
    """The dimension that tensor parallelism cuts, None for replicated tensors."""
    if any(part in name for part in COLUMN):
        return 0
    row = (
        name.endswith(("attention.output.dense.weight", "output.dense.weight"))
        and "cls" not in name
    )
    return 1 if row else None


def write_checkpoint(work: Path, config: ModelConfig, tp: int) -> None:
    """train/checkpoints/step-00000007 with random values, one file a rank."""
    final = folder_of(work / "train", 7)
    folder = final.with_name(final.name + ".partial-bench")
    folder.mkdir(parents=True)
    generator = torch.Generator().manual_seed(1)
    shapes = hf_shapes(config)
    files = {}
    for rank in range(tp):
        boxes = []
        for name, shape in shapes.items():
            dim = sharded_dim(name)
            if dim is None and rank:
                continue
            offset, size = [0] * len(shape), list(shape)
            if dim is not None:
                whole = padded_vocab(config, tp) if shape[0] == config.vocab_size else shape[dim]
                offset[dim] = rank * whole // tp
                size[dim] = min(whole // tp, shape[dim] - offset[dim])
            for kind in KINDS:
                block = torch.randn(prod(size), generator=generator).view(size) * 0.02
                boxes.append((f"{kind}/{name}@{','.join(map(str, offset))}", block))
        file = f"rank-{rank:05d}-of-{tp:05d}.safetensors"
        checksums = write_boxes(folder / file, boxes)
        files[file] = {"bytes": (folder / file).stat().st_size, "boxes": checksums}
    meta = {
        "step": 7,
        "kinds": list(KINDS),
        "model": to_dict(config),
        "tensors": {name: list(shape) for name, shape in shapes.items()},
        "files": files,
    }
    publish(folder, final, meta)
    words = [*SPECIAL.values(), *(f"w{i}" for i in range(shapes[WORDS][0] - len(SPECIAL)))]
    (work / "vocab.txt").write_text("\n".join(words))
    write_folder(work / "vocab.txt", work / "vocab", None, config.max_position_embeddings)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--preset", default="bert-large")
    parser.add_argument("--tp", type=int, default=4)
    parser.add_argument("--folder", default=None, help="where the checkpoint is made")
    options = parser.parse_args()
    config = resolve_model(ModelConfig(preset=options.preset, vocab_size=30522))
    size = parameter_count(config) * 4
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        work = Path(name)
        write_checkpoint(work, config, options.tp)
        start = time.monotonic()
        command = [sys.executable, "-m", "pretrain", "export", str(work), str(work / "hf")]
        subprocess.run(command, check=True, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""})
        seconds = time.monotonic() - start
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    result = {
        "preset": options.preset,
        "tp": options.tp,
        "commit": commit(),
        "seconds": round(seconds, 1),
        "cpu_seconds": round(used.ru_utime + used.ru_stime, 1),
        "model_gb": round(size / 1e9, 3),
        "peak_gb": round(used.ru_maxrss * 1024 / 1e9, 3),
        "peak_over_model": round(used.ru_maxrss * 1024 / size, 2),
    }
    for key, value in result.items():
        print(f"{key:>16}  {value}")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
