"""GPU memory of a training process by arithmetic: for the trainer's checks and the planner."""

from __future__ import annotations

from configs.model import ModelConfig, padded_vocab
from configs.schema import ParallelConfig

GIB = 2**30
_CONTEXT = 1.5 * GIB  # CUDA context, communication buffers, library workspaces
_FRAGMENTS = 1.1  # what the allocator loses
_SLOTS = 4  # activations in transit between tensor-parallel ranks (pretrain.parallel.peers)


def parameters_per_rank(config: ModelConfig, tp: int) -> int:
    """Parameters one tensor-parallel rank holds, vocabulary padding included."""
    h, i = config.hidden_size, config.intermediate_size
    sharded = (3 * h * h + 3 * h + h * h + h * i + i + i * h) * config.num_layers
    sharded += padded_vocab(config, tp) * (h + 1)
    whole = (6 * h) * config.num_layers + (
        config.max_position_embeddings + config.type_vocab_size
    ) * h
    whole += 2 * h + h * h + 3 * h + ((h * h + h + 2 * h + 2) if config.nsp_head else 0)
    return sharded // tp + whole


def state_parts(
    config: ModelConfig, parallel: ParallelConfig, dp: int, precision: str
) -> dict[str, float]:
    """Bytes of weights, fp32 gradients and the optimiser's fp32 masters and moments of one process.

    ZeRO-1 and ZeRO-2 share masters and moments out over dp; gradients stay whole, since they are
    reduced once per global batch. fp32 weights are their own masters unless they are shared out.
    """
    n = parameters_per_rank(config, parallel.tp)
    shared = dp if parallel.zero_stage > 0 else 1
    weights, masters = (4, 4 if shared > 1 else 0) if precision == "fp32" else (2, 4)
    parts = {
        "weights": n * weights,
        "gradients": 4 * n,
        "masters": n * masters / shared,
        "moments": 8 * n / shared,
    }
    if shared > 1:  # the reduced part of the gradients, the rounded part of the weights
        parts["exchange"] = (4 * n + (2 * n if precision != "fp32" else 0)) / shared
    return parts


def state_bytes(config: ModelConfig, parallel: ParallelConfig, dp: int, precision: str) -> float:
    """The sum of `state_parts`."""
    return sum(state_parts(config, parallel, dp, precision).values())


def activation_parts_per_token(
    config: ModelConfig, parallel: ParallelConfig, precision: str, masked: float
) -> dict[str, float]:
    """Bytes that the fused kernels keep from the forward pass for the backward pass, per token of a
    micro-batch (plain ones keep masks and copies besides).

    Per layer and in units of H elements: the inputs of attention and MLP (2), the sums that the two
    LayerNorms normalise (2), qkv (3), attention output (1), and the intermediate before and after
    its GELU (2 x I / H). With sequence parallelism inputs and sums are shared out (in fp8 the inputs
    stay as they were gathered). In fp8 the input of the MLP and what its GELU makes stay in one byte
    an element. With activation checkpointing only the input of the layer stays, and one layer at a
    time is whole. The masked tokens (their share is `masked`) meet the vocabulary.
    """
    size = 4 if precision == "fp32" else 2
    h, i, tp = config.hidden_size, config.intermediate_size, parallel.tp
    split = tp if parallel.sequence_parallel else 1
    inputs = 2 * h if precision == "fp8" else 2 * h / split
    layer = size * (inputs + 2 * h / split + 4 * h / tp + 2 * i / tp)
    if precision == "fp8":
        layer -= h + i / tp
    layers = (
        config.num_layers * (size * h / split) + layer
        if parallel.activation_checkpointing
        else (config.num_layers * layer)
    )
    # The logits alone, overwritten by their gradient.
    logits = (masked + 0.01) * padded_vocab(config, tp) / tp * size
    return {"activations": layers + 8 * size * h, "logits": logits}


def _bytes_per_token(
    config: ModelConfig, parallel: ParallelConfig, precision: str, masked: float
) -> float:
    """With what the allocator loses, and the slots, which do not come from it."""
    size = 4 if precision == "fp32" else 2
    slots = _SLOTS * size * config.hidden_size if parallel.sequence_parallel else 0
    kept = activation_parts_per_token(config, parallel, precision, masked)
    return _FRAGMENTS * sum(kept.values()) + slots


def training_bytes(
    config: ModelConfig,
    parallel: ParallelConfig,
    dp: int,
    precision: str,
    tokens: int,
    masked: float,
) -> float:
    """Everything on the card for micro-batches of `tokens` tokens, a share `masked` of them masked."""
    state = _FRAGMENTS * state_bytes(config, parallel, dp, precision)
    return _CONTEXT + state + tokens * _bytes_per_token(config, parallel, precision, masked)


def largest_micro_batch(
    config: ModelConfig,
    parallel: ParallelConfig,
    dp: int,
    precision: str,
    card_bytes: int,
    masked: float,
) -> int:
    """Most tokens a micro-batch may have on this card, a multiple of 128 up to 65536 (0: none)."""
    left = card_bytes - _CONTEXT - _FRAGMENTS * state_bytes(config, parallel, dp, precision)
    tokens = left / _bytes_per_token(config, parallel, precision, masked)
    return max(0, min(65536, int(tokens) // 128 * 128))
