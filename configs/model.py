"""BERT architectures and the arithmetic that trainer, telemetry and planner share."""

from __future__ import annotations

from dataclasses import dataclass

from configs.errors import UserError


@dataclass
class ModelConfig:
    """Post-LN BERT. Sizes left at 0 come from `preset`; `vocab_size` 0 comes from the tokenizer.

    Names are the field's; Hugging Face says num_hidden_layers, num_attention_heads and *_dropout_prob.
    """

    preset: str = "bert-base"
    vocab_size: int = 0
    hidden_size: int = 0
    num_layers: int = 0
    num_heads: int = 0
    intermediate_size: int = 0
    max_position_embeddings: int = 512
    type_vocab_size: int = 2
    hidden_dropout: float = 0.1
    attention_dropout: float = 0.1
    initializer_range: float = 0.02
    layer_norm_eps: float = 1e-12
    nsp_head: bool = True
    # The embedding is padded to a multiple of this times tp; padding is never stored or predicted.
    vocab_pad_multiple: int = 128


# hidden_size, num_layers, num_heads. BERT sizes: 1810.04805 section 3; the 1.3B, 3.9B and 8.3B
# shapes: Megatron-LM, 1909.08053 (here always post-LN with Hugging Face semantics).
PRESETS: dict[str, tuple[int, int, int]] = {
    "bert-tiny": (128, 2, 2),
    "bert-mini": (256, 4, 4),
    "bert-small": (512, 4, 8),
    "bert-medium": (512, 8, 8),
    "bert-base": (768, 12, 12),
    "bert-large": (1024, 24, 16),
    "megatron-1.3b": (2048, 24, 32),
    "megatron-3.9b": (2560, 48, 40),
    "megatron-8.3b": (3072, 72, 24),
}


def resolve_model(config: ModelConfig, vocab_size: int = 0) -> ModelConfig:
    """Fills sizes from the preset and the tokenizer; raises UserError for shapes that cannot be."""
    from dataclasses import replace
    from difflib import get_close_matches

    if config.preset not in PRESETS:
        near = get_close_matches(config.preset, PRESETS, 1)
        hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(PRESETS)}"
        raise UserError(f"model.preset={config.preset} is not known", hint)
    hidden, layers, heads = PRESETS[config.preset]
    config = replace(
        config,
        hidden_size=config.hidden_size or hidden,
        num_layers=config.num_layers or layers,
        num_heads=config.num_heads or heads,
        vocab_size=config.vocab_size or vocab_size,
    )
    config = replace(config, intermediate_size=config.intermediate_size or 4 * config.hidden_size)
    if config.hidden_size % config.num_heads:
        raise UserError(
            f"model.hidden_size={config.hidden_size} is not divisible by model.num_heads={config.num_heads}",
            "choose num_heads so that hidden_size / num_heads is whole (BERT uses 64)",
        )
    return config


def padded_vocab(config: ModelConfig, tp: int) -> int:
    """Rows of the embedding as held in memory: the next multiple of vocab_pad_multiple x tp."""
    unit = config.vocab_pad_multiple * tp
    return -(-config.vocab_size // unit) * unit


def parameter_count(config: ModelConfig) -> int:
    """Trainable parameters of BertForPreTraining without vocabulary padding (decoder tied)."""
    h, i, v = config.hidden_size, config.intermediate_size, config.vocab_size
    embeddings = (v + config.max_position_embeddings + config.type_vocab_size) * h + 2 * h
    layer = 4 * (h * h + h) + (h * i + i) + (i * h + h) + 4 * h
    mlm_head = h * h + h + 2 * h + v
    pooler_nsp = (h * h + h) + (2 * h + 2) if config.nsp_head else 0
    return embeddings + config.num_layers * layer + mlm_head + pooler_nsp


def model_flops(
    config: ModelConfig, tokens: int, sum_squared_lengths: int, masked: int, rows: int
) -> float:
    """Floating-point operations of forward + backward for one set of packed rows.

    2 per multiply-add; the backward pass counts twice the forward. Only real tokens count, and
    the vocabulary projection counts masked positions alone, so this is *model* FLOP as in the
    MFU of PaLM (2204.02311, appendix B): recomputation and padding earn nothing.

    Args:
        tokens: real tokens. sum_squared_lengths: sum over rows of length squared (attention).
        masked: predicted positions. rows: number of rows (pooler, NSP head).
    """
    h, i = config.hidden_size, config.intermediate_size
    per_token = config.num_layers * 2.0 * (4 * h * h + 2 * h * i)
    attention = config.num_layers * 2.0 * 2.0 * h * sum_squared_lengths
    head = 2.0 * masked * (h * h + h * config.vocab_size)
    nsp = 2.0 * rows * (h * h + 2 * h) if config.nsp_head else 0.0
    return 3.0 * (per_token * tokens + attention + head + nsp)
