"""Google's TensorFlow BERT checkpoints, read without TensorFlow.

A checkpoint is `PREFIX.index`, a LevelDB-style sorted table whose values are protocol buffers
(name -> dtype, shape, shard, offset, size, checksum), and `PREFIX.data-NNNNN-of-NNNNN` with the
raw little-endian values. The format is documented in TensorFlow's `tensor_bundle.proto` and
LevelDB's `table_format.md`.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from configs import UserError
from pretrain.convert.crc32c import crc32c, masked
from pretrain.convert.hf import config_from_hf, hf_json
from pretrain.convert.source import SourceModel, finish

_MAGIC = 0xDB4775248B80FB57
_DTYPES = {1: "<f4", 2: "<f8", 3: "<i4", 9: "<i8", 19: "<f2"}
_SLOTS = re.compile(r"/(adam_[mv]|lamb_[mv]|Adam(_1)?|LAMB(_1)?|AdamWeightDecayOptimizer(_1)?)$|^global_step$|^beta[12]_power$|^loss_scale|^good_steps")  # fmt: skip


@dataclass
class Entry:
    """One tensor of the table: `size` bytes from `offset` of data file number `shard`."""

    dtype: int
    shape: tuple[int, ...]
    shard: int
    offset: int
    size: int
    crc: int


class Bundle:
    """A TF checkpoint opened by its prefix; `entries` lists it, `read(name)` gives an array.

    Raises:
        UserError: cut, damaged, compressed or foreign index; names the file.
    """

    def __init__(self, prefix: Path) -> None:
        self.index_file = prefix.with_name(prefix.name + ".index")
        self.prefix = prefix
        try:
            table = self.index_file.read_bytes()
        except OSError as error:
            raise UserError(
                f"{self.index_file}: {error.strerror}", "name PREFIX of PREFIX.index"
            ) from None
        self.entries: dict[str, Entry] = {}
        try:
            pairs = dict(_table(table))
            self.shards = int(_first(_proto(pairs.pop(b"")), 1, 1))
            for key, value in pairs.items():
                self.entries[key.decode()] = _entry(value)
        except (IndexError, KeyError, ValueError, struct.error) as error:
            raise UserError(
                f"{self.index_file}: not a whole TensorFlow checkpoint index ({error})",
                "copy the .index file again",
            ) from None

    def read(self, name: str) -> np.ndarray:
        """The array called `name`; UserError when bytes lack or its CRC-32C does not match."""
        entry = self.entries[name]
        if entry.dtype not in _DTYPES:
            raise UserError(
                f"{self.index_file}: {name} has TF dtype {entry.dtype}", "expected floats"
            )
        file = self.prefix.with_name(
            f"{self.prefix.name}.data-{entry.shard:05d}-of-{self.shards:05d}"
        )
        if not file.is_file():
            raise UserError(f"{file}: no such file", "copy every data file of the checkpoint")
        with file.open("rb") as handle:
            handle.seek(entry.offset)
            raw = handle.read(entry.size)
        if len(raw) != entry.size:
            raise UserError(f"{file}: cut inside {name}", "copy the file again")
        if masked(crc32c(raw)) != entry.crc:
            raise UserError(f"{file}: checksum of {name} does not match", "copy the file again")
        return np.frombuffer(raw, _DTYPES[entry.dtype]).reshape(entry.shape)


def read_tf(prefix: Path) -> SourceModel:
    """A Google BERT checkpoint; bert_config.json and vocab.txt are looked for beside it."""
    import torch

    config_file = prefix.parent / "bert_config.json"
    config = config_from_hf(hf_json(config_file), config_file)
    bundle = Bundle(prefix)
    tensors, dropped = {}, {}
    for name in bundle.entries:
        if _SLOTS.search(name):
            dropped[name] = "optimiser state of another optimiser"
            continue
        new, transpose = hf_name(name, bundle.index_file)
        array = bundle.read(name).astype(np.float32, copy=True)
        tensors[new] = torch.from_numpy(np.ascontiguousarray(array.T) if transpose else array)
    source = finish(config, tensors, "google-tf", prefix, dropped)
    vocab = prefix.parent / "vocab.txt"
    source.tokenizer = vocab if vocab.is_file() else None
    return source


def hf_name(name: str, origin: Path) -> tuple[str, bool]:
    """`bert/encoder/layer_0/.../kernel` -> (`bert.encoder.layer.0....weight`, transpose?).

    Dense kernels are [in, out] in TF and [out, in] in torch; the NSP weights are [2, hidden] in both.
    """
    fixed = {
        "cls/predictions/output_bias": "cls.predictions.bias",
        "cls/seq_relationship/output_weights": "cls.seq_relationship.weight",
        "cls/seq_relationship/output_bias": "cls.seq_relationship.bias",
    }
    if name in fixed:
        return fixed[name], False
    if not name.startswith(("bert/", "cls/")):
        raise UserError(
            f"{origin}: unknown variable {name}", "not a checkpoint of google-research/bert"
        )
    new = re.sub(r"/layer_(\d+)/", r"/layer.\1/", name).replace("/", ".")
    if new.endswith(".kernel"):
        return new.removesuffix("kernel") + "weight", True
    new = re.sub(r"LayerNorm\.gamma$", "LayerNorm.weight", new)
    new = re.sub(r"LayerNorm\.beta$", "LayerNorm.bias", new)
    return (new + ".weight" if new.endswith("_embeddings") else new), False


def find_prefix(path: Path) -> Path | None:
    """The checkpoint prefix that `path` (prefix, .index file or folder) stands for, if any."""
    if path.is_dir():
        found = sorted(path.glob("*.index"))
        if len(found) > 1:
            raise UserError(
                f"{path}: holds {len(found)} TensorFlow checkpoints",
                f"name one, for example {found[-1].with_suffix('')}",
            )
        return found[0].with_suffix("") if found else None
    if path.suffix == ".index" and path.is_file():
        return path.with_suffix("")
    return path if path.with_name(path.name + ".index").is_file() else None


def _table(data: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Keys and values of a LevelDB table: footer -> index block -> data blocks."""
    if len(data) < 48 or struct.unpack("<Q", data[-8:])[0] != _MAGIC:
        raise ValueError("no table footer")
    at = len(data) - 48
    for _ in range(2):  # the handle of the meta-index block is of no use here
        _, at = _varint(data, at)
    offset, at = _varint(data, at)
    size, _ = _varint(data, at)
    for _, handle in _block(data, offset, size):
        start, after = _varint(handle, 0)
        length, _ = _varint(handle, after)
        yield from _block(data, start, length)


def _block(data: bytes, offset: int, size: int) -> Iterator[tuple[bytes, bytes]]:
    block, trailer = data[offset : offset + size], data[offset + size : offset + size + 5]
    if len(trailer) < 5:
        raise ValueError("cut inside a block")
    if trailer[0] != 0:
        raise ValueError("compressed blocks, which TensorFlow does not write")
    if masked(crc32c(block + trailer[:1])) != struct.unpack("<I", trailer[1:])[0]:
        raise ValueError("checksum of a block does not match")
    restarts = struct.unpack("<I", block[-4:])[0]
    end, at, key = len(block) - 4 - 4 * restarts, 0, b""
    while at < end:
        shared, at = _varint(block, at)
        fresh, at = _varint(block, at)
        length, at = _varint(block, at)
        key = key[:shared] + block[at : at + fresh]
        yield key, block[at + fresh : at + fresh + length]
        at += fresh + length


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return value, at


def _proto(data: bytes) -> list[tuple[int, int | bytes]]:
    """Fields of a protocol buffer message as (number, value), in order."""
    fields: list[tuple[int, int | bytes]] = []
    at = 0
    while at < len(data):
        tag, at = _varint(data, at)
        number, kind = tag >> 3, tag & 7
        value: int | bytes
        if kind == 0:
            value, at = _varint(data, at)
        elif kind == 2:
            length, at = _varint(data, at)
            value, at = data[at : at + length], at + length
        elif kind in (1, 5):
            width = 8 if kind == 1 else 4
            value, at = int.from_bytes(data[at : at + width], "little"), at + width
        else:
            raise ValueError(f"wire type {kind}")
        fields.append((number, value))
    return fields


def _first(fields: list[tuple[int, int | bytes]], number: int, default: int) -> int:
    return next((int(v) for n, v in fields if n == number and isinstance(v, int)), default)


def _entry(value: bytes) -> Entry:
    """BundleEntryProto: 1 dtype, 2 shape, 3 shard, 4 offset, 5 size, 6 crc32c, 7 slices."""
    fields = _proto(value)
    if any(number == 7 for number, _ in fields):
        raise ValueError("partitioned variables are not supported")
    shape = next((v for n, v in fields if n == 2 and isinstance(v, bytes)), b"")
    dims = tuple(
        _first(_proto(d), 1, 0) for n, d in _proto(shape) if n == 2 and isinstance(d, bytes)
    )
    return Entry(
        _first(fields, 1, 0),
        dims,
        _first(fields, 3, 0),
        _first(fields, 4, 0),
        _first(fields, 5, 0),
        _first(fields, 6, 0),
    )
