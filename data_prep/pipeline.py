"""The whole build: units -> tokenised documents -> rows -> shuffled parts -> index.

Every step is a list of tasks, each a pure function of its input that publishes one file by rename;
what is there and whole is not done again. Nothing here depends on how many workers run the tasks.
The code below runs the same on every MPI rank; `executor.once` runs on one and tells the others.

Folders: work_dir/shards/.documents/<digest>/ tokenised documents, shared by all sets of a recipe;
work_dir/shards/<set>/.build/ rows of a set; both are removed when they are no longer needed.
"""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from configs import Recipe, UserError, make_folder, say
from configs.files import lock_folder, read_json
from configs.loading import difference
from configs.objectives import pairs_at_most
from data_prep.arrays import load_arrays
from data_prep.documents import (
    DOCUMENTS_PER_BUCKET,
    Context,
    Unit,
    find_duplicates,
    tokenise_unit,
)
from data_prep.executor import Executor
from data_prep.groups import make_groups
from data_prep.rows import HELD_OUT, TRAIN, Group, PartTask, SetContext, build_group, build_part
from data_prep.settings import (
    check_disk,
    check_recipe,
    document_settings,
    mask_cap,
    set_changes,
    set_settings,
)
from data_prep.shard_index import INDEX, digest, pack_bools, read_index
from data_prep.shard_writer import finish_folder, publish_json, remove
from data_prep.shards import Layout, open_shards
from data_prep.sources import open_source
from data_prep.summary import counted, report
from data_prep.tokenizer import load

BYTES_PER_TOKEN = 4.0  # of English text; below the usual 4.4, so that the estimate is safe


@dataclass
class Plan:
    """What is to be built, made once and the same on every rank."""

    recipe: Recipe
    context: Context
    units: list[Unit]
    names: list[str]  # of the sources
    settings: dict[str, Any]  # of the documents
    tokenizer: dict[str, Any]  # for the index


def build_recipe(recipe: Recipe, names: list[str], executor: Executor) -> list[Path]:
    """Builds the named shard sets of a recipe; returns their folders.

    Raises:
        UserError: anything wrong with recipe, sources, vocabulary, disk, or an older build in the
            same folder that was made from something else (the difference is shown).
    """
    plan = executor.once(lambda: make_plan(recipe, names))
    shards = Path(recipe.work_dir) / "shards"
    with lock_folder(shards, "build") if executor.is_lead else nullcontext():
        todo = executor.once(lambda: [n for n in names if not _finished(plan, n)])
        if todo:
            counts = _documents(plan, todo, executor)
            for name in todo:
                _build_set(plan, name, counts, executor)
        if executor.is_lead and all((shards / n / INDEX).is_file() for n in recipe.shards):
            remove(shards / ".documents")
    return [shards / name for name in names]


def make_plan(recipe: Recipe, names: list[str]) -> Plan:
    """Checks everything that can be checked, opens the sources and fingerprints their content.

    Raises:
        UserError: no vocabulary, another one than the recipe's, a source without text, ...
    """
    check_recipe(recipe, names)
    vocab = Path(recipe.work_dir) / "vocab"
    if not (vocab / "tokenizer.json").is_file():
        raise UserError(
            f"{vocab}: no vocabulary yet", "run `python -m data_prep vocab RECIPE` first"
        )
    tokenizer = load(vocab)
    described = {
        "kind": tokenizer.kind,
        "vocab_size": tokenizer.vocab_size,
        "fingerprint": tokenizer.fingerprint,
        "special_ids": tokenizer.special_ids,
        "switches": tokenizer.switches,
    }
    opened = [open_source(source) for source in recipe.sources]
    say(f"reading the fingerprints of {len(opened)} sources")
    units: list[Unit] = []
    inputs = []
    for number, source in enumerate(opened):
        ranges = source.ranges()
        if not ranges:
            raise UserError(f"source {source.name!r} is empty", "check its path")
        inputs.append(digest([r.fingerprint for r in ranges]))
        units += [Unit(len(units) + k, number, r) for k, r in enumerate(ranges)]
    sources = [source.name for source in opened]
    settings = document_settings(
        recipe.sources, sources, inputs, described, recipe.prep.abbreviations
    )
    folder = Path(recipe.work_dir) / "shards" / ".documents" / digest(settings)[:16]
    context = Context(recipe.sources, recipe.prep, vocab, folder, len(units))
    described = described | {"word_start": pack_bools(tokenizer.word_start)}
    return Plan(recipe, context, units, sources, settings, described)


def _finished(plan: Plan, name: str) -> bool:
    """Whether the set is complete and of this recipe; refuses a folder of another one."""
    folder = Path(plan.recipe.work_dir) / "shards" / name
    settings = set_settings(plan.recipe, name, plan.settings)
    started = folder / ".build" / "settings.json"
    anew = f"delete {folder} to build it anew"
    if (folder / INDEX).is_file():
        index = read_index(folder)
        changes = set_changes(index, settings, plan.recipe.shards[name])
    elif started.is_file():
        changes = difference(read_json(started, anew), settings)
    else:
        return False
    if changes:
        shown = "\n  ".join(changes)
        raise UserError(
            f"{folder} was built from something else:\n  {shown}",
            f"set another work_dir or name of the set, or {anew}",
        )
    if not (folder / INDEX).is_file():
        return False
    try:
        open_shards(folder)
        if index["held_out"]:
            open_shards(folder / HELD_OUT)
    except UserError as error:
        if difference(index["settings"], settings):  # what would be added had another cap
            raise UserError(error.what, anew) from None
        say(f"{error.what}: building what is missing")
        return False
    remove(folder / ".build")
    say(f"{folder} is complete; `python -m data_prep verify` checks every byte")
    return True


def _documents(plan: Plan, todo: list[str], executor: Executor) -> list[dict[str, Any]]:
    """Tokenises every unit and looks for duplicates; counts of each unit.

    todo: the sets to be built from them, whose need of disk is told and checked first.
    """
    context = plan.context
    size = sum(unit.range.size for unit in plan.units)

    def prepare() -> None:
        for other in context.folder.parent.glob("*"):
            if other != context.folder:
                remove(other)  # of an older recipe: never used again
        make_folder(context.folder)
        # One copy is the documents, then each set's parts, and the rows of one set at a time.
        passes = [plan.recipe.shards[n].dupe_factor for n in todo]
        copies = 1 + max(max(s.weight for s in plan.recipe.sources), 1.0) * (
            sum(passes) + max(passes)
        )
        per_copy = size / BYTES_PER_TOKEN * (2 if plan.tokenizer["vocab_size"] <= 65536 else 4)
        need = int(per_copy * 1.1 * copies)
        sets = Path(plan.recipe.work_dir) / "shards"
        made = sum(_bytes_in(f) for f in (context.folder, *(sets / name for name in todo)))
        check_disk(context.folder, max(0, need - made), "the build")

    executor.once(prepare)
    sizes = [unit.range.size for unit in plan.units]
    counts = executor.map(tokenise_unit, context, plan.units, sizes, "read and tokenise")
    if not sum(c["documents"] for c in counts):
        dropped: Counter[str] = sum((Counter(c["dropped"]) for c in counts), Counter())
        first = {reason: name for c in reversed(counts) for reason, name in c["first"].items()}
        why = f" (dropped: {counted(dropped, first)})" if dropped else ""
        raise UserError(
            f"the sources hold no document with text{why}",
            "check sources[].kind and path; text is read as UTF-8: iconv -f ENCODING -t UTF-8",
        )
    if context.prep.drop_duplicates:
        context.buckets = 1 + sum(c["documents"] for c in counts) // DOCUMENTS_PER_BUCKET
        buckets = range(context.buckets)
        executor.map(
            find_duplicates, context, buckets, [1] * len(buckets), "find duplicates", "buckets"
        )
    return counts


def _bytes_in(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _build_set(plan: Plan, name: str, counts: list[dict[str, Any]], executor: Executor) -> None:
    shards = plan.recipe.shards[name]
    folder = Path(plan.recipe.work_dir) / "shards" / name
    settings = set_settings(plan.recipe, name, plan.settings)
    layout = Layout(shards.max_length, plan.tokenizer["vocab_size"], shards.static_masks)
    context = SetContext(
        plan.context, shards, plan.recipe.masking, mask_cap(plan.recipe, name),
        plan.recipe.seed, layout, plan.tokenizer["special_ids"], digest(settings)[:32],
        folder / ".build", folder,
    )  # fmt: skip
    if executor.is_lead:
        short = pairs_at_most(shards.pair_max_length)
        say(f"{name}: {shards.objective} rows of at most {shards.max_length} tokens{short}")

    def start() -> tuple[list[Group], list[dict[str, Any]]]:
        make_folder(context.work)
        for kind in (TRAIN, HELD_OUT):
            make_folder(context.folder_of(kind))
            (context.folder_of(kind) / INDEX).unlink(missing_ok=True)
        publish_json(context.work / "settings.json", settings)
        return make_groups(context, plan.units, plan.names, counts)

    groups, used = executor.once(start)
    sizes = [group.tokens for group in groups]
    made = executor.map(build_group, context, groups, sizes, f"{name}: make rows", "tokens")
    tasks = executor.once(lambda: _parts(context, groups, made, plan.recipe.prep.part_mb))
    entries = executor.map(
        build_part, context, tasks, [1] * len(tasks), f"{name}: shuffle into parts", "parts"
    )
    executor.once(lambda: _finish(plan, context, settings, groups, made, tasks, entries, used))


def _parts(
    context: SetContext, groups: list[Group], made: list[dict[str, Any]], part_mb: int
) -> list[PartTask]:
    tasks = []
    for kind in (TRAIN, HELD_OUT):
        own = tuple(g for g, m in zip(groups, made) if g.kind == kind and m["rows"])
        tokens = sum(m["tokens"] for g, m in zip(groups, made) if g.kind == kind)
        rows = sum(m["rows"] for g, m in zip(groups, made) if g.kind == kind)
        masks = 1.3 if context.layout.static_masks else 1.0  # 15% of the tokens, twice
        size = int(tokens * np.dtype(context.layout.token_type).itemsize * masks) + rows * 8
        total = -(-size // (part_mb << 20))
        tasks += [PartTask(kind, number, total, own) for number in range(total)]
    if any(task.kind == TRAIN for task in tasks):
        return tasks
    remove(context.work)  # else the same set with other settings would be refused
    if tasks:
        raise UserError(
            f"prep.held_out={context.documents.prep.held_out:g} held out every document that gives rows",
            "give more text, cut it into more documents (sources.N.document=window or chapter), or"
            " set prep.held_out=0; a source's weight below 1 leaves documents out as well",
        )
    raise UserError(
        "not a single training row came out of the sources",
        "more text is needed: a row of two segments takes a document of two sentences or two documents;"
        " a source's weight below 1 leaves documents out",
    )


def _finish(
    plan: Plan, context: SetContext, settings: dict[str, Any], groups: list[Group],
    made: list[dict[str, Any]], tasks: list[PartTask], entries: list[dict[str, Any]],
    used: list[dict[str, Any]],
) -> None:  # fmt: skip
    """Publishes held-out/ first and the set's own index last; clears the intermediate files."""
    for kind in (HELD_OUT, TRAIN):
        own = [(task, entry) for task, entry in zip(tasks, entries) if task.kind == kind]
        folder = context.folder_of(kind)
        if not own:
            remove(folder)
            if kind == HELD_OUT and context.documents.prep.held_out:
                say(
                    "warning: no document was held out: for evaluation rows raise prep.held_out, or give "
                    "more documents (sources.N.document=window cuts them)"
                )
            continue
        counts: Counter[str] = Counter()
        for group, meta in zip(groups, made):
            if group.kind == kind:
                counts.update(meta["counts"])
        wanted = {entry["file"] for _, entry in own}
        for stray in [*folder.glob("part-*.arrow"), *folder.glob(".*.tmp")]:
            if stray.name not in wanted:
                stray.unlink()  # of an earlier, killed or damaged build
        finish_folder(
            folder, context.layout, context.stamp, [entry for _, entry in own],
            (load_arrays(task.receipt(context))[0]["lengths"] for task, _ in own),
            objective=context.shards.objective, mask_cap=context.mask_cap, settings=settings,
            tokenizer=plan.tokenizer, tokenizer_folder=context.documents.vocab, sources=used,
            counts=dict(sorted(counts.items())),
            held_out=any(task.kind == HELD_OUT for task in tasks) and kind == TRAIN,
        )  # fmt: skip
    remove(context.work)
    report(context.folder)
