"""Downstream data from local files (plain or .gz), as lists of plain dicts.

Every reader checks what it returns and names file and line of a fault: nothing is guessed and no
row is dropped in silence.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import sys
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from configs import UserError, say
from pretrain.downstream.kinds import LABELLED, Row, find, pick
from pretrain.downstream.tasks import TASKS, Task


def read_text(file: Path) -> str:
    """UTF-8 text of a plain or gzip file without its byte order mark; UserError otherwise."""
    try:
        raw = gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"{file}: byte {error.start} is not UTF-8", "re-encode the file") from None
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"{file}: {error}", "check the path, or copy the file again") from None


def lines_of(text: str) -> list[str]:
    """Lines ended by LF or CRLF alone: U+2028 and the like belong to the text (B03)."""
    lines = [line.removesuffix("\r") for line in text.split("\n")]
    return lines[:-1] if lines and not lines[-1] else lines


def read_glue_tsv(file: Path, task: Task, skip_bad: bool = False) -> list[Row]:
    """A GLUE TSV, read without quoting, with or without header.

    Quotes are text in these files: a CSV reader that honours them joins lines and loses rows.

    Raises:
        UserError: a row has another number of columns (unless `skip_bad`, which counts them).
    """
    lines = lines_of(read_text(file))
    if not lines:
        raise UserError(f"{file}: empty", "copy it again")
    header = lines[0].split("\t")
    start = 1
    if not any(name in header for name in task.first):
        if len(header) != len(task.headerless):
            raise UserError(
                f"{file}: line 1 has none of the columns {', '.join(task.first)}",
                "restore the header line",
            )
        header, start = list(task.headerless), 0
    _check_header(header, file)
    rows, bad = [], 0
    for number, line in enumerate(lines[start:], start + 1):
        cells = line.split("\t")
        if len(cells) != len(header):
            if not skip_bad:
                raise UserError(
                    f"{file}: line {number} has {len(cells)} columns, not {len(header)}",
                    "mend the line, or pass --skip-bad-rows to leave such lines out",
                )
            bad += 1
            continue
        rows.append(dict(zip(header, cells)))
    if bad:
        say(f"{file}: {bad} lines with another number of columns left out")
    return rows


def read_csv(file: Path) -> list[Row]:
    """A quoted CSV (or TSV by suffix) with a header, blank lines aside; UserError for broken quotes or
    ragged rows."""
    delimiter = "\t" if ".tsv" in file.suffixes else ","
    csv.field_size_limit(sys.maxsize)  # a cell is a text of any length
    reader = csv.reader(io.StringIO(read_text(file), newline=""), delimiter=delimiter, strict=True)
    rows: list[Row] = []
    header: list[str] = []
    try:
        for cells in reader:
            if not cells:
                continue
            if not header:
                header = cells
                _check_header(header, file)
            elif len(cells) != len(header):
                raise UserError(
                    f"{file}: line {reader.line_num} has {len(cells)} columns, not {len(header)}",
                    "quote cells that hold the delimiter",
                )
            else:
                rows.append(dict(zip(header, cells)))
    except csv.Error as error:
        raise UserError(
            f"{file}: line {reader.line_num}: {error}", "close the quotes, double those inside"
        ) from None
    return rows


def _check_header(header: list[str], file: Path) -> None:
    if twice := [name for name in header if name and header.count(name) > 1]:
        raise UserError(f"{file}: two columns are called {twice[0]!r}", "rename one of them")


def read_jsonl(file: Path) -> list[Row]:
    """One JSON object a line; UserError names the line."""
    rows = []
    for number, line in enumerate(lines_of(read_text(file)), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise UserError(f"{file}: line {number}: {error}", "one JSON object a line") from None
        if not isinstance(row, dict):
            raise UserError(f"{file}: line {number} is no JSON object", "one JSON object a line")
        rows.append(row)
    return rows


def read_conll(file: Path) -> list[Row]:
    """Words (first column) and tags (last) of a CoNLL file, as {"tokens", "tags"} in IOB2.

    A sentence ends at a line without visible characters; -DOCSTART- lines and `# ` comments go.
    """
    rows: list[Row] = []
    words: list[str] = []
    tags: list[str] = []

    def close() -> None:
        if words:
            rows.append(
                {"tokens": words.copy(), "tags": to_iob2(tags, f"{file}, sentence {len(rows) + 1}")}
            )
        words.clear()
        tags.clear()

    for number, line in enumerate(lines_of(read_text(file)), 1):
        if not line.strip():
            close()
            continue
        cells = line.split("\t") if "\t" in line else line.split(" ")
        comment = cells[0] == "#" and not _is_tag(cells[-1].strip())  # the word "#" has a tag
        if cells[0] == "-DOCSTART-" or comment:
            continue
        if len(cells) < 2 or not cells[0] or not cells[-1].strip():
            raise UserError(
                f"{file}: line {number} has no tag: {line!r}", "word, blank or tab, tag"
            )
        words.append(cells[0])
        tags.append(cells[-1].strip())
    close()
    return rows


def _is_tag(text: str) -> bool:
    mark, _, kind = text.partition("-")
    return text == "O" or (mark in ("B", "I", "E", "S", "L", "U") and bool(kind))


def to_iob2(tags: list[str], where: str) -> list[str]:
    """IOB1, IOB2 or IOBES tags as IOB2: every chunk starts with B-."""
    result: list[str] = []
    before = "O"
    for tag in tags:
        kind = tag.partition("-")[2]
        if not _is_tag(tag):
            raise UserError(f"{where}: tag {tag!r}", "expected O, B-TYPE or I-TYPE")
        if tag == "O":
            result.append(tag)
        elif (
            tag[0] in "BSU"
            or before == "O"
            or before.partition("-")[2] != kind
            or before[0] in "ESLU"
        ):
            result.append(f"B-{kind}")
        else:
            result.append(f"I-{kind}")
        before = tag
    return result


def check_columns(rows: list[Row], task: Task, origin: str, split: str) -> None:
    """Every row has its text and, where a grid learns from it or chooses by it, its label, and no column
    is two of them.

    Raises:
        UserError: names `origin`, the first such example, its columns and the option that names one.
    """
    if task.kind == "question":  # its rows have been put together by read_squad
        return
    named = {"first": task.first} if task.kind != "choice" else {}  # endings have fixed names
    # Those may be there or not.
    optional = task.kind == "choice" or task.second == TASKS["classify"].second
    if task.second and not optional:
        named["second"] = task.second
    if split in LABELLED:
        named["label"] = task.label
    for number, row in enumerate(rows, 1):
        for option, names in named.items():
            if not find(row, names):
                raise UserError(
                    f"{origin}: example {number} has none of the columns {', '.join(names)}",
                    f"pass --{option}-column NAME; its columns: {', '.join(row)}",
                )
        used = [c for c in (find(row, n) for n in (task.first, task.second, task.label)) if c]
        if twice := [column for column in used if used.count(column) > 1]:
            raise UserError(
                f"{origin}: column {twice[0]!r} is asked for twice, as text and as label or other text",
                "name another with --first-column, --second-column or --label-column;"
                f" its columns: {', '.join(row)}",
            )


def check_tags(rows: list[Row], task: Task, origin: str) -> None:
    """Every word has its tag, and the tags become IOB2; UserError names the sentence."""
    check_columns(rows, task, origin, "train")
    for number, row in enumerate(rows, 1):
        where = f"{origin}, sentence {number}"
        words, tags = pick(row, task.first, where), pick(row, task.label, where)
        for values in (words, tags):
            if not isinstance(values, list) or not all(isinstance(v, str) for v in values):
                raise UserError(
                    f"{where}: {values!r:.60} is no list of texts",
                    'expected {"tokens": ["in", "Bonn"], "tags": ["O", "B-LOC"]}',
                )
        if len(words) != len(tags):
            raise UserError(f"{where}: {len(words)} words, {len(tags)} tags", "mend the row")
        row[str(find(row, task.label))] = to_iob2(tags, where)


def read_squad(file: Path) -> list[Row]:
    """SQuAD 1.1 or 2.0 JSON as {"id", "context", "question", "answers": [(text, start)]}.

    No answers are [] for a question that is impossible, None for one whose answers are withheld.

    Raises:
        UserError: an answer does not stand in its context at its offset; names the question's id.
    """
    try:
        articles = json.loads(read_text(file))["data"]
        rows = [
            {
                "id": str(qa["id"]),
                "context": _string(paragraph["context"]),
                "question": _string(qa["question"]).strip(),
                "answers": _answers(qa),
            }
            for article in articles
            for paragraph in article["paragraphs"]
            for qa in paragraph["qas"]
        ]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"{file}: not SQuAD JSON ({error!r})", "expected data/paragraphs/qas"
        ) from None
    check_answers(rows, str(file))
    return rows


def _answers(qa: Row) -> list[tuple[str, int]] | None:
    given = [] if qa.get("is_impossible") else qa.get("answers")
    if given is None:
        return None
    return [(_string(answer["text"]), int(answer["answer_start"])) for answer in given]


def _string(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is no text")
    return value


def check_answers(rows: Iterable[Row], origin: str) -> None:
    """Every answer stands in its context where its offset says; UserError names the question."""
    for row in rows:
        for text, start in row["answers"] or ():
            there = row["context"][start : start + len(text)] == text
            if not text or start < 0 or not there:  # a negative index counts from the end
                raise UserError(
                    f"{origin}: question {row['id']}: answer {text!r} is not in the context at {start}",
                    "mend its answer_start (characters, not bytes)",
                )
