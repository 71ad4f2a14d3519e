"""Text around a mask in an exported tokenizer: pieces as in the rows that the model was trained on.

Those rows were encoded whole and masked afterwards. In a text with a mask in it the parts before and
behind it are encoded each for itself, and vocabularies whose words begin with a blank put one in front
of every part: `word [MASK].` came out with a blank of its own before the full stop.
"""

from __future__ import annotations

from typing import Any

# Leading accents, which StripAccents removes. The blank of a text's first word goes only in front of its
# first character (to tokenizers 0.23), so that one has to stay.
_ACCENTS = {"type": "Replace", "pattern": {"Regex": r"\A[\p{M}ﾞﾟ]+"}, "content": " "}
_ONE_BLANK = {"type": "Replace", "pattern": {"Regex": r"\A\s+"}, "content": " "}


def fit_around_mask(values: dict[str, Any], mask: str) -> None:
    """Changes a tokenizer.json so that only the beginning of a text gets a blank, and a part behind a
    mask where its text has one. What has no mask in it is encoded as before. In byte-level BPE the blank
    before a mask is part of it, as RoBERTa's is. WordPiece, and steps that Lambert does not write, stay.
    """
    steps = values.get("pre_tokenizer") or {}
    if "ByteLevel" in str(steps):
        for token in values["added_tokens"]:
            token["lstrip"] |= token["content"] == mask
    if steps.get("type") == "Metaspace" and steps.get("prepend_scheme") == "always":
        steps["prepend_scheme"] = "first"
        values["normalizer"] = _keep_one_blank(values.get("normalizer"))
    elif steps.get("type") == "ByteLevel" and steps.get("add_prefix_space"):
        first = {"type": "Metaspace", "replacement": " ", "prepend_scheme": "first", "split": False}
        bytes_ = {**steps, "add_prefix_space": False}
        values["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [first, bytes_]}


def _keep_one_blank(normalizer: dict[str, Any] | None) -> dict[str, Any]:
    """A normalizer that leaves one of the blanks a part begins with, instead of none."""
    steps = [normalizer] if normalizer else []
    if normalizer and normalizer["type"] == "Sequence":
        steps = normalizer["normalizers"]
    out: list[Any] = [_ACCENTS] if any(s["type"] == "StripAccents" for s in steps) else []
    for step in steps:
        if step["type"] == "Strip" and step["strip_left"]:
            out += [{**step, "strip_left": False}, _ONE_BLANK]
        else:
            out.append(step)
    return {"type": "Sequence", "normalizers": out}
