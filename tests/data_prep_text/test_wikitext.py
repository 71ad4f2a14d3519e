"""Wikitext to prose: what goes, what stays, and that odd nesting never leaves marks or hangs."""

from __future__ import annotations

import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from data_prep.wikitext import Cleaner, unescape_xml, without_templates

LONG = "It is a long enough sentence to be kept as prose by the cleaner, whatever else happens."
GERMAN = Cleaner({6: "Datei", 14: "Kategorie", -2: "Medium", -1: "Spezial"})


def prose(text: str) -> list[str]:
    return Cleaner().paragraphs(text)


CASES = [
    ("'''Bold''' and ''italic'' and '''''both''''' text.", "Bold and italic and both text."),
    ("L'''amour'' is a film.", "L'amour is a film."),
    ("See [[Berlin]], [[Berlin|the city]], [[bus]]es, [[Foo (bar)|]] and [[:Category:X]].",
     "See Berlin, the city, buses, Foo and Category:X."),
    ("An [http://a.b/c external link], [http://a.b], [//x.y z] here.", "An external link, z here."),
    ("Water{{cite web|url=http://x|title={{a|b}} c}} flows.", "Water flows."),
    ("A{{{param|{{x}}}}} b{{{{{1}}}}} c.", "A b c."),
    ("One.<ref name=\"a > b\">Not {{this}} [[one]].</ref> Two.<ref name=x /> Three.", "One. Two. Three."),
    ("A <!-- hidden\n\n[[x]] --> comment.", "A comment."),
    ("The formula <math>\\frac{a}{{b}}</math> is short.", "The formula is short."),
    ("Line one\nline two.", "Line one line two."),
    ("A&nbsp;b &amp; c &mdash; d&#33;", "A b & c — d!"),
    ("Text<br/>more<br>text <small>here</small> <span style=\"x\">there</span>.", "Text more text here there."),
    ("<nowiki>'''[[not]] {{markup}}'''</nowiki> stays.", "'''[[not]] {{markup}}''' stays."),
    ("Name (; born {{date|1879}}) lived (, ) here ( ).", "Name (born) lived here."),
    ("He ({{IPA|x}}) came.", "He came."),
    ("It is {{convert|10|km|mi}} long and {{convert|3|to|5|ft}} wide.", "It is 10 km long and 3 to 5 ft wide."),
    ("From {{lang|de|[[Haus|Häuser]]}} and {{lang-fr|maison}}{{spaced ndash}}so.", "From Häuser and maison – so."),
    ("{{nowrap|1=a = b}} is {{abbr|MP|Member}}.", "a = b is MP."),
    ("__NOTOC__Text here.", "Text here."),
    ("[[File:A.jpg|thumb|A [[nested]] caption with {{t|x}}.]]Text.", "Text."),
    ("[[Image:A.jpg|200px]]Text [[Category:Things]][[de:Ding]].", "Text."),
    ("Code <code>print(x)</code> stays.", "Code print(x) stays."),
    ("<gallery>\nFile:A.jpg|One\n\nFile:B.jpg|Two\n</gallery>Text.", "Text."),
    ("-{zh-hans:计算机; zh-hant:電腦}-是机器。", "计算机是机器。"),
    ("Unclosed {{template here.", "Unclosed template here."),
    ("Unclosed [[link here.", "Unclosed link here."),
    ("Stray }} and ]] and |} marks.", "Stray and and marks."),
]  # fmt: skip


@pytest.mark.parametrize(("text", "expected"), CASES)
def test_inline_markup(text: str, expected: str) -> None:
    assert prose(text) == [expected]


def test_blocks_go_and_paragraphs_stay() -> None:
    text = f"""{{{{Infobox
| name = X
| table = {{|
| a || b
|}}
}}}}
{LONG}
still the same paragraph.

== Heading ==
{LONG}
* a list
# another
: indented
; term
{{| class="wikitable"
|+ caption
! head
|-
| cell {{{{x}}}} || [[cell]]
{{|
| nested
|}}
|}}
Last paragraph.
----
'''Bibliography'''
[[Category:X]]
File:Gallery line.jpg|Caption of some length, outside of its gallery, which is no prose at all.
"""
    assert prose(text) == [f"{LONG} still the same paragraph.", LONG, "Last paragraph."]


def test_a_table_inside_a_parameter_and_a_parameter_inside_a_table() -> None:
    assert without_templates("a{{x|{|\n|b|}}}c") == "ac"
    assert without_templates("a{|\n|{{b|c|}}\n|}d") == "ad"
    assert without_templates("a{{{{b}}c}}d") == "ad"


def test_names_of_namespaces_come_from_the_dump() -> None:
    text = "[[Datei:A.jpg|mini|x]][[Kategorie:Y]][[Medium:z.ogg|t]]Der [[Haus]]-Text."
    assert GERMAN.paragraphs(text) == ["Der Haus-Text."]
    assert Cleaner({6: "Soubor"}).paragraphs("[[Soubor:A.jpg|popis]]Text.") == ["Text."]


def test_xml_entities_are_one_level() -> None:
    assert unescape_xml("&lt;ref&gt; &amp;nbsp; &quot;x&quot; &amp;lt;") == '<ref> &nbsp; "x" &lt;'


MARKS = ["{{", "}}", "{", "}", "[[", "]]", "[", "]", "{|", "|}", "|", "<ref>", "</ref>", "<!--", "-->", "'''",
         "\n", "\n\n", "* ", "== ", "word ", "text.", "<nowiki>", "</nowiki>", "<math>", "&lt;", "http://x ", "File:"]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("Some [|}[text.", "Some text."),
        ("Some [ [][text.", "Some text."),
        ("Some {[|}{text [x] |}|}|y.", "Some {[{text [x] |y."),
        (f"Some {'[|' * 40}text.", "Some text."),
        (f"Some {9 * chr(39)}text.", "Some ''text."),
    ],
)
def test_marks_brought_together_go_as_well(text: str, wanted: str) -> None:
    assert prose(text) == [wanted]


@given(st.lists(st.sampled_from(MARKS), max_size=60).map("".join))
@example("[|}[text.")
def test_no_nesting_leaves_marks_or_fails(text: str) -> None:
    for paragraph in prose(text):
        if "<nowiki>" not in text:
            assert not re.search(r"\{\{|\}\}|\[\[|\]\]|\{\||\|\}|'''", paragraph)
        assert paragraph == paragraph.strip() and paragraph and "\n" not in paragraph


@given(st.text(alphabet="abc XYZ.,éß漢字\n", max_size=200))
def test_plain_text_loses_no_word(text: str) -> None:
    text = text.strip() + LONG
    assert "".join(prose(text)).split()[-5:] == LONG.split()[-5:]
    kept = " ".join(prose(text.replace("\n", " "))).replace(" ", "")
    assert re.sub(r"[\s,;:.]", "", kept) == re.sub(r"[\s,;:.]", "", text)


def test_time_grows_with_the_text_not_with_its_nesting() -> None:
    """10,000 unclosed templates, links, tags and brackets: done at once, not after minutes."""
    for mark in (
        "{{a|",
        "[[a|",
        "<ref>",
        "<ref name=",
        "{|",
        "(",
        "( ; ",
        "[http://",
        "''",
        "<!--",
        "-{",
        "__A",
    ):
        prose(f"{mark * 10_000} {LONG}")
        prose(f"{(mark + ' ') * 10_000} {LONG}")


def test_real_dump_has_no_markup_left(real_data) -> None:

    from configs.schema import SourceConfig
    from data_prep.sources import Tally, open_source

    left = re.compile(r"\{\{|\}\}|\[\[|\]\]|\{\||\|\}|'''|</?ref|</?math|&nbsp;|\bFile:|https?://")
    for name in ("enwiki", "dewiki", "jawiki", "arwiki", "simplewiki"):
        source = open_source(
            SourceConfig(kind="wikipedia", path=str(real_data / f"wiki/minidump-{name}.xml.bz2"))
        )
        documents = [d for unit in source.ranges() for d in source.documents(unit, Tally())]
        assert documents
        for document in documents:
            for paragraph in document.paragraphs:
                assert not left.search(paragraph), paragraph
