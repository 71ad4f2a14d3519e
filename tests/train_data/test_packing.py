"""Packing: every row once, nothing above the budget, few shapes, little waste."""

from __future__ import annotations

import heapq

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from bench.loader import pair_lengths
from configs import UserError
from pretrain.data.packing import SHAPES, SMALLEST, UNIT, Packer, deal
from pretrain.objectives.masking import mask_counts


def packer(lengths, longest, global_batch, dp, budget, cap=None) -> Packer:
    counts = mask_counts(lengths, 0.15, cap or -(-15 * longest // 100))
    rate = counts.sum() / lengths.sum()
    return Packer(lengths, longest, float(rate), global_batch, dp, budget)


@settings(max_examples=150, deadline=None)
@given(
    st.integers(0, 10**9),
    st.sampled_from([32, 128, 512]),
    st.integers(1, 5),
    st.integers(1, 400),
    st.integers(0, 40),
)
def test_every_row_has_one_place_and_no_bin_overflows(seed, longest, dp, rows, extra) -> None:
    rng = np.random.default_rng(seed)
    rows, budget = max(rows, dp), longest + extra * 64 + UNIT
    lengths = rng.integers(1, longest + 1, 2000)
    p = packer(lengths, longest, rows, dp, budget)
    assert len(p.shapes) <= SHAPES and (p.shapes % SMALLEST == 0).all() and p.shapes[-1] <= budget
    batch = rng.choice(lengths, rows)
    if rng.random() < 0.3:
        batch[:] = longest  # an unlucky draw, far from the set's mean
    counts = mask_counts(batch, 0.15, 77)
    plan = p.plan(batch, counts)
    assert np.array_equal(np.sort(plan.order), np.arange(rows))
    assert plan.bins == dp * plan.n_micro and plan.tokens in p.shapes
    for rank in range(dp):
        for micro in range(plan.n_micro):
            places = plan.bin(rank, micro)
            used = batch[places].sum()
            assert used <= plan.tokens <= budget
            assert len(places) <= plan.rows and counts[places].sum() <= plan.masked
            assert used + plan.tail_rows * longest >= plan.tokens
    assert plan.waste == pytest.approx(1 - batch.sum() / (plan.bins * plan.tokens))


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 10**9), st.integers(1, 64), st.integers(1, 3000))
@example(1965, 15, 35)
def test_bins_are_as_even_as_row_by_row_dealing(seed: int, bins: int, rows: int) -> None:
    lengths = pair_lengths(np.random.default_rng(seed), rows, 128, 0.9)
    where = deal(lengths, bins)
    sums = np.bincount(where, lengths, bins)
    heap = [0] * bins
    for length in sorted(lengths.tolist(), reverse=True):
        heapq.heapreplace(heap, heap[0] + length)
    # With a few rows a bin, equal numbers of them cost evenness: 120 + 120 + 36 for 122 + 122 + 20.
    few = rows < 6 * bins
    assert sums.max() <= (sums.mean() + lengths.max() if few else max(heap) * 1.03 + 1)
    assert np.ptp(np.bincount(where, minlength=bins)) <= 1


@pytest.mark.parametrize(
    ("longest", "fill", "global_batch", "dp", "budget"),
    [
        (128, 0.89, 65536, 1, 32768),
        (128, 0.89, 65536, 8, 32768),
        (128, 0.91, 65536, 512, 16384),
        (128, 0.89, 1024, 8, 16384),
        (512, 0.72, 32768, 1, 32768),
        (512, 0.72, 32768, 64, 32768),
        (512, 0.85, 1024, 8, 16384),
        (512, 0.72, 176, 8, 8192),  # 8k tokens a rank: eleven rows a bin
        (128, 0.89, 576, 8, 8192),
    ],
)
def test_waste_is_below_one_percent_from_8k_tokens_a_rank(longest, fill, global_batch, dp, budget):
    rng = np.random.default_rng(1)
    lengths = pair_lengths(rng, 200_000, longest, fill)
    p = packer(lengths, longest, global_batch, dp, budget)
    plans = []
    for _ in range(6 if global_batch > 4096 else 60):
        batch = rng.choice(lengths, global_batch)
        plans.append(p.plan(batch, mask_counts(batch, 0.15, 77)))
    assert np.mean([plan.waste for plan in plans]) < 0.01
    assert len({plan.n_micro for plan in plans}) == 1
    assert len({(plan.tokens, plan.masked) for plan in plans}) <= SHAPES + 4


def test_a_run_has_at_most_16_lengths_even_where_batches_are_few_rows() -> None:
    rng = np.random.default_rng(2)
    lengths = pair_lengths(rng, 100_000, 512, 0.72)
    p = packer(lengths, 512, 22, 1, 16384)
    batches = [rng.choice(lengths, 22) for _ in range(300)]
    plans = [p.plan(b, mask_counts(b, 0.15, 77)) for b in batches]
    assert len({plan.tokens for plan in plans}) <= SHAPES
    assert np.mean([plan.waste for plan in plans]) < 0.03


def test_fewer_rows_than_ranks_and_a_budget_below_a_row_are_refused() -> None:
    lengths = np.full(100, 128)
    with pytest.raises(UserError, match="global_batch=3 rows cannot feed 4"):
        packer(lengths, 128, 3, 4, 1024)
    with pytest.raises(UserError, match="micro_batch_tokens=500 is below one row of 512"):
        packer(lengths, 512, 8, 1, 500)
