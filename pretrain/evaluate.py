"""`python -m pretrain evaluate MODEL`: held-out MLM and NSP scores, pseudo-perplexity, BLiMP."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from configs import UserError, say
from configs.files import named
from configs.objectives import PAIR_OBJECTIVES
from configs.schema import MaskingConfig
from pretrain.convert.vocabulary import read_vocab
from pretrain.same_tokenizer import vocabulary

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from data_prep.shards import Shards
    from pretrain.downstream.blimp import Pairs
    from pretrain.evaluation import Evaluator
    from pretrain.model import BertForPreTraining

# Options of what is scored: option -> (which it is of, its value when left out).
_OF_SOURCE = {
    "rows": ("shards", 0),
    "pseudo_rows": ("shards", 16),
    "probability": ("shards", 0.15),
    "sample": ("blimp", 1.0),
}
# Between a model that fine-tuned well (30%) and one whose CoLA and STS-B fell to one answer (73%), both
# on sentences of CoLA (bench/RESULTS.md).
_SATURATED = 0.5


def main(argv: Sequence[str]) -> int:
    """Prints one line a score; the last line is all of them as JSON when --json is given."""
    options = _parser().parse_args(argv)
    if not options.shards and not options.blimp:
        raise UserError("nothing to evaluate on", "pass --shards FOLDER, --blimp FILE, or both")
    for name, (needed, usual) in _OF_SOURCE.items():
        if getattr(options, name) is None:
            setattr(options, name, usual)
        elif not getattr(options, needed):
            raise UserError(
                f"--{name.replace('_', '-')} without --{needed}",
                f"leave it out, or pass --{needed}",
            )
    if not 0 < options.sample <= 1:
        raise UserError(f"--sample {options.sample}", "a share of BLiMP: above 0, at most 1")
    if not 0 < options.probability <= 1:
        raise UserError(f"--probability {options.probability}", "a share of the tokens: 0.15")
    if options.rows < 0:
        raise UserError(f"--rows {options.rows}", "a number of rows, or 0 for all")
    if options.pseudo_rows < 0:
        raise UserError(f"--pseudo-rows {options.pseudo_rows}", "a number of rows, or 0 for none")
    held_out = _held_out(Path(options.shards)) if options.shards else None
    if options.blimp and not Path(options.blimp).is_file():
        raise UserError(f"{options.blimp}: no such file", "name BLiMP's parquet file")
    if not Path(options.model).exists():
        raise UserError(f"{options.model}: no such folder", "give a run or an HF folder")

    scores = evaluate(
        Path(options.model),
        held_out,
        rows=options.rows,
        pseudo_rows=options.pseudo_rows,
        probability=options.probability,
        blimp=options.blimp,
        sample=options.sample,
        device=options.device,
    )
    for name, value in scores.items():
        if isinstance(value, dict):
            for key, part in value.items():
                say(f"  {key}: {part:.2f}")
        else:
            say(f"{name}: {value:.4f}" if isinstance(value, float) else f"{name}: {value}")
    if options.json:
        print(json.dumps(scores))
    return 0


def evaluate(
    path: Path,
    held_out: Shards | None = None,
    *,
    rows: int = 0,
    pseudo_rows: int = 0,
    probability: float = 0.15,
    blimp: str = "",
    sample: float = 1.0,
    device: str = "",
) -> dict[str, Any]:
    """Scores of a run, checkpoint or HF folder.

    Args:
        held_out: opened held-out shards; None leaves MLM and NSP out. rows: 0 = all of them.
        pseudo_rows: so many of them also have every token masked alone (one forward pass of a row
            for each of its tokens); 0 leaves the pseudo-perplexity out.
        probability: of masking. The masks depend on the rows alone, so models can be compared.
        blimp: BLiMP's parquet file; "" leaves it out. sample: share of its pairs.
        device: cuda or cpu; "" takes the GPU if there is one.

    Returns:
        The values of `pretrain.evaluation.Evaluator.run`, those of NSP only for a model with its
        head on rows of pairs; pooler_saturated (a share, 0 to 1) of a model with that head;
        pseudo_perplexity, pseudo_tokens; blimp and blimp_by_term (percent),
        blimp_pairs, blimp_seconds.

    Raises:
        UserError: no GPU where one is asked for, a model without a trained masked-LM head or with logits
            that are not finite, rows of another tokenizer or longer than the model's positions.
    """
    import torch
    from transformers import AutoTokenizer

    from pretrain.convert.native import to_model
    from pretrain.convert.opening import open_model
    from pretrain.kernels import select

    gpu = torch.cuda.is_available()
    if device == "cuda" and not gpu:
        raise UserError("--device cuda: torch finds no GPU here", "leave it out, or say cpu")
    device = device or ("cuda" if gpu else "cpu")
    opened = open_model(path)
    if any(name.startswith("cls.predictions.") for name in opened.random_heads):
        raise UserError(
            f"{opened.path}: its masked-LM head is drawn at random, the imported model has none",
            "train from it first (checkpoint.init_from), then name that run",
        )
    if held_out is not None:
        check_tokenizer(opened.tokenizer, held_out)
        positions = opened.config.max_position_embeddings
        if (longest := int(held_out.lengths.max(initial=0))) > positions:
            raise UserError(
                f"{held_out.folder}: rows of up to {longest} tokens, {path} has {positions} positions",
                "score on a shard set of shorter rows",
            )
        if held_out.objective in PAIR_OBJECTIVES and opened.config.type_vocab_size < 2:
            raise UserError(
                f"{held_out.folder}: rows of two segments, {path} has one token type",
                "score on a shard set of single segments (objective=single)",
            )
    tokenizer = cast(
        "PreTrainedTokenizerFast", AutoTokenizer.from_pretrained(opened.tokenizer, use_fast=True)
    )
    pairs = None
    if blimp:  # a file that is refused after the held-out rows would take their scores along
        from pretrain.downstream.blimp import open_pairs

        pairs = open_pairs(blimp, tokenizer, opened.config.max_position_embeddings, sample)
    model = to_model(opened.config, opened.tensors, select("auto", device)).to(device)
    if device == "cuda":
        model = model.bfloat16()
    _refuse_nan(model, path)
    budget = 65536 if device == "cuda" else 8192
    scores: dict[str, Any] = {}
    if held_out is not None:
        nsp = opened.config.nsp_head and not opened.random_heads
        scores |= _held_out_scores(model, held_out, rows, probability, budget, device, nsp)
        if pseudo_rows:
            from pretrain.downstream.pseudo import pseudo_perplexity

            value, count = pseudo_perplexity(model, held_out, pseudo_rows, budget)
            scores |= {"pseudo_perplexity": value, "pseudo_tokens": count}
    if pairs is not None:
        scores |= _blimp_scores(model, tokenizer, pairs, budget)
    return scores


def _refuse_nan(model: BertForPreTraining, path: Path) -> None:
    """NaN is not larger than NaN: a model that computes it would have accuracies like another."""
    import torch

    from pretrain.downstream.pseudo import uniform_rows

    count = min(model.config.vocab_size, model.config.max_position_embeddings)
    ids = torch.arange(count, device=next(model.parameters()).device)
    with torch.no_grad():
        logits = model.logits(model.encode(uniform_rows(ids[None])))
    if not logits.isfinite().all():
        raise UserError(
            f"{path}: the model's logits are not finite",
            "the training has diverged: name an older step-... folder of the run",
        )


def check_tokenizer(folder: Path, held_out: Shards) -> None:
    """Same word pieces, same ids: else the scores would be of noise. UserError otherwise."""
    file = held_out.folder / "tokenizer.json"
    if not file.is_file():
        file = held_out.folder.parent / file.name  # held-out/ lies inside its set
    mine, theirs = folder / file.name, vocabulary(file)
    if mine.is_file():
        ours = vocabulary(mine)
    else:  # an older Hugging Face folder
        ours = {entry: number for number, entry in enumerate(read_vocab(folder / "vocab.txt"))}
    if ours != theirs:
        raise UserError(
            f"{held_out.folder}: made with another tokenizer ({len(theirs)} entries) than"
            f" {folder} ({len(ours)} entries)",
            "score on shards built with the model's own vocabulary",
        )


def _held_out_scores(
    model: BertForPreTraining,
    held_out: Shards,
    rows: int,
    probability: float,
    budget: int,
    device: str,
    nsp: bool,
) -> dict[str, float]:
    from pretrain.evaluation import Evaluator

    masking = MaskingConfig(probability=probability)
    scorer = Evaluator(
        held_out,
        masking,
        rows,
        micro_batch_tokens=budget,
        device=device,
        nsp=nsp,
    )
    if scorer.warning:
        say(f"note: {scorer.warning}")
    scores = scorer.run(model)
    if nsp:
        scores["pooler_saturated"] = _saturated(model, scorer, device)
        if scores["pooler_saturated"] > _SATURATED:
            say(
                f"note: {scores['pooler_saturated']:.0%} of the pooler's outputs lie at the ends of "
                "their tanh: with some seeds, fine-tuning that starts from [CLS] may end at one answer\n"
                "  -> look at single seeds of it; pretraining with dropout keeps the pooler off them"
            )
    return scores


def _saturated(model: BertForPreTraining, scorer: Evaluator, device: str) -> float:
    """Share of the pooler's outputs above 0.99 in size, of about 1,000 rows: there the tanh hands on
    less than a fiftieth of the gradient."""
    import torch

    rows = high = outputs = 0
    with torch.no_grad():
        for micro in scorer.batches():
            first = micro.first_positions[: micro.rows].to(device)
            hidden = model.encode(micro.map(lambda t: t.to(device)))[first]
            pooled = model.bert.pooler(hidden, model.s.kernels).abs()
            high += int((pooled > 0.99).sum())
            outputs += pooled.numel()
            rows += micro.rows
            if rows >= 1000:
                break
    return high / max(outputs, 1)


def _blimp_scores(
    model: BertForPreTraining,
    tokenizer: PreTrainedTokenizerFast,
    pairs: Pairs,
    budget: int,
) -> dict[str, Any]:
    from pretrain.downstream.blimp import score_pairs, summary

    start = time.monotonic()
    result = summary(pairs, score_pairs(model, tokenizer, pairs, budget, quiet=False))
    return {
        "blimp": result["accuracy"],
        "blimp_pairs": result["pairs"],
        "blimp_seconds": time.monotonic() - start,
        "blimp_by_term": result["by_term"],
    }


def _held_out(folder: Path) -> Shards:
    from data_prep.shards import HELD_OUT, held_out, open_shards

    if (folder / HELD_OUT).is_dir():
        return held_out(folder)
    if folder.is_dir() and named(folder).name != HELD_OUT:
        say(f"note: {folder} has no {HELD_OUT}/: all its rows are scored, also those trained on")
    return open_shards(folder)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m pretrain evaluate", description=__doc__)
    add = parser.add_argument
    add("model", metavar="MODEL", help="work_dir, train folder, checkpoint or HF folder")
    add("--shards", help="shard set whose held-out part is scored (or the held-out folder itself)")
    add("--rows", type=int, help="held-out rows scored; 0 = all")
    add(
        "--pseudo-rows",
        type=int,
        help="held-out rows for the pseudo-perplexity (default 16; 0 = none)",
    )
    add("--probability", type=float, help="masking probability (default 0.15)")
    add("--blimp", default="", help="BLiMP as parquet: scored by pseudo-log-likelihood")
    add("--sample", type=float, help="share of BLiMP's pairs (default 1)")
    add("--device", default="", choices=("", "cpu", "cuda"))
    add("--json", action="store_true", help="print all scores as one JSON line last")
    return parser
