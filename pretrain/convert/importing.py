"""`python -m pretrain import SOURCE OUT`: a foreign model as a run that training goes on from."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from configs import UserError, say
from configs.files import folder_beside, named
from pretrain.convert.hf import sync_tree
from pretrain.convert.layouts import read_foreign
from pretrain.convert.vocabulary import given, write_folder


def main(argv: Sequence[str]) -> int:
    options = _parser().parse_args(argv)
    import_model(
        Path(options.source),
        named(options.out),
        vocab=given(options.vocab),
        trim=options.trim_vocab,
        lowercase={"": None, "cased": False, "uncased": True}[options.casing],
        seed=options.seed,
    )
    return 0


def import_model(
    source: Path,
    out: Path,
    *,
    vocab: Path | None = None,
    trim: bool = False,
    lowercase: bool | None = None,
    seed: int = 42,
) -> Path:
    """Makes `out` a work_dir: vocab/ and train/checkpoints/step-00000000, masters without moments.

    Args:
        vocab, trim: see `read_foreign`. lowercase: of a bare vocab.txt; None looks at its entries.
        seed: of heads that the source lacks.

    Raises:
        UserError: `out` is not empty; everything of `read_foreign`.
    """
    if out.exists() and any(out.iterdir()):
        raise UserError(f"{out}: not empty", "name a new folder; nothing is overwritten")
    model = read_foreign(source, vocab, trim)
    assert model.tokenizer is not None

    from pretrain.checkpoint import save_logical
    from pretrain.convert.native import with_new_heads

    tensors = with_new_heads(model.config, model.tensors, seed)
    longest = model.config.max_position_embeddings
    meta = {
        "model": asdict(model.config),
        "imported": {"layout": model.layout, "from": str(source), "new_heads": model.missing_heads},
    }
    with folder_beside(out) as fresh:
        write_folder(model.tokenizer, fresh / "vocab", lowercase, longest)
        save_logical(fresh / "train", tensors, meta)
        sync_tree(fresh)
        if out.exists():
            out.resolve().rmdir()  # empty still, or it stays
    for reason in dict.fromkeys(model.dropped.values()):
        names = [name for name, why in model.dropped.items() if why == reason]
        say(f"left out {len(names)} ({names[0]}{', ...' if len(names) > 1 else ''}): {reason}")
    if model.missing_heads:
        say(f"not in the source, drawn anew: {', '.join(model.missing_heads)}")
    say(f"{out}: {len(model.tensors)} tensors of a {model.layout} model; go on from it with")
    vocab = out / "vocab" / "tokenizer.json"
    say(f"  python -m pretrain train RECIPE checkpoint.init_from={out} vocab.file={vocab}")
    return out


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m pretrain import", description=__doc__)
    add = parser.add_argument
    add(
        "source",
        metavar="SOURCE",
        help="HF folder or hub name, TensorFlow prefix, or .pt of NVIDIA's BERT",
    )
    add("out", metavar="OUT", help="the work_dir to make")
    add("--vocab", default="", help="vocab.txt or tokenizer folder, where none lies beside SOURCE")
    add("--trim-vocab", action="store_true", help="cut embedding rows beyond the tokenizer")
    add("--casing", default="", choices=("", "cased", "uncased"), help="of a bare vocab.txt")
    add("--seed", type=int, default=42, help="of heads that SOURCE lacks")
    return parser
