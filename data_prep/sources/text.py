"""Plain text: files of paragraphs, and files with one sentence a line."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any

from configs.errors import UserError
from data_prep.sources.base import (
    RANGE_BYTES,
    Document,
    Piece,
    Range,
    Source,
    cut_bytes,
    group_files,
)
from data_prep.sources.encoding import NO_TEXT, Tally, decode, whole_characters
from data_prep.sources.streams import Chunks, can_cut, lines_of, text_chunks

TEXT_SUFFIXES = tuple(
    ending + packed for ending in (".txt", ".text") for packed in ("", ".gz", ".zst", ".bz2", ".xz")
)
LARGEST_DOCUMENT = 48 << 20  # keeps a worker below 1 GiB


class LineSource(Source):
    """Files read line by line in units that cut large files at any byte."""

    suffixes = TEXT_SUFFIXES
    looks_like = "text files (.txt, .gz, .zst, .bz2, .xz)"

    def plan(self) -> list[tuple[list[Piece], int]]:
        units: list[tuple[list[Piece], int]] = []
        small = []
        for file in self.files():
            whole = not can_cut(file) or file.suffix.lower() == ".bz2"
            if not whole and file.stat().st_size > RANGE_BYTES:
                units += cut_bytes(file, RANGE_BYTES)
            else:
                small.append(file)
        return units + group_files(small)


def groups_of_lines(piece: Piece, tally: Tally, name: str) -> Iterator[list[str]]:
    """Lines between blank lines; a group belongs to the piece that owns the blank line before it.

    Raises:
        UserError: more than LARGEST_DOCUMENT bytes without a blank line.
    """
    lines: list[str] = []
    ours = piece.start == 0
    read = 0  # bytes since the last blank line, whether lines end in them or not

    def counted() -> Chunks:
        nonlocal read
        for chunk, own in text_chunks(piece, tally, name):
            read += len(chunk)
            if ours and read > LARGEST_DOCUMENT:
                raise UserError(
                    f"{piece.path}: {LARGEST_DOCUMENT >> 20} MB without a blank line",
                    "put blank lines between paragraphs (kind: text) or documents (kind: "
                    "sentences); without any, kind: sentences reads document: rows, and kind: hub "
                    "takes each line for a document",
                )
            yield chunk, own

    for raw, own in lines_of(counted(), piece.start == 0):
        if not (ours or own):
            return
        text = " ".join(decode(raw, tally, name).split())
        if text:
            if ours:
                lines.append(text)
            continue
        if lines:
            yield lines
            lines = []
        ours, read = own, 0
    if lines:
        yield lines


def own_lines(piece: Piece, tally: Tally, name: str) -> Iterator[str]:
    """The lines that start in a piece, empty ones too."""
    for raw, own in lines_of(text_chunks(piece, tally, name), piece.start == 0):
        if not own:
            return
        yield decode(raw, tally, name)


def json_rows(
    piece: Piece, key: str, tally: Tally, name: str
) -> Iterator[tuple[dict[str, Any], str]]:
    """The objects, one a line, that start in a piece, and the text of each: "" for null.

    Raises:
        UserError: a line is no JSON object with this key, or its value is no string.
    """
    for line in own_lines(piece, tally, name):
        if not line.strip():
            continue
        remedy = (
            "kind: hub reads the key that sources.N.text_column names; the file may also be cut off"
        )
        if line.lstrip().startswith("["):
            remedy = f"of an array, jq -c '.[]' {piece.path} > NEW.jsonl makes one object a line"
        try:
            row = json.loads(line)
            text = row[key]
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise UserError(
                f"{piece.path}: a line is not JSON with a {key!r}: {line[:60]!r}", remedy
            ) from error
        if not isinstance(text, str | None):
            raise UserError(
                f"{piece.path}: {key!r} is no text but {str(text)[:60]} in the line {line[:60]!r}",
                remedy,
            )
        yield row, whole_characters(text or "", tally, name)


def windows(parts: Iterable[list[str]], sentences: int, name: str) -> Iterator[Document]:
    """Documents of about `sentences` sentences out of runs of paragraphs."""
    number = count = 0
    held: list[str] = []
    for part in parts:
        for text in part:
            held.append(text)
            count += sentence_count(text)
            if count >= sentences:
                yield Document(f"{name}#{number}", held)
                held, count = [], 0
                number += 1
    if held:
        yield Document(f"{name}#{number}", held)


def windows_of_rows(texts: Iterable[str], sentences: int, name: str) -> Iterator[Document]:
    """A row is a sentence; so many of them are a document, and an empty row ends one (B03: no
    other character ends a sentence)."""
    held: list[str] = []
    number = 0
    for text in texts:
        text = " ".join(text.split())
        if text:
            held.append(text)
        if held and (not text or len(held) == sentences):
            yield Document(f"{name}#{number}", held, presplit=True)
            held = []
            number += 1
    if held:
        yield Document(f"{name}#{number}", held, presplit=True)


def sentence_count(text: str) -> int:
    """About how many sentences a paragraph has; enough to cut windows."""
    return text.count(". ") + text.count("? ") + text.count("! ") + 1


class SentencesSource(LineSource):
    """One sentence a line, a blank line between documents: BERT's own input format. Windows (or
    rows) are pieces of such documents, and need no blank lines."""

    cuts = ("file", "window", "rows")

    def documents(self, unit: Range, tally: Tally) -> Iterator[Document]:
        for piece in unit.pieces:
            name = self.id_of(piece)
            if self.config.document in ("window", "rows"):
                rows = own_lines(piece, tally, name)
                yield from windows_of_rows(rows, self.config.window_sentences, name)
                continue
            groups = groups_of_lines(piece, tally, name)
            for number, lines in enumerate(groups):  # no `#`: the next does not go on with this
                yield Document(f"{name}/{number}", lines, presplit=True)


class TextSource(LineSource):
    """Text with blank lines between paragraphs. A document is a file, or a window of one."""

    def plan(self) -> list[tuple[list[Piece], int]]:
        if self.config.document == "window":
            return super().plan()
        for file in self.files():
            if file.stat().st_size > LARGEST_DOCUMENT:
                raise UserError(
                    f"{file}: a document of {file.stat().st_size >> 20} MB",
                    "a whole file is one document here; set document: window",
                )
        return group_files(self.files())

    def documents(self, unit: Range, tally: Tally) -> Iterator[Document]:
        for piece in unit.pieces:
            name, binary = self.id_of(piece), tally.dropped[NO_TEXT]
            paragraphs = ([" ".join(lines)] for lines in groups_of_lines(piece, tally, name))
            if self.config.document == "window":
                yield from windows(paragraphs, self.config.window_sentences, name)
                continue
            whole = [text for part in paragraphs for text in part]
            if whole:
                yield Document(name, whole)
            elif tally.dropped[NO_TEXT] == binary:
                tally.dropped["empty file"] += 1
