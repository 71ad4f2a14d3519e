"""The commands as a person types them: what they print, refuse and leave behind."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import numpy as np
import pytest

from configs import UserError
from data_prep import audit, inspect, sample, verify, vocab
from data_prep.shard_index import read_index
from data_prep.shards import open_shards
from tests.data_prep.corpus import build, recipe_file, run, tree, write_texts


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("commands")
    body = (
        "shards:\n  pairs: {max_length: 64, static_masks: true}\n"
        "  plain: {max_length: 64, objective: single}\n"
        "  mixed: {max_length: 64, objective: sop, single_prob: 0.5, pair_max_length: 40,"
        " dupe_factor: 3}\n"
    )
    text = write_texts(base / "text", files=30)
    (text / "odd.txt").write_text("The 漢 stone fell. Then 漢 again.\n")
    return build(recipe_file(base, text, body))


def archive(path: Path, members: dict[str, bytes], packed: int = zipfile.ZIP_STORED) -> Path:
    with zipfile.ZipFile(path, "w", packed) as file:
        for name, data in members.items():
            file.writestr(name, data)
    return path


def test_sample_takes_the_text_out_of_the_archive(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wheel = archive(
        tmp_path / "w.whl", {sample.DUMP: b"dump", sample.NEWS: "One.\nTwo é.\n\n".encode()}
    )
    folder = tmp_path / "text"
    assert sample.main([str(folder), "--archive", str(wheel)]) is None
    assert (folder / "enwiki.xml.bz2").read_bytes() == b"dump"
    assert [p.read_text("utf-8") for p in sorted((folder / "news").iterdir())] == [
        "One.\n",
        "Two é.\n",
    ]
    assert sorted(p.name for p in folder.iterdir()) == ["enwiki.xml.bz2", "news"]
    wheel.unlink()
    sample.main([str(folder), "--archive", str(wheel)])  # again: nothing to do
    assert "already holds" in capsys.readouterr().out


def test_sample_refuses_another_archive(tmp_path: Path) -> None:
    wheel = archive(tmp_path / "w.whl", {"readme": b""})
    with pytest.raises(UserError, match=r"not a wheel of gensim==4\.4\.0"):
        sample.main([str(tmp_path / "text"), "--archive", str(wheel)])
    assert list((tmp_path / "text").iterdir()) == []


@pytest.mark.parametrize("damage", ["stored", "deflated", "letters"])
def test_sample_refuses_a_damaged_archive(tmp_path: Path, damage: str) -> None:
    dump, news = np.random.default_rng(0).bytes(300), b"Caf\xe9.\n"
    wheel = archive(
        tmp_path / "w.whl", {sample.DUMP: dump, sample.NEWS: news},
        zipfile.ZIP_DEFLATED if damage == "deflated" else zipfile.ZIP_STORED,
    )  # fmt: skip
    if damage != "letters":
        data = bytearray(wheel.read_bytes())
        data[len(sample.DUMP) + 30 : len(sample.DUMP) + 40] = b"\xff" * 10
        wheel.write_bytes(data)
    with pytest.raises(UserError, match=r"not a wheel of gensim==4\.4\.0"):
        sample.main([str(tmp_path / "text"), "--archive", str(wheel)])


def test_sample_without_a_network_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def offline(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(
            command, 1, "", "WARNING: Retrying\nERROR: No route to host\n"
        )

    monkeypatch.setattr(subprocess, "run", offline)
    with pytest.raises(UserError, match="No route to host") as error:
        sample.main([str(tmp_path / "text")])
    assert "--archive" in error.value.remedy and "Retrying" not in error.value.what


def test_inspect_shows_segments_label_and_masks(
    shards: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    inspect.main([str(shards / "pairs"), "--rows", "4", "--ids"])
    said = capsys.readouterr().out
    assert "nsp," in said and "at most 10 predictions a row, masks static" in said
    assert re.search(r"row 0: \d+ tokens, in part-00000.arrow, label [01]: B ", said)
    assert said.count("\n  A  [CLS]") == said.count("\n  B  ") == 4
    assert "-> [MASK]]" in said and re.search(r"\d+ masks at \[", said) and "ids [2, " in said
    inspect.main([str(shards / "plain"), "--row", "0", "3", "--held-out"])
    said = capsys.readouterr().out
    assert said.count("[CLS]") == 2 and "held-out" in said and "masks drawn in training" in said
    mixed = open_shards(shards / "mixed")
    starts = mixed.rows(np.arange(mixed.num_rows)).segment_b
    alone, pair = int(np.argmin(starts)), int(np.argmax(starts))
    inspect.main([str(shards / "mixed"), "--row", str(alone), str(pair)])
    said = capsys.readouterr().out
    assert f" x A and B swapped, {(starts == 0).sum()} x one segment" in said
    assert said.count(", label ") == said.count("\n  B  ") == 1 < said.count("[CLS]")
    assert "rows of at most 64 tokens (pairs at most 40) in" in said


def test_inspect_refuses_a_row_that_is_not_there(shards: Path) -> None:
    with pytest.raises(UserError, match="--row 99999"):
        inspect.main([str(shards / "pairs"), "--row", "99999"])


def test_inspect_shows_no_row_twice(shards: Path, capsys: pytest.CaptureFixture[str]) -> None:
    held = shards / "pairs" / "held-out"
    inspect.main([str(held), "--rows", str(10**11)])
    assert capsys.readouterr().out.count("\nrow ") == open_shards(held).num_rows


@pytest.mark.parametrize("name", ["recipe.yaml", "recipe.yml", "recipe"])
def test_verify_takes_any_file_for_a_recipe(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    recipe = recipe_file(tmp_path, write_texts(tmp_path / "text", files=5))
    build(recipe)
    assert verify.main([str(recipe.rename(tmp_path / name))]) == 0
    assert "all right" in capsys.readouterr().out


def test_words_are_joined_as_the_tokenizer_cut_them() -> None:
    assert (
        inspect.join_words(["[CLS]", "un", "##believ", "##able", "##", "."])
        == "[CLS] unbelievable ## ."
    )
    assert inspect.join_words(["▁The", "▁riv", "er"]) == "The river"
    assert inspect.join_words(["The", "Ġriv", "er"]) == "The river"


def test_audit_is_one_file_with_pictures(shards: Path, tmp_path: Path) -> None:
    audit.main([str(shards / "pairs")])
    page = (shards / "pairs-audit.html").read_text("utf-8")
    assert page.count('src="data:image/svg+xml;base64,') >= 4
    assert "http" not in re.sub(r"base64,[^\"]*", "", page)
    for text in ("Row lengths", "Label balance", "held out", "漢", "shards.max_length"):
        assert text in page, text
    audit.main([str(shards / "plain"), "--out", str(tmp_path / "a.html")])
    assert "Label balance" not in (tmp_path / "a.html").read_text("utf-8")
    audit.main([str(shards / "mixed")])
    page = (shards / "mixed-audit.html").read_text("utf-8")
    in_order, swapped = read_index(shards / "mixed")["labels"]
    pairs = in_order + swapped
    assert f"{100 * in_order / pairs:.1f}% of {pairs:,} pairs: A and B in order" in page
    assert "pairs-audit.html" not in {p.name for p in (shards / "pairs").iterdir()}


def test_audit_refuses_a_folder_before_the_work(
    shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(audit, "report", None)
    monkeypatch.chdir(tmp_path)
    for out in (str(tmp_path), ".", "..", "/"):
        with pytest.raises(UserError, match="is a folder") as caught:
            audit.main([str(shards / "pairs"), "--out", out])
        assert caught.value.remedy == "name a file"


def test_vocab_is_made_once_and_refused_when_stale(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = str(recipe_file(tmp_path, write_texts(tmp_path / "text", files=30)))
    trained = ["vocab.file=''", "vocab.size=150"]
    vocab.main([recipe, *trained])
    made = {p.name: p.read_bytes() for p in (tmp_path / "run" / "vocab").iterdir()}
    assert {"tokenizer.json", "tokenizer_config.json", "vocab.txt", "vocab.json"} <= made.keys()
    vocab.main([recipe, *trained])
    assert "complete (150 tokens)" in capsys.readouterr().out
    vocab.main([recipe, *trained, f"work_dir={tmp_path}/again"])
    again = {p.name: p.read_bytes() for p in (tmp_path / "again" / "vocab").iterdir()}
    assert again == made  # training is deterministic
    with pytest.raises(UserError, match=r"vocab\.size: 150 there, 140 now"):
        vocab.main([recipe, "vocab.file=''", "vocab.size=140"])
    (tmp_path / "text" / "000.txt").write_text("Other words.\n")
    with pytest.raises(UserError, match="0 text: .* there, .* now"):
        vocab.main([recipe, *trained])
    # What an import left there, or a hand, is not replaced.
    (tmp_path / "run" / "vocab" / "vocab.json").unlink()
    del made["vocab.json"]
    with pytest.raises(UserError, match="holds a tokenizer that this command did not make"):
        vocab.main([recipe, *trained])
    assert {p.name: p.read_bytes() for p in (tmp_path / "run" / "vocab").iterdir()} == made
    for place in (tmp_path / "run", tmp_path / "again"):  # the same one is taken as it is
        vocab.main([recipe, f"vocab.file={place}/vocab/tokenizer.json"])
        assert "is the tokenizer of vocab.file already" in capsys.readouterr().out
        (tmp_path / "run" / "vocab" / "vocab.json").unlink()


@pytest.mark.parametrize(
    "files",
    [
        {"vocab.txt": "[PAD]\n", "mine.txt": "notes"},
        {"vocab.json": json.dumps({"vocab": 0} | {f"w{n}": n for n in range(1, 999)})},
        {"vocab.json": '{"a": 0}', "tokenizer.json": "{}"},
        {"vocab.json": "{}", "tokenizer.json": "{}"},
        {".hidden": ""},
        {"folder/a.txt": ""},
    ],
)
@pytest.mark.parametrize("given", [(), ("vocab.file=",)])
def test_vocab_replaces_nothing_it_did_not_make(
    tmp_path: Path, files: dict[str, str], given: tuple[str, ...]
) -> None:
    recipe = recipe_file(tmp_path, write_texts(tmp_path / "text", files=5))
    folder = tmp_path / "run" / "vocab"
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    before = tree(folder)
    with pytest.raises(UserError, match="holds files that this command did not make") as caught:
        vocab.main([str(recipe), *given])
    assert "another work_dir" in caught.value.remedy and len(str(caught.value)) < 600
    assert tree(folder) == before


def test_a_killed_vocab_is_made_at_the_second_try(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = recipe_file(tmp_path, write_texts(tmp_path / "text", files=5))
    rename = Path.rename
    for place in ("data_prep.tokenizer.Tokenizer.save", "pathlib.Path.rename"):

        def killed(self: object, to: Path, place: str = place) -> None:
            if "rename" not in place:
                (to / "vocab.txt").write_text("half")
            raise KeyboardInterrupt

        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(place, killed)
            vocab.main([str(recipe)])
    assert Path.rename is rename
    vocab.main([str(recipe)])
    assert (tmp_path / "run/vocab/tokenizer.json").is_file()


def test_a_vocabulary_that_lost_its_tokenizer_is_not_complete(tmp_path: Path) -> None:
    """`build` asked for `vocab`, which said that all was there."""
    recipe = recipe_file(tmp_path, write_texts(tmp_path / "text", files=5))
    vocab.main([str(recipe)])
    folder = tmp_path / "run" / "vocab"
    (folder / "tokenizer.json").unlink()
    with pytest.raises(UserError, match=r"vocab/tokenizer\.json is missing") as caught:
        vocab.main([str(recipe)])
    assert caught.value.remedy == f"delete {folder} and run the same command again"
    shutil.rmtree(folder)
    vocab.main([str(recipe)])
    assert (folder / "tokenizer.json").is_file()


def test_many_differences_are_cut(tmp_path: Path) -> None:
    recipe = str(recipe_file(tmp_path, write_texts(tmp_path / "text", files=5)))
    vocab.main([recipe, "vocab.file=", "vocab.size=150"])
    body = Path(recipe).read_text()
    source = f"{{kind: text, path: {tmp_path}/text, name: text}}"
    Path(recipe).write_text(body.replace(f"[{source}]", f"[{', '.join([source] * 20)}]"))
    with pytest.raises(UserError, match="\n  and 11 more") as caught:
        vocab.main([recipe, "vocab.file=", "vocab.size=150"])
    assert caught.value.what.count("\n") == 9


def test_a_full_temporary_folder_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = str(recipe_file(tmp_path, write_texts(tmp_path / "text", files=5)))
    monkeypatch.setattr(
        tempfile,
        "TemporaryFile",
        lambda *_, **__: os.fdopen(os.open("/dev/full", os.O_WRONLY), "w"),
    )
    with pytest.raises(UserError, match="No space left on device") as caught:
        vocab.main([recipe, "vocab.file=", "vocab.size=150"])
    assert caught.value.what.startswith(tempfile.gettempdir()) and "TMPDIR" in caught.value.remedy


@pytest.mark.parametrize("kind", ["wordpiece", "unigram", "bpe", "byte-bpe"])
def test_sources_without_text_make_no_vocabulary(tmp_path: Path, kind: str) -> None:
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").write_text(" \n\n")
    recipe = recipe_file(tmp_path, tmp_path / "text")
    with pytest.raises(UserError, match="the sources hold no text"):
        vocab.main([str(recipe), "vocab.file=", f"vocab.kind={kind}"])
    assert list((tmp_path / "run" / "vocab").iterdir()) == []


def test_a_small_or_damaged_vocabulary_says_what_to_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = str(recipe_file(tmp_path, write_texts(tmp_path / "text", files=5)))
    trained = ["vocab.file=''", "vocab.size=20000"]
    vocab.main([recipe, *trained])
    printed = capsys.readouterr()
    assert re.search(r"the text gave \d+ tokens, fewer than vocab\.size=20,000", printed.out)
    made = tmp_path / "run" / "vocab" / "tokenizer.json"
    made.write_bytes(made.read_bytes()[:1000])
    with pytest.raises(UserError, match="not a tokenizer.json") as caught:
        vocab.main([recipe, *trained])
    assert f"delete {made.parent} and run `python -m data_prep vocab" in str(caught.value)


def test_vocab_sample_is_spread_over_all_units(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from configs import load_recipe
    from data_prep.sources import base, open_source

    monkeypatch.setattr(base, "SMALL_UNIT", 20_000)
    recipe = load_recipe(recipe_file(tmp_path, write_texts(tmp_path / "text", files=200)))
    recipe.vocab.sample_mb = 0
    sources = [open_source(s) for s in recipe.sources]
    ranges = [s.ranges() for s in sources]
    total = sum(r.size for r in ranges[0])
    everything = list(vocab.sample_text(recipe, sources, ranges))
    monkeypatch.setattr(recipe.vocab, "sample_mb", 0.3 * total / 1e6)
    some = list(vocab.sample_text(recipe, sources, ranges))
    size = sum(len(p) for p in some)
    assert len(ranges[0]) > 5 and 0.25 * total < size < 0.6 * total
    places = [everything.index(p) / len(everything) for p in some]
    assert min(places) < 0.1 and max(places) > 0.8


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["build", "RECIPE"], "no vocabulary yet"),
        (["build", "RECIPE", "--set", "nope", "prep.workers=1"], "no shard set 'nope'"),
        (["build", "RECIPE", "prep.wrkers=2"], "did you mean prep.workers?"),
        (["build", "RECIPE", "sources.0.path=nowhere"], "nowhere"),
        (["vocab", "RECIPE", "vocab.file=nowhere.txt"], "nowhere.txt"),
        (["verify", "nowhere/at/all"], "no such shard folder"),
        (["verify", "nowhere/at.yml"], "no such file"),
        (["inspect", "."], "not a shard folder"),
        (["audit", "."], "not a shard folder"),
        (["bild"], "did you mean build?"),
    ],
)
def test_mistakes_are_one_message_and_exit_2(
    tmp_path: Path, repo: Path, arguments: list[str], message: str
) -> None:
    recipe = recipe_file(tmp_path, write_texts(tmp_path / "text", files=2))
    if "sources.0.path=nowhere" in arguments:
        vocab.main([str(recipe)])
    words = [str(recipe) if a == "RECIPE" else a for a in arguments]
    result = run([sys.executable, "-X", "importtime", "-m", "data_prep", *words], repo)
    errors = [x for x in result.stderr.splitlines() if not x.startswith("import time:")]
    text = "\n".join(errors)
    assert result.returncode == 2 and message in text and "Traceback" not in text
    assert text.startswith("error: ")
    for heavy in ("torch", "transformers", "datasets", "pandas"):
        assert not re.search(rf"\| +{heavy}$", result.stderr, re.MULTILINE), heavy


@pytest.mark.parametrize("name", ["sample", "vocab", "build", "verify", "inspect", "audit"])
def test_help(repo: Path, name: str) -> None:
    result = run([sys.executable, "-m", "data_prep", name, "--help"], repo)
    assert result.returncode == 0 and f"python -m data_prep {name}" in result.stdout


def test_index_is_readable(shards: Path) -> None:
    index = json.loads((shards / "pairs" / "index.json").read_text("utf-8"))
    assert index["format"] == "lambert-shards" and index["settings"]["seed"] == 7
