"""The exported tokenizer gives the ids the shards were built with, for every kind and switch."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from configs import UserError
from configs.model import ModelConfig
from configs.schema import VocabConfig
from data_prep import tokenizer as prep
from pretrain.checkpoint import save_logical
from pretrain.convert.export import export
from pretrain.convert.vocabulary import SPECIAL, is_cased, write_folder
from pretrain.model import build

TEXT = "Zoë's naïve café in Łódź"
# B05: what each pair of switches makes of the text, word by word (tokenizers 0.23.3).
LOWER = {
    True: "zoe's naive cafe in łodz",
    None: "zoe's naive cafe in łodz",
    False: "zoë's naïve café in łódź",
}
CASED = {None: TEXT, False: TEXT, True: "Zoe's naive cafe in Łodz"}


def run_with(size: int, work: Path, fingerprint: str = "") -> Path:
    """A work_dir of a random model whose vocabulary is `size`."""
    config = ModelConfig(
        vocab_size=size,
        hidden_size=16,
        num_layers=1,
        num_heads=2,
        intermediate_size=32,
        max_position_embeddings=40,
    )
    _, parts = build(config, seed=1)
    tensors = {}
    for piece in parts:
        block = piece.view(piece.param.detach().view(-1))
        tensors[piece.name] = block[piece.clip(block)[1]].clone()
    save_logical(
        work / "train", tensors, {"model": vars(config), "tokenizer_fingerprint": fingerprint}
    )
    return work


@pytest.mark.parametrize("strip", [None, True, False])
@pytest.mark.parametrize("lowercase", [True, False])
def test_b05_casing_and_accents_reach_the_exported_folder(
    tmp_path: Path, lowercase: bool, strip: bool | None, capsys
) -> None:
    from transformers import AutoTokenizer

    letters = sorted(set((TEXT + LOWER[True] + LOWER[False]).replace(" ", "")))
    entries = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *letters, *(f"##{c}" for c in letters)]
    (tmp_path / "vocab.txt").write_text("\n".join(entries))
    config = VocabConfig(file=str(tmp_path / "vocab.txt"), lowercase=lowercase, strip_accents=strip)
    ours = prep.load(config)
    work = tmp_path / "run"
    ours.save(work / "vocab")
    out = export(run_with(ours.vocab_size, work, ours.fingerprint), tmp_path / "out")
    exported = AutoTokenizer.from_pretrained(out)
    ids, _ = ours.encode_sentences([TEXT])
    assert exported(TEXT)["input_ids"][1:-1] == ids.tolist()
    pieces = "".join(exported.convert_ids_to_tokens(ids.tolist())).replace("##", "")
    assert pieces == (LOWER if lowercase else CASED)[strip].replace(" ", "")
    said = json.loads((out / "tokenizer_config.json").read_text())
    assert said["model_max_length"] == exported.model_max_length == 40
    assert exported.is_fast
    assert "warning" not in capsys.readouterr().out
    file = work / "vocab/tokenizer.json"
    values = json.loads(file.read_text())
    vocab = values["model"]["vocab"]
    vocab["a"], vocab["c"] = vocab["c"], vocab["a"]
    file.write_text(json.dumps(values))
    export(work, tmp_path / "out2")
    assert "not, to the byte, the tokenizer" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["roberta-base", "sentencepiece"])
def test_byte_and_unigram_vocabularies_are_exported_too(
    tmp_path: Path, real_data: Path, name: str
) -> None:
    """RoBERTa's has holes: 50,262 entries, ids up to 50,264."""
    import gzip

    from transformers import AutoTokenizer

    folder = real_data / "vocab" / name
    if name == "sentencepiece":
        file = tmp_path / "30k.model"
        file.write_bytes(
            gzip.decompress(
                (real_data / "vocab/sentencepiece-30k-albert-fork/30k-clean.model.gz").read_bytes()
            )
        )
    else:
        file = tmp_path / "bpe"
        file.mkdir()
        for part in ("vocab.json", "merges.txt"):
            (file / part).write_bytes(gzip.decompress((folder / f"{part}.gz").read_bytes()))
    ours = prep.load(file)
    work = tmp_path / "run"
    ours.save(work / "vocab")
    out = export(run_with(ours.vocab_size, work, ours.fingerprint), tmp_path / "out")
    exported = AutoTokenizer.from_pretrained(out)
    sentence = "The kiln reached nine hundred degrees."
    assert exported(sentence)["input_ids"][1:-1] == ours.encode_sentences([sentence])[0].tolist()
    masked = exported(sentence.replace("hundred", exported.mask_token))["input_ids"]
    at = masked.index(exported.mask_token_id)  # right behind "nine": no blank of its own between
    assert masked[:at] == exported(sentence)["input_ids"][:at]
    ends = exported(sentence.replace("degrees", exported.mask_token))["input_ids"]
    assert ends[-3] == exported.mask_token_id  # nor before the full stop
    assert ends[-2:] == exported(sentence)["input_ids"][-2:]
    # Of a pair, B is segment 1 as in the rows that the model was trained on.
    for tokenizer in (exported, AutoTokenizer.from_pretrained(work / "vocab")):
        pair = tokenizer(sentence, "It held.")
        ids, types = pair["input_ids"], pair["token_type_ids"]
        second = ids.index(ours.special_ids["sep"]) + 1
        assert types == [0] * second + [1] * (len(ids) - second)
    assert json.loads((out / "config.json").read_text())["pad_token_id"] == ours.special_ids["pad"]
    assert exported.mask_token_id == ours.special_ids["mask"]


@pytest.mark.parametrize("strip", [None, True, False])
@pytest.mark.parametrize("chinese", [True, False])
@pytest.mark.parametrize("lower", [True, False])
def test_a_vocabulary_with_its_settings_keeps_them(
    tmp_path: Path, lower: bool, chinese: bool, strip: bool | None
) -> None:
    """A folder from before tokenizer.json, of entries in small letters alone: what transformers
    makes of it is made of the copy."""
    from transformers import AutoTokenizer

    words = ["Zoë", "zoë", "zoe", "Zoe", "中", "中国", "国"]
    entries = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(w for w in words if w == w.lower())]
    old = tmp_path / "old"
    old.mkdir()
    (old / "vocab.txt").write_text("\n".join(entries))
    said = {"do_lower_case": lower, "strip_accents": strip, "tokenize_chinese_chars": chinese}
    (old / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "BertTokenizer", **said})
    )
    write_folder(old, tmp_path / "new", None, 512)
    theirs, ours = (AutoTokenizer.from_pretrained(tmp_path / n) for n in ("old", "new"))
    assert [ours.tokenize(w) for w in words] == [theirs.tokenize(w) for w in words]
    kept = json.loads((tmp_path / "new/tokenizer_config.json").read_text())
    assert {key: kept[key] for key in said} == said
    write_folder(old, tmp_path / "told", not lower, 512)
    assert (
        json.loads((tmp_path / "told/tokenizer_config.json").read_text())["do_lower_case"] != lower
    )
    with pytest.raises(UserError, match="has its own casing"):
        write_folder(tmp_path / "new", tmp_path / "twice", lower, 512)


def test_a_bare_vocabulary_tells_its_casing(tmp_path: Path, real_data: Path) -> None:
    from transformers import AutoTokenizer

    for name, cased, ids in (("uncased", False, [7592]), ("cased", True, [8667])):
        file = real_data / f"vocab/bert-base-{name}/vocab.txt"
        assert is_cased(file.read_text().splitlines()) == cased
        write_folder(file, tmp_path / name, None, 512)
        tokenizer = AutoTokenizer.from_pretrained(tmp_path / name)
        assert tokenizer("Hello")["input_ids"][1:-1] == ids
        assert torch.tensor(tokenizer.mask_token_id) == 103


EDITED: list[tuple[str, dict, str]] = [
    ("tokenizer.json", {"added_tokens": None}, "tokenizer.json: no readable tokenizer"),
    ("tokenizer.json", {"pre_tokenizer": []}, "tokenizer.json: no readable tokenizer"),
    (
        "tokenizer.json",
        {"model": {"vocab": {"the": "26"}}},
        "tokenizer.json: no readable tokenizer",
    ),
    *(
        ("tokenizer_config.json", {"mask_token": token}, "special_tokens_map.json: mask_token is ")
        for token in (5, ["[MASK]"], {"content": None}, {"text": "[MASK]"}, "[M]")
    ),
    ("special_tokens_map.json", {"mask_token": 5}, "mask_token is 5, in tokenizer_config.json "),
    ("special_tokens_map.json", {"pad_token": {"content": "[P]"}}, r"pad_token is \[P\], in "),
]


@pytest.mark.parametrize("name, change, message", EDITED)
def test_a_tokenizer_that_was_edited_is_refused(
    tmp_path: Path, run_folder: Path, name: str, change: dict, message: str
) -> None:
    names = {role: f"[{role[:-6].upper()}]" for role in SPECIAL}
    (run_folder / "vocab/special_tokens_map.json").write_text(json.dumps(names))
    file = run_folder / "vocab" / name
    file.write_text(json.dumps({**json.loads(file.read_text()), **change}))
    with pytest.raises(UserError, match=message):
        export(run_folder, tmp_path / "out")
    for content in ("", "[" * 9999):
        file.write_text(content)
        with pytest.raises(UserError, match=name):
            export(run_folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()
