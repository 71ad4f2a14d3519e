"""MediaWiki pages-articles dumps (.xml, .bz2 of one or many streams, .gz; UTF-8 and UTF-16)."""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterator

from configs.errors import UserError
from configs.schema import SourceConfig
from data_prep.sources.base import Document, Piece, Range, Source, cut_bytes
from data_prep.sources.encoding import Tally, to_utf8, utf8
from data_prep.sources.streams import CHUNK, blocks_between, can_cut, chunks_of
from data_prep.sources.text import windows
from data_prep.wikitext import Cleaner, unescape_xml

SUFFIXES = (".xml", ".xml.bz2", ".xml.gz", ".bz2", ".xml.zst", ".xml.xz")
PLAIN_STEP, BZ2_STEP = 32 << 20, 8 << 20  # compressed 4 to 5 times

_TITLE = re.compile(rb"<title>(.*?)</title>", re.S)
_NS = re.compile(rb"<ns>\s*(-?\d+)\s*</ns>")
_ID = re.compile(rb"<id>\s*(\d+)\s*</id>")
_TEXT = re.compile(rb"<text\b[^>]*?(?:/>|>(.*?)</text>)", re.S)
_MODEL = re.compile(rb"<model>\s*(.*?)\s*</model>")
_NAMESPACE = re.compile(r'<namespace key="(-?\d+)"[^>]*?(?:/>|>(.*?)</namespace>)', re.S)
# For dumps older than the <redirect> element.
_REDIRECT = re.compile(
    r"\s*#(?:redirect(?:ion)?|weiterleitung|redirecci[oó]n|redirecionamento|rinvia|doorverwijzing|patrz|przekieruj"
    r"|tam|перенаправление|перенапр|転送|リダイレクト|تحويل|重定向|넘겨주기|omdirigering|ohjaus|přesměruj|yönlendirme)"
    r"\s*:?\s*\[\[",
    re.I,
)


class WikipediaSource(Source):
    """Articles (namespace 0) of a dump as prose; redirects, other pages, empty ones are counted."""

    suffixes = SUFFIXES
    looks_like = "a pages-articles dump (.xml, .xml.bz2, .xml.gz)"

    def __init__(self, config: SourceConfig) -> None:
        super().__init__(config)
        self._cleaners: dict[str, tuple[Cleaner, str]] = {}
        for file in self.files():
            self._header(str(file))

    def plan(self) -> list[tuple[list[Piece], int]]:
        units = []
        for file in self.files():
            wide = self._header(str(file))[1] != "utf-8"
            if wide or not can_cut(file):
                units.append(([Piece(str(file))], file.stat().st_size * (1 if wide else 5)))
            elif file.suffix.lower() == ".bz2":
                units += cut_bytes(file, BZ2_STEP, 5)
            else:
                units += cut_bytes(file, PLAIN_STEP)
        return units

    def documents(self, unit: Range, tally: Tally) -> Iterator[Document]:
        for piece in unit.pieces:
            cleaner, encoding = self._header(piece.path)
            where = self.id_of(piece)
            chunks = chunks_of(piece)
            if encoding != "utf-8":
                chunks = to_utf8(chunks, encoding, tally, where)
            try:
                for page in blocks_between(chunks, b"<page>", b"</page>"):
                    document = self._article(page, cleaner, tally, where)
                    if document and self.config.document == "window":
                        count = self.config.window_sentences
                        yield from windows([document.paragraphs], count, document.id)
                    elif document:
                        yield document
            except EOFError as error:
                raise UserError(
                    f"{piece.path}: {error}", "the dump is cut off: download it again"
                ) from error

    def _article(self, page: bytes, cleaner: Cleaner, tally: Tally, where: str) -> Document | None:
        dropped = tally.dropped
        namespace = _NS.search(page)
        title = _TITLE.search(page)
        if title is None:
            dropped["page without a title"] += 1
            return None
        if namespace is not None and namespace[1] != b"0":
            dropped["not an article (other namespace)"] += 1
            return None
        if b"<redirect" in page:
            dropped["redirect"] += 1
            return None
        model = _MODEL.search(page)
        if model is not None and model[1] != b"wikitext":
            dropped["not wikitext"] += 1
            return None
        match = _TEXT.search(page)
        raw = match[1] if match and match[1] else b""
        text = unescape_xml(utf8(raw, tally, where))
        if not text.strip():
            dropped["empty page"] += 1
            return None
        if _REDIRECT.match(text):
            dropped["redirect"] += 1
            return None
        paragraphs = cleaner.paragraphs(text)
        if not paragraphs:
            dropped["page without prose"] += 1
            return None
        name = unescape_xml(title[1].decode("utf-8", "replace"))
        number = _ID.search(page)
        key = number[1].decode() if number else ""
        return Document(f"{self.name}/{key}/{name}", paragraphs)

    def _header(self, path: str) -> tuple[Cleaner, str]:
        """The cleaner that knows this dump's namespace names, and the dump's encoding."""
        if path not in self._cleaners:
            head, encoding = _head(path)
            if "<mediawiki" not in head and "<page>" not in head:
                raise UserError(
                    f"{path}: not a MediaWiki dump (no <mediawiki> at its start)",
                    "kind: wikipedia reads pages-articles XML; WikiExtractor output is kind: extracted",
                )
            names = {int(key): unescape_xml(name) for key, name in _NAMESPACE.findall(head)}
            self._cleaners[path] = (Cleaner(names), encoding)
        return self._cleaners[path]


def _head(path: str) -> tuple[str, str]:
    raw = b""
    for chunk, _ in chunks_of(Piece(path)):
        raw += chunk[:CHUNK]
        break
    encoding = "utf-8"
    if raw[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
        encoding = "utf-16"
    elif raw[:4] == b"<\0?\0" or raw[:4] == b"<\0m\0":
        encoding = "utf-16-le"
    elif raw[:4] == b"\0<\0?" or raw[:4] == b"\0<\0m":
        encoding = "utf-16-be"
    head = raw[: 256 << 10].decode(encoding, "ignore")
    return head, encoding
