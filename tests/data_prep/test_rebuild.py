"""What a build makes of work that lies there already: finished, stopped, damaged, of other settings."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

import data_prep.arrays
import data_prep.pipeline
import data_prep.shard_writer
from configs import UserError, load_recipe
from configs.files import lock_folder
from configs.loading import difference
from data_prep.settings import set_changes
from data_prep.shard_index import REMAKE, read_index
from data_prep.shards import open_shards
from tests.data_prep.corpus import (
    build,
    recipe_file,
    tree,
    write_texts,
)


def test_b23_another_length_or_vocabulary_is_refused(tmp_path: Path) -> None:
    recipe = recipe_file(
        tmp_path, write_texts(tmp_path / "text"), "shards: {s: {max_length: 128}}\n"
    )
    folder = build(recipe)
    before = tree(folder)
    with pytest.raises(UserError, match=r"shards\.max_length: 128 there, 512 now"):
        build(recipe, "shards.s.max_length=512")
    vocab = tmp_path / "vocab.txt"
    vocab.write_text(vocab.read_text().replace("maple", "mapel"))
    with pytest.raises(UserError, match="fingerprint: .* there, .* now"):
        build(recipe)
    shutil.rmtree(tmp_path / "run" / "vocab")
    with pytest.raises(UserError, match=r"tokenizer\.fingerprint: .* there, .* now"):
        build(recipe)
    assert tree(folder) == before


def test_b23_changed_text_or_code_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = write_texts(tmp_path / "text")
    recipe = recipe_file(tmp_path, text)
    build(recipe)
    monkeypatch.setattr("data_prep.settings.code_digest", lambda: "other")
    with pytest.raises(UserError, match=r"documents\.code: .* there, other now"):
        build(recipe)
    monkeypatch.undo()
    (text / "005.txt").write_text("Something else stood here before.\n")
    with pytest.raises(UserError, match=r"sources\.0 text\.content: .* there, .* now"):
        build(recipe)


def test_moved_text_is_not_stale(tmp_path: Path) -> None:
    recipe = recipe_file(tmp_path, write_texts(tmp_path / "text"))
    before = tree(build(recipe))
    (tmp_path / "text").rename(tmp_path / "moved")
    assert tree(build(recipe, f"sources.0.path={tmp_path}/moved")) == before


def test_interrupted_set_of_other_settings_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = recipe_file(tmp_path, write_texts(tmp_path / "text"))

    def fail(*_: object) -> None:
        raise UserError("stopped")

    monkeypatch.setattr(data_prep.pipeline, "_finish", fail)
    with pytest.raises(UserError, match="stopped"):
        build(recipe)
    monkeypatch.undo()
    with pytest.raises(UserError, match="seed: 7 there, 8 now"):
        build(recipe, "seed=8")
    build(recipe)


@pytest.mark.parametrize("leave_half", [False, True])
def test_stopped_at_every_single_publication(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small_units: None, leave_half: bool
) -> None:
    """Stopped before each file in turn appears (with half of it left behind, as kill -9 does)."""
    text = write_texts(tmp_path / "text", files=6)
    recipe = recipe_file(tmp_path, text)
    expected = tree(build(recipe, f"work_dir={tmp_path}/whole"))
    publish = data_prep.shard_writer.publish
    count = 0

    def stop_at(limit: int) -> None:
        nonlocal count
        count = 0

        def limited(path: Path, write: object) -> None:
            nonlocal count
            count += 1
            if count == limit:
                if leave_half:
                    path.with_name(f".{path.name}.host.1.tmp").write_bytes(b"half")
                raise KeyboardInterrupt
            publish(path, write)  # type: ignore[arg-type]

        monkeypatch.setattr(data_prep.arrays, "publish", limited)
        monkeypatch.setattr(data_prep.shard_writer, "publish", limited)

    limit, finished = 0, False
    while not finished:
        limit += 1
        stop_at(limit)
        work = f"work_dir={tmp_path}/{limit}"
        try:
            build(recipe, work)
            finished = True  # fewer publications than `limit`
        except KeyboardInterrupt:
            stop_at(1 << 30)
            assert tree(build(recipe, work)) == expected
    assert limit > 20 and tree(tmp_path / str(limit) / "shards") == expected


def test_finished_work_is_not_done_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small_units: None
) -> None:
    """After a stop before the end, the tokenised documents, rows and parts keep their times."""
    recipe = recipe_file(tmp_path, write_texts(tmp_path / "text"))

    def fail(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(data_prep.pipeline, "_finish", fail)
    times = []
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            build(recipe)
        files = [
            p for p in (tmp_path / "run" / "shards").rglob("*") if p.suffix in (".arrays", ".arrow")
        ]
        times.append({p: p.stat().st_mtime_ns for p in files})
    assert times[0] == times[1] and len(times[0]) > 8


def test_damaged_intermediate_files_are_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small_units: None
) -> None:
    recipe = recipe_file(tmp_path, write_texts(tmp_path / "text"))
    expected = tree(build(recipe, f"work_dir={tmp_path}/whole"))
    finish = data_prep.pipeline._finish

    def fail(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(data_prep.pipeline, "_finish", fail)
    with pytest.raises(KeyboardInterrupt):
        build(recipe)
    monkeypatch.setattr(data_prep.pipeline, "_finish", finish)
    for path in (tmp_path / "run" / "shards").rglob("*.arr*"):
        data = bytearray(path.read_bytes())
        data[-3] ^= 1  # a flipped bit in every one
        path.write_bytes(data)
    assert tree(build(recipe)) == expected


@pytest.mark.parametrize(
    "lost",
    ["part-00000.arrow", "lengths.u16", "index.json", "held-out", "README.md", "tokenizer.json"],
)
def test_what_is_missing_is_made_again(tmp_path: Path, lost: str) -> None:
    recipe = recipe_file(tmp_path, write_texts(tmp_path / "text"))
    folder = build(recipe) / "len64"
    before = tree(folder)
    if lost == "held-out":
        shutil.rmtree(folder / lost)
    else:
        (folder / lost).unlink()
        if lost != "index.json":
            with pytest.raises(UserError, match=f"{lost} is missing") as caught:
                open_shards(folder)
            assert caught.value.remedy == REMAKE
    build(recipe)
    assert tree(folder) == before


def test_a_second_build_at_the_same_time_is_refused(tmp_path: Path) -> None:
    recipe = recipe_file(tmp_path, write_texts(tmp_path / "text"))
    shards = tmp_path / "run" / "shards"
    held = lock_folder(shards, "build")
    with pytest.raises(UserError, match="another build is running"):
        build(recipe)
    held.close()
    build(recipe)


def test_keys_that_came_later_are_no_difference(tmp_path: Path) -> None:
    """The rows of a set of before are those of their defaults."""
    recipe = recipe_file(tmp_path, write_texts(tmp_path / "text"))
    index = read_index(build(recipe) / "len64")
    now = json.loads(json.dumps(index["settings"]))
    for key in ("single_prob", "pair_max_length"):
        del index["settings"]["shards"][key]
    shards = load_recipe(recipe, []).shards["len64"]
    assert set_changes(index, now, shards) == []
    now["shards"]["pair_max_length"] = 32
    assert set_changes(index, now, shards) == ["shards.pair_max_length: 0 there, 32 now"]


def test_difference_names_every_leaf() -> None:
    assert difference({"a": {"b": 1, "c": 2}, "d": 3}, {"a": {"b": 1, "c": 5}, "e": 4}) == [
        "a.c: 2 there, 5 now",
        "d: 3 there, nothing now",
        "e: nothing there, 4 now",
    ]
    assert difference(
        {"a": [{"b": 1}, {"b": 2}], "c": [1]}, {"a": [{"b": 1}, {"b": 3}], "c": [2]}
    ) == [
        "a.1.b: 2 there, 3 now",
        "c: [1] there, [2] now",
    ]
