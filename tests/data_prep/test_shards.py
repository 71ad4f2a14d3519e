"""The shard format: what is written is read, any order, and every reader agrees."""

from __future__ import annotations

import errno
import math
import os
from pathlib import Path

import datasets
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from configs import UserError
from data_prep import inspect
from data_prep.shard_index import HELD_OUT, pack_bools, sets_below, unpack_bools
from data_prep.shard_writer import concatenate, take, write_folder
from data_prep.shards import (
    Layout,
    Rows,
    held_out,
    offsets_of,
    open_shards,
    ragged_index,
)
from tests.synthetic import make_rows, make_shards, open_checked


def as_lists(rows: Rows) -> list[list[int]]:
    return [rows.tokens[a:b].tolist() for a, b in zip(rows.offsets[:-1], rows.offsets[1:])]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_shards(tmp_path_factory.mktemp("shards"), rows=3000, max_length=64, parts=3)


def test_rows_equal_what_datasets_reads(folder: Path) -> None:
    shards = open_shards(folder)
    whole = [
        row
        for part in shards.index["parts"]
        for row in datasets.Dataset.from_file(str(folder / part["file"])).to_list()
    ]
    assert len(whole) == shards.num_rows == len(shards)
    ids = np.random.default_rng(1).integers(0, shards.num_rows, 500)
    rows = shards.rows(ids)
    assert as_lists(rows) == [whole[i]["input_ids"] for i in ids]
    assert rows.segment_b.tolist() == [whole[i]["segment_b"] for i in ids]
    assert rows.next_sentence_label.tolist() == [whole[i]["next_sentence_label"] for i in ids]
    assert np.array_equal(rows.lengths, shards.lengths[ids])
    assert rows.tokens.dtype == rows.segment_b.dtype == np.int32


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, 2999), max_size=40))
def test_any_order_any_repetition(folder: Path, ids: list[int]) -> None:
    shards = open_shards(folder)
    rows = shards.rows(np.array(ids, np.int64))
    single = [as_lists(shards.rows(np.array([i])))[0] for i in ids]
    assert as_lists(rows) == single


def test_load_dataset_reads_the_folder(folder: Path, tmp_path: Path) -> None:
    found = datasets.load_dataset(str(folder), cache_dir=str(tmp_path))
    assert found["train"].num_rows == 3000
    assert found["validation"].num_rows == held_out(folder).num_rows == 64


def test_large_vocabulary_and_static_masks(tmp_path: Path) -> None:
    folder = make_shards(tmp_path, rows=200, vocab_size=70000, static_masks=True)
    shards = open_checked(folder)
    assert shards.index["token_type"] == "int32"
    rows = shards.rows(np.arange(200)[::-1])
    assert rows.masked_offsets is not None and rows.masked_positions is not None
    at = np.repeat(rows.offsets[:-1], np.diff(rows.masked_offsets)) + rows.masked_positions
    assert (rows.tokens[at] == shards.special_ids["mask"]).all()
    assert rows.tokens.max() > 65535
    backwards = shards.rows(np.arange(200))
    assert np.array_equal(np.diff(rows.masked_offsets)[::-1], np.diff(backwards.masked_offsets))


@pytest.mark.parametrize("length", [8, 64, 128, 512, 4096])
def test_b17_record_batches_are_bounded(length: int) -> None:
    """No buffer comes near 2 GiB however many rows a part has; batches hold at most 16 MB of ids."""
    layout = Layout(length, 30522)
    assert layout.rows_per_batch * length * 2 <= 16 << 20 or layout.rows_per_batch == 256
    assert Layout(128, 30522).rows_per_batch == 65536


def test_b17_rows_beyond_the_first_batch(tmp_path: Path) -> None:
    """A part of several record batches: rows 0 and last, and those around each border, are right."""
    layout = Layout(65535, 1000)  # 256 rows in a batch
    rows = make_rows(np.random.default_rng(0), 700, 30, 1000)
    write_folder(
        tmp_path, layout, "s", [rows], objective="nsp", mask_cap=5, settings={}, sources=[],
        tokenizer={"vocab_size": 1000, "fingerprint": "", "word_start": pack_bools(np.ones(1000, bool)),
                   "special_ids": {"pad": 0, "unk": 1, "cls": 2, "sep": 3, "mask": 4}},
        tokenizer_folder=None, counts={}, held_out=False,
    )  # fmt: skip
    shards = open_checked(tmp_path)
    ids = np.array([0, 255, 256, 511, 512, 699])
    assert as_lists(shards.rows(ids)) == as_lists(take(rows, ids))


def test_a_token_that_no_vocabulary_has_is_refused_when_read(tmp_path: Path) -> None:
    folder = make_shards(tmp_path, rows=300, vocab_size=500)
    part = folder / "part-00000.arrow"
    data = bytearray(part.read_bytes())
    tokens = open_shards(folder).rows(np.arange(300)).tokens.astype(np.uint16).tobytes()
    data[data.index(tokens[:200]) + 101] |= 0x80
    part.write_bytes(data)
    with pytest.raises(UserError, match=r"part-00000.arrow: token 3\d{4}, the vocabulary has 500"):
        open_shards(folder).rows(np.arange(300)[::-1])


def test_word_start_and_held_out(folder: Path) -> None:
    shards = open_shards(folder)
    assert shards.word_start.tolist() == [i % 3 != 1 for i in range(shards.vocab_size)]
    assert held_out(folder).fingerprint != shards.fingerprint


@pytest.mark.parametrize("name", ["index.json", "part-00000.arrow"])
@pytest.mark.parametrize("number", [errno.EACCES, errno.EIO])
def test_what_the_system_does_not_let_us_read_is_no_damage(
    folder: Path, monkeypatch: pytest.MonkeyPatch, name: str, number: int
) -> None:
    """The remedy was to delete it."""

    def refuse(path: Path | str, *_: object, **__: object) -> None:  # root may read everything
        raise OSError(number, f"Failed to open {path}")

    if name == "index.json":
        monkeypatch.setattr(Path, "read_text", refuse)
    else:
        monkeypatch.setattr(pa, "memory_map", refuse)
    with pytest.raises(UserError, match=f"{name}: cannot be read .{os.strerror(number)}") as caught:
        open_shards(folder).rows(np.arange(3))
    assert "check its rights" in caught.value.remedy and "delete" not in caught.value.remedy


def test_a_set_without_held_out_rows_says_so(folder: Path) -> None:
    for look in (held_out, lambda path: inspect.main([str(path), "--held-out"])):
        with pytest.raises(UserError, match="no rows were held out") as caught:
            look(folder / HELD_OUT)
        assert "prep.held_out" in caught.value.remedy


def test_an_unreadable_neighbour_hides_no_set(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a", "z"):
        (tmp_path / "shards").mkdir(exist_ok=True)
        (tmp_path / "shards" / name).symlink_to(folder)
    (tmp_path / "shards" / "lost+found").mkdir()
    stat = Path.stat

    def refuse(path: Path, **options: bool) -> os.stat_result:  # root may read everything
        if path.parent.name == "lost+found":
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return stat(path, **options)

    monkeypatch.setattr(Path, "stat", refuse)
    assert [one.name for one in sets_below(tmp_path)] == ["a", "z"]


def test_refusals_name_the_thing(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such shard folder"):
        open_shards(tmp_path / "nowhere")
    with pytest.raises(UserError, match=r"index\.json is missing: not a shard folder") as caught:
        open_shards(tmp_path)
    assert "WORK_DIR/shards/SET" in caught.value.remedy  # nothing of ours is there to go on with
    with pytest.raises(IndexError, match=r"0\.\.2999"):
        open_shards(folder).rows(np.array([3000]))


@given(st.lists(st.tuples(st.integers(0, 1000), st.integers(0, 9)), max_size=30))
def test_ragged_index(spans: list[tuple[int, int]]) -> None:
    starts = np.array([s for s, _ in spans], np.int64)
    lengths = np.array([n for _, n in spans], np.int64)
    expected = [s + k for s, n in spans for k in range(n)]
    assert ragged_index(starts, lengths).tolist() == expected
    assert offsets_of(lengths)[-1] == len(expected)


@given(st.lists(st.booleans(), max_size=70))
def test_packed_bools(flags: list[bool]) -> None:
    assert unpack_bools(pack_bools(np.array(flags, bool)), len(flags)).tolist() == flags


def test_take_and_concatenate_are_inverse() -> None:
    rows = make_rows(np.random.default_rng(3), 50, 40, 100, static_masks=True)
    again = concatenate([take(rows, np.arange(0, 20)), take(rows, np.arange(20, 50))])
    for name in (
        "tokens",
        "offsets",
        "segment_b",
        "masked_positions",
        "masked_labels",
        "masked_offsets",
    ):
        assert np.array_equal(getattr(rows, name), getattr(again, name)), name


def test_default_mask_cap_of_synthetic_rows(folder: Path) -> None:
    assert open_shards(folder).mask_cap == math.ceil(0.15 * 64)
