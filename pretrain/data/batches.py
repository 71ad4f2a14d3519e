"""The tensors of each update: row order, packing and masks put together, ahead of their use."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch

from configs.errors import UserError
from configs.schema import MaskingConfig, PhaseConfig
from data_prep.shards import Rows, Shards
from pretrain.data.counter import DROPOUT, token_numbers
from pretrain.data.order import RowOrder
from pretrain.data.packing import Packer, Plan
from pretrain.objectives.masking import Masked, Masker, mask_counts


@dataclass
class MicroBatch:
    """One packed forward pass. T tokens, R rows with the tail's, M predictions, N rows to classify.

    Shapes are the same for all micro-batches of an update. Behind the real rows the tail of T is
    covered by rows of padding (at most `max_length` long) that nothing scores; rows that are not
    needed have length 0, predictions and rows that are not needed have weight 0.
    """

    input_ids: torch.Tensor  # int64 [T]
    position_ids: torch.Tensor  # int64 [T], from 0 in each row
    token_type_ids: torch.Tensor  # int64 [T], 1 in B
    token_keys: torch.Tensor  # int32 [T], dropout key of (seed, phase, epoch, row, position)
    cu_seqlens: torch.Tensor  # int32 [R + 1], ends at T
    masked_positions: torch.Tensor  # int64 [M], into T
    masked_labels: torch.Tensor  # int64 [M]
    masked_weights: torch.Tensor  # float32 [M], 0 = padding
    first_positions: torch.Tensor  # int64 [N], into T
    next_sentence_labels: torch.Tensor  # int64 [N], 0 = B follows A
    row_weights: torch.Tensor  # float32 [N], of the label; 0 = padding, or a row of one segment
    max_length: int
    tokens: int  # real ones
    rows: int
    masked: int
    labelled: int  # rows of two segments
    sum_squared_lengths: int

    def tensors(self) -> dict[str, torch.Tensor]:
        """The tensors by name, in a fixed order."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return {name: v for name, v in values.items() if isinstance(v, torch.Tensor)}

    def map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> MicroBatch:
        """A copy with `change` applied to every tensor."""
        changed: dict[str, Any] = {name: change(v) for name, v in self.tensors().items()}
        return replace(self, **changed)


@dataclass
class GlobalBatch:
    """What one rank computes in an update, and totals over all ranks (the divisors of the loss)."""

    micros: list[MicroBatch]
    masked_total: int
    rows_total: int
    tokens_total: int
    sum_squared_lengths_total: int
    waste: float  # share of the computed tokens that are padding
    epoch: float  # epochs finished after this update


class BatchBuilder:
    """Makes micro-batches out of chosen rows: reads, masks, packs. Same result on every rank."""

    def __init__(
        self, shards: Shards, masking: MaskingConfig, seed: int, phase: int, packer: Packer
    ) -> None:
        self.shards, self.seed, self.phase, self.packer = shards, seed, phase, packer
        self.masker = Masker(masking, shards, seed, phase)
        self.static = shards.layout.static_masks
        # What the user should know, "" if all is as asked.
        self.warning = self.masker.warning()
        if self.static:
            self.warning = f"{shards.folder} holds static masks: `masking` is not used"

    def plan(self, rows: np.ndarray) -> tuple[Plan, np.ndarray, np.ndarray]:
        """(plan, lengths, predictions) of a global batch of these rows."""
        lengths = self.shards.lengths[rows].astype(np.int64)
        if self.static:
            counts = self.shards.static_mask_counts(rows)
        else:
            counts = self.masker.counts(lengths)
        return self.packer.plan(lengths, counts), lengths, counts

    def micro(self, plan: Plan, epochs: np.ndarray, rows: np.ndarray) -> MicroBatch:
        """One forward pass over these rows (host tensors), with the shapes of the plan."""
        read = self.shards.rows(rows)
        masked = self._masked(read, epochs, rows)
        lengths, real, n = read.lengths, int(read.offsets[-1]), len(rows)
        # Real rows, then the tail in rows of max_length, then rows of length 0.
        cu = np.full(plan.rows + plan.tail_rows + 1, plan.tokens, np.int64)
        cu[: n + 1] = read.offsets
        cu[n:] = np.minimum(real + self.shards.max_length * np.arange(len(cu) - n), plan.tokens)
        spans = np.diff(cu)
        row_of = np.repeat(np.arange(len(spans)), spans)
        position = np.arange(plan.tokens) - cu[row_of]
        pairs = read.segment_b > 0
        segment_b = np.where(pairs, read.segment_b, self.shards.max_length + 1)
        types = np.zeros(plan.tokens, np.int64)
        types[:real] = position[:real] >= segment_b[row_of[:real]]
        keys = np.zeros(plan.tokens, np.int32)
        drawn = token_numbers(
            DROPOUT, self.seed, self.phase, epochs, rows, row_of[:real],
            position[:real].astype(np.uint32),
        )  # fmt: skip
        keys[:real] = drawn.view(np.int32)
        m = len(masked.positions)
        return MicroBatch(
            input_ids=_padded(masked.tokens, plan.tokens, self.shards.special_ids["pad"]),
            position_ids=torch.from_numpy(position),
            token_type_ids=torch.from_numpy(types),
            token_keys=torch.from_numpy(keys),
            cu_seqlens=torch.from_numpy(cu.astype(np.int32)),
            masked_positions=_padded(masked.positions, plan.masked),
            masked_labels=_padded(masked.labels, plan.masked),
            masked_weights=_weights(m, plan.masked),
            first_positions=_padded(read.offsets[:-1], plan.rows),
            next_sentence_labels=_padded(read.next_sentence_label, plan.rows),
            row_weights=_padded(pairs, plan.rows).float(),
            max_length=self.shards.max_length,
            tokens=real,
            rows=n,
            masked=m,
            labelled=int(pairs.sum()),
            sum_squared_lengths=int((lengths**2).sum()),
        )

    def _masked(self, read: Rows, epochs: np.ndarray, rows: np.ndarray) -> Masked:
        if not self.static:
            return self.masker.draw(read.tokens, read.offsets, read.segment_b, epochs, rows)
        positions, labels, offsets = _static(read)
        row_of = np.repeat(np.arange(len(rows)), np.diff(offsets))
        return Masked(read.tokens, read.offsets[row_of] + positions, labels)


class Batches:
    """The updates of one phase for one data-parallel rank.

    Nothing depends on the updates made before: `update(k)` is a pure function of k, the seed, the
    phase and the set, and together the ranks see the same rows, masks and keys for any dp.

    first_row: rows of the set that earlier phases have read; this one reads on behind them.

    Raises:
        UserError: from Packer, before any row is read; an empty set.
    """

    def __init__(
        self,
        shards: Shards,
        phase: PhaseConfig,
        phase_index: int,
        masking: MaskingConfig,
        seed: int,
        dp_rank: int,
        dp: int,
        micro_batch_tokens: int,
        device: torch.device | str = "cpu",
        first_row: int = 0,
    ) -> None:
        if not shards.num_rows:
            raise UserError(f"{shards.folder} holds no rows", "give the recipe more text")
        self.phase, self.dp_rank, self.first_row = phase, dp_rank, first_row
        self.device = torch.device(device)
        self.order = RowOrder(shards.num_rows, seed)
        packer = make_packer(shards, masking, phase.global_batch, dp, micro_batch_tokens)
        self.builder = BatchBuilder(shards, masking, seed, phase_index, packer)
        self.warning = self.builder.warning
        self._thread = ThreadPoolExecutor(1, "batches", self._enter_thread)
        self._making: tuple[int, Future[GlobalBatch]] | None = None
        self._here: tuple[int, GlobalBatch] | None = None  # on the device already
        self._waited_s, self._given = 0.0, -1

    def update(self, step_in_phase: int) -> GlobalBatch:
        """The batch of an update (from 0), on the device."""
        self._given = step_in_phase
        here, self._here = self._here, None
        if here is not None and here[0] == step_in_phase:
            return here[1]
        return self._take(step_in_phase)

    def prefetch(self) -> None:
        """Brings the batch after the last one to the device and lets a thread make the next but one.
        To be called while the device computes: both compete for the interpreter with a thread that
        launches kernels. What goes wrong is raised by `update` when that batch is asked for."""
        coming = self._given + 1
        if coming >= self.phase.steps or self._made(coming).exception():
            return
        self._here = coming, self._take(coming)
        if coming + 1 < self.phase.steps:
            self._start(coming + 1)

    def _start(self, step_in_phase: int) -> Future[GlobalBatch]:
        if self._making is None or self._making[0] != step_in_phase:
            self._making = step_in_phase, self._thread.submit(self._build, step_in_phase)
        return self._making[1]

    def _made(self, step_in_phase: int) -> Future[GlobalBatch]:
        begin, future = time.monotonic(), self._start(step_in_phase)
        wait([future])
        self._waited_s += time.monotonic() - begin
        return future

    def _take(self, step_in_phase: int) -> GlobalBatch:
        batch = self._made(step_in_phase).result()
        self._making = None
        if self.device.type != "cpu":
            batch = replace(batch, micros=to_device(batch.micros, self.device))
        return batch

    def waited(self) -> float:
        """Seconds for which batches have kept the caller waiting since the last call."""
        waited, self._waited_s = self._waited_s, 0.0
        return waited

    def close(self) -> None:
        """Ends the thread; a batch in the making is finished first."""
        self._making = self._here = None
        self._thread.shutdown(wait=True, cancel_futures=True)

    def _enter_thread(self) -> None:
        if self.device.index is not None:  # or pinning would open a context on the first card
            torch.cuda.set_device(self.device)

    def row_ids(self, step_in_phase: int) -> tuple[np.ndarray, np.ndarray]:
        """(epochs, rows) of an update's global batch, int64 [global_batch] each."""
        size = self.phase.global_batch
        return self.order.rows(self.first_row + step_in_phase * size, size)

    def _build(self, step_in_phase: int) -> GlobalBatch:
        epochs, rows = self.row_ids(step_in_phase)
        plan, lengths, counts = self.builder.plan(rows)
        micros = []
        for number in range(plan.n_micro):
            places = plan.bin(self.dp_rank, number)
            micros.append(self.builder.micro(plan, epochs[places], rows[places]))
        if self.device.type == "cuda":
            micros = in_one_buffer(micros, pin=True)
        return GlobalBatch(
            micros=micros,
            masked_total=int(counts.sum()),
            rows_total=len(rows),
            tokens_total=plan.real_tokens,
            sum_squared_lengths_total=int((lengths**2).sum()),
            waste=plan.waste,
            epoch=(self.first_row + (step_in_phase + 1) * len(rows)) / self.order.num_rows,
        )


def in_one_buffer(micros: list[MicroBatch], pin: bool) -> list[MicroBatch]:
    """The same micro-batches as views of one (pinned) buffer, which one copy takes to the device."""
    sizes = [_aligned(t) for m in micros for t in m.tensors().values()]
    buffer = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=pin)
    place = iter(np.cumsum([0, *sizes]).tolist())

    def put(tensor: torch.Tensor) -> torch.Tensor:
        return _view(buffer, next(place), tensor).copy_(tensor)

    return [micro.map(put) for micro in micros]


def to_device(micros: list[MicroBatch], device: torch.device) -> list[MicroBatch]:
    """Micro-batches of `in_one_buffer` on a device, by a single copy that does not wait."""
    first = next(iter(micros[0].tensors().values()))
    host = torch.empty(0, dtype=torch.uint8).set_(first.untyped_storage())
    moved = host.to(device, non_blocking=True)
    return [m.map(lambda t: _view(moved, int(t.storage_offset()) * t.itemsize, t)) for m in micros]


def _aligned(tensor: torch.Tensor) -> int:
    """Bytes of a tensor, rounded up so that what follows starts as kernels like it."""
    return -(-tensor.nbytes // 256) * 256


def _view(buffer: torch.Tensor, begin: int, like: torch.Tensor) -> torch.Tensor:
    return buffer[begin : begin + like.nbytes].view(like.dtype).view(like.shape)


def make_packer(
    shards: Shards, masking: MaskingConfig, global_batch: int, dp: int, micro_batch_tokens: int
) -> Packer:
    """A packer for rows of this set, with the set's own rate of predictions."""
    sample = np.asarray(shards.lengths[:: max(1, shards.num_rows // 2**20)])
    counts = mask_counts(sample, masking.probability, shards.mask_cap)
    rate = float(counts.sum() / sample.sum(dtype=np.int64))
    return Packer(shards.lengths, shards.max_length, rate, global_batch, dp, micro_batch_tokens)


def _static(read: Rows) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    positions, labels, offsets = read.masked_positions, read.masked_labels, read.masked_offsets
    assert positions is not None and labels is not None and offsets is not None
    return positions, labels, offsets


def _padded(values: np.ndarray, size: int, fill: int = 0) -> torch.Tensor:
    out = np.full(size, fill, np.int64)
    out[: len(values)] = values
    return torch.from_numpy(out)


def _weights(real: int, size: int) -> torch.Tensor:
    out = torch.zeros(size)
    out[:real] = 1
    return out
