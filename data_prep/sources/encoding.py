"""Bytes as text: UTF-8 as a rule. What is in something else, or damaged, is read as well as can be
and counted; a file that is no text at all is left out and counted."""

from __future__ import annotations

import codecs
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

NO_TEXT = "files that are no text"
LOST = "broken characters left out"
SURROGATES = "lone surrogates left out"
LATIN = "read as Windows Latin-1"

_SURROGATE = re.compile("[\ud800-\udfff]")
_BOMS_16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
_CONTROLS = bytes(
    [*range(8), *range(14, 26)]
)  # not tab, line ends, form feed, ^Z, escape, FS to US
_HIGH = bytes(range(128, 256))
# Of the bytes of a file. Text has no control characters but for an accident; random bytes have 8%,
# UTF-16 without its mark up to 50%. Icelandic in Latin-1 has 15% above 127, KOI8-R or GBK over 80%.
MOST_CONTROLS, MOST_HIGH = 0.01, 0.3
ALLOWED = 8  # of either, so that a short file may have an accident


@dataclass
class Tally:
    """What a source left out and what it could not read as it is, counted by reason.

    first: by reason, where the first of them is (a source's name for the file).
    """

    dropped: Counter[str] = field(default_factory=Counter)
    replaced: Counter[str] = field(default_factory=Counter)
    first: dict[str, str] = field(default_factory=dict)

    def drop_file(self, name: str) -> None:
        self.dropped[NO_TEXT] += 1
        self.first.setdefault(NO_TEXT, name)

    def replace(self, reason: str, name: str, count: int = 1) -> None:
        if count:
            self.replaced[reason] += count
            self.first.setdefault(reason, name)


def decode(data: bytes, tally: Tally, name: str, unit: str = "lines") -> str:
    """Text of unknown encoding: a byte order mark decides, then UTF-8, then Windows Latin-1.

    UTF-8 with a broken character here and there stays UTF-8, without them. unit: what `data` is one
    of, for the tally.
    """
    if data.startswith(b"\xef\xbb\xbf"):
        data = data[3:]
    elif data.startswith(_BOMS_16):
        text = data.decode("utf-16", "ignore")
        tally.replace(
            LOST, name, data.decode("utf-16", "replace").count("\ufffd") - text.count("\ufffd")
        )
        return text
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        pass
    if _is_damaged_utf8(data):
        return utf8(data, tally, name)
    tally.replace(f"{unit} {LATIN}", name)
    try:
        return data.decode("cp1252")
    except UnicodeDecodeError:
        return data.decode("latin-1")


def utf8(data: bytes, tally: Tally, name: str) -> str:
    """UTF-8 whatever it holds: broken characters are left out and counted."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        text = data.decode("utf-8", "ignore")
        lost = data.decode("utf-8", "replace").count("\ufffd") - text.count("\ufffd")
        tally.replace(LOST, name, lost)
        return text


def whole_characters(text: str, tally: Tally, name: str) -> str:
    """Text out of JSON, where half a character may be escaped (\\ud83d): no tokenizer takes it."""
    kept, lost = (text, 0) if text.isascii() else _SURROGATE.subn("", text)
    tally.replace(SURROGATES, name, lost)
    return kept


def to_utf8(
    chunks: Iterator[tuple[bytes, bool]], encoding: str, tally: Tally, name: str
) -> Iterator[tuple[bytes, bool]]:
    """Chunks of a whole file in another encoding."""
    kind = codecs.getincrementaldecoder(encoding)
    marking, decoder = kind("replace"), kind("ignore")

    def one(chunk: bytes, final: bool) -> bytes:
        text = decoder.decode(chunk, final)
        tally.replace(
            LOST, name, marking.decode(chunk, final).count("\ufffd") - text.count("\ufffd")
        )
        return text.encode("utf-8")

    for chunk, own in chunks:
        yield one(chunk, False), own
    yield one(b"", True), True


def is_no_text(head: bytes) -> bool:
    """Whether a file that starts so is plainly no text: binary, UTF-16 without its mark, or 8-bit
    text of a language that Windows Latin-1 has not."""
    if head.startswith(_BOMS_16):
        return False
    if len(head) - len(head.translate(None, _CONTROLS)) > ALLOWED + MOST_CONTROLS * len(head):
        return True
    try:
        codecs.getincrementaldecoder("utf-8")().decode(head)  # its end may cut a character
        return False
    except UnicodeDecodeError:
        pass
    high = 0
    for line in head.split(b"\n"):
        if not line.isascii() and not _is_damaged_utf8(line):
            high += len(line) - len(line.translate(None, _HIGH))
    return high > ALLOWED + MOST_HIGH * len(head)


def _is_damaged_utf8(data: bytes) -> bool:
    """Whether more characters beyond ASCII are whole than broken: Latin-1 has hardly a whole one."""
    text = data.decode("utf-8", "replace")
    broken = text.count("\ufffd")
    whole = len(text) - broken - (len(data) - len(data.translate(None, bytes(range(128)))))
    return whole > broken or whole + broken == 0
