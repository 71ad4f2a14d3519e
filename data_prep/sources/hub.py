"""Hugging Face data sets: by name, or local parquet, arrow, JSON lines and text in their shape."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from configs.errors import UserError
from configs.schema import SourceConfig
from data_prep.sources.base import (
    RANGE_BYTES,
    SMALL_UNIT,
    Document,
    Piece,
    Range,
    Source,
    cut_bytes,
    hash_files,
)
from data_prep.sources.books import book_documents
from data_prep.sources.encoding import Tally, utf8
from data_prep.sources.hub_files import SUFFIXES, resolve
from data_prep.sources.prose import paragraphs_of
from data_prep.sources.streams import can_cut, open_raw, reading
from data_prep.sources.text import json_rows, own_lines, windows, windows_of_rows

ROWS = 8192  # read at a time


class HubSource(Source):
    """Rows of a data set. A document is a row (file), chapters of it, or windows over rows."""

    suffixes = SUFFIXES
    cuts = ("file", "chapter", "window", "rows")
    looks_like = (
        "a data set's name on the hub, or a folder or glob of parquet, arrow, jsonl or text files"
    )

    def __init__(self, config: SourceConfig) -> None:
        super().__init__(config)
        self._files: list[str] | None = None

    def plan(self) -> list[tuple[list[Piece], int]]:
        units: list[tuple[list[Piece], int]] = []
        for file in self.tables():
            if file.lower().endswith(".parquet"):
                units += _parquet_plan(file, self.config)
            elif file.lower().endswith(".arrow"):
                units += _arrow_plan(file, self.config)
            elif can_cut(file):
                units += cut_bytes(Path(file), RANGE_BYTES)
            else:
                units.append(([Piece(file)], _size(file) * 3))
        return units

    def tables(self) -> list[str]:
        """The data set's files."""
        if self._files is None:
            self._files = resolve(self.config)
        return self._files

    def hashes(self, paths: Sequence[str]) -> dict[str, str]:
        remote = [path for path in paths if "://" in path]
        known = hash_files([path for path in paths if "://" not in path])
        if remote:
            from huggingface_hub import HfFileSystem

            files = HfFileSystem()
            for path in remote:  # the hub's own content hash
                info = files.info(path)
                known[path] = str((info.get("lfs") or {}).get("sha256") or info["blob_id"])
        return known

    def documents(self, unit: Range, tally: Tally) -> Iterator[Document]:
        cut, sentences = self.config.document, self.config.window_sentences
        for piece in unit.pieces:
            name = self.id_of(piece)
            texts = self._rows(piece, tally, name)
            if cut == "rows":
                yield from windows_of_rows(texts, sentences, name)
                continue
            for number, text in enumerate(texts):
                found = False
                for document in _row_documents(text, f"{name}:{number}", cut, sentences):
                    found = True
                    yield document
                if not found:
                    tally.dropped["empty row"] += 1

    def _rows(self, piece: Piece, tally: Tally, name: str) -> Iterator[str]:
        """The text of each row, "" where there is none."""
        column = self.config.text_column
        file_name = Path(piece.path).name.lower()
        if file_name.endswith(".parquet"):
            with _table(piece.path) as file:
                table = pq.ParquetFile(file)
                groups = list(range(piece.start, piece.end))
                for batch in table.iter_batches(ROWS, groups, [column], use_threads=False):
                    yield from _strings(batch.column(0), tally, name)
        elif file_name.endswith(".arrow"):
            with _table(piece.path) as file:
                for number, batch in enumerate(_arrow_batches(file)):
                    if number >= piece.end:
                        break
                    if number >= piece.start:
                        texts = batch.column(batch.schema.get_field_index(column))
                        yield from _strings(texts, tally, name)
        elif ".json" in file_name:
            for _, text in json_rows(piece, column, tally, name):
                yield text
        else:
            yield from own_lines(piece, tally, name)


def _row_documents(text: str, name: str, cut: str, sentences: int) -> Iterator[Document]:
    if cut == "chapter":
        yield from book_documents(text, name, cut, sentences)
        return
    paragraphs = paragraphs_of(text)
    if cut == "window":
        yield from windows([paragraphs], sentences, name)
    elif paragraphs:
        yield Document(name, paragraphs)


def _strings(column: Any, tally: Tally, name: str) -> Iterator[str]:
    for value in column:
        try:
            yield value.as_py() or ""
        except UnicodeDecodeError:  # writers do not check what they call a string
            yield utf8(value.as_buffer().to_pybytes(), tally, name)


@contextmanager
def _table(path: str) -> Iterator[Any]:
    """An open parquet or arrow file; what a damaged one raises becomes a UserError."""
    with reading(path), open_raw(path) as file:
        try:
            yield file
        except pa.ArrowException as error:
            raise UserError(f"{path}: cannot be read ({error})", "it may be cut off") from error


def _size(path: str) -> int:
    if "://" in path:
        from huggingface_hub import HfFileSystem

        return int(HfFileSystem().info(path)["size"])
    return Path(path).stat().st_size


def _check_column(
    names: Sequence[str], types: Sequence[Any], path: str, config: SourceConfig
) -> None:
    is_text = (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view)
    strings = [name for name, kind in zip(names, types) if any(is_(kind) for is_ in is_text)]
    if config.text_column not in names:
        raise UserError(
            f"{path}: no column {config.text_column!r}",
            f"set sources.N.text_column to one of: {', '.join(strings) or 'none holds text'}; or"
            " leave this file out: name the others in sources.N.path",
        )
    if config.text_column not in strings:
        kind = types[list(names).index(config.text_column)]
        raise UserError(
            f"{path}: column {config.text_column!r} holds {kind}, not text",
            f"set sources.N.text_column to a column of strings: {', '.join(strings) or 'there is none'}",
        )


def _parquet_plan(path: str, config: SourceConfig) -> list[tuple[list[Piece], int]]:
    units: list[tuple[list[Piece], int]] = []
    with _table(path) as file:
        table = pq.ParquetFile(file)
        schema = table.schema_arrow
        _check_column(schema.names, schema.types, path, config)
        column = [
            i for i in range(len(table.schema)) if table.schema.column(i).path == config.text_column
        ][0]
        start = size = 0
        for group in range(table.metadata.num_row_groups):
            size += table.metadata.row_group(group).column(column).total_uncompressed_size
            if size >= SMALL_UNIT or group + 1 == table.metadata.num_row_groups:
                units.append(([Piece(path, start, group + 1)], size))
                start, size = group + 1, 0
    return units


def _arrow_batches(file: Any) -> Iterator[Any]:
    try:
        yield from pa.ipc.open_stream(file)
    except pa.ArrowInvalid:
        file.seek(0)
        reader = pa.ipc.open_file(file)
        for number in range(reader.num_record_batches):
            yield reader.get_batch(number)


def _arrow_plan(path: str, config: SourceConfig) -> list[tuple[list[Piece], int]]:
    units: list[tuple[list[Piece], int]] = []
    start = size = number = 0
    with _table(path) as file:
        for batch in _arrow_batches(file):
            if not number:
                _check_column(batch.schema.names, batch.schema.types, path, config)
            number += 1
            size += batch.nbytes
            if size >= SMALL_UNIT:
                units.append(([Piece(path, start, number)], size))
                start, size = number, 0
    if number > start:
        units.append(([Piece(path, start, number)], size))
    return units
