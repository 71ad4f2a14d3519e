"""The tensors of an update: well formed, and the same set of rows for any layout."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from configs import UserError
from configs.schema import MaskingConfig, PhaseConfig
from data_prep.shards import open_shards
from pretrain.data.batches import Batches, MicroBatch, in_one_buffer, to_device
from tests.synthetic import make_shards


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    return open_shards(make_shards(tmp_path_factory.mktemp("b") / "s", rows=700, vocab_size=500))


def batches(
    shards, global_batch=96, steps=20, dp_rank=0, dp=1, budget=1024, device="cpu", first_row=0, **kw
):
    phase = PhaseConfig(global_batch=global_batch, steps=steps)
    masking = MaskingConfig(**kw)
    return Batches(shards, phase, 0, masking, 42, dp_rank, dp, budget, device, first_row)


def test_a_later_phase_on_the_same_set_reads_on(shards) -> None:
    """It began with the first row again: rows that the earlier phase had not reached were never read."""
    whole, later = batches(shards), batches(shards, global_batch=32, first_row=5 * 96)
    for k in range(12):
        together = [later.row_ids(3 * k + j) for j in range(3)]
        epochs, rows = (np.concatenate(part) for part in zip(*together))
        assert np.array_equal(whole.row_ids(5 + k), (epochs, rows))
    assert later.update(0).epoch == pytest.approx((5 * 96 + 32) / 700)


def rows_of(micro: MicroBatch) -> list[tuple]:
    """Each real row as (tokens, types, keys, masked places and labels, label)."""
    out = []
    positions = micro.masked_positions[: micro.masked].numpy()
    labels = micro.masked_labels[: micro.masked].numpy()
    cu = micro.cu_seqlens.tolist()
    for k in range(micro.rows):
        a, b = cu[k], cu[k + 1]
        here = (positions >= a) & (positions < b)
        out.append(
            (
                tuple(micro.input_ids[a:b].tolist()),
                tuple(micro.token_type_ids[a:b].tolist()),
                tuple(micro.token_keys[a:b].tolist()),
                tuple((positions[here] - a).tolist()),
                tuple(labels[here].tolist()),
                int(micro.next_sentence_labels[k]),
            )
        )
    return out


def test_micro_batches_are_what_the_model_relies_on(shards) -> None:
    b = batches(shards)
    g = b.update(3)
    b.close()
    assert (
        len({tuple(t.shape for t in vars(m).values() if torch.is_tensor(t)) for m in g.micros}) == 1
    )
    assert sum(m.rows for m in g.micros) == g.rows_total == 96
    assert sum(m.masked for m in g.micros) == g.masked_total
    assert sum(m.tokens for m in g.micros) == g.tokens_total
    assert sum(m.sum_squared_lengths for m in g.micros) == g.sum_squared_lengths_total
    assert g.waste == pytest.approx(1 - g.tokens_total / sum(len(m.input_ids) for m in g.micros))
    assert g.epoch == pytest.approx(4 * 96 / 700)
    for m in g.micros:
        t = len(m.input_ids)
        cu = m.cu_seqlens.numpy()
        spans = np.diff(cu)
        assert cu[0] == 0 and cu[-1] == t and (spans >= 0).all() and spans.max() <= m.max_length
        assert cu[m.rows] == m.tokens and m.cu_seqlens.dtype == torch.int32
        assert m.token_keys.dtype == torch.int32 and m.input_ids.dtype == torch.int64
        expected = np.concatenate([np.arange(n) for n in spans])
        assert np.array_equal(m.position_ids.numpy(), expected)
        assert (m.input_ids[m.tokens :] == shards.special_ids["pad"]).all()
        assert (m.token_type_ids[m.tokens :] == 0).all()
        assert m.masked_weights.sum() == m.masked and m.row_weights.sum() == m.rows
        assert (m.masked_positions[: m.masked] < m.tokens).all()
        first = m.first_positions[: m.rows]
        assert (m.input_ids[first] == shards.special_ids["cls"]).all()
        assert np.array_equal(first.numpy(), cu[: m.rows])
        for ids, types, *_ in rows_of(m):
            second = types.index(1)
            assert ids[second - 1] == shards.special_ids["sep"] and set(types[second:]) == {1}


@pytest.mark.parametrize("kind", ["token", "whole-word", "span"])
def test_any_layout_sees_the_same_rows_masks_and_keys(shards, kind) -> None:
    def seen(dp, budget):
        found: Counter = Counter()
        totals = set()
        for rank in range(dp):
            b = batches(shards, dp_rank=rank, dp=dp, budget=budget, kind=kind)
            g = b.update(5)
            b.close()
            totals.add((g.masked_total, g.rows_total, g.tokens_total))
            for m in g.micros:
                found.update(rows_of(m))
        assert len(totals) == 1
        return found, totals

    base = seen(1, 16384)
    assert sum(base[0].values()) == 96
    for dp, budget in ((1, 512), (2, 1024), (3, 4096), (8, 256)):
        assert seen(dp, budget) == base


def test_update_is_a_pure_function_of_its_number(shards) -> None:
    one, other = batches(shards), batches(shards)
    forward = [one.update(k) for k in range(4)]
    for k in (3, 0, 2):
        again = other.update(k)
        for a, b in zip(forward[k].micros, again.micros):
            assert rows_of(a) == rows_of(b) and torch.equal(a.cu_seqlens, b.cu_seqlens)
    one.close(), other.close()


def test_seek_to_update_one_million_needs_no_walk(shards) -> None:
    b = batches(shards, steps=2_000_000)
    g = b.update(1_000_000)
    b.close()
    assert g.epoch == pytest.approx(1_000_001 * 96 / 700)
    epochs, rows = b.order.rows(1_000_000 * 96, 96)
    want = Counter(shards.lengths[rows].tolist())
    got = Counter(len(row[0]) for m in g.micros for row in rows_of(m))
    assert got == want and set(epochs) == {1_000_000 * 96 // 700}


def test_b25_epochs_differ_and_cover_every_row_on_two_processes(tmp_path) -> None:
    shards = open_shards(
        make_shards(tmp_path / "s", rows=22, max_length=16, vocab_size=64, parts=1)
    )
    ranks = [batches(shards, 22, 3, r, 2, 512) for r in range(2)]
    orders = []
    for step in range(3):
        epochs, ids = ranks[0].row_ids(step)
        assert sorted(ids) == list(range(22)) and set(epochs) == {step}
        orders.append(tuple(ids))
        micros = [m for r in ranks for m in r.update(step).micros]
        lengths = Counter(len(row[0]) for m in micros for row in rows_of(m))
        assert lengths == Counter(shards.lengths.tolist())
    for r in ranks:
        r.close()
    assert len(set(orders)) == 3


def test_b27_unequal_parts_give_every_rank_the_same_number_of_steps(tmp_path) -> None:
    """33 rows on 2 ranks at batch 4: batches run on across epochs, nothing is dropped."""
    shards = open_shards(
        make_shards(tmp_path / "s", rows=33, max_length=16, vocab_size=64, parts=4)
    )
    assert len(shards.index["parts"]) == 4
    seen: Counter = Counter()
    for step in range(33):  # 33 updates of 4 rows = 4 epochs
        sizes = []
        for rank in range(2):
            b = batches(shards, 4, 33, rank, 2, 128)
            g = b.update(step)
            sizes.append((len(g.micros), *(len(m.input_ids) for m in g.micros)))
            assert g.rows_total == 4
        assert sizes[0] == sizes[1]
        seen.update(b.row_ids(step)[1].tolist())
        b.close()
    assert set(seen.values()) == {4} and len(seen) == 33


def test_static_masks_of_the_shard_are_used_as_they_are(tmp_path) -> None:
    shards = open_shards(
        make_shards(tmp_path / "s", rows=50, max_length=32, vocab_size=64, static_masks=True)
    )
    b = batches(shards, 20, 5, budget=256)
    g = b.update(1)
    epochs, ids = b.row_ids(1)
    b.close()
    read = shards.rows(ids)
    assert g.masked_total == len(read.masked_positions) and "static masks" in b.warning
    assert sum(m.masked for m in g.micros) == g.masked_total
    want = {tuple(read.tokens[a:e].tolist()) for a, e in zip(read.offsets[:-1], read.offsets[1:])}
    for m in g.micros:
        assert {row[0] for row in rows_of(m)} <= want
        assert (m.input_ids[m.masked_positions[: m.masked]] == shards.special_ids["mask"]).all()


@pytest.fixture(scope="module")
def masked_shards(tmp_path_factory):
    folder = tmp_path_factory.mktemp("m") / "s"
    return open_shards(make_shards(folder, rows=90, max_length=32, parts=3, static_masks=True))


@given(st.lists(st.integers(0, 89), min_size=1, max_size=60), st.integers(1, 4))
@settings(max_examples=50, deadline=None)
def test_static_masks_are_planned_for_by_their_counts_in_the_rows(masked_shards, ids, dp) -> None:
    rows = np.array((ids * dp)[: max(len(ids), dp)])
    b = batches(masked_shards, len(rows), dp=dp, budget=256)
    b.close()
    plan, lengths, counts = b.builder.plan(rows)
    read = masked_shards.rows(rows)
    assert np.array_equal(counts, np.diff(read.masked_offsets))
    wanted = b.builder.packer.plan(read.lengths, np.diff(read.masked_offsets))
    assert np.array_equal(lengths, read.lengths) and vars(plan).keys() == vars(wanted).keys()
    assert all(np.array_equal(vars(plan)[name], vars(wanted)[name]) for name in vars(plan))


def test_a_rank_reads_its_own_rows_only(tmp_path) -> None:
    """With static masks each read the whole global batch, to count them. What another rank is to
    read is damaged here."""
    folder = make_shards(tmp_path / "s", rows=90, max_length=32, parts=1, static_masks=True)
    shards = open_shards(folder)
    ranks = [batches(shards, 40, dp_rank=rank, dp=2, budget=256) for rank in (0, 1)]
    _, rows = ranks[0].row_ids(0)
    plan = ranks[0].builder.plan(rows)[0]
    other = rows[np.concatenate([plan.bin(1, n) for n in range(plan.n_micro)])]
    starts, _ = shards.part(0).spans("input_ids", other)
    with (folder / "part-00000.arrow").open("r+b") as file:
        for start in starts.tolist():
            file.seek(2 * start)
            file.write(b"\xff\xff")
    assert ranks[0].update(0).rows_total == 40
    with pytest.raises(UserError, match="token 65535"):
        ranks[1].update(0)
    for b in ranks:
        b.close()


def test_rows_of_one_segment_have_token_type_zero(tmp_path) -> None:
    shards = open_shards(
        make_shards(tmp_path / "s", rows=40, max_length=32, vocab_size=64, pairs=False)
    )
    b = batches(shards, 20, 5, budget=512)
    assert all((m.token_type_ids == 0).all() for m in b.update(0).micros)
    b.close()


def test_a_batch_larger_than_the_set_sees_rows_of_several_epochs_with_other_masks(tmp_path) -> None:
    shards = open_shards(make_shards(tmp_path / "s", rows=7, max_length=64, vocab_size=64, parts=1))
    b = batches(shards, 21, 2, budget=512)
    rows = [row for m in b.update(0).micros for row in rows_of(m)]
    b.close()
    assert len(rows) == 21 and len({row[2] for row in rows}) == 21  # keys: one per (epoch, row)


def test_a_mistake_is_refused_before_any_row_is_read(shards) -> None:
    with pytest.raises(UserError, match="cannot feed 4"):
        batches(shards, global_batch=2, dp=4)
    with pytest.raises(UserError, match="micro_batch_tokens=64"):
        batches(shards, budget=64)


def test_a_damaged_part_is_reported_when_its_batch_is_asked_for(tmp_path) -> None:
    folder = make_shards(tmp_path / "s", rows=300, max_length=32, vocab_size=64, parts=2)
    shards = open_shards(folder)
    part = folder / "part-00001.arrow"
    part.write_bytes(part.read_bytes()[: part.stat().st_size // 2])
    for ahead in (True, False):
        b = batches(shards, 64, 20, budget=512)
        with pytest.raises(UserError, match="part-00001.arrow"):
            for step in range(10):
                b.update(step)
                if ahead:  # never raises: the update before is not lost
                    b.prefetch()
        b.close()


def test_what_was_fetched_ahead_is_what_is_made_when_asked_for(shards) -> None:
    """In any order of asking, up to the last update; waiting is counted once."""
    ahead, behind = batches(shards, steps=4, budget=512), batches(shards, steps=4, budget=512)
    for step in (0, 1, 3, 2, 3):
        got, wanted = ahead.update(step), behind.update(step)
        assert ahead.waited() >= 0 and ahead.waited() == 0
        ahead.prefetch()
        for a, b in zip(got.micros, wanted.micros, strict=True):
            for name, tensor in a.tensors().items():
                assert tensor.equal(b.tensors()[name]), (step, name)
    ahead.close()
    behind.close()


def test_one_copy_brings_every_tensor_over_unchanged(shards) -> None:
    b = batches(shards, budget=512)
    micros = b.update(0).micros
    b.close()
    host = in_one_buffer(micros, pin=False)
    assert len({t.untyped_storage().data_ptr() for m in host for t in m.tensors().values()}) == 1
    meta = to_device(host, torch.device("meta"))
    there = to_device(host, torch.device("cpu"))
    for whole, empty, moved in zip(micros, meta, there):
        assert whole.rows == moved.rows and whole.max_length == moved.max_length
        for name, tensor in whole.tensors().items():
            assert torch.equal(tensor, moved.tensors()[name])
            assert tensor.dtype == moved.tensors()[name].dtype
            assert tensor.shape == empty.tensors()[name].shape
            assert moved.tensors()[name].data_ptr() % 16 == 0


@pytest.mark.gpu
def test_masks_and_keys_are_the_same_on_a_gpu(shards) -> None:
    host, device = batches(shards), batches(shards, device="cuda")
    for a, b in zip(host.update(2).micros, device.update(2).micros):
        assert rows_of(a) == rows_of(b.map(torch.Tensor.cpu))
    host.close(), device.close()


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_a_single_segment_has_no_say_in_the_nsp_loss(tmp_path, share) -> None:
    """It would teach the head one constant answer (bench/RESULTS.md, five minutes)."""
    folder = make_shards(tmp_path / "s", rows=120, max_length=32, vocab_size=64, single=share)
    shards = open_shards(folder)
    for dp, budget in ((1, 4096), (1, 512), (3, 256)):
        labelled = 0
        for rank in range(dp):
            b = batches(shards, 48, 5, rank, dp, budget)
            update, (_, ids) = b.update(3), b.row_ids(3)
            b.close()
            for m in update.micros:
                pairs = [1 in types for _, types, *_ in rows_of(m)]
                assert m.row_weights[: m.rows].tolist() == pairs
                assert not m.row_weights[m.rows :].any() and m.labelled == sum(pairs)
                labelled += m.labelled
        assert labelled == int((shards.rows(ids).segment_b > 0).sum())
        assert 48 * (1 - share) - 15 < labelled < 48 * (1 - share) + 15
