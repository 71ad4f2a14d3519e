"""Scores of predictions; names as the GLUE, SQuAD and CoNLL papers use them. All in percent."""

from __future__ import annotations

import collections
import re
import string
from collections.abc import Sequence
from typing import Any

import numpy as np


def classification(
    gold: Sequence[int], predicted: Sequence[int], names: Sequence[str]
) -> dict[str, float]:
    """Any of accuracy, f1 (of class 1) and matthews, in percent."""
    from sklearn.metrics import accuracy_score, f1_score, matthews_corrcoef

    known = {"accuracy": accuracy_score, "f1": f1_score, "matthews": matthews_corrcoef}
    return {name: 100 * float(known[name](gold, predicted)) for name in names}


def correlation(gold: Sequence[float], predicted: Sequence[float]) -> dict[str, float]:
    """Spearman and Pearson correlation x 100; 0 where the predictions are constant or not finite."""
    from scipy.stats import pearsonr, spearmanr

    if not np.isfinite(predicted).all() or np.ptp(predicted) == 0 or np.ptp(gold) == 0:
        return {"spearman": 0.0, "pearson": 0.0}
    return {
        "spearman": 100 * float(spearmanr(gold, predicted)[0]),
        "pearson": 100 * float(pearsonr(gold, predicted)[0]),
    }


def entities(gold: list[list[str]], predicted: list[list[str]]) -> dict[str, float]:
    """Micro F1, precision and recall over whole entities (conlleval's, through seqeval)."""
    import warnings

    from seqeval.metrics import f1_score, precision_score, recall_score

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # an untrained tagger predicts no entity of some type
        return {
            "f1": 100 * float(f1_score(gold, predicted)),
            "precision": 100 * float(precision_score(gold, predicted)),
            "recall": 100 * float(recall_score(gold, predicted)),
        }


def normalise_answer(text: str) -> str:
    """SQuAD's: lower case, without punctuation, articles and extra blanks."""
    text = "".join(ch for ch in text.lower() if ch not in set(string.punctuation))
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split())


def exact_and_f1(predicted: str, golds: Sequence[str]) -> tuple[float, float]:
    """Best exact match and token F1 over the gold answers, 0 to 1; no gold = unanswerable."""
    if not golds:
        right = float(not normalise_answer(predicted))
        return right, right
    tokens = normalise_answer(predicted).split()
    exact = f1 = 0.0
    for gold in golds:
        wanted = normalise_answer(gold).split()
        exact = max(exact, float(tokens == wanted))
        same = sum((collections.Counter(tokens) & collections.Counter(wanted)).values())
        if not tokens or not wanted:
            f1 = max(f1, float(tokens == wanted))
        elif same:
            precision, recall = same / len(tokens), same / len(wanted)
            f1 = max(f1, 2 * precision * recall / (precision + recall))
    return exact, f1


def squad(
    rows: list[dict[str, Any]],
    answers: list[str],
    null_gaps: list[float] | None,
    threshold: float | None = None,
) -> tuple[dict[str, float], float]:
    """Exact and F1 of SQuAD 1.1 (null_gaps None) or 2.0, and the null threshold that was used.

    Args:
        answers: the best non-empty answer of every row.
        null_gaps: score of "no answer" minus score of that answer. A row is left unanswered when
            its gap exceeds the threshold.
        threshold: None takes the one that is best on these rows, as the official script does.
    """
    scores = np.array(
        [exact_and_f1(a, [t for t, _ in r["answers"]]) for a, r in zip(answers, rows)]
    )
    if null_gaps is None:
        threshold = float("inf")
    else:
        empty = np.array([exact_and_f1("", [t for t, _ in r["answers"]]) for r in rows])
        if threshold is None:
            order = np.argsort(null_gaps, kind="stable")
            gaps = np.asarray(null_gaps)[order]
            # What answering the first k rows in order of gap gains; those of equal gap together.
            gain = np.concatenate([[0.0], np.cumsum(scores[order, 1] - empty[order, 1])])
            gain[1:-1][gaps[1:] == gaps[:-1]] = -np.inf
            best = int(np.argmax(gain))
            threshold = float(gaps[best - 1]) if best else float(gaps[0]) - 1.0
        answered = np.asarray(null_gaps) <= threshold
        scores = np.where(answered[:, None], scores, empty)
    exact, f1 = (100 * scores.mean(axis=0)).tolist()
    return {"f1": f1, "exact": exact}, threshold


def mean_and_spread(values: Sequence[float]) -> tuple[float, float | None]:
    """Mean and sample standard deviation, which a single value has not."""
    return float(np.mean(values)), float(np.std(values, ddof=1)) if len(values) > 1 else None
