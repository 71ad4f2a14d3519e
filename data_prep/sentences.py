"""Sentence boundaries by rule: fast, deterministic, and the sentences with the gaps between them are
the text again.

A scan finds sentence-ending marks before white space (or after them, in scripts without it); each
is judged by the word before and the character or word after. Chosen over the libraries measured in
bench/RESULTS.md: the best of them by F1 cuts after abbreviations that the rules here know,
and takes no list of one's own.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from configs.errors import UserError


def _words(text: str) -> frozenset[str]:
    """Words without their last full stop, in small letters."""
    return frozenset(word.rstrip(".").lower() for word in text.split())


# Never the end of a sentence: something belonging to them follows.
BEFORE_NAME = """
mr mrs ms mme mlle messrs dr drs prof profs gen col maj capt cpt lt sgt cpl pvt cmdr adm brig rev revd
fr hon sen rep reps gov pres supt insp fig figs eq eqs vs v cf e.g eg i.e ie approx ca viz pp vol vols
eds chap ch secs op nos mt st ste asst assoc univ incl excl resp esp encl ext tel p.s w.r.t aka a.k.a
messr ald atty
"""
# Abbreviations that also end sentences: the word after decides.
BEFORE_ANYTHING = """
etc inc ltd co corp bros jr sr u.s u.k u.n e.u d.c a.m p.m b.c a.d ph.d m.d b.a m.a b.sc m.sc est dept
ave blvd rd jan feb mar apr jun jul aug sep sept oct nov dec mon tue tues wed thu thur thurs fri sat
sun min max hr hrs lb lbs oz ft yd km cm mm kg mg no ed al cit ibid art pop sec bn mn tbsp tsp gov't
int'l nat'l calif fla tex mass conn mich minn penn wash wis tenn ala ariz colo ind ill kan okla ore
"""
OTHER_LANGUAGES = {
    "de": """z.b d.h u.a u.ä z.t bzw vgl ca usw evtl ggf inkl exkl nr hr fr dr prof dipl-ing str abs art
    bd hrsg jh jhd mio mrd sog s.o s.u v.a i.d.r o.ä st tel u.u zz zzt gest geb verst lat griech engl frz
    a.d i.a bspw max min insb jun sen""",
    "fr": """m mm mme mmes mlle mlles dr pr st ste etc cf p.ex env av apr j.-c p pp vol éd fig tél no
    art chap""",
    "es": """sr sra srta sres dr dra d dña ud uds etc p.ej pág págs vol fig av avda núm tel ee.uu a.c
    d.c""",
    "it": "sig sigg dott prof ing avv ecc pag pagg vol fig es cfr s p.es n a.c d.c",
    "nl": "dhr mevr dr prof bijv enz blz nr ca o.a d.w.z t.a.v i.v.m m.b.t st",
    "pt": "sr sra dr dra prof etc p.ex pág vol fig av núm tel",
    "ru": "г гг в вв т.е т.д т.п т.к др пр см рис стр ул им св проф акад руб тыс млн млрд",
}
# Words that start sentences and hardly a name: after "p.m." or "U.S." they mean a new sentence.
STARTERS = _words(
    """the a an in on at by for from with as to of it he she they we you i this that these those there
    then when while where what who why how if but and or so yet his her its their our my after before
    since although though however moreover meanwhile also some many most all no not one two three each
    during because until once here now today please nor both such other another only even let is are was
    were do does did can could will would should may have has had"""
)
# Short words that end sentences; other short ones before a small letter are abbreviations.
SHORT_WORDS = STARTERS | _words(
    "go me him us up out off too so now own far see say ago lot car day"
)
_GOES_ON = ",;).!?…"  # before these a mark was not the last one: "wait . . . what"
SHORTEST_CALL = 20  # characters up to a ! or ? before a small letter: shorter is an interjection
_OPENERS = "\"'“‘«‹([{*_¿¡-–—"
_CLOSERS = "\"'”’»›)]}*_"
_WIDE_MARKS, _WIDE_CLOSERS = "。！？｡", "」』）】》"
_OTHER_MARKS = "؟۔।॥"
# How a paragraph ends, or a line of one, and titles hardly do.
PROSE_END = re.compile(
    rf"[.!?…:;,—{_OTHER_MARKS}{_WIDE_MARKS}：；，-][{re.escape(_CLOSERS + _WIDE_CLOSERS)}]*\Z"
)
# A mark, more marks or what closes with it, white space. It starts with one set of characters, which
# `re` then searches for at 200 MB/s; an alternative or a group there costs two thirds of that.
_CANDIDATE = re.compile(rf"[.!?…][.!?…{re.escape(_CLOSERS)}]*\s+")
_ANY_CANDIDATE = re.compile(
    rf"[.!?…{_OTHER_MARKS}{_WIDE_MARKS}]"
    rf"[.!?…{_OTHER_MARKS}{_WIDE_MARKS}{re.escape(_CLOSERS + _WIDE_CLOSERS)}]*\s*"
)
# What still belongs to a sentence after its mark: references to notes, a smiley.
_ATTACHED = re.compile(
    r"(?:\s*\[(?:[\d\s,–-]{1,12}|\.\.\.|…)\])+(?=\s|$)|\s+[:;=8]['o-]?[)(\]\[DPp|/]+(?=\s|$)"
)
_INITIALS = re.compile(r"(?:[^\W\d_]\.)+[^\W\d_]$")
_WORD = re.compile(r"[^\W\d_]+(?:['’][^\W\d_]+)?")


class Splitter:
    """Cuts paragraphs into sentences. abbreviations: after these words a full stop never ends a
    sentence; added to the built-in ones, with or without their full stop, in any case."""

    def __init__(self, abbreviations: Iterable[str] = (), language: str = "en") -> None:
        own = _words(" ".join(abbreviations))
        language = language.split("-")[0].lower()
        self.never = _words(BEFORE_NAME) | own
        self.never |= _words(OTHER_LANGUAGES.get(language, ""))
        self.maybe = _words(BEFORE_ANYTHING) - own
        self.ordinals = language in ("de", "da", "no", "nb", "fi", "cs", "hu", "et")

    def spans(self, paragraph: str) -> list[tuple[int, int]]:
        """[start, end) of each sentence; what lies between two is white space."""
        found: list[tuple[int, int]] = []
        start = len(paragraph) - len(paragraph.lstrip())
        last = len(paragraph.rstrip())
        scan = _CANDIDATE
        if not paragraph.isascii() and any(map(paragraph.__contains__, _OTHER_MARKS + _WIDE_MARKS)):
            scan = _ANY_CANDIDATE
        for match in scan.finditer(paragraph, start, last):
            at, after = match.span()
            if at < start:
                continue  # inside [...]
            whole = match[0]
            body = whole.rstrip()
            end = at + len(body)
            if end == last:
                break
            if whole[0] in _WIDE_MARKS:
                found.append((start, end))
                start = after
                continue
            if end == after:
                continue  # 3.14
            if paragraph[after] in "[:;=8":
                attached = _ATTACHED.match(paragraph, end)
                if attached:
                    end = after = attached.end()
                    while after < last and paragraph[after].isspace():
                        after += 1
                    if after == last:
                        break
            if self._ends(paragraph, start, at, body, after):
                found.append((start, end))
                start = after
        if last > start:
            found.append((start, last))
        return found

    def split(self, paragraph: str) -> list[str]:
        """The sentences of a paragraph, without the white space between them."""
        return [paragraph[start:end] for start, end in self.spans(paragraph)]

    def split_many(self, paragraphs: Sequence[str]) -> list[str]:
        """The sentences of all paragraphs in a row."""
        return [p[start:end] for p in paragraphs for start, end in self.spans(p)]

    def _ends(self, text: str, start: int, at: int, body: str, after: int) -> bool:
        """Whether the mark at text[at], with what closes with it (`body`), ends the sentence that
        began at `start`; text[after] is what follows the white space."""
        following = text[after]
        mark = body.rstrip(_CLOSERS)
        if mark == ".":
            word = text[max(text.rfind(" ", start, at), start - 1) + 1 : at].lstrip(_OPENERS)
            low = word.lower()
            if low in self.never:
                return False
            if low in self.maybe or _INITIALS.match(word) or (len(word) == 1 and word.isalpha()):
                next_word = _WORD.match(text, after) if following.isupper() else None
                return next_word is not None and next_word[0].lower() in STARTERS
            if following.islower():
                return len(body) == 1 and (len(low) > 3 or low in SHORT_WORDS) and "." not in low
            if word.isdigit():
                # Not a list's number ("2. Atoms unite."), not an ordinal ("am 3. Oktober").
                return at - len(word) > start and not (self.ordinals and len(word) < 3)
            return following not in _GOES_ON
        if following in _GOES_ON:
            return False
        if mark[-1] in "!?؟" and "." not in mark:
            # "What?" asks Winston. Ah! my friend -- the mark belongs to what is quoted, or called.
            quoted = len(body) > len(mark) or at - start < SHORTEST_CALL
            return not (quoted and following.islower())
        return not following.islower()


def read_abbreviations(path: str | Path) -> list[str]:
    """A file with one abbreviation a line; blank lines and lines with # are passed over."""
    if not path:
        return []
    file = Path(path)
    if not file.is_file():
        raise UserError(f"prep.abbreviations={path}: no such file", "one abbreviation a line")
    try:
        lines = file.read_text(encoding="utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        raise UserError(
            f"prep.abbreviations={path}: not UTF-8 ({error})",
            f"iconv -f latin1 -t utf-8 {path} > NEW.txt makes it UTF-8, if Latin-1 is what it is in",
        ) from None
    return [line.strip() for line in lines if line.strip() and not line.startswith("#")]
