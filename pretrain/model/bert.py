"""Post-LN BERT (1810.04805) in Hugging Face's exact semantics, over packed rows without padding.

Module names are Hugging Face's, so that parameter names are too; only query, key and value are one
parameter (`attention.self.qkv`: the first third is the query's, then key, value). Activations are
[T, H]: all tokens of a micro-batch in one row, attention bounded by cu_seqlens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from configs.model import ModelConfig, padded_vocab
from pretrain.parallel.layers import Embedding, Linear, Norm, PlainLayers

if TYPE_CHECKING:
    from pretrain.data.batches import MicroBatch

EMBEDDING_SITE = 3  # dropout places are numbered layer * 4 + {0, 1, 2}; 3 is free in layer 0


class LossSums(NamedTuple):
    """Scalars (fp32, on the device), summed over this micro-batch; divide by global totals."""

    mlm_sum: Tensor
    nsp_sum: Tensor
    mlm_correct: Tensor
    nsp_correct: Tensor


class Settings(NamedTuple):
    """What every block needs: fixed for a run."""

    config: ModelConfig
    layers: PlainLayers
    kernels: Any
    seed: int  # of the counter-based dropout


class Tokens(NamedTuple):
    """What a block knows of the packed rows. keys, local_keys: int32 [T] and [T or T / tp]."""

    cu_seqlens: Tensor
    max_length: int
    keys: Tensor
    local_keys: Tensor
    training: bool


class Embeddings(nn.Module):
    def __init__(self, s: Settings) -> None:
        super().__init__()
        c = s.config
        self.s = s
        self.word_embeddings = s.layers.vocabulary(padded_vocab(c, s.layers.tp), c.hidden_size)
        self.position_embeddings = Embedding(c.max_position_embeddings, c.hidden_size)
        self.token_type_embeddings = Embedding(c.type_vocab_size, c.hidden_size)
        self.LayerNorm = Norm(c.hidden_size)

    def forward(self, ids: Tensor, types: Tensor, positions: Tensor, tokens: Tokens) -> Tensor:
        s, chunk, lookup = self.s, self.s.layers.chunk, self.s.kernels.embedding
        x = self.word_embeddings(ids, lookup)
        x = x + self.token_type_embeddings(chunk(types), lookup)
        x = x + self.position_embeddings(chunk(positions), lookup)
        x = s.kernels.layer_norm(
            x, self.LayerNorm.weight, self.LayerNorm.bias, s.config.layer_norm_eps
        )
        p = s.config.hidden_dropout if tokens.training else 0.0
        return s.kernels.dropout(x, p, tokens.local_keys, EMBEDDING_SITE, s.seed)


class SelfAttention(nn.Module):
    def __init__(self, s: Settings, index: int) -> None:
        super().__init__()
        self.s, self.index = s, index
        self.qkv = s.layers.column(s.config.hidden_size, 3 * s.config.hidden_size)
        self.heads = s.config.num_heads // s.layers.tp

    def forward(self, x: Tensor, tokens: Tokens) -> tuple[Tensor, Tensor]:
        """[T, H] -> (heads' results [T, H / tp], x)"""
        s = self.s
        # The bias is added by the product, its gradient comes out of the attention.
        qkv, x = self.qkv.fork(x, s.kernels, self.qkv.bias.detach())
        size = s.config.hidden_size // s.config.num_heads
        heads = s.kernels.attention(
            qkv.view(qkv.shape[0], 3, self.heads, size),
            tokens.cu_seqlens,
            tokens.max_length,
            tokens.keys,
            s.config.attention_dropout if tokens.training else 0.0,
            self.index * 4,
            s.seed,
            s.layers.rank * self.heads,
            self.qkv.bias,
        )
        return heads, x


class Output(nn.Module):
    """LayerNorm(residual + dropout(x W^T + bias)): ends both halves of a layer."""

    def __init__(self, s: Settings, in_features: int, site: int) -> None:
        super().__init__()
        self.s, self.site = s, site
        self.dense = s.layers.row(in_features, s.config.hidden_size)
        self.LayerNorm = Norm(s.config.hidden_size)

    def forward(self, x: Tensor, residual: Tensor, tokens: Tokens) -> Tensor:
        s = self.s
        return s.kernels.bias_dropout_add_norm(
            self.dense(x, s.kernels),
            self.dense.bias,
            residual,
            self.LayerNorm.weight,
            self.LayerNorm.bias,
            s.config.layer_norm_eps,
            s.config.hidden_dropout if tokens.training else 0.0,
            tokens.local_keys,
            self.site,
            s.seed,
        )


class Attention(nn.Module):
    def __init__(self, s: Settings, after: Settings, index: int) -> None:
        super().__init__()
        self.s, self.last = s, after is not s
        self.self = SelfAttention(s, index)
        self.output = Output(after, s.config.hidden_size, index * 4 + 1)

    def forward(self, x: Tensor, tokens: Tokens, only: Tensor | None) -> tuple[Tensor, Tokens]:
        """[T, H] -> [T, H], in the last layer those of the tokens `only`; and what is known of
        these tokens."""
        heads, x = self.self(x, tokens)
        if self.last:
            x, tokens = self.s.layers.whole(x), tokens._replace(local_keys=tokens.keys)
        if only is not None:
            heads, x = heads.index_select(0, only), x.index_select(0, only)
            tokens = tokens._replace(local_keys=tokens.local_keys.index_select(0, only))
        return self.output(heads, x, tokens), tokens


class Intermediate(nn.Module):
    def __init__(self, s: Settings) -> None:
        super().__init__()
        self.s = s
        self.dense = s.layers.column(s.config.hidden_size, s.config.intermediate_size)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """[T, H] -> (GELU(x W^T + bias) [T, I / tp], x)"""
        inner, x = self.dense.fork(x, self.s.kernels)
        return self.s.kernels.bias_gelu(inner, self.dense.bias), x


class Layer(nn.Module):
    def __init__(self, s: Settings, index: int) -> None:
        super().__init__()
        after = s
        if index == s.config.num_layers - 1:
            # Few tokens are wanted behind the last attention, from anywhere: they are not sharded.
            after = s._replace(layers=s.layers.whole_tokens())
        self.attention = Attention(s, after, index)
        self.intermediate = Intermediate(after)
        self.output = Output(after, s.config.intermediate_size, index * 4 + 2)

    def forward(self, x: Tensor, tokens: Tokens, only: Tensor | None = None) -> Tensor:
        x, tokens = self.attention(x, tokens, only)
        inner, x = self.intermediate(x)
        return self.output(inner, x, tokens)


class Encoder(nn.Module):
    def __init__(self, s: Settings) -> None:
        super().__init__()
        self.layer = nn.ModuleList(Layer(s, i) for i in range(s.config.num_layers))


class Pooler(nn.Module):
    def __init__(self, s: Settings) -> None:
        super().__init__()
        self.dense = Linear(s.config.hidden_size, s.config.hidden_size)

    def forward(self, first: Tensor, kernels: Any) -> Tensor:
        return torch.tanh(self.dense(first, kernels) + self.dense.bias)


class BertModel(nn.Module):
    """The encoder: ids -> hidden states [T, H] of every token (whole on every rank)."""

    def __init__(self, s: Settings, recompute: bool) -> None:
        super().__init__()
        self.s, self.recompute = s, recompute
        self.embeddings = Embeddings(s)
        self.encoder = Encoder(s)
        if s.config.nsp_head:
            self.pooler = Pooler(s)

    def forward(
        self, ids: Tensor, types: Tensor, positions: Tensor, tokens: Tokens, only: Tensor
    ) -> Tensor:
        """Hidden states [len(only), H] of the tokens `only`: behind the last attention nothing
        else is computed."""
        return self.states(ids, types, positions, tokens, only=only)[-1]

    def states(
        self,
        ids: Tensor,
        types: Tensor,
        positions: Tensor,
        tokens: Tokens,
        every: bool = False,
        only: Tensor | None = None,
    ) -> list[Tensor]:
        """The last hidden state; every=True: all, the embeddings' first, as HF's hidden_states."""
        x = self.embeddings(ids, types, positions, tokens)
        states = [x]
        last = len(self.encoder.layer) - 1
        for number, layer in enumerate(self.encoder.layer):
            wanted = only if number == last else None
            if self.recompute and torch.is_grad_enabled():
                # Dropout is a function of counters, so there is no generator state to restore.
                x = checkpoint(
                    layer, x, tokens, wanted, use_reentrant=False, preserve_rng_state=False
                )
            else:
                x = layer(x, tokens, wanted)
            states = [*states, x] if every else [x]
        return [*map(self.s.layers.whole, states[:-1]), states[-1]]


class HeadTransform(nn.Module):
    def __init__(self, s: Settings) -> None:
        super().__init__()
        self.s = s
        self.dense = Linear(s.config.hidden_size, s.config.hidden_size)
        self.LayerNorm = Norm(s.config.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        k, norm = self.s.kernels, self.LayerNorm
        x = k.bias_gelu(self.dense(x, k), self.dense.bias)
        return k.layer_norm(x, norm.weight, norm.bias, self.s.config.layer_norm_eps)


class PredictionHead(nn.Module):
    bias: nn.Parameter

    def __init__(self, s: Settings) -> None:
        super().__init__()
        self.transform = HeadTransform(s)
        self.bias = s.layers.vocabulary_bias(padded_vocab(s.config, s.layers.tp))


class PreTrainingHeads(nn.Module):
    def __init__(self, s: Settings) -> None:
        super().__init__()
        self.predictions = PredictionHead(s)
        if s.config.nsp_head:
            self.seq_relationship = Linear(s.config.hidden_size, 2)


class BertForPreTraining(nn.Module):
    """BERT with the masked-LM head (decoder tied to the word embeddings) and the NSP head.

    Args:
        layers: PlainLayers or TensorParallelLayers. kernels: see pretrain.kernels.
        seed: of the dropout. recompute: activation checkpointing, a layer at a time.
    """

    def __init__(
        self,
        config: ModelConfig,
        layers: PlainLayers,
        kernels: Any,
        seed: int = 0,
        recompute: bool = False,
    ) -> None:
        super().__init__()
        self.s = s = Settings(config, layers, kernels, seed)
        self.bert = BertModel(s, recompute)
        self.cls = PreTrainingHeads(s)

    @property
    def config(self) -> ModelConfig:
        return self.s.config

    def forward(self, micro: MicroBatch) -> LossSums:
        """Loss and accuracy sums of a micro-batch; padding (weight 0) counts nothing."""
        return LossSums(
            *self.sums(
                micro.input_ids,
                micro.token_type_ids,
                micro.position_ids,
                micro.token_keys,
                micro.cu_seqlens,
                micro.max_length,
                micro.masked_positions,
                micro.masked_labels,
                micro.masked_weights,
                micro.first_positions,
                micro.next_sentence_labels,
                micro.row_weights,
            )
        )

    def sums(
        self,
        ids: Tensor,
        types: Tensor,
        positions: Tensor,
        keys: Tensor,
        cu_seqlens: Tensor,
        max_length: int,
        masked_positions: Tensor,
        masked_labels: Tensor,
        masked_weights: Tensor,
        first_positions: Tensor,
        next_sentence_labels: Tensor,
        row_weights: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """`forward` on bare tensors."""
        s = self.s
        tokens = Tokens(cu_seqlens, max_length, keys, s.layers.chunk(keys), self.training)
        wanted = torch.cat((masked_positions, first_positions))
        hidden = self.bert(ids, types, positions, tokens, wanted)
        scored, first = hidden.split((len(masked_positions), len(first_positions)))
        scored = self.cls.predictions.transform(scored)
        weight = self.bert.embeddings.word_embeddings.weight
        mlm_sum, mlm_correct = s.kernels.linear_cross_entropy(
            s.layers.before_vocabulary(scored),
            weight,
            self.cls.predictions.bias,
            masked_labels,
            masked_weights,
            s.layers.rank * weight.shape[0],
            s.config.vocab_size,
            s.layers.group,
        )
        if not s.config.nsp_head:
            zero = torch.zeros_like(mlm_sum)
            return mlm_sum, zero, mlm_correct, zero
        logits = self.nsp_logits(first).float()
        losses = F.cross_entropy(logits, next_sentence_labels, reduction="none")
        hits = (logits.argmax(-1) == next_sentence_labels).float()
        return mlm_sum, (losses * row_weights).sum(), mlm_correct, (hits * row_weights).sum()

    def nsp_logits(self, first: Tensor) -> Tensor:
        """Hidden states of [CLS] [N, H] -> [N, 2]; index 0: B follows A."""
        head, kernels = self.cls.seq_relationship, self.s.kernels
        return head(self.bert.pooler(first, kernels), kernels) + head.bias

    def encode(self, micro: MicroBatch) -> Tensor:
        """Hidden states [T, H] of every token, whole on every rank."""
        return self.states(micro, every=False)[-1]

    def states(self, micro: MicroBatch, every: bool = True) -> list[Tensor]:
        """Hidden states [T, H] after the embeddings and after each layer."""
        keys = self.s.layers.chunk(micro.token_keys)
        tokens = Tokens(micro.cu_seqlens, micro.max_length, micro.token_keys, keys, self.training)
        return self.bert.states(
            micro.input_ids, micro.token_type_ids, micro.position_ids, tokens, every
        )

    def logits(self, hidden: Tensor) -> Tensor:
        """Hidden states [M, H] -> logits [M, vocab_size] fp32, padded vocabulary cut off."""
        scored = self.cls.predictions.transform(hidden)
        weight = self.bert.embeddings.word_embeddings.weight
        local = F.linear(scored, weight).float() + self.cls.predictions.bias.float()
        return self.s.layers.gather_vocabulary(local)[:, : self.s.config.vocab_size]
