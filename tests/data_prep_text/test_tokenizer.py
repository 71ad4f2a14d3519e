"""Every kind of tokenizer: trained, loaded, saved; the exported one gives the same ids."""

from __future__ import annotations

import gzip
import io
import json
import os
import random
import re
import string
import subprocess
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import models
from transformers import AutoTokenizer

from configs import UserError
from configs.schema import VocabConfig
from data_prep.tokenizer import Tokenizer, load, train
from data_prep.tokenizer_models import bert_steps, byte_steps
from data_prep.training_text import without_long_words
from tests.data_prep_text.test_tokenizer_words import SETTINGS, TEXTS

SENTENCE = "Zoë's naïve café in Łódź"
CORPUS = [
    f"The {a} {b} sees the {c}; it isn't {a}er than Zoë's café, naïve or not, in {n} days."
    for n, a in enumerate(["old", "young", "small", "tall", "strange", "green"])
    for b in ["river", "mountain", "house", "garden"]
    for c in ["unaffable tortoise", "runner", "reader", "night"]
] * 3


def vocab_file(folder: Path, tokens: list[str], tail: str = "\n", name: str = "vocab.txt") -> str:
    (folder / name).write_text("\n".join(tokens) + tail, encoding="utf-8", newline="\n")
    return str(folder / name)


SPECIALS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
LETTERS = [f"{pre}{c}" for pre in ("", "##") for c in "ZzoeëńnaïivcfékÀŁłóódźLdsi'nOD"]


def exported(tokenizer: Tokenizer, folder: Path) -> Any:
    return AutoTokenizer.from_pretrained(tokenizer.save(folder))


def agree(tokenizer: Tokenizer, other: Any, texts: list[str]) -> None:
    values, offsets = tokenizer.encode_sentences(texts)
    ours = [values[a:b].tolist() for a, b in zip(offsets, offsets[1:])]
    # As in what is prepared, the name of a special token is text.
    as_text = {"add_special_tokens": False, "split_special_tokens": True}
    assert ours == [other(text, **as_text)["input_ids"] for text in texts]


NORMAL = {
    (True, None): "zoe's naive cafe in łodz",
    (True, True): "zoe's naive cafe in łodz",
    (True, False): "zoë's naïve café in łódź",
    (False, None): SENTENCE,
    (False, False): SENTENCE,
    (False, True): "Zoe's naive cafe in Łodz",
}


@pytest.mark.parametrize("switches", SETTINGS)
def test_b05_lower_case_and_accents_are_two_switches(tmp_path, switches) -> None:
    import unicodedata

    file = vocab_file(tmp_path, SPECIALS + sorted({*LETTERS, "'"}))
    tokenizer = load(VocabConfig(file=file, lowercase=switches[0], strip_accents=switches[1]))
    assert tokenizer.backend.normalizer.normalize_str(SENTENCE) == NORMAL[switches]
    other = exported(tokenizer, tmp_path / "out")
    again = load(tmp_path / "out")
    decomposed = unicodedata.normalize("NFD", SENTENCE)
    agree(tokenizer, other, [SENTENCE, decomposed, SENTENCE.upper()])
    agree(again, other, [SENTENCE, decomposed, SENTENCE.upper()])
    strips = switches[0] if switches[1] is None else switches[1]
    for one in (tokenizer, again):
        assert one.switches["do_lower_case"] == switches[0]
        assert one.switches["strip_accents"] == strips
        assert one.fingerprint == tokenizer.fingerprint
    if strips:
        a, b = (tokenizer.encode_sentences([t])[0].tolist() for t in (SENTENCE, decomposed))
        assert a == b


@settings(max_examples=120, deadline=None)
@given(texts=TEXTS, switches=st.sampled_from(SETTINGS))
def test_b05_exported_ids_equal_ours_for_any_text(all_settings, texts, switches) -> None:
    agree(*all_settings[switches], texts)


@pytest.fixture(scope="module")
def all_settings(tmp_path_factory) -> dict[tuple[bool, bool | None], tuple[Tokenizer, Any]]:
    folder = tmp_path_factory.mktemp("six")
    file = vocab_file(
        folder, SPECIALS + sorted({*LETTERS, "'", "the", "The", "漢", "σ", "ς", "が"})
    )
    made = {}
    for number, (lower, strip) in enumerate(SETTINGS):
        tokenizer = load(VocabConfig(file=file, lowercase=lower, strip_accents=strip))
        made[lower, strip] = (tokenizer, exported(tokenizer, folder / str(number)))
    return made


def test_b07_vocabularies_that_lack_or_repeat_entries(tmp_path) -> None:
    words = [f"w{n}" for n in range(15)]
    lacking = vocab_file(tmp_path, SPECIALS[:4] + words + ["w15"])
    with pytest.raises(UserError, match=r"no \[MASK\]"):
        load(VocabConfig(file=lacking))
    twice = vocab_file(tmp_path, [*SPECIALS, "[SEP]", *words[:14]])
    with pytest.raises(UserError, match=r"'\[SEP\]' is listed twice \(lines 4 and 6\)"):
        load(VocabConfig(file=twice))
    gap = vocab_file(tmp_path, [*SPECIALS, "", *words])
    with pytest.raises(UserError, match="line 6 is blank"):
        load(VocabConfig(file=gap))
    plain = load(VocabConfig(file=vocab_file(tmp_path, SPECIALS + words, "\n")))
    for tail in ("", "\n\n", "\n \n", "\r\n"):
        other = load(VocabConfig(file=vocab_file(tmp_path, SPECIALS + words, tail)))
        assert other.vocab_size == 20 and other.fingerprint == plain.fingerprint
    with pytest.raises(UserError, match="no such file"):
        load(VocabConfig(file=str(tmp_path / "missing.txt")))


def test_b07_only_lf_parts_entries(tmp_path) -> None:
    tokenizer = load(VocabConfig(file=vocab_file(tmp_path, [*SPECIALS, "a\u2028b", "\x85", "c"])))
    assert tokenizer.vocab_size == 8 and tokenizer.tokens[5:] == ["a\u2028b", "\x85", "c"]


KINDS = {"wordpiece": 120, "unigram": 60, "bpe": 100, "byte-bpe": 400}  # sizes


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> dict[str, tuple[Tokenizer, Any, Path]]:
    made = {}
    for kind, size in KINDS.items():
        tokenizer = train(VocabConfig(kind=kind, size=size), iter(CORPUS))
        folder = tmp_path_factory.mktemp(kind)
        made[kind] = (tokenizer, exported(tokenizer, folder), folder)
    return made


@pytest.mark.parametrize("kind", KINDS)
def test_trained_ones(trained, kind, tmp_path) -> None:
    tokenizer, other, folder = trained[kind]
    assert tokenizer.vocab_size == len(other) <= KINDS[kind]
    for role, number in tokenizer.special_ids.items():
        assert getattr(other, f"{role}_token_id") == number
    assert tokenizer.word_start.shape == (tokenizer.vocab_size,)
    values, offsets = tokenizer.encode_sentences(["the unaffable tortoise"])
    assert tokenizer.word_start[values].sum() == 3
    assert other.decode(values.tolist()).strip() == "the unaffable tortoise"
    pair = other("the", "night")["input_ids"]
    cls, sep = tokenizer.special_ids["cls"], tokenizer.special_ids["sep"]
    assert pair[0] == cls and pair[-1] == sep and pair.count(sep) == 2
    again = load(folder)
    assert again.kind == kind and again.fingerprint == tokenizer.fingerprint
    again.save(tmp_path)
    for file in sorted(folder.iterdir()):
        assert file.read_bytes() == (tmp_path / file.name).read_bytes()


@settings(max_examples=150, deadline=None)
@given(texts=TEXTS, kind=st.sampled_from([*KINDS]))
def test_ids_of_trained_ones_equal_the_exported(trained, texts, kind) -> None:
    agree(*trained[kind][:2], texts)


def test_training_twice_gives_the_same_bytes(trained) -> None:
    """In processes of their own, since hash maps differ from process to process."""
    code = (
        "import sys; from tests.data_prep_text.test_tokenizer import *\n"
        "for kind in KINDS: print(train(VocabConfig(kind=kind, size=KINDS[kind]),"
        " iter(CORPUS)).fingerprint)"
    )
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=Path(__file__).parents[2],
        env={**os.environ, "PYTHONHASHSEED": "77"},
    )  # fmt: skip
    assert run.stdout.split() == [trained[kind][0].fingerprint for kind in KINDS], run.stderr


def backend_of(kind: str) -> Backend:
    backend = Backend(models.BPE())
    if kind == "wordpiece":
        bert_steps(backend, VocabConfig())
    else:
        byte_steps(backend)
    return backend


LONG_PARTS = st.lists(
    st.one_of(
        st.text(st.sampled_from("abÉ漢.,-+/= \t\n"), max_size=8),
        st.tuples(st.sampled_from("xé漢.ก"), st.integers(1, 30)).map(lambda p: p[0] * p[1]),
    ),
    max_size=8,
).map("".join)


@settings(max_examples=300, deadline=None)
@given(texts=st.lists(LONG_PARTS, max_size=4), kind=st.sampled_from(["wordpiece", "byte-bpe"]))
def test_long_words_and_nothing_else_are_left_out(texts, kind) -> None:
    backend = backend_of(kind)

    def words(text: str) -> list[str]:
        if backend.normalizer is not None:
            text = backend.normalizer.normalize_str(text)
        return [text[a:b].strip() for _, (a, b) in backend.pre_tokenizer.pre_tokenize_str(text)]

    with redirect_stdout(io.StringIO()) as said:
        kept = list(without_long_words(texts, backend, 12))
    long = [word for text in texts for word in words(text) if len(word) > 12]
    for before, after in zip(texts, kept, strict=True):
        wanted = [word for word in words(before) if 0 < len(word) <= 12]
        if wanted == words(before):
            assert after == before
        assert [word for word in words(after) if word] == wanted
    assert (
        f"words of more than 12 characters left out: {len(long):,}," in said.getvalue()
    ) == bool(long)


@pytest.mark.parametrize("kind", KINDS)
def test_a_word_of_megabytes_hangs_no_training_and_leaves_no_trace(trained, kind) -> None:
    """Its merges would take days: their time goes with the square of a word's length."""
    blob = "".join(random.Random(1).choices(string.ascii_lowercase, k=2_000_000))
    with redirect_stdout(io.StringIO()) as said:
        tokenizer = train(VocabConfig(kind=kind, size=KINDS[kind]), iter([*CORPUS, blob]))
    if kind in ("wordpiece", "byte-bpe"):
        assert "left out: 1, the first one of 2,000,000: " in said.getvalue()
        assert tokenizer.fingerprint == trained[kind][0].fingerprint


def test_a_size_that_cannot_be_is_refused() -> None:
    for size, why in ((9000, "too high (9000). Please set it"), (20, "required_chars. 20 vs ")):
        with pytest.raises(UserError, match=rf"vocab.size={size}: .*{re.escape(why)}") as caught:
            train(VocabConfig(kind="unigram", size=size), iter(CORPUS))
        assert "--" not in str(caught.value)  # its own options are none of ours
    with pytest.raises(UserError, match=r"vocab.kind=words"):
        train(VocabConfig(kind="words"), iter(CORPUS))


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(5, "Input/output error", "a.txt")])
@pytest.mark.parametrize("kind", KINDS)
def test_what_stops_the_reading_of_text_is_told_as_it_is(kind, error) -> None:
    """sentencepiece made a RuntimeError of it, and that was told as a size that cannot be."""

    def texts():
        yield from CORPUS
        raise error

    with pytest.raises(type(error)) as caught:
        train(VocabConfig(kind=kind, size=KINDS[kind]), texts())
    assert caught.value is error


@pytest.mark.parametrize("texts", [[], ["", " \n"]])
@pytest.mark.parametrize("kind", KINDS)
def test_no_text_makes_no_vocabulary(kind, texts) -> None:
    with pytest.raises(UserError, match="the sources hold no text"):
        train(VocabConfig(kind=kind, size=KINDS[kind]), iter(texts))


@pytest.mark.parametrize("kind", ["unigram", "bpe"])
def test_sentencepiece_models_give_the_ids_of_sentencepiece(tmp_path, kind) -> None:
    import sentencepiece

    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS), model_writer=model, model_type=kind, vocab_size=KINDS[kind], pad_id=0, unk_id=1,
        bos_id=-1, eos_id=-1, control_symbols=["[CLS]", "[SEP]", "[MASK]"], num_threads=1, minloglevel=2,
    )  # fmt: skip
    (tmp_path / "m.model").write_bytes(model.getvalue())
    tokenizer = load(VocabConfig(file=str(tmp_path / "m.model"), lowercase=False))
    assert tokenizer.kind == kind
    processor = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    texts = [
        *CORPUS[:200],
        "  two  blanks and a\ttab ",
        "ＦＵＬＬ ｗｉｄｔｈ ① ﬁ",
        "x y z Ünknown 漢字",
    ]
    values, offsets = tokenizer.encode_sentences(texts)
    for number, text in enumerate(texts):
        assert values[offsets[number] : offsets[number + 1]].tolist() == processor.encode(text)


def unpacked(source: Path, target: Path) -> Path:
    with gzip.open(source, "rb") as file:
        target.write_bytes(file.read())
    return target


def test_real_sentencepiece_model(real_data, tmp_path) -> None:
    import sentencepiece

    model = real_data / "vocab/sentencepiece-30k-albert-fork/30k-clean.model.gz"
    file = unpacked(model, tmp_path / "spiece.model")
    tokenizer = load(VocabConfig(file=str(file), lowercase=False))
    assert (tokenizer.kind, tokenizer.vocab_size) == ("unigram", 30000)
    processor = sentencepiece.SentencePieceProcessor(model_file=str(file))
    with gzip.open(next((real_data / "books").glob("00035*")), "rt", encoding="utf-8") as book:
        texts = [" ".join(p.split()) for p in book.read().split("\n\n")][:300]
    values, offsets = tokenizer.encode_sentences(texts)
    same = sum(
        values[offsets[n] : offsets[n + 1]].tolist() == processor.encode(text)
        for n, text in enumerate(texts)
    )
    # Nearly tied ways to cut a word: sentencepiece sums in single precision, `tokenizers` in double.
    assert same >= 0.98 * len(texts)
    agree(tokenizer, exported(tokenizer, tmp_path / "out"), [*texts[:50], SENTENCE])


def test_real_byte_level_vocabularies(real_data, tmp_path) -> None:
    (tmp_path / "roberta").mkdir()
    for name in ("vocab.json", "merges.txt"):
        unpacked(real_data / f"vocab/roberta-base/{name}.gz", tmp_path / "roberta" / name)
    tokenizer = load(VocabConfig(kind="byte-bpe", file=str(tmp_path / "roberta")))
    assert tokenizer.vocab_size == 50265 and tokenizer.special_ids["mask"] == 50264
    assert tokenizer.encode_sentences(["Hello world"])[0].tolist() == [20920, 232]
    agree(
        tokenizer, exported(tokenizer, tmp_path / "out"), [SENTENCE, "a\n\nb  c", "🙂 <mask> x", ""]
    )
    (tmp_path / "gpt2").mkdir()
    unpacked(real_data / "vocab/gpt2/encoder.json.gz", tmp_path / "gpt2/vocab.json")
    unpacked(real_data / "vocab/roberta-base/merges.txt.gz", tmp_path / "gpt2/merges.txt")
    with pytest.raises(UserError, match=r"no \[PAD\], \[UNK\], \[CLS\], \[SEP\], \[MASK\]"):
        load(VocabConfig(file=str(tmp_path / "gpt2")))


def test_real_tokenizer_json_that_truncates_and_pads(real_data, tmp_path) -> None:
    file = unpacked(
        real_data / "models/all-MiniLM-L6-v2/tokenizer.json.gz", tmp_path / "tokenizer.json"
    )
    tokenizer = load(VocabConfig(file=str(file)))
    plain = load(VocabConfig(file=str(real_data / "vocab/bert-base-uncased/vocab.txt")))
    texts = ["a " * 700, SENTENCE, "Unaffable tortoises."]
    for one in (tokenizer, load(tokenizer.save(tmp_path / "out"))):
        assert one.encode_sentences(texts)[0].tolist() == plain.encode_sentences(texts)[0].tolist()
    agree(tokenizer, AutoTokenizer.from_pretrained(tmp_path / "out"), texts)


@pytest.mark.parametrize("lower", [True, False])
@pytest.mark.parametrize("strip", [True, False])
def test_the_case_that_a_folder_says_of_its_vocab_txt_is_used(tmp_path, lower, strip) -> None:
    vocab_file(tmp_path, SPECIALS + sorted({*LETTERS, "'"}))
    said = {"do_lower_case": lower, "strip_accents": strip}
    config = said | {"tokenizer_class": "BertTokenizer"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = load(VocabConfig(file=str(tmp_path), lowercase=not lower))
    assert said.items() <= tokenizer.switches.items()
    agree(tokenizer, AutoTokenizer.from_pretrained(tmp_path), [SENTENCE])


@pytest.mark.parametrize("kind", KINDS)
def test_the_names_of_special_tokens_are_text_to_every_kind(kind) -> None:
    tokenizer = train(VocabConfig(kind=kind, size=KINDS[kind]), iter(CORPUS))
    ids, _ = tokenizer.encode_sentences(
        [f"a {name} b {name}" for name in tokenizer.specials.values()]
    )
    controls = {number for role, number in tokenizer.special_ids.items() if role != "unk"}
    assert not controls & set(ids.tolist())
