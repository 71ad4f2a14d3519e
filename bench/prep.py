"""The whole build against its parts and against peers: `python -m bench.prep [--json]`.

10 MB of books (from $LAMBERT_DATA, or made up when it is not there), bert-base-uncased's vocabulary,
rows of 128 tokens, NSP pairs; everything from reading to shuffled, checksummed parts, in CPU seconds
of one core. In the same run: `tokenizers` encode_batch_fast on the same sentences, two workers, a
Wikipedia dump to prose, and peers (bench/prep_peers.py). The last line of --json has the keys
build_mb_per_s_core and ratio_to_encode_batch_fast.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import random
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from pathlib import Path

os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one core

from bench import wikitext
from bench.data import data_folder
from configs import Recipe
from configs.schema import PrepConfig, ShardsConfig, SourceConfig, VocabConfig
from data_prep.executor import make_executor
from data_prep.pipeline import build_recipe
from data_prep.sentences import Splitter
from data_prep.sources import Tally, open_source
from data_prep.sources.streams import read_all
from data_prep.tokenizer import Tokenizer, load
from data_prep.vocab import make_vocab

FAST = "tokenizers encode_batch_fast"
DATA = data_folder()
MB = 1_000_000


def corpus(folder: Path, size: int) -> int:
    """Books of about `size` bytes of text in `folder`, unpacked; how many bytes they are."""
    folder.mkdir(parents=True)
    total = number = 0
    while total < size:
        for name, text in books(number):
            (folder / f"{number}-{name}").write_text(text, encoding="utf-8")
            total += len(text.encode())
            if total >= size:
                break
        number += 1
    return total


def books(round_: int) -> Iterator[tuple[str, str]]:
    """Name and text of each book; from the second round on with changed words, so that none is a
    duplicate. Made-up ones where $LAMBERT_DATA has none."""
    real = sorted((DATA / "books").glob("*.txt.gz"))
    for book in real:
        text = read_all(book).decode()
        yield book.stem, text.replace(" the ", f" the {round_} ") if round_ else text
    if real:
        return
    chooser = random.Random(round_)
    letters = "etaoinshrdlucmfwypvbgk"
    words = ["".join(chooser.choices(letters, k=chooser.randint(1, 11))) for _ in range(40_000)]
    weights = [1 / (rank + 3) for rank in range(len(words))]
    for number in range(20):
        paragraphs = []
        for _ in range(900):
            found = chooser.choices(words, weights, k=95)
            sentences = (" ".join(found[i : i + 19]).capitalize() + "." for i in range(0, 95, 19))
            paragraphs.append(" ".join(sentences))
        yield f"made-up-{number:02d}.txt", "\n\n".join(paragraphs)


def recipe(work: Path, folder: Path, workers: int) -> Recipe:
    """What is built."""
    vocab = DATA / "vocab/bert-base-uncased/vocab.txt"
    return Recipe(
        name="bench",
        work_dir=str(work),
        sources=[SourceConfig(kind="books", path=str(folder), document="chapter")],
        vocab=VocabConfig(file=str(vocab)) if vocab.is_file() else VocabConfig(size=30522),
        prep=PrepConfig(workers=workers),
        shards={"len128": ShardsConfig(max_length=128)},
    )


def cpu() -> float:
    """CPU seconds of this process and of those it waited for."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def build(work: Path, folder: Path, workers: int) -> tuple[float, float]:
    """CPU and wall seconds of a whole build, the vocabulary apart."""
    chosen = recipe(work, folder, workers)
    with redirect_stdout(io.StringIO()):
        make_vocab(chosen)
        used, start = cpu(), time.perf_counter()
        build_recipe(chosen, list(chosen.shards), make_executor("processes", workers))
    return cpu() - used, time.perf_counter() - start


def timed(work: Callable[[], object]) -> float:
    """CPU seconds of this process."""
    start = time.process_time()
    work()
    return time.process_time() - start


def steps(tokenizer: Tokenizer, folder: Path, mb: float) -> dict[str, float]:
    """MB/s of single steps: reading, splitting, our tokenizing and encode_batch_fast."""
    source = open_source(SourceConfig(kind="books", path=str(folder), document="chapter"))
    units = source.ranges()
    paragraphs: list[str] = []

    def read() -> None:
        for unit in units:
            for document in source.documents(unit, Tally()):
                paragraphs.extend(document.paragraphs)

    rates = {"read books": mb / timed(read)}
    splitter = Splitter()
    sentences = splitter.split_many(paragraphs)
    jobs: dict[str, Callable[[], object]] = {
        "split sentences": lambda: splitter.split_many(paragraphs),
        "tokenize, new words": lambda: tokenizer.encode_sentences(sentences),
        "tokenize, known words": lambda: tokenizer.encode_sentences(sentences),
        FAST: lambda: tokenizer.backend.encode_batch_fast(sentences, add_special_tokens=False),
    }
    rates |= {name: mb / timed(job) for name, job in jobs.items()}
    values, offsets = tokenizer.encode_sentences(sentences)
    expected = tokenizer.backend.encode_batch_fast(sentences, add_special_tokens=False)
    assert values.tolist() == [i for one in expected for i in one.ids], "ids differ"
    assert offsets[-1] == len(values)
    return rates


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--json", action="store_true", help="one JSON line last")
    options.add_argument("--mb", type=float, default=10, help="MB of text")
    options.add_argument("--repeats", type=int, default=3, help="builds; the median counts")
    options.add_argument(
        "--scaling-mb", type=float, default=0, help="MB built with 1 and 2 workers"
    )
    options.add_argument("--peers", action="store_true", help="measure other pipelines, too")
    chosen = options.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="bench-prep-"))
    try:
        mb = corpus(folder / "books", int(chosen.mb * MB)) / MB
        runs = [build(folder / f"run-{n}", folder / "books", 1)[0] for n in range(chosen.repeats)]
        whole = mb / statistics.median(runs)
        rates = steps(load(folder / "run-0" / "vocab"), folder / "books", mb)
        result: dict[str, float] = {
            "build_mb_per_s_core": whole,
            "ratio_to_encode_batch_fast": whole / rates[FAST],
        }
        table = {"**whole build: read, split, tokenize, pair, shuffle, write**": whole, **rates}
        if chosen.peers:
            from bench.prep_peers import peers

            table |= peers(folder / "books", folder / "run-0" / "vocab")
        print(f"{mb:.1f} MB of books, rows of 128, NSP, CPU seconds of one core\n")
        print(f"| step | MB/s | of {FAST} |\n|---|---|---|")
        for name, rate in table.items():
            print(f"| {name} | {rate:.2f} | {rate / rates[FAST]:.2f} |")
        if (DATA / wikitext.DUMP).is_file():
            result["wikipedia_xml_mb_per_s_core"] = wikitext.ours()[1]
            print(
                f"\nWikipedia dump to prose: {result['wikipedia_xml_mb_per_s_core']:.1f} MB/s of XML"
            )
        if chosen.scaling_mb:
            corpus(folder / "more", int(chosen.scaling_mb * MB))
            one, two = (build(folder / f"w{n}", folder / "more", n) for n in (1, 2))
            result["speedup_2_workers"] = one[1] / two[1]
            print(
                f"\n2 workers: {one[1] / two[1]:.2f}x as fast as 1 ({one[1]:.1f} s, {two[1]:.1f} s)"
            )
        if chosen.json:
            print(json.dumps(result))
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
