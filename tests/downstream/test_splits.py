"""Folders as releases really are, named files and hub sets: which of them a task takes."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from configs import UserError
from pretrain.downstream import splits
from pretrain.downstream.splits import read_splits
from pretrain.downstream.tasks import TASKS, find_task
from tests.downstream.test_readers import squad_json


def test_a_hub_set_without_a_dev_split_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the training that its scores were to choose from."""
    import datasets

    table = datasets.Dataset.from_list([{"text": "a", "label": 0}])
    monkeypatch.setattr(datasets, "load_dataset", lambda *_: {"train": table, "test": table})
    with pytest.raises(UserError, match=r"some/set: no dev split .*; it has train, test"):
        read_splits(TASKS["classify"], "some/set", {}, False)


def test_polarity_splits_hold_every_snippet_once(real_data: Path) -> None:
    splits = read_splits(TASKS["rt-polarity"], str(real_data / "downstream/rt-polarity"), {}, False)
    assert len(splits["train"]) + len(splits["dev"]) == 10662
    assert sum(row["label"] == "pos" for row in splits["dev"]) == len(splits["dev"]) / 2


def test_named_files_win_over_a_folder_of_rt_polarity(tmp_path: Path) -> None:
    (tmp_path / "rt.neg").write_text("bad\n")
    (tmp_path / "rt.pos").write_text("good\n")
    (tmp_path / "own.csv").write_text("text,label\nfine,pos\n")
    files = dict.fromkeys(("train", "dev"), str(tmp_path / "own.csv"))
    splits = read_splits(TASKS["rt-polarity"], str(tmp_path), files, False)
    assert splits["dev"] == [{"text": "fine", "label": "pos"}]


def test_missing_folders_files_and_tasks_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such folder"):
        read_splits(TASKS["rte"], str(tmp_path / "nowhere"), {}, False)
    with pytest.raises(UserError, match=r"no train file \(train\.\*\)"):
        read_splits(TASKS["rte"], str(tmp_path), {}, False)
    (tmp_path / "own.csv").write_text("text,label\nfine,pos\n")
    with pytest.raises(UserError, match=r"own\.csv: a file, not a folder"):
        read_splits(TASKS["classify"], str(tmp_path / "own.csv"), {}, False)
    with pytest.raises(UserError, match="did you mean sst-2"):
        find_task("sst-3")


@pytest.mark.parametrize(
    ("task", "names", "row"),
    [
        ("swag", "train.csv val.csv test.csv", "sent1,sent2\na,b\n"),  # of rowanz/swagaf
        ("ner", "eng.train eng.testa eng.testb", "EU B-ORG\n"),  # of the shared task
        ("ner", "train.txt valid.txt test.txt", "EU B-ORG\n"),
        ("mnli", "train.tsv dev_matched.tsv dev_mismatched.tsv test_matched.tsv test_mismatched.tsv",
         "sentence1\tsentence2\tgold_label\na\tb\tneutral\n"),
    ],
)  # fmt: skip
def test_folders_as_released_are_read_dev_before_test(
    tmp_path: Path, task: str, names: str, row: str
) -> None:
    for name in names.split():
        (tmp_path / name).write_text(row)
    splits = read_splits(TASKS[task], str(tmp_path), {}, False)
    again = read_splits(
        TASKS[task], str(tmp_path), {"test": str(tmp_path / names.split()[-1])}, False
    )
    assert list(splits) == list(again) and len(splits) == len(names.split())
    assert list(splits)[:2] == ["train", "dev"]


def test_hub_rows_take_the_shape_of_file_rows() -> None:
    from datasets import ClassLabel, Dataset, Features, Sequence, Value

    names = ClassLabel(names=["O", "B-PER"])
    features = Features({"tokens": Sequence(Value("string")), "ner_tags": Sequence(names)})
    table = Dataset.from_dict({"tokens": [["Al", "sat"]], "ner_tags": [[1, 0]]}, features)
    assert splits._plain(table[0], table.features)["ner_tags"] == ["B-PER", "O"]
    answers = {"text": ["x"], "answer_start": [3]}
    row = {"id": "1", "context": "abcx", "question": "?", "answers": answers, "title": "t"}
    assert splits._plain(row, Features({}))["answers"] == [("x", 3)]


@pytest.mark.parametrize("zipped", [False, True])
@pytest.mark.parametrize(("task", "version"), [("squad", "1.1"), ("squad-2", "2.0")])
def test_of_a_folder_with_both_versions_of_squad_each_task_takes_its_own(
    tmp_path: Path, task: str, version: str, zipped: bool
) -> None:
    for split in ("train", "dev"):
        for each in ("1.1", "2.0"):
            text = squad_json("the cat sat", "cat", 4).replace("q1", f"{split}-{each}").encode()
            name = f"{split}-v{each}.json" + (".gz" if zipped else "")
            (tmp_path / name).write_bytes(gzip.compress(text) if zipped else text)
    found = read_splits(TASKS[task], str(tmp_path), {}, False)
    assert {split: rows[0]["id"] for split, rows in found.items()} == {
        "train": f"train-{version}",
        "dev": f"dev-{version}",
    }
    for file in tmp_path.glob(f"dev-v{version}*"):
        file.unlink()
    with pytest.raises(UserError, match=f"dev-v.*: not of the version that {task} takes") as error:
        read_splits(TASKS[task], str(tmp_path), {}, False)
    assert "--dev FILE" in error.value.remedy
    other = next(tmp_path.glob("dev-v*"))
    assert read_splits(TASKS[task], str(tmp_path), {"dev": str(other)}, False)["dev"]
