"""`python -m pretrain report RUN [RUN ...]`: one HTML page with the curves of runs, overlaid.

The page needs nothing else (plots are inside it); the loss curve is also written as a PNG.
"""

from __future__ import annotations

import argparse
import base64
import html
import io
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from configs import UserError, make_folder, say
from configs.console import duration
from configs.files import read_json
from configs.log import LOG, read_log

_POINTS = 1500  # of a curve; longer ones are averaged in stretches
# title, axis, the records' kind, keys (drawn together)
_PLOTS = [
    ("Loss in training", "nats", "train", ["loss"]),
    ("Masked tokens: loss", "nats a token", "both", ["mlm_loss"]),
    ("Masked tokens: accuracy", "share", "both", ["mlm_accuracy"]),
    ("Next sentence: loss", "nats a pair", "both", ["nsp_loss"]),
    ("Next sentence: accuracy", "share", "both", ["nsp_accuracy"]),
    ("Learning rate", "", "train", ["lr"]),
    ("Gradient norm", "", "train", ["grad_norm"]),
    ("Trust ratios (quantiles)", "", "train",
     ["trust_ratio_min", "trust_ratio_10", "trust_ratio_50", "trust_ratio_90", "trust_ratio_max"]),
    ("Loss scale", "", "train", ["loss_scale"]),
    ("Speed", "tokens/s", "train", ["tokens_per_s"]),
    ("Speed", "sequences/s", "train", ["sequences_per_s"]),
    ("Model work", "TFLOP/s a process", "train", ["model_tflops"]),
    ("MFU", "share of the card's peak", "train", ["mfu"]),
    ("Packing waste", "share of computed tokens", "train", ["packing_waste"]),
    ("Data wait", "share of the time", "train", ["data_wait"]),
    ("Peak memory", "GB", "train", ["memory_gb"]),
]  # fmt: skip
_LOG_SCALE = {"grad_norm", "loss_scale", "trust_ratio_min"}  # where values span decades

_MARK = "<meta name=generator content=lambert>"
_STYLE = """body{font:15px/1.45 system-ui,sans-serif;max-width:1180px;margin:2em auto;padding:0 1em;color:#222}
table{border-collapse:collapse;margin:1em 0}td,th{padding:.25em .8em;border-bottom:1px solid #ddd;text-align:right}
th:first-child,td:first-child{text-align:left}.plots{display:flex;flex-wrap:wrap;gap:10px}.plots img{width:575px;max-width:100%}
pre{background:#f6f6f6;padding:.8em;overflow:auto;font-size:13px}"""


@dataclass
class Run:
    """What a run left in its train/ folder."""

    name: str
    folder: Path
    train: list[dict[str, Any]]
    evals: list[dict[str, Any]]
    events: list[dict[str, Any]]
    recipe: dict[str, Any]


def train_folder(run: str | Path) -> Path:
    """The folder with log.jsonl of a run given as work_dir, train folder, or anything below it.

    Raises:
        UserError: there is none.
    """
    run = Path(run)
    below = run.resolve().parents[:3] if run.is_dir() else []
    for folder in (run / "train", run, *below):
        if (folder / LOG).is_file():
            return folder
    raise UserError(
        f"{run}: no training log (train/log.jsonl)",
        "give the work_dir of a run that `python -m pretrain train` has started",
    )


def load_run(run: str | Path) -> Run:
    """Reads a run's log; errors as `train_folder`, and for a log without one finished update. A damaged
    recipe.json is named and left out."""
    folder = train_folder(run)
    records = read_log(folder / LOG)
    by_kind: dict[str, list[dict[str, Any]]] = {"train": [], "eval": [], "event": []}
    for record in records:
        by_kind.setdefault(record.get("kind", ""), []).append(record)
    if not records and (folder / LOG).stat().st_size:
        raise UserError(f"{folder / LOG}: not one line of it is a record", "restore it")
    if not by_kind["train"]:
        raise UserError(f"{folder / LOG}: no update is finished yet", "try again later")
    recipe_file = folder / "recipe.json"
    recipe: dict[str, Any] = {}
    try:
        if recipe_file.is_file():
            shape = {"name": str, "model": {}}
            recipe = read_json(recipe_file, "training on writes it anew", shape)
    except UserError as error:
        say(f"warning: {error}")
    name = recipe.get("name") or folder.resolve().parent.name
    return Run(name, folder, by_kind["train"], by_kind["eval"], by_kind["event"], recipe)


def curve(records: list[dict[str, Any]], key: str) -> tuple[np.ndarray, np.ndarray]:
    """(steps, values) of a key, averaged in stretches so that at most 1500 points are left."""
    pairs = [(r["step"], r[key]) for r in records if isinstance(r.get(key), int | float)]
    steps, values = np.array(pairs, np.float64).reshape(-1, 2).T
    stretch = -(-len(steps) // _POINTS)
    if stretch > 1:
        starts = np.arange(0, len(steps), stretch)
        sizes = np.diff([*starts, len(steps)])
        values = np.add.reduceat(values, starts) / sizes
        steps = steps[starts + sizes - 1]
    return steps, values


def plot_loss(run: Run, png: str | Path) -> Path:
    """The loss curve of one run as a PNG: training, held-out, and the unigram line."""
    figure, axes = _figure(7.5, 4.2)
    axes.plot(*curve(run.train, "mlm_loss"), lw=1, label="MLM, training batches")
    if run.evals:
        axes.plot(*curve(run.evals, "mlm_loss"), "o-", ms=4, lw=1, label="MLM, held-out rows")
        steps, values = curve(run.evals, "unigram_loss")
        if len(steps):
            axes.axhline(values[-1], color="gray", ls="--", lw=1, label="unigram, held-out rows")
    axes.set(xlabel="update", ylabel="loss (nats)", title=run.name)
    axes.legend()
    axes.grid(alpha=0.3)
    Path(png).write_bytes(_png(figure))
    return Path(png)


def render(runs: list[Run]) -> str:
    """The page's HTML."""
    names = [r.name for r in runs]
    folders = [r.folder.resolve().parent for r in runs]
    for places in ([folder.name for folder in folders], folders):
        if len(set(names)) < len(names):  # the same recipe twice: tell them apart by folder
            names = [f"{run.name} ({place})" for run, place in zip(runs, places)]
    pictures = []
    for title, unit, kind, keys in _PLOTS:
        picture = _plot(runs, names, title, unit, kind, keys)
        if picture:
            data = base64.b64encode(picture).decode()
            pictures.append(f'<img alt="{title}" src="data:image/png;base64,{data}">')
    rows = [_summary(run, name) for run, name in zip(runs, names)]
    keys = list(dict.fromkeys(key for row in rows for key in row))
    table = ["<table><tr>" + "".join(f"<th>{html.escape(k)}</th>" for k in keys) + "</tr>"]
    for row in rows:
        cells = (html.escape(row.get(key, "")) for key in keys)
        table.append("<tr>" + "".join(f"<td>{c}</td>" for c in cells) + "</tr>")
    events = [
        f"{name}: update {e['step']}: {e.get('text', '')}"
        for run, name in zip(runs, names)
        for e in run.events
    ]
    changed = "".join(
        f"<h3>{html.escape(name)}</h3><pre>{html.escape(json.dumps(run.recipe, indent=1))}</pre>"
        for run, name in zip(runs, names)
    )
    return "\n".join(
        [
            f"<!doctype html><html lang=en><meta charset=utf-8>{_MARK}",
            f"<title>{html.escape(', '.join(names))}</title><style>{_STYLE}</style>",
            f"<h1>{html.escape(', '.join(names))}</h1>",
            *table,
            "</table><div class=plots>",
            *pictures,
            "</div><h2>Events</h2>",
            f"<pre>{html.escape(chr(10).join(events)) or 'none'}</pre>",
            f"<h2>Recipes</h2>{changed}</html>",
        ]
    )


def _summary(run: Run, name: str) -> dict[str, str]:
    last, model = run.train[-1], run.recipe.get("model", {})
    row = {"run": name, "model": str(model.get("preset", "")), "updates": str(last["step"])}
    shown = [("loss", "loss", ".4f"), ("MLM loss", "mlm_loss", ".4f"),
             ("MLM accuracy", "mlm_accuracy", ".4f")]  # fmt: skip
    for label, key, form in shown:
        tail = [r[key] for r in run.train[-20:] if isinstance(r.get(key), int | float)]
        if tail:
            row[f"{label} (last {len(tail)})"] = format(float(np.mean(tail)), form)
    if run.evals:
        for label, key in (("MLM loss", "mlm_loss"), ("MLM accuracy", "mlm_accuracy"),
                           ("NSP accuracy", "nsp_accuracy"), ("unigram loss", "unigram_loss")):  # fmt: skip
            value = run.evals[-1].get(key)
            if isinstance(value, int | float):
                row[f"held-out {label}"] = f"{value:.4f}"
    for label, key, form in (("tokens/s", "tokens_per_s", ",.0f"), ("TFLOP/s", "model_tflops", ".1f"),
                             ("MFU", "mfu", ".1%"), ("waste", "packing_waste", ".2%"),
                             ("data wait", "data_wait", ".2%")):  # fmt: skip
        values = [r[key] for r in run.train if isinstance(r.get(key), int | float)]
        if values:
            row[f"{label} (median)"] = format(float(np.median(values)), form)
    # A log of before `stretch_s` tells the logged updates' own time only.
    took = sum(r.get("stretch_s", r.get("seconds", 0.0)) for r in run.train)
    row["time in updates"] = duration(took)
    return row


def _plot(
    runs: list[Run], names: list[str], title: str, unit: str, kind: str, keys: list[str]
) -> bytes | None:
    figure, axes = _figure(6.4, 3.4)
    drawn = False
    for number, (run, name) in enumerate(zip(runs, names)):
        for place, key in enumerate(keys):
            color, strength = f"C{number}", 1.0 if len(keys) == 1 or place == 2 else 0.35
            steps, values = curve(run.train, key)
            if len(steps):
                label = name if place in (0, 2) and (len(keys) == 1 or place == 2) else None
                axes.plot(steps, values, lw=1, color=color, alpha=strength, label=label)
                drawn = True
            steps, values = curve(run.evals, key) if kind == "both" else curve([], key)
            if len(steps):
                axes.plot(steps, values, "o--", ms=4, lw=1, color=color, label=f"{name}, held-out")
                drawn = True
    if not drawn:
        return None
    low, high = axes.dataLim.intervaly
    if keys[0] in _LOG_SCALE and high > 20 * max(low, 0.0):
        axes.set_yscale("log")
    axes.set(title=title, xlabel="update", ylabel=unit)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    return _png(figure)


def _figure(width: float, height: float) -> tuple[Any, Any]:
    from matplotlib.figure import Figure  # without pyplot: no display, no global state

    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.add_subplot()


def _png(figure: Any) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=110)
    return buffer.getvalue()


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m pretrain report",
        description="Writes an HTML page with the curves of one run or several, overlaid.",
    )
    parser.add_argument("runs", nargs="+", metavar="RUN", help="work_dir or train folder of a run")
    parser.add_argument("--output", help="the page; default: train/report.html of the first run")
    options = parser.parse_args(argv)
    runs = [load_run(run) for run in options.runs]
    page, picture = runs[0].folder / "report.html", runs[0].folder / "loss.png"
    if options.output:
        page = Path(options.output)
        if page.suffix != ".html":
            raise UserError(f"--output {page}", "a name that ends in .html")
        picture = page.with_suffix(".png")
        for file in (page, picture):
            ours = page.is_file() and _MARK in page.read_text(encoding="utf-8", errors="replace")
            if file.exists() and not ours:
                raise UserError(f"{file}: exists and is no report", "name another file")
    make_folder(page.parent, "name another --output")
    page.write_text(render(runs), encoding="utf-8")
    plot_loss(runs[0], picture)
    say(f"report: {page}\nloss curve: {picture}")
    return 0
