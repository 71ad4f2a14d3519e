"""The model card of an exported folder: where the weights come from and what they scored."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from configs.log import read_log
from configs.model import ModelConfig, parameter_count
from configs.phases import updates_made


def commit() -> str:
    """The git commit of this code, with `-dirty` behind it where files were changed since; "unknown"
    outside a checkout."""
    try:
        done = subprocess.run(
            ["git", "describe", "--always", "--abbrev=40", "--dirty", "--exclude=*"],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            timeout=10,
        )
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return done.stdout.strip() or "unknown"


def last_scores(log: Path, step: int) -> dict[str, dict[str, Any]]:
    """The last "train" and "eval" line of log.jsonl up to `step`; {} where there is no log."""
    upto = [record for record in read_log(log) if record["step"] <= step]
    return {r["kind"]: r for r in upto if r.get("kind") in ("train", "eval")}


def _by_train(recipe: Mapping[str, Any], nsp_head: bool) -> str:
    """What `train` of the recipe says of the training beyond its updates; "" where nothing."""
    train = recipe.get("train", {})
    minutes, weight = train.get("max_minutes") or 0, train.get("nsp_weight", 1.0)
    return (f" Time limit: {minutes:g} minutes." if minutes else "") + (
        f" Weight of the next-sentence loss: {weight:g}." if nsp_head and weight != 1 else ""
    )


def model_card(
    config: ModelConfig,
    meta: Mapping[str, Any],
    scores: Mapping[str, Any],
    code: str,
    mask: str = "[MASK]",
) -> str:
    """README.md with the hub's metadata block."""
    recipe = meta.get("recipe") or {}
    name = recipe.get("name", "bert")
    random = meta.get("imported", {}).get("new_heads", [])
    languages = sorted({source.get("language", "en") for source in recipe.get("sources", [])})
    lines = [
        "---",
        "library_name: transformers",
        "pipeline_tag: fill-mask",
        *(["language:", *(f"- {language}" for language in languages)] if languages else []),
        "tags:",
        "- bert",
        "- fill-mask",
        "- lambert",
        "---",
        "",
        f"# {name}",
        "",
        f"A BERT ({config.num_layers} layers, hidden size {config.hidden_size},"
        f" {config.num_heads} heads, vocabulary {config.vocab_size},"
        f" {parameter_count(config) / 1e6:.1f} M parameters), pretrained with Lambert.",
        "",
        f"Heads: masked LM{' and next-sentence prediction' if config.nsp_head else ''}.",
        *([f"Drawn at random and not trained: {', '.join(random)}."] if random else []),
        "",
        "## Training data",
        "",
    ]
    for source in recipe.get("sources", []):
        label = source.get("name") or Path(source.get("path", "")).name
        lines.append(f"- {label} ({source.get('kind')}, weight {source.get('weight', 1.0):g})")
    if not recipe.get("sources"):
        lines.append("Not recorded: the weights were imported from another layout.")
    lines += [
        "",
        "## Training",
        "",
        f"Update {meta.get('step', 0)}.{_by_train(recipe, config.nsp_head)}",
        *([f"Update 0 had the weights of `{meta['origin']}`."] if meta.get("origin") else []),
    ]
    for phase, made in zip(recipe.get("phases", []), updates_made(meta)):
        schedule, rate = phase.get("schedule", {}), phase.get("mask_probability")
        of = "" if made == phase.get("steps") else f" of {phase.get('steps')}"
        lines.append(
            f"- {phase.get('name')}: {made}{of} updates of {phase.get('global_batch')} rows"
            f" from `{phase.get('shards')}`, {schedule.get('kind')} schedule, peak rate {schedule.get('lr'):g}"
            + (f", {rate:.3g} of the tokens masked" if rate else "")
        )
    lines += ["", "## Scores", ""]
    shown = {
        ("train", "mlm_loss"): "training MLM loss (nats)",
        ("eval", "mlm_loss"): "held-out MLM loss (nats)",
        ("eval", "mlm_accuracy"): "held-out MLM accuracy",
        ("eval", "nsp_accuracy"): "held-out NSP accuracy",
        ("eval", "blimp"): "BLiMP sample (%)",
    }
    rows = [
        f"| {text} | {scores[kind][key]:.4f} | {scores[kind]['step']} |"
        for (kind, key), text in shown.items()
        if isinstance(scores.get(kind, {}).get(key), int | float)
    ]
    if rows:
        lines += ["| score | value | update |", "| --- | --- | --- |", *rows]
    else:
        lines.append("None recorded.")
    lines += [
        "",
        "## Provenance",
        "",
        f"- exported by Lambert at commit {code}",
        f"- checkpoint format {meta.get('format', 'none')}, tokenizer fingerprint"
        f" {meta.get('tokenizer_fingerprint', 'not recorded')}",
        "- the whole recipe is in `lambert.json`",
        "",
        "```python",
        "from transformers import pipeline",
        "",
        f'pipeline("fill-mask", ".")("Paris is the {mask} of France.")',
        "```",
    ]
    return "\n".join(lines) + "\n"
