"""Packing: the rows of a global batch spread over dp x n_micro bins so that the largest is smallest.

Every rank computes the same plan from the row lengths alone. A bin is one forward pass of one
rank: rows lie end to end, without padding inside, and only the tail of a bin is empty. All bins of
an update have one length T, taken from at most 16 lengths a phase (compiled kernels and graphs are
made once per length).
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from configs.errors import UserError
from configs.sharing import SMALLEST
from data_prep.shards import offsets_of

# Every T is a multiple of UNIT, or, where T is small, of T / 128 down to SMALLEST: fine enough that
# rounding costs below half a percent, coarse enough for matrix units (fp8 wants 16) and any tp.
UNIT = 128
SHAPES = 16
_MASK_UNIT = 64
_SWAPS, _SWAP_LIMIT = 64, 1 << 15  # at most so many, where rows x rows of a bin are no more
_LAST_ROUNDS = 128  # rounds dealt by the size of the bins; the rounds before them go in a snake


def round_up(value: float, unit: int) -> int:
    """The next multiple of `unit`."""
    return int(-(-value // unit) * unit)


def deal(lengths: np.ndarray, bins: int) -> np.ndarray:
    """The bin of each row, int64 [n], so that the fullest bin is as empty as can be.

    Longest processing time first (Graham, 1969), a round at a time: the next `bins` rows in
    descending length go to the bins in ascending order of what they hold. That is as even as row
    by row (bench/RESULTS.md), and takes half the time for batches of 32,000 rows and more. All
    bins get the same number of rows, or one fewer. Early rounds need no look at the sums: they run
    forward and back like a snake. Where bins are few and small, swaps make them even almost to the
    token.
    """
    order = np.argsort(-lengths.astype(np.int64), kind="stable")
    rounds = -(-len(order) // bins)
    early = max(0, rounds - _LAST_ROUNDS) // 2 * 2
    out = np.empty(len(order), np.int64)
    sums = np.zeros(bins, np.int64)
    if early:
        there = np.arange(bins)
        out[order[: early * bins]] = np.tile(np.concatenate((there, there[::-1])), early // 2)
        dealt = lengths[order[: early * bins]].reshape(early, bins)
        sums = dealt[::2].sum(0, np.int64) + dealt[1::2, ::-1].sum(0, np.int64)
    for first in range(early * bins, len(order), bins):
        rows = order[first : first + bins]
        chosen = np.argsort(sums, kind="stable")[: len(rows)]
        out[rows] = chosen
        sums[chosen] += lengths[rows]
    if 1 < bins < len(order) and rounds * len(order) <= _SWAP_LIMIT:
        _swap(lengths.astype(np.int64), out, sums)
    return out


def _swap(lengths: np.ndarray, where: np.ndarray, sums: np.ndarray) -> None:
    """Exchanges a row of the fullest bin for a shorter one elsewhere while that helps; in place."""
    for _ in range(_SWAPS):
        full = int(sums.argmax())
        ours, theirs = np.flatnonzero(where == full), np.flatnonzero(where != full)
        moved = lengths[ours][:, None] - lengths[theirs]
        after = np.maximum(sums[full] - moved, sums[where[theirs]] + moved)
        best = int(after.argmin())
        if after.flat[best] >= sums[full]:
            return
        our, their = ours[best // len(theirs)], theirs[best % len(theirs)]
        other, much = where[their], lengths[our] - lengths[their]
        where[our], where[their] = other, full
        sums[full] -= much
        sums[other] += much


@dataclass(frozen=True)
class Plan:
    """How one global batch is packed. Bin b belongs to rank b // n_micro."""

    order: np.ndarray  # int64 [B]: places in the batch, bin after bin
    offsets: np.ndarray  # int64 [bins + 1], into order
    n_micro: int  # forward passes of a rank
    tokens: int  # T: length of every bin
    rows: int  # room for rows in every bin, without those of the tail
    tail_rows: int  # rows that cover the empty tail, each at most max_length long
    masked: int  # room for predictions in every bin
    real_tokens: int  # of the whole batch

    @property
    def bins(self) -> int:
        return len(self.offsets) - 1

    @property
    def waste(self) -> float:
        """Share of the computed tokens that are not real ones."""
        return 1 - self.real_tokens / (self.bins * self.tokens)

    def bin(self, rank: int, micro: int) -> np.ndarray:
        """Places in the batch of the rows of one forward pass."""
        number = rank * self.n_micro + micro
        return self.order[self.offsets[number] : self.offsets[number + 1]]


class Packer:
    """Plans the updates of one phase. What it fixes for the phase depends on the set's lengths, the batch
    and the layout only.

    Args:
        lengths: of all rows of the set. masked_per_token: predictions over tokens in the set.
        micro_batch_tokens: most tokens of one forward pass.

    Raises:
        UserError: fewer rows an update than ranks, or a budget below the longest row.
    """

    def __init__(
        self,
        lengths: np.ndarray,
        max_length: int,
        masked_per_token: float,
        global_batch: int,
        dp: int,
        micro_batch_tokens: int,
    ) -> None:
        if global_batch < dp:
            raise UserError(
                f"global_batch={global_batch} rows cannot feed {dp} data-parallel ranks",
                f"raise global_batch to at least {dp}, or start fewer processes",
            )
        longest = round_up(max_length, SMALLEST)
        if micro_batch_tokens < longest:
            raise UserError(
                f"parallel.micro_batch_tokens={micro_batch_tokens} is below one row of {max_length} tokens",
                f"set it to at least {longest}",
            )
        self.max_length, self.global_batch, self.dp = max_length, global_batch, dp
        self.limit = micro_batch_tokens // SMALLEST * SMALLEST
        self.masked_per_token = masked_per_token
        sample = np.asarray(lengths[:: max(1, len(lengths) // 2**20)], np.float64)
        mean, spread = global_batch * sample.mean(), sample.std() * global_batch**0.5
        self.n_micro = max(1, int(np.ceil((mean + 4 * spread) / (dp * self.limit))))
        self.shapes = _shapes(mean, spread, dp * self.n_micro, self.limit)

    def plan(self, lengths: np.ndarray, counts: np.ndarray) -> Plan:
        """Packs one global batch. lengths, counts (predictions): int [B] in stream order."""
        lengths, counts = lengths.astype(np.int64), counts.astype(np.int64)
        n_micro = self.n_micro
        while True:
            bins = self.dp * n_micro
            where = deal(lengths, bins)
            sums = _sums(where, lengths, bins)
            fitting = self.shapes[np.searchsorted(self.shapes, sums.max()) :]
            if len(fitting):
                break
            n_micro += 1
        tokens = int(fitting[0])
        rows = -(-len(lengths) // bins)
        tail = -(-(tokens - int(sums.min())) // self.max_length)
        masked = int(_sums(where, counts, bins).max())
        # Counts are rounded row by row; twice the root of the rows covers that nearly always.
        usual = round_up(self.masked_per_token * tokens + 2 * rows**0.5, _MASK_UNIT)
        return Plan(
            order=np.argsort(where, kind="stable"),
            offsets=offsets_of(np.bincount(where, minlength=bins)),
            n_micro=n_micro,
            tokens=tokens,
            rows=rows,
            tail_rows=1 << max(0, tail - 1).bit_length(),
            masked=max(usual, round_up(masked, _MASK_UNIT)),
            real_tokens=int(lengths.sum()),
        )


def _sums(where: np.ndarray, values: np.ndarray, bins: int) -> np.ndarray:
    return np.bincount(where, values, bins).astype(np.int64)


def _shapes(mean: float, spread: float, bins: int, limit: int) -> np.ndarray:
    """The lengths T may take, ascending, at most SHAPES, the last one `limit`.

    An update's largest bin is nearly normal with mean / bins and spread / bins. If 16 steps of the
    unit do not span it, lengths are spaced so that the mean waste is least: their density follows the
    square root of the normal density, which is a normal one again, wider by sqrt(2).
    """
    middle, width = mean / bins, spread / bins
    unit = int(min(max(2 ** np.floor(np.log2(middle / 128)), SMALLEST), UNIT))
    low, high = middle - 4 * width, middle * 1.01 + 4 * width + unit
    if (high - low) / unit <= SHAPES - 2:
        wanted = np.arange(round_up(low, unit), high + unit, unit)[: SHAPES - 1]
    else:
        wider = NormalDist(middle + unit / 2, width * 2**0.5)
        levels = [wider.inv_cdf(k / (SHAPES - 1)) for k in range(1, SHAPES - 1)]
        wanted = np.array([*levels, middle + 4.5 * width])
    rounded = [round_up(max(t, unit), unit) for t in wanted]
    return np.unique([*(t for t in rounded if t < limit), limit])
