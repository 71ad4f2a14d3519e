"""What the model card of an exported folder tells."""

from __future__ import annotations

import json
from pathlib import Path

from configs.model import ModelConfig
from pretrain.convert.card import last_scores, model_card


def test_card_tells_data_recipe_scores_and_commit(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    lines = [
        {"kind": "eval", "step": 0, "mlm_loss": 9.0},
        {"kind": "train", "step": 5, "mlm_loss": 4.5},
        {"kind": "eval", "step": 5, "mlm_loss": 4.25, "mlm_accuracy": 0.3},
        {"kind": "eval", "step": 9, "mlm_loss": 1.0},
    ]
    log.write_text("\n".join(map(json.dumps, lines)) + '\n{"kind": "tr')
    scores = last_scores(log, 5)
    recipe = {
        "name": "demo",
        "sources": [{"kind": "books", "path": "x/novels", "weight": 1.0, "language": "en"}],
        "phases": [
            {
                "name": "p1",
                "steps": 5,
                "global_batch": 64,
                "shards": "len128",
                "schedule": {"kind": "poly", "lr": 6e-3},
                "mask_probability": 0.3,
            }
        ],
    }
    config = ModelConfig(
        vocab_size=27, hidden_size=16, num_layers=1, num_heads=2, intermediate_size=32
    )
    card = model_card(config, {"step": 5, "recipe": recipe, "format": 1}, scores, "abc123")
    rate = "peak rate 0.006, 0.3 of the tokens masked"
    for part in ("novels", "4.2500", "4.5000", "p1: 5 updates of 64 rows", rate, "abc123", "- en"):
        assert part in card
    assert "1.0000" not in card, "a score from after this checkpoint"
    recipe["phases"] = [{**recipe["phases"][0], "name": f"p{n}"} for n in (1, 2, 3)]
    meta = {"step": 5, "recipe": recipe, "state": {"phase_ends": [3]}}
    card = model_card(config, meta, scores, "abc123")
    assert all(f"p{n}: {made} of 5 updates of" in card for n, made in ((1, 3), (2, 2), (3, 0)))
    assert "Time limit" not in card and "Weight of the next" not in card
    recipe["train"] = {"max_minutes": 5.0, "nsp_weight": 0.3}
    card = model_card(config, meta, scores, "abc123")
    assert "Update 5. Time limit: 5 minutes. Weight of the next-sentence loss: 0.3.\n" in card
    config.nsp_head = False
    assert "Weight of the next" not in model_card(config, meta, scores, "abc123")
