"""Everything about a training that can be refused is refused here, before torch is imported."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from configs.errors import UserError
from configs.layout import check_layout
from configs.loading import difference, to_dict
from configs.masking import check_rate, highest_rate
from configs.memory import GIB, largest_micro_batch, training_bytes
from configs.model import ModelConfig, parameter_count
from configs.phases import phase_ends
from configs.schema import Recipe
from configs.sharing import SMALLEST, copy_engines_serve, may_share
from data_prep.shards import Shards, open_shards
from pretrain.check_disk import check_disk
from pretrain.check_model import check_model
from pretrain.check_origin import check_origin, check_same
from pretrain.check_shards import check_built
from pretrain.checkpoint.folder import (
    KINDS,
    Damaged,
    check_sizes,
    checkpoints,
    missing_kinds,
    read_meta,
)
from pretrain.data.packing import round_up
from pretrain.guard import StopSignals
from pretrain.optim.apex import check_apex
from pretrain.same_tokenizer import check_run_tokenizer

CPU_MICRO_BATCH = 8192


@dataclass
class Plan:
    """What the checks found out, for the trainer."""

    recipe: Recipe
    model: ModelConfig
    rank: int
    world: int
    local_rank: int
    device: str  # cpu | cuda
    shards: dict[str, Shards]
    micro_batch_tokens: int
    newest: int = 0  # step of the newest checkpoint, 0 without one
    origin: str = ""  # what update 0 took its weights from, "" where they were drawn
    spent_s: float = 0.0  # of train.max_minutes, up to it
    phase_ends: list[int] = field(default_factory=list)  # of the phases before the current one
    warnings: list[str] = field(default_factory=list)

    @property
    def tp(self) -> int:
        return self.recipe.parallel.tp

    @property
    def dp(self) -> int:
        return self.world // self.tp

    @property
    def train_dir(self) -> Path:
        return Path(self.recipe.work_dir) / "train"

    @property
    def ends(self) -> list[int]:
        """Updates of the whole run at which each phase has ended, or will unless time ends it."""
        return phase_ends(self.recipe.phases, self.phase_ends)

    @property
    def total(self) -> int:
        """Updates of all phases."""
        return self.ends[-1]

    @property
    def end(self) -> int:
        """Of this start (train.stop_at)."""
        return min(self.recipe.train.stop_at or self.total, self.total)

    def goes_on_from(self, state: Mapping[str, Any]) -> None:
        """state: of a checkpoint. One of before `until` does not tell ends: they are those by steps."""
        self.spent_s = state.get("agreed_s", state.get("spent_s", 0.0))
        self.phase_ends = list(state.get("phase_ends", []))[: len(self.recipe.phases) - 1]

    @property
    def finished(self) -> bool:
        return self.newest >= self.end or self.out_of_time

    @property
    def out_of_time(self) -> bool:
        return 0 < 60 * self.recipe.train.max_minutes <= self.spent_s


def check(recipe: Recipe, env: Mapping[str, str]) -> Plan:
    """The plan of this process. env: as `cluster.environment.distributed_environment` gives it.

    Raises:
        UserError: the recipe cannot be trained here; names keys and numbers.
    """
    world, rank = int(env["WORLD_SIZE"]), int(env["RANK"])
    if not recipe.phases:
        raise UserError("phases is empty", "give at least one phase")
    StopSignals(recipe.guard.save_signals)  # refuses what is none
    check_layout(recipe, world)
    if recipe.optimizer.implementation == "apex":
        check_apex()
    cards = _cards()
    device = "cuda" if cards else "cpu"
    if device == "cpu" and recipe.train.precision in ("fp16", "fp8"):
        raise UserError(
            f"train.precision={recipe.train.precision} needs a GPU, and none is visible",
            "use train.precision=bf16 or fp32 on a CPU",
        )
    if device == "cuda":
        _check_precision(recipe.train.precision)
    if device == "cpu" and recipe.optimizer.implementation in ("deepspeed", "apex"):
        raise UserError(
            f"optimizer.implementation={recipe.optimizer.implementation} runs on a GPU only",
            "use optimizer.implementation=lambert on a CPU",
        )
    shards = _open_all(recipe)
    first = next(iter(shards.values()))
    notes = check_built(recipe, shards)
    model, odd = check_model(recipe, first, shards)
    plan = Plan(
        recipe,
        model,
        rank,
        world,
        int(env["LOCAL_RANK"]),
        device,
        shards,
        micro_batch_tokens=0,
        warnings=notes + odd,
    )
    _check_batches(recipe, plan)
    _check_checkpoint(recipe, plan)
    if plan.finished:
        return plan
    plan.micro_batch_tokens = _micro_batch(recipe, plan, cards)
    if device == "cuda" or recipe.optimizer.implementation == "deepspeed":
        _check_compiler(recipe)
    check_disk(recipe, plan)
    return plan


def _open_all(recipe: Recipe) -> dict[str, Shards]:
    opened: dict[str, Shards] = {}
    for phase in recipe.phases:
        root = Path(recipe.train.shards_dir or f"{recipe.work_dir}/shards")
        folder = root / phase.shards
        if not folder.is_dir():
            # A build writes into work_dir alone.
            copied = (
                f"copy {recipe.work_dir}/shards/{phase.shards} there, or leave train.shards_dir out"
            )
            built = "build them first: python -m data_prep build RECIPE"
            raise UserError(f"{folder}: no shards", copied if recipe.train.shards_dir else built)
        opened.setdefault(phase.shards, open_shards(folder))
    prints = {name: s.tokenizer_fingerprint for name, s in opened.items()}
    if len(set(prints.values())) > 1:
        raise UserError(
            f"the shard sets were built with different tokenizers: {prints}",
            "rebuild them with one vocabulary",
        )
    if recipe.train.probe and not Path(recipe.train.probe).is_file():
        raise UserError(f"train.probe={recipe.train.probe}: no such file", "name a BLiMP parquet")
    vocab = Path(recipe.work_dir) / "vocab" / "tokenizer.json"
    if not vocab.is_file():
        raise UserError(f"{vocab} is missing", "make it: python -m data_prep vocab RECIPE")
    for s in opened.values():
        check_run_tokenizer(vocab, s.folder)
    return opened


def _check_batches(recipe: Recipe, plan: Plan) -> None:
    tokens = recipe.parallel.micro_batch_tokens
    for number, phase in enumerate(recipe.phases):
        shards = plan.shards[phase.shards]
        check_rate(number, phase, shards.max_length, shards.mask_cap, shards.layout.static_masks)
        longest = round_up(shards.max_length, SMALLEST)
        if phase.global_batch < plan.dp:
            raise UserError(
                f"phases.{number}.global_batch={phase.global_batch} rows cannot be shared out over "
                f"{plan.dp} data-parallel processes",
                f"use at least {plan.dp} rows, or fewer processes",
            )
        if tokens and tokens < longest:
            raise UserError(
                f"parallel.micro_batch_tokens={tokens} is below the {longest} tokens (a multiple "
                f"of {SMALLEST}) that the longest row of shards.{phase.shards} takes",
                f"use at least {longest}, or 0 for the largest that fits",
            )


def _check_checkpoint(recipe: Recipe, plan: Plan) -> None:
    found = checkpoints(plan.train_dir) if recipe.checkpoint.resume else []
    if not found:
        if recipe.checkpoint.init_from:
            check_origin(recipe, plan)
        return
    newest = _newest(plan, found)
    if newest is None:
        return
    step, folder, meta = newest
    check_same(meta, plan, str(folder))
    absent = missing_kinds(meta, KINDS)
    if absent and step > 0:
        raise UserError(
            f"{folder} lacks {', '.join(absent)}: training cannot go on from it exactly",
            "start a new work_dir with checkpoint.init_from=... (weights alone, fresh moments)",
        )
    if "state" not in meta and not absent:
        raise UserError(f"{folder} has no optimiser and schedule state", "resume from an older one")
    plan.origin = str(meta.get("origin") or meta.get("imported", {}).get("from", ""))
    first, named = "", recipe.checkpoint.init_from
    if "recipe" in meta:
        first = meta["recipe"].get("checkpoint", {}).get("init_from", "")
        changed = difference(
            _decides(meta["recipe"], meta["model"]), _decides(to_dict(recipe), to_dict(plan.model))
        )
        plan.warnings += [f"changed since {folder.name}: {line}" for line in changed]
    if named not in ("", first):
        plan.warnings.append(f"checkpoint.init_from={named} is not read: {folder} is gone on from")
    recipe.checkpoint.init_from = first  # what is recorded with the next checkpoint stays true


def _newest(plan: Plan, found: list[tuple[int, Path]]) -> tuple[int, Path, dict[str, Any]] | None:
    """(step, folder, meta) of the newest checkpoint that is not damaged, noted in the plan."""
    for step, folder in reversed(found):
        try:
            meta = read_meta(folder)
            check_sizes(folder, meta)
            plan.newest = step
            plan.goes_on_from(meta.get("state", {}))
            # No trainer is going to load it. On all ranks, or some would wait for those that left.
            if plan.finished:
                _check_bytes(folder)
        except Damaged:
            continue  # the trainer falls back likewise and says so
        return step, folder, meta
    plan.newest = 0
    plan.goes_on_from({})
    return None


def _check_bytes(folder: Path) -> None:
    from pretrain.checkpoint.reader import Reader  # imports torch

    with Reader(folder) as reader:
        reader.check()


def _decides(recipe: dict[str, Any], model: dict[str, Any]) -> dict[str, Any]:
    """What of a recipe the losses hang on, beside the shards and the layout."""
    kept = {key: recipe.get(key) for key in ("seed", "masking", "optimizer", "phases")}
    # A checkpoint of before those keys was trained at masking.probability, by steps, by Adam's update.
    new = {"mask_probability": 0.0, "until": 0.0}
    kept["phases"] = [{**new, **phase} for phase in kept["phases"] or []]
    kept["optimizer"] = {"orthogonal_lr": 0.0, **(kept["optimizer"] or {})}
    train = {"nsp_weight": 1.0, "max_minutes": 0.0, **(recipe.get("train") or {})}
    keys = ("precision", "nsp_weight", "max_minutes")  # the rates follow the time
    of_train = {f"train.{key}": train.get(key) for key in keys}
    return {**kept, "model": model, **of_train}


def _cards() -> list[int]:
    """Memory in bytes of the GPUs of this machine, [] where there is none; 0 = not known."""
    if os.environ.get("CUDA_VISIBLE_DEVICES") == "":
        return []
    found = _ask_cards("memory.total")
    if not found and Path("/dev/nvidia0").exists():
        return [0]  # a container without nvidia-smi
    # "[N/A]" and the like: the card is there. Other text ("No devices were found") is no card.
    known = (value for value in found if value.isdigit() or value.startswith("["))
    return [int(value) * 2**20 if value.isdigit() else 0 for value in known]


def _ask_cards(what: str) -> list[str]:
    """A property of every GPU as nvidia-smi prints it; [] if it cannot say."""
    command = ["nvidia-smi", f"--query-gpu={what}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (subprocess.SubprocessError, OSError):
        return []
    return [line.strip() for line in done.stdout.splitlines()]


def _check_precision(precision: str) -> None:
    """bf16 came with compute capability 8.0 (A100), fp8 with 8.9 (L4, H100)."""
    needed = {"bf16": 8.0, "fp8": 8.9}.get(precision, 0.0)
    for value in _ask_cards("compute_cap"):
        if value.replace(".", "", 1).isdigit() and float(value) < needed:
            raise UserError(
                f"train.precision={precision} needs a GPU of compute capability {needed}, "
                f"this one has {value}",
                "use train.precision=fp16" if needed == 8.0 else "use train.precision=bf16",
            )


def _micro_batch(recipe: Recipe, plan: Plan, cards: list[int]) -> int:
    tokens, parallel, precision = (
        recipe.parallel.micro_batch_tokens,
        recipe.parallel,
        recipe.train.precision,
    )
    card = min(cards, default=0)
    if not card:
        return tokens or CPU_MICRO_BATCH
    longest = max(s.max_length for s in plan.shards.values())
    rate = highest_rate(recipe)
    fits = largest_micro_batch(plan.model, parallel, plan.dp, precision, card, rate)
    # Whether GPUs reach each other, and so keep shares of the tokens, is known only later: what
    # may fit is not refused, and what is chosen here fits either way.
    shares = may_share(plan.tp, parallel.sequence_parallel) and copy_engines_serve(recipe.train)
    counted = replace(parallel, sequence_parallel=True) if tokens and shares else parallel
    need = training_bytes(plan.model, counted, plan.dp, precision, tokens or longest, rate)
    if need > card if tokens else fits < longest:
        raise UserError(
            f"{parameter_count(plan.model) / 1e6:.0f}M parameters with tp={plan.tp}, dp={plan.dp}, "
            f"zero_stage={parallel.zero_stage}, precision={precision} and micro-batches of "
            f"{tokens or longest} tokens need about {need / GIB:.1f} GiB; the card has {card / GIB:.1f}",
            "lower parallel.micro_batch_tokens (0 = the largest that fits), set "
            "parallel.activation_checkpointing=true, raise tp, or use zero_stage=1 on more processes",
        )
    return tokens or fits


def _check_compiler(recipe: Recipe) -> None:
    needs = recipe.train.kernels == "auto" or recipe.optimizer.implementation == "deepspeed"
    found = os.environ.get("CC") or any(shutil.which(name) for name in ("cc", "gcc", "clang"))
    if needs and not found:
        raise UserError(
            "no C compiler (cc, gcc or clang) on this machine, and the GPU kernels are compiled at the start",
            "install gcc, or set train.kernels=plain (and optimizer.implementation=lambert)",
        )
