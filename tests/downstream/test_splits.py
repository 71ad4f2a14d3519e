"""Folders as releases really are, named files and hub sets: which of them a task takes."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
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
        ("swag", "train.csv val.csv test.csv", "sent1,sent2,label\na,b,0\n"),  # of rowanz/swagaf
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


CSV = "text,topic,label\na,x,1\nb,y,0\n"


@pytest.mark.parametrize(
    ("task", "columns", "content", "message", "remedy"),
    [
        ("classify", {"label": "stars"}, CSV, "example 1 has none of the columns stars", "--label"),
        ("classify", {"first": "body"}, CSV, "example 1 has none of the columns body", "--first"),
        ("classify", {"second": "body"}, CSV, "example 1 has none of the columns body", "--second"),
        ("classify", {}, '{"text": "a", "label": 1}\n{"text": "b", "topic": 1}\n', "example 2", "--label"),
        ("ner", {}, '{"tokens": ["a"], "topic": ["O"]}\n', "example 1 has none of", "--label"),
        ("sts-b", {}, '{"sentence1": "a", "sentence2": "b", "topic": 1}\n', "example 1", "--label"),
        ("classify", {"label": "text"}, CSV, "column 'text' is asked for twice", "--label"),
        ("classify", {"first": "label"}, CSV, "column 'label' is asked for twice", "--first"),
        ("classify", {"second": "text"}, CSV, "column 'text' is asked for twice", "--second"),
        ("ner", {"label": "tokens"}, '{"tokens": ["O"], "topic": 1}\n', "'tokens' is asked", "--label"),
    ],
)  # fmt: skip
def test_columns_that_are_absent_or_asked_for_twice_are_named(
    tmp_path: Path, task: str, columns: dict, content: str, message: str, remedy: str
) -> None:
    file = tmp_path / f"own.{'csv' if content is CSV else 'jsonl'}"
    file.write_text(content)
    asked = replace(TASKS[task], **{name: (column,) for name, column in columns.items()})
    with pytest.raises(UserError, match=message) as error:
        read_splits(asked, "", dict.fromkeys(("train", "dev"), str(file)), False)
    assert str(file) in error.value.what
    assert f"{remedy}-column" in error.value.remedy and "topic" in error.value.remedy


def test_endings_may_be_whole_sentences(tmp_path: Path) -> None:
    """SWAG's without sent2, which --second-column may not name."""
    row = {"sent1": "a", "label": 0, **{f"ending{i}": "c" for i in range(4)}}
    (tmp_path / "own.jsonl").write_text(json.dumps(row))
    files = dict.fromkeys(("train", "dev"), str(tmp_path / "own.jsonl"))
    assert read_splits(TASKS["swag"], "", files, False)["train"] == [row]


def test_rows_to_predict_need_no_label(tmp_path: Path) -> None:
    (tmp_path / "own.csv").write_text(CSV)
    (tmp_path / "new.csv").write_text("text\nc\n")
    files = dict.fromkeys(("train", "dev"), str(tmp_path / "own.csv"))
    files["test"] = str(tmp_path / "new.csv")
    assert read_splits(TASKS["classify"], "", files, False)["test"] == [{"text": "c"}]


@pytest.mark.parametrize(
    ("task", "data", "name"),
    [
        ("classify", False, "own.csv"),
        ("classify", False, "own.tsv"),  # quoted, as everyone's own are
        ("ner", False, "own.tsv"),
        ("squad", False, "own.json"),
        ("rt-polarity", True, "rt.pos"),
        ("rte", False, ""),  # of the hub
    ],
)
def test_skip_bad_rows_is_refused_where_no_file_takes_notice_of_it(
    tmp_path: Path, task: str, data: bool, name: str
) -> None:
    file = tmp_path / name
    if name:
        file.write_text(CSV)
    files = dict.fromkeys(("train", "dev"), str(file)) if name and not data else {}
    with pytest.raises(UserError, match="--skip-bad-rows on"):
        read_splits(TASKS[task], str(tmp_path) if data else "", files, True)
    glue = tmp_path / "good.tsv"
    glue.write_text("sentence1\tsentence2\tlabel\nonly this\na\tb\tentailment\n")
    mixed = {"train": str(glue), "dev": str(glue)}
    assert len(read_splits(TASKS["rte"], "", mixed, True)["train"]) == 1
