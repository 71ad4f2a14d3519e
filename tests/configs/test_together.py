"""Words and combinations of keys that no training could have: every command that reads a recipe
refuses them, `cluster submit` before anything is queued."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from configs import UserError, load_recipe

SAID = {
    "sources.0.weight=0": "sources.0.weight=0.0 is out of range",
    "sources.0.window_sentences=1": "sources.0.window_sentences=1 is out of range",
    "shards.len128.max_length=4": "shards.len128.max_length=4 is out of range",
    "shards.len128.dupe_factor=0": "shards.len128.dupe_factor=0 is out of range",
    "shards.len128.short_seq_prob=2": "shards.len128.short_seq_prob=2.0 is out of range",
    "shards.len128.single_prob=1": "shards.len128.single_prob=1.0 is out of range",
    "shards.len128.pair_max_length=200": "pair_max_length=200 is not from 8 to max_length=128",
    "shards.len128.pair_max_length=7": "pair_max_length=7 is not from 8",
    "shards.len128.pair_max_length=-1": "pair_max_length=-1 is out of range",
    "shards.len128.mask_cap=128": "shards.len128.mask_cap=128 is not below max_length=128",
    "shards.len128.objective=nps": "shards.len128.objective=nps is not known",
    "prep.held_out=1": "prep.held_out=1.0 is out of range",
    "prep.part_mb=0": "prep.part_mb=0 is out of range",
    "train.precision=int8": "train.precision=int8 is not known",
    "train.kernels=slow": "train.kernels=slow is not known",
    "parallel.engine=x": "parallel.engine=x is not known",
    "optimizer.implementation=adamw": "optimizer.implementation=adamw is not known",
    "masking.kind=words": "masking.kind=words is not known",
    "phases.0.schedule.kind=step": "phases.0.schedule.kind=step is not known",
    "phases.0.schedule.warmup=1e9": "phases.0.schedule.warmup=1e.09 does not fit into",
    "phases.0.schedule.lr=0": "phases.0.schedule: lr=0",
    "phases.0.shards=none": "phases.0.shards=none is not a set",
    "masking.replace_mask=0.95": "masking.replace_mask . masking.replace_random = 1.05",
    "masking.probability=0": "masking.probability=0.0 is out of range",
    "masking.span_p=1": "masking.span_p=1.0 is out of range",
    "parallel.zero_stage=3": "parallel.zero_stage=3 would cut tensors",
    "parallel.zero_stage=4": "parallel.zero_stage=4 is not a stage",
    "parallel.sequence_parallel=true": "parallel.sequence_parallel=true has no meaning",
}


@pytest.mark.parametrize("override", SAID)
def test_a_recipe_that_contradicts_itself_is_refused_when_it_is_loaded(override: str) -> None:
    with pytest.raises(UserError, match=SAID[override]):
        load_recipe("demo", [override])


@pytest.mark.parametrize(
    "overrides, said",
    [
        (["parallel.engine=deepspeed", "parallel.zero_stage=0"], "accumulate in low precision"),
        (["parallel.tp=3", "parallel.sequence_parallel=true"], "cannot share out tokens evenly"),
        (["shards.len128.static_masks=true", "masking.kind=span"], "with masking.kind=span"),
        (
            ["shards.more={single_prob: 0.5, objective: single}"],
            "more.single_prob=0.5 with objective",
        ),
        (["shards.more={pair_max_length: 32}"], "more.pair_max_length=32 with single_prob=0"),
        (
            ["shards.more={pair_max_length: 32, objective: full-sentences}"],
            "more.pair_max_length=32 with objective full-sentences",
        ),
        (["optimizer.trust_ratio_min=2", "optimizer.trust_ratio_max=1"], "is above"),
    ],
)
def test_keys_that_contradict_one_another(overrides: list[str], said: str) -> None:
    with pytest.raises(UserError, match=said):
        load_recipe("demo", overrides)


@pytest.mark.parametrize("bad", ["train.precision=int8", "sources.0.weight=0"])
@pytest.mark.parametrize(
    "command",
    ["data_prep build", "cluster submit --dry-run --profile gpu-srun", "cluster plan --gpus 8"],
)
def test_commands_before_the_training_refuse_it_too(
    command: str, bad: str, repo: Path, tmp_path: Path
) -> None:
    module, *words = command.split()
    line = [sys.executable, "-m", module, *words, "demo", f"work_dir={tmp_path / 'run'}"]
    done = subprocess.run([*line, bad], capture_output=True, text=True, cwd=repo, timeout=120)
    assert done.returncode == 2 and SAID[bad] in done.stderr
    assert not (tmp_path / "run").exists()
