"""Wikitext to prose: paragraphs without templates, tables, lists, headings, references and markup.

A few passes over the page, each driven by a scan for the one mark it is about, so that time grows
with the number of marks. Nested marks (templates, tables, links) are matched by a depth count; one
without an end is taken as text, its braces removed.
"""

from __future__ import annotations

import html
import re
from collections.abc import Callable, Mapping

FILE_NAMESPACE, CATEGORY_NAMESPACE, MEDIA_NAMESPACE, SPECIAL_NAMESPACE = 6, 14, -2, -1
# Names that work on every wiki, and old local names that dumps' headers no longer list.
FILE_NAMES = (
    "file",
    "image",
    "bild",
    "datei",
    "fichier",
    "archivo",
    "imagen",
    "immagine",
    "ficheiro",
)
CATEGORY_NAMES = ("category",)

# Elements whose content is no prose.
_DROPPED = (
    "ref|references|math|chem|ce|gallery|timeline|syntaxhighlight|source|code|pre|table|score|imagemap"
    "|templatestyles|hiero|graph|mapframe|maplink|inputbox|style|script|noinclude|includeonly|section"
    "|indicator|poem|categorytree|dl|ol|ul"
)
_COMMENT = re.compile(r"<!--.*?(?:-->|\Z)", re.S)
_ELEMENT = re.compile(
    rf"<({_DROPPED})\b(?:\"[^\"]*\"|'[^']*'|[^<>\"'])*?(?:/>|>.*?(?:</\1\s*>|(?=\n\s*\n)|\Z))",
    re.S | re.I,
)
_NOWIKI = re.compile(r"<nowiki\s*/>|<nowiki\s*>(.*?)</nowiki\s*>", re.S | re.I)
_BREAK = re.compile(r"<(?:br|hr)\b[^<>]*>", re.I)
_BLOCK = re.compile(r"</?(?:p|div|center|blockquote|h[1-6])\b[^<>]*>", re.I)
_TAG = re.compile(r"</?[a-zA-Z][^<>]*>")
_BRACES = re.compile(r"\{\{+|\}\}+|\{\||\|\}")
_BRACKETS = re.compile(r"\[\[|\]\]")
_EXTERNAL = re.compile(
    r"\[(?:(?:https?|ftps?|news|irc|mailto):|//)[^\s\]]*(?:[ \t]+([^\]\n]*))?\]", re.I
)
_QUOTES = re.compile(r"'{2,}")
_SWITCH = re.compile(r"__[A-Z]+__")
_EMPTY_BRACKETS = re.compile(r"\s*\((?:[\s,;:/·–—-]|\b(?:or|and|pronounced)\b)*\)|\s*\[\s*\]")
_OPENED = re.compile(r"\((?:[ \t]*[,;:])+[ \t]*")
_CLOSED = re.compile(r"(?:[ \t]*[,;:])+[ \t]*\)")
_SPACES = re.compile(r"[ \t\u00a0\u2000-\u200a\u202f\u3000]{2,}|[\t\u00a0\u2000-\u200a\u202f]")
_BEFORE_MARK = re.compile(r" +([,.;:!?)](?:\s|$))")
_DEBRIS = re.compile(r"\{\{+|\}\}+|\[\[+|\]\]+|\{\||\|\}")
_HEADING = re.compile(r"={1,6}.*={1,6}\s*$")


def unescape_xml(text: str) -> str:
    """XML's own entities; those of wikitext (&nbsp;) come later."""
    if "&" in text:
        text = text.replace("&lt;", "<").replace("&gt;", ">").replace("&quot;", '"')
        text = text.replace("&#039;", "'").replace("&apos;", "'").replace("&amp;", "&")
    return text


class Cleaner:
    """Knows one wiki's namespace names. namespaces: number -> name, from the dump's header."""

    def __init__(self, namespaces: Mapping[int, str] | None = None) -> None:
        names = {
            number: name.lower().replace("_", " ") for number, name in (namespaces or {}).items()
        }
        self.dropped = {*FILE_NAMES, *CATEGORY_NAMES, "media", "special"}
        for number in (FILE_NAMESPACE, CATEGORY_NAMESPACE, MEDIA_NAMESPACE, SPECIAL_NAMESPACE):
            if names.get(number):
                self.dropped.add(names[number])

    def paragraphs(self, text: str) -> list[str]:
        """Paragraphs of prose of a page's wikitext (str, unescaped from XML)."""
        text = _COMMENT.sub("", text) if "<!--" in text else text
        kept: list[str] = []
        if "<" in text:
            text = _NOWIKI.sub(lambda m: _hide(m[1] or "", kept), text)
            text = _ELEMENT.sub("", text)
        text = _without_nested(text, _BRACES, _template)
        text = self._links(text)
        if "[" in text:
            text = _EXTERNAL.sub(lambda m: m[1] or "", text)
        if "<" in text:
            text = _BLOCK.sub("\n\n", _BREAK.sub(" ", text))
            text = _TAG.sub("", text)
        if "''" in text:
            text = _QUOTES.sub(_quotes, text)
        return [part for part in map(self._finish, _prose_lines(text)) if part and part != "."]

    def _finish(self, text: str) -> str:
        return text

    def _links(self, text: str) -> str:
        return _without_nested(text, _BRACKETS, self._link)

    def _link(self, inside: str) -> str:
        target, bar, label = inside.partition("|")
        target = target.strip()
        head, colon, _ = target.partition(":")
        if colon:
            head = head.strip().lower().replace("_", " ")
            if head in self.dropped:
                return ""
        if not bar:
            return target.lstrip(":")
        return label


def _hide(text: str, kept: list[str]) -> str:
    return text


def _quotes(match: re.Match[str]) -> str:
    """Bold and italic marks go; the apostrophe of l'''amour'' stays."""
    return {4: "'"}.get(len(match[0]), "'" * max(0, len(match[0]) - 5))


def _template(inside: str) -> str:
    return ""


def _without_nested(text: str, marks: re.Pattern[str], keep: Callable[[str], str]) -> str:
    """Replaces each outermost pair of marks; text outside stays."""
    out: list[str] = []
    stack: list[tuple[str, int, list[str]]] = []
    at = 0
    for match in marks.finditer(text):
        mark = match[0]
        here = stack[-1][2] if stack else out
        here.append(text[at : match.start()])
        at = match.end()
        if mark[0] in "{[":
            stack.append((mark, match.start(), []))
        elif stack:
            _, _, parts = stack.pop()
            (stack[-1][2] if stack else out).append(keep("".join(parts)))
    rest = text[at:]
    while stack:
        _, _, parts = stack.pop()
        rest = "".join(parts) + rest
    out.append(rest)
    return "".join(out)


def _prose_lines(text: str) -> list[str]:
    """Joins lines to paragraphs; headings, lists, indented and table lines end one and go."""
    paragraphs: list[str] = []
    lines: list[str] = []
    for line in text.split("\n"):
        line = line.strip()
        if not line or line[0] in "*#:;|!=" or line.startswith("----"):
            if lines:
                paragraphs.append(" ".join(lines))
                lines = []
            continue
        lines.append(line)
    if lines:
        paragraphs.append(" ".join(lines))
    done = []
    for text in paragraphs:
        if "&" in text:
            text = html.unescape(text)
        text = _DEBRIS.sub("", _SWITCH.sub("", text))
        text = _EMPTY_BRACKETS.sub("", text)
        text = _BEFORE_MARK.sub(r"\1", _SPACES.sub(" ", text)).strip()
        if text:
            done.append(text)
    return done
