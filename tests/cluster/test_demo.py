"""`python -m cluster demo` in other folders than its own; `make demo` runs the whole of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from cluster.demo import Demo, main
from cluster.launch import main as launch
from configs import UserError, load_recipe


@pytest.mark.parametrize(
    ("overrides", "text"),
    [
        ([], "runs/demo/text"),
        (["name=other"], "runs/other/text"),
        (["work_dir=there"], "there/text"),
        (["work_dir=./there/"], "there/text"),
        (["work_dir=/a b/there"], "/a b/there/text"),
        (["work_dir=~/there"], "home/there/text"),
        (["sources=[{path: mine}]"], None),  # own text needs no sample
        (["sources=[{path: text-of-mine}]", "work_dir=."], None),
    ],
)
def test_the_sample_goes_where_the_sources_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overrides: list[str], text: str | None
) -> None:
    monkeypatch.setenv("HOME", "home")
    recipe = load_recipe("demo", overrides)
    assert Demo(recipe, "demo", overrides)._text_folder() == (text and Path(text))


def test_another_folder_is_filled_with_text_vocabulary_and_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, repo: Path
) -> None:
    """Stops where the training would start."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(repo))
    with pytest.raises(UserError, match=r"step 4 \(training"):
        main(["demo", "work_dir=there", "parallel.micro_batch_tokens=1", "prep.workers=1"])
    made = sorted(path.name for path in (tmp_path / "there").iterdir() if path.name[0] != ".")
    assert made[:3] == ["shards", "text", "vocab"] and not (tmp_path / "runs").exists()


def test_a_demo_that_could_not_tell_its_scores_does_not_start(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="prep.held_out=0: "):
        main(["demo", f"work_dir={tmp_path}/run", "prep.held_out=0"])
    assert not (tmp_path / "run").exists()


def test_a_starter_of_no_process_is_refused() -> None:
    with pytest.raises(UserError, match="--processes 0"):
        launch(["--starter", "torchrun", "--processes", "0", "--", "true"])
