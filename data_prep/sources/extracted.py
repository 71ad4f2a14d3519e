"""WikiExtractor output: `<doc id=... title=...>` blocks or JSON lines, plain or compressed."""

from __future__ import annotations

import html
import re
from collections.abc import Iterator

from configs.errors import UserError
from data_prep.sources.base import Document, Piece, Range
from data_prep.sources.encoding import Tally, decode
from data_prep.sources.prose import without_titles
from data_prep.sources.streams import blocks_between, text_chunks
from data_prep.sources.text import LineSource, json_rows, windows

_ATTRIBUTE = re.compile(r'(\w+)="(.*?)"(?=\s+\w+=|\s*$)')


class ExtractedSource(LineSource):
    """Articles that WikiExtractor has already turned to text."""

    suffixes = ("",)
    looks_like = "WikiExtractor output (wiki_00 files with <doc ...> blocks, or its --json lines)"

    def documents(self, unit: Range, tally: Tally) -> Iterator[Document]:
        for piece in unit.pieces:
            where, seen = self.id_of(piece), Tally()
            chunks = text_chunks(Piece(piece.path), seen, where)
            first = next(chunks, (b"", True))[0].removeprefix(b"\xef\xbb\xbf").lstrip()
            if seen.dropped:
                if not piece.start:
                    tally.drop_file(where)
                continue
            if first.startswith(b"<doc "):
                found = self._blocks(piece, tally, where)
            elif first.startswith(b"{"):
                found = self._json_lines(piece, tally, where)
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
                    yield from windows([paragraphs], self.config.window_sentences, name)
                elif paragraphs:
                    yield Document(name, paragraphs)
                else:
                    tally.dropped["empty page"] += 1

    def _blocks(self, piece: Piece, tally: Tally, where: str) -> Iterator[tuple[str, str, str]]:
        try:
            for block in blocks_between(text_chunks(piece, tally, where), b"<doc ", b"</doc>"):
                head, _, text = decode(block, tally, where, "articles").partition("\n")
                head = head.strip().removesuffix(">")
                values = dict(_ATTRIBUTE.findall(head))
                title = html.unescape(values.get("title", ""))
                yield values.get("id", ""), title, html.unescape(text)
        except EOFError as error:
            raise UserError(f"{piece.path}: {error}", "it is cut off: get it again") from None

    def _json_lines(self, piece: Piece, tally: Tally, where: str) -> Iterator[tuple[str, str, str]]:
        for row, text in json_rows(piece, "text", tally, where):
            yield str(row.get("id", "")), str(row.get("title", "")), text
