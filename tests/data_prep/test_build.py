"""The build as a whole: what ends up in the shards."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

import data_prep.groups
import data_prep.rows
from configs import UserError, load_recipe
from data_prep.groups import Share, join_units
from data_prep.settings import mask_cap
from data_prep.shard_index import read_index
from data_prep.shards import Rows, Shards, held_out, open_shards
from data_prep.verify import stale
from tests.data_prep.corpus import SPECIAL, WORDS, build, recipe_file, write_texts, write_vocab
from tests.synthetic import open_checked


def row_set(shards: Shards) -> list[bytes]:
    rows = shards.rows(np.arange(shards.num_rows))
    return sorted(rows.tokens[a:b].tobytes() for a, b in zip(rows.offsets[:-1], rows.offsets[1:]))


def as_lists(rows: Rows) -> list[list[int]]:
    return [rows.tokens[a:b].tolist() for a, b in zip(rows.offsets[:-1], rows.offsets[1:])]


def test_whole_build(tmp_path: Path, small_units: None) -> None:
    recipe = recipe_file(tmp_path, write_texts(tmp_path / "text"))
    folder = build(recipe) / "len64"
    shards = open_checked(folder)
    index = shards.index
    (source,) = index["sources"]
    assert (
        source["documents"] == 12 == source["documents_trained_on"] + source["documents_held_out"]
    )
    assert source["documents_held_out"] >= 1 and held_out(folder).num_rows > 0
    assert shards.num_rows == index["rows"] == len(shards.lengths)
    assert int(shards.lengths.sum()) == index["tokens"]
    assert sum(index["labels"]) == index["rows"] and min(index["labels"]) > 0
    assert shards.special_ids == {n.strip("[]").lower(): i for i, n in enumerate(SPECIAL)}
    assert shards.mask_cap == 10
    assert not (folder / ".build").exists() and not (folder.parent / ".documents").exists()
    before = {p: p.stat().st_mtime_ns for p in folder.rglob("*")}
    build(recipe)
    assert before == {p: p.stat().st_mtime_ns for p in folder.rglob("*")}


def test_rows_are_shuffled_over_the_whole_set(tmp_path: Path, small_units: None) -> None:
    """A row's place tells nothing of its document: neighbours are no more alike than others."""
    text = tmp_path / "text"
    text.mkdir()
    for number in range(40):  # document n is made of one word
        line = " ".join([WORDS[number % len(WORDS)]] * 8).capitalize() + "."
        (text / f"{number:02}.txt").write_text(" ".join([line] * 80) + f" {WORDS[number // 39]}.\n")
    recipe = recipe_file(tmp_path, text, "shards: {s: {max_length: 64, objective: single}}\n")
    shards = open_shards(build(recipe, "prep.held_out=0") / "s")
    rows = shards.rows(np.arange(shards.num_rows))
    word = rows.tokens[rows.offsets[:-1] + 2]
    same = np.mean(word[1:] == word[:-1])
    assert shards.num_rows > 400 and same < 3 / 39


def test_objectives_lengths_and_several_sets(tmp_path: Path) -> None:
    body = "shards:\n" + "".join(
        f"  {objective}-{length}: {{max_length: {length}, objective: {objective}, dupe_factor: 2}}\n"
        for objective, length in [("nsp", 32), ("sop", 48), ("full-sentences", 40), ("doc-sentences", 40), ("single", 128)]
    )  # fmt: skip
    recipe = recipe_file(tmp_path, write_texts(tmp_path / "text"), body)
    folder = build(recipe)
    for name in ("nsp-32", "sop-48", "full-sentences-40", "doc-sentences-40", "single-128"):
        shards = open_checked(folder / name)
        assert shards.lengths.max() <= shards.max_length == int(name.rsplit("-", 1)[1])
        pairs = name.startswith(("nsp", "sop"))
        assert (shards.rows(np.arange(20)).segment_b > 0).all() == pairs
        assert len(set(row_set(shards))) > 0.6 * shards.num_rows  # fresh draws in the second pass


def test_single_segments_among_pairs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The labels that a set tells of are those of its pairs."""
    body = "shards: {s: {max_length: 48, single_prob: 0.6, static_masks: true}}\n"
    recipe = recipe_file(tmp_path, write_texts(tmp_path / "text", files=40), body)
    folder = build(recipe)
    said = capsys.readouterr().out
    for shards in (open_checked(folder / "s"), held_out(folder / "s")):
        rows = shards.rows(np.arange(shards.num_rows))
        pairs = rows.segment_b > 0
        assert 0 < pairs.sum() < shards.num_rows and not rows.next_sentence_label[~pairs].any()
        labels = np.bincount(rows.next_sentence_label[pairs], minlength=2).tolist()
        assert shards.index["labels"] == labels
        seps = [row.count(SPECIAL.index("[SEP]")) for row in as_lists(rows)]
        assert np.array_equal(seps, 1 + pairs)
    index = read_index(folder / "s")
    alone = index["rows"] - sum(index["labels"])
    assert f"labels {index['labels'][0]} / {index['labels'][1]}, {alone} without" in said


def test_short_pairs_among_longer_single_segments(tmp_path: Path) -> None:
    body = (
        "shards: {s: {max_length: 64, single_prob: 0.6, pair_max_length: 24, short_seq_prob: 0}}\n"
    )
    folder = build(recipe_file(tmp_path, write_texts(tmp_path / "text", files=40), body))
    for shards in (open_checked(folder / "s"), held_out(folder / "s")):
        pairs = shards.rows(np.arange(shards.num_rows)).segment_b > 0
        assert pairs.any() and shards.lengths[pairs].max() <= 24 < shards.lengths[~pairs].max()


def test_static_masks(tmp_path: Path) -> None:
    body = "shards: {s: {max_length: 64, static_masks: true}}\n"
    recipe = recipe_file(tmp_path, write_texts(tmp_path / "text", files=30), body)
    shards = open_checked(build(recipe) / "s")
    rows = shards.rows(np.arange(shards.num_rows))
    assert rows.masked_offsets is not None and rows.masked_positions is not None
    assert rows.masked_labels is not None
    counts = np.diff(rows.masked_offsets)
    expected = np.clip(np.rint(0.15 * rows.lengths), 1, shards.mask_cap)
    assert np.array_equal(counts, np.minimum(expected, rows.lengths - 3))
    at = np.repeat(rows.offsets[:-1], counts) + rows.masked_positions
    shown = rows.tokens[at]
    special = set(shards.special_ids.values()) - {shards.special_ids["mask"]}
    assert not set(shown.tolist()) & special and not set(rows.masked_labels.tolist()) & special
    assert 0.75 < np.mean(shown == shards.special_ids["mask"]) < 0.85
    assert 0.07 < np.mean(shown == rows.masked_labels) < 0.14
    plain = open_shards(
        build(recipe, "shards.s.static_masks=false", f"work_dir={tmp_path}/b") / "s"
    )
    restored = rows.tokens.copy()
    restored[at] = rows.masked_labels
    assert np.array_equal(restored, plain.rows(np.arange(plain.num_rows)).tokens)


def test_exact_duplicates_are_dropped_wherever_they_are(tmp_path: Path, small_units: None) -> None:
    text = write_texts(tmp_path / "text", files=10)
    shutil.copy(text / "000.txt", text / "zzz.txt")
    shutil.copy(text / "003.txt", text / "004b.txt")
    more = tmp_path / "more"
    more.mkdir()
    shutil.copy(text / "007.txt", more / "a.txt")
    (more / "b.txt").write_text("Quite another stone. And another garden.\n")
    sources = f"sources=[{{kind: text, path: {text}}}, {{kind: text, path: {more}}}]"
    index = read_index(build(recipe_file(tmp_path, text), sources) / "len64")
    assert [s["dropped"].get("duplicates", 0) for s in index["sources"]] == [2, 1]
    assert [s["documents"] for s in index["sources"]] == [12, 2]
    kept = [s["documents_trained_on"] + s["documents_held_out"] for s in index["sources"]]
    assert kept == [10, 1]
    all_of_it = build(
        recipe_file(tmp_path, text), sources, "prep.drop_duplicates=false", f"work_dir={tmp_path}/b"
    )
    index = read_index(all_of_it / "len64")
    assert all(not s["dropped"] for s in index["sources"])


@pytest.mark.parametrize("weights", [(0.1, 1.0), (1.0, 0.1), (0.5, 2.0)])
def test_a_source_of_low_weight_does_not_take_texts_from_another(
    tmp_path: Path, small_units: None, weights: tuple[float, float]
) -> None:
    """All documents of both; whichever comes first, all are used as the higher weight says."""
    text = write_texts(tmp_path / "text", files=40)
    sources = ", ".join(
        f"{{kind: text, name: s{n}, path: {text}, weight: {w}}}" for n, w in enumerate(weights)
    )
    index = read_index(build(recipe_file(tmp_path, text), f"sources=[{sources}]") / "len64")
    used = [s["documents_trained_on"] + s["documents_held_out"] for s in index["sources"]]
    high = weights.index(max(weights))
    assert used[high] == 40 and used[1 - high] == 0


def test_other_weights_choose_anew_among_equal_documents(
    tmp_path: Path, small_units: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also in a folder whose documents an earlier build left there, tokenised and compared."""
    text = write_texts(tmp_path / "text", files=30)
    recipe = recipe_file(tmp_path, text)

    def sources(*weights: float) -> str:
        entries = (
            f"{{kind: text, name: s{n}, path: {text}, weight: {w}}}" for n, w in enumerate(weights)
        )
        return f"sources=[{', '.join(entries)}]"

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("data_prep.pipeline._build_set", killed)
        build(recipe, sources(1.0, 0.1))
    assert list((tmp_path / "run/shards/.documents").rglob("duplicates-*"))
    index = read_index(build(recipe, sources(0.1, 1.0)) / "len64")
    used = [s["documents_trained_on"] + s["documents_held_out"] for s in index["sources"]]
    assert used == [0, 30]


def test_held_out_split_is_of_the_text_alone(tmp_path: Path, small_units: None) -> None:
    """Same documents held out whatever the seed, length, weights, order of files or objective."""
    text = write_texts(tmp_path / "text", files=30)
    renamed = tmp_path / "renamed"
    renamed.mkdir()
    for number, path in enumerate(sorted(text.glob("*"), reverse=True)):
        shutil.copy(path, renamed / f"{number:03}.txt")
    body = "shards: {s: {max_length: 64, objective: single, short_seq_prob: 0.0}}\n"
    recipe = recipe_file(tmp_path, text, body)
    seen = []
    for number, overrides in enumerate(
        [[], ["seed=99"], [f"sources.0.path={renamed}"], ["sources.0.weight=0.4"]]
    ):
        folder = build(recipe, *overrides, f"work_dir={tmp_path}/{number}") / "s"
        shards = held_out(folder)
        rows = shards.rows(np.arange(shards.num_rows))
        seen.append(np.bincount(rows.tokens, minlength=shards.vocab_size)[5:].tolist())
    assert seen[0] == seen[1] == seen[2] == seen[3]


def test_weights(tmp_path: Path) -> None:
    text = write_texts(tmp_path / "text", files=60, sentences=12)
    body = "shards: {s: {max_length: 64, objective: single, short_seq_prob: 0.0}}\n"
    recipe = recipe_file(tmp_path, text, body)
    rows = {}
    for weight in (0.5, 1.0, 2.0, 2.5):
        overrides = [
            f"sources.0.weight={weight}",
            f"work_dir={tmp_path}/{weight}",
            "prep.held_out=0",
        ]
        rows[weight] = read_index(build(recipe, *overrides) / "s")["tokens"]
    assert 0.3 < rows[0.5] / rows[1.0] < 0.7
    assert 1.9 < rows[2.0] / rows[1.0] < 2.1
    assert 2.2 < rows[2.5] / rows[1.0] < 2.8
    again = build(recipe, "sources.0.weight=2.0", f"work_dir={tmp_path}/2.0", "prep.held_out=0")
    shards = open_shards(again / "s")
    assert len(set(row_set(shards))) > 0.9 * shards.num_rows  # repeats have draws of their own


def test_b03_only_line_feeds_end_a_sentence(tmp_path: Path) -> None:
    text = tmp_path / "lines.txt"
    text.write_bytes("one\u2028two\u0085three\x0bfour\x0cfive\x1csix\r\nseven\n".encode())
    recipe = recipe_file(tmp_path, text, "shards: {s: {max_length: 32}}\n")
    source = f"sources=[{{kind: sentences, path: {text}}}]"
    index = read_index(build(recipe, source, "prep.held_out=0") / "s")
    assert index["sources"][0]["sentences"] == 2
    assert index["rows"] == 1


def test_b07_a_blank_last_line_shifts_no_id(tmp_path: Path) -> None:
    text = write_texts(tmp_path / "text")
    recipe = recipe_file(tmp_path, text)
    straight = row_set(open_shards(build(recipe) / "len64"))
    path = write_vocab(tmp_path / "vocab.txt")
    path.write_text(path.read_text() + "\n")
    assert row_set(open_shards(build(recipe, f"work_dir={tmp_path}/b") / "len64")) == straight


def test_b09_counts_are_reported_for_a_single_document(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "text"
    text.mkdir()
    (text / "a.txt").write_text("Maple leaves fall. Rakes come out. Piles grow.\n")
    recipe = recipe_file(tmp_path, text, "shards: {s: {max_length: 64, short_seq_prob: 0.0}}\n")
    index = read_index(build(recipe, "prep.held_out=0") / "s")
    assert index["labels"][1] == 0 and index["rows"] >= 1
    (text / "a.txt").write_text("Maple leaves fall. Rakes come out. Piles grow.\n" * 40)
    capsys.readouterr()
    overrides = ["prep.held_out=0", f"work_dir={tmp_path}/b"]
    index = read_index(build(recipe, *overrides) / "s")
    wanted = index["counts"]["random B wanted, no other document"]
    assert index["labels"][1] == 0 and wanted > 0
    assert f"random B wanted, no other document {wanted}" in capsys.readouterr().out


def test_b09_single_documents_of_several_units_are_pooled(
    tmp_path: Path, small_units: None
) -> None:
    """Each source is one document: their rows still get a random B, from the other source."""
    for name in ("a", "b"):
        write_texts(tmp_path / name, files=1, sentences=90, seed=ord(name))
    both = f"sources=[{{kind: text, path: {tmp_path}/a}}, {{kind: text, path: {tmp_path}/b}}]"
    recipe = recipe_file(tmp_path, tmp_path / "a")
    index = read_index(build(recipe, both, "prep.held_out=0") / "len64")
    assert min(index["labels"]) >= 4


def test_b09_windows_know_what_follows_them(tmp_path: Path, small_units: None) -> None:
    """Windows of a file, one file after another; nothing follows the last window of a file."""
    text = write_texts(tmp_path / "text", files=4, sentences=60)
    seen: list[list[bool]] = []
    original = data_prep.rows._load_pool

    def load(*arguments: object) -> object:
        pool, copies, names = original(*arguments)  # type: ignore[arg-type]
        seen.append(pool.follows)
        return pool, copies, names

    source = f"sources=[{{kind: text, path: {text}, document: window, window_sentences: 5}}]"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(data_prep.rows, "_load_pool", load)
        index = read_index(build(recipe_file(tmp_path, text), source, "prep.held_out=0") / "len64")
    follows = [f for pool in seen for f in pool]
    assert len(follows) == index["sources"][0]["documents"]
    assert follows.count(False) == 4  # the first window of each file, wherever units are cut


def test_b15_mask_cap(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    body = (
        "shards: {a: {max_length: 128}, b: {max_length: 512}, c: {max_length: 512, mask_cap: 20}}\n"
    )
    folder = build(recipe_file(tmp_path, write_texts(tmp_path / "text"), body))
    assert [open_shards(folder / n).mask_cap for n in "abc"] == [20, 77, 20]
    said = capsys.readouterr().out
    assert (
        "shards.c.mask_cap=20 masks at most 3.9% of a row of 512, not 15%; 0 would give 77" in said
    )


def test_the_cap_that_is_not_given_is_what_the_rates_of_a_set_need() -> None:
    """Of its phases, and of evaluation, which is at masking.probability."""
    body = [
        "shards={a: {max_length: 128}, b: {max_length: 512}, c: {max_length: 128, mask_cap: 64}}",
        "phases=[{shards: a, mask_probability: 0.3}, {shards: a}, {shards: b, mask_probability: 0.1},"
        " {shards: c, mask_probability: 0.5}]",
    ]
    recipe = load_recipe("demo", body)
    assert [mask_cap(recipe, name) for name in "abc"] == [39, 77, 64]


def test_a_set_that_keeps_more_predictions_than_the_rates_need_serves(
    tmp_path: Path, capsys
) -> None:
    """Its rows are the same: a rate may fall, or another phase go, without building anew."""
    phases = "[{{shards: len64, global_batch: 8, steps: 4, mask_probability: {}}}]"
    recipe = recipe_file(tmp_path, write_texts(tmp_path / "text", files=2))

    def made(rate: float, *more: str) -> str:
        build(recipe, f"phases={phases.format(rate)}", *more)
        return capsys.readouterr().out

    folder = Path(load_recipe(recipe).work_dir) / "shards" / "len64"
    made(0.3)
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    for rate in (0.3, 0.2, 0.0):
        assert f"{folder} is complete" in made(rate)
        assert stale(load_recipe(recipe, [f"phases={phases.format(rate)}"])) == []
    for given in (
        [0.4],
        [0.0, "shards.len64.mask_cap=10"],
        [0.0, "shards.len64.static_masks=true"],
    ):
        with pytest.raises(UserError, match="was built from something else"):
            made(*given)
    assert before == {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    next(folder.glob("part-*")).unlink()
    with pytest.raises(UserError, match="part-.*\n.*delete .*len64 to build it anew"):
        made(0.0)
    assert "building what is missing" in made(0.3)
    assert before == {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_static_masks_are_per_token(tmp_path: Path) -> None:
    recipe = recipe_file(tmp_path, write_texts(tmp_path / "text", files=2))
    with pytest.raises(UserError, match="static_masks with masking.kind=span"):
        build(recipe, "shards.len64.static_masks=true", "masking.kind=span")


def test_groups_have_documents_for_a_random_b() -> None:
    def units_of(shares: list[tuple[int, int, int, int]]) -> list[list[int]]:
        """shares: unit, source, documents, tokens."""
        return [[s.unit for s in group] for group in join_units([Share(*s, 1) for s in shares])]

    few = [(0, 0, 1, 10), (1, 0, 1, 10), (2, 1, 1, 10), (3, 2, 50, 9 << 20)]
    assert units_of(few) == [[0, 1, 2], [3]]
    many = [(u, 0, 20, 1 << 20) for u in range(5)] + [(5, 0, 2, 5), (6, 1, 1, 5)]
    assert units_of(many) == [[0], [1], [2], [3], [4, 5, 6]]
    huge = [(u, 0, 1, 9 << 20) for u in range(6)]  # documents of 40 MB: two make a group
    assert units_of(huge) == [[0, 1], [2, 3], [4, 5]]
    assert units_of([(0, 0, 1, 5)]) == [[0]]
    assert units_of([]) == []
