"""The folder of a grid: whose results it holds, one grid at a time, and which model best/ is."""

from __future__ import annotations

import importlib
import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from configs import UserError
from configs.files import lock_folder
from pretrain.convert.importing import import_model
from pretrain.downstream.finetune import main
from pretrain.downstream.grid import run_grid
from pretrain.downstream.tasks import TASKS
from tests.downstream.test_grid import QUICK, films
from tests.downstream.test_loading import copy_with


def test_results_of_other_data_or_weights_are_not_mixed(tmp_path: Path, tiny_model: Path) -> None:
    out, tiny_model = tmp_path / "out", Path(shutil.copytree(tiny_model, tmp_path / "model"))
    run_grid(TASKS["classify"], QUICK, films(8), str(tiny_model), out, save_best=False)
    assert not (out / "best").exists()
    before = {f: f.read_bytes() for f in out.rglob("*.json")}
    for change in (
        {"splits": films(10)},
        {"settings": replace(QUICK, epochs=2)},
        {"settings": replace(QUICK, dropout=0.1)},
        {"model": f"random:{tiny_model}"},
        {"task": replace(TASKS["classify"], label=("stars",))},
        {"task": replace(TASKS["classify"], first=("title",))},
    ):
        given = {"task": TASKS["classify"], "settings": QUICK, "splits": films(8), **change}
        with pytest.raises(UserError, match="holds results with another"):
            run_grid(out=out, **{"model": str(tiny_model), **given})
    file = tiny_model / "tokenizer.json"
    file.write_text((own := file.read_text()).replace("true", "false"))  # of casing
    with pytest.raises(UserError, match="holds results with another tokenizer"):
        run_grid(TASKS["classify"], QUICK, films(8), str(tiny_model), out, save_best=False)
    file.write_text(own)
    assert {f: f.read_bytes() for f in out.rglob("*.json")} == before
    result = next(out.glob("runs/*/result.json"))
    for key in ("lr", "seconds", "accuracy", "diverged"):
        result.write_text(json.dumps({**json.loads(before[result]), key: "high"}))
        with pytest.raises(UserError, match=f"{result} is damaged: {key} is missing or not"):
            run_grid(TASKS["classify"], QUICK, films(8), str(tiny_model), out, save_best=False)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/notes.txt").write_text("keep")
    with pytest.raises(UserError, match="no fine-tuning folder"):
        run_grid(TASKS["classify"], QUICK, films(8), str(tiny_model), tmp_path / "mine")
    assert [f.name for f in (tmp_path / "mine").iterdir()] == ["notes.txt"]
    busy = pytest.raises(UserError, match="another fine-tuning is running")
    with lock_folder(tmp_path / "busy", "fine-tuning"), busy:
        run_grid(TASKS["classify"], QUICK, films(8), str(tiny_model), tmp_path / "busy")


def command_for(tmp_path: Path, tiny_model: Path) -> list[str]:
    """Fine-tunes a run, whose export goes beside the results."""
    run = import_model(tiny_model, tmp_path / "run")
    file = str(tmp_path / "t.jsonl")
    Path(file).write_text("\n".join(map(json.dumps, films(8)["train"])))
    command = ["classify", "--model", str(run), "--out", str(tmp_path / "out"), "--train", file]
    return [*command, "--dev", file, "--lr", "1e-3", "--epochs", "1", "--no-model"]


def test_a_running_grid_keeps_the_model_it_loads(tmp_path: Path, tiny_model: Path) -> None:
    """A second command for the same place would export a later checkpoint over it before it is
    refused, whether for the first one at work or for the results that it has left."""
    command = command_for(tmp_path, tiny_model)
    assert main(command) == 0
    exported = (tmp_path / "out-model/lambert.json").stat().st_ino
    busy = pytest.raises(UserError, match="another fine-tuning is running")
    with lock_folder(tmp_path / "out", "fine-tuning"), busy:
        main(command)
    later = copy_with(tiny_model, tmp_path / "later", lambda t: {k: 2 * v for k, v in t.items()})
    other = import_model(later, tmp_path / "other")
    for change in ("--epochs=2", f"--model={other}", f"--model=random:{tmp_path / 'run'}"):
        with pytest.raises(UserError, match="holds results with another"):
            main([*command, change])
    assert (tmp_path / "out-model/lambert.json").stat().st_ino == exported
    assert not list(tmp_path.glob(".out-model*"))


def test_nothing_is_exported_beside_a_folder_of_other_things(
    tmp_path: Path, tiny_model: Path
) -> None:
    command = command_for(tmp_path, tiny_model)
    (tmp_path / "out").mkdir()
    (tmp_path / "out/notes.txt").write_text("keep")
    with pytest.raises(UserError, match="no fine-tuning folder"):
        main(command)
    assert not list(tmp_path.glob("*out-model*"))
    (tmp_path / "out").rename(tmp_path / "out-model")
    with pytest.raises(UserError, match="out-model: exists and is no earlier export") as refused:
        main(command)
    assert refused.value.remedy == "name another --out (the run is exported to OUT-model)"


@pytest.mark.parametrize(
    ("moment", "refusal"),
    [
        ("pretrain.convert.self_check.self_check", "another making of out-model is running"),
        ("pretrain.downstream.grid.load_tokenizer", "another fine-tuning is running"),
    ],
)
def test_of_two_fine_tunings_started_at_once_the_second_is_refused(
    moment, refusal, tmp_path: Path, tiny_model: Path, monkeypatch
) -> None:
    """While the first exports, and between its export and its training."""
    command, first = command_for(tmp_path, tiny_model), []
    module, _, name = moment.rpartition(".")
    real = getattr(importlib.import_module(module), name)

    def then_the_second(*args):
        if not first:
            first.append(command)
            with pytest.raises(UserError, match=refusal):
                main(command)
        return real(*args)

    monkeypatch.setattr(moment, then_the_second)
    assert main(command) == 0
    assert first and (tmp_path / "out/results.json").is_file()


def test_a_later_part_of_a_grid_replaces_the_best_model_only_by_a_better_one(
    tmp_path: Path, tiny_model: Path
) -> None:
    out = tmp_path / "out"

    def grid(lr: float) -> float:
        settings = replace(QUICK, lrs=(lr,), epochs=12)
        run_grid(TASKS["classify"], settings, films(), str(tiny_model), out)
        return accuracy(out, lr)

    weights = out / "best/model.safetensors"
    assert grid(1e-9) < 100
    poor = weights.read_bytes()
    assert grid(1e-2) == 100
    good = weights.read_bytes()
    assert grid(1e-8) < 100 and weights.read_bytes() == good != poor


def accuracy(out: Path, lr: float) -> float:
    return json.loads((out / f"runs/lr{lr:g}-seed1/result.json").read_text())["accuracy"]


def scored(model: Path, rows: list[dict]) -> float:
    """Percent of the rows that a kept model labels rightly."""
    from transformers import pipeline

    label = pipeline("text-classification", str(model))
    return 100 * sum(label(row["text"])[0]["label"] == row["label"] for row in rows) / len(rows)


GOOD, POOR = 1e-2, 1e-9


@pytest.mark.parametrize(
    "commands",
    [
        [((GOOD,), False), ((POOR,), True), ((GOOD, POOR), True)],
        [((GOOD,), False), ((POOR,), True)],
        [((POOR,), True), ((GOOD,), False), ((POOR,), True)],
        [((GOOD, POOR), False), ((GOOD, POOR), True)],
        [((POOR,), True), ((GOOD,), True)],
    ],
)
def test_best_holds_the_best_model_whatever_the_commands_before_kept(
    tmp_path: Path, tiny_model: Path, commands: list, capsys
) -> None:
    out = tmp_path / "out"
    for lrs, save in commands:
        settings = replace(QUICK, lrs=lrs, epochs=12)
        table = run_grid(TASKS["classify"], settings, films(), str(tiny_model), out, "", save)
    assert accuracy(out, GOOD) == 100 > accuracy(out, POOR)
    assert scored(out / "best", films()["dev"]) == 100
    said = capsys.readouterr().out
    assert f"{out / 'best'}: the model of classify lr 0.01 seed 1, the best on dev" in said
    # The table is of all results, asked for this time or not.
    assert [row["lr"] for row in table["rows"]] == [GOOD, POOR] and table["best"]["lr"] == GOOD
    assert json.loads((out / "results.json").read_text()) == table
    assert len((out / "table.md").read_text().splitlines()) == 4


def test_a_worse_model_in_best_is_not_called_the_best(
    tmp_path: Path, tiny_model: Path, capsys
) -> None:
    out = tmp_path / "out"
    for lr, save in ((POOR, True), (GOOD, False)):
        settings = replace(QUICK, lrs=(lr,), epochs=12)
        run_grid(TASKS["classify"], settings, films(), str(tiny_model), out, "", save)
    last = capsys.readouterr().out.splitlines()[-1]
    assert (
        last
        == f"{out / 'best'}: the model of classify lr 1e-09 seed 1, not the best, which was not kept"
    )


def test_a_grid_that_was_cut_before_its_first_result_holds_none(
    tmp_path: Path, tiny_model: Path
) -> None:
    """Another one may follow in its place, and nothing of the first is left."""
    out, given = tmp_path / "out", (films(8), str(tiny_model), tmp_path / "out")
    run_grid(TASKS["classify"], QUICK, *given, save_best=False)
    other = replace(QUICK, epochs=2, lrs=(1e-4,))
    with pytest.raises(UserError, match="holds results with another epochs"):
        run_grid(TASKS["classify"], other, *given)
    (out / "runs/lr0.001-seed1/result.json").unlink()  # its predictions are there before it
    for file in ("results.json", "table.md"):
        (out / file).unlink()
    run_grid(TASKS["classify"], other, *given)
    assert [folder.name for folder in (out / "runs").iterdir()] == ["lr0.0001-seed1"]
    assert json.loads((out / "grid.json").read_text())["epochs"] == 2


def test_damaged_weights_do_not_block_the_folder(tmp_path: Path, tiny_model: Path) -> None:
    cut = Path(shutil.copytree(tiny_model, tmp_path / "cut"))
    (cut / "model.safetensors").write_bytes(b"")
    with pytest.raises(UserError, match=r"model\.safetensors: damaged"):
        run_grid(TASKS["classify"], QUICK, films(8), str(cut), tmp_path / "out")
    run_grid(TASKS["classify"], QUICK, films(8), str(tiny_model), tmp_path / "out")


def test_one_model_under_any_spelling_of_its_path(
    tmp_path: Path, tiny_model: Path, monkeypatch
) -> None:
    """Relative, with a slash at the end, through a link, copied: its files decide."""
    model, out = Path(shutil.copytree(tiny_model, tmp_path / "model")), tmp_path / "out"
    (tmp_path / "link").symlink_to(model)
    shutil.copytree(model, tmp_path / "copy")
    run_grid(TASKS["classify"], QUICK, films(8), str(model), out, save_best=False)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("pretrain.downstream.grid.train_one", None)
    for name in ("model", "./model", f"{model}/", "link", "copy"):
        run_grid(TASKS["classify"], QUICK, films(8), name, out, save_best=False)
    (model / "model.safetensors").open("ab").write(b" ")
    with pytest.raises(UserError, match="another weights .* of copy, now .* of model"):
        run_grid(TASKS["classify"], QUICK, films(8), "model", out, save_best=False)


def test_a_file_in_the_place_of_the_results(tmp_path: Path, tiny_model: Path) -> None:
    (tmp_path / "out").touch()
    for place in ("out", "out/below"):
        with pytest.raises(UserError) as error:
            run_grid(TASKS["classify"], QUICK, films(8), str(tiny_model), tmp_path / place)
        assert "another --out" in error.value.remedy and "work_dir" not in str(error.value)
