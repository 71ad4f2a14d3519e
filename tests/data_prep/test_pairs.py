"""Rows from documents: the released BERT procedure, token by token, and what must never happen."""

from __future__ import annotations

from collections import Counter
from random import Random

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from configs.objectives import OBJECTIVES
from data_prep.pairs import Plan, Pool, assemble, plan_rows

CLS, SEP, FIRST = 1, 2, 10
Corpus = list[list[int]]  # sentence lengths of each document


def pool_of(
    corpus: Corpus, content: list[int] | None = None, follows: list[bool] | None = None
) -> Pool:
    """Every token has an id of its own, so that a row tells where each of its tokens came from."""
    lengths = [n for document in corpus for n in document]
    ends = np.concatenate([[0], np.cumsum(lengths)]).astype(int).tolist()
    bounds = np.concatenate([[0], np.cumsum([len(d) for d in corpus])]).astype(int).tolist()
    tokens = np.arange(FIRST, FIRST + ends[-1], dtype=np.int32)
    documents = list(zip(bounds[:-1], bounds[1:]))
    numbers = content or list(range(len(corpus)))
    return Pool(tokens, ends, documents, numbers, follows or [False] * len(corpus))


def rows_of(
    corpus: Corpus,
    objective: str,
    max_length: int,
    short: float = 0.1,
    seed: int = 0,
    content: list[int] | None = None,
    follows: list[bool] | None = None,
    single: float = 0.0,
    pair: int = 0,
) -> tuple[list[tuple[list[int], int, int]], Plan, Pool]:
    """(tokens, segment_b, label) of every row."""
    pool, plan = pool_of(corpus, content, follows), Plan()
    draws = lambda document: Random(f"{seed}/{document}")  # noqa: E731
    plan_rows(
        pool, list(range(len(corpus))), draws, objective, max_length, short, plan, single, pair
    )
    rows = assemble(pool.tokens, plan, np.arange(len(plan)), CLS, SEP, objective in ("nsp", "sop"))
    cut = zip(rows.offsets[:-1], rows.offsets[1:], rows.segment_b, rows.next_sentence_label)
    return [(rows.tokens[a:b].tolist(), int(s), int(n)) for a, b, s, n in cut], plan, pool


def released_procedure(
    corpus: Corpus, max_length: int, short: float, seed: int
) -> list[tuple[list[int], int, int]]:
    """create_instances_from_document, written on token lists as plainly as it was released.

    The draws are made in the same order; that a cut token goes from the front or the back is drawn
    as one bit each.
    """
    pool = pool_of(corpus)
    texts = [
        [pool.tokens[pool.ends[s] : pool.ends[s + 1]].tolist() for s in range(*document)]
        for document in pool.documents
    ]
    out = []
    for index, document in enumerate(texts):
        rng = Random(f"{seed}/{index}")
        longest = max_length - 3
        target = longest
        if rng.random() < short:
            target = 2 + int(rng.random() * (longest - 1))
        chunk: list[list[int]] = []
        i = 0
        while i < len(document):
            chunk.append(document[i])
            if i == len(document) - 1 or sum(map(len, chunk)) >= target:
                a_end = 1
                if len(chunk) >= 2:
                    a_end = 1 + int(rng.random() * (len(chunk) - 1))
                a = [t for s in chunk[:a_end] for t in s]
                b: list[int] = []
                is_random = len(chunk) == 1 or rng.random() < 0.5
                if is_random:
                    wanted = target - len(a)
                    other = int(rng.random() * (len(texts) - 1))
                    other += other >= index
                    start = int(rng.random() * len(texts[other]))
                    for s in texts[other][start:]:
                        b.extend(s)
                        if len(b) >= wanted:
                            break
                    i -= len(chunk) - a_end
                else:
                    b = [t for s in chunk[a_end:] for t in s]
                cuts = Counter()
                sizes = {"a": len(a), "b": len(b)}
                while sizes["a"] + sizes["b"] > longest:
                    side = "a" if sizes["a"] > sizes["b"] else "b"
                    sizes[side] -= 1
                    cuts[side] += 1
                for side in ("a", "b"):
                    if cuts[side]:
                        front = bin(rng.getrandbits(cuts[side])).count("1")
                        text = a if side == "a" else b
                        del text[:front]
                        del text[len(text) - (cuts[side] - front) :]
                out.append(([CLS, *a, SEP, *b, SEP], len(a) + 2, int(is_random)))
                chunk = []
            i += 1
    return out


corpora = st.lists(st.lists(st.integers(1, 60), min_size=1, max_size=25), min_size=2, max_size=6)


@settings(max_examples=150, deadline=None)
@given(corpora, st.integers(8, 140), st.sampled_from([0.0, 0.3, 1.0]), st.integers(0, 99))
def test_nsp_is_the_released_procedure(
    corpus: Corpus, max_length: int, short: float, seed: int
) -> None:
    rows, _, _ = rows_of(corpus, "nsp", max_length, short, seed)
    assert rows == released_procedure(corpus, max_length, short, seed)


def document_of(pool: Pool, token: int) -> int:
    sentence = int(np.searchsorted(pool.ends, token - FIRST, side="right")) - 1
    return next(d for d, (a, b) in enumerate(pool.documents) if a <= sentence < b)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.lists(st.integers(1, 40), min_size=1, max_size=12), min_size=1, max_size=6),
    st.sampled_from(["nsp", "sop"]),
    st.integers(8, 100),
)
def test_labels_are_never_wrong(corpus: Corpus, objective: str, max_length: int) -> None:
    rows, _, pool = rows_of(corpus, objective, max_length)
    for tokens, start_b, label in rows:
        assert tokens[0] == CLS and tokens[start_b - 1] == tokens[-1] == SEP
        a, b = tokens[1 : start_b - 1], tokens[start_b:-1]
        assert a and b and len(tokens) <= max_length
        for segment in (a, b):
            assert segment == list(range(segment[0], segment[0] + len(segment)))
        same = document_of(pool, a[0]) == document_of(pool, b[0])
        if objective == "nsp":
            assert same == (label == 0)
            assert label == 1 or b[0] > a[-1]
        else:
            assert same and (b[0] > a[-1]) == (label == 0)


def test_b09_one_document_gives_no_random_rows() -> None:
    wanted = 0
    for seed in range(20):
        rows, plan, _ = rows_of([[4, 5, 4]], "nsp", 32, seed=seed)
        assert rows and all(label == 0 for _, _, label in rows)
        wanted += plan.counts["random B wanted, no other document"]
    assert wanted > 0
    lonely, plan, _ = rows_of([[5]], "nsp", 32)
    assert lonely == []
    assert plan.counts["sentences left alone at a document's end"] == 1


def test_b09_two_documents_of_very_different_size() -> None:
    """One document holds 99% of the sentences: its random rows all take B from the small one."""
    rows, _, pool = rows_of([[9] * 990, [9] * 10], "nsp", 64, short=0.0)
    random = [(tokens, b) for tokens, b, label in rows if label == 1]
    assert len(random) > 50
    for tokens, b in random:
        assert document_of(pool, tokens[1]) != document_of(pool, tokens[b])


def test_b09_copies_of_one_text_are_one_document() -> None:
    rows, _, pool = rows_of([[5] * 20] * 3 + [[5] * 4], "nsp", 40, content=[0, 0, 0, 1])
    for tokens, b, label in rows:
        if label == 1:
            pair = {document_of(pool, tokens[1]), document_of(pool, tokens[b])}
            assert 3 in pair
    only_copies, plan, _ = rows_of([[5] * 20] * 3, "nsp", 40, content=[0, 0, 0])
    assert all(label == 0 for *_, label in only_copies)
    assert plan.counts["random B wanted, no other document"] > 0


def test_b09_the_next_window_of_a_book_is_no_random_b() -> None:
    """Where a book is cut into windows, the next window truly follows: it is never drawn as random."""
    book, other = [[9] * 30 for _ in range(5)], [[9] * 30]
    follows = [False, True, True, True, True, False]
    seen = set()
    for seed in range(30):
        rows, _, pool = rows_of(book + other, "nsp", 64, seed=seed, follows=follows)
        for tokens, b, label in rows:
            if label == 1:
                pair = (document_of(pool, tokens[1]), document_of(pool, tokens[b]))
                assert pair[1] != pair[0] + 1 or pair[1] == 5
                seen.add(pair)
    assert (0, 2) in seen and (1, 0) in seen and (4, 5) in seen
    alone, plan, _ = rows_of([[9] * 30] * 2, "nsp", 64, follows=[False, True], content=[0, 1])
    assert plan.counts["random B wanted, no other document"] > 0 and len(alone) > 4


@pytest.mark.parametrize("seed", range(20))
def test_b11_long_sentences(seed: int) -> None:
    rows, plan, _ = rows_of([[700, 3, 400], [50, 60]], "nsp", 128, seed=seed)
    for tokens, start_b, _ in rows:
        assert len(tokens) <= 128
        assert tokens.count(CLS) == 1 and tokens.count(SEP) == 2
        assert start_b >= 3 and start_b < len(tokens) - 1
    assert plan.counts["rows cut"] > 0 and plan.counts["tokens cut"] > 500


def test_b11_an_exact_fit_is_not_touched() -> None:
    """125 tokens in two sentences at length 128: the row holds both whole (label 0)."""
    corpus = [[122, 3], [125], [60, 65]]
    whole = 0
    for seed in range(40):
        rows, plan, _ = rows_of(corpus[:1] + corpus[1:], "nsp", 128, short=0.0, seed=seed)
        for tokens, start_b, label in rows:
            if label == 0 and tokens[1] == FIRST:
                assert len(tokens) == 128 and start_b == 124
                whole += 1
    assert whole > 5


def test_cuts_are_at_both_ends_of_the_longer_side() -> None:
    fronts = []
    for seed in range(200):
        rows, _, pool = rows_of([[300, 20], [9]], "nsp", 128, short=0.0, seed=seed)
        tokens, start_b, _ = rows[0]
        a = tokens[1 : start_b - 1]
        fronts.append((a[0] - FIRST) / (300 - len(a)))
    assert 0.45 < np.mean(fronts) < 0.55 and max(fronts) < 0.8 and min(fronts) > 0.2


@pytest.mark.parametrize("objective", ["doc-sentences", "single", "full-sentences"])
@settings(max_examples=60, deadline=None)
@given(corpus=corpora, max_length=st.integers(8, 100), short=st.sampled_from([0.0, 0.5]))
def test_every_token_is_used_once(
    objective: str, corpus: Corpus, max_length: int, short: float
) -> None:
    rows, _, pool = rows_of(corpus, objective, max_length, short)
    used = Counter(t for tokens, *_ in rows for t in tokens if t >= FIRST)
    assert used == Counter(pool.tokens.tolist())
    for tokens, start_b, label in rows:
        assert len(tokens) <= max_length and start_b == label == 0
        inner = [t for t in tokens[1:-1] if t >= FIRST]
        documents = [document_of(pool, t) for t in inner]
        crossings = sum(a != b for a, b in zip(documents[:-1], documents[1:]))
        assert crossings == tokens.count(SEP) - 1
        assert objective == "full-sentences" or crossings == 0


def test_sentences_stay_whole_where_they_fit() -> None:
    corpus = [[7, 9, 8, 5, 9, 9, 3], [4, 9, 9]]
    for objective in ("doc-sentences", "full-sentences"):
        rows, _, pool = rows_of(corpus, objective, 24)
        borders = {FIRST + e for e in pool.ends}
        for tokens, *_ in rows:
            inner = [t for t in tokens if t >= FIRST]
            assert inner[0] in borders and inner[-1] + 1 in borders


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_draws_depend_on_the_document_alone(objective: str) -> None:
    """The rows of a document are the same whoever comes before it in this pass."""
    assume_pool = [[9, 8, 7, 6, 9, 9], [5, 5, 9, 9, 9], [9] * 8]
    pool = pool_of(assume_pool)

    def plan_of(chosen: list[int]) -> Plan:
        plan = Plan()
        plan_rows(pool, chosen, lambda d: Random(d), objective, 24, 0.5, plan)
        return plan

    together = plan_of([0, 1, 2])
    if objective == "full-sentences":
        assert len(together) > 0
        return
    apart = [plan_of([d]) for d in (0, 1, 2)]
    assert together.starts.tolist() == [s for p in apart for s in p.starts]
    assert together.labels.tolist() == [n for p in apart for n in p.labels]


@settings(max_examples=40, deadline=None)
@given(corpora, st.randoms(use_true_random=False), st.sampled_from([0.0, 0.5]))
def test_assemble_in_any_order(corpus: Corpus, random: Random, single: float) -> None:
    pool, plan = pool_of(corpus), Plan()
    plan_rows(pool, list(range(len(corpus))), lambda d: Random(d), "nsp", 50, 0.1, plan, single)
    assume(len(plan) > 1)
    order = list(range(len(plan)))
    random.shuffle(order)
    straight = assemble(pool.tokens, plan, np.arange(len(plan)), CLS, SEP, True)
    mixed = assemble(pool.tokens, plan, np.array(order), CLS, SEP, True)
    for place, row in enumerate(order):
        a = mixed.tokens[mixed.offsets[place] : mixed.offsets[place + 1]]
        b = straight.tokens[straight.offsets[row] : straight.offsets[row + 1]]
        assert np.array_equal(a, b) and mixed.segment_b[place] == straight.segment_b[row]


def test_half_of_the_pairs_are_random() -> None:
    """With chunks of several sentences about half of the rows are random, as in the paper."""
    corpus = [[10] * 300 for _ in range(20)]
    rows, _, _ = rows_of(corpus, "nsp", 128, short=0.0)
    share = sum(label for *_, label in rows) / len(rows)
    assert 0.46 < share < 0.54


@pytest.mark.parametrize("single", [0.0, 0.5, 0.9])
@settings(max_examples=40, deadline=None)
@given(corpora, st.sampled_from(["nsp", "sop"]), st.integers(8, 140), st.integers(0, 99))
def test_a_document_gives_pairs_or_single_segments(
    single: float, corpus: Corpus, objective: str, max_length: int, seed: int
) -> None:
    """As either objective would alone; without a share of singles no random number is drawn."""
    rows, plan, pool = rows_of(corpus, objective, max_length, 0.3, seed, single=single)
    expected = Plan()
    for number in range(len(corpus)):
        rng = Random(f"{seed}/{number}")
        kind = "doc-sentences" if single and rng.random() < single else objective
        plan_rows(pool, [number], lambda _, rng=rng: rng, kind, max_length, 0.3, expected)
    assert vars(plan) == vars(expected)
    for (tokens, start_b, label), pieces in zip(rows, plan.pieces):
        assert len(tokens) <= max_length and tokens.count(SEP) == pieces
        assert (start_b > 0) == (pieces == 2)
        assert tokens[start_b - 1] == SEP if start_b else label == 0


@settings(max_examples=60, deadline=None)
@given(corpora, st.sampled_from(["nsp", "sop"]), st.integers(8, 60), st.integers(0, 99))
def test_pairs_shorter_than_other_rows(
    corpus: Corpus, objective: str, pair_max_length: int, seed: int
) -> None:
    """A document's rows are those that it would have where every row had the length of its kind."""
    _, plan, pool = rows_of(corpus, objective, 80, 0.3, seed, single=0.5, pair=pair_max_length)
    expected = Plan()
    for number in range(len(corpus)):
        rng = Random(f"{seed}/{number}")
        alone = rng.random() < 0.5
        kind, longest = ("doc-sentences", 80) if alone else (objective, pair_max_length)
        plan_rows(pool, [number], lambda _, rng=rng: rng, kind, longest, 0.3, expected)
    assert vars(plan) == vars(expected)


def test_the_share_of_single_segments() -> None:
    corpus = [[10] * 3 for _ in range(4000)]
    rows, *_ = rows_of(corpus, "nsp", 64, short=0.0, single=0.75)
    alone = sum(start_b == 0 for _, start_b, _ in rows)
    assert 0.70 < alone / len(rows) < 0.80
