from __future__ import annotations

import os
from pathlib import Path

import pytest

from configs import UserError
from configs.files import lock_folder, make_folder, named, publish, publish_text, read_json


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


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"null", b"\0\0", b'{"a": "\xff"}'])
def test_a_damaged_note_is_named(content, tmp_path):
    (tmp_path / "note.json").write_bytes(content)
    with pytest.raises(UserError, match="note.json is damaged") as caught:
        read_json(tmp_path / "note.json", "make it anew")
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


def test_paths_get_a_name(tmp_path, monkeypatch):
    (tmp_path / "in").mkdir()
    monkeypatch.chdir(tmp_path / "in")
    assert named("x/y") == Path("x/y")
    assert named(".") == tmp_path / "in"
    assert named("..") == tmp_path
