"""Map task 1: a unit of input -> tokenised documents on disk. Duplicates and the selection.

A document's fate depends on the hash of its text alone: held out or not, how often it is used. Of
documents with the same text one stays. So the held-out split is the same for every
recipe over the same text, and no worker needs to know of another.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from functools import cache
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np

from configs.schema import PrepConfig, SourceConfig
from data_prep.arrays import is_whole, load_arrays, load_meta, save_arrays
from data_prep.sentences import Splitter, read_abbreviations
from data_prep.shards import offsets_of
from data_prep.sources import Document, Range, Tally, open_source
from data_prep.tokenizer import Tokenizer, load

BATCH_BYTES = 2 << 20  # UTF-8, tokenised at once
DOCUMENTS_PER_BUCKET = 4_000_000  # duplicates are looked for in buckets of about this many
UNKNOWN_SENTENCES = 200  # of a unit, looked at for the words behind [UNK]
UNKNOWN_WORDS = 100  # of a unit, kept


@dataclass(frozen=True)
class Unit:
    number: int
    source: int
    range: Range

    @property
    def label(self) -> str:
        return f"unit {self.number} ({', '.join(dict.fromkeys(p.path for p in self.range.pieces))})"


@dataclass
class Context:
    """What the document tasks need to know, the same in every worker."""

    sources: list[SourceConfig]
    prep: PrepConfig
    vocab: Path
    folder: Path  # of the tokenised documents
    units: int = 0
    buckets: int = 0

    def unit_file(self, number: int) -> Path:
        return self.folder / f"unit-{number:05d}.arrays"

    def bucket_file(self, number: int) -> Path:
        # Which of equal documents stays hangs on the weights, which the folder's name does not tell.
        weights = blake2b(repr([s.weight for s in self.sources]).encode(), digest_size=4)
        name = f"duplicates-{number:03d}-of-{self.buckets:03d}-{weights.hexdigest()}.arrays"
        return self.folder / name


@cache
def _tokenizer(folder: Path) -> Tokenizer:
    return load(folder)


@cache
def _splitter(language: str, abbreviations: str) -> Splitter:
    words = read_abbreviations(abbreviations) if abbreviations else []
    return Splitter(words, language)


def forget() -> None:
    """Frees the tokenizer and its cache of words, which the next tasks have no use for."""
    _tokenizer.cache_clear()
    _splitter.cache_clear()


class _Batch:
    """Documents on their way through splitter and tokenizer, two megabytes at a time."""

    def __init__(self, tokenizer: Tokenizer, splitter: Splitter) -> None:
        self.tokenizer, self.splitter = tokenizer, splitter
        self.sentences: list[str] = []
        self.counts: list[int] = []  # sentences of each waiting document
        self.hashes: list[bytes] = []
        self.families: list[bytes] = []
        self.waiting = self.bytes = 0
        self.tokens: list[np.ndarray] = []
        self.sentence_tokens: list[np.ndarray] = []
        self.document_sentences: list[np.ndarray] = []
        self.document_hashes: list[bytes] = []
        self.document_families: list[bytes] = []
        self.dropped: Counter[str] = Counter()
        self.unknowns: Counter[str] = Counter()
        self.unknown_tokens = 0
        self.looked_at = 0

    def add(self, document: Document) -> None:
        digest = blake2b(digest_size=16)
        size = 0
        for paragraph in document.paragraphs:
            data = paragraph.encode("utf-8", "surrogatepass")
            digest.update(data)
            digest.update(b"\n")
            size += len(data)
        before = len(self.sentences)
        if document.presplit:
            self.sentences += document.paragraphs
        else:
            self.sentences += self.splitter.split_many(document.paragraphs)
        self.counts.append(len(self.sentences) - before)
        self.hashes.append(digest.digest())
        self.families.append(family(document.id))
        self.bytes += size
        self.waiting += size
        if self.waiting >= BATCH_BYTES:
            self.flush()

    def flush(self) -> None:
        if not self.counts:
            return
        values, offsets = self.tokenizer.encode_sentences(self.sentences)
        self._look_at_unknowns(values, offsets)
        lengths = np.diff(offsets)
        starts = offsets_of(np.array(self.counts))
        whole = lengths > 0  # a sentence of nothing but blanks or control characters has no token
        self.dropped["sentences without tokens"] += int(len(whole) - whole.sum())
        kept = np.diff(np.concatenate([[0], np.cumsum(whole)])[starts])
        self.dropped["documents without tokens"] += int((kept == 0).sum())
        self.tokens.append(values)
        self.sentence_tokens.append(lengths[whole].astype(np.int32))
        self.document_sentences.append(kept[kept > 0].astype(np.int32))
        self.document_hashes += [h for h, k in zip(self.hashes, kept) if k]
        self.document_families += [f for f, k in zip(self.families, kept) if k]
        self.sentences, self.counts, self.waiting = [], [], 0
        self.hashes, self.families = [], []

    def _look_at_unknowns(self, values: np.ndarray, offsets: np.ndarray) -> None:
        places = np.flatnonzero(values == self.tokenizer.special_ids["unk"])
        self.unknown_tokens += len(places)
        if len(places) and self.looked_at < UNKNOWN_SENTENCES:
            found = np.unique(np.searchsorted(offsets, places, side="right") - 1)
            chosen = found[: UNKNOWN_SENTENCES - self.looked_at]
            self.looked_at += len(chosen)
            self.unknowns.update(unknown_words(self.tokenizer, [self.sentences[i] for i in chosen]))


def family(name: str) -> bytes:
    """8 bytes that are the same for pieces (`file@start#number`) of one file, one after another."""
    stem, mark, _ = name.rpartition("#")
    whole = re.sub(r"@\d+$", "", stem) if mark else name
    return blake2b(whole.encode("utf-8", "surrogatepass"), digest_size=8).digest()


def unknown_words(tokenizer: Tokenizer, sentences: list[str]) -> list[str]:
    """The pieces of text that became [UNK]; the slow way, for the audit."""
    unknown = tokenizer.special_ids["unk"]
    found = []
    for sentence in sentences:
        encoded = tokenizer.backend.encode(sentence, add_special_tokens=False)
        spans = [span for span, token in zip(encoded.offsets, encoded.ids) if token == unknown]
        found += [sentence[a:b] for a, b in spans]
    return found


def tokenise_unit(context: Context, unit: Unit) -> dict[str, Any]:
    """Reads, splits and tokenises one unit; returns its counts.

    The file holds tokens, tokens of each sentence, sentences and tokens of each document, each
    document's hash as two uint64, and one of what it is a piece of.
    """
    path = context.unit_file(unit.number)
    if is_whole(path):
        return load_meta(path)
    config = context.sources[unit.source]
    batch = _Batch(
        _tokenizer(context.vocab), _splitter(config.language, context.prep.abbreviations)
    )
    tally = Tally()
    for document in open_source(config).documents(unit.range, tally):
        batch.add(document)
    batch.flush()
    sentences = _joined(batch.sentence_tokens, np.int32)
    documents = _joined(batch.document_sentences, np.int32)
    per_document = np.diff(offsets_of(sentences)[offsets_of(documents)])
    hashes = np.frombuffer(b"".join(batch.document_hashes), "<u8").reshape(-1, 2)
    tokens = _joined(batch.tokens, np.uint16)
    meta = {
        "source": unit.source,
        "documents": len(documents),
        "sentences": len(sentences),
        "tokens": len(tokens),
        "bytes": batch.bytes,
        "unknown_tokens": batch.unknown_tokens,
        "unknowns": _most_common(batch.unknowns, UNKNOWN_WORDS),
        "dropped": {k: v for k, v in sorted((tally.dropped + batch.dropped).items()) if v},
        "replaced": tally.replaced,
        "first": tally.first,
    }
    arrays = {
        "tokens": tokens,
        "sentence_tokens": sentences,
        "document_sentences": documents,
        "document_tokens": per_document,
        "hashes": hashes,
        "families": np.frombuffer(b"".join(batch.document_families), "<u8"),
    }
    save_arrays(path, arrays, meta)
    return meta


def _joined(pieces: list[np.ndarray], kind: Any) -> np.ndarray:
    return np.concatenate(pieces) if pieces else np.zeros(0, kind)


def _most_common(words: Counter[str], count: int) -> dict[str, int]:
    """The most frequent, ties by spelling, so that the result has one order."""
    return dict(sorted(words.items(), key=lambda item: (-item[1], item[0]))[:count])


def find_duplicates(context: Context, bucket: int) -> int:
    """Reduce task: documents of this bucket of hashes whose text another document has.

    Of equal ones the first of the source with the highest weight stays: what one source leaves out
    by its weight must not take it from another. Writes their units and numbers, in order; returns how many they are.
    """
    path = context.bucket_file(bucket)
    if not is_whole(path):
        hashes, units, numbers, weights = [], [], [], []
        for unit in range(context.units):
            arrays, meta = load_arrays(context.unit_file(unit))
            seen = arrays["hashes"]
            mine = np.flatnonzero(seen[:, 0] % np.uint64(context.buckets) == bucket)
            hashes.append(seen[mine])
            units.append(np.full(len(mine), unit, np.int32))
            numbers.append(mine.astype(np.int32))
            weights.append(np.full(len(mine), context.sources[meta["source"]].weight))
        lists = (hashes, units, numbers, weights)
        keys, unit_of, number_of, weight_of = (np.concatenate(a) for a in lists)
        order = np.lexsort((-weight_of, keys[:, 1], keys[:, 0]))  # stable: the first stays first
        ordered = keys[order]
        again = np.zeros(len(order), bool)
        again[1:] = (ordered[1:] == ordered[:-1]).all(axis=1)
        found = np.sort(order[again])
        save_arrays(
            path, {"units": unit_of[found], "numbers": number_of[found]}, {"count": len(found)}
        )
    return int(load_meta(path)["count"])


@dataclass
class Selection:
    """Of each document of a unit: how often it is used (0 = dropped) and whether it is held out."""

    copies: np.ndarray  # int32 [documents]
    held_out: np.ndarray  # bool [documents]
    duplicates: int

    def of(self, kind: str) -> np.ndarray:
        """Documents of the training rows or of the held-out rows, in order."""
        wanted = self.held_out if kind == "held-out" else ~self.held_out
        return np.flatnonzero(wanted & (self.copies > 0))


def select(context: Context, unit: int, dupe_factor: int) -> Selection:
    """What is done with each document of a tokenised unit."""
    arrays, meta = load_arrays(context.unit_file(unit))
    hashes = arrays["hashes"]
    weight = context.sources[meta["source"]].weight
    times = int(weight) + (_uniform(hashes[:, 1]) < weight - int(weight))
    held_out = _uniform(hashes[:, 0]) < context.prep.held_out
    copies = np.where(held_out, 1, times * dupe_factor).astype(np.int32)
    duplicates = 0
    for bucket in range(context.buckets):
        again = load_arrays(context.bucket_file(bucket))[0]
        first, last = np.searchsorted(again["units"], [unit, unit + 1])
        copies[again["numbers"][first:last]] = 0
        duplicates += int(last - first)
    return Selection(copies, held_out, duplicates)


def _uniform(bits: np.ndarray) -> np.ndarray:
    """uint64 -> [0, 1)."""
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53
