"""`python -m cluster plan RECIPE --gpus N --card H100`: memory, time and GPU-hours before queueing."""

from __future__ import annotations

import argparse
from dataclasses import replace
from itertools import accumulate
from pathlib import Path

from cluster.planner.built import built_fill, built_vocabulary
from cluster.planner.cards import NETWORK, Network, find_card
from cluster.planner.layouts import Plan, evaluate, gpus_for, quickest, recipe_layout
from cluster.planner.measured import MEMORY_WITHIN, TIME_WITHIN, Comparison, compare_all
from cluster.planner.step_time import Layout
from configs import UserError, load_recipe
from configs.cli import add_recipe
from configs.console import duration
from configs.model import model_flops, parameter_count
from configs.objectives import PAIR_OBJECTIVES
from configs.schema import Recipe, ShardsConfig

MEASURED = Path(__file__).resolve().parent.parent / "bench" / "results" / "measured.jsonl"
# Mean over maximum length of sentence pairs from books; Wikipedia's are 0.91 at 128, 0.72 at 512.
FILL = {128: 0.89, 512: 0.85}


def main(argv: list[str]) -> int | None:
    parser = argparse.ArgumentParser(
        prog="python -m cluster plan",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="examples:\n"
        "  python -m cluster plan bert-large-64k --gpus 64 --card H100\n"
        "  python -m cluster plan bert-large-64k --gpus 512 model.preset=megatron-8.3b parallel.tp=8",
    )
    add_recipe(parser, "changes to the recipe")
    parser.add_argument("--gpus", type=int, required=True)
    parser.add_argument("--card", default="H100", help="H100, H200, A100, RTX4090")
    parser.add_argument("--gpus-per-node", type=int, default=8)
    parser.add_argument("--network-gbit", type=float, default=400, help="of each GPU's adapter")
    parser.add_argument("--fill", type=float, default=0, help="mean row length / maximum length")
    parser.add_argument(
        "--minutes", type=float, default=53, help="how many cards finish in this time? (default 53)"
    )
    arguments = parser.parse_intermixed_args(argv)
    for option, good, bounds in (
        ("--gpus", arguments.gpus >= 1, "at least 1"),
        ("--gpus-per-node", arguments.gpus_per_node >= 1, "at least 1"),
        ("--network-gbit", arguments.network_gbit > 0, "above 0"),
        ("--fill", 0 <= arguments.fill <= 1, "from 0 to 1; 0 = as the shards are, or usually"),
        ("--minutes", arguments.minutes > 0, "above 0"),
    ):
        if not good:
            value = getattr(arguments, option[2:].replace("-", "_"))
            raise UserError(f"{option} {value} is out of range", f"give a number {bounds}")
    recipe = load_recipe(arguments.recipe, arguments.overrides)
    if not recipe.phases:
        raise UserError("phases is empty", "give at least one phase")
    card = find_card(arguments.card)
    network = replace(NETWORK, bandwidth=arguments.network_gbit / 8 * 1e9)
    per_node = min(arguments.gpus_per_node, arguments.gpus)
    if recipe.train.precision not in card.precision_gain:
        raise UserError(
            f"train.precision={recipe.train.precision}: an {card.name} has no such arithmetic",
            f"one of {', '.join(card.precision_gain)}",
        )
    notes = not_planned(recipe, arguments.fill)
    recipe.vocab.size = built_vocabulary(recipe) or recipe.vocab.size
    fills = {name: arguments.fill or fill_of(recipe, name) for name in recipe.shards}
    layout = recipe_layout(recipe, arguments.gpus, per_node, card)
    own = evaluate(recipe, layout, card, network, fills)
    best = quickest(recipe, arguments.gpus, per_node, card, network, fills)
    print("\n".join(report(recipe, own, best, fills, notes)))
    goal = gpus_for(recipe, arguments.minutes / 60, arguments.gpus_per_node, card, network, fills)
    print("\n" + goal_line(recipe, goal, arguments.minutes, card.name, network))
    print("\n" + "\n".join(measured_table(compare_all(MEASURED))))
    return None


def fill_of(recipe: Recipe, name: str) -> float:
    """From the shards themselves where they are built, else the usual one for that length."""
    longest = recipe.shards[name].max_length
    return built_fill(recipe, name) or (FILL[128] if longest <= 256 else FILL[512])


def report(
    recipe: Recipe, own: Plan, best: Plan | None, fills: dict[str, float], notes: list[str]
) -> list[str]:
    """The plan as lines: what (with `notes` on it), memory, time, totals."""
    m, layout = own.model, own.layout
    nodes = -(-layout.gpus // layout.gpus_per_node)
    lines = [
        f"{recipe.name}: {parameter_count(m) / 1e6:,.1f}M parameters "
        f"({m.num_layers} layers, {m.hidden_size} wide, {m.num_heads} heads, vocabulary {m.vocab_size})",
        f"{layout.gpus} x {own.card.name} on {nodes} node{'s' * (nodes > 1)}, {recipe.train.precision}"
        + ("" if own.card.measured else "; this card's constants are estimated from data sheets"),
        *notes,
        "",
    ]
    plans = {"as in the recipe": own}
    if best and best.layout != layout:
        plans["quickest that fits"] = best
    lines += _table(
        "",
        plans,
        {
            "tp x dp": lambda p: f"{p.layout.tp} x {p.layout.dp}",
            "zero_stage": lambda p: str(p.layout.zero_stage),
            "engine": lambda p: p.layout.engine,
            "tokens shared out": lambda p: shared_out(p.layout),
            "micro_batch_tokens": lambda p: f"{p.layout.micro_batch_tokens}",
            "activation checkpointing": lambda p: (
                "yes" if p.layout.activation_checkpointing else "no"
            ),
        },
    )
    lines += _table(
        "GB on each GPU",
        plans,
        {part: _memory_cell(part) for part in own.memory}
        | {
            "together": lambda p: f"{p.memory_bytes / 1e9:.1f}",
            f"of {own.card.memory_bytes / 1e9:.0f}": lambda p: "fits" if p.fits else "DOES NOT FIT",
        },
    )
    limited = recipe.train.max_minutes > 0
    for number, phase in enumerate(own.phases):
        names = list(dict.fromkeys(n for p in plans.values() for n in p.phases[number].time.parts))
        steps = f"{'at most ' if limited else ''}{recipe.phases[number].steps:,} updates"
        title = f"ms an update of {phase.name} ({steps}, rows up to {phase.max_length}, "
        title += f"{fills[recipe.phases[number].shards]:.2f} filled)"
        lines += _table(
            title,
            plans,
            {name: _time_cell(number, name) for name in names}
            | {
                "together": lambda p, k=number: f"{1000 * p.phases[k].time.seconds:.1f}",
                "micro-batches": lambda p, k=number: str(p.phases[k].time.micro_batches),
                "TFLOP/s a GPU": lambda p, k=number: f"{_tflops(p, k):.0f}",
                "tokens/s": lambda p, k=number: (
                    f"{p.phases[k].tokens / p.phases[k].time.seconds:,.0f}"
                ),
                **({"updates": lambda p, k=number: f"{p.phases[k].updates:,}"} if limited else {}),
                "hours": lambda p, k=number: f"{p.phases[k].hours:.2f}",
            },
        )
    size = 12 * parameter_count(m)
    every, ends = recipe.checkpoint.every, list(accumulate(p.updates for p in own.phases))
    saves = ends[-1] // every if every else 0
    saves += sum(end % every > 0 if every else 1 for end in ends)  # a phase's end is saved too
    held = recipe.checkpoint.keep + 1  # the oldest goes when the new one is complete
    lines += _table(
        "the whole run",
        plans,
        {
            "real tokens (G)": lambda p: f"{p.tokens / 1e9:.1f}",
            "hours": lambda p: f"{p.hours:.2f}",
            "GPU-hours": lambda p: f"{p.hours * p.layout.gpus:,.0f}",
        },
    )
    if limited:
        lines += [_ended_by(recipe, own), ""]
    lines.append(
        f"a checkpoint has {size / 1e9:.1f} GB; {recipe.checkpoint.keep} kept and one that is written = "
        f"{held * size / 1e9:.1f} GB of disk, {saves} written = {saves * size / 1e9:,.0f} GB"
    )
    if best is None:
        lines += ["", "NO LAYOUT FITS: more GPUs, a higher tp, or a card with more memory"]
    return lines


def not_planned(recipe: Recipe, fill: float) -> list[str]:
    """Settings whose runs differ from any that the planner was fitted to, and what it does not know
    yet. fill: mean over maximum length of all rows, as given; 0 = not given."""
    slow = {
        "train.kernels=plain": recipe.train.kernels == "plain",
        "train.compile=false": not recipe.train.compile,
    }
    said = " and ".join(key for key, is_set in slow.items() if is_set)
    what = "time and memory are predicted for the fused kernels, replayed from CUDA graphs"
    notes = [f"{said} will be slower: {what}"] if said else []
    if rate := recipe.optimizer.orthogonal_lr:
        notes.append(
            f"optimizer.orthogonal_lr={rate:g} will be slower and take more memory: LAMB's updates are "
            "predicted (BERT-large on an H200: 3.8 ms, 15.5 ms with orthogonalised matrices)"
        )
    if recipe.vocab.file and not recipe.model.vocab_size and not built_vocabulary(recipe):
        notes.append(
            f"vocab.file={recipe.vocab.file} is not made into {recipe.work_dir}/vocab yet: "
            f"{recipe.vocab.size:,} tokens (vocab.size) are planned"
        )
    for name in dict.fromkeys(phase.shards for phase in recipe.phases):
        other = _unlike_published(recipe.shards[name])
        if other and not fill and not built_fill(recipe, name):
            notes.append(
                f"shards.{name} is not built yet: its rows ({other}) are planned to be as full as "
                "the published pairs are; --fill says how full"
            )
    return notes


def _unlike_published(shards: ShardsConfig) -> str:
    """What makes rows as full as FILL does not say; "" for pairs as published with BERT."""
    usual = ShardsConfig()
    keys = ("short_seq_prob", "single_prob", "pair_max_length")
    changed = [f"{k} {v:g}" for k in keys if (v := getattr(shards, k)) != getattr(usual, k)]
    kind = [shards.objective] if shards.objective not in PAIR_OBJECTIVES else []
    return ", ".join(kind + changed)


def _ended_by(recipe: Recipe, plan: Plan) -> str:
    """Which of the two ends a training that has a limit of time."""
    minutes, steps = recipe.train.max_minutes, sum(phase.steps for phase in recipe.phases)
    what = f"train.max_minutes={minutes:g}"
    if plan.updates == steps:
        return f"{what} is more than its {steps:,} updates take: {duration(plan.hours * 3600)}"
    return (
        f"{what} leaves {plan.updates:,} of {steps:,} updates ({duration(plan.hours * 3600)}); "
        f"all of them would take {duration(plan.whole_hours * 3600)}"
    )


def _memory_cell(part: str):
    return lambda p: f"{p.memory.get(part, 0) / 1e9:.2f}"


def _time_cell(phase: int, part: str):
    return lambda p: f"{1000 * p.phases[phase].time.parts.get(part, 0):.1f}"


def shared_out(layout: Layout) -> str:
    """How tensor-parallel ranks come by each other's tokens, in words."""
    if layout.peers:
        return "by copy engines"
    return "by collectives" if layout.sequence_parallel else "no"


def _tflops(plan: Plan, number: int) -> float:
    """Model FLOP/s of a GPU, as the trainer's telemetry counts them."""
    phase = plan.phases[number]
    rows = phase.tokens / phase.length
    flops = model_flops(
        plan.model,
        int(phase.tokens),
        int(phase.tokens * phase.length),
        int(phase.masked * phase.tokens),
        int(rows),
    )
    return flops / phase.time.seconds / plan.layout.gpus / 1e12


def _table(title: str, plans: dict[str, Plan], rows: dict) -> list[str]:
    lines = [f"{title:<28}" + "".join(f"{name:>20}" for name in plans)]
    if len(title) > 27:
        lines = [title, " " * 28 + "".join(f"{name:>20}" for name in plans)]
    for name, cell in rows.items():
        lines.append(f"  {name:<26}" + "".join(f"{cell(plan):>20}" for plan in plans.values()))
    return [*lines, ""]


def goal_line(
    recipe: Recipe, plan: Plan | None, minutes: float, card: str, network: Network
) -> str:
    """How many cards finish in `minutes`."""
    if plan is None:
        return (
            f"No number of {card}s finishes {recipe.name} in {minutes:.0f} minutes on this network."
        )
    layout = plan.layout
    return (
        f"{layout.gpus} {card}s ({layout.gpus // layout.gpus_per_node} nodes, "
        f"{network.bandwidth * 8 / 1e9:.0f} Gbit/s a GPU) finish {recipe.name} in {minutes:.0f} minutes: "
        f"tp {layout.tp} x dp {layout.dp}, {duration(plan.hours * 3600)}."
        + (f" There {_ended_by(recipe, plan)}." if plan.hours < plan.whole_hours else "")
    )


def measured_table(comparisons: list[Comparison]) -> list[str]:
    """Predicted against measured for every run in bench/results/measured.jsonl."""
    if not comparisons:
        return ["No measured run in bench/results/measured.jsonl to hold these figures against."]
    width = max(len(c.what) for c in comparisons)
    lines = [f"{'predicted against measured':<{width}}  {'ms an update':>22}  {'GB':>18}"]
    for c in comparisons:
        lines.append(
            f"{c.what:<{width}}  {c.predicted_ms:8.1f} {c.step_ms:8.1f} {c.time_error:+5.0%}"
            + (
                f"  {c.predicted_gb:6.1f} {c.memory_gb:6.1f} {c.memory_error:+5.0%}"
                if c.memory_gb
                else f"  {c.predicted_gb:6.1f}      -     -"
            )
            + ("" if c.holds else "  <- off")
        )
    off = sum(not c.holds for c in comparisons)
    lines.append(
        f"{len(comparisons) - off} of {len(comparisons)} within {TIME_WITHIN:.0%} of time and {MEMORY_WITHIN:.0%} of memory"
    )
    return lines
