"""Tokenizers of foreign models: checked, and written as a folder that transformers opens."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from configs import UserError, make_folder
from configs.files import read_json

SPECIAL = {
    "pad_token": "[PAD]",
    "unk_token": "[UNK]",
    "cls_token": "[CLS]",
    "sep_token": "[SEP]",
    "mask_token": "[MASK]",
}
TOKENIZER_FILES = (
    "tokenizer.json",
    "vocab.txt",
    "tokenizer_config.json",
    "special_tokens_map.json",
)


def read_vocab(file: Path) -> list[str]:
    """Entries of a vocab.txt, blank last lines left out.

    Raises:
        UserError: a special token is missing, an entry is there twice or blank; names it.
    """
    try:
        lines = file.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{file}: {error}", "name the vocab.txt of the model") from None
    entries = [line.removesuffix("\r") for line in lines]
    while entries and not entries[-1]:
        entries.pop()
    seen: dict[str, int] = {}
    for number, entry in enumerate(entries, 1):
        if not entry:
            raise UserError(f"{file}: line {number} is blank", "ids would shift; restore the file")
        if entry in seen:
            raise UserError(
                f"{file}: {entry!r} stands in lines {seen[entry]} and {number}", "restore the file"
            )
        seen[entry] = number
    for token in SPECIAL.values():
        if token not in seen:
            raise UserError(f"{file}: no {token}", "a BERT vocabulary has it; restore the file")
    return entries


def is_cased(entries: list[str]) -> bool:
    """True when the vocabulary holds upper-case letters outside of its special tokens."""
    return any(e != e.lower() for e in entries if not (e.startswith("[") and e.endswith("]")))


def given(path: str) -> Path | None:
    """What `--vocab` names: a vocab.txt or a tokenizer folder, also by the tokenizer.json in it."""
    if not path:
        return None
    return Path(path).parent if Path(path).name == "tokenizer.json" else Path(path)


def tokenizer_size(source: Path) -> int:
    """Ids of a vocab.txt or of a tokenizer folder: the largest plus one (some have holes).

    Raises:
        UserError: unreadable, or one of the five special tokens is missing.
    """
    if source.is_file():
        return len(read_vocab(source))
    file = source / "tokenizer.json"
    if not file.is_file():
        return len(read_vocab(source / "vocab.txt"))
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
        vocab = values["model"]["vocab"]
        if isinstance(vocab, list):  # unigram: [piece, score] in the order of the ids
            vocab = {entry[0]: number for number, entry in enumerate(vocab)}
        ids = {**vocab, **{t["content"]: t["id"] for t in values["added_tokens"]}}
        size = int(max(ids.values())) + 1
    except (ValueError, KeyError, TypeError, OSError, RecursionError) as error:
        raise UserError(f"{file}: no readable tokenizer ({error!r})", "restore it") from None
    for token in special_names(source).values():
        if token not in ids:
            raise UserError(f"{file}: no {token}", "training needs it; restore the file")
    return size


def special_names(folder: Path) -> dict[str, str]:
    """The special tokens as tokenizer_config.json and special_tokens_map.json call them, BERT's where
    neither says.

    Raises:
        UserError: one of the two is damaged, or they disagree.
    """
    files = ("tokenizer_config.json", "special_tokens_map.json")
    sources = [_read(folder / name) for name in files]
    names = {}
    for role, usual in SPECIAL.items():
        said = [token for source in sources if (token := source.get(role))]
        told = [str(t.get("content") if isinstance(t, dict) else t) for t in said] or [usual]
        if told[0] != told[-1]:
            raise UserError(
                f"{folder / files[1]}: {role} is {told[1]}, in {files[0]} {told[0]}", "restore it"
            )
        names[role] = told[0]
    return names


def _read(file: Path) -> dict[str, Any]:
    return read_json(file, "restore it") if file.is_file() else {}


def write_folder(source: Path, folder: Path, lowercase: bool | None, max_length: int) -> None:
    """Copies a tokenizer folder, or builds one out of a vocab.txt.

    Args:
        lowercase: for a vocab.txt; None takes what the tokenizer_config.json of its folder says, or
            looks for upper-case entries.
        max_length: what the tokenizer says of the model's longest input.

    Raises:
        UserError: `lowercase` for a tokenizer.json, which has its casing in itself.
    """
    make_folder(folder)
    vocab_file = source if source.is_file() else source / "vocab.txt"
    if source.is_dir() and (source / "tokenizer.json").is_file():
        if lowercase is not None:
            raise UserError(
                f"{source / 'tokenizer.json'}: has its own casing", "leave --casing out"
            )
        for name in TOKENIZER_FILES:
            if (source / name).is_file():
                shutil.copyfile(source / name, folder / name)
    else:
        entries = read_vocab(vocab_file)
        casing = _casing(
            entries, lowercase, _read(source / "tokenizer_config.json") if source.is_dir() else {}
        )
        _build(entries, casing).save(str(folder / "tokenizer.json"))
        (folder / "vocab.txt").write_text("".join(f"{e}\n" for e in entries), encoding="utf-8")
        write_config(folder, casing, max_length)
    if not (folder / "tokenizer_config.json").is_file():
        write_config(folder, {}, max_length)


def _casing(entries: list[str], lowercase: bool | None, said: dict[str, Any]) -> dict[str, Any]:
    """do_lower_case, strip_accents and tokenize_chinese_chars under transformers' names."""
    # strip_accents None follows do_lower_case, as in Google's tokenizer (B05).
    usual = {
        "do_lower_case": not is_cased(entries),
        "strip_accents": None,
        "tokenize_chinese_chars": True,
    }
    casing = usual | {key: said[key] for key in usual if isinstance(said.get(key), bool)}
    return casing if lowercase is None else {**casing, "do_lower_case": lowercase}


def write_config(folder: Path, values: dict[str, Any], max_length: int) -> None:
    """tokenizer_config.json with the casing given, the special tokens and the length limit."""
    config = {
        "tokenizer_class": "BertTokenizer",
        "model_max_length": max_length,
        **SPECIAL,
        **values,
    }
    text = json.dumps(config, indent=2, ensure_ascii=False) + "\n"
    (folder / "tokenizer_config.json").write_text(text, encoding="utf-8")


def _build(entries: list[str], casing: dict[str, Any]) -> Any:
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

    ids = {entry: i for i, entry in enumerate(entries)}
    tokenizer = Tokenizer(models.WordPiece(ids, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(
        lowercase=casing["do_lower_case"],
        strip_accents=casing["strip_accents"],
        handle_chinese_chars=casing["tokenize_chinese_chars"],
    )
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.BertProcessing(
        ("[SEP]", ids["[SEP]"]), ("[CLS]", ids["[CLS]"])
    )
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.add_special_tokens(list(SPECIAL.values()))
    return tokenizer
