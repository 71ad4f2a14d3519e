"""What a training goes on from, or starts from, must be of this recipe; what changed is told."""

from __future__ import annotations

import shutil

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from configs.errors import UserError
from pretrain import checks
from pretrain.checkpoint import Damaged, latest, load_logical, save_logical
from pretrain.checkpoint.folder import INDEX, folder_of, read_meta, write_json
from pretrain.train import main
from tests.trainer.runs import fresh, plan


def checkpoint(run, step=5, **changes):
    found = plan(run)
    meta = {
        "model": checks.to_dict(found.model),
        "tokenizer_fingerprint": found.shards["len32"].tokenizer_fingerprint,
        "shards": {name: s.fingerprint for name, s in found.shards.items()},
        "state": {"optimizer_steps": step},
        "recipe": checks.to_dict(found.recipe),
    }
    import torch

    folder = save_logical(run / "train", {"x": torch.zeros(2)}, {**meta, **changes}, step)
    write_json(folder / INDEX, {**read_meta(folder), "kinds": ["master", "exp_avg", "exp_avg_sq"]})
    return folder


@pytest.fixture(scope="module")
def finished(base, tmp_path_factory):
    """(run, its newest checkpoint): updates 4 and 5."""
    run = fresh(base, tmp_path_factory.mktemp("finished") / "run")
    return run, [checkpoint(run, step, state={"spent_s": float(step)}) for step in (4, 5)][-1]


def test_a_checkpoint_of_something_else_is_refused(run):
    checkpoint(run)
    assert plan(run).newest == 5
    with pytest.raises(UserError, match="holds another model: hidden_size: 32 there, 64 here"):
        plan(run, "model.hidden_size=64")
    checkpoint(run, tokenizer_fingerprint="other")
    with pytest.raises(UserError, match="was trained with tokenizer other"):
        plan(run)
    shutil.rmtree(run / "train")
    checkpoint(run, shards={"len48": "other"})
    with pytest.raises(UserError, match="shards/len48 with fingerprint other"):
        plan(run)
    assert plan(run, "checkpoint.resume=false").newest == 0


def test_weights_to_start_from_are_of_this_model_and_tokenizer_on_any_shards(run, tmp_path):
    other = fresh(run, tmp_path / "other")
    folder = checkpoint(other, shards={"len48": "other"})
    start = f"checkpoint.init_from={other}"
    assert plan(run, start).origin == str(folder)
    with pytest.raises(UserError) as e:
        plan(run, start, "model.hidden_size=64")
    assert e.value.what.startswith(f"{start}/train/checkpoints/{folder.name} holds another model")
    assert e.value.remedy == "use its model keys, or leave checkpoint.init_from out"
    vocab = (run / "vocab").resolve() / "tokenizer.json"
    model = checks.to_dict(plan(run).model)
    for changes in ({"model": {**model, "vocab_size": 99}}, {"tokenizer_fingerprint": "other"}):
        shutil.rmtree(other / "train")
        checkpoint(other, **changes)
        (other / "vocab").unlink()
        with pytest.raises(UserError, match="99 there, 203 here|with tokenizer other") as e:
            plan(run, start)
        assert "both with vocab.file=...: python -m data_prep vocab RECIPE, then" in e.value.remedy
        (other / "vocab").symlink_to(vocab.parent)
        with pytest.raises(UserError) as e:
            plan(run, start)
        assert f"in a new work_dir, both with vocab.file={vocab}: " in e.value.remedy


def test_no_checkpoint_to_start_from_names_the_key(run, tmp_path):
    other = fresh(run, tmp_path / "other")
    (checkpoint(other) / INDEX).write_text("{")
    with pytest.raises(UserError, match=r"^checkpoint.init_from: .*checkpoint.json: ") as e:
        plan(run, f"checkpoint.init_from={other}")
    assert e.value.remedy == "name an older step-... folder of that run"
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "config.json").write_text("{}")
    for model in (tmp_path / "hf", "google-bert/bert-base-uncased"):
        with pytest.raises(UserError, match=f"^checkpoint.init_from={model}: no complete") as e:
            plan(run, f"checkpoint.init_from={model}")
        assert f"`python -m pretrain import {model} OUT` makes one" in e.value.remedy


def test_changes_of_the_recipe_are_told(run):
    checkpoint(run)
    assert not plan(run).warnings
    changes = {
        "seed=6": "seed: 5 there, 6 now",
        "optimizer.beta1=0.8": "optimizer.beta1: 0.9 there, 0.8 now",
        "optimizer.orthogonal_lr=2": "optimizer.orthogonal_lr: 0.0 there, 2.0 now",
        "model.hidden_dropout=0.2": "model.hidden_dropout: 0.1 there, 0.2 now",
        "train.precision=bf16": "train.precision: fp32 there, bf16 now",
        "train.nsp_weight=0.1": "train.nsp_weight: 1.0 there, 0.1 now",
        "train.max_minutes=9": "train.max_minutes: 0.0 there, 9.0 now",
        "phases.1.schedule.lr=0.005": "phases.1.schedule.lr: 0.004 there, 0.005 now",
        "phases.1.mask_probability=0.1": "phases.1.mask_probability: 0.0 there, 0.1 now",
    }
    for override, said in changes.items():
        (warning,) = plan(run, override).warnings
        assert warning == f"changed since step-00000005: {said}"
    assert not plan(run, "parallel.micro_batch_tokens=128", "checkpoint.keep=1").warnings


def test_a_checkpoint_of_before_some_keys_was_trained_without(run):
    recipe = checks.to_dict(plan(run).recipe)
    del recipe["train"]["nsp_weight"], recipe["train"]["max_minutes"]
    del recipe["optimizer"]["orthogonal_lr"]
    for phase in recipe["phases"]:
        del phase["mask_probability"], phase["until"]
    checkpoint(run, recipe=recipe)
    assert not plan(run).warnings
    (warning,) = plan(run, "phases.0.mask_probability=0.1").warnings
    assert warning.endswith(": phases.0.mask_probability: 0.0 there, 0.1 now")
    until, minutes = plan(run, "phases.0.until=0.5", "train.max_minutes=1").warnings
    assert until.endswith(": phases.0.until: 0.0 there, 0.5 now")
    assert minutes.endswith(": train.max_minutes: 0.0 there, 1.0 now")


def test_b41_missing_moments_and_missing_schedule_state_stop_the_run(run):
    folder = checkpoint(run)
    meta = read_meta(folder)
    write_json(folder / INDEX, {**meta, "kinds": ["master"]})
    with pytest.raises(UserError, match="lacks exp_avg, exp_avg_sq") as caught:
        plan(run)
    assert "init_from" in caught.value.remedy
    write_json(folder / INDEX, {k: v for k, v in meta.items() if k != "state"})
    with pytest.raises(UserError, match="no optimiser and schedule state"):
        plan(run)


def test_stop_at_below_the_checkpoint_has_nothing_to_do(run):
    checkpoint(run)
    assert plan(run, "train.stop_at=5").finished
    assert not plan(run, "train.stop_at=6").finished
    checkpoint(run, state={"spent_s": 30.0})
    assert plan(run, "train.max_minutes=0.5").finished
    assert not plan(run, "train.max_minutes=0.51").finished and not plan(run).finished


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("train.stop_at=5", "nothing to do: 5 of 5 updates are done; checkpoint: "),
        ("train.stop_at=1", "nothing to do: 5 updates are done already, train.stop_at is 1;"),
        (
            "train.max_minutes=0.5",
            "nothing to do: train.max_minutes=0.5 are used up, after 5 updates;",
        ),
    ],
)
def test_what_is_done_is_said(run, override, said, capsys):
    checkpoint(run, state={"optimizer_steps": 5, "spent_s": 30.0})
    assert main([str(run / "recipe.yaml"), override]) == 0
    assert said in capsys.readouterr().out


def test_a_cut_newest_checkpoint_is_no_end(run):
    """Its index alone says that all is done; the weights are not there."""
    checkpoint(run, 4)
    folder = checkpoint(run, 5)
    assert plan(run, "train.stop_at=5").finished
    file = next(folder.glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:-1])
    found = plan(run, "train.stop_at=5")
    assert (found.finished, found.newest) == (False, 4)


@given(st.data())
@settings(max_examples=100, deadline=None)
def test_a_finished_training_is_one_whose_weights_can_be_read(finished, data):
    """One bit of its last checkpoint was another, and there was nothing to do."""
    run, folder = finished
    file = next(folder.glob("*.safetensors"))
    before = file.read_bytes()
    spoiled = bytearray(before)
    spoiled[data.draw(st.integers(0, len(before) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    file.write_bytes(spoiled)
    try:
        found = plan(run, "train.stop_at=5")
        try:
            load_logical(folder)
        except Damaged:
            assert (found.finished, found.newest, found.spent_s) == (False, 4, 4.0)
        else:
            assert (found.finished, found.newest, found.spent_s) == (True, 5, 5.0)
    finally:
        file.write_bytes(before)


def test_without_a_good_checkpoint_all_is_to_be_done(run):
    folder = checkpoint(run, state={"spent_s": 30.0, "phase_ends": [3]})
    file = next(folder.glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:-1] + b"\1")
    found = plan(run, "train.max_minutes=0.5")
    assert (found.finished, found.newest, found.spent_s, found.phase_ends) == (False, 0, 0.0, [])


def test_another_tokenizer_than_the_shards_is_refused(run, base):
    """The exported model would be given it, after days of training."""
    (run / "shards").unlink()
    shutil.copytree(base / "shards", run / "shards")
    (run / "vocab").unlink()
    (run / "vocab").mkdir()
    ours, kept = run / "vocab" / "tokenizer.json", run / "shards" / "len48" / "tokenizer.json"
    kept.write_text('{"model": {"vocab": {"[PAD]": 0, "word": 1}}}')
    ours.write_text('{"version": "1.0", "model": {"vocab": {"[PAD]": 0, "word": 1}}}')
    plan(run)  # written another way, and the same
    good = ours.read_text()
    for text, message in (
        ("garbage", "vocab/tokenizer.json: no readable tokenizer"),
        ("[" * 9999, "no readable tokenizer"),
        ('{"model": {"vocab": {"[PAD]": 0, "other": 1}}}', "is not the tokenizer that .*len48"),
    ):
        ours.write_text(text)
        with pytest.raises(UserError, match=message) as caught:
            plan(run)
        assert caught.value.remedy == f"put the right one back: cp {kept} {ours}"
    # The broken one is not copied over the good one.
    kept.write_text("garbage")
    ours.write_text(good)
    with pytest.raises(UserError, match="len48/tokenizer.json: no readable tokenizer") as caught:
        plan(run)
    assert caught.value.remedy.startswith(f"put it back: cp {ours} {kept}, or delete {kept.parent}")
    ours.write_text("other garbage")
    with pytest.raises(UserError, match="no readable tokenizer") as caught:
        plan(run)
    assert caught.value.remedy == f"restore it and {ours}"


def test_weights_of_another_tokenizer_of_the_same_size_are_refused(run, base, tmp_path):
    """An imported model has no fingerprint; its tokenizer lies beside it."""
    (run / "shards").unlink()
    shutil.copytree(base / "shards", run / "shards")
    words = '{"model": {"vocab": {"[PAD]": 0, "%s": 1}}}'
    for name in ("len32", "len48"):
        (run / "shards" / name / "tokenizer.json").write_text(words % "word")
    (run / "vocab").unlink()
    (run / "vocab").mkdir()
    (run / "vocab" / "tokenizer.json").write_text(words % "word")
    origin = tmp_path / "origin"
    (origin / "vocab").mkdir(parents=True)
    import torch

    save_logical(
        origin / "train", {"x": torch.zeros(2)}, {"model": checks.to_dict(plan(run).model)}
    )
    start = f"checkpoint.init_from={origin}"
    plan(run, start)
    ours = origin / "vocab" / "tokenizer.json"
    ours.write_text(words % "word")
    plan(run, start)
    ours.write_text(words % "other")
    with pytest.raises(
        UserError, match="origin/vocab/tokenizer.json is not the tokenizer that"
    ) as e:
        plan(run, start)
    assert f"in a new work_dir, both with vocab.file={ours}" in e.value.remedy


def test_a_damaged_index_is_left_to_the_trainer(run):
    folder = checkpoint(run)
    (folder / INDEX).write_text("{")
    assert plan(run).newest == 0
    assert latest(run / "train") == folder_of(run / "train", 5)


def test_what_a_training_started_from_stays_recorded(run, tmp_path):
    """Whatever init_from a later command gives: it is not read, which is said."""
    first = checkpoint(fresh(run, tmp_path / "first"), imported={"from": "google/bert"})
    found = plan(run, f"checkpoint.init_from={first}")
    assert found.origin == "google/bert" and not found.warnings
    later = checkpoint(fresh(run, tmp_path / "later"), origin="google/bert")
    assert plan(run, f"checkpoint.init_from={later}").origin == str(later)  # and not its origin
    recipe = checks.to_dict(found.recipe)
    folder = checkpoint(run, recipe=recipe, origin=found.origin)
    for named, said in (("", 0), (first, 0), (run, 1)):
        found = plan(run, f"checkpoint.init_from={named}")
        assert found.recipe.checkpoint.init_from == str(first)
        assert found.origin == "google/bert" and len(found.warnings) == said
    assert f"init_from={run} is not read: {folder} is gone on from" in found.warnings[0]
