"""The shipped corpus recipes build at 128 and 512: from real data, and from a hub's shape offline."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from configs import UserError, load_recipe
from data_prep.executor import Executor
from data_prep.pipeline import build_recipe
from data_prep.vocab import make_vocab
from tests.synthetic import open_checked

SMALL = ["vocab.size=600", "vocab.kind=wordpiece"]


def build(name: str, work: Path, *overrides: str) -> dict[str, dict]:
    """Builds every set of a shipped recipe; the index of each."""
    recipe = load_recipe(name, [f"work_dir={work}", *overrides])
    make_vocab(recipe)
    folders = build_recipe(recipe, list(recipe.shards), Executor())
    for folder in folders:
        open_checked(folder)
    return {folder.name: json.loads((folder / "index.json").read_text()) for folder in folders}


def check(sets: dict[str, dict], sources: list[str]) -> None:
    assert sorted(sets) == ["len128", "len512"]
    for name, index in sets.items():
        assert index["max_length"] == int(name.removeprefix("len"))
        assert [source["name"] for source in index["sources"]] == sources
        assert all(source["documents"] for source in index["sources"])


@pytest.fixture
def data(real_data, monkeypatch) -> Path:
    monkeypatch.setenv("LAMBERT_DATA", str(real_data))
    return real_data


def test_minidumps(data, tmp_path) -> None:
    sets = build("minidumps", tmp_path)
    check(sets, ["dewiki", "jawiki", "arwiki", "simplewiki"])


def test_enwiki_and_books(data, tmp_path) -> None:
    books = data / "books/0001*.gz"
    check(build("enwiki-books", tmp_path, *SMALL, f"sources.1.path={books}", "sources.1.name=books"), ["enwiki", "books"])  # fmt: skip


def test_books_in_parquet(data, tmp_path) -> None:
    """Two of the books, so that the test is quick; the file's shape is the real one's."""
    table = pq.read_table(data / "books-hub/train-00000-of-00001.parquet").slice(0, 2)
    pq.write_table(table, tmp_path / "train-00000-of-00001.parquet")
    check(build("books-parquet", tmp_path / "run", *SMALL, f"sources.0.path={tmp_path}"), ["books"])


def test_names_on_the_hub_from_local_folders_in_its_shape(tmp_path) -> None:
    """wikimedia/wikipedia and bookcorpus' parquet revision, as `hf download` leaves them."""
    wikipedia, books = tmp_path / "wikipedia", tmp_path / "bookcorpus"
    for folder in (
        wikipedia / "20231101.en",
        wikipedia / "20231101.de",
        books / "plain_text/train",
    ):
        folder.mkdir(parents=True)
    articles = [
        f"Town {n} is a town.\n\nIt lies on river {n}. It has {n} bridges and a market.\n\nHistory\n\n"
        f"It was founded in {1000 + n}. Its people trade in salt, cloth and timber."
        for n in range(400)
    ]
    pq.write_table(pa.table({"title": ["t"] * 400, "text": articles}), wikipedia / "20231101.en/train-00000-of-00001.parquet")  # fmt: skip
    pq.write_table(pa.table({"text": ["Falsch."]}), wikipedia / "20231101.de/train-00000-of-00001.parquet")  # fmt: skip
    rows = [f"he looked at her {n} times , and said nothing ." for n in range(2000)]
    pq.write_table(pa.table({"text": rows}), books / "plain_text/train/0000.parquet")
    paths = [f"sources.0.path={wikipedia}", f"sources.1.path={books}", *SMALL, "vocab.size=200"]
    sets = build("wikipedia-books", tmp_path / "run", *paths)
    check(sets, ["wikipedia", "bookcorpus"])
    assert [s["documents"] for s in sets["len128"]["sources"]] == [400, 4]
    assert [s["sentences"] for s in sets["len128"]["sources"]] == [400 * 5, 2000]


def test_a_name_that_cannot_be_found_is_said_before_work(tmp_path) -> None:
    recipe = load_recipe("wikipedia-books", [f"work_dir={tmp_path}", "sources.0.path=no/such-set"])
    with pytest.raises(UserError, match="no/such-set"):
        make_vocab(recipe)
