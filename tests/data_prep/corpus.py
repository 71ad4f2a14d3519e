"""Small text corpora, vocabularies and recipes for the preparation tests."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from pathlib import Path

import numpy as np

from configs import Recipe, load_recipe
from data_prep.executor import Executor
from data_prep.pipeline import build_recipe
from data_prep.vocab import make_vocab

WORDS = [
    "river",
    "stone",
    "maple",
    "garden",
    "winter",
    "ladder",
    "copper",
    "lantern",
    "meadow",
    "harbour",
    "thunder",
    "candle",
    "orchard",
    "saddle",
    "marble",
    "feather",
    "anchor",
    "barley",
    "cotton",
    "ember",
    "falcon",
    "granite",
    "hollow",
    "island",
    "jasper",
    "kettle",
    "linen",
    "mortar",
    "nettle",
    "oyster",
    "pepper",
    "quarry",
    "raven",
    "sickle",
    "timber",
    "velvet",
    "walnut",
    "yarrow",
    "zephyr",
]
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
LETTERS = "abcdefghijklmnopqrstuvwxyz"


def write_vocab(path: Path, words: list[str] = WORDS) -> Path:
    """A vocab.txt of special tokens, marks, letters and `words`."""
    pieces = [*LETTERS, *(f"##{letter}" for letter in LETTERS)]
    path.write_text("\n".join([*SPECIAL, ".", ",", *pieces, *words]) + "\n", "utf-8")
    return path


def sentence(rng: np.random.Generator, shortest: int = 3, longest: int = 20) -> str:
    words = [WORDS[i] for i in rng.integers(0, len(WORDS), rng.integers(shortest, longest))]
    return " ".join(words).capitalize() + "."


def write_texts(folder: Path, files: int = 12, sentences: int = 40, seed: int = 0) -> Path:
    """`files` documents of sentences in paragraphs, one a file."""
    rng = np.random.default_rng(seed)
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(files):
        paragraphs = [
            " ".join(sentence(rng) for _ in range(rng.integers(1, 6)))
            for _ in range(rng.integers(1, max(2, sentences // 3)))
        ]
        (folder / f"{number:03d}.txt").write_text("\n\n".join(paragraphs) + "\n", "utf-8")
    return folder


def recipe_file(folder: Path, text: Path, body: str = "", prep: str = "") -> Path:
    """A recipe over a folder of text files with a hand-made vocabulary."""
    vocab = write_vocab(folder / "vocab.txt")
    path = folder / "recipe.yaml"
    path.write_text(
        f"name: test\nseed: 7\nphases: []\nwork_dir: {folder / 'run'}\n"
        f"sources: [{{kind: text, path: {text}, name: text}}]\n"
        f"vocab: {{file: {vocab}}}\n"
        f"prep: {{held_out: 0.2, part_mb: 1, workers: 1{prep}}}\n"
        + (body or "shards: {len64: {max_length: 64}}\n"),
        "utf-8",
    )
    return path


def build(path: Path, *overrides: str, executor: Executor | None = None) -> Path:
    """vocab and build in this process; returns the shards folder of the recipe."""
    recipe = load_recipe(path, overrides)
    make_vocab(recipe)
    build_recipe(recipe, list(recipe.shards), executor or Executor())
    return Path(recipe.work_dir) / "shards"


def loaded(path: Path, *overrides: str) -> Recipe:
    return load_recipe(path, overrides)


def tree(folder: Path) -> dict[str, str]:
    """Digest of every file below a folder, hidden ones (locks, temporary files) included."""
    return {
        p.relative_to(folder).as_posix(): hashlib.sha256(p.read_bytes()).hexdigest()
        for p in sorted(folder.rglob("*"))
        if p.is_file() and p.name != ".lock"
    }


# Small units of work, so that a small corpus has many of them.
DRIVER = """
import sys
import data_prep.groups, data_prep.sources.base as base
base.SMALL_UNIT = {unit_bytes}
data_prep.groups.GROUP_TOKENS = {group_tokens}
data_prep.groups.GROUP_DOCUMENTS = 2
from configs.errors import run_cli
from data_prep.build import main
run_cli(lambda: main(sys.argv[1:]))
"""


def command(
    path: Path, *overrides: str, unit_bytes: int = 3000, group_tokens: int = 2000
) -> list[str]:
    """The build command as a process of its own, with units of work of `unit_bytes`."""
    code = DRIVER.format(unit_bytes=unit_bytes, group_tokens=group_tokens)
    return [sys.executable, "-c", code, str(path), *overrides]


def run(arguments: list[str], repo: Path, timeout: float = 600) -> subprocess.CompletedProcess[str]:
    return subprocess.run(arguments, cwd=repo, capture_output=True, text=True, timeout=timeout)
