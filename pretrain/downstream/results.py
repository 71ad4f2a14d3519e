"""What a grid has scored: the results in its folder, which of them is in best/, and the table."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from configs.files import read_json
from pretrain.downstream import metrics
from pretrain.downstream.tasks import Task

BEST, RESULT = "best", "result.json"
Result = dict[str, Any]  # lr, seed, seconds, diverged and the task's metrics on dev (percent)


class Results:
    """The results in `out`, of all commands that had this grid's settings."""

    def __init__(self, out: Path, task: Task) -> None:
        self.out, self.task = out, task

    def folder(self, lr: float, seed: int) -> Path:
        """Where a pair's result and predictions are."""
        return self.out / "runs" / f"lr{lr:g}-seed{seed}"

    def all(self) -> list[Result]:
        """By falling rate, then by seed.

        Raises:
            UserError: one is damaged; names the file and the key.
        """
        found = [self._read(file) for file in (self.out / "runs").glob(f"*/{RESULT}")]
        return sorted(found, key=lambda result: (-result["lr"], result["seed"]))

    def find(self, lr: float, seed: int) -> Result | None:
        """The result of a pair that has been trained."""
        file = self.folder(lr, seed) / RESULT
        return self._read(file) if file.is_file() else None

    def best(self) -> Result | None:
        """The one with the highest score on dev, None when all diverged."""
        good = [result for result in self.all() if not result["diverged"]]
        return max(good, key=self.score, default=None)

    def kept(self) -> Result | None:
        """The one whose model is in best/; None without a model there, or one of an unknown pair."""
        file = self.out / BEST / RESULT
        if not file.is_file():
            return None
        pair = read_json(file, f"remove {file.parent}", {"lr": int | float, "seed": int})
        return self.find(pair["lr"], pair["seed"])

    def best_is_kept(self) -> bool:
        """Whether best/ is as good as any; also where there is no result to be kept."""
        best, kept = self.best(), self.kept()
        return best is None or kept is not None and self.score(kept) >= self.score(best)

    def score(self, result: Result) -> float:
        """What the results of a task are compared by."""
        return float(result[self.task.metrics[0]])

    def _read(self, file: Path) -> Result:
        numbers = dict.fromkeys(("lr", "seconds", *self.task.metrics), int | float)
        shape = {**numbers, "seed": int, "diverged": bool}
        return read_json(file, "remove it, and this rate and seed are trained again", shape)


def pair_name(task: Task, lr: float, seed: int) -> str:
    """A run of the grid, in messages."""
    return f"{task.name} lr {lr:g} seed {seed}"


def summarise(task: Task, results: list[dict[str, Any]]) -> dict[str, Any]:
    """Mean and spread (sample standard deviation) over seeds for every lr; `best` by the mean, among
    the rates at which the fewest seeds diverged."""
    rows = []
    for lr in dict.fromkeys(result["lr"] for result in results):
        of_lr = [result for result in results if result["lr"] == lr]
        diverged = sum(result["diverged"] for result in of_lr)
        row: dict[str, Any] = {"lr": lr, "seeds": len(of_lr), "diverged": diverged}
        for name in task.metrics:
            row[name], row[f"{name}_spread"] = metrics.mean_and_spread([r[name] for r in of_lr])
        rows.append(row)
    best = max(rows, key=lambda row: (-row["diverged"], row[task.metrics[0]]))
    return {"task": task.name, "metrics": list(task.metrics), "rows": rows, "best": best}


def as_markdown(task: Task, table: dict[str, Any]) -> str:
    """The table as Markdown, the best learning rate in bold."""
    lines = [
        f"| {task.name}: lr | seeds | " + " | ".join(task.metrics) + " |",
        "| --- | --- |" + " --- |" * len(task.metrics),
    ]
    for row in table["rows"]:
        bold = "**" if row is table["best"] or row == table["best"] else ""
        scores = " | ".join(_score(row, name) for name in task.metrics)
        lines.append(f"| {bold}{row['lr']:g}{bold} | {row['seeds']} | {scores} |")
    return "\n".join(lines) + "\n"


def _score(row: Mapping[str, Any], name: str) -> str:
    spread = row[f"{name}_spread"]
    return f"{row[name]:.2f}" + ("" if spread is None else f" ± {spread:.2f}")
