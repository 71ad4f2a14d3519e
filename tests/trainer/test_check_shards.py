"""A training is on the rows that its recipe tells of, and on rows that can teach what it asks."""

from __future__ import annotations

import shutil
from dataclasses import fields
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from configs.errors import UserError
from configs.loading import load_recipe
from configs.model import resolve_model
from configs.objectives import check_labels
from configs.schema import ModelConfig, ShardsConfig
from pretrain import checks
from pretrain.check_shards import check_built
from tests.data_prep.corpus import build, recipe_file, write_texts

SETS = """
shards: {s: {max_length: 64, mask_cap: 9, dupe_factor: 2}, auto: {max_length: 32}}
model: {preset: bert-tiny, max_position_embeddings: 512}
train: {precision: fp32}
"""
PHASES = (
    "phases=[{shards: s, steps: 2, global_batch: 4}, {shards: auto, steps: 2, global_batch: 4}]"
)
CHANGED = {"max_length": 48, "objective": "sop", "dupe_factor": 1, "short_seq_prob": 0.2,
           "single_prob": 0.5, "pair_max_length": 32, "mask_cap": 8, "static_masks": "true"}  # fmt: skip
THERE = {"max_length": 64, "objective": "nsp", "dupe_factor": 2, "short_seq_prob": 0.1,
         "single_prob": 0.0, "pair_max_length": 0, "mask_cap": 9, "static_masks": False}  # fmt: skip


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built, and its text gone: the machine that trains never had it."""
    folder = tmp_path_factory.mktemp("built")
    path = recipe_file(folder, write_texts(folder / "text", files=20), SETS)
    build(path)
    shutil.rmtree(folder / "text")
    return path


def plan(recipe: Path, *overrides: str) -> checks.Plan:
    env = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    return checks.check(load_recipe(recipe, [PHASES, *overrides]), env)


def test_what_was_built_is_trained_on_without_its_text(recipe: Path) -> None:
    assert plan(recipe).warnings == []
    # What a training may choose for itself; a cap of 0 is what the build made of it.
    for override in ("seed=8", "masking.probability=0.2", "prep.held_out=0.3", "sources=[]"):
        assert plan(recipe, override).warnings == []
    assert plan(recipe, "shards.s.mask_cap=0").shards["s"].mask_cap == 9


@pytest.mark.parametrize("key", [field.name for field in fields(ShardsConfig)])
def test_other_settings_than_the_set_was_built_with_are_refused(recipe: Path, key: str) -> None:
    # Without single segments a length of pairs has no meaning.
    mixed = ["shards.s.single_prob=0.5"] if key == "pair_max_length" else []
    with pytest.raises(UserError, match=r"shards/s was built with other settings") as caught:
        plan(recipe, *mixed, f"shards.s.{key}={CHANGED[key]}")
    now = True if key == "static_masks" else CHANGED[key]
    lines = caught.value.what.splitlines()[1:]
    assert f"  shards.s.{key}: {THERE[key]} there, {now} now" in lines
    assert len(lines) == 1 + len(mixed)
    assert "drop the override" in caught.value.remedy and "build" in caught.value.remedy


def test_a_set_of_before_single_segments_has_none(recipe: Path) -> None:
    shards = plan(recipe).shards["s"]
    del shards.index["settings"]["shards"]["single_prob"]
    del shards.index["settings"]["shards"]["pair_max_length"]
    found = load_recipe(recipe, ["shards.s.single_prob=0.3", "shards.s.pair_max_length=32"])
    with pytest.raises(UserError, match=r"single_prob: 0\.0 there, 0\.3 now") as refused:
        check_built(found, {"s": shards})
    assert "pair_max_length: 0 there, 32 now" in refused.value.what
    assert check_built(load_recipe(recipe, []), {"s": shards}) == []


def test_only_sets_that_are_trained_on_count(recipe: Path) -> None:
    assert not plan(
        recipe, "phases=[{shards: s, steps: 1, global_batch: 4}]", "shards.auto.max_length=40"
    ).warnings
    with pytest.raises(UserError, match=r"shards\.auto\.max_length: 32 there, 40 now"):
        plan(recipe, "shards.auto.max_length=40")


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("sources.0.weight=2", "sources.0.weight: 1.0 there, 2.0 now"),
        ("sources.0.kind=sentences", "sources.0.kind: text there, sentences now"),
        ("sources.0.language=de", "sources.0.language: en there, de now"),
        ("sources=[{path: /x/news/*.txt}]", "sources.0.name: text there, news now"),
        ("sources=[{name: text}, {name: more}]", "1 there, 2 now"),
    ],
)
def test_other_sources_are_told(recipe: Path, override: str, line: str) -> None:
    """Not refused: the text may have moved, and shards of other text be trained on on purpose."""
    notes = plan(recipe, override).warnings
    assert [note.rpartition("/run/shards/")[2] for note in notes] == [
        f"{name} was built from other sources: {line}" for name in ("s", "auto")
    ]


def test_pairs_with_one_label_are_refused_with_a_next_sentence_head(tmp_path: Path) -> None:
    """One document: no random B; rows of 8 tokens: nothing but random Bs."""
    pairs = "max_length: 64, single_prob: 0.5, pair_max_length: 8, mask_cap: 9"
    for name, files, rows, remedy in (
        ("one", 1, "max_length: 64, mask_cap: 9", "give more documents"),
        ("short", 20, "max_length: 8", r"two: raise shards\.s\.max_length"),
        ("short-pairs", 20, pairs, r"two: raise shards\.s\.pair_max_length"),
    ):
        (tmp_path / name).mkdir()
        text = write_texts(tmp_path / name / "text", files=files)
        for file in (
            text.glob("*") if "short" in name else []
        ):  # no sentence leaves room for another
            file.write_text(f"{file.stem}. ".join(["A river met an old stone near it "] * 9))
        body = SETS.replace("max_length: 64, mask_cap: 9", rows)
        recipe = recipe_file(tmp_path / name, text, body)
        build(recipe, "prep.held_out=0")
        with pytest.raises(
            UserError, match=r"shards\.s lacks a next-sentence label .*one constant"
        ):
            plan(recipe)
        with pytest.raises(UserError, match=f"{remedy}[\\s\\S]*model.nsp_head=false"):
            plan(recipe)
        assert plan(recipe, "model.nsp_head=false").warnings == []


@given(st.integers(0, 10**9), st.integers(0, 10**9), st.booleans())
@example(0, 0, True)  # single segments only
def test_labels_are_refused_noted_or_fine(follows: int, random: int, head: bool) -> None:
    model = resolve_model(ModelConfig(preset="bert-tiny", nsp_head=head), 100)
    share = max(follows, random) / (follows + random) if follows + random else 1
    if head and share == 1:
        with pytest.raises(UserError, match="lacks a next-sentence label") as refused:
            check_labels(model, "s", [follows, random])
        assert ("shards.s.single_prob" in refused.value.remedy) == (follows + random == 0)
        return
    notes = check_labels(model, "s", [follows, random])
    assert len(notes) == (head and share > 0.95)
    for note in notes:
        assert f"{max(follows, random):,} of {follows + random:,} pairs" in note
        assert ("more documents" in note) == (follows > random)
