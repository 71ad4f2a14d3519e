"""Feature-based use (1810.04805, section 5.3): a frozen BERT feeds a two-layer BiLSTM tagger."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel


class FrozenTagger(nn.Module):
    """Word pieces -> hidden states of a frozen encoder -> two BiLSTM layers of 768 -> tags.

    Args:
        encoder: a BertModel; its weights never change and its dropout is off.
        layers: "last", or the "sum" or "concat" of the top four; the paper reports 94.9, 95.9 (with
            learned weights) and 96.1 dev F1 on CoNLL-2003.
    """

    def __init__(
        self, encoder: PreTrainedModel, layers: str, labels: int, width: int = 768
    ) -> None:
        super().__init__()
        self.encoder = encoder.requires_grad_(False)
        self.layers = layers
        self.top = min(4, encoder.config.num_hidden_layers)
        size = encoder.config.hidden_size * (self.top if layers == "concat" else 1)
        self.lstm = nn.LSTM(
            size, width, num_layers=2, bidirectional=True, batch_first=True, dropout=0.1
        )
        self.classifier = nn.Linear(2 * width, labels)

    def train(self, mode: bool = True) -> FrozenTagger:
        super().train(mode)
        self.encoder.eval()
        return self

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        token_type_ids: Tensor | None = None,
        labels: Tensor | None = None,
    ) -> dict[str, Any]:
        """[B, L] ids -> {"logits": [B, L, labels], "loss": mean over labelled places}."""
        with torch.no_grad():
            states = self.encoder(
                input_ids, attention_mask, token_type_ids, output_hidden_states=True
            ).hidden_states[-self.top :]
        if self.layers == "concat":
            given = torch.cat(states, -1)
        else:
            given = states[-1] if self.layers == "last" else torch.stack(states).sum(0)
        lengths = attention_mask.sum(1).cpu()
        packed = nn.utils.rnn.pack_padded_sequence(
            given, lengths, batch_first=True, enforce_sorted=False
        )
        out, _ = nn.utils.rnn.pad_packed_sequence(
            self.lstm(packed)[0], batch_first=True, total_length=input_ids.shape[1]
        )
        logits = self.classifier(out)
        if labels is None:
            return {"logits": logits}
        loss = nn.functional.cross_entropy(
            logits.flatten(0, 1).float(), labels.flatten(), ignore_index=-100
        )
        return {"loss": loss, "logits": logits}
