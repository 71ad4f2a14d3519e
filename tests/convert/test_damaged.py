"""Damaged, foreign and half inputs: each is named, and nothing is written or overwritten."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from configs import UserError
from pretrain.convert.export import export
from pretrain.convert.hf import write_weights
from pretrain.convert.importing import import_model
from pretrain.convert.layouts import read_foreign
from pretrain.convert.tf import Bundle

QUERY = "bert.encoder.layer.1.attention.self.query.weight"
SHARD = "model-00001-of-00002.safetensors"


def config(change: dict) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        file = folder / "config.json"
        values = {**json.loads(file.read_text()), **change}
        file.write_text(json.dumps({k: v for k, v in values.items() if v is not None}))

    return damage


def weights(change: Callable[[dict], None]) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        from safetensors.torch import load_file, save_file

        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})

    return damage


def cut(name: str, keep: float) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        data = (folder / name).read_bytes()
        (folder / name).write_bytes(data[: int(len(data) * keep)])

    return damage


def text(name: str, content: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_text(content) and None


def text_in(name: str, old: str, new: str) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        before = (folder / name).read_text()
        assert old in before
        (folder / name).write_text(before.replace(old, new))

    return damage


def vocab(change: Callable[[list[str]], list[str]]) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        lines = (folder / "vocab.txt").read_text().splitlines()
        (folder / "vocab.txt").write_text("\n".join(change(lines)) + "\n")

    return damage


def as_bin(make: Callable[[dict], object], keep: float = 1.0) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        from safetensors.torch import load_file

        torch.save(make(load_file(folder / "model.safetensors")), folder / "pytorch_model.bin")
        (folder / "model.safetensors").unlink()
        cut("pytorch_model.bin", keep)(folder)

    return damage


def index(weight_map: object) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        (folder / "model.safetensors").rename(folder / SHARD)
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))

    return damage


def misplaced(folder: Path) -> None:
    """Two shards, and an index that says of a tensor in the second that it is in the first."""
    tensors = read_foreign(folder).tensors
    write_weights(tensors, folder, sum(t.nbytes for t in tensors.values()) * 2 // 3)
    (folder / "model.safetensors").unlink()
    file = folder / "model.safetensors.index.json"
    values = json.loads(file.read_text())
    values["weight_map"][next(reversed(tensors))] = SHARD
    file.write_text(json.dumps(values))


def fill(value: float) -> Callable[[dict], None]:
    return lambda tensors: tensors[QUERY].view(-1)[3:4].fill_(value) and None


FOREIGN: dict[str, tuple[Callable[[Path], None], str]] = {
    "no config": (lambda f: (f / "config.json").unlink(), "config.json"),
    "config cut": (cut("config.json", 0.6), "config.json is damaged"),
    "config without an end": (text("config.json", "[" * 9999), "config.json is damaged"),
    "config is a list": (text("config.json", "[]"), "no JSON object"),
    "config lacks a size": (config({"hidden_size": None}), "hidden_size"),
    "no heads": (config({"num_attention_heads": 0}), "num_attention_heads"),
    "heads below 0": (config({"num_attention_heads": -2}), "num_attention_heads"),
    "a size that is a truth": (config({"num_attention_heads": True}), "num_attention_heads"),
    "an epsilon as text": (config({"layer_norm_eps": "1e-12"}), "layer_norm_eps='1e-12'"),
    "an epsilon below 0": (config({"layer_norm_eps": -1e-12}), "layer_norm_eps=-1e-12"),
    "all dropped": (config({"hidden_dropout_prob": 1.0}), "hidden_dropout_prob=1.0"),
    "dropout without a value": (
        text_in(
            "config.json",
            '"attention_probs_dropout_prob": 0.1',
            '"attention_probs_dropout_prob": null',
        ),
        "attention_probs_dropout_prob=None",
    ),
    "architecture is a list": (config({"model_type": ["bert"]}), "model_type="),
    "heads do not divide": (config({"num_attention_heads": 3}), "num_attention_heads=3"),
    "another architecture": (config({"model_type": "roberta"}), "model_type=roberta"),
    "pre-LN of Megatron": (config({"model_type": "megatron-bert"}), "pre-LN"),
    "another GELU": (config({"hidden_act": "gelu_new"}), "hidden_act='gelu_new'"),
    "relative positions": (
        config({"position_embedding_type": "relative_key"}),
        "position_embedding_type",
    ),
    "untied by config": (config({"tie_word_embeddings": False}), "tie_word_embeddings"),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), "model.safetensors"),
    "weights cut": (cut("model.safetensors", 0.7), "model.safetensors: damaged"),
    "weights are text": (text("model.safetensors", "<html>404</html>"), "damaged"),
    "a shard is missing": (
        index({"a": SHARD, "b": "model-00002-of-00002.safetensors"}),
        "shard model-00002-of-00002.safetensors is missing",
    ),
    "index without shards": (index({}), "none named"),
    "index is a list": (index([SHARD]), "weight_map does not say"),
    "index without a map": (index(None), "weight_map does not say"),
    "index of numbers": (index({QUERY: 1}), "weight_map does not say"),
    "index of a tensor that is in no shard": (
        index({QUERY: SHARD, "cls.seq_relationship.scale": SHARD}),
        "no file holds, first cls.seq_relationship.scale",
    ),
    "index names another shard": (misplaced, rf"holds cls\.\S+, .* the index says is in {SHARD}"),
    "encoder weight missing": (weights(lambda t: t.pop(QUERY) is None), QUERY),
    "a layer too many": (
        weights(lambda t: t.update({"bert.encoder.layer.2.output.dense.bias": torch.zeros(16)})),
        "bert.encoder.layer.2.output.dense.bias",
    ),
    "a layer too few": (config({"num_hidden_layers": 3}), "bert.encoder.layer.2"),
    "wrong shape": (weights(lambda t: t.update({QUERY: torch.zeros(16, 8)})), r"\[16, 8\]"),
    "whole numbers": (weights(lambda t: t.update({QUERY: t[QUERY].int()})), "torch.int32"),
    "NaN": (weights(fill(float("nan"))), "NaN or Inf"),
    "Inf": (weights(fill(float("inf"))), "NaN or Inf"),
    "half an MLM head": (
        weights(lambda t: t.pop("cls.predictions.transform.dense.bias") is None),
        "cls.predictions.transform.dense.bias",
    ),
    "half a pooler": (
        weights(lambda t: t.pop("bert.pooler.dense.bias") is None),
        "pooler lacks bert.pooler.dense.bias",
    ),
    "half an NSP head": (
        weights(lambda t: t.pop("cls.seq_relationship.weight") is None),
        "next-sentence head lacks cls.seq_relationship.weight",
    ),
    "untied decoder": (
        weights(lambda t: t.update({"cls.predictions.decoder.weight": torch.ones(27, 16)})),
        "decoder.weight differs",
    ),
    "bin cut": (as_bin(dict, 0.5), "pytorch_model.bin: damaged"),
    "bin with a numbered tensor": (as_bin(lambda t: {**t, 3: t[QUERY]}), "3 is a Tensor"),
    "bin with a list": (as_bin(lambda t: {**t, QUERY: [1.0]}), f"{QUERY}' is a list"),
    "bin without a dict": (as_bin(lambda t: list(t.values())), "no state dict"),
    "tokenizer too small": (vocab(lambda v: v[:-1]), "26 ids, the embedding has 27"),
    "tokenizer too large": (vocab(lambda v: [*v, "more"]), "28 ids, the embedding has 27"),
    "vocabulary without [MASK] (B07)": (
        vocab(lambda v: [w.replace("[MASK]", "[M]") for w in v]),
        r"no \[MASK\]",
    ),
    "[SEP] twice (B07)": (vocab(lambda v: [*v[:-1], "[SEP]"]), r"'\[SEP\]' stands in lines 4"),
    "blank entry": (vocab(lambda v: [*v[:7], "", *v[8:]]), "line 8 is blank"),
    "tokenizer_config is a list": (text("tokenizer_config.json", "[]"), "tokenizer_config.json"),
    "no tokenizer": (lambda f: (f / "vocab.txt").unlink(), "no tokenizer"),
    "Megatron folder": (lambda f: (f / "mp_rank_00").mkdir(), "Megatron checkpoint"),
}


@pytest.mark.parametrize("name", FOREIGN)
def test_foreign_model_is_refused_by_name(tmp_path: Path, hf_folder: Path, name: str) -> None:
    damage, message = FOREIGN[name]
    damage(hf_folder)
    with pytest.raises(UserError, match=message):
        import_model(hf_folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_run_of_ours_is_not_imported(tmp_path: Path, hf_folder: Path) -> None:
    run = import_model(hf_folder, tmp_path / "run")
    for path in (run, run / "train", run / "train/checkpoints/step-00000000"):
        with pytest.raises(UserError, match="a run of ours") as caught:
            import_model(path, tmp_path / "out")
        assert caught.value.remedy == f"use checkpoint.init_from={path}"


def test_a_blank_last_line_of_the_vocabulary_shifts_nothing_b07(hf_folder: Path) -> None:
    before = read_foreign(hf_folder)
    with (hf_folder / "vocab.txt").open("a") as file:
        file.write("\n\n")
    assert read_foreign(hf_folder).config == before.config


class Payload:
    def __reduce__(self):
        return os.mkdir, (os.environ["PAYLOAD_RAN"],)


@pytest.mark.parametrize("zipped", [True, False])
def test_nothing_is_unpickled(
    tmp_path: Path, hf_folder: Path, monkeypatch: pytest.MonkeyPatch, zipped: bool
) -> None:
    ran = tmp_path / "ran"
    monkeypatch.setenv("PAYLOAD_RAN", str(ran))
    file = hf_folder / "pytorch_model.bin"
    if zipped:
        torch.save({"weight": Payload()}, file)
    else:
        file.write_bytes(pickle.dumps(Payload()))
    (hf_folder / "model.safetensors").unlink()
    with pytest.raises(UserError, match="pytorch_model.bin"):
        import_model(hf_folder, tmp_path / "out")
    assert not ran.exists()


@pytest.mark.parametrize(
    "key", ["language_model", "encoder.layers.0.self_attention.linear_qkv.weight"]
)
def test_b45_megatron_file_is_refused_knowingly(tmp_path: Path, vocab_txt: Path, key: str) -> None:
    """Even when it holds objects that may not be unpickled: its strings are read without running it."""
    import argparse

    file = tmp_path / "model_optim_rng.pt"
    torch.save({"args": argparse.Namespace(tp=1), "model": {key: torch.zeros(2)}}, file)
    with pytest.raises(UserError, match="Megatron checkpoint") as caught:
        import_model(file, tmp_path / "out", vocab=vocab_txt)
    assert "pre-LN" in str(caught.value)


def flip(name: str, at: int) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        data = bytearray((folder / name).read_bytes())
        data[at] ^= 1
        (folder / name).write_bytes(data)

    return damage


def flip_pooler(folder: Path) -> None:
    entry = Bundle(folder / "bert_model.ckpt").entries["bert/pooler/dense/kernel"]
    flip(DATA, entry.offset + 5)(folder)


DATA, INDEX = "bert_model.ckpt.data-00000-of-00001", "bert_model.ckpt.index"
GOOGLE: dict[str, tuple[Callable[[Path], None], str]] = {
    "index cut": (cut(INDEX, 0.9), "no table footer"),
    "index flipped": (flip(INDEX, 50), "checksum of a block"),
    "index empty": (cut(INDEX, 0), "no table footer"),
    "data flipped": (flip_pooler, "checksum of .* does not match"),
    "data cut": (cut(DATA, 0.5), "cut inside"),
    "data missing": (lambda f: (f / DATA).unlink(), "no such file"),
    "config missing": (lambda f: (f / "bert_config.json").unlink(), "bert_config.json"),
    "config of another": (
        text_in("bert_config.json", '"num_hidden_layers": 2', '"num_hidden_layers": 1'),
        "bert.encoder.layer.1",
    ),
    "vocabulary missing": (lambda f: (f / "vocab.txt").unlink(), "no tokenizer"),
}


@pytest.mark.parametrize("name", GOOGLE)
def test_google_checkpoint_is_refused_by_name(tmp_path: Path, real_data: Path, name: str) -> None:
    folder = tmp_path / "google"
    original = real_data / "models/tf-bert-tiny-test-checkpoint"
    shutil.copytree(original, folder, copy_function=shutil.copyfile)
    damage, message = GOOGLE[name]
    damage(folder)
    with pytest.raises(UserError, match=message):
        import_model(folder / "bert_model.ckpt", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def checkpoint(run: Path) -> Path:
    return run / "train/checkpoints/step-00000000"


def flip_in_rank_file(run: Path) -> None:
    file = next(checkpoint(run).glob("rank-*.safetensors"))
    data = bytearray(file.read_bytes())
    data[-20] ^= 4
    file.write_bytes(data)


def cut_rank_file(run: Path) -> None:
    file = next(checkpoint(run).glob("rank-*.safetensors"))
    file.write_bytes(file.read_bytes()[:-100])


def edit_meta(change: Callable[[dict], object]) -> Callable[[Path], None]:
    def damage(run: Path) -> None:
        from pretrain.checkpoint.folder import read_json, write_json

        file = checkpoint(run) / "checkpoint.json"
        values = read_json(file)
        change(values)
        write_json(file, values)

    return damage


RUNS: dict[str, tuple[Callable[[Path], None], str]] = {
    "rank file missing": (lambda r: next(checkpoint(r).glob("rank-*")).unlink(), "is missing"),
    "rank file cut": (cut_rank_file, "bytes instead of"),
    "bit flipped": (flip_in_rank_file, "was altered"),
    "index missing": (lambda r: (checkpoint(r) / "checkpoint.json").unlink(), "no complete"),
    "index altered": (
        lambda r: text_in("checkpoint.json", '"step": 0', '"step": 9')(checkpoint(r)),
        "damaged",
    ),
    "other format version (B45)": (edit_meta(lambda m: m.update(format=99)), "format 99"),
    "tensor missing": (edit_meta(lambda m: m["tensors"].pop(QUERY)), QUERY),
    "other model": (edit_meta(lambda m: m["model"].update(num_layers=1)), "encoder.layer.1"),
    "unknown setting": (edit_meta(lambda m: m["model"].update(rotary=True)), "rotary"),
    "tokenizer missing": (lambda r: shutil.rmtree(r / "vocab"), "no tokenizer"),
    "tokenizer of another size": (
        text_in("vocab/tokenizer.json", '"the": 26', '"the": 26, "more": 27'),
        "28 ids, the model has 27",
    ),
}


@pytest.mark.parametrize("name", RUNS)
def test_checkpoint_is_refused_by_name(tmp_path: Path, run_folder: Path, name: str) -> None:
    damage, message = RUNS[name]
    damage(run_folder)
    with pytest.raises(UserError, match=message):
        export(run_folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_nothing_is_overwritten(tmp_path: Path, hf_folder: Path, run_folder: Path) -> None:
    before = (hf_folder / "model.safetensors").read_bytes()
    with pytest.raises(UserError, match="no earlier export"):
        export(run_folder, hf_folder)
    assert (hf_folder / "model.safetensors").read_bytes() == before
    with pytest.raises(UserError, match="not empty"):
        import_model(hf_folder, run_folder)
    with pytest.raises(UserError, match="no such file"):
        import_model(tmp_path / "nowhere", tmp_path / "out")


def test_trim_vocab_cuts_padding_that_no_layout_mentions(
    tmp_path: Path, hf_folder: Path, edit_weights
) -> None:
    wanted = read_foreign(hf_folder).tensors

    def pad(tensors: dict) -> None:
        for name in ("bert.embeddings.word_embeddings.weight", "cls.predictions.bias"):
            tensors[name] = torch.cat([tensors[name], torch.ones(5, *tensors[name].shape[1:])])

    edit_weights(hf_folder, pad)
    config({"vocab_size": 32})(hf_folder)
    with pytest.raises(UserError, match="--trim-vocab"):
        read_foreign(hf_folder)
    got = read_foreign(hf_folder, trim=True)
    assert got.config.vocab_size == 27
    assert all(torch.equal(got.tensors[name], wanted[name]) for name in wanted)
