"""Recipes of another shape than the keys have: the message names the place, and the remedy helps."""

from __future__ import annotations

import pytest

from configs import UserError, load_recipe

OK = (
    "name: x\nsources: [{kind: text, path: t}]\nshards: {a: {max_length: 64}}\n"
    "model: {preset: bert-tiny}\nphases: [{shards: a, steps: 2, global_batch: 4}]\n"
)


@pytest.mark.parametrize(
    ("text", "what", "remedy"),
    [
        ("sources: {kind: text}", "sources is a list, and kind is no place", 'put "- " before'),
        ("phases: {steps: 5}", "phases is a list, and steps is no place", 'put "- " before'),
        ("sources: [{path: [a, b]}]", "sources.0.path=.* is no text", "more sources"),
        ("sources: [{path: {a: b}}]", "sources.0.path=.* is no text", "quote a text"),
        ("phases: [{steps: 2}, {steps: 5x}]", "phases.1.steps: ", "expected int"),
        ("phases: [{}, {schedule: {lr: x}}]", "phases.1.schedule.lr: ", "expected float"),
        ("train: {log_every: x}", "train.log_every: ", "expected int"),
        ("model: bert-base", "model: ", "keys below it: preset"),
        ("shards: [len128]", "shards: ", "named entries"),
        ("phases: x", "phases: ", "a list of entries"),
        ("shards: {.documents: {}}", "shards..documents: no name", "letters"),
        ("shards: {len128/held-out: {}}", "shards.len128/held-out: no name", "letters"),
    ],
)
def test_a_file_of_another_shape_is_named_with_its_place(tmp_path, text, what, remedy):
    (tmp_path / "r.yaml").write_text(text + "\n")
    with pytest.raises(UserError, match=what) as refused:
        load_recipe(tmp_path / "r.yaml")
    assert remedy in refused.value.remedy


@pytest.mark.parametrize(
    ("override", "what", "remedy"),
    [
        ("sources.path=t", "sources is a list, and path is no place", "sources.0.path="),
        ("sources.0.path=*.txt", "override", "'sources.0.path=\"*.txt\"'"),
        ("work_dir=${name", "work_dir: ", "are put in"),
        ("trust_ratio_max=0", "unknown key trust_ratio_max", "optimizer.trust_ratio_max?"),
        ("hang_timeout_s=0", "unknown key hang_timeout_s", "guard.hang_timeout_s?"),
        ("vocab.size=2147483648", "out of range", "from 6 to 10000000"),
        ("sources.0.weight=1e308", "out of range", "to 1000000"),
    ],
)
def test_an_override_of_another_shape_is_told_how_to_be_given(tmp_path, override, what, remedy):
    (tmp_path / "r.yaml").write_text(OK)
    with pytest.raises(UserError, match=what) as refused:
        load_recipe(tmp_path / "r.yaml", [override])
    assert remedy in refused.value.remedy


@pytest.mark.parametrize(
    ("wrong", "mended"),
    [
        (["phases.0.until=0.5"], ["phases.0.until=0"]),
        (["phases.0.until=0.5", "train.max_minutes=1"], ["phases.0.until=0"]),
        (["phases.0.mask_probability=0.999", "shards.a.mask_cap=50"], ["shards.a.mask_cap=0"]),
        (["shards.a.pair_max_length=32"], ["pair_max_length=0"]),
    ],
)
def test_what_a_remedy_says_is_accepted(tmp_path, wrong, mended):
    (tmp_path / "r.yaml").write_text(OK)
    with pytest.raises(UserError) as refused:
        load_recipe(tmp_path / "r.yaml", wrong)
    assert all(override in refused.value.remedy for override in mended)
    mended = [m if m.count(".") else f"shards.a.{m}" for m in mended]
    load_recipe(tmp_path / "r.yaml", [*wrong, *mended])


def test_a_file_that_is_not_utf_8_is_no_matter_of_indentation(tmp_path):
    (tmp_path / "r.yaml").write_bytes("name: é".encode("latin-1"))
    with pytest.raises(UserError, match="r.yaml: not UTF-8") as refused:
        load_recipe(tmp_path / "r.yaml")
    assert "UTF-8" in refused.value.remedy
