"""The cache of words gives the ids of the real tokenizer, for any text."""

from __future__ import annotations

import gzip
import json
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from configs.schema import VocabConfig
from data_prep.tokenizer import Tokenizer, load
from data_prep.tokenizer_words import Cache, WordCache

SPECIALS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
SETTINGS = [(lower, strip) for lower in (True, False) for strip in (None, True, False)]

# Characters that normalisers, cutters and lower-casing treat in their own ways.
HARD = (
    "aAzZ09éÉñİıßẞſΣσςǅŁłøÆΩÅÅ한글がかﾞ漢字豈﨎㐀𠀀ﬁﬀ①½²Ⅷ"
    "\u0300\u0301\u0308\u0327\u0338\u0345\u05b0\u064e\u0e34\u3099\u200d\u200c\u200b\u00ad\ufeff\ufffd"
    " \t\r\n\x0b\x0c\x1c\x1f\x85\xa0\u1680\u2003\u2028\u2029\u202f\u3000\x00\x07\x7f\x9f"
    "!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~‘’“”–—…«»¿¡·•†。、「」！？，\u037e\u1fef\u2212\u20ac\u00a3\u00b0"
    "🙂👩‍👩‍👧🏽\ue000\U000e0001\ud7ff"
)
PIECES = st.one_of(
    st.sampled_from(HARD),
    st.characters(exclude_categories=["Cs"]),
    st.sampled_from(
        [
            "[MASK]",
            "[SEP]",
            "[mask]",
            "[UNK",
            "SEP]",
            "the",
            "The",
            "unaffable",
            "##ing",
            "x" * 101,
            "Z" * 100,
        ]
    ),
    st.text(alphabet="abcdefgABCDEFG ,.'", max_size=12),
)
TEXTS = st.lists(st.lists(PIECES, max_size=14).map("".join), max_size=7)


@pytest.fixture(scope="module")
def tokenizers(
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[tuple[bool, bool | None], Tokenizer]:
    letters = [chr(c) for c in range(33, 127)] + list("éñßøłσςςωがか漢字한글ﬁ½“”’—…。")
    words = ["the", "The", "un", "##aff", "##able", "##ing", "zoe", "naive", "cafe", "in"]
    tokens = SPECIALS + letters + ["##" + letter for letter in letters] + words
    file = tmp_path_factory.mktemp("vocab") / "vocab.txt"
    file.write_text("\n".join(dict.fromkeys(tokens)) + "\n", encoding="utf-8")
    return {
        (lower, strip): load(VocabConfig(file=str(file), lowercase=lower, strip_accents=strip))
        for lower, strip in SETTINGS
    }


def same_ids(tokenizer: Tokenizer, texts: list[str]) -> None:
    values, offsets = tokenizer.encode_sentences(texts)
    expected = [e.ids for e in tokenizer.backend.encode_batch(texts, add_special_tokens=False)]
    got = [values[a:b].tolist() for a, b in zip(offsets, offsets[1:])]
    assert got == expected
    assert values.dtype == tokenizer.dtype and offsets.dtype == np.int64


@settings(max_examples=250, deadline=None)
@given(texts=TEXTS, switches=st.sampled_from(SETTINGS))
def test_ids_equal_the_real_tokenizers(tokenizers, texts, switches) -> None:
    same_ids(tokenizers[switches], texts)


@pytest.mark.parametrize("switches", SETTINGS)
def test_every_character_beside_every_kind_of_neighbour(tokenizers, switches) -> None:
    """Unicode's first two planes (each 7th character but for BERT's default switches)."""
    tokenizer = tokenizers[switches]
    step = 1 if switches == (True, None) else 7
    characters = [chr(c) for c in [*range(1, 0xD800, step), *range(0xE000, 0x1F000, 3 * step)]]
    random.Random(5).shuffle(characters)
    texts = [
        "".join(f"a{c}b {c}'{c}\u0301 {c}" for c in characters[i : i + 40])
        for i in range(0, len(characters), 40)
    ]
    same_ids(tokenizer, texts)


def test_a_full_cache_starts_anew_and_ids_stay(tokenizers, monkeypatch) -> None:
    monkeypatch.setattr("data_prep.tokenizer_words.LARGEST_CACHE", 2000)
    monkeypatch.setattr("data_prep.tokenizer_words.BATCH", 200)
    backend = tokenizers[True, None].backend
    cache = WordCache(backend, np.dtype(np.uint16), json.loads(backend.to_str()))
    resets = []
    real_reset = Cache._reset
    monkeypatch.setattr(Cache, "_reset", lambda self: (resets.append(1), real_reset(self))[1])
    random_ = random.Random(1)
    texts = ["".join(random_.choices("abcdefgh ,", k=60)) for _ in range(300)]
    ids, counts = cache.encode(texts)
    expected = [
        e.ids for e in tokenizers[True, None].backend.encode_batch(texts, add_special_tokens=False)
    ]
    assert len(resets) > 3
    assert counts.tolist() == [len(e) for e in expected]
    assert ids.tolist() == [i for e in expected for i in e]


def test_only_berts_own_steps_are_taken_for_cacheable(tokenizers) -> None:
    parts = json.loads(tokenizers[True, None].backend.to_str())
    assert WordCache.usable(parts)
    for change in ({"pre_tokenizer": {"type": "Whitespace"}}, {"normalizer": None}):
        assert not WordCache.usable({**parts, **change})
    parts["added_tokens"][0]["normalized"] = True
    assert not WordCache.usable(parts)


def test_no_sentences_and_empty_ones(tokenizers) -> None:
    same_ids(tokenizers[True, None], [])
    same_ids(tokenizers[True, None], [""])
    same_ids(tokenizers[True, None], ["", "a", " ", "", "[MASK]", ""])


@pytest.mark.parametrize("switches", SETTINGS)
@pytest.mark.parametrize("special", SPECIALS)
def test_the_name_of_a_special_token_in_a_text_is_text(tokenizers, switches, special) -> None:
    tokenizer = tokenizers[switches]
    values, _ = tokenizer.encode_sentences(
        [f"a {special} b", f"{special}", f"x{special}{special}y"]
    )
    controls = {tokenizer.special_ids[role] for role in ("pad", "cls", "sep", "mask")}
    assert not controls & set(values.tolist())


def test_real_text(real_data) -> None:
    """A book's sentences and lines in six scripts, with BERT's own vocabularies."""
    texts: list[str] = []
    book = next((real_data / "books").glob("00345*.gz"))
    with gzip.open(book, "rt", encoding="utf-8") as file:
        texts += file.read(300_000).split("\n")
    for code in ("ar", "zh", "de"):
        with gzip.open(real_data / f"downstream/xquad/xquad.{code}.json.gz", "rt") as file:
            texts += file.read(150_000).split('"')
    for name, lower in (("uncased", True), ("cased", False)):
        vocab = real_data / f"vocab/bert-base-{name}/vocab.txt"
        same_ids(load(VocabConfig(file=str(vocab), lowercase=lower)), texts)
