"""Saves in the background: what goes wrong in one is heard at once, what is logged is on disk."""

from __future__ import annotations

import pytest
import torch

from configs.log import read_log
from configs.schema import Recipe
from pretrain.checkpoint import latest, save_logical
from pretrain.checkpoint.folder import INDEX, checkpoints
from pretrain.checkpoint.writer import Writer
from pretrain.engine import LeanEngine
from pretrain.kernels import plain
from pretrain.model import build
from pretrain.parallel.groups import Groups
from tests.disk import disk_events
from tests.forked import finish
from tests.trainer.batches import tiny_config
from tests.trainer.runs import UPDATES, interrupt, losses, output, start, train, wait_for_step


def events(run) -> list[dict]:
    return [r for r in read_log(run / "train" / "log.jsonl") if r["kind"] == "event"]


def saved(run) -> list[int]:
    """Steps of the checkpoints that the log tells of."""
    return [e["step"] for e in events(run) if e["text"] == "checkpoint"]


def test_a_checkpoint_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    """A machine that loses its power leaves it complete or absent: every file, then the folder that
    lists them, then the name, then the folder of names."""
    happened = disk_events(monkeypatch)
    folder = save_logical(tmp_path / "train", {"a": torch.ones(3)}, {"model": {}})
    named = happened.index(("name", str(folder)))
    before = [path.rsplit("/", 1)[-1] for what, path in happened[:named] if what == "sync"]
    data = next(name for name in before if name.endswith(".safetensors"))
    index = next(name for name in before if INDEX in name)
    assert before.index(data) < before.index(index) < len(before) - 1
    assert before[-1] == f"{folder.name}.partial-import"
    assert ("sync", str(folder.parent)) in happened[named:]


@pytest.mark.parametrize(("accident", "size"), [("full:2", 1), ("full:2:0", 2), ("full:2:1", 2)])
def test_a_save_that_fails_ends_the_training_before_the_next(accident, size, run):
    """It was heard of at the next save only, and the log said that it was there."""
    options = ("checkpoint.every=6", "phases.0.steps=60")
    assert train(run, *options, size=size, accident=accident) == [2] * size, output(run)
    assert 12 <= max(losses(run)) < 18
    assert saved(run) == [6] and latest(run / "train").name == "step-00000006"
    for rank in range(size):
        assert "No space left on device" in output(run, rank)
        assert "free some of it" in output(run, rank) and "Traceback" not in output(run, rank)
    assert train(run, *options, "train.stop_at=14", size=size) == [0] * size, output(run)
    assert saved(run) == [6, 12, 14]


@pytest.mark.parametrize("background", ["true", "false"])
def test_every_checkpoint_is_logged_once(background, run):
    assert train(run, f"checkpoint.asynchronous={background}") == [0], output(run)
    assert saved(run) == sorted([*range(5, UPDATES, 5), 24, UPDATES])  # 24: where a phase ends
    assert all(e["stalled_s"] > 0 for e in events(run) if e["text"] == "checkpoint")


def test_a_stopped_training_says_saved_when_it_is(run):
    processes = start(run, "checkpoint.every=0")
    wait_for_step(run, 3)
    interrupt(processes)
    assert finish(processes) == [75], output(run)
    (*_, checkpoint, stopped) = events(run)
    assert checkpoint["text"] == "checkpoint" and stopped["text"] == "stopped by SIGTERM, saved"
    assert checkpoint["step"] == stopped["step"] == checkpoints(run / "train")[-1][0]


def test_a_save_is_told_when_it_is_on_disk_and_never_if_it_failed(tmp_path, monkeypatch):
    groups = Groups(1, 1, 0, 0)
    model, pieces = build(tiny_config(), groups.tp_group, plain, seed=1)
    engine = LeanEngine(Recipe(), model, pieces, groups, plain, torch.device("cpu"))
    told = []

    def note(step: int, stalled_s: float) -> None:
        told.append((step, latest(tmp_path).name))

    writer = Writer(tmp_path, groups, 3, "a", note)
    for step in (1, 2):
        writer.save(step, engine.shard, {"model": {}})
    assert told == [(1, "step-00000001")]  # the second may still be on its way
    writer.wait()
    writer.look()
    assert told == [(1, "step-00000001"), (2, "step-00000002")]
    (tmp_path / "checkpoints" / "step-00000003.partial-a").write_text("no folder")
    writer.save(3, engine.shard, {"model": {}})
    with pytest.raises(FileExistsError):
        writer.close()
    assert len(told) == 2


@pytest.mark.parametrize("size", [1, 2])
def test_a_damaged_last_checkpoint_is_made_again(size, run):
    """All ranks were told that there is nothing to do."""
    assert train(run, "train.stop_at=12", size=size) == [0] * size, output(run)
    made = losses(run)
    path = next(latest(run / "train").glob("*.safetensors"))
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)
    assert train(run, "train.stop_at=12", size=size) == [0] * size, output(run)
    assert "step-00000012 is damaged and skipped" in output(run)
    assert "goes on from update 10" in output(run)
    assert losses(run) == made
    assert train(run, "train.stop_at=12", size=size) == [0] * size
    assert "nothing to do: 12 of 12 updates are done" in output(run)
