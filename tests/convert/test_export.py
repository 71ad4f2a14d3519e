"""What an exported folder is: complete, checked, usable by transformers, free of padding."""

from __future__ import annotations

import json
import stat
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from configs import UserError
from configs.files import LOCK, folder_beside
from configs.model import ModelConfig, padded_vocab
from pretrain.checkpoint import save_logical
from pretrain.convert.export import export, main
from pretrain.convert.importing import import_model
from pretrain.convert.native import to_model
from pretrain.convert.opening import open_model
from pretrain.convert.self_check import self_check
from pretrain.model import build
from pretrain.parallel.pieces import pieces

AUTO = (
    "AutoModelForPreTraining",
    "AutoModelForMaskedLM",
    "AutoModelForSequenceClassification",
    "AutoModelForQuestionAnswering",
    "AutoModelForTokenClassification",
    "AutoModelForMultipleChoice",
)


def test_files_and_metadata_of_the_folder(exported: Path) -> None:
    with safe_open(exported / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}
        assert "cls.predictions.decoder.weight" not in file.keys()  # noqa: SIM118
    config = json.loads((exported / "config.json").read_text())
    assert config["architectures"] == ["BertForPreTraining"] and config["vocab_size"] == 27
    card = (exported / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: transformers\npipeline_tag: fill-mask\n")
    assert not list(exported.glob("*.bin")) and not list(exported.parent.glob(".*new"))
    modes = {stat.S_IMODE(f.stat().st_mode) for f in exported.iterdir()}
    assert len(modes) == 1, "weights must be as readable as the config beside them"


@pytest.mark.parametrize("name", AUTO)
def test_every_auto_class_finds_the_whole_encoder(exported: Path, name: str) -> None:
    import transformers

    model, info = getattr(transformers, name).from_pretrained(exported, output_loading_info=True)
    assert not info["mismatched_keys"]
    assert not [k for k in info["missing_keys"] if k.startswith("bert.")]
    weights = load_file(exported / "model.safetensors")
    state = model.state_dict()
    assert all(torch.equal(state[k], weights[k]) for k in state if k.startswith("bert."))


def test_fill_mask_answers_with_true_entries_only(exported: Path) -> None:
    from transformers import pipeline

    answers = pipeline("fill-mask", str(exported), top_k=27)("the w3 [MASK] w5")
    assert sorted(a["token"] for a in answers) == list(range(27))
    assert abs(sum(a["score"] for a in answers) - 1) < 1e-5


def test_export_again_gives_the_same_bytes_and_replaces_only_exports(
    exported: Path, run_folder: Path
) -> None:
    before = {f.name: f.read_bytes() for f in exported.iterdir()}
    export(run_folder, exported)
    assert {f.name: f.read_bytes() for f in exported.iterdir()} == before


def test_one_export_or_import_at_a_time_into_a_place(
    tmp_path: Path, run_folder: Path, hf_folder: Path
) -> None:
    with folder_beside(tmp_path / "out"):
        with pytest.raises(UserError, match="another making of out is running"):
            export(run_folder, tmp_path / "out")
        with pytest.raises(UserError, match="another making of out is running"):
            import_model(hf_folder, tmp_path / "out")
        assert not (tmp_path / "out").exists()
    out = export(run_folder, tmp_path / "out")
    assert not [p for p in tmp_path.rglob(".*") if p.name == LOCK or p.name == ".out.new"]
    assert "model.safetensors" in {p.name for p in out.iterdir()}


def test_a_mount_point_is_refused_before_the_work() -> None:
    with pytest.raises(UserError, match="a mount point"), folder_beside(Path("/")):
        pytest.fail("it cannot be renamed")


def test_links_are_followed_and_stay(tmp_path: Path, run_folder: Path, hf_folder: Path) -> None:
    """To a folder on another disk, say; also where that is still to be made."""
    for make, source in ((export, run_folder), (import_model, hf_folder)):
        place = tmp_path / make.__name__
        (place / "disk" / "there").mkdir(parents=True)
        for name in ("there", "absent"):
            link = place / name
            link.symlink_to(Path("disk") / name)
            make(source, link)
            assert link.is_symlink() and list(link.iterdir()), name
        if make is export:
            make(source, place / "there")  # over an earlier one
        assert sorted(p.name for p in (place / "disk").iterdir()) == ["absent", "there"]


def test_what_else_lies_in_an_earlier_export_is_not_lost(exported: Path, run_folder: Path) -> None:
    for name in ("rte/table.md", "notes.txt", ".git/config"):
        mine = exported / name
        mine.parent.mkdir(exist_ok=True)
        mine.write_text("mine")
        with pytest.raises(UserError, match="besides an earlier export"):
            export(run_folder, exported)
        assert mine.read_text() == "mine"
        mine.unlink()
        if mine.parent != exported:
            mine.parent.rmdir()
    export(run_folder, exported, shard_bytes=4000)
    assert len(list(exported.glob("model-*.safetensors"))) > 1
    export(run_folder, exported)  # shards of the earlier one are no others
    assert not list(exported.glob("model-*.safetensors"))


@pytest.mark.parametrize("place", ["sync_tree", "self_check.self_check"])
@pytest.mark.parametrize("kind", [KeyboardInterrupt, OSError])
def test_an_export_that_was_interrupted_leaves_the_earlier_one(
    exported: Path, run_folder: Path, monkeypatch: pytest.MonkeyPatch, place: str, kind: type
) -> None:
    before = {f.name: f.read_bytes() for f in exported.iterdir()}

    def stop(*_: object) -> None:
        raise kind

    where = "pretrain.convert." + (place if "." in place else f"export.{place}")
    with monkeypatch.context() as patch, pytest.raises(kind):
        patch.setattr(where, stop)
        export(run_folder, exported)
    assert not [p for p in exported.parent.iterdir() if p.name.startswith(".out")]
    assert {f.name: f.read_bytes() for f in exported.iterdir()} == before
    export(run_folder, exported)
    assert not [p for p in exported.parent.iterdir() if p.name.startswith(".out")]


def test_a_full_disk_is_said_to_be_one(tmp_path: Path, run_folder: Path, repo: Path) -> None:
    """As a limit of 16 kB on a file, in a process of its own; the half-made folder is gone."""
    code = f"""
import resource, signal, sys
import transformers, pretrain.convert.self_check
from configs.errors import run_cli
from pretrain.convert.export import main
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (16384, 16384))
run_cli(lambda: main([{str(run_folder)!r}, {str(tmp_path / "out")!r}]))
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=repo, capture_output=True, text=True)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "model.safetensors: not written" in done.stderr and "File too large" in done.stderr
    assert not [p for p in tmp_path.iterdir() if "out" in p.name]


def test_a_run_whose_folders_are_links_finds_its_vocabulary(
    tmp_path: Path, run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """train/ moved to a larger disk, a link left behind; and a link to the checkpoint itself."""
    (tmp_path / "disk").mkdir()
    (run_folder / "train").rename(tmp_path / "disk" / "train")
    (run_folder / "train").symlink_to(tmp_path / "disk" / "train")
    monkeypatch.chdir(run_folder)
    for path in (run_folder, Path("train"), Path()):
        assert open_model(path).tokenizer.samefile(run_folder / "vocab")
    (tmp_path / "disk" / "train").rename(tmp_path / "moved")
    (run_folder / "train").unlink()
    (tmp_path / "moved").rename(run_folder / "train")
    (tmp_path / "last").symlink_to(run_folder / "train/checkpoints/step-00000000")
    assert open_model(tmp_path / "last").tokenizer.samefile(run_folder / "vocab")


def test_export_from_step_train_and_work_folder_are_one(tmp_path: Path, run_folder: Path) -> None:
    step = run_folder / "train/checkpoints/step-00000000"
    hashes = {
        (export(place, tmp_path / f"o{i}") / "model.safetensors").read_bytes()
        for i, place in enumerate((run_folder, run_folder / "train", step))
    }
    assert len(hashes) == 1


def test_a_model_without_nsp_head_becomes_masked_lm(tmp_path: Path, run_folder: Path) -> None:
    config = ModelConfig(
        vocab_size=27, hidden_size=16, num_layers=1, num_heads=2, intermediate_size=32,
        max_position_embeddings=16, nsp_head=False,
    )  # fmt: skip
    model, parts = build(config, seed=4)
    tensors = {
        p.name: p.view(p.param.detach().view(-1))[p.clip(p.view(p.param.view(-1)))[1]]
        for p in parts
    }
    save_logical(tmp_path / "train", tensors, {"model": vars(config)})
    out = export(tmp_path, tmp_path / "out", vocab=run_folder / "vocab")
    assert json.loads((out / "config.json").read_text())["architectures"] == ["BertForMaskedLM"]
    assert not [k for k in load_file(out / "model.safetensors") if "pooler" in k or "seq_rel" in k]


def test_self_check_finds_a_changed_weight(exported: Path, run_folder: Path, edit_weights) -> None:
    opened = open_model(run_folder)
    model = to_model(opened.config, opened.tensors)
    assert self_check(exported, model) < 1e-5
    name = "bert.encoder.layer.0.attention.self.key.weight"
    edit_weights(exported, lambda t: t[name].view(-1)[0:1].add_(0.01))
    with pytest.raises(UserError, match="logits differ"):
        self_check(exported, model)
    edit_weights(exported, lambda t: t.pop(name))
    with pytest.raises(UserError, match="missing_keys"):
        self_check(exported, model)


def test_weights_that_blow_roundings_up_are_exported_and_still_checked(
    tmp_path: Path, vocab_txt: Path, edit_weights
) -> None:
    """As a training that diverged leaves them: the two implementations round apart by 3e-3 here."""
    from transformers import BertConfig, BertForPreTraining

    config = BertConfig(
        vocab_size=27, hidden_size=256, num_hidden_layers=6, num_attention_heads=4,
        intermediate_size=1024, max_position_embeddings=64,
    )  # fmt: skip
    torch.manual_seed(3)
    model = BertForPreTraining(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 2)
    model.save_pretrained(tmp_path / "hf")
    (tmp_path / "hf" / "vocab.txt").write_bytes(vocab_txt.read_bytes())
    run = import_model(tmp_path / "hf", tmp_path / "run")
    out = export(run, tmp_path / "out")
    opened = open_model(run)
    ours = to_model(opened.config, opened.tensors)
    name = "bert.encoder.layer.5.attention.self.value.weight"
    edit_weights(out, lambda t: t[name].view(-1)[0:1].add_(1))
    with pytest.raises(UserError, match="logits differ"):
        self_check(out, ours)


def test_a_model_that_computes_nan_is_refused_for_what_it_is(
    tmp_path: Path, hf_folder: Path, edit_weights
) -> None:
    edit_weights(hf_folder, lambda t: t["bert.encoder.layer.1.output.dense.weight"].fill_(3e38))
    run = import_model(hf_folder, tmp_path / "run")
    own = f"^{run}/train/checkpoints/step-00000000: the trained model's own logits are not finite"
    with pytest.raises(UserError, match=own) as error:
        export(run, tmp_path / "out")
    assert "step-" in error.value.remedy and not (tmp_path / "out").exists()


def test_b45_fused_rows_land_where_the_trainer_splits_them(
    tmp_path: Path, run_folder: Path
) -> None:
    """Hidden 8, 2 heads: the 24 fused rows are numbered and looked for in the exported folder."""
    config = ModelConfig(
        vocab_size=27,
        hidden_size=8,
        num_layers=1,
        num_heads=2,
        intermediate_size=16,
        max_position_embeddings=16,
    )
    model, parts = build(config, seed=1)
    fused = model.bert.encoder.layer[0].attention.self.qkv
    assert fused.weight.shape == (24, 8)
    with torch.no_grad():
        fused.bias.copy_(torch.arange(24.0))
    logical = {
        p.name: p.view(p.param.detach().view(-1))[p.clip(p.view(p.param.view(-1)))[1]]
        for p in parts
    }
    save_logical(tmp_path / "train", logical, {"model": vars(config)})
    out = export(tmp_path, tmp_path / "out", vocab=run_folder / "vocab")
    weights = load_file(out / "model.safetensors")
    for number, name in enumerate(("query", "key", "value")):
        rows = weights[f"bert.encoder.layer.0.attention.self.{name}.bias"]
        assert rows.tolist() == list(range(8 * number, 8 * number + 8))
    # Eight sentences through the trainer's model and the exported one.
    from transformers import AutoModelForPreTraining

    from pretrain.downstream.pseudo import uniform_rows

    ids = torch.randint(27, (8, 12), generator=torch.Generator().manual_seed(2))
    theirs = AutoModelForPreTraining.from_pretrained(out).eval()
    with torch.no_grad():
        ours = model.eval().logits(model.encode(uniform_rows(ids)))
        wanted = theirs(ids).prediction_logits.reshape(ours.shape)
    assert (ours - wanted).abs().max() < 1e-5
    meta = json.loads((tmp_path / "train/checkpoints/step-00000000/checkpoint.json").read_text())
    assert meta["body"]["format"] == 1


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_b47_padded_rows_of_every_tp_are_gone(tp: int) -> None:
    """30522 entries: 30592 rows at tp 1, 30720 at 2, 4 and 8; the partitions meet in rank order."""
    config = ModelConfig(
        vocab_size=30522,
        hidden_size=8,
        num_layers=1,
        num_heads=8,
        intermediate_size=16,
        max_position_embeddings=16,
    )
    rows = padded_vocab(config, tp)
    assert rows == (30592 if tp == 1 else 30720)
    whole = torch.full((30522,), -1.0)
    for rank in range(tp):
        model, _ = build(config, init=False)
        bias = torch.nn.Parameter(torch.zeros(rows // tp))
        bias.tensor_model_parallel, bias.partition_dim = True, 0  # type: ignore[attr-defined]
        model.cls.predictions.bias = bias
        piece = next(p for p in pieces(model, config, tp, rank) if p.name == "cls.predictions.bias")
        theirs, ours = piece.clip(bias)
        local = torch.arange(rank * rows // tp, (rank + 1) * rows // tp).float()
        whole[theirs] = local[ours]
    assert whole.tolist() == list(range(30522))


def test_b47_padded_ids_can_never_be_predicted(run_folder: Path) -> None:
    """27 entries lie in 128 rows: whatever the padding holds, logits have 27 columns."""
    opened = open_model(run_folder)
    model = to_model(opened.config, opened.tensors)
    words = model.bert.embeddings.word_embeddings.weight
    assert words.shape[0] == 128 and not words[27:].any()
    with torch.no_grad():
        words[27:] = 1e4
        assert model.logits(torch.randn(3, 16)).shape == (3, 27)


def test_command_says_what_is_wrong_and_exits_with_2(tmp_path: Path, repo: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "pretrain",
        "export",
        str(tmp_path / "nowhere"),
        str(tmp_path / "out"),
    ]
    done = subprocess.run(command, cwd=repo, capture_output=True, text=True)
    assert done.returncode == 2 and "nowhere: no such folder" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("size", ["nan", "inf", "0", "-1"])
def test_sizes_that_are_none_are_refused(tmp_path: Path, size: str) -> None:
    with pytest.raises(UserError, match=f"--shard-gb {float(size)}"):
        main([str(tmp_path), str(tmp_path / "out"), f"--shard-gb={size}"])


def test_numpy_view_of_the_weights_is_little_endian_fp32(exported: Path) -> None:
    with safe_open(exported / "model.safetensors", "np") as file:
        assert file.get_tensor("cls.predictions.bias").dtype == np.dtype("<f4")
