"""A text with a mask in it, as fill-mask gets it: pieces around it as in the rows of the training."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend

from configs.schema import VocabConfig
from data_prep import tokenizer as prep
from pretrain.convert.mask_token import fit_around_mask
from tests.data_prep_text.test_tokenizer import CORPUS, KINDS
from tests.data_prep_text.test_tokenizer_words import PIECES

BLANK = {"wordpiece": "", "unigram": "▁", "bpe": "▁", "byte-bpe": "Ġ"}
# Without what opens a special token: text behind one of those is no longer as in the shards.
TEXTS = st.lists(PIECES, max_size=14).map(
    lambda parts: "".join(parts).replace("[", "").replace("<", "")
)
BLANKS = st.text("a\t\n\x01\x0b\x1c\x85\u00a0\u0301\u180e\u200b\u2028\u3000\ufeffﾞ▁ .", max_size=12)


@cache
def tokenizers(kind: str) -> tuple[Backend, Backend, str]:
    """That of the shards, the exported one, and the mask."""
    tokenizer = prep.train(VocabConfig(kind=kind, size=KINDS[kind]), iter(CORPUS))
    values, mask = json.loads(tokenizer.backend.to_str()), tokenizer.specials["mask"]
    fit_around_mask(values, mask)
    return tokenizer.backend, Backend.from_str(json.dumps(values)), mask


def seen(tokenizer: Backend, *texts: Any, words: bool = False) -> tuple[list[str], list[int]]:
    found = tokenizer.encode(*texts, is_pretokenized=words)
    return found.tokens, found.type_ids


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=100, deadline=None)
@given(texts=st.lists(TEXTS | BLANKS, min_size=2, max_size=4))
def test_texts_without_a_mask_are_encoded_as_the_shards_were(kind, texts) -> None:
    ours, exported, _ = tokenizers(kind)
    assert seen(exported, texts[0]) == seen(ours, texts[0])
    assert seen(exported, *texts[:2]) == seen(ours, *texts[:2])
    assert seen(exported, texts, words=True) == seen(ours, texts, words=True)
    ids = ours.encode(texts[0]).ids
    assert exported.decode(ids) == ours.decode(ids)


@pytest.mark.parametrize("kind", KINDS)
def test_pieces_lie_where_they_lay(kind) -> None:
    ours, exported, _ = tokenizers(kind)
    for text in CORPUS[:5]:
        assert exported.encode(text).offsets == ours.encode(text).offsets


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=60, deadline=None)
@given(
    before=st.from_regex(r"([ace]{1,3}[.,']? )*", fullmatch=True),
    behind=st.from_regex(r"[.,']?( [ace]{1,3}[.,']?)*", fullmatch=True),
)
def test_a_blank_stands_where_the_text_has_one(kind, before, behind) -> None:
    """`nine [MASK].` or `[MASK], he`: none before the full stop and the comma, as in the rows."""
    _, exported, mask = tokenizers(kind)
    pieces = exported.encode(f"{before}{mask}{behind}", add_special_tokens=False).tokens
    at = next(n for n, piece in enumerate(pieces) if piece.strip() == mask)
    parts = ["".join(part).replace("##", "") for part in (pieces[:at], pieces[at + 1 :])]
    wanted = [f" {before.rstrip()}" if before else "", behind]
    assert parts == [part.replace(" ", BLANK[kind]) for part in wanted]


@pytest.mark.parametrize("kind", KINDS)
def test_an_exported_tokenizer_stays_as_it_is_when_exported_again(kind) -> None:
    _, exported, mask = tokenizers(kind)
    values = json.loads(exported.to_str())
    fit_around_mask(values, mask)
    assert values == json.loads(exported.to_str())
