"""A cache of words in front of BERT's WordPiece: same ids, several times the speed.

BERT's tokenizer cuts at white space and at punctuation before it looks at words, and nothing it
does to a character looks past such a cut (its normaliser maps character by character and composes
only combining marks, which these are not). So the ids of a text are the ids of the pieces between
cuts, and a piece met before needs no second look. There are two caches, one behind the other: of
what stands between spaces (`(Berlin),`) and of words and marks inside that (`Berlin`). What neither
knows is encoded by the real tokenizer, whatever strange characters it holds.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import count, islice
from typing import Any

import numpy as np
from tokenizers import Tokenizer as Backend

Encoded = tuple[np.ndarray, np.ndarray]  # ids of all texts in a row, how many each has
BATCH = 1 << 19  # characters worked on at a time
# About 400 MB of cache: 100 bytes an entry and its text. Beyond that it starts anew.
LARGEST_CACHE = 400 << 20
ENTRY = 100
# ASCII punctuation and other punctuation (category P) without decomposition or case.
PUNCTUATION = "!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~‘’“”‚„–—…«»‹›¡¿·•†‡。、「」『』（），！？：；"
IDEOGRAPHS = "\u4e00-\u9fff"
END = "\n"


class Cache:
    """Ids by piece. cut: text -> pieces, each sentence end a piece of its own; inner: encodes the
    pieces not met before."""

    def __init__(
        self,
        cut: Callable[[str], list[str]],
        joint: str,
        inner: Callable[[list[str]], Encoded],
        dtype: np.dtype,
    ) -> None:
        self.cut, self.joint, self.inner, self.dtype = cut, joint, inner, dtype
        self._reset()

    def _reset(self) -> None:
        # piece -> number; one not met before gets the next number, without a step of Python.
        self.numbers: defaultdict[str, int] = defaultdict(count(1).__next__, {END: 0})
        self.size = 0
        self.used = 1  # pieces with known ids; number 0 is the sentence end
        self.counts = np.zeros(1 << 16, np.int64)
        self.starts = np.zeros(1 << 16, np.int64)
        self.ids = np.zeros(1 << 17, self.dtype)
        self.ids_used = 0

    def encode(self, texts: Sequence[str]) -> Encoded:
        """Texts must not hold a line end."""
        if not texts:
            return np.zeros(0, self.dtype), np.zeros(0, np.int64)
        pieces = self.cut(self.joint.join(texts) + self.joint)
        found = np.fromiter(map(self.numbers.__getitem__, pieces), np.int64, len(pieces))
        if len(self.numbers) > self.used:
            self._learn(list(islice(reversed(self.numbers), len(self.numbers) - self.used))[::-1])
        counts = self.counts[found]
        ends = np.cumsum(counts)
        # Where in self.ids each output position reads: its piece's start plus its place in it.
        shift = np.repeat(self.starts[found] - ends + counts, counts)
        ids = self.ids[shift + np.arange(len(shift))]
        text_ends = ends[found == 0]
        if self.size > LARGEST_CACHE:
            self._reset()
        return ids, np.diff(text_ends, prepend=0)

    def _learn(self, pieces: list[str]) -> None:
        ids, counts = self.inner(pieces)
        last = self.used + len(pieces)
        self.counts, self.starts = _grown(self.counts, last), _grown(self.starts, last)
        self.ids = _grown(self.ids, self.ids_used + len(ids))
        self.counts[self.used : last] = counts
        self.starts[self.used : last] = self.ids_used + np.cumsum(counts) - counts
        self.ids[self.ids_used : self.ids_used + len(ids)] = ids
        self.used, self.ids_used = last, self.ids_used + len(ids)
        self.size += sum(map(len, pieces)) + ENTRY * len(pieces)


def _grown(array: np.ndarray, size: int) -> np.ndarray:
    if size <= len(array):
        return array
    bigger = np.zeros(max(size, 2 * len(array)), array.dtype)
    bigger[: len(array)] = array
    return bigger


class WordCache:
    """Encodes sentences as `backend` does, a BERT WordPiece (see `usable`)."""

    def __init__(self, backend: Backend, dtype: np.dtype, parts: dict[str, Any]) -> None:
        """backend: one that reads special tokens in a text as text; parts: its tokenizer.json."""
        self.backend, self.dtype = backend, dtype
        normalizer, longest = parts["normalizer"], parts["model"]["max_input_chars_per_word"]
        self.lowercase = normalizer["lowercase"]
        # Words that are their own token; longer ones are unknown to WordPiece, whatever it holds.
        vocab = parts["model"]["vocab"]
        plain = {token: i for token, i in vocab.items() if token.isascii() and token.isalnum()}
        self.known = {token: i for token, i in plain.items() if len(token) <= longest}
        cuts = re.escape(PUNCTUATION) + (IDEOGRAPHS if normalizer["handle_chinese_chars"] else "")
        find = re.compile(f"[^ \\t\\r\\n{cuts}]+|[{cuts}\\n]").findall
        words = Cache(find, END, self._words, dtype)
        self.cache = Cache(lambda text: text.split(" "), f" {END} ", words.encode, dtype)

    @staticmethod
    def usable(parts: dict[str, Any]) -> bool:
        """Whether this is a WordPiece with BERT's own steps and plain special tokens."""
        kinds = [
            (parts[name] or {}).get("type") for name in ("model", "normalizer", "pre_tokenizer")
        ]
        return kinds == ["WordPiece", "BertNormalizer", "BertPreTokenizer"] and not any(
            token["normalized"] for token in parts["added_tokens"]
        )

    def encode(self, sentences: Sequence[str]) -> Encoded:
        """Ids of all sentences in a row, and the number of ids of each."""
        ends = np.cumsum(np.fromiter(map(len, sentences), np.int64, len(sentences)))
        total = int(ends[-1]) if len(ends) else 0
        cuts = np.searchsorted(ends, np.arange(BATCH, total, BATCH)) + 1
        cuts = np.unique(np.concatenate([[0], cuts, [len(sentences)]])).tolist()
        parts = [self._batch(sentences[a:b]) for a, b in zip(cuts, cuts[1:])]
        return _joined(parts, self.dtype)

    def _batch(self, sentences: Sequence[str]) -> Encoded:
        text = END.join(sentences)
        if text.count(END) == len(sentences) - 1:
            return self.cache.encode(sentences)
        parts: list[Encoded] = []
        plain: list[str] = []
        for sentence in sentences:
            if END in sentence:
                parts += [self.cache.encode(plain), self._real([sentence])]
                plain = []
            else:
                plain.append(sentence)
        return _joined([*parts, self.cache.encode(plain)], self.dtype)

    def _real(self, texts: list[str]) -> Encoded:
        return flatten(self.backend, texts, self.dtype)

    def _words(self, words: list[str]) -> Encoded:
        """Ids of new words: one look into the vocabulary for plain ones, the real thing for others."""
        known = self.known.get
        if self.lowercase:
            found = [known(w.lower(), -1) if w.isascii() else -1 for w in words]
        else:
            found = [known(w, -1) for w in words]
        single = np.array(found, np.int64)
        hard = single < 0
        ids, hard_counts = self._real([words[i] for i in np.flatnonzero(hard)])
        counts = np.ones(len(words), np.int64)
        counts[hard] = hard_counts
        from_hard = np.repeat(hard, counts)
        joined = np.empty(len(from_hard), self.dtype)
        joined[from_hard] = ids
        joined[~from_hard] = single[~hard]
        return joined, counts


def flatten(backend: Backend, texts: Sequence[str], dtype: np.dtype) -> Encoded:
    """What `backend` makes of texts, without special tokens."""
    ids = [one.ids for one in backend.encode_batch_fast(list(texts), add_special_tokens=False)]
    counts = np.array([len(one) for one in ids], np.int64)
    return np.fromiter((i for one in ids for i in one), dtype, int(counts.sum())), counts


def _joined(parts: list[Encoded], dtype: np.dtype) -> Encoded:
    ids = [part[0] for part in parts if len(part[1])]
    counts = [part[1] for part in parts if len(part[1])]
    if not counts:
        return np.zeros(0, dtype), np.zeros(0, np.int64)
    return np.concatenate(ids), np.concatenate(counts)
