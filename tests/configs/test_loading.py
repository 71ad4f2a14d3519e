"""Recipes: typed, mergeable, and wrong keys named before anything heavy is imported."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, get_type_hints

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from configs import Recipe, UserError, load_profile, load_recipe
from configs.errors import run_cli
from configs.loading import to_dict
from configs.model import PRESETS, ModelConfig, padded_vocab, parameter_count, resolve_model

SHIPPED = sorted((Path(__file__).parents[2] / "configs" / "recipes").glob("*.yaml"))


@pytest.mark.parametrize("path", SHIPPED, ids=lambda p: p.stem)
def test_every_shipped_recipe_loads_and_survives_a_round_trip(path, tmp_path):
    recipe = load_recipe(path)
    (tmp_path / "recipe.json").write_text(json.dumps(to_dict(recipe)))
    assert load_recipe(tmp_path / "recipe.json") == recipe
    resolve_model(recipe.model, vocab_size=30522)


def test_a_text_is_emptied_by_an_override():
    assert load_profile("gpu-container", ["srun_options="]).srun_options == ""
    with pytest.raises(UserError, match="nodes"):
        load_profile("gpu-container", ["nodes="])


# Without what is YAML's own (quotes, comments, lists, `key: value`), OmegaConf's (${...}, ???) or null.
WORD = st.from_regex(r"[+.0-9]?[\w/][\w/.:+%-]*[\w/]", fullmatch=True)


@settings(deadline=None)
@given(WORD.filter(lambda word: word.lower() != "null"))
@example("24:00:00")
@example("012345")
@example("no")
@example("1_000")
@example("0x1F")
@example("1.50")
@example("1e3")
@example("2026-11-29")
@example("true")
def test_a_text_is_what_was_written(tmp_path_factory, word):
    file = tmp_path_factory.mktemp("texts") / "site.yaml"
    file.write_text(f"account: {word}\nenvironment: {{A: {word}}}\nmodules: [{word}]\n")
    overrides = [f"account={word}", f"environment.A={word}", f"modules=[{word}]"]
    for profile in (load_profile(file), load_profile("cpu", overrides)):
        assert (profile.account, profile.environment["A"], profile.modules) == (word, word, [word])


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("phases.0.schedule.lr=1e-4", 1e-4),
        ("phases.0.schedule.lr=4.0e-3", 4e-3),
        ("phases.0.schedule.lr=1", 1.0),
        ("train.stop_at=0100", 100),
        ("train.stop_at=1_000", 1000),
        ("train.compile=false", False),
        ("train.compile=no", False),
        ("vocab.strip_accents=true", True),
        ("vocab.strip_accents=null", None),
    ],
)
def test_numbers_and_switches_are_read_as_their_key_needs_them(override, value):
    found = load_recipe("demo", [override])
    for name in override.partition("=")[0].split("."):
        found = found[int(name)] if name.isdigit() else getattr(found, name)
    assert (type(found), found) == (type(value), value)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("paralel.tp=2", ["paralel", "did you mean parallel"]),
        ("parallel.tpp=2", ["parallel.tpp", "did you mean parallel.tp"]),
        ("parallel.tp=two", ["parallel.tp", "two", "int"]),
        ("phases.0.stps=1", ["phases.0.stps", "did you mean phases.0.steps"]),
        ("phases.7.steps=1", ["phases.7", "1 entries"]),
        ("shards.len128.max_len=1", ["max_len", "max_length"]),
        ("shards.len_128.dupe_factor=2", ["len_128", "did you mean len128?"]),
        (
            "shards.few.dupe_factor=2",
            ["few", "known sets: len128;", "shards.few={dupe_factor: ...}"],
        ),
        ("train.precision", ["train.precision", "key=value"]),
        ("--tp=2", ["--tp=2", "key=value"]),
        ("phases.0.shards=len64", ["len64", "len128"]),
        ("masking.probability=1.5", ["masking.probability=1.5", "to 1"]),
        ("masking.replace_random=-0.1", ["masking.replace_random", "from 0 to 1"]),
        ("masking.span_p=0", ["masking.span_p"]),
        ("name=[", ["name=["]),
    ],
)
def test_a_wrong_override_is_named_with_its_remedy(override, words):
    with pytest.raises(UserError) as error:
        load_recipe("demo", [override])
    for word in words:
        assert word in str(error.value)


def test_sets_of_rows_are_added_whole_and_changed_key_by_key(tmp_path):
    (tmp_path / "none.yaml").write_text("name: none\n")
    more = ["shards.few={dupe_factor: 2}", "shards.few.max_length=64", "shards.len128.mask_cap=9"]
    shards = load_recipe("demo", more).shards
    assert list(shards) == ["len128", "few"]
    assert (shards["few"].dupe_factor, shards["few"].max_length) == (2, 64)
    assert (shards["len128"].dupe_factor, shards["len128"].mask_cap) == (3, 9)
    own = load_recipe(tmp_path / "none.yaml", ["shards.len128.mask_cap=9"])  # the default set
    assert list(own.shards) == ["len128"]
    with pytest.raises(UserError, match="known sets: len128, few"):
        load_recipe("demo", [more[0], "shards.fow.mask_cap=9"])


def numbers(of: Any, key: str = "") -> list[str]:
    """Keys of the whole and broken numbers below `key`."""
    if isinstance(of, dict | list):
        below = of.items() if isinstance(of, dict) else enumerate(of)
        return [k for name, value in below for k in numbers(value, f"{key}.{name}".lstrip("."))]
    return [key] if isinstance(of, int | float) and not isinstance(of, bool) else []


@pytest.mark.parametrize("value", ["inf", "-inf", "nan", ".inf", "1e400"])
@pytest.mark.parametrize("key", numbers(to_dict(load_recipe("demo"))))
def test_numbers_are_finite(key, value):
    """At an infinite train.max_minutes, say, the rate would never leave its start."""
    with pytest.raises(UserError, match=re.escape(key)):
        load_recipe("demo", [f"{key}={value}"])


def test_a_list_entry_is_overridden_alone():
    before, after = load_recipe("demo"), load_recipe("demo", ["phases.0.schedule.lr=0.5"])
    assert after.phases[0].schedule.lr == 0.5
    assert after.phases[0].steps == before.phases[0].steps


def test_base_files_are_merged_in_order_and_circles_refused(tmp_path):
    (tmp_path / "a.yaml").write_text("base: b.yaml\nname: a\n")
    (tmp_path / "b.yaml").write_text("name: b\nseed: 7\n")
    recipe = load_recipe(tmp_path / "a.yaml")
    assert (recipe.name, recipe.seed, recipe.work_dir) == ("a", 7, "runs/a")
    (tmp_path / "b.yaml").write_text("base: a.yaml\n")
    with pytest.raises(UserError, match="leads back to itself"):
        load_recipe(tmp_path / "a.yaml")


PATHS = [
    "work_dir",
    "prep.abbreviations",
    "checkpoint.init_from",
    "train.probe",
    "train.shards_dir",
    "sources.1.path",
]


@pytest.mark.parametrize("key", PATHS)
def test_paths_may_be_below_the_home_folder(tmp_path, monkeypatch, key):
    monkeypatch.setenv("HOME", str(tmp_path))

    def path(value):
        found = load_recipe("demo", [f"{key}={value}"])
        for name in key.split("."):
            found = found[int(name)] if name.isdigit() else getattr(found, name)
        return found

    assert path("~/a/*.txt") == f"{tmp_path}/a/*.txt"
    assert path("a/~b") == "a/~b" and path("/a//b/") == "/a//b/"
    with pytest.raises(UserError, match=f"^{key}=~nobody-of-this-name"):
        path("~nobody-of-this-name/a")


@pytest.mark.parametrize("text", ["a: [1", "- 1\n", "base: none.yaml\n", "\tname: x"])
def test_broken_recipe_files_are_refused_by_name(tmp_path, text):
    (tmp_path / "broken.yaml").write_text(text)
    with pytest.raises(UserError, match=r"broken\.yaml"):
        load_recipe(tmp_path / "broken.yaml")


def test_a_missing_recipe_names_its_neighbour():
    with pytest.raises(UserError, match="did you mean demo"):
        load_recipe("dem")


@pytest.mark.parametrize("room", ["data_prep", "pretrain", "cluster"])
def test_rooms_list_their_commands_without_heavy_imports(room, repo):
    code = f"import sys; sys.argv = ['{room}', '--help']; import runpy\ntry: runpy.run_module('{room}', run_name='__main__')\nexcept SystemExit as e: assert not e.code\nassert not {{'torch', 'transformers', 'deepspeed'}} & set(sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=repo, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "commands:" in done.stdout


def test_an_unknown_command_is_one_line_and_exit_code_2(repo):
    done = subprocess.run(
        [sys.executable, "-m", "pretrain", "trian"], cwd=repo, capture_output=True, text=True
    )
    assert done.returncode == 2
    assert "did you mean train?" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_message_is_left_for_torchrun(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    with pytest.raises(SystemExit, match="2"):
        run_cli(lambda: load_recipe("demo", ["nokey=3"]) and None)
    message = json.loads((tmp_path / "error.json").read_text())["message"]
    assert message in capsys.readouterr().err and "unknown key nokey" in message


def test_parameter_counts_are_those_of_the_papers():
    # BERT-large with MLM and NSP heads as Hugging Face builds it; Megatron sizes by name.
    large = resolve_model(ModelConfig(preset="bert-large"), vocab_size=30522)
    assert parameter_count(large) == 336_226_108
    for preset, billions in (
        ("megatron-1.3b", 1.3),
        ("megatron-3.9b", 3.9),
        ("megatron-8.3b", 8.3),
    ):
        config = resolve_model(ModelConfig(preset=preset), vocab_size=30522)
        assert abs(parameter_count(config) / 1e9 - billions) < 0.05


def test_b47_padded_vocabulary_sizes():
    config = resolve_model(ModelConfig(preset="bert-large"), vocab_size=30522)
    assert [padded_vocab(config, tp) for tp in (1, 2, 4, 8)] == [30592, 30720, 30720, 30720]


def test_presets_divide_into_heads():
    for preset in PRESETS:
        config = resolve_model(ModelConfig(preset=preset), vocab_size=100)
        assert config.hidden_size % config.num_heads == 0
    with pytest.raises(UserError, match="num_heads=7"):
        resolve_model(ModelConfig(num_heads=7), vocab_size=100)


def test_every_recipe_key_has_a_reader(repo):
    """A key that nothing reads is a dead switch: each field's name occurs outside the schema."""
    sources = [
        path.read_text(encoding="utf-8")
        for room in ("data_prep", "pretrain", "cluster", "configs")
        for path in (repo / room).rglob("*.py")
        if path.name != "schema.py"
    ]
    code = "\n".join(sources)
    dead, todo = [], [Recipe]
    while todo:
        schema = todo.pop()
        for field in fields(schema):
            hint = get_type_hints(schema)[field.name]
            for inner in (hint, *getattr(hint, "__args__", ())):
                if isinstance(inner, type) and is_dataclass(inner):
                    todo.append(inner)
            if f".{field.name}" not in code and f'"{field.name}"' not in code:
                dead.append(f"{schema.__name__}.{field.name}")
    assert not dead


def test_the_home_folder_of_a_profile_and_of_a_base(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert load_profile("cpu", ["stage_shards_to=~/x"]).stage_shards_to == f"{tmp_path}/x"
    (tmp_path / "base.yaml").write_text("nodes: 3\n")
    (tmp_path / "site.yaml").write_text("base: ~/base.yaml\n")
    assert load_profile(tmp_path / "site.yaml").nodes == 3


def test_an_empty_work_dir_is_that_of_the_name_also_where_other_keys_use_it():
    recipe = load_recipe("demo", ["work_dir=", "name=other"])
    assert recipe.work_dir == "runs/other"
    assert all(source.path.startswith("runs/other/text/") for source in recipe.sources)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("setup: ['source ${NOWHERE}/bin/activate']", r"setup\[0\]: .*NOWHERE"),
        ("environment: {A: '${B:-1}'}", "environment.A: "),
        ("setup: [echo foo: bar]", "setup.0=.* is no text"),
        ("environment: {A: {b: c}}", "environment.A=.* is no text"),
        ("base: [a]", "base=.* is no file"),
        ("base: {a: b}", "base=.* is no file"),
    ],
)
def test_texts_of_a_profile_that_mean_something_else_are_named(tmp_path, text, message):
    file = tmp_path / "site.yaml"
    file.write_text(text + "\n")
    with pytest.raises(UserError, match=message):
        load_profile(file)


def test_a_text_keeps_what_a_shell_is_to_put_in(tmp_path):
    (tmp_path / "site.yaml").write_text(r"setup: ['source \${HOME}/bin/activate']")
    assert load_profile(tmp_path / "site.yaml").setup == ["source ${HOME}/bin/activate"]


@pytest.mark.parametrize("value", ["'x'", '"x"', "x'y"])
def test_a_wrong_value_in_quotes_does_not_hide_its_key(value):
    with pytest.raises(UserError, match=r"phases\.0\.steps: "):
        load_recipe("demo", [f"phases.0.steps={value}"])


def test_an_index_that_is_no_number_is_named():
    with pytest.raises(UserError, match="phases is a list, and ² is no place"):
        load_recipe("demo", ["phases.²=1"])
