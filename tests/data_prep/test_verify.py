"""Thirty and more kinds of damage to a shard folder: each is named by file, none passes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from configs import UserError
from data_prep import audit, inspect
from data_prep.shard_check import check_folder
from data_prep.shard_index import digest, file_digest, read_index
from data_prep.shard_writer import publish_json, take, write_part
from data_prep.shards import Layout, Rows, open_shards
from data_prep.verify import main
from tests.data_prep.corpus import build, recipe_file, write_texts
from tests.synthetic import make_shards

SEP, CLS = 3, 2


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A set of several parts with held-out rows, static masks and a tokenizer, as built."""
    base = tmp_path_factory.mktemp("verify")
    body = (
        "shards: {s: {max_length: 64, static_masks: true, dupe_factor: 40}, t: {max_length: 64}}\n"
    )
    recipe = recipe_file(base, write_texts(base / "text", files=30, sentences=60), body)
    folder = build(recipe) / "s"
    assert len(read_index(folder)["parts"]) >= 2
    return folder


Damage = Callable[[Path], None]


def edit(name: str, change: Callable[[bytearray], Any]) -> Damage:
    def damage(folder: Path) -> None:
        data = bytearray((folder / name).read_bytes())
        result = change(data)
        (folder / name).write_bytes(data if result is None else result)

    return damage


def flip(at: float) -> Callable[[bytearray], None]:
    def change(data: bytearray) -> None:
        data[int(at * (len(data) - 1))] ^= 4

    return change


def index_change(change: Callable[[dict[str, Any]], Any], sign: bool = True) -> Damage:
    """A changed index; with `sign` its own checksum is made to fit, as a forger would."""

    def damage(folder: Path) -> None:
        index = json.loads((folder / "index.json").read_text())
        change(index)
        if sign:
            index["index_sha256"] = digest({k: v for k, v in index.items() if k != "index_sha256"})
        publish_json(folder / "index.json", index)

    return damage


def rows_change(change: Callable[[Rows], None], part: int = 0) -> Damage:
    """A part written anew with other rows, index and checksums made to fit."""

    def damage(folder: Path) -> None:
        shards = open_shards(folder)
        first = sum(p["rows"] for p in shards.index["parts"][:part])
        count = shards.index["parts"][part]["rows"]
        rows = shards.rows(np.arange(first, first + count))
        change(rows)
        path = folder / f"part-{part:05d}.arrow"
        entry = write_part(path, shards.layout, shards.index["stamp"], rows, np.arange(count))

        def put(index: dict[str, Any]) -> None:
            index["parts"][part] = entry
            index["labels"] = [sum(p["labels"][k] for p in index["parts"]) for k in (0, 1)]

        index_change(put)(folder)

    return damage


def set_token(row: int, position: int, token: int) -> Damage:
    def change(rows: Rows) -> None:
        start, end = rows.offsets[row], rows.offsets[row + 1]
        rows.tokens[(start if position >= 0 else end) + position] = token

    return rows_change(change)


def set_segment(value: int) -> Damage:
    def change(rows: Rows) -> None:
        rows.segment_b[7] = value

    return rows_change(change)


def mask_on_cls(rows: Rows) -> None:
    assert rows.masked_positions is not None
    rows.masked_positions[0] = 0


def mask_outside(rows: Rows) -> None:
    assert rows.masked_positions is not None
    rows.masked_positions[0] = 400


def mask_label(rows: Rows) -> None:
    assert rows.masked_labels is not None
    rows.masked_labels[0] = 60000


def swap_parts(folder: Path) -> None:
    a, b = folder / "part-00000.arrow", folder / "part-00001.arrow"
    a.rename(folder / "x")
    b.rename(a)
    (folder / "x").rename(b)


def cut_at_batch(folder: Path) -> None:
    """A stream that ends at a batch border opens silently with fewer rows."""
    shards = open_shards(folder)
    rows = shards.rows(np.arange(shards.index["parts"][0]["rows"]))
    half = take(rows, np.arange(len(rows) // 2))
    layout = shards.layout
    write_part(
        folder / "part-00000.arrow", layout, shards.index["stamp"], half, np.arange(len(half))
    )


def part_of(other: str) -> Damage:
    """A part of another set under the right name."""

    def damage(folder: Path) -> None:
        shutil.copy(folder.parent / other / "part-00000.arrow", folder / "part-00000.arrow")

    return damage


def other_held_out(folder: Path) -> None:
    shutil.rmtree(folder / "held-out")
    shutil.copytree(folder.parent / "t" / "held-out", folder / "held-out")


def other_columns(folder: Path) -> None:
    shards = open_shards(folder)
    rows = shards.rows(np.arange(shards.index["parts"][0]["rows"]))
    layout = Layout(64, shards.vocab_size)  # without masks
    entry = write_part(
        folder / "part-00000.arrow", layout, shards.index["stamp"], rows, np.arange(len(rows))
    )
    index_change(lambda index: index["parts"].__setitem__(0, entry))(folder)


def not_a_stream(folder: Path) -> None:
    """Right size and checksum, but no Arrow stream."""
    path = folder / "part-00001.arrow"
    path.write_bytes(b"\0" * path.stat().st_size)
    index_change(lambda index: index["parts"][1].update(sha256=file_digest(path)))(folder)


def small_batches(folder: Path) -> None:
    """The same rows in record batches of another size."""
    path = folder / "part-00000.arrow"
    with pa.ipc.open_stream(path.read_bytes()) as stream:
        table = stream.read_all()
    with pa.ipc.new_stream(str(path), table.schema) as out:
        out.write_table(table, max_chunksize=100)
    size, sha = path.stat().st_size, file_digest(path)
    index_change(lambda index: index["parts"][0].update(bytes=size, sha256=sha))(folder)


def stale_vocabulary(folder: Path) -> None:
    vocab = folder.parent.parent / "vocab" / "tokenizer.json"
    vocab.write_text(vocab.read_text().replace("maple", "mapel"))


def one_row_less(index: dict[str, Any]) -> None:
    index["rows"] -= 1
    index["parts"][0]["rows"] -= 1


P0, P1 = "part-00000.arrow", "part-00001.arrow"
DAMAGE: dict[str, tuple[Damage, str]] = {
    "part missing": (lambda f: (f / P0).unlink(), P0),
    "last part missing": (lambda f: sorted(f.glob("part-*"))[-1].unlink(), "part-"),
    "part empty": (edit(P1, lambda d: b""), P1),
    "part truncated by a byte": (edit(P0, lambda d: d[:-1]), P0),
    "part cut in half": (edit(P1, lambda d: d[: len(d) // 2]), P1),
    "part longer": (edit(P0, lambda d: d + b"\0"), P0),
    "bit flipped at the start of a part": (edit(P0, flip(0.0)), P0),
    "bit flipped in the middle of a part": (edit(P1, flip(0.5)), P1),
    "bit flipped at the end of a part": (edit(P0, flip(1.0)), P0),
    "part cut at a batch border": (cut_at_batch, P0),
    "parts swapped": (swap_parts, P1),
    "part of another set": (part_of("t"), P0),
    "part with other columns": (other_columns, P0),
    "part that is no Arrow stream": (not_a_stream, P1),
    "record batches of another size": (small_batches, P0),
    "a part too many": (lambda f: shutil.copy(f / P0, f / "part-00099.arrow"), "part-00099.arrow"),
    "a stray temporary file": (lambda f: (f / ".part-00000.arrow.h.1.tmp").write_text(""), ".tmp"),
    "lengths missing": (lambda f: (f / "lengths.u16").unlink(), "lengths.u16"),
    "lengths truncated": (edit("lengths.u16", lambda d: d[:-2]), "lengths.u16"),
    "lengths flipped": (edit("lengths.u16", flip(0.3)), "lengths.u16"),
    "index missing": (lambda f: (f / "index.json").unlink(), "index.json"),
    "index not JSON": (edit("index.json", lambda d: d[:-30]), "index.json"),
    "index of something else": (lambda f: publish_json(f / "index.json", {"a": 1}), "index.json"),
    "index edited": (index_change(lambda i: i.update(objective="sop"), sign=False), "index.json"),
    "index of another version": (index_change(lambda i: i.update(version=99)), "version 99"),
    "index without a key": (index_change(lambda i: i.pop("mask_cap")), "mask_cap"),
    "index with a wrong type": (index_change(lambda i: i.update(rows="many")), "rows"),
    "index without a special id": (
        index_change(lambda i: i["tokenizer"]["special_ids"].pop("mask")), "special_ids.mask",
    ),
    "index with a part's row count changed": (
        index_change(one_row_less), P0,
    ),
    "index with parts renamed": (
        index_change(lambda i: i["parts"][0].update(file="part-7.arrow")), "part-7.arrow",
    ),
    "index of another build": (index_change(lambda i: i.update(stamp="0" * 32)), P0),
    "tokenizer missing": (lambda f: (f / "tokenizer.json").unlink(), "tokenizer.json"),
    "tokenizer changed": (
        edit("tokenizer.json", lambda d: bytes(d).replace(b"maple", b"mapel")), "tokenizer.json",
    ),
    "index of JSON too deep": (edit("index.json", lambda d: b"[" * 99999), "not valid JSON"),
    "vocabulary of the recipe changed": (stale_vocabulary, "shards/s: stale: made with another"),
    "README missing": (lambda f: (f / "README.md").unlink(), "README.md"),
    "held-out missing": (lambda f: shutil.rmtree(f / "held-out"), "held-out"),
    "held-out damaged": (edit("held-out/part-00000.arrow", flip(0.7)), "held-out/part-00000.arrow"),
    "held-out of another set": (other_held_out, "held-out"),
    "token outside the vocabulary": (set_token(5, 4, 9999), "outside the vocabulary (first in row 5)"),
    "padding inside a row": (set_token(6, 3, 0), "padding inside a row (first in row 6)"),
    "row without [CLS]": (set_token(3, 0, 50), "does not start with [CLS] (first in row 3)"),
    "row without [SEP]": (set_token(4, -1, 50), "does not end with [SEP] (first in row 4)"),
    "second segment outside the row": (set_segment(200), "outside the row (first in row 7)"),
    "second segment missing": (set_segment(0), "without a second segment (first in row 7)"),
    "second segment off by one": (set_segment(4), "before the second segment (first in row 7)"),
    "mask on [CLS]": (rows_change(mask_on_cls), "a mask on [CLS] or [SEP] (first in row 0)"),
    "mask outside its row": (rows_change(mask_outside), "a mask outside its row (first in row 0)"),
    "masked label unknown": (rows_change(mask_label), "masked label outside the vocabulary"),
    "cap below the masks": (index_change(lambda i: i.update(mask_cap=1)), "more masks than mask_cap"),
}  # fmt: skip


def test_thirty_kinds() -> None:
    assert len(DAMAGE) >= 30


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_is_named(good: Path, tmp_path: Path, kind: str) -> None:
    work = tmp_path / "run"
    shutil.copytree(good.parent, work / "shards")
    shutil.copytree(good.parent.parent / "vocab", work / "vocab")
    folder = work / "shards" / "s"
    damage, name = DAMAGE[kind]
    damage(folder)
    problems = check_folder(folder)
    assert problems and any(name in p for p in problems), problems
    assert main([str(folder)]) == 1


def test_rows_of_one_segment_belong_only_where_the_settings_put_them(tmp_path: Path) -> None:
    def folder(name: str) -> Path:
        made = make_shards(tmp_path / name, rows=100, single=0.5)
        assert check_folder(made) == []
        return made

    def label(rows: Rows) -> None:
        rows.next_sentence_label[np.argmin(rows.segment_b)] = 1

    labelled, pairs, lost = folder("labelled"), folder("pairs"), folder("lost")
    rows_change(label)(labelled)
    assert any("a label without a second segment" in p for p in check_folder(labelled))
    index_change(lambda index: index["settings"]["shards"].update(pair_max_length=9))(pairs)
    assert any("a pair longer than pair_max_length" in p for p in check_folder(pairs))
    index_change(lambda index: index["settings"].pop("shards"))(pairs)
    assert any("a pair without a second segment" in p for p in check_folder(pairs))
    rows = open_shards(lost).rows(np.arange(50))  # a pair that lost its B is missed in the count
    entry = read_index(lost)["parts"][0]
    assert 0 < (rows.segment_b == 0).sum() == 50 - sum(entry["labels"]) < 50
    rows_change(lambda rows: rows.segment_b.__setitem__(np.argmax(rows.segment_b), 0))(lost)
    index_change(lambda index: index["parts"][0].update(labels=entry["labels"]))(lost)
    assert any("pairs by label" in p for p in check_folder(lost))


def test_every_problem_is_named_not_only_the_first(good: Path, tmp_path: Path) -> None:
    folder = tmp_path / "s"
    shutil.copytree(good, folder)
    (folder / P0).unlink()
    edit(P1, flip(0.5))(folder)
    (folder / "README.md").unlink()
    shutil.rmtree(folder / "held-out")
    named = " ".join(check_folder(folder))
    assert all(n in named for n in (P0, P1, "README.md", "held-out"))


def test_an_intact_folder_has_no_problem(good: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert check_folder(good) == []
    assert main([str(good)]) == 0
    assert "all right" in capsys.readouterr().out


@pytest.mark.parametrize("up", ["run/shards", "run"])
def test_a_folder_above_the_sets_stands_for_all_of_them(
    good: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], up: str
) -> None:
    shards = tmp_path / "run" / "shards"
    shutil.copytree(good.parent, shards)
    shutil.copytree(good.parent.parent / "vocab", tmp_path / "run" / "vocab")
    (tmp_path / "run/train/step-1").mkdir(parents=True)
    (tmp_path / "run/train/step-1/index.json").write_text('{"format": "a checkpoint"}')
    above = tmp_path / up
    assert main([str(above)]) == 0
    said = capsys.readouterr().out
    assert [line.count("all right") for line in said.splitlines()].count(1) == 2
    for look in (inspect.main, audit.main):
        with pytest.raises(UserError, match="index.json is missing: not a shard folder") as caught:
            look([str(above)])
        assert caught.value.remedy == f"name a set below it: {shards / 's'}, {shards / 't'}"
    # What is left of a set that was lost is still one of them.
    aside = tmp_path / ".aside"
    aside.mkdir()
    for lost in ("index.json", "*.arrow", "[!i]*"):
        for kept in shards.glob(f"t/{lost}"):
            kept.rename(aside / kept.name)
        assert main([str(above)]) == 1
        said = capsys.readouterr().out
        assert f"{shards / 's'}: " in said and f"PROBLEM {shards / 't'}" in said
        for kept in aside.iterdir():
            kept.rename(shards / "t" / kept.name)


def test_a_folder_without_any_set_is_no_damage(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="not a shard folder, and none is below it"):
        main([str(tmp_path)])


def test_stale_sets_of_a_recipe_are_named(good: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = str(good.parent.parent.parent / "recipe.yaml")
    assert main([recipe]) == 0
    assert main([recipe, "shards.s.max_length=32", "prep.held_out=0.3"]) == 1
    said = capsys.readouterr().out
    assert "s: stale: shards.max_length: 64 there, 32 now" in said
    assert "t: stale: held_out: 0.2 there, 0.3 now" in said


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("part missing", "part-00000.arrow is missing"),
        ("part truncated by a byte", "part-00000.arrow: .* truncated or replaced"),
        ("lengths missing", "lengths.u16 is missing"),
        ("index edited", "changed after it was written"),
    ],
)
def test_opening_refuses(good: Path, tmp_path: Path, kind: str, message: str) -> None:
    folder = tmp_path / "s"
    shutil.copytree(good, folder)
    DAMAGE[kind][0](folder)
    with pytest.raises(UserError, match=message):
        open_shards(folder)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("parts swapped", "a part of another build|index.json says"),
        ("part that is no Arrow stream", "part-00001.arrow: not a readable Arrow stream"),
        ("part with other columns", "part-00000.arrow: other columns"),
        ("index of another build", "part-00000.arrow: a part of another build"),
        ("lengths flipped", "row lengths differ from lengths.u16"),
        ("record batches of another size", "record batches of another size"),
    ],
)
def test_reading_refuses(good: Path, tmp_path: Path, kind: str, message: str) -> None:
    """What passes at opening (sizes are right) is refused when the part is read."""
    folder = tmp_path / "s"
    shutil.copytree(good, folder)
    DAMAGE[kind][0](folder)
    with pytest.raises(UserError, match=message):
        shards = open_shards(folder)
        shards.rows(np.arange(shards.num_rows))
