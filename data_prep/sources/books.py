"""Books as plain text, one file a book: Gutenberg's own words stripped, hard wraps joined."""

from __future__ import annotations

import re
from collections.abc import Iterator

from data_prep.sentences import PROSE_END
from data_prep.sources.base import Document, Piece, Range, Source, group_files
from data_prep.sources.encoding import Tally, decode, is_no_text
from data_prep.sources.streams import CHUNK, read_all
from data_prep.sources.text import TEXT_SUFFIXES, windows

# The title may run over two lines before the closing stars.
_START = re.compile(
    r"^[ \t]*\*{3}[ \t]*START[ \t]+OF[ \t]+(?:THE|THIS)[ \t]+PROJECT[ \t]+GUTENBERG.{0,400}?(?:\*{3}|(?=\n\s*\n))",
    re.S | re.I | re.M,
)
_SMALL_PRINT = re.compile(r"^\*END[* ]*THE SMALL PRINT!.*$", re.M)
_END = re.compile(
    r"^[ \t]*\*{3}[ \t]*END[ \t]+OF[ \t]+(?:THE|THIS)[ \t]+PROJECT[ \t]+GUTENBERG", re.I | re.M
)
_LAST_WORDS = re.compile(
    r"^[ \t]*End[ \t]+of[ \t]+(?:the[ \t]+|this[ \t]+)?Project[ \t]+Gutenberg", re.I | re.M
)
_PRODUCED = re.compile(
    r"(?:Produced|E-?text prepared|Transcribed|Scanned|This e-?text was (?:produced|prepared|typed)"
    r"|Proofread|HTML version|Transcriber'?’?s? notes?:?\b)",
    re.I,
)
_GAP = re.compile(r"(\n[ \t]*(?:\n[ \t]*)+)")
_PICTURE = re.compile(
    r"\[(?:Illustration|Picture|Frontispiece|Map|Music|Blank Page)\b[^\]]*\]", re.I
)
_JPEG = re.compile(r"\{[^{}]*\.(?:jpg|jpeg|png|gif)[^{}]*\}", re.I)
_NOTE_MARK = re.compile(r"\[(?:\d{1,4}|[a-zA-Z*†])\]|\{\d{1,4}\}")
_COLUMNS = re.compile(r"\S {3,}\S")
_NUMBER = r"(?:(?-i:[IVXLC]+)|\d+|(?:the )?(?:first|second|third|fourth|fifth|sixth|last)|one|two|three|four|five|six|seven|eight|nine|ten|eleven|twelve)"
_PART_NAME = (
    r"(?:chapter|chap\.|book|part|volume|vol\.|letter|section|act|scene|canto|stave|lecture|essay"
    r"|kapitel|teil|chapitre|livre|cap[ií]tulo|capitolo|hoofdstuk)"
)
_CHAPTER = re.compile(
    rf"(?:{_PART_NAME}\s+{_NUMBER}\b[^\n]{{0,120}}|{_PART_NAME}\s+the\s+\w+\W*[^\n]{{0,80}}"
    rf"|{_NUMBER}[.:]?|(?-i:[IVXLC]+\.[ \t]+[A-Z\"'“‘])[^\n]{{1,80}}"
    r"|(?:prologue|epilogue|preface|introduction|conclusion|foreword|afterword|appendix)[.:]?)\Z",
    re.I,
)
_SYNOPSIS = re.compile(rf"{_PART_NAME}\s+{_NUMBER}\b", re.I)
SHORTEST_CHAPTER = 12  # paragraphs before a title in capitals counts as a chapter's start
_CONTENTS = re.compile(
    r"(?:table of )?contents[.:]?(?:\s|\Z)|(?:list of )?illustrations[.:]?\Z", re.I
)
_ENTRY = re.compile(
    rf"(?:{_PART_NAME}\s+)?{_NUMBER}[.:)—-]*(?:\s|\Z)|.*(?:\.{{2,}}|\s{{2,}}|\s)[\divxlc]+\.?\Z",
    re.I,
)
_CLOSERS = "\"'”’)]_*"


def strip_gutenberg(text: str) -> str:
    """The book (or books, one behind the other) without Project Gutenberg's headers, licences and
    footer (LF line ends)."""
    start = _START.search(text[:60_000]) or _SMALL_PRINT.search(text[:60_000])
    if start:
        text = text[start.end() :]
    kept, at = [], 0
    while end := _END.search(text, at):  # in a short book the licence is most of the text
        kept.append(text[at : end.start()])
        if not (another := _START.search(text, end.end())):
            text = "\n\n".join(kept)
            break
        at = another.end()
    else:
        text = "\n\n".join([*kept, text[at:]])
    for words in _LAST_WORDS.finditer(text):
        last = "\n\n" not in text[words.start() :].strip()
        if last or words.start() >= len(text) // 2:  # before that a book may speak of it
            text = text[: words.start()]
            break
    if start:
        text = text.lstrip("\n ")
        while True:  # "Produced by ..." and transcriber's notes come first
            first, gap, rest = text.partition("\n\n")
            if not gap or not _PRODUCED.match(first.lstrip("[* \n")):
                break
            text = rest.lstrip("\n ")
    return text


def chapters(text: str) -> Iterator[list[str]]:
    """Paragraphs of each chapter of a book; headings, contents, pictures and rulers are left out."""
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    text = strip_gutenberg(text)
    if "[" in text:
        text = _PICTURE.sub("", text)
    in_contents = False
    chapter: list[str] = []
    gap = 0
    numbered = False
    for block in _GAP.split(text):
        stripped = block.strip()
        if not stripped:
            gap = max(gap, block.count("\n"))
            continue
        block, far, gap = stripped, gap >= 3, 0
        if len(block) < 200 and "[" in block:
            block = _NOTE_MARK.sub("", block).strip()
        if _CONTENTS.match(block) and len(block) < 4000:
            in_contents = True
            continue
        short = len(block) < 200
        if short and _CHAPTER.match(block):
            numbered = numbered or not in_contents
            if chapter and not in_contents:
                yield chapter
                chapter = []
            continue
        if in_contents and _is_list(block):
            continue
        if short and _is_heading(block):
            # A story's title in a book without numbered chapters: in capitals, after a wide gap.
            titled = far and not numbered and _in_capitals(block)
            if titled and len(chapter) >= SHORTEST_CHAPTER:
                yield chapter
                chapter = []
            continue
        if block.count(".--") > 1 and _SYNOPSIS.match(block):
            continue
        in_contents = False
        if paragraph := _joined(block):
            chapter.append(paragraph)
    if chapter:
        yield chapter


def _joined(block: str) -> str:
    """A paragraph as one line; "" for what is none: rulers, page numbers, tables, footnotes."""
    if not any(map(str.isalpha, block[:200])) or _is_table(block):
        return ""
    joined = " ".join(block.split()).replace("_", "")
    if "[" in joined or "{" in joined:
        joined = _NOTE_MARK.sub("", _JPEG.sub("", joined)).strip()
    return "" if joined[:9].lower() == "[footnote" else joined


def _in_capitals(block: str) -> bool:
    """Most scripts have no small letters, so a text without any may be in no capitals either."""
    capitals, letters = sum(map(str.isupper, block)), sum(map(str.isalpha, block))
    return block.upper() == block and capitals * 2 > letters


def _is_heading(block: str) -> bool:
    if _in_capitals(block):
        if block[-1] not in _CLOSERS:
            return block[-1] not in "!?"
        # Shouting inside a dialogue ends in a mark and has one line: "STOP!" she cried is mixed case.
        return block.rstrip(_CLOSERS)[-1:] not in (".", "!", "?", "-", "—", ",")
    return len(block) < 80 and "\n" not in block and not PROSE_END.search(block)


def _is_table(block: str) -> bool:
    """Most lines have columns: wide gaps inside."""
    if "   " not in block:
        return False
    lines = block.split("\n")
    return sum(bool(_COLUMNS.search(line.strip())) for line in lines) * 2 > len(lines)


def _is_list(block: str) -> bool:
    """Lines of a table of contents: numbered, or short without a sentence's end."""
    lines = [line.strip() for line in block.split("\n")]
    entries = sum(bool(_ENTRY.match(line)) or not PROSE_END.search(line) for line in lines)
    return entries * 2 > len(lines) and max(map(len, lines)) < 100


class BooksSource(Source):
    """A folder of books. A document is a book (file), a chapter, or a window of sentences."""

    suffixes = TEXT_SUFFIXES
    cuts = ("file", "chapter", "window")
    looks_like = "text files, one book each (.txt, .txt.gz, .txt.zst)"

    def plan(self) -> list[tuple[list[Piece], int]]:
        return group_files(self.files())

    def documents(self, unit: Range, tally: Tally) -> Iterator[Document]:
        for piece in unit.pieces:
            name = self.id_of(piece)
            data = read_all(piece.path)
            if is_no_text(data[:CHUNK]):
                tally.drop_file(name)
                continue
            found = False
            for document in book_documents(
                decode(data, tally, name, "books"),
                name,
                self.config.document,
                self.config.window_sentences,
            ):
                found = True
                yield document
            if not found:
                tally.dropped["book without prose"] += 1


def book_documents(text: str, name: str, cut: str, sentences: int) -> Iterator[Document]:
    """Documents of one book's text: `cut` is file, chapter or window."""
    if cut == "window":
        yield from windows(chapters(text), sentences, name)
    elif cut == "chapter":
        for number, paragraphs in enumerate(chapters(text)):
            yield Document(f"{name}#{number}", paragraphs)
    else:
        whole = [paragraph for chapter in chapters(text) for paragraph in chapter]
        if whole:
            yield Document(name, whole)
