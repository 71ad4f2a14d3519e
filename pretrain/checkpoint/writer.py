"""Writes checkpoints: stage in memory, then a thread writes while training goes on.

No collective runs in the thread: every rank publishes its file and a small JSON in a folder of
this attempt, and rank 0 waits for all of them before it gives the folder its name.
"""

from __future__ import annotations

import json
import os
import shutil
import struct
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any
from zlib import crc32

import torch
from torch import Tensor

from configs.checkpoints import incomplete
from configs.console import say
from configs.errors import UserError
from configs.files import sync_folder
from pretrain.checkpoint.boxes import boxes_of
from pretrain.checkpoint.folder import (
    FORMAT,
    INDEX,
    folder_of,
    prune,
    read_json,
    write_json,
)
from pretrain.parallel.groups import Groups
from pretrain.parallel.slices import Shard, Slice

POLL_S = 0.05
PATIENCE_S = 1800.0  # a rank's part of a big checkpoint on a slow file system


def write_boxes(path: Path, boxes: Sequence[tuple[str, Tensor]]) -> dict[str, int]:
    """One safetensors file of fp32 CPU tensors; {key: crc32 of its bytes}. Fsynced."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for key, tensor in boxes:
        size = tensor.numel() * 4
        header[key] = {
            "dtype": "F32",
            "shape": list(tensor.shape),
            "data_offsets": [at, at + size],
        }
        at += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    checksums = {}
    with open(path, "wb", buffering=0) as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for key, tensor in boxes:
            data: Any = memoryview(tensor.contiguous().numpy().data).cast("B")
            checksums[key] = crc32(data)  # both release the interpreter lock: training goes on
            while data:
                data = data[file.write(data) :]
        os.fsync(file.fileno())
    return checksums


class Writer:
    """One per rank and run. `save` returns as soon as the state is staged.

    Args:
        token: the same random word on every rank, so that the leftovers of a killed run are never
            taken for parts of this one's.
        saved: called with (step, how long staging held up training, s) in the caller's thread once a
            save is found to be on disk (on rank 0: published).
    """

    def __init__(
        self,
        train_dir: Path,
        groups: Groups,
        keep: int,
        token: str,
        saved: Callable[[int, float], None] = lambda step, stalled_s: None,
    ) -> None:
        self.train_dir, self.groups, self.keep, self.token = train_dir, groups, keep, token
        self._saved = saved
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._running: Future[None] | None = None
        self._step = 0
        self._given_up = threading.Event()
        self._staged: dict[str, Tensor] = {}
        self._stalled_s = 0.0
        if groups.rank == 0:
            left = [p for p in incomplete(train_dir) if not p.name.endswith(f"-{token}")]
            for path in left:
                say(f"{path.name} is incomplete (its save was killed): removed")
                shutil.rmtree(path)

    def save(self, step: int, shard: Shard, meta: Mapping[str, Any]) -> None:
        """Stages this rank's part and starts writing it. Raises what the previous save raised."""
        start = time.monotonic()
        self.wait()
        slices = self._own(shard)
        low = min((s.at for s in slices), default=0)
        self._stage(shard, low, max((s.at + s.numel for s in slices), default=0))
        staged = [replace(s, at=s.at - low) for s in slices]
        boxes = [
            (f"{kind}/{box.name}@{','.join(map(str, box.offset))}", box.view(self._staged[kind]))
            for kind in shard.kinds
            for box in boxes_of(staged)
        ]
        values = {**meta, "step": step, "kinds": list(shard.kinds)}
        self._step, self._running = step, self._thread.submit(self._write, step, boxes, values)
        self._stalled_s = time.monotonic() - start

    def wait(self) -> None:
        """Until the last save is on disk (on rank 0: published); raises what went wrong in it."""
        if self._running is not None:
            running, self._running = self._running, None
            running.result()
            self._saved(self._step, self._stalled_s)

    def look(self) -> None:
        """As `wait`, if the last save has come to its end."""
        if self._running is not None and self._running.done():
            self.wait()

    def close(self) -> None:
        """Finishes the last save and the thread."""
        self.wait()
        self._thread.shutdown()

    def give_up(self) -> None:
        """Ends the thread without waiting for other ranks (this process is failing)."""
        self._given_up.set()
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _own(self, shard: Shard) -> list[Slice]:
        """What this rank writes: replicated tensors are the first tensor-parallel rank's, and a
        state that every data-parallel rank holds is shared out among them."""
        groups = self.groups
        mine = [s for s in shard.slices if s.piece.sharded or groups.tp_rank == 0]
        if not shard.whole or groups.dp == 1:
            return mine
        size = -(-shard.master.numel() // groups.dp)
        low, high = groups.dp_rank * size, (groups.dp_rank + 1) * size
        out = []
        for s in mine:
            begin, end = max(s.at, low), min(s.at + s.numel, high)
            if begin < end:
                out.append(Slice(s.piece, s.index, s.begin + begin - s.at, end - begin, begin))
        return out

    def _stage(self, shard: Shard, low: int, high: int) -> None:
        """Copies elements low .. high of the shard into host buffers that are kept, since fresh
        ones cost page faults every time."""
        on_gpu = shard.master.device.type == "cuda"
        for kind in shard.kinds:
            if kind not in self._staged:
                self._staged[kind] = torch.empty(high - low, pin_memory=on_gpu)
            self._staged[kind].copy_(shard.tensor(kind)[low:high], non_blocking=True)
        if on_gpu:
            torch.cuda.current_stream().synchronize()

    def _write(self, step: int, boxes: list[tuple[str, Tensor]], meta: dict[str, Any]) -> None:
        rank, world = self.groups.rank, self.groups.world
        final = folder_of(self.train_dir, step)
        folder = final.with_name(f"{final.name}.partial-{self.token}")
        folder.mkdir(parents=True, exist_ok=True)
        need = sum(t.numel() for _, t in boxes) * 4
        free = shutil.disk_usage(folder).free
        if need > free:
            raise UserError(
                f"{folder}: {need / 1e9:.1f} GB to write, {free / 1e9:.1f} GB free",
                "free some disk or lower checkpoint.keep; the same command goes on from the last one",
            )
        name = f"rank-{rank:05d}-of-{world:05d}.safetensors"
        try:
            checksums = write_boxes(folder / name, boxes)
        except OSError as error:  # of a write, which knows no name
            raise OSError(error.errno, error.strerror, str(folder / name)) from None
        size = (folder / name).stat().st_size
        sync_folder(folder)
        # Rank 0 gives the folder its name once it has seen them all: it may be gone behind this.
        write_json(folder / f"{name}.json", {"bytes": size, "boxes": checksums}, durable=False)
        if rank == 0:
            self._publish(folder, final, meta)

    def _publish(self, folder: Path, final: Path, meta: dict[str, Any]) -> None:
        world = self.groups.world
        files = {}
        start = time.monotonic()
        for rank in range(world):
            name = f"rank-{rank:05d}-of-{world:05d}.safetensors"
            part = folder / f"{name}.json"
            while not part.is_file():
                if self._given_up.wait(POLL_S):
                    return
                if time.monotonic() - start > PATIENCE_S:
                    raise UserError(
                        f"{part} did not appear in {PATIENCE_S:.0f} s",
                        f"rank {rank} is stuck, or work_dir is not on a file system all nodes share",
                    )
            files[name] = read_json(part)
            part.unlink()
        publish(folder, final, {**meta, "files": files})
        prune(self.train_dir, self.keep, meta["step"])


def publish(folder: Path, final: Path, meta: dict[str, Any]) -> None:
    """Writes the index and gives the folder its name, replacing an older save of the same step."""
    write_json(folder / INDEX, {"format": FORMAT, **meta})
    sync_folder(folder)
    if final.exists():
        (final / INDEX).unlink(missing_ok=True)
        shutil.rmtree(final)
    folder.rename(final)
    sync_folder(final.parent)


def save_logical(
    train_dir: str | Path, tensors: Mapping[str, Tensor], meta: Mapping[str, Any], step: int = 0
) -> Path:
    """A checkpoint out of whole tensors (an imported model): masters without moments.

    Args:
        tensors: Hugging Face name -> tensor (stored as fp32). meta: at least `model`, the resolved
            model config as a dict; `tokenizer_fingerprint` if known.

    Raises:
        ValueError: meta has no `model`.
    """
    final = folder_of(Path(train_dir), step)
    folder = final.with_name(f"{final.name}.partial-import")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    name = "rank-00000-of-00001.safetensors"
    boxes = [
        (f"master/{key}@{','.join('0' for _ in t.shape)}", t.detach().float().cpu().contiguous())
        for key, t in tensors.items()
    ]
    checksums = write_boxes(folder / name, boxes)
    files = {name: {"bytes": (folder / name).stat().st_size, "boxes": checksums}}
    shapes = {key: list(t.shape) for key, t in tensors.items()}
    values = {**meta, "step": step, "kinds": ["master"], "tensors": shapes, "files": files}
    if "model" not in values:
        raise ValueError("save_logical: meta lacks `model`")
    publish(folder, final, values)
    return final
