"""Tokenizers of foreign models: checked, and written as a folder that transformers opens."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from configs import UserError, make_folder

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
        ids = {**vocab, **{t["content"]: t["id"] for t in values.get("added_tokens", [])}}
        names = _special_names(source)
    except (ValueError, KeyError, TypeError, OSError) as error:
        raise UserError(f"{file}: no readable tokenizer ({error!r})", "restore it") from None
    for token in names:
        if token not in ids:
            raise UserError(f"{file}: no {token}", "training needs it; restore the file")
    return int(max(ids.values())) + 1


def _special_names(folder: Path) -> list[str]:
    """The special tokens as tokenizer_config.json calls them, BERT's where it does not say."""
    file = folder / "tokenizer_config.json"
    said = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    named = {role: said.get(role) or token for role, token in SPECIAL.items()}
    return [t["content"] if isinstance(t, dict) else t for t in named.values()]


def write_folder(source: Path, folder: Path, lowercase: bool | None, max_length: int) -> None:
    """Copies a tokenizer folder, or builds one out of a vocab.txt.

    Args:
        lowercase: for a bare vocab.txt; None looks for upper-case entries.
        max_length: what the tokenizer says of the model's longest input.
    """
    make_folder(folder)
    vocab_file = source if source.is_file() else source / "vocab.txt"
    if source.is_dir() and (source / "tokenizer.json").is_file():
        for name in TOKENIZER_FILES:
            if (source / name).is_file():
                shutil.copyfile(source / name, folder / name)
    else:
        entries = read_vocab(vocab_file)
        lower = (not is_cased(entries)) if lowercase is None else lowercase
        _build(entries, lower).save(str(folder / "tokenizer.json"))
        (folder / "vocab.txt").write_text("".join(f"{e}\n" for e in entries), encoding="utf-8")
        write_config(folder, {"do_lower_case": lower, "strip_accents": None}, max_length)
    if not (folder / "tokenizer_config.json").is_file():
        write_config(folder, {}, max_length)


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


def _build(entries: list[str], lowercase: bool) -> Any:
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

    ids = {entry: i for i, entry in enumerate(entries)}
    tokenizer = Tokenizer(models.WordPiece(ids, unk_token="[UNK]"))
    # strip_accents None follows lowercase, as Google's tokenizer did (B05).
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=lowercase, strip_accents=None)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.BertProcessing(
        ("[SEP]", ids["[SEP]"]), ("[CLS]", ids["[CLS]"])
    )
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.add_special_tokens(list(SPECIAL.values()))
    return tokenizer
