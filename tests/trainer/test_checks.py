"""What cannot be trained is refused before torch is imported, naming the numbers."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from configs.errors import UserError
from configs.memory import largest_micro_batch, training_bytes
from configs.model import resolve_model
from configs.schema import ModelConfig, ParallelConfig
from pretrain import checks
from tests.synthetic import make_shards
from tests.trainer.runs import make_run, plan

REFUSED = [
    (["parallel.tp=3"], 2, r"parallel.tp=3 does not divide the 2 processes"),
    (["parallel.tp=8"], 8, r"model.num_heads=4 is not divisible by parallel.tp=8"),
    (["model.num_heads=3"], 1, r"hidden_size=32 is not divisible by model.num_heads=3"),
    (["parallel.tp=2", "model.intermediate_size=33"], 2, r"intermediate_size=33 is not divisible"),
    (["parallel.zero_stage=3"], 2, r"zero_stage=3 would cut tensors that LAMB's trust ratios need"),
    (["parallel.engine=lean", "parallel.zero_stage=2"], 2, r"lean has no zero_stage=2"),
    (["parallel.engine=deepspeed", "parallel.zero_stage=0"], 2, r"zero_stage=0 would accumulate in low"),
    (["parallel.engine=fast"], 1, r"parallel.engine=fast is not known"),
    (["parallel.sequence_parallel=true"], 2, r"sequence_parallel=true has no meaning"),
    (["parallel.sequence_parallel=true", "parallel.tp=3"], 3, r"cannot share out tokens evenly over parallel.tp=3"),
    (["phases.0.global_batch=3"], 4, r"global_batch=3 rows cannot be shared out over 4"),
    (["phases.1.steps=0"], 1, r"phases.1.steps=0"),
    (["optimizer.trust_ratio_min=2", "optimizer.trust_ratio_max=1"], 1, r"trust_ratio_min=2.0 is above"),
    (["phases.0.schedule.kind=step"], 1, r"phases.0.schedule.kind=step is not known"),
    (["phases.0.schedule.warmup=100"], 1, r"warmup=100 does not fit into 24 steps"),
    (["parallel.micro_batch_tokens=47"], 1, r"micro_batch_tokens=47 is below the 48 tokens \(a multiple of 16\)"),
    (["train.precision=fp16"], 1, r"train.precision=fp16 needs a GPU"),
    (["train.precision=int8"], 1, r"train.precision=int8 is not known"),
    (["model.vocab_pad_multiple=0"], 1, r"vocab_pad_multiple=0 is out of range"),
    (["model.type_vocab_size=1"], 1, r"rows of two segments, model.type_vocab_size=1"),
    (["optimizer.eps=0"], 1, r"optimizer.eps=0.0 is out of range"),
    (["model.vocab_size=100"], 1, r"model.vocab_size=100, the tokenizer has 203 ids"),
    (["model.vocab_size=240"], 1, r"model.vocab_size=240, the tokenizer has 203 ids"),
    (["model.max_position_embeddings=40"], 1, r"rows of up to 48 tokens"),
    (["guard.save_signals=[SIGKILL]"], 1, r"SIGKILL cannot be caught"),
    (["masking.probability=1.5"], 1, r"masking.probability"),
    (["phases.1.mask_probability=1"], 1, r"phases.1.mask_probability=1.0 is out of range"),
    (["phases.0.mask_probability=-0.1"], 1, r"phases.0.mask_probability=-0.1 is out of range"),
    (["phases.1.mask_probability=nan"], 1, r"phases.1.mask_probability=nan is out of range"),
    (["phases.0.until=1"], 1, r"phases.0.until=1.0 is out of range"),
    (["phases.0.until=-0.1"], 1, r"phases.0.until=-0.1 is out of range"),
    (["phases.0.until=0.5"], 1, r"phases.0.until=0.5 is a share of train.max_minutes, which is 0\n.*phases.0.until=0: the phase ends after"),
    (["train.max_minutes=1", "phases.1.until=0.5"], 1, r"phases.1.until=0.5, and the last phase ends when the time does"),
    (["phases.1.mask_probability=0.3"], 1, r"phases.1.mask_probability=0.3 is 14 tokens of a row of 48.* keeps 8"),
    (["phases.0.mask_probability=0.2", "shards.len32.mask_cap=5"], 1, r"phases.0.* is 6 tokens of a row of 32.* keeps 5"),
    (["phases.0.mask_probability=0.1", "shards.len32.static_masks=true"], 1, r"phases.0.*len32 were masked when"),
    (["optimizer.implementation=deepspeed"], 1, r"FusedLamb corrects the bias after the trust ratio"),
    (["optimizer.implementation=deepspeed", "optimizer.bias_correction=false"], 1, r"runs on a GPU only"),
    (["optimizer.implementation=reference"], 2, r"takes each tensor's norm on one rank"),
    (["optimizer.implementation=apex", "optimizer.trust_ratio_max=10"], 1, r"no limits of the trust ratio"),
    (["optimizer.implementation=sgd"], 1, r"optimizer.implementation=sgd is not known"),
    (["phases.0.shards=len512"], 1, r"phases.0.*len512 is not a set"),
    (["train.probe=/nowhere.parquet"], 1, r"/nowhere.parquet: no such file"),
    (["checkpoint.init_from=/nowhere"], 1, r"/nowhere: no complete checkpoint"),
]  # fmt: skip


@pytest.mark.parametrize(("overrides", "world", "message"), REFUSED, ids=lambda x: str(x)[:50])
def test_refused_by_name(overrides, world, message, run):
    with pytest.raises(UserError, match=message) as caught:
        plan(run, *overrides, world=world)
    assert caught.value.remedy


def test_what_is_asked_for_is_accepted(run):
    found = plan(run, "parallel.tp=2", "train.stop_at=10", world=4)
    assert (found.tp, found.dp, found.total, found.end, found.device) == (2, 2, 36, 10, "cpu")
    assert found.model.vocab_size == 203
    assert plan(run, "parallel.micro_batch_tokens=0").micro_batch_tokens == checks.CPU_MICRO_BATCH


def test_missing_shards_and_vocabulary_are_named(run):
    (run / "vocab").unlink()
    with pytest.raises(UserError, match=r"tokenizer.json is missing") as caught:
        plan(run)
    assert "data_prep vocab" in caught.value.remedy
    (run / "shards").unlink()
    with pytest.raises(UserError, match=r"shards/len32: no shards") as caught:
        plan(run)
    assert "data_prep build" in caught.value.remedy
    with pytest.raises(UserError, match=r"elsewhere/len32: no shards") as caught:
        plan(run, f"train.shards_dir={run / 'elsewhere'}")  # where no build writes
    wanted = f"copy {run}/shards/len32 there, or leave train.shards_dir out"
    assert caught.value.remedy == wanted


def test_shards_of_two_tokenizers_are_not_mixed(run, tmp_path):
    (run / "shards").unlink()
    make_run(tmp_path / "a")
    make_run(tmp_path / "b", vocab=207)
    (run / "shards").mkdir()
    (run / "shards" / "len32").symlink_to(tmp_path / "a" / "shards" / "len32")
    (run / "shards" / "len48").symlink_to(tmp_path / "b" / "shards" / "len48")
    with pytest.raises(UserError, match="different tokenizers"):
        plan(run)
    shutil.rmtree(tmp_path / "a" / "shards" / "len48")
    local = plan(run, f"train.shards_dir={tmp_path / 'b' / 'shards'}")
    assert local.model.vocab_size == 207


def test_a_row_takes_whole_steps_of_the_packer(run):
    """Refused here, or every rank would refuse it after its imports."""
    shutil.copytree((run / "shards").resolve(), run / "sets")
    make_shards(run / "sets" / "len32", rows=50, max_length=41, vocab_size=203)
    sets = f"train.shards_dir={run / 'sets'}"
    with pytest.raises(UserError, match="micro_batch_tokens=47 is below the 48 tokens"):
        plan(run, sets, "parallel.micro_batch_tokens=47")
    plan(run, sets, "parallel.micro_batch_tokens=48")


def _free_disk(monkeypatch, size):
    usage = shutil._ntuple_diskusage(total=size, used=0, free=size)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)


def test_too_little_disk_is_told(run, monkeypatch):
    _free_disk(monkeypatch, 0)
    with pytest.raises(
        UserError, match=r"4 more checkpoints \(checkpoint.keep=3 and one in the making\) take"
    ):
        plan(run)


@pytest.mark.parametrize(
    ("overrides", "helps"),
    [([], True), (["checkpoint.keep=1"], False), (["checkpoint.every=0"], True),
     (["checkpoint.every=0", "train.stop_at=1", "phases=[{shards: len32, steps: 4, global_batch: 8}]"], False)],
)  # fmt: skip
def test_fewer_checkpoints_are_proposed_where_keep_makes_them_many(
    overrides, helps, run, monkeypatch
):
    _free_disk(monkeypatch, 0)
    with pytest.raises(UserError, match=r" [1-9] more checkpoints? .*takes? ") as caught:
        plan(run, *overrides)
    assert ("checkpoint.keep=" in caught.value.what) == helps
    assert ("lower checkpoint.keep" in caught.value.remedy) == helps


def test_memory_is_estimated_against_the_card(run, monkeypatch):
    _free_disk(monkeypatch, 10**15)  # whatever this machine has
    monkeypatch.setattr(checks, "_cards", lambda: [12 * 2**30])
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    large = [
        "model.preset=bert-large",
        "model.hidden_size=0",
        "model.num_heads=0",
        "train.precision=bf16",
    ]
    fits = plan(run, *large, "parallel.micro_batch_tokens=0")
    assert 1024 <= fits.micro_batch_tokens <= 16384
    with pytest.raises(
        UserError, match=r"micro-batches of 65536 tokens need about .* the card has 12.0"
    ):
        plan(run, *large, "parallel.micro_batch_tokens=65536")
    more = plan(
        run, *large, "parallel.micro_batch_tokens=0", "parallel.activation_checkpointing=true"
    )
    assert more.micro_batch_tokens > 2 * fits.micro_batch_tokens
    wide = ["parallel.micro_batch_tokens=0", "model.vocab_pad_multiple=1000000"]
    rates = ["masking.probability=0.05", "phases.1.mask_probability=0.16"]  # the highest counts
    sizes = [plan(run, *wide, *rates[:n]).micro_batch_tokens for n in range(3)]
    assert sizes[1] > sizes[0] > sizes[2]
    # Two GPUs that may share out tokens: refused only where that would not do either.
    large.append("parallel.tp=2")
    apart = plan(run, *large, "parallel.micro_batch_tokens=0", world=2).micro_batch_tokens
    tight = [*large, f"parallel.micro_batch_tokens={apart + 1024}"]
    assert plan(run, *tight, world=2).micro_batch_tokens == apart + 1024
    for alone in ("parallel.sequence_parallel=false", "train.kernels=plain"):
        with pytest.raises(UserError, match="the card has 12.0"):
            plan(run, *tight, alone, world=2)
    with pytest.raises(UserError, match=r"8176M parameters .* need about 1\d\d"):
        plan(run, "model.preset=megatron-8.3b", "model.hidden_size=0", "model.num_heads=0")


def test_the_largest_micro_batch_fits_and_the_next_does_not():
    config = resolve_model(ModelConfig(preset="bert-large"), 30522)
    parallel = ParallelConfig()
    card = 24 * 2**30
    for rate in (0.15, 0.5):
        tokens = largest_micro_batch(config, parallel, 1, "bf16", card, rate)
        assert training_bytes(config, parallel, 1, "bf16", tokens, rate) <= card
        assert training_bytes(config, parallel, 1, "bf16", tokens + 128, rate) > card


def test_no_compiler_is_told_on_a_gpu(run, monkeypatch):
    monkeypatch.setattr(checks, "_cards", lambda: [80 * 2**30])
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.delenv("CC", raising=False)
    with pytest.raises(UserError, match="no C compiler"):
        plan(run)
    assert plan(run, "train.kernels=plain").device == "cuda"


@pytest.mark.parametrize(
    ("printed", "cards"),
    [
        ("81559", [81559 * 2**20]),
        ("81559\n40960\n", [81559 * 2**20, 40960 * 2**20]),
        ("[N/A]", [0]),  # one memory for CPU and GPU
        ("[Insufficient Permissions]\n[Insufficient Permissions]", [0, 0]),
        ("81559\n[Unknown Error]", [81559 * 2**20, 0]),
        ("No devices were found", []),
        ("", []),
    ],
)
def test_a_card_whose_memory_is_not_told_is_a_card(printed, cards, run, tmp_path, monkeypatch):
    """It was left out, and the training ran on the CPU without a word."""
    if not cards and Path("/dev/nvidia0").exists():
        pytest.skip("needs a machine without a GPU")
    tool = tmp_path / "bin" / "nvidia-smi"
    tool.parent.mkdir()
    tool.write_text(
        f'#!/bin/sh\ncase "$1" in *memory*) printf "{printed}" ;; *) echo 9.0 ;; esac\n'
    )
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tool.parent}:{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("CC", "cc")
    assert checks._cards() == cards
    found = plan(run, "parallel.micro_batch_tokens=0")
    assert found.device == ("cuda" if cards else "cpu")
    if 0 in cards:
        assert found.micro_batch_tokens == checks.CPU_MICRO_BATCH


@pytest.mark.parametrize(
    ("precision", "capability", "refused"),
    [("bf16", "7.5", True), ("fp16", "7.5", False), ("bf16", "8.0", False), ("fp8", "8.0", True)],
)
def test_a_precision_the_card_lacks_is_refused(precision, capability, refused, run, monkeypatch):
    answers = {"memory.total": ["16000"], "compute_cap": [capability]}
    monkeypatch.setattr(checks, "_ask_cards", answers.__getitem__)
    if refused:
        with pytest.raises(
            UserError, match=f"{precision} needs a GPU .* this one has {capability}"
        ):
            plan(run, f"train.precision={precision}")
    else:
        assert plan(run, f"train.precision={precision}").device == "cuda"


@pytest.mark.parametrize("nvidia", [True, False])
def test_b35_another_apex_is_told_apart(nvidia, run, tmp_path, monkeypatch):
    """PyPI's `apex` and NVIDIA's without its compiled part both import; neither is taken."""
    package = tmp_path / "site" / "apex"
    (package / "optimizers").mkdir(parents=True)
    (package / "__init__.py").write_text("")
    if nvidia:
        (package / "optimizers" / "fused_lamb.py").write_text("")
    monkeypatch.syspath_prepend(package.parent)
    message = r"without its CUDA part \(amp_C\)" if nvidia else "is not NVIDIA's"
    with pytest.raises(UserError, match=message):
        plan(run, "optimizer.implementation=apex")
    (package.parent / "amp_C.py").write_text("")
    with pytest.raises(UserError, match="runs on a GPU only"):
        plan(run, "optimizer.implementation=apex")


def test_a_next_sentence_head_is_refused_on_rows_without_one(run, tmp_path):
    for length in (32, 48):
        folder = tmp_path / "single" / f"len{length}"
        make_shards(folder, rows=200, max_length=length, vocab_size=203, pairs=False)
    where = f"train.shards_dir={tmp_path / 'single'}"
    with pytest.raises(UserError, match="rows without a next sentence") as refused:
        plan(run, where)
    assert "len32" in refused.value.what and "model.nsp_head=false" in refused.value.remedy
    assert not plan(run, where, "model.nsp_head=false").model.nsp_head


def test_refusals_need_no_torch(run, repo):
    code = f"""
        import sys
        from configs.errors import UserError
        from configs.loading import load_recipe
        from pretrain.checks import check
        import pretrain.train
        env = {{"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}}
        recipe = {str(run / "recipe.yaml")!r}
        assert check(load_recipe(recipe), env).total == 36
        try:
            check(load_recipe(recipe, ["parallel.zero_stage=3"]), env)
        except UserError:
            print("refused", sorted(set(sys.modules) & {{"torch", "deepspeed", "megatron"}}))
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        cwd=repo,
        capture_output=True,
        text=True,
    )
    assert done.stdout == "refused []\n", done.stderr


def test_a_port_in_use_is_told_without_a_stack_trace(run, repo):
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = str(holder.getsockname()[1])
        env = {**os.environ, "RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}
        env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        done = subprocess.run(
            [sys.executable, "-m", "pretrain", "train", str(run / "recipe.yaml")],
            cwd=repo, env=env, capture_output=True, text=True,
        )  # fmt: skip
    assert done.returncode == 2
    assert port in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("before", [[], ["demo", "parallel.tp=2"]])
def test_help_says_how_to_start(before, repo):
    done = subprocess.run(
        [sys.executable, "-m", "pretrain", "train", *before, "--help"],
        cwd=repo,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0
    for word in ("torchrun", "deepspeed", "RECIPE", "train.stop_at", "75"):
        assert word in done.stdout
