"""`python -m pretrain finetune`: what it refuses before it trains."""

from __future__ import annotations

from pathlib import Path

import pytest

from configs import UserError
from pretrain.downstream.finetune import main


def test_early_refusals_of_the_command(tmp_path: Path, tiny_model: Path) -> None:
    (tmp_path / "t.jsonl").write_text('{"text": "a", "label": "x"}\n')
    file = str(tmp_path / "t.jsonl")
    base = [
        "--model",
        str(tiny_model),
        "--out",
        str(tmp_path / "out"),
        "--train",
        file,
        "--dev",
        file,
    ]
    with pytest.raises(UserError, match="only the label 'x'"):
        main(["classify", *base])
    with pytest.raises(UserError, match="it is for tagging"):
        main(["classify", *base, "--feature-based", "sum"])
    for task, option in (
        ("rte", "--doc-stride=64"),
        ("squad", "--first-column=q"),
        ("swag", "--second-column=b"),
        ("ner", "--second-column=b"),
        ("squad-2", "--label-column=answer"),
    ):
        with pytest.raises(UserError, match=f"{option.partition('=')[0]} on {task}"):
            main([task, *base, option])
    with pytest.raises(UserError, match="no complete checkpoint"):
        main(["classify", *base[2:], "--model", str(tmp_path)])
    assert not (tmp_path / "out").exists()


def test_hub_names_that_cannot_be_had_name_the_way_out(tmp_path: Path, tiny_model: Path) -> None:
    """Tests run with HF_HUB_OFFLINE=1: every hub name is one that is not in the cache."""
    (tmp_path / "t.jsonl").write_text('{"text": "a", "label": "x"}\n{"text": "b", "label": "y"}\n')
    out, files = (
        ["--out", str(tmp_path / "out")],
        [f"--{s}={tmp_path}/t.jsonl" for s in ("train", "dev")],
    )
    with pytest.raises(UserError) as error:
        main(["classify", "--model", "google-bert/no-such-bert", *out, *files])
    assert "google-bert/no-such-bert: no model" in str(error.value)
    assert "HF_HUB_OFFLINE is set" in error.value.remedy
    assert "hf download google-bert/no-such-bert --local-dir" in error.value.remedy
    with pytest.raises(UserError) as error:
        main(["mrpc", "--model", str(tiny_model), *out])
    assert "nyu-mll/glue/mrpc: not loaded" in str(error.value) and "--data" in error.value.remedy
    with pytest.raises(UserError, match=r"no such folder"):
        main(["classify", "--model", "bert-base-uncased", *out, *files])
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "option",
    [
        "--epochs=0",
        "--batch=0",
        "--lr=-1e-3",
        "--lr=",
        "--lr=1e-3,nan",
        "--epochs=inf",
        "--seeds=,",
        "--seeds=4294967296",
        "--max-length=3",
        "--doc-stride=0",
        "--dropout=1",
        "--dropout=nan",
    ],
)
def test_settings_that_train_nothing_are_named(tmp_path: Path, tiny_model: Path, option) -> None:
    name, _, value = option.partition("=")
    named = f"{name} names no number" if value in ("", ",") else name
    with pytest.raises(UserError, match=named):
        main(["squad", "--model", str(tiny_model), "--out", str(tmp_path / "o"), option])
