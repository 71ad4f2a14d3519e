"""The downstream tasks: columns, labels, metrics, and the settings published with BERT."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from difflib import get_close_matches

from configs import UserError


@dataclass(frozen=True)
class Settings:
    """What one grid trains. Defaults: 1810.04805, appendix A.3 (GLUE: 3 epochs, batch 32).

    `lrs` x `seeds` are all trained; lengths are in word pieces.
    """

    lrs: tuple[float, ...] = (5e-5, 4e-5, 3e-5, 2e-5)
    seeds: tuple[int, ...] = (1,)
    epochs: float = 3.0
    batch: int = 32
    max_length: int = 128
    doc_stride: int = 128  # questions only: tokens by which windows of a long context advance
    warmup: float = 0.1  # share of the steps
    weight_decay: float = 0.01
    dropout: float | None = None  # of hidden states and attention; None: as the model's config says


@dataclass(frozen=True)
class Task:
    """kind: classify | regress | tag | question | choice.

    Each of `first`, `second`, `label` lists the column names under which releases hold that field;
    `headerless` gives the columns of files that come without a header. `labels` are the names in
    the order of the hub's integer ids; empty means that the training file defines them. The first
    of `metrics` chooses the best learning rate.
    """

    name: str
    kind: str
    first: tuple[str, ...] = ("sentence1",)
    second: tuple[str, ...] = ()
    label: tuple[str, ...] = ("label",)
    labels: tuple[str, ...] = ()
    metrics: tuple[str, ...] = ("accuracy",)
    hub: tuple[str, ...] = ()
    headerless: tuple[str, ...] = ()
    settings: Settings = field(default_factory=Settings)
    splits: tuple[tuple[str, tuple[str, ...]], ...] = (
        ("train", ("train",)),
        ("dev", ("dev", "validation", "valid", "val")),
        ("test", ("test",)),
    )


_BINARY = ("0", "1")
_ENTAIL = ("entailment", "not_entailment")
# 1810.04805 section 4.3: 2 epochs, lr 5e-5, batch 48 for SQuAD 2.0; 4.2: 3 epochs, 5e-5, 32 for
# 1.1; 4.4: 3 epochs, 2e-5, 16 for SWAG; 5.3 and A.3 for tagging.
_SQUAD = Settings(lrs=(5e-5,), epochs=3, batch=32, max_length=384)
_TAG = Settings(lrs=(5e-5, 3e-5, 2e-5), epochs=4, batch=32)
_MNLI_SPLITS = (
    ("train", ("train",)),
    ("dev", ("dev_matched", "validation_matched", "dev", "validation")),
    ("mismatched", ("dev_mismatched", "validation_mismatched")),
    ("test", ("test_matched", "test")),
    ("test_mismatched", ("test_mismatched",)),
)
# A release's version is in its files' names, and a folder may hold both.
_SQUAD_SPLITS, _SQUAD_2_SPLITS = (
    (
        ("train", (f"train-v{version}", "train")),
        ("dev", (f"dev-v{version}", "dev", "validation", "valid", "val")),
        ("test", (f"test-v{version}", "test")),
    )
    for version in ("1.1", "2.0")
)
_TAG_SPLITS = (
    ("train", ("train", "eng.train", "wnut17train")),
    ("dev", ("dev", "validation", "valid", "val", "testa", "eng.testa", "emerging.dev")),
    ("test", ("test", "testb", "eng.testb", "emerging.test.annotated")),
)

TASKS: dict[str, Task] = {
    task.name: task
    for task in (
        Task(
            "cola", "classify", ("sentence",), labels=_BINARY, metrics=("matthews", "accuracy"),
            hub=("nyu-mll/glue", "cola"), headerless=("source", "label", "star", "sentence"),
        ),
        Task("sst-2", "classify", ("sentence",), labels=_BINARY, hub=("nyu-mll/glue", "sst2")),
        Task(
            "mrpc", "classify", ("sentence1", "#1 String"), ("sentence2", "#2 String"),
            ("label", "Quality"), _BINARY, ("f1", "accuracy"), ("nyu-mll/glue", "mrpc"),
        ),
        Task(
            "sts-b", "regress", ("sentence1",), ("sentence2",), ("label", "score"),
            metrics=("spearman", "pearson"), hub=("nyu-mll/glue", "stsb"),
        ),
        Task(
            "qqp", "classify", ("question1",), ("question2",), ("label", "is_duplicate"), _BINARY,
            ("f1", "accuracy"), ("nyu-mll/glue", "qqp"),
        ),
        Task(
            "mnli", "classify", ("premise", "sentence1"), ("hypothesis", "sentence2"),
            ("label", "gold_label"), ("entailment", "neutral", "contradiction"),
            hub=("nyu-mll/glue", "mnli"), splits=_MNLI_SPLITS,
        ),
        Task(
            "qnli", "classify", ("question",), ("sentence",), labels=_ENTAIL,
            hub=("nyu-mll/glue", "qnli"),
        ),
        Task("rte", "classify", second=("sentence2",), labels=_ENTAIL, hub=("nyu-mll/glue", "rte")),
        Task("wnli", "classify", second=("sentence2",), labels=_BINARY, hub=("nyu-mll/glue", "wnli")),
        Task("rt-polarity", "classify", ("text",), labels=("neg", "pos"), hub=("cornell-movie-review-data/rotten_tomatoes",)),
        Task("classify", "classify", ("text", "sentence", "sentence1"), ("text_pair", "sentence2")),
        Task(
            "squad", "question", metrics=("f1", "exact"), hub=("rajpurkar/squad",), settings=_SQUAD,
            splits=_SQUAD_SPLITS,
        ),
        Task(
            "squad-2", "question", metrics=("f1", "exact"), hub=("rajpurkar/squad_v2",),
            settings=replace(_SQUAD, epochs=2, batch=48), splits=_SQUAD_2_SPLITS,
        ),
        Task("ner", "tag", ("tokens",), label=("ner_tags", "tags"), metrics=("f1", "precision", "recall"), settings=_TAG, splits=_TAG_SPLITS),
        Task(
            "wnut-17", "tag", ("tokens",), label=("ner_tags", "tags"),
            metrics=("f1", "precision", "recall"), hub=("leondz/wnut_17",), settings=_TAG,
            splits=_TAG_SPLITS,
        ),
        Task(
            "swag", "choice", ("startphrase", "sent1"), ("sent2",), metrics=("accuracy",),
            labels=("0", "1", "2", "3"), hub=("allenai/swag", "regular"),
            settings=Settings(lrs=(2e-5,), epochs=3, batch=16),
        ),
    )
}  # fmt: skip


def find_task(name: str) -> Task:
    """The task called `name`; UserError names the nearest one."""
    wanted = name.lower().replace("_", "-")
    wanted = {"sst2": "sst-2", "stsb": "sts-b", "squad2": "squad-2", "squad-1.1": "squad",
              "squad-2.0": "squad-2", "wnut17": "wnut-17", "conll": "ner"}.get(wanted, wanted)  # fmt: skip
    if wanted not in TASKS:
        near = get_close_matches(wanted, TASKS, 1)
        hint = f"did you mean {near[0]}?" if near else f"tasks: {', '.join(TASKS)}"
        raise UserError(f"no task {name!r}", hint)
    return TASKS[wanted]
