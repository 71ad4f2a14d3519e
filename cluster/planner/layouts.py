"""A recipe on N cards: does it fit, how long does it take, and which layout is quickest."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from cluster.planner.cards import Card, Network
from cluster.planner.step_time import MASKED, Layout, StepTime, update_time
from configs import UserError
from configs.masking import highest_rate, masking_of
from configs.memory import (
    activation_parts_per_token,
    largest_micro_batch,
    state_parts,
    training_bytes,
)
from configs.model import ModelConfig, resolve_model
from configs.schema import ParallelConfig, Recipe
from configs.sharing import copy_engines_serve, may_share

MICRO_BATCHES = [1024 * k for k in (1, 2, 4, 8, 12, 16, 24, 32, 48, 64)]
TP = (1, 2, 4, 8)


@dataclass
class PhasePlan:
    """One phase: what an update holds and what it costs. updates: its steps, or those that the time
    allows."""

    name: str
    updates: int
    tokens: float  # real tokens of an update
    length: float  # mean real tokens of a row
    max_length: int
    masked: float  # share of the tokens
    time: StepTime = field(default_factory=StepTime)

    @property
    def hours(self) -> float:
        return self.updates * self.time.seconds / 3600


@dataclass
class Plan:
    """A recipe in one layout."""

    model: ModelConfig
    layout: Layout
    phases: list[PhasePlan]
    memory: dict[str, float]  # bytes by part; what the allocator loses and the context included
    card: Card
    whole_hours: float  # of all steps, without a limit of time

    @property
    def hours(self) -> float:
        return sum(phase.hours for phase in self.phases)

    @property
    def updates(self) -> int:
        return sum(phase.updates for phase in self.phases)

    @property
    def tokens(self) -> float:
        return sum(phase.updates * phase.tokens for phase in self.phases)

    @property
    def memory_bytes(self) -> float:
        return sum(self.memory.values())

    @property
    def fits(self) -> bool:
        return self.memory_bytes <= self.card.memory_bytes


def phases_of(recipe: Recipe, fills: dict[str, float]) -> list[PhasePlan]:
    """fills: mean length over maximum length of each shard set."""
    out = []
    for phase in recipe.phases:
        longest = recipe.shards[phase.shards].max_length
        length = longest * fills[phase.shards]
        rate = masking_of(recipe, phase).probability
        tokens = phase.global_batch * length
        out.append(PhasePlan(phase.name, phase.steps, tokens, length, longest, rate))
    return out


def model_of(recipe: Recipe) -> ModelConfig:
    """The model with all sizes filled in; the vocabulary is the recipe's."""
    return resolve_model(recipe.model, recipe.vocab.size)


def memory_parts(model: ModelConfig, layout: Layout, masked: float = MASKED) -> dict[str, float]:
    """Bytes on each GPU, part by part, where a share `masked` of the tokens is masked."""
    parallel, tokens = as_parallel(layout), layout.micro_batch_tokens
    parts = state_parts(model, parallel, layout.dp, layout.precision)
    exchange = parts.pop("exchange", 0) if layout.engine == "deepspeed" else 0  # lean's own buffers
    work = activation_parts_per_token(model, parallel, layout.precision, masked)
    parts |= {name: size * tokens for name, size in work.items()}
    whole = training_bytes(model, parallel, layout.dp, layout.precision, tokens, masked)
    parts["context and allocator"] = whole - exchange - sum(parts.values())
    return parts


def as_parallel(layout: Layout) -> ParallelConfig:
    return ParallelConfig(
        tp=layout.tp,
        zero_stage=layout.zero_stage,
        sequence_parallel=layout.sequence_parallel,
        micro_batch_tokens=layout.micro_batch_tokens,
        activation_checkpointing=layout.activation_checkpointing,
    )


def evaluate(
    recipe: Recipe, layout: Layout, card: Card, network: Network, fills: dict[str, float]
) -> Plan:
    """Memory and time of `recipe` in `layout`."""
    model = model_of(recipe)
    phases = phases_of(recipe, fills)
    for phase in phases:
        phase.time = update_time(
            model, layout, card, network, phase.tokens, phase.length, phase.masked
        )
    hours, memory = sum(p.hours for p in phases), memory_parts(model, layout, highest_rate(recipe))
    end_by_time(recipe, phases)
    return Plan(model, layout, phases, memory, card, hours)


def end_by_time(recipe: Recipe, phases: list[PhasePlan]) -> None:
    """Leaves each phase the updates that train.max_minutes and its own share of them (until) allow."""
    limit, spent = 60 * recipe.train.max_minutes, 0.0
    for given, phase in zip(recipe.phases, phases):
        if limit:
            left = limit * (given.until or 1) - spent
            phase.updates = min(phase.updates, max(0, int(left / phase.time.seconds)))
        spent += phase.updates * phase.time.seconds


def recipe_layout(recipe: Recipe, gpus: int, gpus_per_node: int, card: Card) -> Layout:
    """The recipe's own layout on `gpus` GPUs; micro_batch_tokens 0 becomes the largest that fits.

    Raises:
        UserError: tp does not divide the number of GPUs or of heads.
    """
    parallel, model = recipe.parallel, model_of(recipe)
    if gpus % parallel.tp:
        raise UserError(
            f"parallel.tp={parallel.tp} does not divide --gpus {gpus}", "change one of them"
        )
    if model.num_heads % parallel.tp:
        raise UserError(
            f"parallel.tp={parallel.tp} does not divide the {model.num_heads} heads",
            "choose tp from "
            + ", ".join(str(t) for t in TP if model.num_heads % t == 0 and gpus % t == 0),
        )
    layout = Layout(
        parallel.tp,
        gpus // parallel.tp,
        parallel.zero_stage,
        parallel.micro_batch_tokens,
        parallel.activation_checkpointing,
        gpus_per_node,
        recipe.train.precision,
        engine=engine_of(parallel, gpus // parallel.tp),
    )
    layout = share_tokens(layout, recipe, card)
    if not parallel.micro_batch_tokens:
        # As the trainer, which does not yet know whether tokens will be shared out.
        fits = largest_micro_batch(
            model,
            parallel,
            layout.dp,
            recipe.train.precision,
            int(card.memory_bytes),
            highest_rate(recipe),
        )
        longest = max(recipe.shards[phase.shards].max_length for phase in recipe.phases)
        layout = replace(layout, micro_batch_tokens=max(fits, longest))
    return layout


def share_tokens(layout: Layout, recipe: Recipe, card: Card) -> Layout:
    """With tokens shared out as the trainer will (`pretrain.parallel.exchange.make_exchange`)."""
    wanted = recipe.parallel.sequence_parallel
    if not may_share(layout.tp, wanted):
        return layout
    near = layout.tp <= layout.gpus_per_node and card.copy_engines is not None
    peers = near and copy_engines_serve(recipe.train)
    return replace(layout, sequence_parallel=peers or bool(wanted), peers=peers)


def engine_of(parallel: ParallelConfig, dp: int) -> str:
    """`auto` is DeepSpeed for ZeRO-2 alone, as in the trainer."""
    if parallel.engine != "auto":
        return parallel.engine
    return "deepspeed" if parallel.zero_stage == 2 and dp > 1 else "lean"


def candidates(recipe: Recipe, gpus: int, gpus_per_node: int) -> Iterator[Layout]:
    """Every layout worth trying on `gpus` GPUs; tp stays inside a node."""
    model = model_of(recipe)
    longest = max(recipe.shards[phase.shards].max_length for phase in recipe.phases)
    smallest = min(phase.global_batch for phase in recipe.phases)
    for tp in TP:
        dp = gpus // tp
        if gpus % tp or model.num_heads % tp or tp > gpus_per_node or dp > smallest:
            continue
        for zero in (0, 1) if dp > 1 else (0,):
            for size in MICRO_BATCHES:
                for again in (False, True):
                    if size >= longest:
                        precision = recipe.train.precision
                        yield Layout(tp, dp, zero, size, again, gpus_per_node, precision)


def quickest(
    recipe: Recipe,
    gpus: int,
    gpus_per_node: int,
    card: Card,
    network: Network,
    fills: dict[str, float],
) -> Plan | None:
    """The fitting layout that makes all updates first; among equals the one with most memory left.
    None: none fits."""
    plans = (
        evaluate(recipe, share_tokens(layout, recipe, card), card, network, fills)
        for layout in candidates(recipe, gpus, gpus_per_node)
    )
    fitting = [plan for plan in plans if plan.fits]
    return min(
        fitting, key=lambda plan: (round(plan.whole_hours, 6), plan.memory_bytes), default=None
    )


def gpus_for(
    recipe: Recipe,
    hours: float,
    gpus_per_node: int,
    card: Card,
    network: Network,
    fills: dict[str, float],
) -> Plan | None:
    """The fewest whole nodes that finish `recipe` in `hours`; None when more do not help."""
    low, high = 0, 1
    while True:
        plan = quickest(recipe, high * gpus_per_node, gpus_per_node, card, network, fills)
        if plan and plan.hours <= hours:
            break
        if high >= 1024 or (plan is None and high > 512):
            return None
        low, high = high, 2 * high
    best = plan
    while high - low > 1:
        middle = (low + high) // 2
        plan = quickest(recipe, middle * gpus_per_node, gpus_per_node, card, network, fills)
        if plan and plan.hours <= hours:
            best, high = plan, middle
        else:
            low = middle
    return best
