"""Corpora as documents: Wikipedia dumps, WikiExtractor output, books, data sets, plain text."""

from __future__ import annotations

from importlib import import_module

from configs.errors import UserError
from configs.schema import SourceConfig
from data_prep.sources.base import Document, Piece, Range, Source
from data_prep.sources.encoding import Tally

__all__ = ["KINDS", "Document", "Piece", "Range", "Source", "Tally", "open_source"]

KINDS = {
    "wikipedia": ("data_prep.sources.wikipedia", "WikipediaSource"),
    "extracted": ("data_prep.sources.extracted", "ExtractedSource"),
    "books": ("data_prep.sources.books", "BooksSource"),
    "text": ("data_prep.sources.text", "TextSource"),
    "sentences": ("data_prep.sources.text", "SentencesSource"),
    "hub": ("data_prep.sources.hub", "HubSource"),
}


def open_source(config: SourceConfig) -> Source:
    """The source a recipe names; cheap, reads nothing but file names and a dump's header.

    Raises:
        UserError: unknown kind or document cut, missing or empty path, files of another kind.
    """
    if config.kind not in KINDS:
        raise UserError(
            f"source kind {config.kind!r} is unknown", f"known kinds: {', '.join(KINDS)}"
        )
    module, name = KINDS[config.kind]
    kind = getattr(import_module(module), name)
    if config.document not in kind.cuts:
        raise UserError(
            f"source {config.name or config.path!r}: document: {config.document} is not for kind: "
            f"{config.kind}",
            f"choose from: {', '.join(kind.cuts)}",
        )
    source: Source = kind(config)
    return source
