"""What every reader of a foreign model returns, and the checks that all of them share."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from configs import UserError
from configs.model import ModelConfig

if TYPE_CHECKING:
    import torch

POOLER = ("bert.pooler.dense.weight", "bert.pooler.dense.bias")
NSP = ("cls.seq_relationship.weight", "cls.seq_relationship.bias")
WORDS = "bert.embeddings.word_embeddings.weight"
MLM_BIAS = "cls.predictions.bias"


@dataclass
class SourceModel:
    """A BERT read from somewhere, under the names of transformers' BertForPreTraining.

    Attributes:
        tensors: HF name -> tensor in its own dtype; the tied decoder weight is not among them.
        missing_heads: MLM, pooler or NSP tensors that the source lacks (nothing else may lack).
        dropped: names found and left out on purpose, with the reason.
        tokenizer: folder or vocab.txt lying beside the weights, None if there is none.
    """

    config: ModelConfig
    tensors: dict[str, torch.Tensor]
    layout: str
    origin: Path
    missing_heads: list[str] = field(default_factory=list)
    dropped: dict[str, str] = field(default_factory=dict)
    tokenizer: Path | None = None


def hf_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every stored tensor of BertForPreTraining (1810.04805), decoder tied.

    Linear weights are [out, in] as in torch; the vocabulary is the true one, without padding.
    """
    h, i, v = config.hidden_size, config.intermediate_size, config.vocab_size
    shapes: dict[str, tuple[int, ...]] = {
        WORDS: (v, h),
        "bert.embeddings.position_embeddings.weight": (config.max_position_embeddings, h),
        "bert.embeddings.token_type_embeddings.weight": (config.type_vocab_size, h),
        "bert.embeddings.LayerNorm.weight": (h,),
        "bert.embeddings.LayerNorm.bias": (h,),
    }
    for layer in range(config.num_layers):
        at = f"bert.encoder.layer.{layer}."
        linear = {
            "attention.self.query": (h, h),
            "attention.self.key": (h, h),
            "attention.self.value": (h, h),
            "attention.output.dense": (h, h),
            "intermediate.dense": (i, h),
            "output.dense": (h, i),
        }
        for name, shape in linear.items():
            shapes[f"{at}{name}.weight"] = shape
            shapes[f"{at}{name}.bias"] = shape[:1]
        for name in ("attention.output.LayerNorm", "output.LayerNorm"):
            shapes[f"{at}{name}.weight"] = shapes[f"{at}{name}.bias"] = (h,)
    if config.nsp_head:
        shapes |= {POOLER[0]: (h, h), POOLER[1]: (h,), NSP[0]: (2, h), NSP[1]: (2,)}
    at = "cls.predictions."
    shapes |= {
        MLM_BIAS: (v,),
        f"{at}transform.dense.weight": (h, h),
        f"{at}transform.dense.bias": (h,),
        f"{at}transform.LayerNorm.weight": (h,),
        f"{at}transform.LayerNorm.bias": (h,),
    }
    return shapes


def is_head(name: str) -> bool:
    """True for what a BERT may lack and still be one: the MLM head, the pooler, the NSP head."""
    return name.startswith("cls.") or name in POOLER


def finish(
    config: ModelConfig,
    tensors: dict[str, torch.Tensor],
    layout: str,
    origin: Path,
    dropped: Mapping[str, str],
) -> SourceModel:
    """Checks tensors against the architecture and sorts out which heads are absent.

    Raises:
        UserError: an encoder tensor is missing, a shape or dtype is wrong, a name is unknown, a
            value is NaN or Inf; names the tensor.
    """
    import torch

    dropped = dict(dropped)
    for head, names in (("pooler", POOLER), ("next-sentence head", NSP)):
        _whole_or_absent(head, names, tensors, origin)
    if POOLER[0] not in tensors:
        config.nsp_head = False
        dropped |= {name: "it reads the pooler, which is absent" for name in NSP if name in tensors}
        tensors = {k: v for k, v in tensors.items() if k not in NSP}
    shapes = hf_shapes(config)
    missing = [name for name in shapes if name not in tensors]
    lost = [name for name in missing if not is_head(name)]
    if lost:
        raise UserError(
            f"{origin}: {len(lost)} encoder tensors are missing, first {lost[0]}",
            "only heads may be absent; the file is incomplete or not a BERT",
        )
    mlm = [name for name in shapes if name.startswith("cls.predictions.")]
    _whole_or_absent("masked-LM head", mlm, tensors, origin)
    unknown = [name for name in tensors if name not in shapes]
    if unknown:
        raise UserError(
            f"{origin}: {len(unknown)} tensors that BERT does not have, first {unknown[0]}",
            "another architecture, or more layers than the config says",
        )
    for name, tensor in tensors.items():
        if tuple(tensor.shape) != shapes[name]:
            raise UserError(
                f"{origin}: {name} is {list(tensor.shape)}, the config says {list(shapes[name])}",
                "weights and config are not of the same model",
            )
        if tensor.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise UserError(
                f"{origin}: {name} has dtype {tensor.dtype}",
                "expected float32, bfloat16 or float16",
            )
        if not torch.isfinite(tensor).all():
            raise UserError(
                f"{origin}: {name} holds NaN or Inf", "the model is broken; use another"
            )
    return SourceModel(config, tensors, layout, origin, [n for n in missing if is_head(n)], dropped)


def _whole_or_absent(head: str, names: Sequence[str], found: Container[str], origin: Path) -> None:
    lacks = [name for name in names if name not in found]
    if lacks and len(lacks) < len(names):
        raise UserError(
            f"{origin}: the {head} lacks {', '.join(lacks)}",
            "a head must be whole or absent; the file is incomplete",
        )
