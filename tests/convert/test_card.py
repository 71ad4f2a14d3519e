"""What the model card of an exported folder tells."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from configs import UserError
from configs.model import ModelConfig
from pretrain.convert.card import last_scores, model_card
from pretrain.convert.export import export, main


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
    assert "Update 0" not in card
    card = model_card(config, meta | {"origin": "google/bert"}, scores, "abc123")
    assert "Update 0 had the weights of `google/bert`." in card
    config.nsp_head = False
    assert "Weight of the next" not in model_card(config, meta, scores, "abc123")


def test_an_edited_card_is_not_lost(exported: Path, run_folder: Path) -> None:
    export(run_folder, exported)  # one that was not edited is replaced
    card = exported / "README.md"
    card.write_text(card.read_text() + "my words\n")
    with pytest.raises(UserError, match="README.md that was edited"):
        export(run_folder, exported)
    assert card.read_text().endswith("my words\n")
    card.unlink()
    export(run_folder, exported)
    assert "my words" not in card.read_text()


def test_an_export_of_an_export_keeps_what_is_known(
    exported: Path, run_folder: Path, tmp_path: Path
) -> None:
    again = export(exported, tmp_path / "again", dtype="bf16")
    first, second = (json.loads((f / "lambert.json").read_text()) for f in (exported, again))
    differ = {"origin", "card"}
    assert {k: v for k, v in first.items() if k not in differ} == {
        k: v for k, v in second.items() if k not in differ
    }


def test_the_tokenizer_json_names_its_folder(run_folder: Path, tmp_path: Path) -> None:
    file = run_folder / "vocab/tokenizer.json"
    assert main([str(run_folder), str(tmp_path / "out"), "--vocab", str(file)]) == 0
