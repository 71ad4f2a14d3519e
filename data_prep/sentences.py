"""Sentence boundaries by rule: fast, deterministic, and the pieces join to the text again."""

from __future__ import annotations

import re
from collections.abc import Iterable

ABBREVIATIONS = frozenset(
    ["mr", "mrs", "ms", "dr", "prof", "st", "sr", "jr", "vs", "etc", "approx", "cf", "e.g", "i.e", "fig", "no", "vol", "pp", "ed", "eds", "al", "inc", "ltd", "co"]
)
_CANDIDATE = re.compile(r"[.!?…]+[\"'”’)\]]*\s+")


class Splitter:
    """Cuts paragraphs into sentences. abbreviations: added to the built-in ones, with or without
    their full stop, any case."""

    def __init__(self, abbreviations: Iterable[str] = (), language: str = "en") -> None:
        self.abbreviations = ABBREVIATIONS | {
            word.strip().rstrip(".").lower() for word in abbreviations
        }
        self.language = language

    def spans(self, paragraph: str) -> list[tuple[int, int]]:
        """[start, end) of each sentence; what lies between two is white space."""
        found = []
        start = len(paragraph) - len(paragraph.lstrip())
        for match in _CANDIDATE.finditer(paragraph):
            end = match.end()
            before = paragraph[start : match.start()].rsplit(None, 1)[-1:]
            if match[0][0] == "." and before:
                word = before[0].lstrip("(\"'“‘[").lower()
                if (
                    word in self.abbreviations
                    or (len(word) == 1 and word.isalpha())
                    or paragraph[end : end + 1].islower()
                ):
                    continue
            text_end = match.start() + len(match[0].rstrip())
            if end < len(paragraph):
                found.append((start, text_end))
                start = end
        end = len(paragraph.rstrip())
        if end > start:
            found.append((start, end))
        return found

    def split(self, paragraph: str) -> list[str]:
        """The sentences of a paragraph, without the white space between them."""
        return [paragraph[a:b] for a, b in self.spans(paragraph)]
