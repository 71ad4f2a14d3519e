"""Books: what Gutenberg added is gone, headings too, and the prose of every script stays."""

from __future__ import annotations

import gzip
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from configs.schema import SourceConfig
from data_prep.sources import Document, Tally, open_source
from data_prep.sources.books import chapters, strip_gutenberg
from data_prep.sources.prose import paragraphs_of
from data_prep.wikitext import Cleaner

PACK = {"": bytes, ".gz": gzip.compress, ".zst": zstandard.ZstdCompressor().compress}


def read(path: Path, **keys: Any) -> list[Document]:
    source = open_source(SourceConfig(kind="books", path=str(path), **keys))
    tally = Tally()
    return [d for u in source.ranges() for d in source.documents(u, tally)]


LINE = "It was the best of times, it was the worst of times, it was the age of\nwisdom, it was the age of _foolishness_"
GUTENBERG = f"""The Project Gutenberg EBook of A Book, by Nobody

Title: A Book

*** START OF THIS PROJECT GUTENBERG EBOOK A LONG
TITLE OVER TWO LINES ***




Produced by Some Volunteers and the Online
Distributed Proofreading Team

A BOOK

by

Nobody

CONTENTS

I. The First Part          1
II. The Second Part       22

[Illustration: A house
in the fog]

CHAPTER I.--THE FIRST PART

{LINE}.

"Stop!" she cried.[1]

       *       *       *       *       *

{LINE};
and so on.

CHAPTER II

{LINE}.

[Footnote 1: Not really.]




End of the Project Gutenberg EBook of A Book, by Nobody

*** END OF THIS PROJECT GUTENBERG EBOOK A BOOK ***

***** This file should be named 1-0.txt *****
Gutenberg licence, very long.
"""
CLEAN = " ".join(LINE.split()).replace("_", "")


@pytest.mark.parametrize("ends", ["\n", "\r\n"])
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "latin-1", "utf-16"])
def test_a_gutenberg_book(tmp_path, ends, encoding) -> None:
    data = (
        GUTENBERG.replace("fog", "fôg").replace("best", "bést").replace("\n", ends).encode(encoding)
    )
    for packed, pack in PACK.items():
        (tmp_path / f"1-0.txt{packed}").write_bytes(pack(data))
    documents = read(tmp_path, document="chapter")
    best = CLEAN.replace("best", "bést")
    one, two = [f"{best}.", '"Stop!" she cried.', f"{best}; and so on."], [f"{best}."]
    assert [d.paragraphs for d in documents] == [one, two] * 3
    whole = read(tmp_path / "1-0.txt")
    assert [d.paragraphs for d in whole] == [one + two]


@settings(max_examples=60, deadline=None)
@given(
    size=st.integers(1, 400),
    licence=st.sampled_from([0, 40, 400]),
    last_words=st.sampled_from(["", "End of the Project Gutenberg EBook of A Book, by Nobody\n\n"]),
    this=st.sampled_from(["THE", "THIS"]),
)
def test_the_licence_goes_however_short_the_book_is(size, licence, last_words, this) -> None:
    body = "".join(f"Sentence {n} of the book is here.\n\n" for n in range(size))
    text_ = (
        f"Header\n*** START OF {this} PROJECT GUTENBERG EBOOK A BOOK ***\n\n{body}{last_words}"
        f"*** END OF {this} PROJECT GUTENBERG EBOOK A BOOK ***\n\n"
        + "A line of the licence of Project Gutenberg.\n"
        * licence
    )
    assert strip_gutenberg(text_).strip() == body.strip()


@pytest.mark.parametrize("count", [2, 3])
def test_books_behind_one_another_are_all_kept(count) -> None:
    """Of the text between them, from one's end to the next one's start, nothing."""
    bodies = [f"Sentence one of book {n}.\n\nAnd sentence two of it." for n in range(count)]
    text_ = "".join(
        f"Header {n}\n*** START OF THE PROJECT GUTENBERG EBOOK A BOOK ***\n\n{body}\n\n"
        f"*** END OF THE PROJECT GUTENBERG EBOOK A BOOK ***\n\n{'A licence. ' * 4000}\n"
        for n, body in enumerate(bodies)
    )
    assert strip_gutenberg(text_).split() == "\n\n".join(bodies).split()


def test_a_book_may_speak_of_project_gutenberg() -> None:
    text_ = "One.\n\nEnd of Project Gutenberg is what he called it.\n\n" + "More of it.\n\n" * 20
    assert strip_gutenberg(text_) == text_
    assert strip_gutenberg(f"{text_}End of Project Gutenberg's A Book\n") == text_


def test_old_headers_and_books_without_any() -> None:
    text_ = (
        "Header\n*END THE SMALL PRINT! FOR PUBLIC DOMAIN ETEXTS*Ver.04.29.93*END*\n\nThe text.\n"
    )
    assert strip_gutenberg(text_).strip() == "The text."
    assert strip_gutenberg("Just text.\n") == "Just text.\n"


def test_what_looks_like_a_heading_but_is_not() -> None:
    kept = ['"NO!"', "I. was a letter to him.", "“I--”", "She said:", "Civil.", "He came[2]."]
    assert next(chapters("\n\n".join(kept))) == [*kept[:-1], "He came."]


# Scripts without small letters, and some with.
SENTENCES = [
    "他走了。", "她问：“你去哪里？”", "他在IBM工作！", "他说：", "川は海へ行った。", "「そうだ」と彼は言った。",
    "ذهب إلى البحر.", "إلى أين تذهب؟", "הוא הלך אל הים.", "वह समुद्र की ओर गया।", "그는 바다로 갔다.",
    "เขาไปทะเลแล้ว…", "უცნობმა გაიარა.", "Он ушёл к морю.", "He went to the sea.", "Did he, of the BBC?",
]  # fmt: skip


@pytest.mark.parametrize("text", SENTENCES)
@pytest.mark.parametrize("breaks", ["\n\n", "\n\n\n\n\n"])
def test_short_paragraphs_of_every_script_are_prose(text: str, breaks: str) -> None:
    """Scripts without small letters were all taken for titles in capitals."""
    paragraphs = [text] * 30
    book = breaks.join(paragraphs)
    assert list(chapters(book)) == [paragraphs]
    assert paragraphs_of(book) == paragraphs
    assert Cleaner().paragraphs(book) == paragraphs


@pytest.mark.parametrize(
    "title", ["THE SEA", "THE SEA,\nOR NOT", "К МОРЮ", "第一章", "The sea", "1914", "IX"]
)
def test_titles_are_left_out(title: str) -> None:
    paragraphs = ["He went to the sea."] * 20
    found = list(chapters("\n\n\n\n".join([*paragraphs, title, *paragraphs])))
    assert [p for chapter in found for p in chapter] == paragraphs * 2


@pytest.mark.parametrize(
    ("between", "count"), [("THE SEA", 2), ("* * *", 1), ("----", 1), ("第一", 1)]
)
def test_only_a_title_in_capitals_starts_a_story(between: str, count: int) -> None:
    paragraphs = ["He went to the sea."] * 20
    found = list(chapters("\n\n\n\n\n".join([*paragraphs, between, *paragraphs])))
    assert len(found) == count


def test_raw_gutenberg_files_equal_the_cleaned_ones(real_data) -> None:
    """Header, licence and footer of four untouched files; the same books were cleaned by hand."""
    for number, raw in (
        ("00345", "345-8"),
        ("00035", "35-0"),
        ("04217", "4217-0"),
        ("00084", "84-0"),
    ):
        ours = read(real_data / f"books-raw/{raw}.txt.gz")
        clean = read(next((real_data / "books").glob(f"{number}_*")))
        mine, theirs = (Counter(d[0].paragraphs) for d in (ours, clean))
        shared = (mine & theirs).total()
        assert shared >= 0.995 * max(mine.total(), theirs.total())
        assert not [p for p in mine if "Gutenberg" in p or "*** " in p]


def test_real_books_have_chapters_and_no_headings(real_data) -> None:
    documents = read(next((real_data / "books").glob("01400_*")), document="chapter")
    assert len(documents) == 59  # Great Expectations
    documents = read(next((real_data / "books").glob("00011_*")), document="chapter")
    assert len(documents) == 12  # Alice
    for document in documents:
        assert not [
            p for p in document.paragraphs if p.lower().startswith(("chapter ", "contents"))
        ]
