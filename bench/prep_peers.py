"""Other ways from books to rows, measured on the same text for `python -m bench.prep --peers`.

Those that can be installed, and two whose source is read from $LAMBERT_PEERS when it is there:
`bert/` (google-research/bert, create_pretraining_data.py) and `LDDL/` (NVIDIA/LDDL). Their own
functions run unchanged; what they import and do not use here (TensorFlow, Dask) is stood in for.
"""

from __future__ import annotations

import os
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

from configs.schema import SourceConfig
from data_prep.sentences import Splitter
from data_prep.sources import Document, Tally, open_source

SOURCES = Path(os.environ.get("LAMBERT_PEERS", "peers"))
SAMPLE = 1_000_000  # characters each peer gets: they are slow


def peers(books: Path, vocab: Path) -> dict[str, float]:
    """MB/s of text of each peer that is there."""
    source = open_source(SourceConfig(kind="books", path=str(books), document="chapter"))
    documents: list[Document] = []
    size = 0
    for unit in source.ranges():
        for document in source.documents(unit, Tally()):
            if size < SAMPLE:
                documents.append(document)
                size += sum(len(p.encode()) for p in document.paragraphs)
    found = {}
    for name, make in (
        ("nltk punkt + encode_batch_fast (no pairs, nothing written)", _nltk),
        ("NVIDIA LDDL: split, tokenize, pair (nothing written)", _lddl),
        ("google-research/bert: tokenize, pair, mask (split before, nothing written)", _google),
    ):
        try:
            job = make(documents, vocab)
        except (ImportError, FileNotFoundError) as error:
            print(f"{name}: left out ({error})")
            continue
        start = time.process_time()
        job()
        found[name] = size / 1e6 / (time.process_time() - start)
    return found


def _nltk(documents: list[Document], vocab: Path) -> Callable[[], object]:
    from nltk.tokenize.punkt import PunktSentenceTokenizer
    from tokenizers import Tokenizer

    splitter = PunktSentenceTokenizer()
    backend = Tokenizer.from_file(str(vocab / "tokenizer.json"))

    def job() -> None:
        for document in documents:
            sentences = splitter.tokenize("\n".join(document.paragraphs))
            backend.encode_batch_fast(sentences, add_special_tokens=False)

    return job


def _source_of(name: str, path: Path, package: str | None = None) -> ModuleType:
    module = ModuleType(name)
    module.__dict__["__package__"] = package
    exec(compile(path.read_text(encoding="utf-8"), str(path), "exec"), module.__dict__)
    return module


def _google(documents: list[Document], vocab: Path) -> Callable[[], object]:
    import tempfile

    folder = SOURCES / "bert"
    tensorflow = MagicMock()
    tensorflow.gfile.GFile = lambda path, mode: open(path, mode, encoding="utf-8")  # noqa: SIM115
    sys.modules["tensorflow"] = tensorflow
    try:
        tokenization = _source_of("tokenization", folder / "tokenization.py")
        sys.modules["tokenization"] = tokenization
        creation = _source_of("creation", folder / "create_pretraining_data.py")
    finally:
        sys.modules.pop("tensorflow")
    splitter = Splitter()
    lines = ["\n".join(splitter.split_many(d.paragraphs)) for d in documents]
    with tempfile.NamedTemporaryFile("w", encoding="utf-8", delete=False) as file:
        file.write("\n\n".join(lines) + "\n")

    def job() -> None:
        tokenizer = tokenization.FullTokenizer(str(vocab / "vocab.txt"), do_lower_case=True)
        creation.create_training_instances(
            [file.name], tokenizer, 128, 1, 0.1, 0.15, 20, random.Random(1)
        )
        Path(file.name).unlink()

    return job


def _lddl(documents: list[Document], vocab: Path) -> Callable[[], object]:
    import nltk
    from nltk.tokenize.punkt import PunktSentenceTokenizer
    from transformers import AutoTokenizer

    names = (
        "dask dask.bag dask.distributed lddl lddl.utils lddl.download lddl.download.utils lddl.dask"
    )
    stand_ins = f"{names} lddl.dask.readers lddl.dask.bert lddl.dask.bert.binning".split()
    path = SOURCES / "LDDL/lddl/dask/bert/pretrain.py"
    for name in stand_ins:
        sys.modules.setdefault(name, MagicMock())
    try:
        lddl: Any = _source_of("pretrain", path, package="lddl.dask.bert")
    finally:
        for name in stand_ins:
            sys.modules.pop(name, None)
    lddl.split_id_text = lambda text: ("", text)
    nltk.tokenize.sent_tokenize = PunktSentenceTokenizer().tokenize
    tokenizer = AutoTokenizer.from_pretrained(vocab)

    class Bag(list[Any]):
        def map(self, function: Callable[[Any], Any]) -> Bag:
            return Bag(function(item) for item in self)

        def filter(self, keep: Callable[[Any], bool]) -> Bag:
            return Bag(item for item in self if keep(item))

    def job() -> None:
        texts = Bag("\n".join(document.paragraphs) for document in documents)
        found = tuple(lddl._get_documents(texts, tokenizer))
        for number in range(len(found)):
            lddl.create_pairs_from_document(found, number)

    return job
