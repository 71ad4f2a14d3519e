"""Windows, offsets and spans: logits of an oracle must give back every answer."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from configs import UserError
from pretrain.downstream.questions import Question, best_span
from pretrain.downstream.readers import read_squad
from pretrain.downstream.tasks import TASKS


def oracle(features) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Logits that are 9 at the labelled places and 0 elsewhere."""
    both: tuple[list[np.ndarray], list[np.ndarray]] = ([], [])
    for feature in features:
        for logits, name in zip(both, ("start_positions", "end_positions")):
            scores = np.zeros(len(feature["input_ids"]))
            scores[feature[name]] = 9
            logits.append(scores)
    return both


def encode(tokenizer, rows, task="squad", **settings):
    kind = Question(TASKS[task], replace(TASKS[task].settings, **settings), tokenizer)
    return kind, kind.encode(rows, "train")


def test_every_answer_of_xquad_comes_back_through_windows(real_data: Path) -> None:
    """240 paragraphs cut into overlapping windows of 96 pieces, real vocabulary."""
    import tempfile

    from pretrain.convert.vocabulary import write_folder

    with tempfile.TemporaryDirectory() as folder:
        write_folder(real_data / "vocab/bert-base-uncased/vocab.txt", Path(folder), None, 512)
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(folder)
    rows = read_squad(real_data / "downstream/xquad/xquad.en.json.gz")[::6]
    kind, features = encode(tokenizer, rows, max_length=96, doc_stride=24)
    assert len(features) > 2 * len(rows)
    assert max(len(f["input_ids"]) for f in features) <= 96
    for feature in features:
        if feature["start_positions"]:
            offsets, row = feature["offsets"], rows[feature["example"]]
            first, last = offsets[feature["start_positions"]], offsets[feature["end_positions"]]
            answer, start = row["answers"][0]
            # Whole word pieces: the span may be longer than the answer, never shorter.
            assert first[0] <= start and last[1] >= start + len(answer)
    scores, predictions = kind.score(rows, features, oracle(features))
    assert scores["f1"] > 97 and len(predictions) == len(rows)
    assert predictions[0]["id"] == rows[0]["id"]


def test_windows_of_any_question_advance_by_the_stride(tokenizer) -> None:
    """A longer question elsewhere in the file makes no window of this one jump further."""
    context = "the cat sat " * 40
    rows = [
        {"id": str(n), "context": context, "question": "who " * n, "answers": [("cat", 4)]}
        for n in (3, 1, 20, 8)
    ]
    _, features = encode(tokenizer, rows, max_length=64, doc_stride=16)
    assert [f["example"] for f in features] == sorted(f["example"] for f in features)
    for example in range(len(rows)):
        starts = [
            next(o for o in f["offsets"] if o)[0] for f in features if f["example"] == example
        ]
        words = [len(context[:start].split()) for start in starts]
        assert words[0] == 0 and set(np.diff(words)) == {16}


def test_no_answer_wins_where_its_score_says_so(tokenizer) -> None:
    rows = [
        {"id": "1", "context": "the cat sat", "question": "who sat", "answers": [("cat", 4)]},
        {"id": "2", "context": "the dog sat", "question": "where", "answers": []},
    ]
    kind, features = encode(tokenizer, rows, "squad-2")
    assert features[1]["start_positions"] == 0
    scores, predictions = kind.score(rows, features, oracle(features))
    assert scores["f1"] == scores["exact"] == 100
    assert [p["answer"] for p in predictions] == ["cat", ""]
    assert np.isfinite(scores["null_threshold"])


@pytest.mark.parametrize("withheld", [False, True])
@pytest.mark.parametrize("task", ["squad", "squad-2"])
def test_answers_of_test_are_taken_by_what_dev_chose(tokenizer, task: str, withheld: bool) -> None:
    """Test's own best threshold would be another one; without answers there is nothing to score."""
    row = {"id": "1", "context": "our cat sat", "question": "who sat", "answers": [("cat", 4)]}
    kind, features = encode(tokenizer, [row], task)
    sure = oracle(features)
    kind.score([row], features, sure)
    chosen = kind.null_threshold
    test = {**row, "answers": None if withheld else [("our", 0)]}
    unsure = [[0 * logits[0]] for logits in sure]
    for logits in unsure:
        logits[0][0] = 50  # "no answer" is likelier than dev has seen
    scores, predictions = kind.score([test], features, unsure, "test")
    assert kind.null_threshold == chosen
    assert (predictions[0]["answer"] == "") == (task == "squad-2")
    assert scores == ({} if withheld else {"f1": 0, "exact": 0})


@pytest.mark.parametrize("task", ["squad", "squad-2"])
@pytest.mark.parametrize("split", ["train", "dev"])
def test_questions_that_train_or_choose_have_answers(tokenizer, task: str, split: str) -> None:
    row = {"id": "q7", "context": "the cat sat", "question": "who sat", "answers": None}
    kind = Question(TASKS[task], TASKS[task].settings, tokenizer)
    with pytest.raises(UserError, match="1 questions have no answer, first q7"):
        kind.encode([row], split)
    assert kind.encode([row], "test")


def test_blanks_around_an_answer_do_not_hide_it(tokenizer) -> None:
    row = {"id": "1", "context": "the cat  sat", "question": "who", "answers": [(" cat  ", 3)]}
    _, (feature,) = encode(tokenizer, [row])
    spans = [feature["offsets"][feature[f"{end}_positions"]] for end in ("start", "end")]
    assert spans == [(4, 7), (4, 7)]


def test_answers_have_no_blank_of_the_piece_they_begin_with(tokenizer) -> None:
    """Pieces of SentencePiece and byte-level BPE start at the blank before a word."""
    row = {"id": "1", "context": "our cat sat", "question": "who", "answers": [("cat", 4)]}
    kind, (feature,) = encode(tokenizer, [row])
    feature["offsets"] = [o and (max(0, o[0] - 1), o[1]) for o in feature["offsets"]]
    _, predictions = kind.score([row], [feature], oracle([feature]))
    assert predictions == [{"id": "1", "answer": "cat"}]


def test_unanswerable_questions_are_no_task_of_squad_1(tokenizer) -> None:
    """They would count as wrong whatever the model says."""
    row = {"id": "7", "context": "the dog sat", "question": "where", "answers": []}
    kind = Question(TASKS["squad"], TASKS["squad"].settings, tokenizer)
    for split in ("train", "dev"):
        with pytest.raises(UserError, match=f"squad {split}: 1 questions have no answer, first 7"):
            kind.encode([row], split)
    assert kind.encode([row], "test")


@pytest.mark.parametrize("length", [8, 12, 62, 64, 70])
def test_a_question_longer_than_the_window_leaves_room_for_the_context(tokenizer, length) -> None:
    row = {"id": "1", "context": "the cat sat", "question": "who " * 200, "answers": [("cat", 4)]}
    _, features = encode(tokenizer, [row], max_length=length)
    assert any(feature["start_positions"] for feature in features)
    assert max(len(feature["input_ids"]) for feature in features) <= length


def test_best_span_stays_in_the_context_and_is_not_backward() -> None:
    offsets = [None, None, (0, 3), (4, 7), (8, 11)]
    start, end = np.array([9, 9, 1, 5, 0.0]), np.array([9, 9, 6, 1, 2.0])
    assert best_span(offsets, start, end) == (7.0, 0, 3) or best_span(offsets, start, end) == (
        7.0,
        4,
        11,
    )
    assert best_span([None, None], start[:2], end[:2]) is None
    far = [(i, i + 1) for i in range(60)]
    a, b = np.zeros(60), np.zeros(60)
    a[0] = b[59] = 50.0
    found = best_span(far, a, b)
    assert found is not None and found[2] - found[1] <= 30


def test_a_long_question_leaves_room_for_the_context(tokenizer) -> None:
    rows = [{"id": "1", "context": "dog " * 50, "question": "who " * 300, "answers": [("dog", 0)]}]
    _, features = encode(tokenizer, rows, max_length=100)
    assert all(len(f["input_ids"]) <= 100 for f in features)
    seen = {o for f in features for o in f["offsets"] if o}
    assert len(seen) == 50
