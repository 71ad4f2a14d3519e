"""What a build refuses by name, and what it tells."""

from __future__ import annotations

import hashlib
import io
import re
import shutil
import tempfile
from contextlib import redirect_stdout
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from configs import UserError
from data_prep.shard_index import read_index
from tests.data_prep.corpus import (
    LETTERS,
    SPECIAL,
    WORDS,
    build,
    recipe_file,
    write_texts,
)
from tests.synthetic import open_checked


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([*SPECIAL[:4], *LETTERS, *WORDS], "MASK"),
        ([*SPECIAL, *LETTERS, "[SEP]", *WORDS], "SEP"),
    ],
)
def test_b07_a_bad_vocabulary_is_refused_by_name(
    tmp_path: Path, lines: list[str], message: str
) -> None:
    recipe = recipe_file(tmp_path, write_texts(tmp_path / "text"))
    (tmp_path / "vocab.txt").write_text("\n".join(lines) + "\n")
    with pytest.raises(UserError, match=message):
        build(recipe)
    assert not (tmp_path / "run" / "shards").exists()


@pytest.mark.parametrize(
    ("files", "length", "objective", "said"),
    [
        (1, 64, "nsp", r"B follows A in {0} of {0} pairs"),
        (1, 64, "full-sentences", ""),
        (20, 8, "nsp", r"B does not follow A in \d+ of {0} pairs"),
        (20, 64, "nsp", ""),
    ],
)
def test_rows_that_teach_one_answer_are_told_at_the_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], files: int, length: int, objective: str,
    said: str,
) -> None:  # fmt: skip
    body = f"shards: {{s: {{max_length: {length}, objective: {objective}}}}}\n"
    recipe = recipe_file(tmp_path, write_texts(tmp_path / "text", files, seed=3), body)
    rows = read_index(build(recipe, "prep.held_out=0") / "s")["rows"]
    lines = capsys.readouterr().out.splitlines()
    if not said:
        assert not [line for line in lines if line.startswith("note:")]
        return
    assert re.match(f"note: s: {said.format(rows)}, so that", lines[-2])
    assert ("max_length" in lines[-1]) == (length == 8) and "nsp_head=false" in lines[-1]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("prep.abbreviations=nowhere.txt", "nowhere.txt: no such file"),
        ("sources=[]", "no sources"),
    ],
)
def test_wrong_values_are_refused_by_name(tmp_path: Path, override: str, message: str) -> None:
    recipe = recipe_file(tmp_path, write_texts(tmp_path / "text", files=2))
    build(recipe)  # so that a vocabulary is there
    with pytest.raises(UserError, match=message):
        build(recipe, override)


def test_abbreviations_may_lie_in_the_home_folder(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "words.txt").write_text("ca.\n")
    recipe = recipe_file(tmp_path, write_texts(tmp_path / "text", files=2))
    recipe.write_text(recipe.read_text().replace(str(tmp_path), "~"))
    folder = build(recipe, "prep.abbreviations=~/words.txt")
    assert folder == tmp_path / "run" / "shards"
    given = read_index(folder / "len64")["settings"]["documents"]["abbreviations"]
    assert given == hashlib.sha256(b"ca.\n").hexdigest()


def test_disk_need_is_told_and_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = recipe_file(tmp_path, write_texts(tmp_path / "text"))
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=10_000))
    with pytest.raises(UserError, match="needs about .* MB, only 0.01 MB are free"):
        build(recipe)
    assert "disk: the build needs about" in capsys.readouterr().out


def test_what_a_killed_build_left_is_not_asked_for_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = recipe_file(tmp_path, write_texts(tmp_path / "text"))
    needs: list[int] = []
    monkeypatch.setattr("data_prep.pipeline.check_disk", lambda _, need, __: needs.append(need))

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("data_prep.pipeline._build_set", killed)
        build(recipe)
    left = sum(p.stat().st_size for p in (tmp_path / "run/shards").rglob("*") if p.is_file())
    open_checked(build(recipe) / "len64")
    assert left > 1000 and needs[0] - left <= needs[1] < needs[0]


def test_text_without_rows_is_an_error(tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.mkdir()
    (text / "a.txt").write_text("One.\n")
    with pytest.raises(UserError, match="not a single training row"):
        build(recipe_file(tmp_path, text), "prep.held_out=0")
    (text / "a.txt").write_text(" \n\n \n")
    with pytest.raises(UserError, match="no document with text"):
        build(recipe_file(tmp_path, text), f"work_dir={tmp_path}/b")


@pytest.mark.parametrize("single", ["0", "0.5"])
def test_text_that_is_held_out_as_a_whole_is_an_error(tmp_path: Path, single: str) -> None:
    recipe = recipe_file(tmp_path, write_texts(tmp_path / "text", files=1))
    with pytest.raises(UserError, match="prep.held_out=0.999 held out every document"):
        build(recipe, "prep.held_out=0.999", f"shards.len64.single_prob={single}")
    open_checked(build(recipe, "prep.held_out=0") / "len64")  # as the message advises


def test_unknown_words_are_counted(tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.mkdir()
    (text / "a.txt").write_text(
        "The 漢 stone fell. Then 漢 and 字 again. Stone and river met.\n" * 3
    )
    index = read_index(build(recipe_file(tmp_path, text), "prep.held_out=0") / "len64")
    assert index["sources"][0]["unknowns"] == {"漢": 6, "字": 3}
    assert index["sources"][0]["unknown_tokens"] == 9


@settings(max_examples=15, deadline=None)
@given(st.integers(1, 200), st.integers(0, 200))
def test_text_of_another_language_is_told(known: int, unknown: int) -> None:
    with tempfile.TemporaryDirectory() as folder, redirect_stdout(io.StringIO()) as said:
        text = Path(folder) / "text"
        text.mkdir()
        words = ["stone"] * known + ["камень"] * unknown
        (text / "a.txt").write_text(" ".join(words) + ".\n" + "River stone. " * 2)
        recipe = recipe_file(Path(folder), text, "shards: {s: {objective: single}}\n")
        build(recipe, "prep.held_out=0")
    share = 100 * (unknown / (known + unknown + 7))  # full stops count
    assert (f"; unknown tokens {share:.1f}%" in said.getvalue()) == (share > 1)
    note = f"note: s: the vocabulary does not know {share:.0f}% of the tokens of text (камень)"
    assert (note in said.getvalue()) == ("note:" in said.getvalue()) == (share > 10)
