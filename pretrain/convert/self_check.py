"""An exported folder against the model it was made of: keys, sizes and every logit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from configs import UserError
from pretrain.data.batches import MicroBatch
from pretrain.model import BertForPreTraining

TOLERANCE = 1e-5  # of the largest logit (at least 1): fp32 in another order of sums
SHAKEN = 8  # or of what one rounding of the embeddings changes (measured: 0.2 to 1.5 times that)


def self_check(folder: Path, model: BertForPreTraining, origin: Path | None = None) -> float:
    """Reloads `folder` with transformers and compares every logit of four random rows.

    origin: what the model was read from, for a fault of its own; `folder` may be gone by then.

    Returns:
        The largest difference.

    Raises:
        UserError: missing or unexpected keys, a size that differs, or logits that do; the model itself
            computes NaN.
    """
    from transformers import AutoModelForMaskedLM, AutoModelForPreTraining, AutoTokenizer
    from transformers.utils import logging

    from pretrain.downstream.pseudo import uniform_rows

    logging.disable_progress_bar()
    config = model.config
    auto = AutoModelForPreTraining if config.nsp_head else AutoModelForMaskedLM
    loaded, info = auto.from_pretrained(folder, output_loading_info=True, dtype=torch.float32)
    wrong = {kind: sorted(map(str, keys)) for kind, keys in info.items() if keys}
    if wrong:
        raise UserError(f"{folder}: transformers reports {wrong}", "this is a fault of the export")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    rows = loaded.get_input_embeddings().weight.shape[0]
    ids = max(tokenizer.get_vocab().values()) + 1
    if not ids == rows == config.vocab_size:
        raise UserError(
            f"{folder}: tokenizer {ids}, embedding {rows}, config {config.vocab_size}",
            "this is a fault of the export",
        )
    length = min(64, config.max_position_embeddings)
    drawn = torch.randint(
        config.vocab_size, (4, length), generator=torch.Generator().manual_seed(0)
    )
    types = (torch.arange(length) >= length // 2).long().expand(4, -1).contiguous()
    with torch.no_grad():
        given = loaded.eval()(input_ids=drawn, token_type_ids=types)
        micro = uniform_rows(drawn, types)
        theirs = [given.prediction_logits if config.nsp_head else given[0]]
        theirs += [given.seq_relationship_logits] if config.nsp_head else []
        ours = _logits(model, micro)
        if not all(logits.isfinite().all() for logits in ours):
            raise UserError(
                f"{origin or folder}: the trained model's own logits are not finite; nothing was published",
                "the training has diverged: name an older step-... folder of the run",
            )
        differences = _differences(theirs, ours)
        allowed = [TOLERANCE * max(1.0, logits.abs().max().item()) for logits in ours]
        if any(not d <= a for d, a in zip(differences, allowed, strict=True)):
            # Weights of a training that diverged blow the rounding of fp32 up to any size.
            with _shaken(model.bert.embeddings):
                moved = _differences(_logits(model, micro), ours)
            allowed = [max(a, SHAKEN * m) for a, m in zip(allowed, moved, strict=True)]
    for difference, most in zip(differences, allowed, strict=True):
        if not difference <= most:
            raise UserError(
                f"{folder}: logits differ from the trained model's by {difference:.2e}",
                "this is a fault of the export; nothing was published",
            )
    return max(differences)


def _logits(model: BertForPreTraining, micro: MicroBatch) -> list[Tensor]:
    """[T, vocab_size] and, with an NSP head, [rows, 2]."""
    hidden = model.encode(micro)
    logits = [model.logits(hidden)]
    return logits + (
        [model.nsp_logits(hidden[micro.first_positions])] if model.config.nsp_head else []
    )


def _differences(some: Sequence[Tensor], others: Sequence[Tensor]) -> list[float]:
    return [(a.reshape(b.shape) - b).abs().max().item() for a, b in zip(some, others, strict=True)]


@contextmanager
def _shaken(module: torch.nn.Module) -> Iterator[None]:
    """Every number that `module` makes is off by one fp32 rounding, up or down."""

    def shake(_: Any, __: Any, made: Tensor) -> Tensor:
        signs = torch.randint(0, 2, made.shape, generator=torch.Generator().manual_seed(0))
        return made * (1 + (2 * signs - 1) * torch.finfo(torch.float32).eps)

    handle = module.register_forward_hook(shake)
    try:
        yield
    finally:
        handle.remove()
