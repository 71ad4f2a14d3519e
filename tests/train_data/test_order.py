"""Row order: every row once an epoch, another order each epoch, any place at once."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pretrain.data import counter
from pretrain.data.order import BLOCK, WINDOW, RowOrder, permute

SIZES = st.one_of(
    st.integers(1, 3000),
    st.sampled_from([255, 256, 257, 65535, 65536, 65537, 2 * WINDOW + 3, 2 * WINDOW + 2 * BLOCK]),
)


@settings(max_examples=60, deadline=None)
@given(SIZES, st.integers(0, 2**63), st.integers(0, 50))
def test_an_epoch_is_a_permutation(rows: int, seed: int, epoch: int) -> None:
    epochs, seen = RowOrder(rows, seed).rows(epoch * rows, rows)
    assert (epochs == epoch).all()
    assert np.array_equal(np.sort(seen), np.arange(rows))


@settings(max_examples=60, deadline=None)
@given(SIZES, st.integers(0, 10**12), st.integers(1, 700), st.integers(1, 100))
def test_any_stretch_is_the_same_however_it_is_asked_for(rows, start, count, piece) -> None:
    order = RowOrder(rows, 7)
    whole = np.stack(order.rows(start, count))
    parts = [np.stack(order.rows(start + k, min(piece, count - k))) for k in range(0, count, piece)]
    assert np.array_equal(whole, np.concatenate(parts, axis=1))
    assert np.array_equal(whole[0], (start + np.arange(count)) // rows)


def test_b25_order_differs_per_epoch_and_two_processes_cover_every_row() -> None:
    order, again = RowOrder(22, 3), RowOrder(22, 3)
    epochs = [order.rows(e * 22, 22)[1] for e in range(3)]
    for e, rows in enumerate(epochs):
        ranks = rows[:11], rows[11:]
        assert sorted([*ranks[0], *ranks[1]]) == list(range(22))
        assert np.array_equal(rows, again.rows(e * 22, 22)[1])
    assert len({tuple(rows) for rows in epochs}) == 3
    assert tuple(RowOrder(22, 4).rows(0, 22)[1]) != tuple(epochs[0])


def test_reads_stay_inside_a_window_of_256_blocks_of_256_rows() -> None:
    rows = 3 * WINDOW + 1000
    order = RowOrder(rows, 11)
    for window in range(3):
        seen = np.sort(order.rows(rows + window * WINDOW, WINDOW)[1])
        runs = 1 + np.count_nonzero(np.diff(seen) != 1)
        assert runs <= 257  # one block may wrap around the end of the set


def test_permutations_of_one_key_are_different_ones_and_cover_everything() -> None:
    index = np.arange(1000)
    for size in (1, 2, 3, 10, 1000):
        inside = index[:size]
        sizes = np.full(size, size)
        seen = {tuple(permute(inside, sizes, np.full(size, key))) for key in range(200)}
        assert all(sorted(p) == list(range(size)) for p in seen)
        assert len(seen) == {1: 1, 2: 2, 3: 6}.get(size, 200)


@pytest.mark.parametrize("rows", [22, 600])
def test_every_row_is_equally_likely_at_every_place(rows: int) -> None:
    """Chi-square of where rows come in 4,000 epochs, against uniform."""
    epochs = 4000
    orders = RowOrder(rows, 5).rows(0, rows * epochs)[1].reshape(epochs, rows)
    for place in (0, 1, rows // 2, rows - 1):
        counts = np.bincount(orders[:, place], minlength=rows)
        expected = epochs / rows
        chi2 = ((counts - expected) ** 2 / expected).sum()
        freedom = rows - 1
        assert abs(chi2 - freedom) < 5 * (2 * freedom) ** 0.5
    # neighbours are independent too: how often the next row is the next number
    follows = np.mean((orders[:, 1:] - orders[:, :-1]) == 1)
    assert abs(follows - 1 / rows) < 5 * (1 / rows / orders.size) ** 0.5


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 2**63 - 1), min_size=1, max_size=5), st.integers(0, 2**32 - 1))
def test_hashing_is_the_same_in_python_numpy_and_torch(words: list[int], position: int) -> None:
    import torch

    plain = counter.fold(*words)
    assert 0 <= plain < 2**32
    arrays = [np.array([w]) for w in words]
    assert counter.fold(*arrays).tolist() == [plain]
    assert counter.fold(*(torch.tensor([w]) for w in words)).tolist() == [plain]
    keys = counter.row_keys(counter.DROPOUT, words[0], 1, np.array([2]), np.array([words[-1]]))
    there = counter.at(keys, np.array([position]))
    tensors = tuple(torch.from_numpy(k) for k in keys)
    assert counter.at(tensors, torch.tensor([position])).tolist() == there.tolist()
    fast = counter.token_numbers(
        counter.DROPOUT, words[0], 1, np.array([2]), np.array([words[-1]]), np.array([0]),
        np.array([position], np.uint32),
    )  # fmt: skip
    assert fast.dtype == np.uint32 and fast.tolist() == there.tolist()
    assert counter.below(fast, 1000).tolist() == [int(there[0]) * 1000 >> 32]


def test_every_bit_of_the_hash_is_fair_and_depends_on_every_word() -> None:
    n = 1 << 16
    rows = np.arange(n)
    for keys in (
        counter.row_keys(1, 2, 3, 4, rows),
        counter.row_keys(1, 2, 3, rows, 4),
        counter.row_keys(1, rows, 2, 3, 4),
    ):
        numbers = counter.at(keys, 0)
        for bit in range(32):
            assert abs(np.mean(numbers >> bit & 1) - 0.5) < 5 * 0.5 / n**0.5
        assert abs(np.corrcoef(numbers[:-1], numbers[1:])[0, 1]) < 5 / n**0.5
