from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pretrain.downstream import metrics


def test_squad_scores_of_known_answers() -> None:
    assert metrics.exact_and_f1("The  Cat!", ["cat"]) == (1.0, 1.0)
    exact, f1 = metrics.exact_and_f1("black cat sat", ["a cat", "dog"])
    assert exact == 0 and f1 == pytest.approx(2 * (1 / 3) * 1 / (1 / 3 + 1))
    assert metrics.exact_and_f1("", []) == (1.0, 1.0)
    assert metrics.exact_and_f1("cat", []) == (0.0, 0.0)
    assert metrics.exact_and_f1("", ["cat"]) == (0.0, 0.0)


questions = st.lists(
    st.tuples(st.booleans(), st.booleans(), st.integers(-5, 5).map(float)), min_size=1, max_size=12
)


PATIENT = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # busy machines


@PATIENT
@given(questions)
def test_null_threshold_is_the_best_of_all(cases) -> None:
    """Against trying every threshold: (answerable?, answer right?, gap)."""
    rows = [{"answers": [("cat", 0)] if has else []} for has, _, _ in cases]
    answers = ["cat" if right else "dog" for _, right, _ in cases]
    gaps = [gap for _, _, gap in cases]

    def f1_at(threshold: float) -> float:
        chosen = [a if g <= threshold else "" for a, g in zip(answers, gaps)]
        golds = [[t for t, _ in r["answers"]] for r in rows]
        return 100 * float(np.mean([metrics.exact_and_f1(a, g)[1] for a, g in zip(chosen, golds)]))

    result, threshold = metrics.squad(rows, answers, gaps)
    assert result["f1"] == pytest.approx(f1_at(threshold))
    assert result["f1"] == pytest.approx(max(f1_at(t) for t in [*gaps, min(gaps) - 1]))


def test_classification_and_correlation() -> None:
    got = metrics.classification([1, 1, 0, 0], [1, 0, 0, 0], ("accuracy", "f1", "matthews"))
    assert got["accuracy"] == 75 and got["f1"] == pytest.approx(200 / 3)
    assert got["matthews"] == pytest.approx(100 / np.sqrt(3))
    assert metrics.correlation([1, 2, 3], [2, 4, 7])["spearman"] == pytest.approx(100)
    assert metrics.correlation([1, 2, 3], [5, 5, 5]) == {"spearman": 0.0, "pearson": 0.0}


def test_entities_count_only_when_whole() -> None:
    gold = [["B-PER", "I-PER", "O", "B-LOC"]]
    got = metrics.entities(gold, [["B-PER", "O", "O", "B-LOC"]])
    assert got == {"f1": 50.0, "precision": 50.0, "recall": 50.0}


def test_spread_is_the_sample_deviation() -> None:
    assert metrics.mean_and_spread([1.0, 3.0]) == (2.0, pytest.approx(np.sqrt(2)))
    assert metrics.mean_and_spread([4.0]) == (4.0, None)
