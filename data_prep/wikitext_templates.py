"""The few templates that stand inside sentences and show their own words.

Without them a sentence has holes ("The road is long."); all other templates show boxes, notes and
markers, which are no prose.
"""

from __future__ import annotations

import re

_PARAMETER = re.compile(r"\s*[\w -]+=")
# Shown: the argument of this number, counted from 1; -1 = the last.
_FIRST = """
nowrap nobr nobreak nobold noitalic small smaller big larger sc smallcaps abbr tooltip em strong sup sub
strike sic linktext vanchor mono tt code kbd var char unicode quote blockquote cquote nihongo
"""
_ARGUMENT = {
    **dict.fromkeys(_FIRST.split(), 1),
    **dict.fromkeys(
        ["not a typo", "visible anchor", "proper name", "as written", "block quote"], 1
    ),
    **dict.fromkeys(["lang", "langx", "native name", "color", "font color"], 2),
    **dict.fromkeys(["transl", "transliteration"], -1),
}
_FIXED = {
    "'": "'", "`": "'", "okina": "ʻ", "nbsp": " ", "spaces": " ", "space": " ", "thinsp": " ",
    "ndash": "–", "spaced ndash": " – ", "snd": " – ", "spnd": " – ", "mdash": "—", "spaced mdash": " — ",
    "emdash": "—", "endash": "–", "–": " – ", "—": " — ", "en dash": "–", "em dash": "—", "!": "|", "=": "=",
    "shy": "", "wbr": "", "zwnj": "", "euro": "€", "number sign": "#", "times": "×", "dot": "·", "·": " · ",
    "pound": "£",
}  # fmt: skip
_MONEY = {
    "us$": "US$",
    "usd": "US$",
    "a$": "A$",
    "aud": "A$",
    "gbp": "£",
    "eur": "€",
    "cad": "C$",
    "inr": "₹",
}
_RANGES = {"-": "–", "–": "–", "to": " to ", "and": " and ", "or": " or ", "x": " × ", "by": " by "}


def expand(inside: str) -> str:
    """What {{inside}} shows, if it is one of the templates known here."""
    name, bar, rest = inside.partition("|")
    name = name.strip().lower().replace("_", " ")
    if not bar:
        return _FIXED.get(name, "")
    if name in _ARGUMENT or name.startswith("lang-"):
        return _chosen(rest, _ARGUMENT.get(name, 1))
    if name in ("convert", "cvt"):
        return _measure(_arguments(rest))
    if name in _MONEY:
        return _MONEY[name] + _chosen(rest, 1)
    if name in ("circa", "c.", "ca."):
        return "c. " + _chosen(rest, 1)
    if name in ("as of", "asof"):
        return "As of " + " ".join(reversed(_arguments(rest)[:3]))
    if name in ("frac", "fraction", "sfrac"):
        numbers = _arguments(rest)
        return "/".join(numbers) if len(numbers) < 3 else f"{numbers[0]} {numbers[1]}/{numbers[2]}"
    if name in ("val", "formatnum", "nts"):
        return _chosen(rest, 1)
    return ""


def _arguments(rest: str) -> list[str]:
    """Arguments without a name, by position; `2=text` counts as the second."""
    found = []
    for part in rest.split("|"):
        head, sign, value = part.partition("=")
        if not sign:
            found.append(part.strip())
        elif head.strip().isdigit():
            found.append(value.strip())
        elif not _PARAMETER.match(part):
            found.append(part.strip())
    return found


def _chosen(rest: str, number: int) -> str:
    if "[[" in rest:  # links are still to come; their bars part no arguments
        rest = re.sub(r"\[\[[^\]]*\]\]", lambda m: m[0].replace("|", "\ue0ff"), rest)
    found = _arguments(rest)
    if not found or number > len(found):
        return ""
    return found[number - 1 if number > 0 else -1].replace("\ue0ff", "|")


def _measure(parts: list[str]) -> str:
    """{{convert|10|km|mi}} -> 10 km; {{convert|3|to|5|ft}} -> 3 to 5 ft."""
    if len(parts) >= 4 and parts[1] in _RANGES:
        return f"{parts[0]}{_RANGES[parts[1]]}{parts[2]} {parts[3]}"
    return " ".join(parts[:2])
