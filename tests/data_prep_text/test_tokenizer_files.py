"""Files of vocabularies that are damaged, foreign or named by mistake: what is said of each."""

from __future__ import annotations

import json

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import models

from configs import UserError
from configs.schema import VocabConfig
from data_prep.tokenizer import load
from data_prep.tokenizer_models import BYTE_SPECIALS
from tests.data_prep_text.test_tokenizer import SPECIALS


def test_damaged_files_are_named(tmp_path) -> None:
    for name in ("tokenizer.json", "spiece.model"):
        (tmp_path / name).write_bytes(b"{\x00 not one")
        with pytest.raises(UserError, match=name):
            load(VocabConfig(file=str(tmp_path / name)))
    (tmp_path / "vocab.txt").write_bytes(b"[PAD]\n\xff\xfe")
    with pytest.raises(UserError, match=r"vocab.txt: not UTF-8"):
        load(VocabConfig(file=str(tmp_path / "vocab.txt")))
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="no tokenizer in it"):
        load(tmp_path / "empty")
    vocab = {token: number for number, token in enumerate(SPECIALS)}
    backend = Backend(models.WordPiece(vocab, unk_token="[UNK]"))
    backend.save(str(tmp_path / "empty" / "tokenizer.json"))
    (tmp_path / "byte").mkdir()
    (tmp_path / "byte" / "merges.txt").write_text("a b\n")
    for folder, name in (("empty", "tokenizer_config.json"), ("byte", "vocab.json")):
        for content in ("", "{", "[]"):
            (tmp_path / folder / name).write_text(content)
            with pytest.raises(UserError, match=f"{name} is damaged"):
                load(tmp_path / folder)


def test_other_encodings_of_a_vocab_txt(tmp_path) -> None:
    file = tmp_path / "vocab.txt"
    text = "\n".join([*SPECIALS, "a"])
    file.write_text(text, encoding="utf-8")
    plain = load(VocabConfig(file=str(file)))
    file.write_text(text, encoding="utf-8-sig")  # its first token was one of another name
    assert load(VocabConfig(file=str(file))).fingerprint == plain.fingerprint
    file.write_text(text, encoding="utf-16")
    with pytest.raises(UserError, match=r"vocab\.txt: not UTF-8") as caught:
        load(VocabConfig(file=str(file)))
    assert f"iconv -f utf-16 -t utf-8 {file}" in caught.value.remedy


def test_a_vocabulary_without_special_tokens_says_how_to_train_one(tmp_path) -> None:
    (tmp_path / "vocab.txt").write_text("a\nb\n")
    with pytest.raises(UserError, match=r"no \[PAD\]") as caught:
        load(VocabConfig(file=str(tmp_path / "vocab.txt")))
    assert "(vocab.file=)" in caught.value.remedy


def test_the_vocab_json_of_a_folder_is_not_a_cut_tokenizer(tmp_path) -> None:
    (tmp_path / "vocab.json").write_text(json.dumps(BYTES))
    for remedy in ("it may be cut off: get it again", f"name its folder: vocab.file={tmp_path}"):
        with pytest.raises(UserError, match="not a tokenizer.json") as caught:
            load(VocabConfig(file=str(tmp_path / "vocab.json")))
        assert caught.value.remedy == remedy
        (tmp_path / "merges.txt").write_text("a b\n")
    assert load(VocabConfig(file=str(tmp_path))).vocab_size == 8


@pytest.mark.parametrize("kind", [models.WordPiece, models.BPE])
def test_a_tokenizer_json_may_leave_steps_out(tmp_path, kind) -> None:
    vocab = {token: number for number, token in enumerate([*SPECIALS, "a"])}
    given = (vocab,) if kind is models.WordPiece else (vocab, [])
    content = json.loads(Backend(kind(*given, unk_token="[UNK]")).to_str())
    steps = ("normalizer", "pre_tokenizer", "post_processor", "decoder", "truncation", "padding")
    left = {key: value for key, value in content.items() if key not in steps}
    for name, text in (("a", content), ("b", left)):
        (tmp_path / f"{name}.json").write_text(json.dumps(text))
    whole, bare = (load(VocabConfig(file=str(tmp_path / f"{name}.json"))) for name in "ab")
    assert bare.fingerprint == whole.fingerprint and bare.vocab_size == 6


BYTES = {token: number for number, token in enumerate((*BYTE_SPECIALS.values(), "a", "b", "ab"))}


@pytest.mark.parametrize("number", ["1", -1, 1.5, True, None, 2**31, 2**70, 7, [1]])
def test_ids_of_a_vocab_json_that_cannot_be(tmp_path, number) -> None:
    (tmp_path / "merges.txt").write_text("#version: 0.2\na b\n")
    (tmp_path / "vocab.json").write_text(json.dumps(BYTES))
    assert load(tmp_path).vocab_size == 8
    (tmp_path / "vocab.json").write_text(json.dumps({**BYTES, "b": number}))
    with pytest.raises(UserError, match="vocab.json is damaged: its ids are not numbers from 0"):
        load(tmp_path)


@pytest.mark.parametrize("line", ["ab", "a b c", "a  b", "q b", "a q", " ", "a\tb", "\udcff"])
def test_merges_that_cannot_be(tmp_path, line) -> None:
    (tmp_path / "vocab.json").write_text(json.dumps(BYTES))
    (tmp_path / "merges.txt").write_text(f"a b\n{line}\n", errors="surrogateescape")
    with pytest.raises(UserError, match="merges.txt: not the pairs"):
        load(tmp_path)
