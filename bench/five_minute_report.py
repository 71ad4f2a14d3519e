"""The table of the five-minute BERT, from the files its stages left in the work folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from bench.five_minute_finetune import LONG, LONG_EPOCHS, TASKS, collect
from bench.five_minute_tries import SIDES
from configs import UserError
from configs.files import read_json
from configs.log import read_log
from configs.phases import updates_made
from pretrain.checkpoint.folder import checkpoints, read_meta
from pretrain.optim.budget import CLOCK_STARTS, FREE_UPDATES


def write_report(work: Path) -> str:
    """Writes work/report.md and returns its text; stages that were not run leave no rows.

    Raises:
        UserError: there is no such folder.
    """
    if not work.is_dir():
        raise UserError(f"{work}: no such folder", "run the stages before the report first")
    best = {
        side: json.loads(file.read_text(encoding="utf-8"))
        for side in SIDES
        if (file := work / f"best-{side}.json").is_file()
    }
    scores = {side: _json(work / f"finals-{side}.json").get(best[side], {}) for side in best}
    runs = {side: describe(work, name) for side, name in best.items()}
    downstream = collect(*(work / name / "finetune" for name in best.values()))
    lines = ["| | ours | rival | random init |", "| --- | --- | --- | --- |"]

    def row(title: str, *cells: str) -> None:
        lines.append(f"| {title} | " + " | ".join([*cells, ""][:3]) + " |")

    def row_of(title: str, values: dict[str, dict[str, Any]], key: str) -> None:
        """A side without the value, or that has not run, gets an empty cell."""
        found = [values.get(side, {}).get(key, "") for side in SIDES]
        if any(value != "" for value in found):
            row(title, *(f"{v:.4g}" if isinstance(v, float) else str(v) for v in found))

    for key, title in _TITLES.items():
        row_of(title, runs, key)
    row_of("card", scores, "device")
    for key, title in _SCORES.items():
        row_of(title, scores, key)
    models = ("ours", "rival", "random")
    titles = {task: task for task in TASKS}
    titles |= {f"{task}-long": f"{task}, {LONG_EPOCHS:g} epochs (not in the mean)" for task in LONG}
    for task, title in titles.items():
        cells = [_cell(downstream.get(model, {}).get(task)) for model in models]
        if any(cells):
            row(title, *cells)
    common: list[str] = next(
        (d["tasks in the mean"] for d in downstream.values() if "mean" in d), []
    )
    if common:
        cells = [_cell(downstream.get(model, {}).get("mean")) for model in models]
        row(f"mean of {', '.join(common)}", *cells)
    lines += ["", "Tries of each side, those of the full time last:", ""]
    lines += ["| run | held-out loss | BLiMP | pairs |", "| --- | --- | --- | --- |"]
    for stage in ("tries", "finals"):
        for side in SIDES:
            for name, score in _json(work / f"{stage}-{side}.json").items():
                blimp, pairs = score.get("blimp", float("nan")), score.get("blimp_pairs", 0)
                lines.append(f"| {name} | {score['mlm_loss']:.4f} | {blimp:.2f} | {pairs} |")
    text = "\n".join(lines) + "\n"
    (work / "report.md").write_text(text, encoding="utf-8")
    return text


_TITLES = {
    "shape": "shape (hidden x layers)",
    "settings": "batch (rows), learning rate, masking",
    "tokens_per_s": "tokens a second",
    "tokens": "tokens trained on (M)",
    "updates": "updates",
    "seconds": "seconds of training",
    "apart": f"seconds of the first {FREE_UPDATES} updates (compilation, not counted)",
}
_SCORES = {
    "mlm_loss": "held-out MLM loss (nats)",
    "mlm_accuracy": "held-out MLM accuracy",
    "pseudo_perplexity": "pseudo-perplexity (every token masked alone)",
    "blimp": "BLiMP (%)",
}


def describe(work: Path, name: str) -> dict[str, str]:
    """What a run was and what it took, as cells of the table."""
    rival = work / name / "hf" / "rival.json"
    if rival.is_file():
        r = _json(rival)
        o = r["options"]
        trained = r["tokens_per_s"] * r["seconds"]
        settings = f"{o['batch']}, AdamW {o['lr']:g}, {o['masking']:g}, dropout {o['dropout']:g}"
        return _cells(
            o["shape"], settings, trained, r["updates"], r["seconds"], r["compile_seconds"]
        )  # fmt: skip
    records = read_log(work / name / "train" / "log.jsonl")
    recipe = _json(work / name / "train" / "recipe.json")
    _, kept = checkpoints(work / name / "train")[-1]
    checkpoint = read_meta(kept)
    model, seconds = checkpoint["model"], checkpoint["state"]["spent_s"]
    before = next(r["time"] for r in records if r["kind"] == "eval" and r["step"] == 0)
    free = next((r["time"] for r in records if r.get("text") == CLOCK_STARTS), before)
    updates, trained = checkpoint["step"], 0.0
    for phase, made in zip(recipe["phases"], updates_made(checkpoint)):
        index = _json(work / name / "shards" / phase["shards"] / "index.json")
        trained += made * phase["global_batch"] * index["tokens"] / index["rows"]
    timed = 1 - min(1.0, FREE_UPDATES / updates)
    usual = recipe["masking"]["probability"]
    rates = [f"{p.get('mask_probability') or usual:g}" for p in recipe["phases"]]
    settings = (
        f"{phase['global_batch']}, LAMB {phase['schedule']['lr']:g}, "
        f"{' then '.join(dict.fromkeys(rates))}, dropout {recipe['model']['hidden_dropout']:g}"
    )
    return _cells(
        f"{model['hidden_size']}x{model['num_layers']}", settings,
        trained * timed, updates, seconds, free - before,
    )  # fmt: skip


def _cells(
    shape: str, settings: str, tokens: float, updates: int, seconds: float, apart: float
) -> dict[str, str]:
    return {
        "shape": shape,
        "settings": settings,
        "tokens_per_s": f"{tokens / seconds:,.0f}",
        "tokens": f"{tokens / 1e6:.1f}",
        "updates": f"{updates:,}",
        "seconds": f"{seconds:.1f}",
        "apart": f"{apart:.1f}",
    }


def _cell(entry: Any) -> str:
    if entry is None:
        return ""
    if isinstance(entry, float):
        return f"{entry:.2f}"
    return f"{entry['mean']:.2f} ± {entry['spread']:.2f} ({entry['seeds']})"


def _json(file: Path) -> dict[str, Any]:
    return read_json(file, "train and score that model again") if file.is_file() else {}
