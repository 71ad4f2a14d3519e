from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from configs import UserError
from configs.files import lock_folder, make_folder, named, publish, publish_text, read_json
from tests.disk import disk_events


def test_a_file_is_whole_or_as_it_was(tmp_path):
    path = tmp_path / "f"
    publish_text(path, "é\r\nold\n")
    assert path.read_bytes() == "é\r\nold\n".encode()

    def fail(file):
        file.write(b"half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        publish(path, fail)
    assert path.read_bytes() == "é\r\nold\n".encode()
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b"null", b"\0\0", b'{"a": "\xff"}', b'{"a":' * 9**5]
)
def test_a_damaged_note_is_named(content, tmp_path):
    (tmp_path / "note.json").write_bytes(content)
    with pytest.raises(UserError, match="note.json is damaged") as caught:
        read_json(tmp_path / "note.json", "make it anew")
    assert caught.value.remedy == "make it anew"


SHAPE = {"run": str, "on": bool, "lr": int | float, "jobs": [{"id": int}], "model": {}}
GOOD = {"run": "r", "on": True, "lr": 1, "jobs": [{"id": 1}, {"id": 2}], "model": {"a": 1}}


@pytest.mark.parametrize(
    "key, change",
    [
        *((key, {key: None}) for key in SHAPE),
        ("run", {"run": 7}),
        ("on", {"on": 1}),
        ("lr", {"lr": True}),
        ("lr", {"lr": "1e-4"}),
        ("jobs", {"jobs": {"id": 1}}),
        ("jobs.1", {"jobs": [{"id": 1}, "2"]}),
        ("jobs.1.id", {"jobs": [{"id": 1}, {"name": "x"}]}),
        ("jobs.0.id", {"jobs": [{"id": False}]}),
        ("model", {"model": "bert"}),
    ],
)
def test_a_note_that_was_edited_names_the_key(key, change, tmp_path):
    path = tmp_path / "note.json"
    for content in (GOOD, GOOD | {"more": None}, GOOD | {"jobs": []}):
        path.write_text(json.dumps(content))
        assert read_json(path, "", SHAPE) == content
    changed = GOOD | change
    variants = [changed, {k: v for k, v in changed.items() if v is not None}]  # null, and missing
    for content in variants:
        path.write_text(json.dumps(content))
        with pytest.raises(UserError, match="note.json is damaged") as caught:
            read_json(path, "make it anew", SHAPE)
        assert f": {key} is missing or not " in caught.value.what
        assert caught.value.remedy == "make it anew"


def test_one_at_a_time_in_a_folder(tmp_path):
    with lock_folder(tmp_path / "a" / "b", "build"):
        with pytest.raises(UserError, match="another build is running"):
            lock_folder(tmp_path / "a" / "b", "build")
        lock_folder(tmp_path / "a", "build").close()
    lock_folder(tmp_path / "a" / "b", "build").close()


def test_a_folder_that_may_not_be_written(tmp_path, monkeypatch):
    assert make_folder(tmp_path / "a" / "b").is_dir()
    monkeypatch.setattr(os, "access", lambda *_: False)  # rights do not stop root
    with pytest.raises(UserError, match="may not be written"):
        make_folder(tmp_path)


@pytest.mark.parametrize("place", ["file", "file/below", "x" * 300, "loop/below"])
def test_the_way_out_is_of_the_command(tmp_path, place):
    """Not every command is told its place by the key of a recipe."""
    (tmp_path / "file").touch()
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for make in (make_folder, lambda folder, way: lock_folder(folder, "work", way)):
        with pytest.raises(UserError, match="cannot be made") as caught:
            make(tmp_path / place, "name another --out")
        assert caught.value.remedy.endswith("name another --out")
    with pytest.raises(UserError) as caught:
        make_folder(tmp_path / place)
    assert caught.value.remedy.endswith("work_dir=...")


def test_paths_get_a_name(tmp_path, monkeypatch):
    (tmp_path / "in").mkdir()
    monkeypatch.chdir(tmp_path / "in")
    assert named("x/y") == Path("x/y")
    assert named(".") == tmp_path / "in"
    assert named("..") == tmp_path


def test_bytes_are_on_the_disk_before_a_name_says_so(tmp_path, monkeypatch):
    """A machine that loses its power leaves a file whole or absent: its bytes go to the disk, then it
    gets its name, then the folder goes to the disk."""
    events = disk_events(monkeypatch)
    publish_text(tmp_path / "f", "text")
    (_, first), *rest = events
    assert events[0][0] == "sync" and first.startswith(f"{tmp_path}/.f.")
    assert rest == [("name", f"{tmp_path}/f"), ("sync", str(tmp_path))]
