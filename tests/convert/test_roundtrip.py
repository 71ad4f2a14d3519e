"""HF -> ours -> HF keeps every bit, whatever form the folder has; Google's and NVIDIA's files too."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from configs import UserError
from pretrain.convert.crc32c import crc32c
from pretrain.convert.export import export
from pretrain.convert.hf import read_hf, write_weights
from pretrain.convert.importing import import_model
from pretrain.convert.layouts import read_foreign
from pretrain.convert.tf import Bundle


def same_bytes(ours: dict, theirs: dict) -> None:
    assert ours.keys() == theirs.keys()
    for name in theirs:
        assert ours[name].numpy().tobytes() == theirs[name].numpy().tobytes(), name


def test_hf_to_run_to_hf_is_bit_identical(
    tmp_path: Path, hf_folder: Path, run_folder: Path
) -> None:
    out = export(run_folder, tmp_path / "out")
    same_bytes(load_file(out / "model.safetensors"), load_file(hf_folder / "model.safetensors"))
    again = import_model(out, tmp_path / "again")
    first = (
        run_folder / "train/checkpoints/step-00000000/rank-00000-of-00001.safetensors"
    ).read_bytes()
    file = again / "train/checkpoints/step-00000000/rank-00000-of-00001.safetensors"
    assert file.read_bytes() == first


@pytest.mark.parametrize("suffix", ["safetensors", "bin"])
@pytest.mark.parametrize(
    ("kind", "prefix"),
    [
        ("BertModel", ""),
        ("BertModel", "bert."),
        ("BertForPreTraining", ""),
        ("BertForMaskedLM", ""),
    ],
)
def test_every_class_prefix_and_file(
    tmp_path: Path, tiny_config, vocab_txt: Path, kind: str, suffix: str, prefix: str
) -> None:
    import transformers

    torch.manual_seed(1)
    model = getattr(transformers, kind)(tiny_config)
    state = {k: v.clone() for k, v in model.state_dict().items()}
    if kind == "BertModel":
        state["embeddings.position_ids"] = torch.arange(32)[None]
        state = {f"{prefix}{k}": v for k, v in state.items()}
    folder = tmp_path / "in"
    model.config.save_pretrained(folder)
    if suffix == "bin":
        torch.save(state, folder / "pytorch_model.bin")
    else:
        write_weights(state, folder)
    source = read_foreign(folder, vocab_txt)
    base = model if kind == "BertModel" else model.bert
    for name, tensor in base.state_dict().items():
        assert torch.equal(source.tensors[f"bert.{name}"], tensor), name
    assert source.config.nsp_head == (kind != "BertForMaskedLM")
    heads = {"BertModel": 7, "BertForPreTraining": 0, "BertForMaskedLM": 0}
    assert len(source.missing_heads) == heads[kind]
    run = import_model(folder, tmp_path / "run", vocab=vocab_txt)
    exported = load_file(export(run, tmp_path / "out") / "model.safetensors")
    for name, tensor in source.tensors.items():
        assert torch.equal(exported[name], tensor), name


def test_shards_with_an_index(tmp_path: Path, hf_folder: Path, run_folder: Path) -> None:
    out = export(run_folder, tmp_path / "out", shard_bytes=4096)
    assert len(list(out.glob("model-*.safetensors"))) > 2
    index = json.loads((out / "model.safetensors.index.json").read_text())
    wanted = load_file(hf_folder / "model.safetensors")
    assert index["metadata"]["total_size"] == sum(t.numel() * 4 for t in wanted.values())
    same_bytes(read_hf(out).tensors, wanted)


def test_names_of_old_files_and_the_tied_decoder(hf_folder: Path, edit_weights) -> None:
    def change(tensors: dict) -> None:
        for name in [n for n in tensors if "LayerNorm" in n]:
            new = name.replace("LayerNorm.weight", "LayerNorm.gamma").replace(
                "LayerNorm.bias", "LayerNorm.beta"
            )
            tensors[new] = tensors.pop(name)
        tensors["cls.predictions.decoder.weight"] = tensors[
            "bert.embeddings.word_embeddings.weight"
        ].clone()

    before = read_hf(hf_folder).tensors
    edit_weights(hf_folder, change)
    source = read_hf(hf_folder)
    same_bytes(source.tensors, before)
    assert "cls.predictions.decoder.weight" in source.dropped


def test_bf16_weights_come_back_as_they_were(tmp_path: Path, hf_folder: Path, edit_weights) -> None:
    edit_weights(hf_folder, lambda t: t.update({k: v.bfloat16() for k, v in t.items()}))
    wanted = load_file(hf_folder / "model.safetensors")
    out = export(import_model(hf_folder, tmp_path / "run"), tmp_path / "out", dtype="bf16")
    got = load_file(out / "model.safetensors")
    assert all(torch.equal(got[n].view(torch.int16), wanted[n].view(torch.int16)) for n in wanted)
    assert json.loads((out / "config.json").read_text())["dtype"] == "bfloat16"


def test_google_checkpoint(tmp_path: Path, real_data: Path) -> None:
    """A checkpoint that google-research/bert wrote, without TensorFlow."""
    prefix = real_data / "models/tf-bert-tiny-test-checkpoint/bert_model.ckpt"
    source = read_foreign(prefix)
    bundle = Bundle(prefix)
    assert len(source.tensors) == 46 and len(source.dropped) == 93 and not source.missing_heads
    kernel = bundle.read("bert/encoder/layer_1/intermediate/dense/kernel")
    assert kernel.shape == (4, 16)
    name = "bert.encoder.layer.1.intermediate.dense.weight"
    np.testing.assert_array_equal(source.tensors[name].numpy(), kernel.T)
    nsp = bundle.read("cls/seq_relationship/output_weights")
    np.testing.assert_array_equal(source.tensors["cls.seq_relationship.weight"].numpy(), nsp)
    out = export(import_model(prefix, tmp_path / "run"), tmp_path / "out")
    same_bytes(load_file(out / "model.safetensors"), source.tensors)


def test_google_checkpoint_computes_what_its_own_arithmetic_says(real_data: Path) -> None:
    """MLM logits by numpy straight from the TF variables, in TF's own layout of the kernels."""
    from scipy.special import erf

    from pretrain.convert.native import to_model
    from pretrain.downstream.pseudo import uniform_rows

    prefix = real_data / "models/tf-bert-tiny-test-checkpoint/bert_model.ckpt"
    bundle = Bundle(prefix)
    v = {
        name: bundle.read(name).astype(np.float64) for name in bundle.entries if "adam" not in name
    }

    def norm(x: np.ndarray, at: str) -> np.ndarray:
        x = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-12)
        return x * v[f"{at}/LayerNorm/gamma"] + v[f"{at}/LayerNorm/beta"]

    def dense(x: np.ndarray, at: str) -> np.ndarray:
        return x @ v[f"{at}/kernel"] + v[f"{at}/bias"]

    def gelu(x: np.ndarray) -> np.ndarray:
        return x * 0.5 * (1 + erf(x / np.sqrt(2)))

    ids = np.array([3, 5, 4, 7, 8, 2])
    e = "bert/embeddings/"
    x = (
        v[f"{e}word_embeddings"][ids]
        + v[f"{e}position_embeddings"][:6]
        + v[f"{e}token_type_embeddings"][0]
    )
    x = norm(x, "bert/embeddings")
    for layer in range(2):
        at = f"bert/encoder/layer_{layer}/"
        q, k, w = (
            dense(x, f"{at}attention/self/{n}").reshape(6, 4, 1).transpose(1, 0, 2)
            for n in ("query", "key", "value")
        )
        scores = np.exp(q @ k.transpose(0, 2, 1))
        mixed = (scores / scores.sum(-1, keepdims=True) @ w).transpose(1, 0, 2).reshape(6, 4)
        x = norm(x + dense(mixed, f"{at}attention/output/dense"), f"{at}attention/output")
        x = norm(
            x + dense(gelu(dense(x, f"{at}intermediate/dense")), f"{at}output/dense"), f"{at}output"
        )
    at = "cls/predictions/"
    x = norm(gelu(dense(x, f"{at}transform/dense")), f"{at}transform")
    wanted = x @ v[f"{e}word_embeddings"].T + v[f"{at}output_bias"]

    source = read_foreign(prefix)
    model = to_model(source.config, source.tensors)
    with torch.no_grad():
        got = model.logits(model.encode(uniform_rows(torch.from_numpy(ids)[None])))
    np.testing.assert_allclose(got.numpy(), wanted, atol=1e-5)


def test_google_folder_and_index_name_the_same_checkpoint(tmp_path: Path, real_data: Path) -> None:
    folder = tmp_path / "google"
    shutil.copytree(
        real_data / "models/tf-bert-tiny-test-checkpoint", folder, copy_function=shutil.copyfile
    )
    a, b = read_foreign(folder), read_foreign(folder / "bert_model.ckpt.index")
    same_bytes(a.tensors, b.tensors)
    for part in ("index", "data-00000-of-00001"):
        shutil.copyfile(folder / f"bert_model.ckpt.{part}", folder / f"other.ckpt.{part}")
    with pytest.raises(UserError, match="2 TensorFlow checkpoints"):
        read_foreign(folder)


@pytest.mark.parametrize("length", [0, 9, 4096 * 64 - 1, 4096 * 65 + 17])
def test_crc32c_of_lanes_equals_byte_by_byte(length: int) -> None:
    data = np.random.default_rng(length).integers(0, 256, length, np.uint8).tobytes()
    state = 0xFFFFFFFF
    for byte in data[: 4096 * 2]:
        state ^= byte
        for _ in range(8):
            state = (state >> 1) ^ (0x82F63B78 if state & 1 else 0)
    assert crc32c(data[: 4096 * 2]) == state ^ 0xFFFFFFFF
    assert crc32c(b"123456789") == 0xE3069283
    # Lanes: a CRC is linear, so flipping one byte changes it by the flip's own CRC difference.
    if length > 4096 * 64:
        zeros = bytes(length)
        flip = bytes(length - 5) + b"\x01" + bytes(4)
        other = bytes(a ^ b for a, b in zip(data, flip))
        assert crc32c(data) ^ crc32c(other) == crc32c(zeros) ^ crc32c(flip)


def nvidia_file(tmp_path: Path, model, vocab_txt: Path, prefix: str = "module.") -> Path:
    """DeepLearningExamples' ckpt_N.pt: activations inside LinearActivation, padded vocabulary."""
    state = {}
    for name, tensor in model.state_dict().items():
        if name.endswith("position_ids"):
            continue
        for dense in ("intermediate.dense.", "pooler.dense.", "transform.dense."):
            name = name.replace(dense, dense.replace("dense", "dense_act"))
        if "word_embeddings" in name or name.startswith(
            ("cls.predictions.decoder.", "cls.predictions.bias")
        ):
            padding = torch.zeros(-len(tensor) % 8, *tensor.shape[1:])
            tensor = torch.cat([tensor, padding])
        state[prefix + name] = tensor
    folder = tmp_path / "nvidia"
    folder.mkdir()
    config = model.config.to_dict() | {"vocab_size": 32}
    (folder / "bert_config.json").write_text(json.dumps(config))
    (folder / "vocab.txt").write_bytes(vocab_txt.read_bytes())
    torch.save(
        {"model": state, "epoch": 0, "optimizer": {"state": {}, "param_groups": []}},
        folder / "ckpt_7.pt",
    )
    return folder / "ckpt_7.pt"


def test_nvidia_checkpoint_is_converted(
    tmp_path: Path, pretraining_model, hf_folder: Path, vocab_txt: Path
) -> None:
    file = nvidia_file(tmp_path, pretraining_model, vocab_txt)
    out = export(import_model(file, tmp_path / "run"), tmp_path / "out")
    same_bytes(load_file(out / "model.safetensors"), load_file(hf_folder / "model.safetensors"))


def test_minilm_real_weights_keep_their_bytes(tmp_path: Path, minilm: Path) -> None:
    """104 real tensors through import and export; sentence embeddings equal to 1e-5."""
    from transformers import AutoModel, AutoTokenizer

    from pretrain.convert.native import to_model
    from pretrain.convert.opening import open_model
    from pretrain.downstream.pseudo import uniform_rows

    run = import_model(minilm, tmp_path / "run")
    out = export(run, tmp_path / "out")
    before, after = load_file(minilm / "model.safetensors"), load_file(out / "model.safetensors")
    compared = 0
    for name, tensor in before.items():
        if name.endswith("position_ids"):
            continue
        assert after[f"bert.{name}"].numpy().tobytes() == tensor.numpy().tobytes(), name
        compared += 1
    assert compared == 103
    opened = open_model(run)
    model = to_model(opened.config, opened.tensors)
    original, exported = (
        AutoModel.from_pretrained(minilm).eval(),
        AutoModel.from_pretrained(out).eval(),
    )
    tokenizer = AutoTokenizer.from_pretrained(out)
    for sentence in (
        "A kiln reached nine hundred degrees.",
        "Rakes come out when maple leaves fall.",
    ):
        ids = torch.tensor([tokenizer(sentence)["input_ids"]])
        with torch.no_grad():
            wanted = original(ids).last_hidden_state[0]
            ours = model.encode(uniform_rows(ids))
            theirs = exported(ids).last_hidden_state[0]
        for hidden in (ours, theirs):
            assert (hidden - wanted).abs().max() < 1e-5
            assert (hidden.mean(0) - wanted.mean(0)).abs().max() < 1e-5


def test_training_goes_on_from_an_imported_model(
    tmp_path: Path, hf_folder: Path, repo: Path
) -> None:
    """The trainer's held-out loss before its first update is that of the imported model."""
    import os
    import subprocess
    import sys

    from data_prep.shards import held_out
    from pretrain.evaluate import evaluate
    from tests.synthetic import make_shards

    run = import_model(hf_folder, tmp_path / "run")
    shards = make_shards(tmp_path / "new/shards/len128", rows=40, max_length=24, vocab_size=27)
    shutil.copyfile(run / "vocab/tokenizer.json", shards / "tokenizer.json")
    shutil.copytree(run / "vocab", tmp_path / "new/vocab")
    recipe = {
        "work_dir": str(tmp_path / "new"),
        "shards": {"len128": {"max_length": 24}},
        "model": {
            "hidden_size": 16,
            "num_layers": 2,
            "num_heads": 4,
            "intermediate_size": 32,
            "max_position_embeddings": 32,
        },
        "parallel": {"micro_batch_tokens": 512},
        "phases": [{"steps": 2, "global_batch": 8}],
        "train": {"precision": "fp32"},
        "checkpoint": {"every": 0, "init_from": str(run)},
    }
    (tmp_path / "recipe.yaml").write_text(json.dumps(recipe))
    done = subprocess.run(
        [sys.executable, "-m", "pretrain", "train", str(tmp_path / "recipe.yaml")],
        cwd=repo,
        env={**os.environ, "DS_ACCELERATOR": "cpu"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    lines = [json.loads(x) for x in (tmp_path / "new/train/log.jsonl").read_text().splitlines()]
    first = next(line for line in lines if line["kind"] == "eval")
    assert first["step"] == 0
    wanted = evaluate(run, held_out(shards))["mlm_loss"]
    assert first["mlm_loss"] == pytest.approx(wanted, abs=1e-5)
