"""Weights and tokenizers that fine-tuning loads: all of the encoder, or a refusal (B53)."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
import transformers

from configs import UserError
from pretrain.downstream.loading import load_for_task, load_tokenizer, tokenizer_digest
from pretrain.downstream.tasks import TASKS

# Under a task's head, whose file and model call a weight the same, and bare (feature-based).
AUTO = ("AutoModelForSequenceClassification", "AutoModel")


def copy_with(folder: Path, target: Path, change) -> Path:
    from safetensors.torch import load_file, save_file

    shutil.copytree(folder, target)
    tensors = load_file(folder / "model.safetensors")
    save_file(change(tensors), target / "model.safetensors", metadata={"format": "pt"})
    return target


@pytest.mark.parametrize("auto", AUTO)
def test_b53_an_extra_prefix_stops_the_run(tmp_path: Path, tiny_model: Path, auto: str) -> None:
    bad = copy_with(tiny_model, tmp_path / "bad", lambda t: {f"model.{k}": v for k, v in t.items()})
    with pytest.raises(UserError, match="39 encoder weights were not loaded, first .*embeddings"):
        load_for_task(getattr(transformers, auto), str(bad))


@pytest.mark.parametrize("auto", AUTO)
@pytest.mark.parametrize(
    "name",
    [
        "encoder.layer.1.output.dense.weight",
        "embeddings.word_embeddings.weight",
        "pooler.dense.bias",
    ],
)
def test_a_missing_encoder_weight_stops_the_run(
    tmp_path: Path, tiny_model: Path, name: str, auto: str
) -> None:
    bad = copy_with(
        tiny_model, tmp_path / "bad", lambda t: {k: v for k, v in t.items() if k != f"bert.{name}"}
    )
    with pytest.raises(UserError, match=f"1 encoder weights were not loaded, first .*{name}"):
        load_for_task(getattr(transformers, auto), str(bad))


@pytest.mark.parametrize("shape_only", [False, True])
@pytest.mark.parametrize("auto", AUTO)
def test_weights_of_any_precision_are_trained_in_fp32(
    tmp_path: Path, tiny_model: Path, auto: str, shape_only: bool
) -> None:
    """A step of 2e-5 is lost in bf16, which transformers takes over from the file."""
    half = copy_with(
        tiny_model, tmp_path / "half", lambda t: {k: v.bfloat16() for k, v in t.items()}
    )
    config = json.loads((half / "config.json").read_text())
    (half / "config.json").write_text(json.dumps({**config, "dtype": "bfloat16"}))
    name = f"random:{half}" if shape_only else str(half)
    model = load_for_task(getattr(transformers, auto), name)
    assert {p.dtype for p in model.parameters()} == {torch.float32}


def test_only_head_and_untrained_pooler_may_be_new(
    tmp_path: Path, tiny_model: Path, capsys
) -> None:
    """A model pretrained without NSP has no pooler; its config says so."""
    bare = copy_with(
        tiny_model, tmp_path / "bare", lambda t: {k: v for k, v in t.items() if "pooler" not in k}
    )
    config = json.loads((bare / "config.json").read_text())
    (bare / "config.json").write_text(json.dumps({**config, "architectures": ["BertForMaskedLM"]}))
    load_for_task(transformers.AutoModelForSequenceClassification, str(bare), num_labels=2)
    said = capsys.readouterr().out
    assert (
        "4 new (bert.pooler.dense.bias, bert.pooler.dense.weight, classifier.bias, classifier.weight)"
        in said
    )


def test_random_init_keeps_shape_and_drops_weights(tiny_model: Path) -> None:
    loaded = load_for_task(
        transformers.AutoModelForSequenceClassification, str(tiny_model), num_labels=3
    ).state_dict()
    fresh = load_for_task(
        transformers.AutoModelForSequenceClassification, f"random:{tiny_model}", num_labels=3
    ).state_dict()
    assert {k: v.shape for k, v in loaded.items()} == {k: v.shape for k, v in fresh.items()}
    assert not torch.equal(
        loaded["bert.embeddings.word_embeddings.weight"],
        fresh["bert.embeddings.word_embeddings.weight"],
    )


def test_tokenizer_larger_than_the_model_is_refused(tmp_path: Path, tiny_model: Path) -> None:
    shutil.copytree(tiny_model, tmp_path / "bad")
    config = json.loads((tmp_path / "bad/config.json").read_text())
    (tmp_path / "bad/config.json").write_text(json.dumps({**config, "vocab_size": 20}))
    with pytest.raises(UserError, match="the model 20"):
        load_tokenizer(str(tmp_path / "bad"))


def test_rows_longer_than_the_models_positions_are_refused_with_the_option(
    tiny_model: Path,
) -> None:
    """SQuAD's default of 384 tokens on a model of 128 positions."""
    assert load_tokenizer(str(tiny_model), 128)
    with pytest.raises(UserError) as error:
        load_tokenizer(str(tiny_model), TASKS["squad"].settings.max_length)
    assert "128 positions" in str(error.value) and "--max-length 128" in str(error.value)


def test_a_tokenizers_digest_hangs_on_every_file_it_is_read_from(
    tmp_path: Path, tiny_model: Path
) -> None:
    model = Path(shutil.copytree(tiny_model, tmp_path / "model"))
    digests = {tokenizer_digest(str(model)), tokenizer_digest(f"random:{model}")}
    assert len(digests) == 1
    (model / "README.md").write_text("no part of it")
    assert tokenizer_digest(str(model)) in digests
    new = ("special_tokens_map.json", "merges.txt", "vocab.json", "added_tokens.json", "spm.model")
    for name in ("tokenizer.json", "vocab.txt", "tokenizer_config.json", *new):
        with (model / name).open("a") as file:
            file.write(" ")
        digests.add(tokenizer_digest(str(model)))
    assert len(digests) == 9
    assert tokenizer_digest("owner/a") != tokenizer_digest("owner/b")


@pytest.mark.parametrize("content", ["", "[]", "null", '"x"', "7", "[" * 9999])
@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "config.json"])
def test_a_damaged_folder_is_refused(
    tmp_path: Path, tiny_model: Path, name: str, content: str
) -> None:
    model = Path(shutil.copytree(tiny_model, tmp_path / "model"))
    (model / name).write_text(content)
    with pytest.raises(UserError, match=f"{model / name} is damaged.*\n.*export the folder again"):
        load_tokenizer(str(model))
    with pytest.raises(UserError, match=f"{model / name} is damaged.*\n.*export the folder again"):
        load_for_task(transformers.AutoModel, str(model))


def test_settings_that_transformers_does_not_take_are_refused(
    tmp_path: Path, tiny_model: Path
) -> None:
    model = Path(shutil.copytree(tiny_model, tmp_path / "model"))
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "hidden_size": "wide"}))
    with pytest.raises(UserError, match=f"{model}: .*\n.*damaged folder: copy or export it again"):
        load_tokenizer(str(model))


@pytest.mark.parametrize(
    "change", [lambda b: b"", lambda b: b[:99], lambda b: b[:-9], lambda b: b"x" * 99]
)
@pytest.mark.parametrize("file", ["model.safetensors", "pytorch_model.bin"])
def test_damaged_weights_are_named(tmp_path: Path, tiny_model: Path, file: str, change) -> None:
    """Empty, cut in the header or in the tensors, and something else."""
    from safetensors.torch import load_file

    model = Path(shutil.copytree(tiny_model, tmp_path / "model"))
    if file.endswith(".bin"):
        torch.save(load_file(model / "model.safetensors"), model / file)
        (model / "model.safetensors").unlink()
    (model / file).write_bytes(change((model / file).read_bytes()))
    with pytest.raises(UserError, match=f"{model / file}: ") as error:
        load_for_task(transformers.AutoModel, str(model))
    assert error.value.remedy
    (model / file).unlink()
    with pytest.raises(UserError, match=f"{model}: neither model.safetensors nor"):
        load_for_task(transformers.AutoModel, str(model))


@pytest.mark.parametrize("start", ["", "random:"])
def test_a_folder_without_a_tokenizer_is_refused(
    tmp_path: Path, tiny_model: Path, start: str
) -> None:
    """transformers makes one that knows no word; a vocab.txt alone is enough."""
    model = Path(shutil.copytree(tiny_model, tmp_path / "model"))
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (model / file).unlink()
    assert len(load_tokenizer(f"{start}{model}")) > 20
    (model / "vocab.txt").unlink()
    with pytest.raises(UserError, match=f"{model}: no tokenizer beside the weights"):
        load_tokenizer(f"{start}{model}")


SEQUENCE, TOKENS = "AutoModelForSequenceClassification", "AutoModelForTokenClassification"


@pytest.mark.parametrize(
    ("before", "after"),
    [(TOKENS, SEQUENCE), (SEQUENCE, TOKENS), (SEQUENCE, "AutoModelForMultipleChoice"), (TOKENS, TOKENS),
     ("AutoModelForQuestionAnswering", SEQUENCE)],
)  # fmt: skip
def test_the_head_of_another_task_is_drawn_anew(
    tmp_path: Path, tiny_model: Path, before: str, after: str, capsys
) -> None:
    """A fine-tuned model in a further fine-tuning, with another number of labels."""
    from safetensors.torch import load_file

    tuned = load_for_task(getattr(transformers, before), str(tiny_model), num_labels=13)
    tuned.save_pretrained(tmp_path / "tuned")
    capsys.readouterr()
    labels = {"num_labels": 3} if "Choice" not in after else {}
    model = load_for_task(getattr(transformers, after), str(tmp_path / "tuned"), **labels)
    said = capsys.readouterr().out
    if "Question" not in before:
        assert "task head has other labels and is drawn anew: classifier.bias, classifier.w" in said
    state, stored = model.state_dict(), load_file(tmp_path / "tuned/model.safetensors")
    assert state["classifier.weight"].shape[0] == (1 if "Choice" in after else 3)
    same = [n for n in stored if n.startswith("bert.") and n in state]
    assert len(same) >= 37 and all(torch.equal(state[n], stored[n]) for n in same)


@pytest.mark.parametrize("auto", [*AUTO, TOKENS])
@pytest.mark.parametrize(("key", "value"), [("vocab_size", 200), ("intermediate_size", 48)])
def test_an_encoder_of_another_shape_is_named_with_both(
    tmp_path: Path, tiny_model: Path, auto: str, key: str, value: int
) -> None:
    model = Path(shutil.copytree(tiny_model, tmp_path / "model"))
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, key: value}))
    shapes = rf"\[.*{config[key]}.*\] in the file, \[.*{value}.*\] by config"
    with pytest.raises(
        UserError, match=rf"of another shape, first .*(\.weight|\.bias): {shapes}"
    ) as e:
        load_for_task(getattr(transformers, auto), str(model))
    assert "two models" in e.value.remedy and "ignore_mismatched" not in str(e.value)


def test_of_many_lost_tensors_the_first_are_named(tmp_path: Path, tiny_model: Path, capsys) -> None:
    bad = copy_with(tiny_model, tmp_path / "bad", lambda t: {f"x.{k}": v for k, v in t.items()})
    with pytest.raises(UserError, match="encoder weights were not loaded"):
        load_for_task(transformers.AutoModel, str(bad))
    assert ", ... 33 more)" in (said := capsys.readouterr().out) and len(said) < 600
