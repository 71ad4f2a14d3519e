"""Rows and labels of a fine-tuning: what is taken as given, what is refused before the training."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from configs import UserError
from pretrain.downstream.grid import KINDS
from pretrain.downstream.tasks import TASKS, Settings

QUICK = Settings(lrs=(1e-3,), seeds=(1,), epochs=1, batch=8, max_length=16)


def test_labels_outside_the_set_are_named(tokenizer) -> None:
    def encode(task: str, rows: list[dict], labels: list[str] | None = None):
        kind = KINDS[TASKS[task].kind](TASKS[task], QUICK, tokenizer)
        kind.labels = labels or kind.labels
        return kind.encode(rows, "dev")

    with pytest.raises(
        UserError, match=r"sst-2 dev, example 2: label '2' is not in the set \{0, 1\}"
    ) as fixed:
        encode("sst-2", [{"sentence": "a", "label": "1"}, {"sentence": "b", "label": "2"}])
    assert fixed.value.remedy == "mend the row; task `classify` takes labels of your own"
    endings = {"sent1": "a", "label": 4, **{f"ending{i}": "c" for i in range(4)}}
    with pytest.raises(UserError, match="label 4 is not in the set") as fixed:
        encode("swag", [endings])
    assert fixed.value.remedy == "mend the row"
    with pytest.raises(UserError, match="label 'z' is not in the set") as own:
        encode("classify", [{"text": "a", "label": "z"}], ["x", "y"])
    assert "the training file if the class is new" in own.value.remedy
    with pytest.raises(UserError, match="sentence 1: tag 'B-X' is not in the set"):
        encode("ner", [{"tokens": ["a"], "tags": ["B-X"]}], ["O", "B-PER", "I-PER"])
    with pytest.raises(UserError) as error:
        many = [f"{i}{'x' * 200}" for i in range(5000)]
        encode("classify", [{"text": "a", "label": "y" * 9999}], many)
    assert "and 4980 more" in str(error.value) and len(str(error.value)) < 2000
    with pytest.raises(UserError, match="'high' is no number"):
        encode("sts-b", [{"sentence1": "a", "sentence2": "b", "score": "high"}])
    with pytest.raises(UserError, match="none of the columns sentence2"):
        encode("rte", [{"sentence1": "a", "label": "entailment"}])


def test_whole_numbers_are_names_where_the_training_file_defines_the_classes(tokenizer) -> None:
    """Stars of 1 to 12, -1 among them: no class is another's id, and predictions have their names."""
    stars = [-1, 1, 2, 5, 10, 12]
    rows = [{"text": "a", "label": star} for star in stars]
    kind = KINDS["classify"](TASKS["classify"], QUICK, tokenizer)
    kind.learn_labels(rows, "train")
    ids = [feature["labels"] for feature in kind.encode(rows, "train")]
    assert [kind.labels[i] for i in ids] == [str(star) for star in stars]
    scores, predicted = kind.score(rows, kind.encode(rows, "dev"), np.eye(len(stars))[ids])
    assert scores == {"accuracy": 100} and predicted == [str(star) for star in stars]
    # The hub's ids, where the task names the classes.
    rte = KINDS["classify"](TASKS["rte"], QUICK, tokenizer)
    row = {"sentence1": "a", "sentence2": "b", "label": 1}
    assert rte.labels[rte.encode([row], "dev")[0]["labels"]] == "not_entailment"


def test_the_classes_of_the_training_file_are_said_before_the_training(tokenizer, capsys) -> None:
    """How many of each, and whether the column looks like no label; a set that the task has is known."""

    def said(labels: list[str], task: str = "classify") -> str:
        kind = KINDS["classify"](TASKS[task], QUICK, tokenizer)
        kind.learn_labels([{"text": "a", "label": label} for label in labels], "classify train")
        return capsys.readouterr().out

    assert said(["n", "y", "y"]) == "classify train: 2 classes: y (2), n (1)\n"
    many = said([str(i) * 99 for i in range(5000)])
    assert "classify train: 5000 classes: " in many and "and 4980 more" in many
    assert "note: 5000 of them have one example" in many and len(many) < 2000
    assert said(["0", "1"], "sst-2") == ""


@pytest.mark.parametrize("split", ["train", "dev"])
@pytest.mark.parametrize(
    ("task", "row"),
    [
        ("classify", {"text": "a"}),
        ("sst-2", {"sentence": "a"}),
        ("sts-b", {"sentence1": "a", "sentence2": "b"}),
        ("swag", {"sent1": "a", "sent2": "b", **{f"ending{i}": "c" for i in range(4)}}),
    ],
)
def test_rows_that_choose_or_train_a_model_have_labels(tokenizer, task, row, split) -> None:
    """Before the training, not after it."""
    kind = KINDS[TASKS[task].kind](TASKS[task], QUICK, tokenizer)
    kind.labels = kind.labels or ["0", "1"]
    for absent in (row, *({**row, "label": none} for none in (None, "", -1))):
        rows = [{**row, "label": 1}, absent]
        with pytest.raises(UserError, match=f"{task} {split}, example 2 has no label"):
            kind.encode(rows, split)
        assert [f.get("labels") for f in kind.encode(rows, "test")] == [1, None]
    if task == "sts-b":
        for score in ("nan", float("inf"), [1]):
            with pytest.raises(UserError, match="is no number"):
                kind.encode([{**row, "label": score}], split)


def test_own_files_are_pairs_all_or_none(tokenizer) -> None:
    """A column that is misspelt or absent in one file does not turn pairs into single texts."""
    named = replace(TASKS["classify"], second=("premise",))
    rows = [{"text": "a", "text_pair": "b", "label": n} for n in (0, 1)]
    single = [{"text": "a", "label": n} for n in (0, 1)]
    with pytest.raises(UserError, match="none of the columns premise"):
        KINDS["classify"](named, QUICK, tokenizer).encode(rows, "test")
    for first, second in ((rows, single), (single, rows)):
        kind = KINDS["classify"](TASKS["classify"], QUICK, tokenizer)
        kind.learn_labels(first, "train")
        assert max(kind.encode(first, "train")[0]["token_type_ids"]) == (first is rows)
        with pytest.raises(UserError, match="classify dev: (has|lacks) a second text"):
            kind.encode(second, "dev")


@pytest.mark.parametrize("length", [16, 20, 21])
@pytest.mark.parametrize("task", ["classify", "ner", "swag", "squad"])
def test_padding_makes_no_row_longer_than_asked(tokenizer, task: str, length: int) -> None:
    """A model may have that many positions and no more."""
    kind = KINDS[TASKS[task].kind](TASKS[task], replace(QUICK, max_length=length), tokenizer)
    long = "the cat sat " * 20
    row = {"text": long, "label": "x", "tokens": long.split(), "tags": ["O"] * 60}
    row |= {"sent1": long, **{f"ending{i}": "a" for i in range(4)}}
    row |= {"id": "1", "question": "who", "context": long, "answers": [("the", 0)]}
    kind.labels = kind.labels or ["O", "x"]
    keys = ("input_ids", "attention_mask", "labels", "start_positions")
    rows = [{**row, "label": 0 if task == "swag" else "x"}]
    features = [{k: f[k] for k in keys if k in f} for f in kind.encode(rows, "train")]
    assert kind.collator()(features)["input_ids"].shape[-1] == length


def test_tags_of_no_entity_teach_nothing(tokenizer) -> None:
    kind = KINDS["tag"](TASKS["ner"], QUICK, tokenizer)
    with pytest.raises(UserError, match="ner train: no word has a tag but O"):
        kind.learn_labels([{"tokens": ["a", "b"], "tags": ["O", "O"]}], "ner train")


@pytest.mark.parametrize(
    ("task", "row"),
    [
        ("classify", {"text": ["a", "b"], "label": "x"}),
        ("classify", {"text": "a", "label": ["x"]}),
        ("classify", {"text": "a", "text_pair": {"b": 1}, "label": "x"}),
        ("swag", {"sent1": "a", "ending0": ["b"], "label": 0}),
        ("swag", {"sent1": "a", "sent2": ["b"], "label": 0}),
    ],
)
def test_lists_and_objects_are_no_text(tokenizer, task: str, row: dict) -> None:
    kind = KINDS[TASKS[task].kind](TASKS[task], QUICK, tokenizer)
    good = {"text": "a", "label": "y"} | {k: "b" for k in row if k == "text_pair"}
    with pytest.raises(UserError, match="is no text"):
        kind.learn_labels([row, good], "classify train")
        kind.encode([row], "train")


def test_null_is_no_text(tokenizer) -> None:
    kind = KINDS["classify"](TASKS["classify"], QUICK, tokenizer)
    kind.labels = ["0", "1"]
    good = {"text": "a", "label": 1}
    with pytest.raises(UserError, match="classify train, example 2: text is null"):
        kind.encode([good, {"text": None, "label": 1}], "train")
    with pytest.raises(UserError, match="classify train, example 1: none of the columns text_pair"):
        kind = KINDS["classify"](TASKS["classify"], QUICK, tokenizer)
        kind.encode([good, {"text": "a", "text_pair": "b", "label": 1}], "train")
