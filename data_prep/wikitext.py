"""Wikitext to prose: paragraphs without templates, tables, lists, headings, references and markup.

A few passes over the page, each driven by a scan for the one mark it is about, so that time grows
with the number of marks and not with their nesting. Nested marks (templates, tables, links) are
matched by a stack; one that is never closed is taken as text and its brackets removed.
"""

from __future__ import annotations

import html
import re
from collections.abc import Mapping

from data_prep.sentences import PROSE_END
from data_prep.wikitext_templates import expand

# Namespaces by number as dumps' headers list them: links into these show nothing of the target.
HIDDEN_NAMESPACES = (6, 14, -2, -1)  # File, Category, Media, Special
# Names that work on every wiki, and old local names that headers no longer list.
HIDDEN_NAMES = """
file image category media special bild datei kategorie fichier catégorie archivo imagen immagine
    ficheiro categoría categoria bestand plik файл изображение категория ファイル 画像 ملف صورة تصنيف
"""
# Elements that go with their content, and those of which only the tags go.
_DROPPED = (
    "ref|references|math|chem|ce|gallery|timeline|syntaxhighlight|source|pre|table|score|imagemap"
    "|templatestyles|templatedata|hiero|graph|mapframe|maplink|inputbox|style|script|includeonly"
    "|indicator|categorytree|dl|ol|ul|rt|rp|ruby-text|poem"
)
_COMMENT = re.compile(r"<!--.*?(?:-->|\Z)", re.S)
_OPENING = re.compile(rf"<({_DROPPED})\b(?:(?:\"[^\"<]*\"|'[^'<]*'|[^<>\"'])*|[^<>]*)>", re.I)
_CLOSING = {name: re.compile(rf"</{name}\s*>", re.I) for name in _DROPPED.split("|")}
_NOWIKI = re.compile(r"<nowiki\s*/>|<nowiki\s*>(.*?)</nowiki\s*>", re.S | re.I)
_BREAK = re.compile(r"<(?:br|hr)\b[^<>]*>", re.I)
_BLOCK = re.compile(r"</?(?:p|div|center|blockquote|h[1-6])\b[^<>]*>", re.I)
_TAG = re.compile(r"</?[a-zA-Z][^<>]*>")
_BRACES = re.compile(r"\{\{+|\}\}+|\{\||\|\}+")
_BRACKETS = re.compile(r"\[\[|\]\]")
_EXTERNAL = re.compile(
    r"\[(?:(?:https?|ftps?|news|irc|mailto):|//)[^\s\[\]]*(?:[ \t]+([^\[\]\n]*))?\]", re.I
)
_LANGUAGE = re.compile(r"[a-z]{2,3}(?:-[a-z-]+)?|simple")
_THUMBNAIL = re.compile(r"\|\s*(?:thumb|thumbnail|frame|frameless|mini|miniatur|\d+px)\s*(?:\||$)")
_QUOTES = re.compile(r"'{2,}")
_VARIANT = re.compile(r"-\{(?:[^{}|]*\|)?(?:[a-z-]+:)?([^{};]*)[^{}]*\}-")
_SWITCH = re.compile(r"__[A-ZÄÖÜ]{3,}__")
# What a template or a formula leaves behind: "( ; born 1879)", "()", "such as , and".
_EMPTY_BRACKETS = re.compile(
    r"[ \t]*\((?:[\s,;:/·–—=-]|\b(?:or|and|pronounced|listen)\b)*\)|[ \t]*\[\s*\]"
)
_OPENED = re.compile(r"\((?:[ \t]*[,;:])+[ \t]*|\([ \t]+")
_CLOSED = re.compile(r"(?:[ \t]*[,;:])+[ \t]*\)|[ \t]+\)")
_DOUBLED = re.compile(r"([,;、，])(?:[ \t]*[,;、，])+")
_SPACES = re.compile(r"[ \t\u00a0\u2000-\u200a\u202f\u3000]{2,}|[\t\u00a0\u2000-\u200a\u202f]")
_BEFORE_MARK = re.compile(r" +([,.;:!?](?:\s|$))")
_DEBRIS = re.compile(r"\{\{+|\}\}+|\[\[+|\]\]+|\{\||\|\}")
_MARK_RUN = re.compile(r"[\[\]{}|]{2,}")
_LONGEST_RUN = 64  # marks; more than that in a row are no text whatever they are
_ATTRIBUTES = re.compile(r"(?:[\w-]+\s*=\s*\"[^\"]*\"\s*\|?\s*)+")
SHORTEST = 60  # characters of a paragraph that has no sentence's end: below, it is a title
# The text of <nowiki> hides from the other passes behind private characters.
_MARKS = "[]{}|<>'=&*#:;!-_"
_HIDE = str.maketrans({mark: chr(0xE100 + i) for i, mark in enumerate(_MARKS)})
_SHOW = str.maketrans({chr(0xE100 + i): mark for i, mark in enumerate(_MARKS)})


def unescape_xml(text: str) -> str:
    """XML's own entities; those of wikitext (&nbsp;) come later."""
    if "&" in text:
        text = text.replace("&lt;", "<").replace("&gt;", ">").replace("&quot;", '"')
        text = text.replace("&#039;", "'").replace("&apos;", "'").replace("&amp;", "&")
    return text


class Cleaner:
    """Knows one wiki's namespace names. namespaces: number -> name, from the dump's header."""

    def __init__(self, namespaces: Mapping[int, str] | None = None) -> None:
        self.hidden = set(HIDDEN_NAMES.split())
        for number in HIDDEN_NAMESPACES:
            name = (namespaces or {}).get(number)
            if name:
                self.hidden.add(name.lower().replace("_", " "))

    def paragraphs(self, text: str) -> list[str]:
        """Paragraphs of prose of a page's wikitext (str, unescaped from XML)."""
        nowiki = 0
        if "<" in text:
            text = _COMMENT.sub("", text)
            text, nowiki = _NOWIKI.subn(lambda m: (m[1] or "").translate(_HIDE), text)
            text = _without_elements(text)
        text = without_templates(text)
        text = self._links(text)
        if "[" in text:
            text = _EXTERNAL.sub(lambda m: m[1] or "", text)
        if "<" in text:
            text = _BLOCK.sub("\n\n", _BREAK.sub(" ", text))
            text = _TAG.sub("", text)
        if "''" in text:
            text = _QUOTES.sub(_quotes, text)
        if "-{" in text:
            text = _VARIANT.sub(r"\1", text)
        found = [part for part in map(_tidied, self._join_lines(text)) if part]
        return [part.translate(_SHOW) for part in found] if nowiki else found

    def _join_lines(self, text: str) -> list[str]:
        """Joins lines to paragraphs; headings, lists, indented and table lines end one and go."""
        found: list[str] = []
        lines: list[str] = []
        for line in text.split("\n"):
            line = line.strip()
            if not line or line[0] in "*#:;|!=" or line.startswith("----") or self._is_file(line):
                if lines:
                    found.append(" ".join(lines))
                    lines = []
            else:
                lines.append(line)
        if lines:
            found.append(" ".join(lines))
        return found

    def _is_file(self, line: str) -> bool:
        """A gallery's line outside of its gallery: `File:Name.jpg|caption`."""
        head, colon, _ = line[:40].partition(":")
        return bool(colon) and head.lower() in self.hidden

    def _links(self, text: str) -> str:
        """Links become what they show. Brackets that never close stay, for `_DEBRIS` to take."""
        pieces: list[list[str]] = [[]]
        at = 0
        for match in _BRACKETS.finditer(text):
            pieces[-1].append(text[at : match.start()])
            at = match.end()
            if match[0] == "[[":
                pieces.append([])
            elif len(pieces) > 1:
                inside = "".join(pieces.pop())
                pieces[-1].append(self._shown(inside))
        pieces[-1].append(text[at:])
        return "".join("".join(part) for part in pieces)

    def _shown(self, inside: str) -> str:
        target, bar, label = inside.partition("|")
        target = target.strip()
        head, colon, _ = target.partition(":")
        if colon and head:
            head = head.strip()
            if head.lower().replace("_", " ") in self.hidden or _LANGUAGE.fullmatch(head):
                return ""
        if not bar:
            return target.removeprefix(":")
        if _THUMBNAIL.search(inside):
            return ""
        return label if label.strip() else target.removeprefix(":").partition(" (")[0]


def _without_elements(text: str) -> str:
    """The text without the elements whose content is no prose; one that never closes is left."""
    pieces: list[str] = []
    endless: set[str] = set()
    at = 0
    for match in _OPENING.finditer(text):
        name = match[1].lower()
        if match.start() < at or name in endless:
            continue
        end = match.end()
        if not match[0].endswith("/>"):
            closing = _CLOSING[name].search(text, end)
            if closing is None:
                endless.add(name)
                continue
            end = closing.end()
        pieces.append(text[at : match.start()])
        at = end
    pieces.append(text[at:])
    return "".join(pieces)


def without_templates(text: str) -> str:
    """The text without {{templates}}, {{{parameters}}} and {| tables |}, but for what templates of
    a few kinds show (`wikitext_templates`)."""
    pieces: list[list[str]] = [[]]
    marks: list[int] = []  # open braces of each level; 0 for a table
    at = 0
    for match in _BRACES.finditer(text):
        mark = match[0]
        pieces[-1].append(text[at : match.start()])
        at = match.end()
        if mark[0] == "{":
            marks.append(0 if mark == "{|" else len(mark))
            pieces.append([])
            continue
        closing = len(mark)
        if mark[0] == "|":
            closing -= 1
            if marks and not marks[-1]:
                marks.pop()
                pieces.pop()
                closing -= 1
            else:
                pieces[-1].append("|" if closing > 1 else mark)
        while closing > 1 and marks and marks[-1]:
            opening = marks.pop()
            inside = "".join(pieces.pop())
            if opening - closing > 1:  # {{{{a}}b}}: the outer one is still open
                marks.append(opening - closing)
                pieces.append([expand(inside)])
            elif opening != 3:
                pieces[-1].append(expand(inside))
            closing -= opening
    pieces[-1].append(text[at:])
    return "".join("".join(part) for part in pieces)


def _quotes(match: re.Match[str]) -> str:
    """Bold and italic marks go; a single apostrophe stays: l'''amour'' is l'amour."""
    if len(match[0]) == 3:
        before = match.string[max(0, match.start() - 1) : match.start()]
        return (
            "'"
            if before.isalpha() and match.string[match.end() : match.end() + 1].isalpha()
            else ""
        )
    return "'" if len(match[0]) == 4 else "'" * min(2, len(match[0]) - 5)  # no marks may be left


def _without_debris(match: re.Match[str]) -> str:
    """A run of marks without those that mean something; taking one out may bring two others together."""
    run, before = match[0], ""
    if len(run) > _LONGEST_RUN:
        return ""
    while run != before:
        run, before = _DEBRIS.sub("", run), run
    return run


def _tidied(text: str) -> str:
    """One paragraph of text, or nothing if it is no prose."""
    if "&" in text:
        text = html.unescape(text)
    if "__" in text:
        text = _SWITCH.sub("", text)
    text = _MARK_RUN.sub(_without_debris, text)
    if "(" in text or "[" in text:
        text = _CLOSED.sub(")", _OPENED.sub("(", _EMPTY_BRACKETS.sub("", text)))
        text = _MARK_RUN.sub(_without_debris, text)  # marks that "[ ]" kept apart
    text = _BEFORE_MARK.sub(r"\1", _DOUBLED.sub(r"\1", _SPACES.sub(" ", text))).strip()
    if len(text) < SHORTEST and not PROSE_END.search(text):
        return ""
    if "=" in text and _ATTRIBUTES.fullmatch(text):
        return ""
    return text if any(map(str.isalpha, text)) else ""
