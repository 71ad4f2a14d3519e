"""`python -m bench.loader`: rows a second through order, packing and masking; seek; packing waste.

Prints tables; with --json one JSON line last. CPU seconds of this process are counted, not the
clock, and everything runs in one thread: figures are per core. The synthetic set has the lengths of
real NSP pairs (most rows nearly full); --shards measures a folder of your own.
"""

from __future__ import annotations

import argparse
import heapq
import json
import platform
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from configs.schema import MaskingConfig, PhaseConfig
from data_prep.shards import Shards, open_shards
from pretrain.data.batches import Batches
from pretrain.data.order import RowOrder
from pretrain.data.packing import Packer, deal
from pretrain.objectives.masking import Masker, mask_counts

# What one H100 needs: sequences/s of BERT-large at 520 TFLOP/s, of 240.65 and 1,020.6 GFLOP each.
_NEEDED = {128: 2161, 512: 510}
# Mean over max length of real NSP pairs: books and Wikipedia at 128 and 512.
_FILL = {("books", 128): 0.89, ("books", 512): 0.85, ("wikipedia", 128): 0.91, ("wikipedia", 512): 0.72}  # fmt: skip


def pair_lengths(rng: np.random.Generator, rows: int, longest: int, fill: float) -> np.ndarray:
    """Lengths with the given mean share of `longest`: a part nearly full, the others of any length."""
    full = (fill - 0.53) / (0.97 - 0.53)
    return np.where(
        rng.random(rows) < full,
        rng.integers(int(0.94 * longest), longest + 1, rows),
        rng.integers(int(0.06 * longest), longest + 1, rows),
    )


def cpu_seconds(work: Callable[[], Any], repeats: int = 3) -> float:
    """The least CPU time of a few runs of `work`."""
    times = []
    for _ in range(repeats):
        start = time.process_time()
        work()
        times.append(time.process_time() - start)
    return min(times)


def synthetic(folder: Path, longest: int) -> Shards:
    """A set of 60,000 (length 128) or 20,000 rows, written by the real writer."""
    from tests.synthetic import make_shards

    rows = 60_000 if longest == 128 else 20_000
    return open_shards(make_shards(folder, rows, longest, vocab_size=30_522, parts=4))


def loading(shards: Shards, name: str) -> list[dict[str, Any]]:
    """Rows a second and core of whole updates, for each kind of mask, and of the parts alone."""
    out = []
    size = 8192
    for kind in ("token", "whole-word", "span"):
        masking = MaskingConfig(kind=kind)
        phase = PhaseConfig(global_batch=size, steps=10)
        batches = Batches(shards, phase, 0, masking, 1, 0, 1, 32768)
        took = cpu_seconds(lambda b=batches: b._build(3))
        batches.close()
        out.append({"set": name, "mask": kind, "rows_per_s_core": size / took})
    epochs, rows = RowOrder(shards.num_rows, 1).rows(0, size)
    read = shards.rows(rows)
    masker = Masker(MaskingConfig(), shards, 1, 0)
    counts = masker.counts(read.lengths)
    packer = Packer(shards.lengths, shards.max_length, 0.15, size, 1, 32768)
    parts = {
        "order": cpu_seconds(lambda: RowOrder(shards.num_rows, 1).rows(0, size)),
        "packing": cpu_seconds(lambda: packer.plan(read.lengths, counts)),
        "reading": cpu_seconds(lambda: shards.rows(rows)),
        "masks": cpu_seconds(
            lambda: masker.draw(read.tokens, read.offsets, read.segment_b, epochs, rows)
        ),
    }
    out[0] |= {f"us_a_row_{part}": 1e6 * took / size for part, took in parts.items()}
    return out


def seeking(shards: Shards) -> float:
    """CPU seconds to open the batches of a phase at update 1,000,000 with a global batch of 65,536."""
    order = RowOrder(140_000_000, 1)

    def seek() -> None:
        phase = PhaseConfig(global_batch=1024, steps=2_000_000)
        batches = Batches(shards, phase, 0, MaskingConfig(), 1, 0, 1, 32768)
        batches._build(1_000_000)
        batches.close()
        order.rows(1_000_000 * 65_536, 65_536)

    return cpu_seconds(seek)


def packing() -> list[dict[str, Any]]:
    """Waste over 20 updates and the time of a plan, beside row-by-row dealing and a fixed T."""
    rng = np.random.default_rng(0)
    out = []
    cases = [(128, 65536, 1, 32768), (128, 65536, 64, 32768), (128, 1024, 8, 16384),
             (128, 128, 8, 8192), (512, 32768, 1, 32768), (512, 32768, 64, 32768),
             (512, 1024, 8, 16384), (512, 176, 8, 8192), (512, 128, 8, 8192)]  # fmt: skip
    for longest, size, dp, budget in cases:
        for source in ("books", "wikipedia"):
            lengths = pair_lengths(rng, 200_000, longest, _FILL[source, longest])
            counts = mask_counts(lengths, 0.15, -(-15 * longest // 100))
            rate = float(counts.sum() / lengths.sum())
            packer = Packer(lengths, longest, rate, size, dp, budget)
            chosen = [rng.integers(0, len(lengths), size) for _ in range(20)]
            plans = [packer.plan(lengths[c], counts[c]) for c in chosen]
            first = chosen[0]
            ours = cpu_seconds(partial(packer.plan, lengths[first], counts[first]), 2)
            bins = plans[0].bins
            row_by_row, sums = _row_by_row(lengths[first], bins)
            dealt = np.bincount(deal(lengths[first], bins), lengths[first], bins).max()
            fixed = packer.dp * packer.n_micro * packer.limit
            out.append({
                "rows": source, "length": longest, "global_batch": size, "dp": dp,
                "tokens_a_rank": int(lengths.mean() * size / dp),
                "waste": float(np.mean([p.waste for p in plans])),
                "waste_fixed_length": 1 - plans[0].real_tokens / fixed,
                "waste_padded": 1 - float(lengths.mean()) / longest,
                "shapes": len({p.tokens for p in plans}),
                "plan_ms": 1e3 * ours, "heap_ms": 1e3 * row_by_row,
                "largest_bin_over_heap": float(dealt / sums),
            })  # fmt: skip
    return out


def _row_by_row(lengths: np.ndarray, bins: int) -> tuple[float, int]:
    """(CPU seconds, largest bin) of longest-first dealing with a heap, the usual way."""
    start = time.process_time()
    heap = [0] * bins
    for length in sorted(lengths.tolist(), reverse=True):
        heapq.heapreplace(heap, heap[0] + length)
    return time.process_time() - start, max(heap)


def table(rows: list[dict[str, Any]]) -> str:
    """Rows as a Markdown table."""
    keys = list(dict.fromkeys(key for row in rows for key in row))
    lines = ["| " + " | ".join(keys) + " |", "|" + " --- |" * len(keys)]
    for row in rows:
        cells = (_cell(key, row.get(key, "")) for key in keys)
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _cell(key: str, value: Any) -> str:
    if key.startswith("waste"):
        return f"{value:.2%}"
    if isinstance(value, float):
        return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"
    return str(value)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="one JSON line last")
    parser.add_argument("--shards", action="append", default=[], help="also measure this folder")
    options = parser.parse_args()
    loads = []
    with tempfile.TemporaryDirectory() as temporary:
        for longest in (128, 512):
            shards = synthetic(Path(temporary) / str(longest), longest)
            loads += loading(shards, f"synthetic, length {longest}")
            if longest == 128:
                seek_s = seeking(shards)
        for folder in options.shards:
            loads += loading(open_shards(folder), folder)
    packed = packing()
    print(f"{platform.processor() or platform.machine()}, numpy {np.__version__}, one thread\n")
    print("Order, packing, reading, masking, tensors:\n" + table(loads))
    needed = ", ".join(f"{n} sequences/s at length {k}" for k, n in _NEEDED.items())
    print(f"(one H100 with BERT-large at 520 TFLOP/s takes {needed})\n")
    print(f"Seek to update 1,000,000 (140 million rows): {seek_s:.3f} CPU s\n")
    print("Packing, 20 updates each:\n" + table(packed))
    if options.json:
        slowest = min(row["rows_per_s_core"] for row in loads if row["mask"] == "token")
        print(
            json.dumps(
                {
                    "bench": "loader",
                    "rows_per_s_core": slowest,
                    "seek_s": seek_s,
                    "loading": loads,
                    "packing": packed,
                }
            )
        )


if __name__ == "__main__":
    main()
