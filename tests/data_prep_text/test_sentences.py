"""Sentence boundaries: the field reports' cases, rules by example, joins, and gold treebanks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from configs import UserError
from data_prep.sentences import BEFORE_ANYTHING, BEFORE_NAME, Splitter, read_abbreviations

B01 = (
    "The kiln reached approx. 900 degrees (i.e. near the limit, cf. Table 2). "
    "Dr. A. B. Quill noted it at 4 p.m. on Friday."
)


def rejoins(text: str, splitter: Splitter) -> None:
    """Sentences with the gaps between them are the text, gaps are white space, no sentence is empty."""
    at, joined = 0, ""
    for start, end in splitter.spans(text):
        assert start < end and not text[at:start].strip()
        assert text[start:end] == text[start:end].strip()
        joined += text[at:start] + text[start:end]
        at = end
    assert not text[at:].strip()
    assert joined + text[at:] == text
    assert splitter.split(text) == [text[a:b] for a, b in splitter.spans(text)]


def test_b01_abbreviations_do_not_end_sentences() -> None:
    splitter = Splitter()
    sentences = splitter.split(B01)
    assert len(sentences) == 2
    assert sentences[0].endswith("Table 2).") and sentences[1].endswith("Friday.")
    assert " ".join(sentences) == B01
    for text in (B01, B01.replace(" ", "  \t"), f"\n {B01}\u00a0"):
        rejoins(text, splitter)


def test_b01_the_abbreviation_list_is_configurable(tmp_path) -> None:
    text = "The qzx. Unit failed. It stopped."
    assert len(Splitter().split(text)) == 3
    assert len(Splitter(["qzx."]).split(text)) == 2
    file = tmp_path / "abbreviations.txt"
    file.write_text("# ours\nQZX\n\nblk.\n", encoding="utf-8")
    assert len(Splitter(read_abbreviations(file)).split(text)) == 2
    assert read_abbreviations("") == []
    with pytest.raises(UserError, match="nowhere.txt"):
        read_abbreviations(tmp_path / "nowhere.txt")
    file.write_text("ggü.\n", encoding="latin-1")
    with pytest.raises(UserError, match=r"abbreviations\.txt: not UTF-8") as caught:
        read_abbreviations(file)
    assert f"iconv -f latin1 -t utf-8 {file}" in caught.value.remedy


ONE = [
    "Mr. Smith met Mrs. Jones vs. Prof. Brown.",
    "See Fig. 3 and pp. 4 of vol. 2 for details.",
    '"What?" asks Winston.',
    "He paid $3.50 for it at 10.30 a.m. on Jan. 9, 2005.",
    "J. R. R. Tolkien wrote it in the U.S. Department of State.",
    "Well... maybe not.",
    "2. Atoms unite.",
    "See Art. 5, Sec. II, and Quill et al. 2005, ibid. Quill.",
    "She smiled. :)",
    "Ah! my friend, wait . . . no.",
    "It ends here.[1] [2]",
    "no mark at all",
    "Is it (really?) so?",
]
TWO = [
    ("He left at 5 p.m. The train was late.", "p.m."),
    ("She studied modern art. He studied music.", "art."),
    ("It was Vitamin C. The dose was low.", "C."),
    ("It was he (or so I think). Then he left.", "think)."),
    ("“Stop!” she cried. “Why?”", "cried."),
    ("It grew. [3] Then it fell.", "[3]"),
    ("i am sure they are. houston is far.", "are."),
    ("It was in 1990. 5 years passed.", "1990."),
    ("Really?! Yes.", "Really?!"),
    ("It costs 5 USD. (Nobody paid.)", "USD."),
    ("这是句子。这是另一句。", "这是句子。"),
    ("برلين عاصمة؟ نعم.", "برلين عاصمة؟"),
    ("यह वाक्य है। दूसरा वाक्य।", "यह वाक्य है।"),
]


@pytest.mark.parametrize("text", ONE)
def test_one_sentence(text: str) -> None:
    assert Splitter().split(text) == [text]


@pytest.mark.parametrize(("text", "end"), TWO)
def test_two_sentences(text: str, end: str) -> None:
    sentences = Splitter().split(text)
    assert len(sentences) == 2
    assert sentences[0].endswith(end)


@pytest.mark.parametrize("word", sorted(set(BEFORE_ANYTHING.split())))
def test_after_some_abbreviations_the_next_word_decides(word: str) -> None:
    """One that is on both lists would never end a sentence."""
    assert len(Splitter().split(f"It was about {word}. He left.")) == 2
    assert len(Splitter().split(f"It was about {word}. Quill then.")) == 1
    assert len(Splitter([word]).split(f"It was about {word}. He left.")) == 1


@pytest.mark.parametrize("word", sorted(set(BEFORE_NAME.split())))
def test_after_others_never(word: str) -> None:
    assert len(Splitter().split(f"It was about {word}. He left.")) == 1


def test_other_languages_have_their_own_abbreviations() -> None:
    text = "Am 3. Oktober kam z.B. Herr Dr. Maier usw. Er blieb."
    assert Splitter(language="de").split("Am 3. Oktober kam er bzw. sie. Er blieb.") == [
        "Am 3. Oktober kam er bzw. sie.",
        "Er blieb.",
    ]
    assert len(Splitter(language="de").split(text)) < len(Splitter().split(text))


TEXT = st.lists(
    st.one_of(
        st.sampled_from(
            [*".!?…。！？؟।\"'”’)]:;=[12Aa ", "\n", "\u00a0", "\u2028", ":)", "Mr.", "e.g.", "[3]"]
        ),
        st.text(max_size=4),
    ),
    max_size=40,
).map("".join)


@given(text=TEXT, language=st.sampled_from(["en", "de", "ja"]))
def test_sentences_rejoin_to_the_text(text: str, language: str) -> None:
    rejoins(text, Splitter(language=language))


def test_gold_treebanks(real_data) -> None:
    """Well above what the common splitters reach on the same text (bench/RESULTS.md)."""
    from bench.sentences import gold, scores

    splitter = Splitter()
    for bank, floor in (("ewt", 87.0), ("gum", 97.0)):
        paragraphs = gold(real_data / "sbd", bank)
        assert scores(splitter.split, paragraphs)[1] >= floor
        for text, _ in paragraphs:
            rejoins(text, splitter)
