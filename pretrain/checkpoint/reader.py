"""Reads checkpoints into any layout, by intersecting boxes; checks every byte that it uses."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from zlib import crc32

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from pretrain.checkpoint.boxes import boxes_of, overlap
from pretrain.checkpoint.folder import Damaged, check_sizes, missing_kinds, read_meta
from pretrain.parallel.slices import Shard


class Reader:
    """An open checkpoint. Files are memory-mapped; a box's checksum is checked on first use.

    Raises:
        Damaged: a file is missing, cut or altered, or does not cover a tensor.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.meta = read_meta(self.folder)
        check_sizes(self.folder, self.meta)
        self._stack = ExitStack()
        self._checked: dict[str, Tensor] = {}
        self._index: dict[str, list[tuple[tuple[int, ...], Any, str, int]]] = {}
        for name, part in self.meta["files"].items():
            path = self.folder / name
            try:
                file = self._stack.enter_context(safe_open(path, "pt"))
            except (SafetensorError, OSError) as error:
                raise Damaged(f"{path}: {error}") from None
            for key, checksum in part["boxes"].items():
                tensor, _, corner = key.rpartition("@")
                offset = tuple(int(x) for x in corner.split(","))
                self._index.setdefault(tensor, []).append((offset, file, key, checksum))

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: object) -> None:
        self._checked.clear()
        self._stack.close()

    def fill(self, kind: str, name: str, offset: Sequence[int], out: Tensor) -> None:
        """Copies the block of kind/name at `offset`, of the shape of `out`, into it."""
        left = out.numel()
        for corner, file, key, checksum in self._index.get(f"{kind}/{name}", ()):
            shape = self._shape(file, key)
            met = overlap(offset, out.shape, corner, shape)
            if met is None:
                continue
            part = self._box(file, key, checksum)[met[1]]
            out[met[0]].copy_(part)
            left -= part.numel()
        if left:
            raise Damaged(f"{self.folder}: {left} elements of {kind}/{name} are missing")

    def check(self) -> None:
        """Every checksum; reads the whole checkpoint, box by box."""
        for boxes in self._index.values():
            for _, file, key, checksum in boxes:
                self._box(file, key, checksum)
                self.forget()

    def _shape(self, file: Any, key: str) -> list[int]:
        try:
            return list(file.get_slice(key).get_shape())
        except SafetensorError as error:
            raise Damaged(f"{self.folder}: {key}: {error}") from None

    def _box(self, file: Any, key: str, checksum: int) -> Tensor:
        if key not in self._checked:
            try:
                tensor = file.get_tensor(key)
            except SafetensorError as error:
                raise Damaged(f"{self.folder}: {key}: {error}") from None
            if crc32(memoryview(tensor.numpy()).cast("B")) != checksum:
                raise Damaged(f"{self.folder}: {key} was altered (its checksum does not fit)")
            self._checked[key] = tensor
        return self._checked[key]

    def forget(self) -> None:
        """Drops the mapped boxes of the tensors read so far."""
        self._checked.clear()


@torch.no_grad()
def load_shard(reader: Reader, shard: Shard, moments: bool = True) -> None:
    """Fills a rank's masters from a checkpoint of any layout; its moments too, or with zeros.

    Raises:
        Damaged: see Reader; also where a tensor is absent or of another shape.
    """
    kinds = shard.kinds if moments else ("master",)
    absent = missing_kinds(reader.meta, kinds)
    if absent:
        raise Damaged(f"{reader.folder} has no {', '.join(absent)}")
    stored = reader.meta["tensors"]
    for s in shard.slices:
        shape = stored.get(s.piece.name)
        if shape is None or tuple(shape) != s.piece.logical_shape:
            raise Damaged(
                f"{reader.folder}: {s.piece.name} is {shape}, the model's {s.piece.logical_shape}"
            )
    for s in shard.slices:
        for kind in kinds:
            flat = shard.tensor(kind)
            for box in boxes_of([s]):
                reader.fill(kind, box.name, box.offset, box.view(flat))
        reader.forget()
    for kind in set(shard.kinds) - set(kinds):  # what a damaged checkpoint may have left there
        shard.tensor(kind).zero_()


def load_logical(folder: str | Path, kind: str = "master") -> dict[str, Tensor]:
    """{Hugging Face name: whole fp32 tensor} of a checkpoint; needs no process group.

    Raises:
        Damaged, UserError: as Reader and read_meta.
    """
    out = {}
    with Reader(folder) as reader:
        if missing_kinds(reader.meta, [kind]):
            raise Damaged(f"{folder} has no {kind}")
        for name, shape in reader.meta["tensors"].items():
            out[name] = torch.empty(shape)
            reader.fill(kind, name, [0] * len(shape), out[name])
            reader.forget()
    return out
