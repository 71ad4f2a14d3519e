"""`python -m data_prep audit FOLDER`: an HTML report with pictures about a shard folder.

One file that needs nothing else: row lengths, label balance, where the text came from, what was
dropped and why, the most frequent tokens and the words the vocabulary does not know, sample rows.
"""

from __future__ import annotations

import argparse
import base64
import html
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from configs import UserError, say
from configs.files import named
from data_prep.inspect import MEANING, overview, show, token_names
from data_prep.shard_index import HELD_OUT
from data_prep.shard_writer import publish_bytes
from data_prep.shards import Shards, open_shards

COUNTED_ROWS = 200_000  # rows whose tokens are counted, spread over the set
STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:60em;margin:2em auto;padding:0 1em;color:#222}"
    "table{border-collapse:collapse;margin:1em 0}td,th{padding:.2em .8em;border-bottom:1px solid #ddd;"
    "text-align:right}td:first-child,th:first-child{text-align:left}img{max-width:100%}"
    "pre{white-space:pre-wrap;background:#f6f6f6;padding:.8em}h2{margin-top:2em}"
)


def main(argv: list[str]) -> int | None:
    parser = argparse.ArgumentParser(prog="python -m data_prep audit", description=__doc__)
    parser.add_argument("folder", help="a shard folder")
    parser.add_argument(
        "--out", help="the HTML file (default: FOLDER-audit.html, beside the folder)"
    )
    arguments = parser.parse_args(argv)
    folder = named(arguments.folder)
    shards = open_shards(folder)
    out = Path(arguments.out) if arguments.out else folder.with_name(folder.name + "-audit.html")
    if out.is_dir():
        raise UserError(f"--out {out}: is a folder", "name a file")
    if not out.parent.is_dir():
        raise UserError(f"--out {out}: no such folder {out.parent}", "make it first")
    publish_bytes(out, report(shards).encode())
    say(f"made {out} ({out.stat().st_size / 1e3:.0f} kB)")
    return None


def report(shards: Shards) -> str:
    """The whole page."""
    names = token_names(shards.folder)
    sections = [
        f"<h1>{html.escape(shards.folder.name)}</h1><pre>{html.escape(overview(shards))}</pre>",
        _summary(shards),
        "<h2>Row lengths</h2>" + _lengths(shards),
        _labels(shards),
        "<h2>Sources</h2>" + _sources(shards),
        "<h2>Vocabulary</h2>" + _tokens(shards, names),
        "<h2>Rows</h2>" + _rows(shards, names),
        "<h2>Settings</h2>" + _settings(shards.index["settings"]),
    ]
    title = html.escape(f"Audit of {shards.folder.name}")
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title>'
        f"<style>{STYLE}</style><body>{''.join(sections)}</body></html>\n"
    )


def picture(draw: Callable[[Any], None], what: str, height: float = 3.0) -> str:
    """What `draw(axes)` draws, as an <img> inside the page."""
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, height), layout="constrained")
    FigureCanvasSVG(figure)
    axes = figure.subplots()
    draw(axes)
    axes.spines[["top", "right"]].set_visible(False)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None})
    data = base64.b64encode(buffer.getvalue()).decode()
    return f'<img alt="{html.escape(what)}" src="data:image/svg+xml;base64,{data}">'


def table(head: list[str], rows: list[list[Any]]) -> str:
    def line(cells: list[Any], tag: str) -> str:
        texts = (f"{c:,}" if isinstance(c, int) else str(c) for c in cells)
        return "<tr>" + "".join(f"<{tag}>{html.escape(t)}</{tag}>" for t in texts) + "</tr>"

    return f"<table>{line(head, 'th')}{''.join(line(r, 'td') for r in rows)}</table>"


def _summary(shards: Shards) -> str:
    index = shards.index
    rows: list[list[Any]] = [
        ["rows", index["rows"]],
        ["tokens", index["tokens"]],
        ["parts", len(index["parts"])],
        ["bytes", sum(p["bytes"] for p in index["parts"])],
        ["vocabulary", shards.vocab_size],
    ]
    if index["held_out"]:
        rows.append(["held-out rows", open_shards(shards.folder / HELD_OUT).num_rows])
    for name, count in index["counts"].items():
        whole = index["tokens"] if name.startswith("tokens") else index["rows"]
        share = f" ({100 * count / max(1, whole):.1f}%)" if name.endswith("cut") else ""
        rows.append([name, f"{count:,}{share}"])
    return table(["", "count"], rows)


def _lengths(shards: Shards) -> str:
    histogram = np.sum([p["length_histogram"] for p in shards.index["parts"]], axis=0)
    width = shards.max_length / len(histogram)

    def draw(axes: Any) -> None:
        axes.bar((np.arange(len(histogram)) + 0.5) * width, histogram, width * 0.9, color="#36c")
        axes.set(xlabel="tokens in the row", ylabel="rows", xlim=(0, shards.max_length))

    used = shards.index["tokens"] / max(1, shards.num_rows * shards.max_length)
    return picture(draw, "row lengths") + (
        f"<p>{100 * used:.1f}% of the positions hold a token; packing wins the rest back.</p>"
    )


def _labels(shards: Shards) -> str:
    if shards.objective not in MEANING:
        return ""
    counts = shards.index["labels"]

    def draw(axes: Any) -> None:
        axes.barh(MEANING[shards.objective], counts, color=["#36c", "#c63"])
        axes.set(xlabel="rows")

    share = 100 * counts[0] / max(1, sum(counts))
    return (
        "<h2>Label balance</h2>"
        + picture(draw, "rows by label", 1.6)
        + f"<p>{share:.1f}% of {sum(counts):,} pairs: {html.escape(MEANING[shards.objective][0])}.</p>"
    )


def _sources(shards: Shards) -> str:
    sources = shards.index["sources"]
    if not sources:
        return "<p>The index names no sources.</p>"

    def draw(axes: Any) -> None:
        places = range(len(sources))  # two sources may have one name
        trained = [s["tokens_trained_on"] for s in sources]
        axes.barh(places, trained, color="#36c", label="trained on")
        axes.barh(
            places, [s["tokens_held_out"] for s in sources], left=trained, color="#c63",
            label="held out",
        )  # fmt: skip
        axes.set_yticks(places, [s["name"] for s in sources])
        axes.set(xlabel="tokens")
        axes.legend()

    head = [
        "source",
        "kind",
        "weight",
        "documents",
        "trained on",
        "held out",
        "sentences",
        "tokens",
    ]
    rows = [
        [s["name"], s["kind"], s["weight"], s["documents"], s["documents_trained_on"],
         s["documents_held_out"], s["sentences"], s["tokens"]]
        for s in sources
    ]  # fmt: skip
    dropped = [
        [s["name"], why, n]
        for s in sources
        for why, n in (s["dropped"] | s.get("replaced", {})).items()
    ]
    text = picture(draw, "tokens by source", 1.2 + 0.4 * len(sources)) + table(head, rows)
    text += "<h2>Left out, and why</h2>"
    if not dropped:
        return text + "<p>Nothing.</p>"
    return text + _dropped(dropped) + table(["source", "why", "count"], dropped)


def _dropped(dropped: list[list[Any]]) -> str:
    def draw(axes: Any) -> None:
        axes.barh(range(len(dropped)), [n for *_, n in dropped], color="#36c")
        axes.set_yticks(range(len(dropped)), [f"{name}: {why}" for name, why, _ in dropped])
        axes.set(xlabel="count", xscale="symlog")
        axes.invert_yaxis()

    return picture(draw, "what was left out", 0.8 + 0.3 * len(dropped))


def _tokens(shards: Shards, names: list[str]) -> str:
    ids = np.unique(np.linspace(0, shards.num_rows - 1, COUNTED_ROWS).astype(np.int64))
    counts = np.zeros(shards.vocab_size, np.int64)
    for first in range(0, len(ids), 16384):
        counts += np.bincount(shards.rows(ids[first : first + 16384]).tokens, minlength=len(counts))
    order = np.argsort(-counts, kind="stable")
    special = set(shards.special_ids.values())
    top = [int(i) for i in order if int(i) not in special][:30]
    never = int((counts == 0).sum())

    def draw(axes: Any) -> None:
        ranked = counts[order]
        axes.loglog(np.arange(1, len(ranked) + 1), np.maximum(ranked, 0.5), color="#36c")
        axes.set(xlabel="rank of the token", ylabel="times seen")

    text = picture(draw, "tokens by rank")
    unknown, total = int(counts[shards.special_ids["unk"]]), int(counts.sum())
    text += (
        f"<p>In {len(ids):,} rows: {unknown:,} unknown tokens ({100 * unknown / max(1, total):.4f}%),"
        f" {never:,} of {len(counts):,} entries never seen. Most frequent: "
        + html.escape(" ".join(names[i] for i in top))
        + "</p><h2>Words the vocabulary does not know</h2>"
    )
    words: dict[str, int] = {}
    for source in shards.index["sources"]:
        for word, count in source["unknowns"].items():
            words[word] = words.get(word, 0) + count
    if not words:
        return text + "<p>None were met.</p>"
    ranked = sorted(words.items(), key=lambda item: (-item[1], item[0]))[:50]
    return text + table(["piece of text", "times (in a sample)"], [[repr(w), n] for w, n in ranked])


def _rows(shards: Shards, names: list[str]) -> str:
    wanted = np.unique(np.linspace(0, shards.num_rows - 1, 6).astype(np.int64))
    rows = shards.rows(wanted)
    shown = [show(shards, rows, k, int(n), names, False) for k, n in enumerate(wanted)]
    return "".join(f"<pre>{html.escape(text.strip())}</pre>" for text in shown)


def _settings(settings: dict[str, Any]) -> str:
    from data_prep.settings import leaves

    return table(["what decided the bytes", "value"], [[k, str(v)] for k, v in leaves(settings)])
