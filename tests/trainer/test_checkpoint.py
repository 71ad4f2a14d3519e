"""Checkpoints: any layout into any other, complete or absent, damage named."""

from __future__ import annotations

import json
import shutil
import time
from dataclasses import dataclass
from math import prod
from zlib import crc32

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from configs import files
from configs.errors import UserError
from configs.loading import to_dict
from configs.model import padded_vocab, resolve_model
from configs.schema import ModelConfig, Recipe
from pretrain.checkpoint import Damaged, latest, load_logical, read_meta, resolve, save_logical
from pretrain.checkpoint.boxes import overlap, ranges
from pretrain.checkpoint.folder import INDEX, checkpoints, prune, write_json
from pretrain.checkpoint.reader import Reader, load_shard
from pretrain.checkpoint.writer import Writer
from pretrain.engine import LeanEngine
from pretrain.kernels import plain
from pretrain.model import build
from pretrain.parallel.groups import Groups
from tests.trainer.batches import tiny_config

CONFIG = tiny_config(num_layers=1, vocab_size=150)
KINDS = ("master", "exp_avg", "exp_avg_sq")


@dataclass
class FakeGroup:
    """Enough of a process group to build one rank of a layout without other processes."""

    n: int
    r: int

    def size(self) -> int:
        return self.n

    def rank(self) -> int:
        return self.r


def ranks(tp: int, dp: int, zero: int, precision: str = "fp32") -> list[LeanEngine]:
    """The engines of all ranks of a layout, rank order."""
    out, recipe = [], Recipe()
    recipe.parallel.zero_stage = zero
    recipe.train.precision = precision
    for d in range(dp):
        for t in range(tp):
            groups = Groups(tp, dp, t, d, FakeGroup(tp, t), FakeGroup(dp, d))
            model, pieces = build(CONFIG, groups.tp_group, plain, seed=1)
            out.append(LeanEngine(recipe, model, pieces, groups, plain, torch.device("cpu")))
    return out


def value(kind: str, name: str, shape) -> torch.Tensor:
    """The logical tensor that every test stores under this name."""
    return torch.randn(
        shape, generator=torch.Generator().manual_seed(crc32(f"{kind}{name}".encode()))
    )


def fill(engine: LeanEngine) -> None:
    for s in engine.shard.slices:
        for kind in KINDS:
            block = torch.zeros(s.piece.shape)
            theirs, ours = s.piece.clip(block)
            block[ours] = value(kind, s.piece.name, s.piece.logical_shape)[theirs]
            s.of(engine.shard.tensor(kind)).copy_(block.view(-1)[s.begin : s.begin + s.numel])


def save(train_dir, engines: list[LeanEngine], step: int, keep: int = 3, token: str = "a") -> None:
    meta = {
        "model": to_dict(CONFIG),
        "tensors": {p.name: list(p.logical_shape) for p in engines[0].pieces},
        "state": {"optimizer_steps": step},
    }
    writers = [Writer(train_dir, e.groups, keep, token) for e in engines]
    for writer, engine in zip(writers, engines):
        writer.save(step, engine.shard, meta)
    for writer in writers:
        writer.close()


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """A train folder with one checkpoint of tp 2 x dp 2, ZeRO-1."""
    folder = tmp_path_factory.mktemp("train")
    engines = ranks(2, 2, 1)
    for engine in engines:
        fill(engine)
    save(folder, engines, 7)
    return folder


@given(st.data())
@settings(max_examples=300, deadline=None)
def test_ranges_cover_exactly_what_was_cut(data):
    shape = tuple(data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=4)))
    begin = data.draw(st.integers(0, prod(shape)))
    end = data.draw(st.integers(begin, prod(shape)))
    seen = torch.zeros(shape, dtype=torch.int64)
    flat = torch.arange(prod(shape)).view(shape)
    found = ranges(shape, begin, end)
    assert len(found) <= 2 * len(shape) - 1
    for corner, sizes, at in found:
        index = tuple(slice(c, c + n) for c, n in zip(corner, sizes))
        seen[index] += 1
        block = flat[index].reshape(-1)
        assert torch.equal(block, torch.arange(at, at + len(block)))
    wanted = torch.zeros(prod(shape), dtype=torch.int64)
    wanted[begin:end] = 1
    assert torch.equal(seen.view(-1), wanted)


@given(st.data())
@settings(max_examples=200, deadline=None)
def test_overlap_is_the_common_block(data):
    dims = data.draw(st.integers(1, 3))
    draw = lambda low: data.draw(st.lists(st.integers(low, 4), min_size=dims, max_size=dims))  # noqa: E731
    a, n, b, m = draw(0), draw(1), draw(0), draw(1)
    cells = [
        {
            tuple(x)
            for x in torch.cartesian_prod(*(torch.arange(o, o + s) for o, s in zip(*c)))
            .view(-1, dims)
            .tolist()
        }
        for c in ((a, n), (b, m))
    ]
    met = overlap(a, n, b, m)
    common = cells[0] & cells[1]
    assert (met is None) == (not common)
    if met:
        assert prod(s.stop - s.start for s in met[0]) == len(common)
        assert {tuple(o + s.start for o, s in zip(a, met[0]))} <= common
        assert {tuple(o + s.start for o, s in zip(b, met[1]))} <= common


LAYOUTS = [(1, 1, 0), (1, 3, 1), (2, 1, 0), (2, 2, 0), (4, 2, 1), (1, 8, 1)]


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda x: "tp{}-dp{}-z{}".format(*x))
def test_loads_exactly_in_any_layout(layout, stored):
    for engine in ranks(*layout, precision="bf16"):
        with Reader(latest(stored)) as reader:
            load_shard(reader, engine.shard)
            engine.shard.zero_padding()
            check(engine)
            load_shard(reader, engine.shard, moments=False)
        assert all(engine.shard.tensor(kind).any() == (kind == "master") for kind in KINDS)


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda x: "tp{}-dp{}-z{}".format(*x))
def test_saves_from_any_layout(layout, tmp_path):
    for engine in (engines := ranks(*layout)):
        fill(engine)
    save(tmp_path, engines, 3)
    for kind in KINDS:
        tensors = load_logical(latest(tmp_path), kind)
        assert tensors
        for name, tensor in tensors.items():
            assert torch.equal(tensor, value(kind, name, tensor.shape)), (kind, name)


@pytest.mark.parametrize("dp", [4, 16])
def test_b43_eight_data_parallel_ranks_go_on_as_four_or_sixteen(dp, tmp_path):
    """Masters and moments; that rows go on the same is tested with whole runs."""
    engines = ranks(1, 8, 1)
    for engine in engines:
        fill(engine)
    save(tmp_path, engines, 2)
    for engine in ranks(1, dp, 1):
        with Reader(latest(tmp_path)) as reader:
            load_shard(reader, engine.shard)
        check(engine)


def check(engine: LeanEngine) -> None:
    for s in engine.shard.slices:
        for kind in KINDS:
            block = torch.zeros(s.piece.shape)
            theirs, ours = s.piece.clip(block)
            block[ours] = value(kind, s.piece.name, s.piece.logical_shape)[theirs]
            wanted = block.view(-1)[s.begin : s.begin + s.numel]
            assert torch.equal(s.of(engine.shard.tensor(kind)), wanted), (kind, s.piece.name)


def test_b45_fused_rows_are_stored_as_query_key_and_value(tmp_path):
    """Hidden 8, 2 heads: the 24 fused rows, numbered, come back under their three names, tp 1, 2."""
    config = resolve_model(
        ModelConfig(vocab_size=32, hidden_size=8, num_layers=1, num_heads=2, intermediate_size=16)
    )
    for tp in (1, 2):
        engines = []
        for t in range(tp):
            groups = Groups(tp, 1, t, 0, FakeGroup(tp, t), None)
            model, pieces = build(config, groups.tp_group, plain)
            fused = model.bert.encoder.layer[0].attention.self.qkv.weight.data
            third = 8 // tp
            rows = torch.cat(
                [torch.arange(k * 8 + t * third, k * 8 + (t + 1) * third) for k in range(3)]
            )
            fused.copy_(rows[:, None].expand_as(fused).float())
            engines.append(LeanEngine(Recipe(), model, pieces, groups, plain, torch.device("cpu")))
        folder = tmp_path / str(tp)
        save(folder, engines, 1)
        tensors = load_logical(latest(folder))
        prefix = "bert.encoder.layer.0.attention.self."
        for k, name in enumerate(("query", "key", "value")):
            assert tensors[f"{prefix}{name}.weight"][:, 0].tolist() == list(range(k * 8, k * 8 + 8))


def test_b45_an_unknown_format_is_refused(stored, tmp_path):
    shutil.copytree(stored, tmp_path / "train")
    index = latest(tmp_path / "train") / INDEX
    write_json(index, {**read_meta(index.parent), "format": 99})
    with pytest.raises(UserError, match="format 99"):
        read_meta(index.parent)


def test_b47_padding_is_not_stored():
    full = resolve_model(ModelConfig(vocab_size=30522))
    assert [padded_vocab(full, tp) for tp in (1, 2, 4)] == [30592, 30720, 30720]
    for tp in (1, 2, 4):
        _, pieces = build(CONFIG, FakeGroup(tp, tp - 1), plain)
        words = next(p for p in pieces if "word_embeddings" in p.name)
        assert words.logical_shape == (150, 64)
        assert words.shape[0] * tp == padded_vocab(CONFIG, tp) > 150


def test_b39_a_save_that_was_killed_is_no_checkpoint(stored, tmp_path, capsys):
    train = tmp_path / "train"
    shutil.copytree(stored, train)
    partial = train / "checkpoints" / "step-00000200.partial-0123"
    shutil.copytree(latest(train), partial)
    (partial / INDEX).unlink()
    assert latest(train).name == "step-00000007"
    Writer(train, Groups(1, 1, 0, 0), 3, "new").close()
    assert "step-00000200.partial-0123 is incomplete" in capsys.readouterr().out
    assert not partial.exists()


def test_parts_of_a_killed_run_are_not_mixed_in(tmp_path):
    """A killed run of four ranks left three parts of step 5; two ranks save step 5 afresh."""
    old, new = ranks(2, 2, 1), ranks(1, 2, 1)
    for engine in old + new:
        fill(engine)
    for engine in old[1:]:
        writer = Writer(tmp_path, engine.groups, 3, "old")
        writer.save(5, engine.shard, {"model": {}, "tensors": {}})
        writer.close()
    assert latest(tmp_path) is None
    save(tmp_path, new, 5, token="new")
    assert len(read_meta(latest(tmp_path))["files"]) == 2
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["step-00000005"]


def damage_missing(folder):
    sorted(folder.glob("*.safetensors"))[1].unlink()


def damage_short(folder):
    path = sorted(folder.glob("*.safetensors"))[1]
    path.write_bytes(path.read_bytes()[:-4])


def damage_bit(folder):
    path = sorted(folder.glob("*.safetensors"))[0]
    data = bytearray(path.read_bytes())
    data[-100] ^= 1
    path.write_bytes(data)


def damage_header(folder):
    path = sorted(folder.glob("*.safetensors"))[0]
    data = bytearray(path.read_bytes())
    data[20] ^= 0x55
    path.write_bytes(data)


def damage_index(folder):
    path = folder / INDEX
    path.write_text(path.read_text().replace('"step": 7', '"step": 8'))


def damage_index_cut(folder):
    path = folder / INDEX
    path.write_text(path.read_text()[:-40])


def damage_part_left_out(folder):
    meta = read_meta(folder)
    meta["files"].pop(sorted(meta["files"])[1])
    write_json(folder / INDEX, meta)


@pytest.mark.parametrize(
    "damage",
    [
        damage_missing,
        damage_short,
        damage_bit,
        damage_header,
        damage_index,
        damage_index_cut,
        damage_part_left_out,
    ],
)
def test_damage_is_noticed_and_named(damage, stored, tmp_path):
    shutil.copytree(stored, tmp_path / "train")
    folder = latest(tmp_path / "train")
    damage(folder)
    with pytest.raises(Damaged, match=folder.name):
        for kind in KINDS:
            load_logical(folder, kind)


def test_retention_goes_by_number(stored, tmp_path):
    root = tmp_path / "checkpoints"
    for step in (9, 10, 100, 99, 200):
        shutil.copytree(latest(stored), root / f"step-{step}")
    prune(tmp_path, 2, 100)  # 200 could not be read
    assert [step for step, _ in checkpoints(tmp_path)] == [99, 100, 200]


def test_what_goes_wrong_in_the_thread_is_raised(tmp_path, monkeypatch):
    engine = ranks(1, 1, 0)[0]
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10, 10, 0))
    writer = Writer(tmp_path, engine.groups, 3, "a")
    writer.save(1, engine.shard, {"model": {}, "tensors": {}})
    with pytest.raises(UserError, match="GB free"):
        writer.wait()
    assert latest(tmp_path) is None


def test_a_part_is_done_when_rank_0_sees_it(tmp_path, monkeypatch):
    """The folder may get its name while that part's rank still waits for its disk."""
    sync = files.sync_folder

    def slow(folder):
        if not list(folder.glob("rank-00000*")):
            time.sleep(0.5)
        sync(folder)

    monkeypatch.setattr(files, "sync_folder", slow)
    first, second = ranks(2, 1, 0)
    late = Writer(tmp_path, second.groups, 3, "a")
    late.save(5, second.shard, {"model": {}})
    while not list(tmp_path.glob("*/*/rank-00001*.json")):
        time.sleep(0.01)
    writer = Writer(tmp_path, first.groups, 3, "a")
    writer.save(5, first.shard, {"model": {}})
    writer.close()
    late.close()
    assert [step for step, _ in checkpoints(tmp_path)] == [5]


def test_training_may_change_the_weights_while_a_save_runs(tmp_path):
    engine = ranks(1, 1, 0)[0]
    fill(engine)
    writer = Writer(tmp_path, engine.groups, 3, "a")
    meta = {"model": {}, "tensors": {p.name: list(p.logical_shape) for p in engine.pieces}}
    writer.save(1, engine.shard, meta)
    for kind in KINDS:
        engine.shard.tensor(kind).zero_()
    writer.save(2, engine.shard, meta)
    writer.close()
    first, second = (load_logical(folder) for _, folder in checkpoints(tmp_path))
    assert all(torch.equal(t, value("master", name, t.shape)) for name, t in first.items())
    assert not any(t.any() for t in second.values())


def test_imported_weights_have_no_moments(tmp_path):
    tensors = {"a.weight": torch.randn(3, 4).half(), "b": torch.tensor(2.0).view(1)}
    folder = save_logical(tmp_path / "train", tensors, {"model": {}})
    assert resolve(tmp_path) == resolve(tmp_path / "train") == resolve(folder) == folder
    back = load_logical(folder)
    assert all(torch.equal(back[k], t.float()) for k, t in tensors.items())
    with pytest.raises(Damaged, match="exp_avg"):
        load_logical(folder, "exp_avg")
    with pytest.raises(UserError, match="no complete checkpoint"):
        resolve(tmp_path / "nothing")


def test_nothing_is_pickled(stored):
    for path in latest(stored).iterdir():
        head = path.read_bytes()[:2]
        assert path.suffix in (".json", ".safetensors")
        assert head != b"\x80\x02"
    assert json.loads((latest(stored) / INDEX).read_text())["body"]["step"] == 7
