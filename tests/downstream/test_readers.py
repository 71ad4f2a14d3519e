"""Local files as releases really look: quotes, marks, headers, tags, offsets."""

from __future__ import annotations

import csv
import gzip
import io
import json
import re
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from configs import UserError
from pretrain.downstream.readers import (
    read_conll,
    read_csv,
    read_glue_tsv,
    read_jsonl,
    read_squad,
    to_iob2,
)
from pretrain.downstream.splits import read_file, read_splits
from pretrain.downstream.tasks import TASKS

# What a GLUE cell may hold: quotes and odd separators, but neither tab nor line feed.
cells = st.text(
    st.characters(blacklist_characters="\t\n\r", blacklist_categories=("Cs",)), max_size=30
)


PATIENT = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # busy machines


@PATIENT
@given(st.lists(st.tuples(cells, cells), min_size=1, max_size=8), st.booleans(), st.booleans())
def test_tsv_rows_come_back_whatever_their_quotes(rows, bom, crlf) -> None:
    import tempfile

    text = "sentence1\tsentence2\tlabel\n" + "".join(f"{a}\t{b}\t0\n" for a, b in rows)
    raw = (b"\xef\xbb\xbf" if bom else b"") + text.replace("\n", "\r\n" if crlf else "\n").encode()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "train.tsv.gz"
        file.write_bytes(gzip.compress(raw))
        got = read_glue_tsv(file, TASKS["wnli"])
    assert [(r["sentence1"], r["sentence2"]) for r in got] == rows


@PATIENT
@given(st.lists(st.tuples(st.text(max_size=20), st.text(max_size=20)), max_size=6))
def test_csv_of_ones_own_keeps_quotes_commas_and_line_feeds(rows) -> None:
    import tempfile

    rows = [
        (a.replace("\r", "").replace("\0", ""), b.replace("\r", "").replace("\0", ""))
        for a, b in rows
    ]
    rows = [tuple(x.encode("utf-8", "ignore").decode() for x in row) for row in rows]
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows([("text", "label"), *rows])
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "own.csv"
        file.write_text(out.getvalue(), encoding="utf-8-sig", newline="")
        assert [(r["text"], r["label"]) for r in read_csv(file)] == rows


# Examples a file holds (SOURCES.md counted them); a quoting reader loses 97 and 260 of them.
COUNTS = [
    ("cola", "CoLA/train", 8551), ("cola", "CoLA/dev", 1043), ("cola", "CoLA/test", 1063),
    ("mrpc", "MRPC/train", 3667), ("mrpc", "MRPC/dev", 408), ("mrpc", "MRPC/test", 1725),
    ("rte", "RTE/train", 2490), ("sts-b", "STS-B/train", 5749), ("sts-b", "STS-B/test", 1379),
    ("sst-2", "SST-2/dev", 872), ("wnli", "WNLI/train", 635), ("qnli", "QNLI/dev", 5463),
]  # fmt: skip


@pytest.mark.parametrize(("task", "name", "count"), COUNTS)
def test_glue_files_give_every_example(real_data: Path, task: str, name: str, count: int) -> None:
    rows = read_file(real_data / f"downstream/glue/{name}.tsv.gz", TASKS[task])
    assert len(rows) == count
    assert all(any(first in row for first in TASKS[task].first) for row in rows)
    assert not any(key.startswith("﻿") for key in rows[0])


def test_cola_has_a_header_in_its_test_file_only(real_data: Path) -> None:
    folder = real_data / "downstream/glue/CoLA"
    train = read_file(folder / "train.tsv.gz", TASKS["cola"])
    assert (
        train[0]["sentence"]
        == "Our friends won't buy this analysis, let alone the next one we propose."
    )
    assert {row["label"] for row in train} == {"0", "1"}
    assert "label" not in read_file(folder / "test.tsv.gz", TASKS["cola"])[0]


def test_a_row_with_a_column_too_few_is_named(tmp_path: Path) -> None:
    file = tmp_path / "train.tsv"
    file.write_text("question1\tquestion2\tis_duplicate\na\tb\t0\nbroken\nc\td\t1\n")
    with pytest.raises(UserError, match="line 3 has 1 columns, not 3"):
        read_glue_tsv(file, TASKS["qqp"])
    assert len(read_glue_tsv(file, TASKS["qqp"], skip_bad=True)) == 2
    file.write_text("question1\tquestion1\tquestion2\tis_duplicate\na\tb\tc\t0\n")
    with pytest.raises(UserError, match="two columns are called 'question1'"):
        read_glue_tsv(file, TASKS["qqp"])
    file.write_text("nothing known\n")
    with pytest.raises(UserError, match="question1"):
        read_glue_tsv(file, TASKS["qqp"])


BROKEN = {
    "quote never closed": ("own.csv", 'text,label\n"open,1\n', "line 2"),
    "quote in the middle": ("own.csv", 'text,label\n"a"b,1\n', "line 2"),
    "two columns of one name": ("own.csv", "text,label,label\na,b,c\n", "called 'label'"),
    "the same in a TSV": ("own.tsv", "text\ttext\tlabel\na\tb\tc\n", "called 'text'"),
    "a cell too many": ("own.csv", "text,label\na,b,c\n", "line 2 has 3 columns"),
    "JSON line broken": ("own.jsonl", '{"text": 1}\n{"text": \n', "line 2"),
    "JSON line a list": ("own.jsonl", "[1]\n", "line 1 is no JSON object"),
    "nothing inside": ("own.jsonl", "\n", "holds no examples"),
    "unknown suffix": ("own.xls", "x", "unknown kind of file"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_own_files_that_are_broken_are_named(tmp_path: Path, name: str) -> None:
    file_name, content, message = BROKEN[name]
    (tmp_path / file_name).write_text(content)
    with pytest.raises(UserError, match=message):
        read_file(tmp_path / file_name, TASKS["classify"])


def test_csv_with_blank_lines_bom_and_texts_of_any_length(tmp_path: Path) -> None:
    long = "a good film " * 20_000
    text = f'\ufefftext,label\r\n\r\n"{long}",1\r\n"b ""c""",0\r\n\r\n'
    (tmp_path / "a.csv").write_text(text, encoding="utf-8", newline="")
    assert read_csv(tmp_path / "a.csv") == [
        {"text": long, "label": "1"},
        {"text": 'b "c"', "label": "0"},
    ]


@pytest.mark.parametrize(
    ("tokens", "tags", "message"),
    [
        (["a", "b"], ["O"], "sentence 2: 2 words, 1 tags"),
        (["a", "b"], [0, 1], "no list of texts"),
        ("a b", ["O", "O"], "no list of texts"),
        (["a", "b"], None, "tags is null"),
        (["a", "b"], ["O", "PER"], "tag 'PER'"),
    ],
)
def test_jsonl_tags_are_checked_as_those_of_conll_files(
    tmp_path: Path, tokens, tags, message: str
) -> None:
    good = {"tokens": ["a", "b"], "tags": ["I-PER", "I-PER"]}
    file = tmp_path / "a.jsonl"
    file.write_text(json.dumps(good))
    assert read_file(file, TASKS["ner"])[0]["tags"] == ["B-PER", "I-PER"]
    file.write_text("\n".join(map(json.dumps, (good, {"tokens": tokens, "tags": tags}))))
    with pytest.raises(UserError, match=message):
        read_file(file, TASKS["ner"])


def test_bytes_that_are_not_utf8_are_named(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "\xe9"}\n')
    with pytest.raises(UserError, match="byte 10 is not UTF-8"):
        read_jsonl(tmp_path / "a.jsonl")
    (tmp_path / "b.csv.gz").write_bytes(gzip.compress(b"text,label\n" * 99)[:-9])
    with pytest.raises(UserError, match="b.csv.gz"):
        read_csv(tmp_path / "b.csv.gz")


def test_b03_only_line_feeds_end_a_row(tmp_path: Path) -> None:
    text = "one\u2028two\u0085three\x0bfour\x0cfive\x1csix"
    (tmp_path / "a.tsv").write_text(f"sentence\tlabel\n{text}\t1\r\n", encoding="utf-8", newline="")
    rows = read_file(tmp_path / "a.tsv", TASKS["sst-2"])
    assert rows == [{"sentence": text, "label": "1"}]


def test_wnut_sentences_end_at_lines_with_one_tab(real_data: Path) -> None:
    splits = read_splits(TASKS["wnut-17"], str(real_data / "downstream/wnut17"), {}, False)
    assert {name: len(rows) for name, rows in splits.items()} == {
        "train": 3394,
        "dev": 1009,
        "test": 1287,
    }
    kinds = {tag[2:] for row in splits["train"] for tag in row["tags"]} - {""}
    assert kinds == {"corporation", "creative-work", "group", "location", "person", "product"}
    # IOB2 already: nothing was changed.
    assert all(to_iob2(row["tags"], "") == row["tags"] for row in splits["train"])


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ("I-PER I-PER O I-LOC", "B-PER I-PER O B-LOC"),  # IOB1
        ("I-PER B-PER I-PER", "B-PER B-PER I-PER"),  # IOB1, two neighbours
        ("I-PER I-LOC", "B-PER B-LOC"),
        ("B-PER I-PER O", "B-PER I-PER O"),  # IOB2
        ("B-PER I-PER E-PER S-LOC O", "B-PER I-PER I-PER B-LOC O"),  # IOBES
        ("S-PER I-PER", "B-PER B-PER"),
    ],
)
def test_tags_become_iob2(given: str, wanted: str) -> None:
    assert to_iob2(given.split(), "here") == wanted.split()


def test_conll_2003_lines(tmp_path: Path) -> None:
    file = tmp_path / "train.txt"
    file.write_text(
        "-DOCSTART- -X- O O\n\nEU NNP I-NP I-ORG\nrejects VBZ I-VP O\n\n\nPeter NNP I-NP I-PER"
    )
    assert read_conll(file) == [
        {"tokens": ["EU", "rejects"], "tags": ["B-ORG", "O"]},
        {"tokens": ["Peter"], "tags": ["B-PER"]},
    ]
    file.write_text("# id 7 domain=en\n#\tfrom n-tv\n# # I-NP O\n\n#\tB-LOC\n")
    assert read_conll(file) == [
        {"tokens": ["#"], "tags": ["O"]},
        {"tokens": ["#"], "tags": ["B-LOC"]},
    ]
    file.write_text("EU NNP I-NP PER\n")
    with pytest.raises(UserError, match="tag 'PER'"):
        read_conll(file)
    file.write_text("EU\n")
    with pytest.raises(UserError, match="line 1 has no tag"):
        read_conll(file)


def squad_json(context: str, text: str, start: int) -> str:
    qa = {"id": "q1", "question": "who?", "answers": [{"text": text, "answer_start": start}]}
    return json.dumps({"data": [{"paragraphs": [{"context": context, "qas": [qa]}]}]})


def test_an_answer_that_is_not_in_its_context_is_named(tmp_path: Path) -> None:
    file = tmp_path / "dev.json"
    for start in (5, 99, -7, -99):  # the context's own slice [-7:-4] is "cat"
        file.write_text(squad_json("the cat sat", "cat", start))
        wrong = f"question q1: answer 'cat' is not in the context at {start}$"
        with pytest.raises(UserError, match=re.compile(wrong, re.MULTILINE)):
            read_squad(file)
    for text in ('"who?"', '"the cat sat"', '"cat"'):
        file.write_text(squad_json("the cat sat", "cat", 4).replace(text, "null"))
        with pytest.raises(UserError, match="not SQuAD JSON"):
            read_squad(file)
    file.write_text('{"data": [{"paragraphs": [{}]}]}')
    with pytest.raises(UserError, match="not SQuAD JSON"):
        read_squad(file)


def test_squad_files(real_data: Path) -> None:
    folder = real_data / "downstream"
    rows = read_squad(folder / "squad/squad-v2.0-dev-fragment.json.gz")
    assert len(rows) == 1407 and sum(not row["answers"] for row in rows) == 702
    for language in ("en", "de", "zh", "ar"):
        assert len(read_squad(folder / f"xquad/xquad.{language}.json.gz")) == 1190
