"""Micro-batches made by hand, for tests of the model and the engine that need no shards."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from configs.model import ModelConfig, resolve_model


def tiny_config(**changes) -> ModelConfig:
    values = {
        "preset": "bert-tiny",
        "vocab_size": 150,
        "hidden_size": 64,
        "num_layers": 2,
        "num_heads": 4,
        "max_position_embeddings": 48,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "vocab_pad_multiple": 16,
    }
    return resolve_model(ModelConfig(**{**values, **changes}))


def random_rows(count: int, config: ModelConfig, seed: int, longest: int = 32) -> list[dict]:
    """Rows as dicts: ids, types, masked positions and labels, NSP label; for `pack`."""
    g = torch.Generator().manual_seed(seed)

    def draw(low, high, shape=()):
        return torch.randint(low, high, shape, generator=g)

    rows = []
    for _ in range(count):
        n = int(draw(8, longest + 1))
        positions = torch.randperm(n - 2, generator=g)[: max(1, n // 6)].sort().values + 1
        rows.append(
            {
                "ids": draw(5, config.vocab_size, (n,)),
                "types": (torch.arange(n) >= int(draw(3, n - 2))).long(),
                "positions": positions,
                "labels": draw(5, config.vocab_size, (len(positions),)),
                "nsp": int(draw(0, 2)),
                "keys": draw(-(2**31), 2**31 - 1, (n,)).int(),
            }
        )
    return rows


def pack(rows: list[dict], tokens: int = 0, longest: int = 32) -> SimpleNamespace:
    """The MicroBatch of these rows; the tail up to `tokens` (0: a multiple of 128) is one row or
    several that nothing scores."""
    real = sum(len(r["ids"]) for r in rows)
    total = tokens or -(-real // 128) * 128
    lengths = [len(r["ids"]) for r in rows]
    starts = torch.tensor([0, *lengths]).cumsum(0)
    left = total - real
    tail = [longest] * (left // longest) + ([left % longest] if left % longest else [])
    bounds = torch.tensor([0, *lengths, *tail]).cumsum(0)
    pad = lambda key, dtype: torch.cat(  # noqa: E731
        [*(r[key].to(dtype) for r in rows), torch.zeros(left, dtype=dtype)]
    )
    masked = [r["positions"] + s for r, s in zip(rows, starts)]
    count = sum(map(len, masked))
    return SimpleNamespace(
        input_ids=pad("ids", torch.int64),
        token_type_ids=pad("types", torch.int64),
        position_ids=torch.cat([torch.arange(n) for n in [*lengths, *tail]]),
        token_keys=pad("keys", torch.int32),
        cu_seqlens=bounds.int(),
        max_length=longest,
        masked_positions=torch.cat([*masked, torch.zeros(3, dtype=torch.int64)]),
        masked_labels=torch.cat([*(r["labels"] for r in rows), torch.zeros(3, dtype=torch.int64)]),
        masked_weights=torch.cat([torch.ones(count), torch.zeros(3)]),
        first_positions=starts[:-1],
        next_sentence_labels=torch.tensor([r["nsp"] for r in rows]),
        row_weights=torch.ones(len(rows)),
        tokens=real,
        rows=len(rows),
        masked=count,
        labelled=len(rows),
        sum_squared_lengths=sum(n * n for n in lengths),
    )
