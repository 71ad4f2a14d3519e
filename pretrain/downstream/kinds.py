"""Encoding and decoding of the task kinds: rows -> features for the Trainer, logits -> scores."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from configs import UserError, say
from pretrain.downstream import metrics
from pretrain.downstream.tasks import TASKS, Settings, Task

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

Row = dict[str, Any]
Feature = dict[str, Any]
LABELLED = ("train", "dev")  # a grid learns from the one and chooses by the other
_SHOWN = 20  # labels of a set, in a message


class Kind(ABC):
    """One kind of task. Subclasses fill in `encode`, `score`, `auto_class` and `collator`.

    `encode` gives features for the Trainer; `score` gives metrics (empty for unlabelled rows) and
    one JSON-able prediction a row. Dev is scored first: what is chosen there holds for the others.
    """

    blind: dict[str, int] = {}  # what a collator insists on where labels are withheld

    def __init__(self, task: Task, settings: Settings, tokenizer: PreTrainedTokenizerFast) -> None:
        self.task, self.settings, self.tokenizer = task, settings, tokenizer
        self.labels: list[str] = list(task.labels)
        # Eights suit GPUs, but may not make a row longer than asked: the model may end there.
        self.pad_to = None if settings.max_length % 8 else 8
        self.pairs: bool | None = None  # of own files: whether those seen so far have two texts

    def learn_labels(self, rows: list[Row], origin: str) -> None:
        """Takes the label set from the training rows where the task does not define it."""
        if self.labels:
            return
        counts = Counter(text(row, self.task.label, origin) for row in rows)
        self.labels = sorted(counts)
        if len(counts) < 2:
            raise UserError(
                f"{origin}: only the label {self.labels[0]!r}", "need two classes or more"
            )
        shown = ", ".join(f"{label[:40]} ({n})" for label, n in counts.most_common(_SHOWN))
        say(f"{origin}: {len(counts)} classes: {shown}{_more(len(counts) - _SHOWN)}")
        once = sum(n == 1 for n in counts.values())
        if 2 * once > len(counts):
            say(f"note: {once} of them have one example; is it the column of the label?")

    def model_settings(self) -> dict[str, Any]:
        """Settings for the config of the task model."""
        return {
            "problem_type": None,  # a model fine-tuned on scores says "regression"
            "num_labels": len(self.labels),
            "id2label": dict(enumerate(self.labels)),
            "label2id": {label: i for i, label in enumerate(self.labels)},
        }

    def auto_class(self) -> Any:
        from transformers import AutoModelForSequenceClassification

        return AutoModelForSequenceClassification

    def collator(self) -> Callable[..., Any]:
        from transformers import DataCollatorWithPadding

        return DataCollatorWithPadding(self.tokenizer, pad_to_multiple_of=self.pad_to)

    @abstractmethod
    def encode(self, rows: list[Row], split: str) -> list[Feature]: ...

    @abstractmethod
    def score(
        self, rows: list[Row], features: list[Feature], logits: Any, split: str = "dev"
    ) -> tuple[dict[str, float], list[Any]]: ...

    def label_id(self, row: Row, where: str) -> int | None:
        """The class id of a row, None where a test row has none; UserError outside the set.

        A whole number is an id, as on the hub, where the task names the classes; where the training
        file does, it is a name as any other.
        """
        value = row[key] if (key := find(row, self.task.label)) else None
        if value in (None, "") or value == -1 and "-1" not in self.labels:
            return None
        ids = range(len(self.task.labels))
        if isinstance(value, int) and not isinstance(value, bool) and value in ids:
            return value
        if str(value) not in self.labels:
            remedy = "mend the row, or the training file if the class is new"
            if self.task.labels:
                own = "; task `classify` takes labels of your own"
                remedy = "mend the row" + own * (self.task.kind == "classify")
            raise UserError(f"{where}: label {value!r:.60} is not in the set {self._set()}", remedy)
        return self.labels.index(str(value))

    def _set(self) -> str:
        """The label set, its first ones where there are many."""
        shown = ", ".join(label[:40] for label in self.labels[:_SHOWN])
        return f"{{{shown}{_more(len(self.labels) - _SHOWN)}}}"

    def _texts(self, rows: list[Row], split: str) -> tuple[list[str], list[str] | None]:
        def texts(names: Sequence[str]) -> list[str]:
            where = f"{self.task.name} {split}, example"
            return [text(row, names, f"{where} {n}") for n, row in enumerate(rows, 1)]

        second = self.task.second
        # Files of one's own are of pairs where they have them, all or none.
        if second == TASKS["classify"].second:
            pairs = any(find(row, second) for row in rows)
            if self.pairs not in (None, pairs):
                raise UserError(
                    f"{self.task.name} {split}: {'has' if pairs else 'lacks'} a second text, unlike"
                    " the files before it",
                    f"columns: {', '.join(rows[0])}",
                )
            self.pairs = pairs
            second = second if pairs else ()
        return texts(self.task.first), texts(second) if second else None


class Classify(Kind):
    """One label for a sentence or a pair."""

    def encode(self, rows: list[Row], split: str) -> list[Feature]:
        first, second = self._texts(rows, split)
        encoded = self.tokenizer(
            first, second, truncation=True, max_length=self.settings.max_length
        )
        features = unbatch(encoded)
        for number, (row, feature) in enumerate(zip(rows, features), 1):
            label = self.target(row, f"{self.task.name} {split}, example {number}")
            if label is not None:
                feature["labels"] = label
            elif split in LABELLED:
                raise UserError(
                    f"{self.task.name} {split}, example {number} has no label", "mend the row"
                )
        return features

    def target(self, row: Row, where: str) -> float | None:
        return self.label_id(row, where)

    def score(
        self, rows: list[Row], features: list[Feature], logits: Any, split: str = "dev"
    ) -> tuple[dict[str, float], list[Any]]:
        predicted = np.argmax(logits, axis=-1).tolist()
        names = [self.labels[i] for i in predicted]
        if any("labels" not in feature for feature in features):
            return {}, names
        gold = [feature["labels"] for feature in features]
        return metrics.classification(gold, predicted, self.task.metrics), names


class Regress(Classify):
    """A number for a pair (STS-B)."""

    def learn_labels(self, rows: list[Row], origin: str) -> None:
        self.labels = ["score"]

    def model_settings(self) -> dict[str, Any]:
        return {"num_labels": 1, "problem_type": "regression"}

    def target(self, row: Row, where: str) -> float | None:
        key = find(row, self.task.label)
        if key is None or row[key] in ("", None, -1):
            return None
        try:
            if math.isfinite(score := float(row[key])):
                return score
        except (TypeError, ValueError):
            pass
        raise UserError(f"{where}: score {row[key]!r} is no number", "mend the row")

    def score(
        self, rows: list[Row], features: list[Feature], logits: Any, split: str = "dev"
    ) -> tuple[dict[str, float], list[Any]]:
        predicted = np.asarray(logits, dtype=np.float64).reshape(-1).tolist()
        if any("labels" not in feature for feature in features):
            return {}, predicted
        return metrics.correlation([f["labels"] for f in features], predicted), predicted


class Tag(Kind):
    """A tag for every word, read at its first word piece (1810.04805, section 5.3)."""

    def learn_labels(self, rows: list[Row], origin: str) -> None:
        tags = {tag for row in rows for tag in pick(row, self.task.label, origin)}
        kinds = {tag[2:] for tag in tags if tag != "O"}
        if not kinds:
            raise UserError(f"{origin}: no word has a tag but O", "name the file with the tags")
        self.labels = ["O"] + [f"{mark}-{kind}" for kind in sorted(kinds) for mark in "BI"]

    def auto_class(self) -> Any:
        from transformers import AutoModelForTokenClassification

        return AutoModelForTokenClassification

    def collator(self) -> Callable[..., Any]:
        from transformers import DataCollatorForTokenClassification

        return DataCollatorForTokenClassification(self.tokenizer, pad_to_multiple_of=self.pad_to)

    def encode(self, rows: list[Row], split: str) -> list[Feature]:
        known = {label: i for i, label in enumerate(self.labels)}
        encoded = self.tokenizer(
            [list(pick(row, self.task.first, split)) for row in rows],
            is_split_into_words=True,
            truncation=True,
            max_length=self.settings.max_length,
        )
        features, cut = unbatch(encoded), 0
        for number, (row, feature) in enumerate(zip(rows, features)):
            tags, labels, starts, before = pick(row, self.task.label, split), [], [], None
            words = encoded.word_ids(number)
            for position, word in enumerate(words):
                if word is None or word == before:
                    labels.append(-100)
                elif tags[word] not in known:
                    raise UserError(
                        f"{self.task.name} {split}, sentence {number + 1}: tag {tags[word]!r:.60} is"
                        f" not in the set {self._set()}",
                        "mend the row, or the training file if the type is new",
                    )
                else:
                    labels.append(known[tags[word]])
                    starts.append((word, position))
                before = word
            feature["labels"] = labels
            feature["word_starts"] = starts
            cut += len(tags) - sum(label != -100 for label in labels)
        if cut:
            say(
                f"{self.task.name} {split}: {cut} words lie beyond max_length or have no piece; they count as O"
            )
        return features

    def score(
        self, rows: list[Row], features: list[Feature], logits: Any, split: str = "dev"
    ) -> tuple[dict[str, float], list[Any]]:
        gold = [list(pick(row, self.task.label, "dev")) for row in rows]
        predicted = []
        for row, feature, scores in zip(gold, features, logits):
            tags = ["O"] * len(row)
            for word, position in feature["word_starts"]:
                tags[word] = self.labels[int(np.argmax(scores[position]))]
            predicted.append(tags)
        return metrics.entities(gold, predicted), predicted


class Choice(Kind):
    """The best of four endings (SWAG)."""

    blind = {"labels": 0}

    def model_settings(self) -> dict[str, Any]:
        return {}

    def auto_class(self) -> Any:
        from transformers import AutoModelForMultipleChoice

        return AutoModelForMultipleChoice

    def collator(self) -> Callable[..., Any]:
        from transformers import DataCollatorForMultipleChoice

        return DataCollatorForMultipleChoice(self.tokenizer, pad_to_multiple_of=self.pad_to)

    def encode(self, rows: list[Row], split: str) -> list[Feature]:
        features = []
        for number, row in enumerate(rows, 1):
            where = f"{self.task.name} {split}, example {number}"
            context = text(row, ("sent1", "startphrase"), where)
            start = text(row, ("sent2",), where) if "sent2" in row else ""
            endings = [f"{start} {text(row, (f'ending{i}',), where)}".strip() for i in range(4)]
            encoded = self.tokenizer(
                [context] * 4, endings, truncation=True, max_length=self.settings.max_length
            )
            feature = dict(encoded)
            label = self.label_id(row, where)
            if label is not None:
                feature["labels"] = label
            elif split in LABELLED:
                raise UserError(f"{where} has no label", "mend the row")
            features.append(feature)
        return features

    score = Classify.score


def _more(left: int) -> str:
    return f", and {left} more" if left > 0 else ""


def unbatch(encoded: Any) -> list[Feature]:
    """A tokenizer's dict of lists as a list of dicts."""
    names = list(encoded.keys())
    return [dict(zip(names, values)) for values in zip(*(encoded[name] for name in names))]


def find(row: Row, names: Sequence[str]) -> str | None:
    """The first of `names` that is a column of `row`."""
    return next((name for name in names if name in row), None)


def pick(row: Row, names: Sequence[str], where: str) -> Any:
    """The value under the first of `names` that the row has; UserError otherwise, or for null."""
    name = find(row, names)
    if name is None:
        raise UserError(
            f"{where}: none of the columns {', '.join(names)}", f"columns: {', '.join(row)}"
        )
    if row[name] is None:
        raise UserError(f"{where}: {name} is null", "mend the row")
    return row[name]


def text(row: Row, names: Sequence[str], where: str) -> str:
    """`pick` of a single value, as text; UserError for a list or an object."""
    value = pick(row, names, where)
    if isinstance(value, list | dict):
        raise UserError(f"{where}: {value!r:.60} is no text", "give one text or number")
    return str(value)
