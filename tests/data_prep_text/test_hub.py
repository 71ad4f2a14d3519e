"""Data sets: shapes of local files, configurations and splits, and a hub on the loopback."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from configs import UserError
from configs.schema import SourceConfig
from data_prep.sources import Document, Tally, base, hub, open_source
from tests.data_prep_text.fake_hub import serve

TEXTS = [f"Text number {n} has one sentence. And another one." for n in range(40)]


def read(path: Path | str, **keys: Any) -> tuple[list[Document], Counter[str], int]:
    source = open_source(SourceConfig(kind="hub", path=str(path), **keys))
    tally = Tally()
    units = source.ranges()
    return [d for u in units for d in source.documents(u, tally)], tally.dropped, len(units)


def texts(path: Path | str, **keys: Any) -> list[str]:
    return ["\n".join(d.paragraphs) for d in read(path, **keys)[0]]


def write_all(folder: Path, column: str = "text", rows: Sequence[str] = TEXTS) -> dict[str, Path]:
    """The same rows in every format."""
    table = pa.table({"id": list(range(len(rows))), column: rows})
    pq.write_table(table, folder / "a.parquet", row_group_size=7)
    for name, new in (("stream.arrow", pa.ipc.new_stream), ("file.arrow", pa.ipc.new_file)):
        with new(str(folder / name), table.schema) as writer:
            writer.write_table(table, max_chunksize=9)
    lines = "".join(json.dumps({column: text}) + "\n" for text in rows)
    (folder / "a.jsonl").write_text(lines)
    (folder / "a.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    (folder / "a.txt").write_text("\n".join(rows))
    return {p.name: p for p in folder.iterdir()}


FORMATS = ["a.parquet", "stream.arrow", "file.arrow", "a.jsonl", "a.jsonl.gz", "a.txt"]


@pytest.mark.parametrize("name", FORMATS)
def test_formats_give_the_same_rows_in_any_units(name, tmp_path, monkeypatch) -> None:
    file = write_all(tmp_path)[name]
    assert texts(file) == TEXTS
    monkeypatch.setattr(hub, "SMALL_UNIT", 200)
    monkeypatch.setattr(hub, "RANGE_BYTES", 333)
    documents, _, units = read(file)
    assert ["\n".join(d.paragraphs) for d in documents] == TEXTS
    assert units > 3 or name == "a.jsonl.gz"
    assert len({d.id for d in documents}) == 40


def test_column_mapping(tmp_path) -> None:
    files = write_all(tmp_path, column="body")
    for name in ("a.parquet", "stream.arrow", "a.jsonl"):
        assert texts(files[name], text_column="body") == TEXTS
        with pytest.raises(UserError, match=rf"{name}.*text"):
            read(files[name])
    with pytest.raises(UserError, match="holds int64, not text") as caught:
        read(files["a.parquet"], text_column="id")
    assert caught.value.remedy == "set sources.N.text_column to a column of strings: body"
    with pytest.raises(UserError, match="no column 'text'") as caught:
        read(tmp_path)
    assert "one of: body; or leave this file out" in caught.value.remedy


def test_damaged_files_are_named(tmp_path) -> None:
    files = write_all(tmp_path)
    for name in ("a.parquet", "stream.arrow", "file.arrow", "a.jsonl.gz"):
        file = files[name]
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
        with pytest.raises(UserError, match=name):
            read(file)
    (tmp_path / "bad.jsonl").write_text('{"text": "fine"}\n{"text": "cut')
    with pytest.raises(UserError, match=r"bad.jsonl"):
        read(tmp_path / "bad.jsonl")


@pytest.mark.parametrize("name", FORMATS)
def test_names_in_capitals_are_the_same_formats(name, tmp_path) -> None:
    file = write_all(tmp_path)[name]
    loud = tmp_path / "in" / name.upper()
    loud.parent.mkdir()
    file.rename(loud)
    assert texts(loud) == texts(loud.parent) == TEXTS


@pytest.mark.parametrize("value", [["a"], {"a": "b"}, 5, 0, 1.5, True, False, []])
@pytest.mark.parametrize("kind", ["hub", "extracted"])
def test_json_that_is_no_text_is_refused(value, kind, tmp_path) -> None:
    """As in a table: a list was read as the text "['a']", and 0 as an empty row."""
    file = tmp_path / "a.jsonl"
    rows = [{"text": "One. Two."}, {"text": None}, {"text": ""}]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = open_source(SourceConfig(kind=kind, path=str(file)))
    tally = Tally()
    assert len([d for u in source.ranges() for d in source.documents(u, tally)]) == 1
    assert tally.dropped.total() == 2
    with file.open("a") as more:
        more.write(json.dumps({"id": "seven", "text": value}) + "\n")
    source = open_source(SourceConfig(kind=kind, path=str(file)))
    with pytest.raises(UserError, match=r"a\.jsonl: 'text' is no text.*seven") as error:
        [d for u in source.ranges() for d in source.documents(u, Tally())]
    assert "text_column" in error.value.remedy


@pytest.mark.parametrize("indent", [None, 1])
def test_an_array_of_objects_is_told_what_makes_lines_of_it(tmp_path, indent) -> None:
    file = tmp_path / "a.json"
    file.write_text(json.dumps([{"text": "One."}, {"text": "Two."}], indent=indent))
    with pytest.raises(UserError, match=r"a\.json: a line is not JSON with") as caught:
        read(file)
    assert f"jq -c '.[]' {file}" in caught.value.remedy


def put(path: Path, rows: list[str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table({"text": rows}), path)


def test_a_folder_in_the_hubs_shape(tmp_path) -> None:
    put(tmp_path / "20231101.en/train-00001-of-00002.parquet", ["Second text."])
    put(tmp_path / "20231101.en/train-00000-of-00002.parquet", ["First text."])
    put(tmp_path / "20231101.en/test-00000-of-00001.parquet", ["Test text."])
    put(tmp_path / "20231101.de/train-00000-of-00001.parquet", ["Ein Text."])
    assert texts(tmp_path, config="20231101.en") == ["First text.", "Second text."]
    assert texts(tmp_path, config="20231101.en", split="test") == ["Test text."]
    assert texts(tmp_path, config="20231101.de") == ["Ein Text."]
    with pytest.raises(UserError, match=r"'20231101.fr'[\s\S]*20231101.de, 20231101.en"):
        read(tmp_path, config="20231101.fr")
    with pytest.raises(UserError, match=r"'validation'[\s\S]*test, train"):
        read(tmp_path, config="20231101.en", split="validation")
    (tmp_path / "README.md").write_text(
        "---\nconfigs:\n- config_name: english\n  data_files:\n  - split: train\n    path: 20231101.en/train-*\n"
        "- config_name: all\n  default: true\n  data_files: '*/train*'\n---\n# A set\n"
    )
    assert texts(tmp_path, config="english") == ["First text.", "Second text."]
    assert texts(tmp_path) == ["Ein Text.", "First text.", "Second text."]
    with pytest.raises(UserError, match=r"20231101.en[\s\S]*english, all"):
        read(tmp_path, config="20231101.en")


FILES = "configs:\n- config_name: default\n  data_files:"


@pytest.mark.parametrize(
    "head",
    [
        f"{FILES} {{train: 'train*'}}",
        f"{FILES} 7",
        f"{FILES}\n  - split: train",
        f"{FILES}\n  - split: train\n    path: {{a: b}}",
        f"{FILES}\n  - split: train\n    path: [a, 7]",
        f"{FILES}\n  - train*\n  - {{split: test, path: x}}",
        f"{FILES}\n  - {{split: test, path: x}}\n  - train*",
        "configs: {default: train*}",
        "configs: 7",
        "configs: train*",
        "configs: [train*]",
    ],
)
def test_a_readme_that_is_not_understood_is_named(tmp_path, head) -> None:
    put(tmp_path / "train.parquet", ["A text."])
    (tmp_path / "README.md").write_text(f"---\n{head}\n---\n")
    with pytest.raises(UserError, match=r"README\.md: configs not understood") as caught:
        texts(tmp_path)
    assert caught.value.remedy == "name the files in sources.N.path"
    assert texts(tmp_path / "*.parquet") == ["A text."]


def test_a_readme_of_another_encoding(tmp_path) -> None:
    for name in ("a", "b"):
        put(tmp_path / f"{name}.parquet", [f"Text {name}."])
    text = f"---\nlanguage: français\n{FILES} b.parquet\n---\nEn français.\n"
    (tmp_path / "README.md").write_text(text, encoding="latin-1")
    assert texts(tmp_path) == ["Text b."]


def test_a_configuration_of_a_set_without_any(tmp_path) -> None:
    put(tmp_path / "train.parquet", ["A text."])
    with pytest.raises(UserError, match="no configuration 'en'") as caught:
        read(tmp_path, config="en")
    assert caught.value.remedy == "leave sources.N.config empty"


def test_one_format_is_read_once(tmp_path) -> None:
    """A set may be there as parquet and as JSON lines; its rows count once."""
    write_all(tmp_path)
    assert texts(tmp_path) == TEXTS


def test_rows_of_sentences_make_documents_of_so_many(tmp_path) -> None:
    put(
        tmp_path / "train.parquet",
        [f"usually , he is number {n} ." for n in range(10)] + ["", "the end"],
    )
    documents, _, _ = read(tmp_path, document="rows", window_sentences=4)
    assert [len(d.paragraphs) for d in documents] == [4, 4, 2, 1]
    assert all(d.presplit for d in documents)
    assert documents[0].paragraphs[0] == "usually , he is number 0 ."


@settings(max_examples=60, deadline=None)
@given(
    rows=st.lists(st.sampled_from(["", " ", "one .", "a b", "ça va ."]), min_size=1, max_size=12),
    cut=st.sampled_from(["rows", "window", "file"]),
    count=st.integers(2, 4),
)
def test_the_same_rows_are_the_same_documents_in_every_format(
    tmp_path_factory, rows, cut, count
) -> None:
    """Empty rows end documents of sentences; those of lines of text were passed over."""
    folder = tmp_path_factory.mktemp("rows")
    files = write_all(folder, rows=[*rows, "last ."])
    found = {
        name: [d.paragraphs for d in read(file, document=cut, window_sentences=count)[0]]
        for name, file in files.items()
    }
    assert all(documents == found["a.parquet"] for documents in found.values())
    if cut != "file":
        config = SourceConfig(
            kind="sentences", path=str(files["a.txt"]), document=cut, window_sentences=count
        )
        source = open_source(config)
        documents = [d for u in source.ranges() for d in source.documents(u, Tally())]
        lines = read(files["a.parquet"], document="rows", window_sentences=count)[0]
        assert [d.paragraphs for d in documents] == [d.paragraphs for d in lines]


def test_books_in_rows_are_read_as_books(tmp_path) -> None:
    lines = "\n".join(
        "This is a line of a book that was wrapped at about seventy columns" for _ in range(9)
    )
    book = f"A TITLE\n\nCHAPTER I\n\n{lines}.\n\nCHAPTER II\n\n{lines}.\n"
    put(tmp_path / "train.parquet", [book])
    chapters = read(tmp_path, document="chapter")[0]
    assert [len(d.paragraphs) for d in chapters] == [1, 1]
    assert (
        chapters[0].paragraphs[0].count("This is a line") == 9
        and "\n" not in chapters[0].paragraphs[0]
    )
    assert [len(d.paragraphs) for d in read(tmp_path)[0]] == [2]


def test_titles_between_paragraphs_are_left_out(tmp_path) -> None:
    put(
        tmp_path / "train.parquet",
        ["Berlin is a city.\n\nHistory\n\nIt is old.\n\nSee also\n\nList of cities", ""],
    )
    documents, dropped, _ = read(tmp_path)
    assert [d.paragraphs for d in documents] == [["Berlin is a city.", "It is old."]]
    assert dropped == {"empty row": 1}


def test_the_hubs_parquet_of_wikipedia(real_data) -> None:
    documents, _, _ = read(real_data / "wiki/extracted/train-00000-of-00001.parquet")
    assert 960 <= len(documents) <= 967


def ask(lines: list[dict[str, Any]], **environment: str) -> list[dict[str, Any]]:
    run = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("hub_reader.py"))],
        input="".join(json.dumps(line) + "\n" for line in lines),
        env={
            **{k: v for k, v in os.environ.items() if k != "HF_HUB_OFFLINE"},
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
            "PYTHONPATH": str(Path(__file__).parents[2]),
            **environment,
        },
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert run.returncode == 0, run.stderr
    return [json.loads(line) for line in run.stdout.splitlines()]


def test_sets_by_name_downloaded_streamed_and_offline(tmp_path) -> None:
    hub_files = tmp_path / "hub"
    put(
        hub_files / "wikimedia/wikipedia/main/20231101.en/train-00000-of-00001.parquet", ["A text."]
    )
    put(
        hub_files / "wikimedia/wikipedia/main/20231101.de/train-00000-of-00001.parquet",
        ["Ein Text."],
    )
    script = hub_files / "bookcorpus/bookcorpus/main/bookcorpus.py"
    script.parent.mkdir(parents=True)
    script.write_text("raise SystemExit")
    put(
        hub_files / "bookcorpus/bookcorpus/refs_convert_parquet/plain_text/train/0000.parquet",
        ["one .", "two ."],
    )
    lines = hub_files / "some/lines/main/train.jsonl.gz"
    lines.parent.mkdir(parents=True)
    lines.write_bytes(gzip.compress(b'{"text": "A line."}\n'))
    streamed = {"path": "some/lines", "streaming": True}
    wikipedia = {"path": "wikimedia/wikipedia", "config": "20231101.en"}
    books = {"path": "bookcorpus/bookcorpus", "document": "rows"}
    converted = {**books, "revision": "refs/convert/parquet"}
    home = str(tmp_path / "home")
    with serve(hub_files) as address:
        answers = ask(
            [wikipedia, {**wikipedia, "streaming": True}, books, converted, {**converted, "streaming": True},
             {"path": "no/such"}, streamed],
            HF_ENDPOINT=address, HF_HOME=home,
        )  # fmt: skip
    assert answers[0]["texts"] == answers[1]["texts"] == [["A text."]]
    assert answers[0]["paths"][0].startswith(home)
    assert answers[1]["paths"] == [
        "hf://datasets/wikimedia/wikipedia/20231101.en/train-00000-of-00001.parquet"
    ]
    assert (
        "script data set" in answers[2]["error"]
        and "revision: refs/convert/parquet" in answers[2]["error"]
    )
    assert answers[3]["texts"] == answers[4]["texts"] == [["one .", "two ."]]
    assert "no/such" in answers[5]["error"]
    assert answers[6]["texts"] == [["A line."]]
    # The same sets from the cache: by the offline switch, and with nobody at the address.
    for environment in ({"HF_HUB_OFFLINE": "1"}, {"HF_ENDPOINT": address}):
        again = ask([wikipedia, converted, {"path": "no/such"}, books], HF_HOME=home, **environment)
        assert [a.get("texts") for a in again] == [[["A text."]], [["one .", "two ."]], None, None]
        assert "the hub is not reachable" in again[2]["error"]
        assert "revision: refs/convert/parquet" in again[3]["error"]


def test_a_readme_may_name_a_part_of_a_numbered_set(tmp_path) -> None:
    for number in (0, 1):
        put(tmp_path / f"data/train-{number:05d}-of-00004.parquet", [f"text {number}"])
    head = "---\nconfigs:\n- config_name: default\n  data_files: data/train-0000{}-of-*\n---\n"
    (tmp_path / "README.md").write_text(head.format("[0-1]"))
    assert texts(tmp_path) == ["text 0", "text 1"]
    (tmp_path / "README.md").write_text(head.format("[0-2]"))
    with pytest.raises(UserError, match=r"train-00002-of-00004\.parquet is missing"):
        texts(tmp_path)


def test_units_of_small_files_depend_on_files_alone(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(base, "SMALL_UNIT", 1000)
    for number in range(6):
        (tmp_path / f"{number}.txt").write_text("word " * 90)
    source = open_source(SourceConfig(kind="books", path=str(tmp_path)))
    assert [len(unit.pieces) for unit in source.ranges()] == [3, 3]
