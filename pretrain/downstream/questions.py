"""Extractive question answering: windows over long contexts, best spans, the null answer of 2.0."""

from __future__ import annotations

from typing import Any

import numpy as np

from configs import UserError, say
from pretrain.downstream import metrics
from pretrain.downstream.kinds import LABELLED, Feature, Kind, Row

N_BEST, MAX_ANSWER = 20, 30  # of google-research/bert's run_squad.py


class Question(Kind):
    """SQuAD: the answer is a span of the context, or [CLS] where there is none.

    null_threshold is chosen on dev; the answers of any other split are taken by it.
    """

    null_threshold = float("inf")

    def learn_labels(self, rows: list[Row], origin: str) -> None:
        self.labels = []

    def model_settings(self) -> dict[str, Any]:
        return {}

    def auto_class(self) -> Any:
        from transformers import AutoModelForQuestionAnswering

        return AutoModelForQuestionAnswering

    def encode(self, rows: list[Row], split: str) -> list[Feature]:
        """One feature a window; training keeps the windows' own label, [CLS] where none fits."""
        if split in LABELLED and (unanswered := self._unlabelled(rows)):
            raise UserError(
                f"{self.task.name} {split}: {len(unanswered)} questions have no answer, first"
                f" {unanswered[0]}",
                'mark them with "is_impossible": true'
                if self.task.name == "squad-2"
                else "the task with unanswerable questions is squad-2",
            )
        # A question cannot fill the window: it is cut at 64 pieces, as run_squad.py does.
        most = min(64, self.settings.max_length // 2)
        questions = [self._cut(row["question"], most) for row in rows]
        lengths = self.tokenizer(questions, add_special_tokens=False, return_length=True)["length"]
        features: list[Feature] = []
        for length in sorted(set(lengths)):
            members = [number for number, pieces in enumerate(lengths) if pieces == length]
            features += self._windows(rows, questions, members, length)
        features.sort(key=lambda feature: feature["example"])
        if split == "train":
            self._label(features, rows)
        return features

    def _windows(
        self, rows: list[Row], questions: list[str], members: list[int], length: int
    ) -> list[Feature]:
        """The windows of those rows whose question has `length` pieces."""
        room = self.settings.max_length - length - 3
        encoded = self.tokenizer(
            [questions[number] for number in members],
            [rows[number]["context"] for number in members],
            truncation="only_second",
            max_length=self.settings.max_length,
            # transformers' stride is the overlap of two windows, run_squad's doc_stride the advance.
            stride=max(0, min(room - 1, room - self.settings.doc_stride)),
            return_overflowing_tokens=True,
            return_offsets_mapping=True,
        )
        features = []
        for number, member in enumerate(encoded["overflow_to_sample_mapping"]):
            offsets = encoded["offset_mapping"][number]
            sequence = encoded.sequence_ids(number)
            feature: Feature = {
                key: encoded[key][number]
                for key in self.tokenizer.model_input_names
                if key in encoded
            }
            feature["example"] = members[member]
            feature["offsets"] = [o if s == 1 else None for o, s in zip(offsets, sequence)]
            features.append(feature)
        return features

    def _label(self, features: list[Feature], rows: list[Row]) -> None:
        covered = set()
        for feature in features:
            span = _locate(feature["offsets"], rows[feature["example"]]["answers"])
            feature["start_positions"], feature["end_positions"] = span or (0, 0)
            if span:
                covered.add(feature["example"])
        if lost := sum(bool(row["answers"]) for row in rows) - len(covered):
            say(
                f"{self.task.name}: {lost} answers are in no window whole; those windows learn 'no answer'"
            )

    def _unlabelled(self, rows: list[Row]) -> list[str]:
        """Ids of the questions of which nobody says what the answer is."""
        unknown: tuple[Any, ...] = (None,) if self.task.name == "squad-2" else (None, [])
        return [row["id"] for row in rows if row["answers"] in unknown]

    def score(
        self, rows: list[Row], features: list[Feature], logits: Any, split: str = "dev"
    ) -> tuple[dict[str, float], list[Any]]:
        best: list[tuple[float, str]] = [(-np.inf, "")] * len(rows)
        null = np.full(len(rows), np.inf)
        for feature, start, end in zip(features, *logits):
            example = feature["example"]
            null[example] = min(null[example], float(start[0] + end[0]))
            found = best_span(feature["offsets"], np.asarray(start), np.asarray(end))
            if found and found[0] > best[example][0]:
                score, first, last = found
                best[example] = (score, rows[example]["context"][first:last])
        answers = [text.strip() for _, text in best]  # a piece may begin with the blank before it
        gaps = (
            [float(n - s) for n, (s, _) in zip(null, best)] if self.task.name == "squad-2" else None
        )
        chosen = None if split == "dev" else self.null_threshold
        result: dict[str, float] = {}
        if not self._unlabelled(rows):
            result, self.null_threshold = metrics.squad(rows, answers, gaps, chosen)
        if gaps is not None:
            if split == "dev":
                result["null_threshold"] = self.null_threshold
            answers = [a if g <= self.null_threshold else "" for a, g in zip(answers, gaps)]
        predictions = [{"id": row["id"], "answer": text} for row, text in zip(rows, answers)]
        return result, predictions

    def _cut(self, question: str, most: int) -> str:
        encoded = self.tokenizer(question, add_special_tokens=False, return_offsets_mapping=True)
        offsets = encoded["offset_mapping"]
        return question if len(offsets) <= most else question[: offsets[most - 1][1]]


def best_span(
    offsets: list[tuple[int, int] | None], start: np.ndarray, end: np.ndarray
) -> tuple[float, int, int] | None:
    """(score, first character, last character + 1) of the likeliest span of at most MAX_ANSWER pieces."""
    inside = np.array([o is not None for o in offsets])
    length = len(offsets)
    starts = [i for i in np.argsort(-start[:length])[: N_BEST * 2] if inside[i]][:N_BEST]
    ends = [i for i in np.argsort(-end[:length])[: N_BEST * 2] if inside[i]][:N_BEST]
    spans = [
        (float(start[a] + end[b]), int(a), int(b))
        for a in starts
        for b in ends
        if a <= b < a + MAX_ANSWER
    ]
    if not spans:
        return None
    score, a, b = max(spans)
    first, last = offsets[a], offsets[b]
    assert first is not None and last is not None
    return score, first[0], last[1]


def _locate(
    offsets: list[tuple[int, int] | None], answers: list[tuple[str, int]]
) -> tuple[int, int] | None:
    """Positions of the first and last piece of the answer, None when the window lacks a part."""
    if not answers:
        return None
    text, begin = answers[0]
    stop = begin + len(text.rstrip())
    begin += len(text) - len(text.lstrip())  # blanks have no pieces
    first = next((i for i, o in enumerate(offsets) if o and o[0] <= begin < o[1]), None)
    last = next((i for i, o in enumerate(offsets) if o and o[0] < stop <= o[1]), None)
    return None if first is None or last is None else (first, last)
