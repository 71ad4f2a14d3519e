"""`python -m pretrain export RUN OUT`: a checkpoint as a Hugging Face folder that checked itself."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Sequence
from fnmatch import fnmatch
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

from configs import UserError, say
from configs.files import LOCK, folder_beside, named, read_json
from configs.log import LOG
from configs.model import ModelConfig
from pretrain.convert.card import commit, last_scores, model_card
from pretrain.convert.hf import SHARD_BYTES, config_to_hf, sync_tree, write_weights
from pretrain.convert.mask_token import fit_around_mask
from pretrain.convert.opening import PROVENANCE, RECORDED, Opened, open_model
from pretrain.convert.vocabulary import (
    TOKENIZER_FILES,
    given,
    special_names,
    tokenizer_size,
    write_folder,
)

if TYPE_CHECKING:
    from pretrain.model import BertForPreTraining

DTYPES = {"fp32": "float32", "bf16": "bfloat16"}
CARD = "README.md"
_WRITTEN = (PROVENANCE, CARD, "config.json", "model*.safetensors*", *TOKENIZER_FILES, LOCK)


def main(argv: Sequence[str]) -> int:
    options = _parser().parse_args(argv)
    if not 0 < options.shard_gb < math.inf:
        raise UserError(f"--shard-gb {options.shard_gb}", "a size above 0, as 2")
    export(
        Path(options.run),
        named(options.out),
        dtype=options.dtype,
        vocab=given(options.vocab),
        shard_bytes=int(options.shard_gb * 1024**3),
    )
    return 0


def export(
    run: Path,
    out: Path,
    *,
    dtype: str = "fp32",
    vocab: Path | None = None,
    shard_bytes: int = SHARD_BYTES,
    accept: Callable[[Path], object] = lambda fresh: None,
    elsewhere: str = "name another folder",
) -> Path:
    """Writes `out` with weights, config, fast tokenizer and model card, and compares it by reloading.

    A checkpoint of any tp, ZeRO stage and precision gives the same folder; no GPU is needed. An
    older export in `out` is replaced at the very end; a folder that holds anything else is refused.

    Args:
        dtype: fp32 | bf16, of the weights on disk. vocab: tokenizer folder, None = the run's.
        shard_bytes: larger weights are split into several safetensors files.
        accept: called with the finished folder before it takes the place of `out`, which stays as it
            was if this raises.
        elsewhere: how the command at hand is told another `out`.

    Raises:
        UserError: no or damaged checkpoint, tokenizer of another size, `out` is something else,
            or the reloaded model computes something else than the trained one.
    """
    _refuse_others(out, elsewhere)
    opened = open_model(run, vocab)
    entries = tokenizer_size(opened.tokenizer)
    if entries != opened.config.vocab_size:
        raise UserError(
            f"{opened.tokenizer}: {entries} ids, the model has {opened.config.vocab_size}",
            "the tokenizer is of another run",
        )
    _warn_of_another_vocabulary(opened)

    from pretrain.convert.self_check import self_check

    count, path, meta = len(opened.tensors), opened.path, opened.meta
    with folder_beside(out) as fresh:
        _write_small_files(fresh, opened, dtype)
        model = _write_weights(fresh, opened, dtype, shard_bytes)
        say(f"{path}: {count} tensors written; reloading with transformers to compare")
        difference = self_check(fresh, model, path)
        del model
        sync_tree(fresh)
        accept(fresh)
        _refuse_others(out, elsewhere)
    what = "logits differ" if dtype == "fp32" else f"logits of the model rounded to {dtype} differ"
    say(f"{out}: update {meta.get('step', 0)}, {dtype}; {what} by {difference:.1e} at most")
    return out


def _refuse_others(out: Path, elsewhere: str) -> None:
    """`out` is to be replaced: it may hold nothing but an earlier export."""
    names = {path.name for path in out.iterdir()} if out.exists() else set()
    if names and PROVENANCE not in names:
        raise UserError(f"{out}: exists and is no earlier export", elsewhere)
    others = sorted(name for name in names if not any(map(partial(fnmatch, name), _WRITTEN)))
    if CARD in names:
        written = read_json(out / PROVENANCE, f"move {out} elsewhere").get("card")
        if written not in (None, _digest(out / CARD)):
            others.append(f"a {CARD} that was edited")
    if others:
        raise UserError(
            f"{out}: holds {others[0]} besides an earlier export, which would be lost",
            f"move it elsewhere, or {elsewhere}",
        )


def _write_weights(fresh: Path, opened: Opened, dtype: str, shard_bytes: int) -> BertForPreTraining:
    """Writes the weights and returns our model with them as stored; empties opened.tensors, so
    that at most two copies of the model are in memory at a time."""
    import torch

    from pretrain.convert.native import to_model

    tensors = opened.tensors
    if dtype != "fp32":
        for name in tensors:
            tensors[name] = tensors[name].to(getattr(torch, DTYPES[dtype]))
    write_weights(tensors, fresh, shard_bytes)
    model = to_model(opened.config, tensors)
    tensors.clear()
    return model


def _write_small_files(fresh: Path, opened: Opened, dtype: str) -> None:
    config, meta = opened.config, opened.meta
    write_folder(opened.tokenizer, fresh, None, config.max_position_embeddings)
    _patch_tokenizer(fresh, config)
    hf = config_to_hf(config, DTYPES[dtype], _pad_id(fresh))
    (fresh / "config.json").write_text(json.dumps(hf, indent=2) + "\n", encoding="utf-8")
    code = commit()
    run = opened.path.parent.parent if meta else opened.path
    aside = opened.path.parent / LOG  # beside checkpoints that a new start has set aside
    log = aside if aside.is_file() else run / LOG
    scores = meta["scores"] if "scores" in meta else last_scores(log, meta.get("step", 0))
    card = model_card(config, meta, scores, code, special_names(fresh)["mask_token"])
    (fresh / CARD).write_text(card, encoding="utf-8")
    provenance: dict[str, Any] = {
        "commit": code,
        "origin": str(opened.path),
        "scores": scores,
        "card": _digest(fresh / CARD),
        **{key: meta[key] for key in RECORDED if key in meta},
    }
    (fresh / PROVENANCE).write_text(json.dumps(provenance, indent=2) + "\n", encoding="utf-8")


def _digest(file: Path) -> str:
    return sha256(file.read_bytes()).hexdigest()


def _patch_tokenizer(folder: Path, config: ModelConfig) -> None:
    """Sets the length that the model can take, and that its inputs tell the segments of a pair apart,
    which transformers does unasked for WordPiece alone; casing stays as the shards were built (B05).
    """
    file = folder / "tokenizer_config.json"
    values = json.loads(file.read_text(encoding="utf-8"))
    values["model_max_length"] = config.max_position_embeddings
    values["model_input_names"] = ["input_ids", "token_type_ids", "attention_mask"]
    file.write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    file = folder / "tokenizer.json"
    values = json.loads(file.read_text(encoding="utf-8"))
    if values["model"].get("type") != "WordPiece":  # its words have no blank in them
        fit_around_mask(values, special_names(folder)["mask_token"])
        file.write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _warn_of_another_vocabulary(opened: Opened) -> None:
    """A vocabulary of the right size may still be the wrong one. No refusal: the fingerprint is of
    the tokenizer as its library writes it, which another version of it may do in another way."""
    from hashlib import blake2b

    from tokenizers import Tokenizer

    if (opened.path / "config.json").is_file():  # an export, where it may have been patched
        return
    wanted = opened.meta.get("tokenizer_fingerprint")
    file = opened.tokenizer / "tokenizer.json"
    if not file.is_file():
        return
    try:
        text = Tokenizer.from_file(str(file)).to_str()
    except Exception as error:  # which is all that it says of its kind
        raise UserError(f"{file}: no readable tokenizer ({error})", "restore it") from None
    if wanted and blake2b(text.encode(), digest_size=16).hexdigest() != wanted:
        say(
            f"warning: {file} is not, to the byte, the tokenizer that the shards were built with"
            f" ({wanted}); check that it is the run's own"
        )


def _pad_id(folder: Path) -> int:
    from transformers import AutoTokenizer

    return int(AutoTokenizer.from_pretrained(folder).pad_token_id or 0)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m pretrain export", description=__doc__)
    add = parser.add_argument
    add("run", metavar="RUN", help="work_dir, train folder, or one step-... checkpoint folder")
    add("out", metavar="OUT", help="the Hugging Face folder to write")
    add("--dtype", default="fp32", choices=tuple(DTYPES), help="of the weights on disk")
    add("--vocab", default="", help="vocab.txt or tokenizer folder; default: the run's vocab/")
    add("--shard-gb", type=float, default=2.0, help="split weights above this size")
    return parser
