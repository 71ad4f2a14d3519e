"""WikiExtractor output: `<doc id=... title=...>` blocks or JSON lines, plain or compressed."""

from __future__ import annotations

import html
import json
import re
from collections import Counter
from collections.abc import Iterator

from configs.errors import UserError
from data_prep.sources.base import Document, Piece, Range
from data_prep.sources.prose import without_titles
from data_prep.sources.streams import blocks_between, chunks_of, decode, lines_of
from data_prep.sources.text import LineSource, windows

_ATTRIBUTE = re.compile(r'(\w+)="(.*?)"(?=\s+\w+=|\s*$)')


class ExtractedSource(LineSource):
    """Articles that WikiExtractor has already turned to text."""

    suffixes = ("",)
    looks_like = "WikiExtractor output (wiki_00 files with <doc ...> blocks, or its --json lines)"

    def documents(self, unit: Range, dropped: Counter[str]) -> Iterator[Document]:
        for piece in unit.pieces:
            first = next((chunk for chunk, _ in chunks_of(Piece(piece.path))), b"").lstrip()
            if first.startswith(b"<doc "):
                found = self._blocks(piece)
            elif first.startswith(b"{"):
                found = self._json_lines(piece)
            else:
                raise UserError(
                    f"{piece.path}: neither <doc ...> blocks nor JSON lines",
                    "kind: extracted reads WikiExtractor output; dumps are kind: wikipedia",
                )
            for key, title, text in found:
                # WikiExtractor repeats the title as the first line.
                lines = text.strip().split("\n")
                if lines and lines[0].strip() == title.strip():
                    lines = lines[1:]
                lines = [" ".join(line.split()) for line in lines]
                paragraphs = without_titles([line for line in lines if line], dotted=True)
                name = f"{self.name}/{key}/{title}"
                if paragraphs and self.config.document == "window":
                    yield from windows([paragraphs], self.config.window_sentences, False, name)
                elif paragraphs:
                    yield Document(name, paragraphs)
                else:
                    dropped["empty page"] += 1

    def _blocks(self, piece: Piece) -> Iterator[tuple[str, str, str]]:
        try:
            for block in blocks_between(chunks_of(piece), b"<doc ", b"</doc>"):
                head, _, text = decode(block).partition("\n")
                head = head.strip().removesuffix(">")
                values = dict(_ATTRIBUTE.findall(head))
                title = html.unescape(values.get("title", ""))
                yield values.get("id", ""), title, html.unescape(text)
        except EOFError as error:
            raise UserError(f"{piece.path}: {error}", "it is cut off: get it again") from None

    def _json_lines(self, piece: Piece) -> Iterator[tuple[str, str, str]]:
        for line, own in lines_of(chunks_of(piece), piece.start == 0):
            if not own:
                return
            if line.strip():
                try:
                    row = json.loads(line)
                    yield str(row.get("id", "")), str(row.get("title", "")), str(row["text"])
                except (ValueError, KeyError, AttributeError) as error:
                    raise UserError(
                        f"{piece.path}: a line is not JSON with a `text`: {line[:60]!r}",
                        "it may be cut off",
                    ) from error
