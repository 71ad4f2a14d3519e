"""Masked tokens, drawn anew for every epoch as a pure function of integers.

What is masked in a row depends on (seed, phase, epoch, row, position) and on nothing else: not on
ranks, workers, micro-batches, devices or a resumed run. The host draws the masks as integers and
the device only receives them.

Every row gets exactly `mask_counts` predictions, so that the divisor of the loss is known from the
row lengths alone. Each token has a score and a class; the lowest (class, score, position) win.
Class 1 (special ids inside the text) is touched only when nothing else is left, class 2 ([CLS] and
the [SEP]s that give the row its shape) never. Tokens of one word share a score for whole-word
masking (BERT repository, 2019), tokens of one span for span masking (SpanBERT, 1907.10529), so
that only the last word or span of a row is cut to meet the count.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from configs.schema import MaskingConfig
from data_prep.shards import Shards, ragged_index
from pretrain.data.counter import (
    MASK,
    MASK_KIND,
    MASK_SCORE,
    MASK_TOKEN,
    SPAN_LENGTH,
    below,
    mix,
    row_keys,
    token_numbers,
)

_CHUNK = 1 << 16  # tokens drawn at once: their arrays stay in a core's cache


def mask_counts(lengths: np.ndarray, probability: float, cap: int) -> np.ndarray:
    """Predictions of rows of these lengths: min(cap, max(1, round_half_even(probability x length))).

    A row with fewer maskable tokens than that (all but [CLS] and at most two [SEP]) gets those;
    rows without any (length below 3) get 0. int64 [n].
    """
    lengths = lengths.astype(np.int64)
    wanted = np.minimum(cap, np.maximum(1, np.rint(probability * lengths).astype(np.int64)))
    maskable = np.where(lengths < 3, 0, np.maximum(lengths - 3, 1))
    return np.minimum(wanted, maskable)


@dataclass
class Masked:
    """Predictions of packed rows, in ascending order of place."""

    tokens: np.ndarray  # int32, the input with [MASK] and random tokens put in
    positions: np.ndarray  # int64 [m], into tokens
    labels: np.ndarray  # int32 [m], the true ids


class Masker:
    """Draws the masks of one phase."""

    def __init__(self, config: MaskingConfig, shards: Shards, seed: int, phase: int) -> None:
        self.config, self.seed, self.phase = config, seed, phase
        self.cap, self.max_length = shards.mask_cap, shards.max_length
        special = {int(i) for i in shards.special_ids.values()}
        self.mask_id = shards.special_ids["mask"]
        self.ordinary = np.setdiff1d(np.arange(shards.vocab_size), sorted(special)).astype(np.int32)
        # [UNK] may be predicted, as published; the others carry no word.
        self.avoided = np.zeros(shards.vocab_size, np.bool_)
        self.avoided[sorted(special - {shards.special_ids["unk"]})] = True
        self.word_start = shards.word_start
        p, longest = config.span_p, config.span_max
        shares = np.cumsum(p * (1 - p) ** np.arange(longest))
        self._span_edges = (shares / shares[-1] * 2**32).astype(np.uint32)[:-1]
        self._mask_below = round(config.replace_mask * 2**32)
        self._random_below = round((config.replace_mask + config.replace_random) * 2**32)

    def counts(self, lengths: np.ndarray) -> np.ndarray:
        """Predictions of rows of these lengths, int64 [n]."""
        return mask_counts(lengths, self.config.probability, self.cap)

    def warning(self) -> str:
        """What to tell the user if the shard's cap keeps full rows below the probability asked for."""
        full = np.array([self.max_length])
        real = int(self.counts(full)[0]) / self.max_length
        if int(mask_counts(full, self.config.probability, self.max_length)[0]) <= self.cap:
            return ""
        return (
            f"the shards keep {self.cap} predictions a row: {real:.1%} of a full row of "
            f"{self.max_length} tokens is masked, not {self.config.probability:.1%} "
            "(shards.<set>.mask_cap)"
        )

    def draw(
        self,
        tokens: np.ndarray,
        offsets: np.ndarray,
        segment_b: np.ndarray,
        epochs: np.ndarray,
        rows: np.ndarray,
    ) -> Masked:
        """Masks n packed rows.

        Args:
            tokens: int32 [sum of lengths]. offsets: int64 [n + 1]. segment_b: int [n], start of B
                inside the row, 0 = one segment. epochs, rows: int64 [n], what the masks depend on.
        """
        out = [tokens.copy()]
        positions = []
        size = max(1, min(_CHUNK // self.max_length, 4096))  # sort keys hold 13 bits of the row
        for first in range(0, len(rows), size):
            piece = slice(first, min(first + size, len(rows)))
            begin, end = offsets[piece.start], offsets[piece.stop]
            local = offsets[piece.start : piece.stop + 1] - begin
            chosen = self._draw_chunk(
                out[0][begin:end], local, segment_b[piece], epochs[piece], rows[piece]
            )
            positions.append(chosen + begin)
        at_ = np.concatenate(positions) if positions else np.zeros(0, np.int64)
        return Masked(out[0], at_, tokens[at_])

    def _draw_chunk(
        self,
        tokens: np.ndarray,
        offsets: np.ndarray,
        segment_b: np.ndarray,
        epochs: np.ndarray,
        rows: np.ndarray,
    ) -> np.ndarray:
        """Chooses and replaces in place; returns the chosen places, ascending."""
        lengths = np.diff(offsets)
        row_of = np.repeat(np.arange(len(rows)), lengths)
        position = (np.arange(len(tokens)) - offsets[row_of]).astype(np.uint32)
        structural = np.zeros(len(tokens), np.bool_)
        whole = lengths > 0
        structural[offsets[:-1][whole]] = True
        structural[offsets[1:][whole] - 1] = True
        structural[(offsets[:-1] + segment_b - 1)[whole & (segment_b > 0)]] = True

        score = self._numbers(MASK_SCORE, epochs, rows, row_of, position)
        if self.config.kind == "whole-word":
            starts = self._word_starts(tokens, structural)
            score = score[np.flatnonzero(starts)[np.cumsum(starts) - 1]]
        elif self.config.kind == "span":
            score = self._span_scores(tokens, structural, score)
        rank = np.where(structural, 2, self.avoided[tokens])
        order = np.sort(((row_of << 2 | rank) << 32 | score) << 16 | position)
        taken = order[ragged_index(offsets[:-1], self.counts(lengths))]
        chosen = np.sort(offsets[taken >> 50] + (taken & 0xFFFF))

        row = row_of[chosen]
        if self.config.kind == "span":  # SpanBERT replaces a span as a whole
            kind_keys = row_keys(MASK_KIND, self.seed, self.phase, epochs, rows)
            kind = mix(mix(score[chosen].astype(np.int64) ^ kind_keys[0][row]) ^ kind_keys[1][row])
        else:
            kind = self._numbers(MASK_KIND, epochs, rows, row, position[chosen])
        tokens[chosen[kind < self._mask_below]] = self.mask_id
        at_random = (kind >= self._mask_below) & (kind < self._random_below)
        where, row = chosen[at_random], row[at_random]
        draw = self._numbers(MASK_TOKEN, epochs, rows, row, position[where])
        tokens[where] = self.ordinary[below(draw, len(self.ordinary))]
        return chosen

    def _numbers(
        self,
        stream: int,
        epochs: np.ndarray,
        rows: np.ndarray,
        row: np.ndarray,
        position: np.ndarray,
    ) -> np.ndarray:
        return token_numbers(stream, self.seed, self.phase, epochs, rows, row, position)

    def _word_starts(self, tokens: np.ndarray, structural: np.ndarray) -> np.ndarray:
        """Whether a word starts at each token; the first one does, being [CLS]."""
        starts = self.word_start[tokens] | structural
        starts[1:] |= structural[:-1]  # a segment may begin inside a word that was cut
        return starts

    def _span_scores(
        self, tokens: np.ndarray, structural: np.ndarray, score: np.ndarray
    ) -> np.ndarray:
        """Each word may start a span of 1 to span_max words; a token takes its lowest span's score.

        Taking spans in the order of their scores until the count is met is SpanBERT's procedure,
        with all rows at once. Span lengths follow the geometric distribution cut at span_max
        (mean 3.8 for 0.2 and 10, as published).
        """
        starts = self._word_starts(tokens, structural)
        places = np.flatnonzero(starts)
        words = score[places]
        draw = mix(words ^ np.uint32(SPAN_LENGTH))
        length = np.ones(len(places), np.int32)
        for edge in self._span_edges:
            length += draw >= edge
        # Spans end with their segment, at the next structural token; one of those is no span.
        ends = np.flatnonzero(structural[places])
        count = np.diff(ends, append=len(places))
        np.minimum(length, np.repeat(ends + count, count) - np.arange(len(places)), out=length)
        length[ends] = 0
        best = words.copy()
        for step in range(1, min(self.config.span_max, len(places))):
            covered = np.where(length[:-step] > step, words[:-step], np.uint32(MASK))
            np.minimum(best[step:], covered, out=best[step:])
        return best[np.cumsum(starts) - 1]
