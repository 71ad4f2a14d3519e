"""Text as a trainer of vocabularies wants it: without words that hang it, and twice if need be."""

from __future__ import annotations

import errno
import re
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from tokenizers import Tokenizer as Backend

from configs import UserError, say

SHOWN = 40  # characters of the first word that was left out


def without_long_words(texts: Iterable[str], steps: Backend, longest: int) -> Iterator[str]:
    """The texts, with a blank for each word of more than `longest` characters (base64, DNA); says
    at the end how many there were. Text without any passes unchanged.

    The trainers' merges take time with the square of a word's length: 200,000 letters half a
    minute, 5 million a day. A word is what the normaliser and pre-tokeniser of `steps` make one (a
    backend that is not the one in training: that is locked).
    """
    run = re.compile(rf"\S{{{longest + 1},}}")
    count, first = 0, ""

    def cut(match: re.Match[str]) -> str:
        nonlocal count, first
        text = match[0]
        if steps.normalizer is not None:
            text = steps.normalizer.normalize_str(text)
        assert steps.pre_tokenizer is not None
        words = steps.pre_tokenizer.pre_tokenize_str(text)
        long = [(start, end) for _, (start, end) in words if end - start > longest]
        if not long:
            return match[0]
        count += len(long)
        first = first or text[long[0][0] : long[0][1]]
        ends = [0, *(end for _, end in long)]
        starts = [*(start for start, _ in long), len(text)]
        return " ".join(text[a:b] for a, b in zip(ends, starts))

    for text in texts:
        yield run.sub(cut, text)
    if count:
        say(
            f"vocabulary: words of more than {longest} characters left out: {count:,}, the first one of"
            f" {len(first):,}: {first[:SHOWN]}..."
        )


@contextmanager
def spooled(texts: Iterable[str]) -> Iterator[tuple[Counter[str], Iterator[str]]]:
    """How often each character is in texts, and the texts once more (from a temporary file)."""
    counts: Counter[str] = Counter()
    try:
        with tempfile.TemporaryFile(
            "w+", encoding="utf-8", errors="surrogatepass", newline="\n"
        ) as file:
            for text in texts:
                counts.update(text)
                file.write(text.replace("\n", " ") + "\n")
            file.seek(0)
            yield counts, (line.removesuffix("\n") for line in file)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT) and not error.filename:
            raise UserError(
                f"{tempfile.gettempdir()}: {error.strerror}, for a copy of the text to train on",
                "free some of it, name another folder with TMPDIR=..., or lower vocab.sample_mb",
            ) from None
        raise
