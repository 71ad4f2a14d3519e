"""Training rows from tokenised documents: which token ranges make a row, then the rows.

A document is a run of sentences, each a run of tokens in one flat array, so a segment is always
one contiguous token range and a row is a few integers. The plan is made in integers; the tokens
are copied once, vectorised, in `assemble`.

`nsp` follows create_pretraining_data.py as released with BERT (1810.04805): target lengths,
short_seq_prob drawn once a document, the random A/B split, half of the rows with a random B from
another document and the unused sentences put back, truncation of the longer side at either end.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

import numpy as np

from configs.objectives import PAIR_OBJECTIVES
from data_prep.shards import Rows, offsets_of, ragged_index


@dataclass
class Pool:
    """The documents of one unit of work: what rows are made of and where a random B comes from."""

    tokens: np.ndarray  # ids of all sentences, joined
    ends: list[int]  # [S + 1] running token counts: sentence s is tokens[ends[s]:ends[s + 1]]
    documents: list[tuple[int, int]]  # sentence range [first, last) of each document
    content: list[int]  # equal numbers: documents with the same text
    follows: list[bool]  # whether a document goes on with the text of the one before it


class Plan:
    """Rows as token ranges. A row is pieces, each followed by [SEP]."""

    def __init__(self) -> None:
        self.starts = array("q")  # of each piece, into Pool.tokens
        self.lengths = array("q")
        self.pieces = array("q")  # pieces of each row
        self.labels = array("b")
        self.counts: Counter[str] = Counter()

    def pair(self, a: int, a_end: int, b: int, b_end: int, label: int) -> None:
        self.starts.extend((a, b))
        self.lengths.extend((a_end - a, b_end - b))
        self.pieces.append(2)
        self.labels.append(label)

    def row(self, pieces: list[tuple[int, int]]) -> None:
        for start, length in pieces:
            self.starts.append(start)
            self.lengths.append(length)
        self.pieces.append(len(pieces))
        self.labels.append(0)

    def __len__(self) -> int:
        return len(self.labels)


def plan_rows(
    pool: Pool,
    chosen: list[int],
    rng_of: Callable[[int], Random],
    objective: str,
    max_length: int,
    short_seq_prob: float,
    plan: Plan,
    single_prob: float = 0.0,
    pair_max_length: int = 0,
) -> None:
    """Adds one pass over the documents `chosen` to `plan`.

    single_prob: the chance of a document that its rows are doc-sentences, whatever the objective
        (not with full-sentences). pair_max_length: of rows of two segments; 0 = max_length.
    rng_of: the random numbers of a document in this pass, a function of the document alone, so
        that its rows do not depend on who builds them or on what was built before.
    """
    if objective == "full-sentences":
        _full_sentences(pool, chosen, rng_of, max_length - 2, plan)
        return
    make = {"nsp": _nsp, "sop": _sop, "doc-sentences": _doc_sentences, "single": _single}
    for document in chosen:
        rng = rng_of(document)
        kind = objective
        if single_prob and rng.random() < single_prob:
            kind = "doc-sentences"
        if kind in PAIR_OBJECTIVES:
            room = (pair_max_length or max_length) - 3
        else:
            room = max_length - 2
        target = room
        if rng.random() < short_seq_prob:
            target = 2 + int(rng.random() * (room - 1))  # 2..room
            plan.counts["short documents"] += 1
        make[kind](pool, document, rng, room, target, plan)


def _nsp(pool: Pool, document: int, rng: Random, room: int, target: int, plan: Plan) -> None:
    ends, documents = pool.ends, pool.documents
    first, last = documents[document]
    draw = rng.random
    while first < last:
        # The shortest run of sentences from `first` that reaches the target, or the rest.
        stop = min(bisect_left(ends, ends[first] + target, first + 1, last + 1), last)
        count = stop - first
        middle = first + 1 if count < 2 else first + 1 + int(draw() * (count - 1))
        other = None
        if count == 1 or draw() < 0.5:
            other = _another(pool, document, rng)
            if other is None:
                plan.counts["random B wanted, no other document"] += 1
                if count == 1:
                    if stop == last:
                        plan.counts["sentences left alone at a document's end"] += 1
                        return
                    stop += 1  # the next sentence becomes B
        if other is None:
            b, b_end = ends[middle], ends[stop]
        else:
            begin, end = documents[other]
            sentence = begin + int(draw() * (end - begin))
            want = max(1, target - (ends[middle] - ends[first]))
            b = ends[sentence]
            b_end = ends[min(bisect_left(ends, b + want, sentence + 1, end + 1), end)]
            stop = middle  # the rest of the sentences is put back
        a, a_end, b, b_end = _truncate(ends[first], ends[middle], b, b_end, room, rng, plan)
        plan.pair(a, a_end, b, b_end, int(other is not None))
        first = stop


def _another(pool: Pool, document: int, rng: Random) -> int | None:
    """A document with another text, uniformly; None if there is none.

    Neither a copy of the document (duplicates kept on purpose) nor, where a book is cut into
    windows or chapters, the one that goes on where it ends: its start would truly follow.
    """
    total, content = len(pool.documents), pool.content
    if total < 2:
        return None
    other = int(rng.random() * (total - 1))
    other += other >= document
    mine = content[document]
    for step in range(total):
        candidate = (other + step) % total
        goes_on = candidate == document + 1 and pool.follows[candidate]
        if content[candidate] != mine and not goes_on:
            return candidate
    return None


def _truncate(
    a: int, a_end: int, b: int, b_end: int, room: int, rng: Random, plan: Plan
) -> tuple[int, int, int, int]:
    """Cuts tokens one by one from the longer side (B when equal), each at a random end.

    How many go from either side is fixed; how many of those from its front is binomial, drawn as
    the number of ones among as many random bits.
    """
    excess = (a_end - a) + (b_end - b) - room
    if excess <= 0:
        return a, a_end, b, b_end
    plan.counts["rows cut"] += 1
    plan.counts["tokens cut"] += excess
    longer = (a_end - a) - (b_end - b)
    uneven = min(excess, abs(longer))
    rest = excess - uneven
    cut_a, cut_b = rest // 2, rest - rest // 2
    if longer > 0:
        cut_a += uneven
    else:
        cut_b += uneven
    if cut_a:
        front = rng.getrandbits(cut_a).bit_count()
        a, a_end = a + front, a_end - (cut_a - front)
    if cut_b:
        front = rng.getrandbits(cut_b).bit_count()
        b, b_end = b + front, b_end - (cut_b - front)
    return a, a_end, b, b_end


def _sop(pool: Pool, document: int, rng: Random, room: int, target: int, plan: Plan) -> None:
    """ALBERT (1909.11942): B follows A (0) or the two are swapped (1), half and half."""
    ends = pool.ends
    first, last = pool.documents[document]
    while first < last:
        stop = min(bisect_left(ends, ends[first] + target, first + 1, last + 1), last)
        if stop - first == 1:
            if stop == last:
                plan.counts["sentences left alone at a document's end"] += 1
                return
            stop += 1
        middle = first + 1 + int(rng.random() * (stop - first - 1))
        a, a_end, b, b_end = _truncate(
            ends[first], ends[middle], ends[middle], ends[stop], room, rng, plan
        )
        if rng.random() < 0.5:
            plan.pair(b, b_end, a, a_end, 1)
        else:
            plan.pair(a, a_end, b, b_end, 0)
        first = stop


def _doc_sentences(
    pool: Pool, document: int, rng: Random, room: int, target: int, plan: Plan
) -> None:
    """RoBERTa's DOC-SENTENCES (1907.11692): whole sentences of one document, at most `target`.

    The first row is of random length, so that another pass cuts elsewhere.
    """
    ends = pool.ends
    first, last = pool.documents[document]
    limit = min(room, 2 + int(rng.random() * target))
    while first < last:
        stop = bisect_left(ends, ends[first] + limit + 1, first + 1, last + 1) - 1
        if stop == first:  # one sentence longer than the limit
            _windows(ends[first], ends[first + 1], room, plan)
            stop = first + 1
        else:
            plan.row([(ends[first], ends[stop] - ends[first])])
        first, limit = stop, target


def _windows(start: int, end: int, room: int, plan: Plan) -> None:
    if end - start > room:
        plan.counts["long sentences cut into rows"] += 1
    for at in range(start, end, room):
        plan.row([(at, min(room, end - at))])


def _single(pool: Pool, document: int, rng: Random, room: int, target: int, plan: Plan) -> None:
    """Windows of `target` tokens wherever sentences end; the first of random length."""
    first, last = pool.documents[document]
    at, end = pool.ends[first], pool.ends[last]
    limit = min(room, 1 + int(rng.random() * target))
    while at < end:
        plan.row([(at, min(limit, end - at))])
        at, limit = at + limit, target


def _full_sentences(
    pool: Pool, chosen: list[int], rng_of: Callable[[int], Random], room: int, plan: Plan
) -> None:
    """RoBERTa's FULL-SENTENCES: sentences of one or more documents, [SEP] between documents.

    The documents' order is drawn anew in every pass.
    """
    ends = pool.ends
    order = sorted((rng_of(document).random(), document) for document in chosen)
    pieces: list[tuple[int, int]] = []
    used = 0  # tokens in `pieces`, their separators included except the last
    for _, document in order:
        first, last = pool.documents[document]
        while first < last:
            space = room - used
            stop = bisect_left(ends, ends[first] + space + 1, first + 1, last + 1) - 1
            if stop > first:
                length = ends[stop] - ends[first]
                pieces.append((ends[first], length))
                used += length + 1
                first = stop
                if first == last and used < room:
                    continue  # the next document goes into the same row
            elif not pieces:  # one sentence longer than a row
                _windows(ends[first], ends[first + 1], room, plan)
                first += 1
                continue
            plan.row(pieces)
            pieces, used = [], 0
    if pieces:
        plan.row(pieces)


def assemble(
    tokens: np.ndarray, plan: Plan, order: np.ndarray, cls: int, sep: int, pairs: bool
) -> Rows:
    """The planned rows in the given order, as [CLS] piece [SEP] piece [SEP] ...

    order: int64 [n], row numbers of the plan. tokens keep their type; offsets are int64 [n + 1].
    """
    pieces = np.frombuffer(plan.pieces, np.int64) if len(plan) else np.zeros(0, np.int64)
    first_piece = offsets_of(pieces)[:-1]
    chosen = ragged_index(first_piece[order], pieces[order])
    starts = np.frombuffer(plan.starts, np.int64)[chosen] if len(chosen) else chosen
    lengths = np.frombuffer(plan.lengths, np.int64)[chosen] if len(chosen) else chosen
    piece_ends = offsets_of(lengths + 1)
    row_of = np.repeat(np.arange(len(order)), pieces[order])
    offsets = piece_ends[offsets_of(pieces[order])] + np.arange(len(order) + 1)
    out = np.full(offsets[-1], sep, tokens.dtype)
    out[offsets[:-1]] = cls
    out[ragged_index(piece_ends[:-1] + row_of + 1, lengths)] = tokens[ragged_index(starts, lengths)]
    segment_b = np.zeros(len(order), np.int64)
    if pairs:  # rows of two pieces; those of one have no B
        two = pieces[order] == 2
        segment_b[two] = lengths[offsets_of(pieces[order])[:-1][two]] + 2
    labels = np.frombuffer(plan.labels, np.int8) if len(plan) else np.zeros(0, np.int8)
    return Rows(out, offsets, segment_b, labels[order])
