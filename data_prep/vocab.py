"""`python -m data_prep vocab RECIPE`: the tokenizer of a recipe, trained on its text or loaded."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from configs import Progress, Recipe, UserError, load_recipe, make_folder, say
from configs.cli import add_recipe
from configs.files import lock_folder, read_json
from configs.loading import difference

STAMP = "vocab.json"  # also what byte-level BPE calls its vocabulary, which has no settings in it
SHOWN = 8  # lines of what differs


def main(argv: list[str]) -> int | None:
    parser = argparse.ArgumentParser(
        prog="python -m data_prep vocab",
        description=__doc__,
        epilog="vocab.file=PATH loads a vocab.txt, tokenizer.json or .model instead of training.",
    )
    add_recipe(parser, "e.g. vocab.size=8192")
    arguments = parser.parse_args(argv)
    recipe = load_recipe(arguments.recipe, arguments.overrides)
    with lock_folder(Path(recipe.work_dir), "making of a vocabulary"):
        make_vocab(recipe)
    return None


def make_vocab(recipe: Recipe) -> Path:
    """Makes work_dir/vocab, a folder `transformers.AutoTokenizer` opens, or finds it finished.

    Raises:
        UserError: sources or vocabulary cannot be read, a special token is missing, or the folder
            holds the vocabulary of other settings.
    """
    from data_prep.shard_index import digest
    from data_prep.shard_writer import publish_json, remove
    from data_prep.sources import open_source
    from data_prep.tokenizer import load, train

    folder = Path(recipe.work_dir) / "vocab"
    settings: dict[str, Any] = {"vocab": asdict(recipe.vocab)}
    if recipe.vocab.file:
        tokenizer = load(recipe.vocab)
        make_folder(folder)
        settings["fingerprint"] = tokenizer.fingerprint
        sources = []
    else:
        if not recipe.sources:
            raise UserError("the recipe has no sources", "add `sources:`, or vocab.file")
        sources = [open_source(source) for source in recipe.sources]
        make_folder(folder)  # refused now rather than after the reading
        ranges = [source.ranges() for source in sources]
        settings["sources"] = {
            f"{number} {source.name}": digest([r.fingerprint for r in units])
            for number, (source, units) in enumerate(zip(sources, ranges))
        }
    stamp = folder / STAMP
    there = read_json(stamp, f"move {folder} away to make it anew") if stamp.is_file() else {}
    if isinstance(there.get("vocab"), dict):
        if not (folder / "tokenizer.json").is_file():
            raise UserError(
                f"{folder}/tokenizer.json is missing",
                f"delete {folder} and run the same command again",
            )
        if changes := difference(there, settings):
            more = [f"and {len(changes) - SHOWN:,} more"] if len(changes) > SHOWN else []
            shown = "\n  ".join(changes[:SHOWN] + more)
            raise UserError(
                f"{folder} holds a vocabulary made from something else:\n  {shown}",
                f"set another work_dir, or delete {folder} (shards made with it become stale)",
            )
        say(f"{folder} is complete ({load(folder).vocab_size:,} tokens)")
        return folder
    # An imported model's, or put there by hand; beside a vocab.json of its own it has no stamp.
    if (folder / "tokenizer.json").is_file() and not stamp.exists():
        if recipe.vocab.file and load(folder).fingerprint == tokenizer.fingerprint:
            publish_json(stamp, settings)
            say(f"{folder} is the tokenizer of vocab.file already")
            return folder
        raise UserError(
            f"{folder} holds a tokenizer that this command did not make",
            f"keep it with vocab.file={folder}/tokenizer.json, or move it away to make another",
        )
    if any(folder.iterdir()):  # what this command makes appears by one rename
        raise UserError(
            f"{folder} holds files that this command did not make",
            "move them away, or keep a tokenizer among them with vocab.file=PATH in another work_dir",
        )
    if not recipe.vocab.file:
        tokenizer = train(recipe.vocab, sample_text(recipe, sources, ranges))
        if tokenizer.vocab_size < recipe.vocab.size:
            say(
                f"warning: the text gave {tokenizer.vocab_size:,} tokens, fewer than"
                f" vocab.size={recipe.vocab.size:,}: more text, a larger sample_mb or a smaller"
                " min_frequency would give more"
            )
    fresh = folder.with_name(".vocab.making")
    remove(fresh)
    make_folder(fresh)
    tokenizer.save(fresh)
    publish_json(fresh / STAMP, settings)
    remove(folder)
    fresh.rename(folder)
    say(f"made {folder}: {tokenizer.kind}, {tokenizer.vocab_size:,} tokens")
    return folder


def sample_text(recipe: Recipe, sources: list[Any], ranges: list[list[Any]]) -> Iterator[str]:
    """Paragraphs of about vocab.sample_mb of text: the first part of every unit of every source."""
    from data_prep.sources import Tally

    total = sum(unit.size for units in ranges for unit in units)
    wanted = recipe.vocab.sample_mb * 1e6
    share = min(1.0, wanted / max(total, 1)) if wanted else 1.0
    with Progress(max(total, 1), "vocabulary: read text", "B") as bar:
        for source, units in zip(sources, ranges):
            for unit in units:
                left = share * unit.size
                for document in source.documents(unit, Tally()):
                    for paragraph in document.paragraphs:
                        yield paragraph
                        left -= len(paragraph.encode("utf-8", "surrogatepass"))
                    if share < 1 and left <= 0:
                        break
                bar.update(unit.size)
