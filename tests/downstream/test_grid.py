"""Fine-tuning end to end on a tiny model: results, tables, resuming, and B53."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from pretrain.downstream import training
from pretrain.downstream.finetune import main
from pretrain.downstream.grid import run_grid
from pretrain.downstream.loading import weights_digest
from pretrain.downstream.tasks import TASKS, Settings
from tests.downstream.test_loading import copy_with

QUICK = Settings(lrs=(1e-3,), seeds=(1,), epochs=1, batch=8, max_length=16)


def films(count: int = 24) -> dict[str, list[dict]]:
    rows = [
        {"text": f"a {'good' if i % 2 else 'bad'} film", "label": "ny"[i % 2]} for i in range(count)
    ]
    for row in rows:
        row |= {"title": "the film", "stars": row["label"]}
    return {"train": rows, "dev": rows[:8]}


def test_grid_of_two_rates_and_seeds(tmp_path: Path, tiny_model: Path, monkeypatch) -> None:
    """A separable task is learnt; table, predictions and the best model are there; a second call
    trains nothing."""
    settings = replace(QUICK, lrs=(1e-2, 1e-5), seeds=(1, 2), epochs=12)
    table = run_grid(TASKS["classify"], settings, films(), str(tiny_model), tmp_path / "out")
    assert [row["seeds"] for row in table["rows"]] == [2, 2]
    assert table["best"]["lr"] == 1e-2 and table["best"]["accuracy"] == 100
    text = (tmp_path / "out/table.md").read_text()
    assert "| **0.01** | 2 | 100.00 ± 0.00 |" in text
    lines = (tmp_path / "out/runs/lr0.01-seed1/predictions-dev.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [row["label"] for row in films()["dev"]]

    from transformers import AutoModelForSequenceClassification, pipeline

    best = tmp_path / "out/best"
    assert AutoModelForSequenceClassification.from_pretrained(best).config.id2label == {
        0: "n",
        1: "y",
    }
    assert pipeline("text-classification", str(best))("a good film")[0]["label"] == "y"
    assert not list((tmp_path / "out").rglob("*.bin")), "nothing pickled is left"

    monkeypatch.setattr("pretrain.downstream.grid.train_one", None)
    again = run_grid(TASKS["classify"], settings, films(), str(tiny_model), tmp_path / "out")
    assert again == table


def test_dropout_is_the_models_unless_asked_for(tmp_path: Path, tiny_model: Path) -> None:
    """A model pretrained without any can be fine-tuned with what the paper had."""
    from transformers import AutoConfig

    own = AutoConfig.from_pretrained(tiny_model)
    for dropout, expected in ((None, own.hidden_dropout_prob), (0.3, 0.3)):
        settings, out = replace(QUICK, epochs=3, dropout=dropout), tmp_path / str(dropout)
        run_grid(TASKS["classify"], settings, films(8), str(tiny_model), out)
        trained = AutoConfig.from_pretrained(out / "best")
        assert trained.hidden_dropout_prob == trained.attention_probs_dropout_prob == expected
    weights = [(tmp_path / d / "best/model.safetensors").read_bytes() for d in ("None", "0.3")]
    assert weights[0] != weights[1]  # they went another way


def test_b53_other_weights_give_other_results(tmp_path: Path, tiny_model: Path) -> None:
    """Three checkpoints of one shape: digests, losses and files differ."""
    outputs = []
    for step in range(3):
        model = copy_with(
            tiny_model,
            tmp_path / f"step{step}",
            lambda t, s=step: {k: v + 0.05 * s * torch.ones_like(v) for k, v in t.items()},
        )
        task = TASKS["sts-b"]
        pairs = [
            {"sentence1": "a cat sat", "sentence2": f"dog {'not ' * i}sat", "score": str(i)}
            for i in range(6)
        ]
        out = tmp_path / f"out{step}"
        run_grid(task, QUICK, {"train": pairs, "dev": pairs}, str(model), out, save_best=False)
        outputs.append((out / "runs/lr0.001-seed1/predictions-dev.jsonl").read_text())
    assert len(set(outputs)) == 3
    assert len({weights_digest(str(tmp_path / f"step{s}")) for s in range(3)}) == 3


@pytest.mark.parametrize("layers", ["last", "sum", "concat"])
def test_feature_based_tagger_trains_without_touching_the_encoder(
    tmp_path: Path, tiny_model: Path, layers: str, monkeypatch
) -> None:
    from pretrain.downstream import features, grid

    made = []
    original = features.FrozenTagger
    monkeypatch.setattr(
        features, "FrozenTagger", lambda *a: made.append(original(*a, width=16)) or made[-1]
    )
    rows = [{"tokens": ["the", "cat", "sat"], "tags": ["O", "B-ANIMAL", "O"]}] * 12
    splits = {"train": rows, "dev": rows[:4]}
    settings = replace(QUICK, lrs=(3e-2,), epochs=8)
    table = grid.run_grid(TASKS["ner"], settings, splits, str(tiny_model), tmp_path / "out", layers)
    assert table["best"]["f1"] == 100
    from transformers import AutoModel

    before = AutoModel.from_pretrained(tiny_model).state_dict()
    assert all(torch.equal(v.cpu(), before[k]) for k, v in made[0].encoder.state_dict().items())
    from safetensors import safe_open

    with safe_open(tmp_path / "out/best/tagger.safetensors", "pt") as file:
        about = file.metadata()
    assert json.loads(about["labels"]) == ["O", "B-ANIMAL", "I-ANIMAL"]
    assert about["layers"] == layers


def test_every_kind_trains_through_the_command(tmp_path: Path, tiny_model: Path, capsys) -> None:
    """Tagging, choice and questions, from files, in one epoch each."""
    folders = {name: tmp_path / f"{name}-data" for name in ("ner", "squad", "swag")}
    for folder in folders.values():
        folder.mkdir()
    conll = "the O\ncat B-ANIMAL\n\t\nwho O\n\ndog B-ANIMAL\n"
    for split in ("train", "dev"):
        (folders["ner"] / f"{split}.conll").write_text(conll * 3)
        header = "startphrase,sent1,sent2,ending0,ending1,ending2,ending3,label\n"
        rows = "the cat,the cat sat,the dog,sat,is good,is bad,not,2\n" * 6
        (folders["swag"] / f"{split}.csv").write_text(header + rows)
        qa = [
            {"id": str(i), "question": "who sat", "answers": [{"text": "cat", "answer_start": 4}]}
            for i in range(4)
        ]
        squad = {"data": [{"paragraphs": [{"context": "the cat sat", "qas": qa}]}]}
        (folders["squad"] / f"{split}-v1.1.json").write_text(json.dumps(squad))
    common = [
        "--model",
        str(tiny_model),
        "--epochs",
        "1",
        "--lr",
        "1e-3",
        "--no-model",
        "--max-length",
        "32",
    ]
    for name, folder in folders.items():
        assert main([name, "--data", str(folder), "--out", str(tmp_path / name), *common]) == 0
    said = capsys.readouterr().out
    for head in ("| ner: lr | seeds | f1 |", "| squad: lr | seeds | f1 | exact |", "| swag: lr |"):
        assert head in said


def test_a_rate_that_diverges_is_said_to_and_is_never_the_best(
    tmp_path: Path, tiny_model: Path, capsys
) -> None:
    settings = replace(QUICK, lrs=(1e30, 1e-6), epochs=4)
    for name, split in (("classify", films(8)), ("sts-b", scored_pairs(8))):
        out = tmp_path / name
        for _ in range(2):  # the second time from its results
            table = run_grid(TASKS[name], settings, split, str(tiny_model), out)
            assert [row["diverged"] for row in table["rows"]] == [1, 0]
            assert table["best"]["lr"] == 1e-6
            said = capsys.readouterr().out
            assert said.count("DIVERGED") == 1 and f"{name} lr 1e+30 seed 1: " in said
        json.loads((out / "results.json").read_text(), parse_constant=pytest.fail)
        kept = torch.cat([t.flatten() for t in load_file(out / "best/model.safetensors").values()])
        assert kept.isfinite().all()


def scored_pairs(count: int) -> dict[str, list[dict]]:
    rows = [
        {"sentence1": "a cat sat", "sentence2": f"dog {'not ' * (i % 4)}sat", "score": i % 4}
        for i in range(count)
    ]
    return {"train": rows, "dev": rows}


def test_a_batch_is_the_one_asked_for_on_any_number_of_gpus(tmp_path: Path, monkeypatch) -> None:
    """transformers gives every GPU that it sees a batch of its own."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    arguments = training._arguments(QUICK, tmp_path, 1e-3, 1, gpu=True)
    assert arguments.device.type == "cuda"
    assert arguments.train_batch_size == QUICK.batch


def test_published_settings_are_the_defaults() -> None:
    """1810.04805: sections 4.1 to 4.4 and appendix A.3."""
    glue = TASKS["mnli"].settings
    assert glue.lrs == (5e-5, 4e-5, 3e-5, 2e-5) and (glue.batch, glue.epochs) == (32, 3)
    assert TASKS["squad"].settings == Settings(lrs=(5e-5,), batch=32, epochs=3, max_length=384)
    two = TASKS["squad-2"].settings
    assert (two.lrs, two.batch, two.epochs) == ((5e-5,), 48, 2)
    swag = TASKS["swag"].settings
    assert (swag.lrs, swag.batch, swag.epochs) == ((2e-5,), 16, 3)


def test_progress_says_which_run_how_many_and_how_far(
    tmp_path: Path, tiny_model: Path, capsys
) -> None:
    """In a log a line now and then, and no dict of the Trainer's."""
    settings = replace(QUICK, lrs=(1e-3, 1e-4), seeds=(1, 2), epochs=60)
    run_grid(TASKS["classify"], settings, films(8), str(tiny_model), tmp_path / "out")
    said = capsys.readouterr()
    for number, (lr, seed) in enumerate(((1e-3, 1), (1e-3, 2), (1e-4, 1), (1e-4, 2)), 1):
        run = f"classify lr {lr:g} seed {seed}, run {number} of 4"
        lines = [line for line in said.out.splitlines() if line.startswith(f"{run}: ")]
        assert any("60/60 updates (100%), " in line and " | loss " in line for line in lines)
        assert any("score dev: 1/1 batches" in line for line in lines)
    assert "{'" not in said.out + said.err


def test_a_model_fine_tuned_on_scores_learns_classes(tmp_path: Path, tiny_model: Path) -> None:
    """Its config.json says that its labels are numbers to come near to."""
    run_grid(TASKS["sts-b"], QUICK, scored_pairs(8), str(tiny_model), tmp_path / "scores")
    settings = replace(QUICK, lrs=(1e-2,), epochs=12)
    model = str(tmp_path / "scores/best")
    run_grid(TASKS["classify"], settings, films(), model, tmp_path / "classes")
    config = json.loads((tmp_path / "classes/best/config.json").read_text())
    assert config["problem_type"] == "single_label_classification"
