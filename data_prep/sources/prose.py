"""Paragraphs of a text whose form is not known: wrapped lines, or a paragraph a line."""

from __future__ import annotations

import re

from data_prep.sentences import PROSE_END

_DOTTED_TITLE = re.compile(r"[A-Z]\w*(?: \w+){0,2}\.")
LONGEST_TITLE = 60  # characters of a line that may be a title


def is_wrapped(text: str) -> bool:
    """Whether lines were broken at a column, so that they must be joined."""
    lines = text[:100_000].split("\n")
    inner = [len(a) for a, b in zip(lines, lines[1:]) if a.strip() and b.strip()]
    fit = sum(40 <= length <= 100 for length in inner)
    return len(inner) >= 8 and fit * 2 > len(inner)


def paragraphs_of(text: str) -> list[str]:
    """Paragraphs of a row's text; headings and list lines among them are left out."""
    if is_wrapped(text):
        from data_prep.sources.books import chapters

        return [paragraph for chapter in chapters(text) for paragraph in chapter]
    lines = [" ".join(line.split()) for line in text.split("\n")]
    lines = [line for line in lines if line]
    return without_titles(lines) if len(lines) > 1 else lines


def without_titles(lines: list[str], dotted: bool = False) -> list[str]:
    """Lines that are no section titles: long ones, and those with a sentence's end. dotted: titles
    may have a full stop ("Early life."), as older WikiExtractors put it."""
    return [
        line
        for line in lines
        if len(line) >= LONGEST_TITLE
        or (
            PROSE_END.search(line)
            and not line.startswith("==")
            and not (dotted and _DOTTED_TITLE.fullmatch(line))
        )
    ]
