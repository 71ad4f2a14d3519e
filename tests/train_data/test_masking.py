"""Masks: exact counts, real tokens only, the published statistics, words and spans as units."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from configs.ranges import CHOICES
from configs.schema import MaskingConfig
from pretrain.objectives.masking import Masker, mask_counts
from tests.synthetic import SPECIAL_IDS, make_rows

VOCAB = 500
KINDS = CHOICES["masking.kind"]


def masker(kind="token", cap=20, seed=1, phase=0, **config) -> Masker:
    """A masker over a vocabulary of 500 ids, of which every third continues a word."""
    shards = SimpleNamespace(
        mask_cap=cap,
        max_length=128,
        vocab_size=VOCAB,
        special_ids=SPECIAL_IDS,
        word_start=np.arange(VOCAB) % 3 != 1,
    )
    return Masker(MaskingConfig(kind=kind, **config), shards, seed, phase)  # type: ignore[arg-type]


def one_row(tokens: list[int], segment_b: int = 0, times: int = 1):
    """The same row `times` times, as rows 0, 1, 2, ... of a set."""
    length = len(tokens)
    return (
        np.tile(np.array(tokens, np.int32), times),
        np.arange(times + 1) * length,
        np.full(times, segment_b),
        np.zeros(times, np.int64),
        np.arange(times),
    )


@settings(max_examples=120, deadline=None)
@given(
    st.integers(0, 10**9),
    st.sampled_from(KINDS),
    st.integers(1, 60),
    st.sampled_from([8, 31, 128, 512]),
    st.sampled_from([1, 5, 20, 77]),
    st.sampled_from([0.01, 0.15, 0.5, 1.0]),
    st.booleans(),
)
def test_every_row_has_its_exact_count_and_nothing_else_changes(
    seed, kind, rows, longest, cap, probability, pairs
) -> None:
    rng = np.random.default_rng(seed)
    r = make_rows(rng, rows, longest, VOCAB, pairs)
    ids = rng.integers(0, 10**8, rows)
    m = masker(kind, cap, probability=probability)
    out = m.draw(r.tokens, r.offsets, r.segment_b, np.zeros(rows, np.int64), ids)
    wanted = [min(cap, max(1, round(probability * n)), max(n - 3, 1)) for n in r.lengths.tolist()]
    row_of = np.searchsorted(r.offsets, out.positions, "right") - 1
    assert np.array_equal(np.bincount(row_of, minlength=rows), wanted)
    assert np.array_equal(m.counts(r.lengths), wanted)
    assert (np.diff(out.positions) > 0).all()
    assert np.array_equal(out.labels, r.tokens[out.positions])
    untouched = np.ones(len(r.tokens), bool)
    untouched[out.positions] = False
    assert np.array_equal(out.tokens[untouched], r.tokens[untouched])
    assert not np.isin(out.labels, [SPECIAL_IDS[n] for n in ("pad", "cls", "sep", "mask")]).any()
    new = out.tokens[out.positions]
    changed = (new != out.labels) & (new != SPECIAL_IDS["mask"])
    assert (new[changed] >= 5).all()  # a random token is never a special one


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**9), st.sampled_from(KINDS), st.integers(2, 40))
def test_masks_do_not_depend_on_which_rows_are_drawn_together(seed, kind, rows) -> None:
    rng = np.random.default_rng(seed)
    r = make_rows(rng, rows, 64, VOCAB)
    ids, epochs = rng.integers(0, 10**9, rows), rng.integers(0, 5, rows)
    m = masker(kind)
    whole = m.draw(r.tokens, r.offsets, r.segment_b, epochs, ids)
    for k in rng.permutation(rows)[:5]:
        begin, end = r.offsets[k], r.offsets[k + 1]
        alone = m.draw(
            r.tokens[begin:end],
            np.array([0, end - begin]),
            r.segment_b[k : k + 1],
            epochs[k : k + 1],
            ids[k : k + 1],
        )
        assert np.array_equal(alone.tokens, whole.tokens[begin:end])


def test_masks_differ_by_seed_phase_epoch_and_row() -> None:
    tokens, offsets, b, epochs, ids = one_row([2, *range(5, 120), 3], times=2)
    base = masker().draw(tokens, offsets, b, epochs, ids)
    again = masker().draw(tokens, offsets, b, epochs, ids)
    assert np.array_equal(base.positions, again.positions)
    others = [
        masker(seed=2).draw(tokens, offsets, b, epochs, ids),
        masker(phase=1).draw(tokens, offsets, b, epochs, ids),
        masker().draw(tokens, offsets, b, epochs + 1, ids),
        masker().draw(tokens, offsets, b, epochs, ids + 2),
    ]
    assert all(not np.array_equal(base.positions, o.positions) for o in others)
    half = len(base.positions) // 2
    assert not np.array_equal(base.positions[:half], base.positions[half:] - offsets[1])


def test_b13_only_real_tokens_of_a_row_of_5_in_10000_draws() -> None:
    times = 10_000
    out = masker().draw(*one_row([2, 7, 3, 9, 3], segment_b=3, times=times))
    places = out.positions % 5
    assert set(places) == {1, 3} and len(places) == times  # [CLS] and both [SEP] never
    assert abs(np.mean(places == 1) - 0.5) < 5 * 0.5 / times**0.5


@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_nothing_but_special_tokens_get_what_is_possible(kind: str) -> None:
    m = masker(kind)
    empty = m.draw(*one_row([2, 3]))
    assert len(empty.positions) == 0 and list(empty.tokens) == [2, 3]
    only = m.draw(*one_row([2, 3, 8, 3, 3, 3], times=50))  # [SEP] in the text: the last resort
    assert set(only.positions % 6) == {2}


def test_b15_the_cap_comes_from_the_shard_and_the_default_keeps_15_percent(tmp_path) -> None:
    from data_prep.shards import open_shards
    from tests.synthetic import make_shards

    shards = open_shards(make_shards(tmp_path / "s", rows=200, max_length=512, vocab_size=VOCAB))
    assert shards.mask_cap == 77 == math.ceil(0.15 * 512)
    assert Masker(MaskingConfig(), shards, 0, 0).cap == 77
    full = np.array([512])
    assert mask_counts(full, 0.15, 77)[0] / 512 == pytest.approx(0.15, abs=1e-3)
    assert mask_counts(full, 0.15, 20)[0] / 512 == pytest.approx(0.039, abs=1e-3)
    shards.mask_cap = 20
    m = Masker(MaskingConfig(), shards, 0, 0)
    assert m.counts(full)[0] == 20
    assert "3.9" in m.warning() and "20" in m.warning()
    shards.mask_cap = 77
    assert Masker(MaskingConfig(), shards, 0, 0).warning() == ""


def test_counts_round_half_to_even() -> None:
    lengths = np.array([10, 30, 50, 70, 128, 512, 3, 2, 1, 0, 4, 5])
    assert mask_counts(lengths, 0.15, 77).tolist() == [2, 4, 8, 10, 19, 77, 1, 0, 0, 0, 1, 1]
    assert mask_counts(lengths, 0.15, 9)[:4].tolist() == [2, 4, 8, 9]


def chi2_ok(counts: np.ndarray, expected: np.ndarray) -> bool:
    """Within five standard deviations of what chi-square is expected to be."""
    freedom = len(counts) - 1
    chi2 = ((counts - expected) ** 2 / expected).sum()
    return abs(chi2 - freedom) < 5 * (2 * freedom) ** 0.5


def test_statistics_positions_replacements_and_random_tokens_pass_chi_square() -> None:
    times, length = 8000, 102
    text = list(range(100, 200))
    out = masker().draw(*one_row([2, *text, 3], times=times))
    place = out.positions % length
    counts = np.bincount(place, minlength=length)[1:-1]
    each = counts.sum() / 100
    assert counts.sum() == times * 15
    # without replacement inside a row the variance is smaller by the share that is not chosen
    freedom = 99
    chi2 = ((counts - each) ** 2 / (each * 0.85)).sum()
    assert abs(chi2 - freedom) < 5 * (2 * freedom) ** 0.5

    new, n = out.tokens[out.positions], len(out.positions)
    masked, kept = new == SPECIAL_IDS["mask"], new == out.labels
    random = ~masked & ~kept
    luck = 0.1 / (VOCAB - 5)  # a random token may be the true one
    expected = np.array([0.8, 0.1 + luck, 0.1 - luck]) * n
    assert chi2_ok(np.array([masked.sum(), kept.sum(), random.sum()]), expected)
    drawn = np.bincount(new[random], minlength=VOCAB)
    assert drawn[:5].sum() == 0
    others = np.r_[5:100, 200:VOCAB]  # ids that are not in the text: no true one among them
    assert chi2_ok(drawn[others], np.full(len(others), n * luck))
    # replacement does not depend on the place, nor on what happened to its neighbour
    side_by_side = np.diff(out.positions) == 1
    both = masked[:-1] & masked[1:]
    share = both[side_by_side].mean()
    assert abs(share - 0.64) < 5 * (0.64 * 0.36 / side_by_side.sum()) ** 0.5


def word_units(row_tokens: np.ndarray, chosen: np.ndarray) -> tuple[int, int]:
    """(words fully chosen, words partly chosen) of a row [CLS] ... [SEP]."""
    starts = np.flatnonzero(row_tokens % 3 != 1)
    bounds = [*starts[starts > 0], len(row_tokens) - 1]
    hit = np.zeros(len(row_tokens), bool)
    hit[chosen] = True
    shares = [hit[a:b].mean() for a, b in zip(bounds, bounds[1:]) if b > a]
    return sum(s == 1 for s in shares), sum(0 < s < 1 for s in shares)


def test_whole_words_are_masked_as_one_and_at_most_one_a_row_is_cut() -> None:
    rng = np.random.default_rng(0)
    cut, whole = 0, 0
    for k in range(100):
        text = rng.integers(5, VOCAB, 90)
        text[0] = 6
        row = np.array([2, *text, 3], np.int32)
        out = masker("whole-word", seed=k).draw(*one_row(row.tolist()))
        assert len(out.positions) == round(0.15 * 92)
        full, partly = word_units(row, out.positions)
        assert partly <= 1
        cut, whole = cut + partly, whole + full
    assert whole > 500 and cut < 60


def test_spans_are_contiguous_replaced_as_one_and_3_8_words_long_on_average() -> None:
    times, length = 3000, 512
    text = [6 + 3 * (k % 100) for k in range(length - 2)]  # every token a word of its own
    out = masker("span", cap=77).draw(*one_row([2, *text, 3], times=times))
    assert len(out.positions) == 77 * times
    breaks = np.flatnonzero(np.diff(out.positions) != 1)
    runs = np.diff(np.concatenate(([-1], breaks, [len(out.positions) - 1])))
    # Spans may touch or overlap and one a row is cut: runs are a bit longer than single spans.
    assert 3.5 < runs.mean() < 4.8
    single = masker("token", cap=77).draw(*one_row([2, *text, 3], times=50))
    assert np.mean(np.diff(single.positions) == 1) < 0.25
    new = out.tokens[out.positions]
    masked = new == SPECIAL_IDS["mask"]
    inside = np.diff(out.positions) == 1
    assert np.mean(masked[1:][inside] == masked[:-1][inside]) > 0.85  # 0.68 if drawn one by one
    assert abs(masked.mean() - 0.8) < 0.01


def test_spans_and_words_do_not_cross_segments() -> None:
    row = [2, *[6] * 20, 3, *[6] * 20, 3]
    out = masker("span", cap=20, probability=0.5).draw(*one_row(row, segment_b=22, times=200))
    assert not np.isin(out.positions % len(row), [0, 21, 42]).any()
