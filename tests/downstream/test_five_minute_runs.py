"""Runs of the five-minute BERT and its rival: cards, order, fine-tuned scores, the table."""

from __future__ import annotations

import json
import threading
import time
from concurrent.futures import Executor, Future
from pathlib import Path
from typing import Any

import pytest

from bench import five_minute
from bench import five_minute_finetune as tuning
from bench import five_minute_rival as rival
from bench.five_minute_finetune import TASKS, collect, score_of
from bench.five_minute_report import describe, write_report
from bench.five_minute_runs import Workplace, run_all
from bench.five_minute_tries import ABLATIONS, FINALS, SIDES, TRIES, TRIES_LATER, named
from configs import UserError, load_recipe
from configs.log import read_log
from configs.model import resolve_model
from configs.objectives import check_objective
from data_prep.settings import check_recipe
from pretrain.checkpoint.folder import checkpoints
from pretrain.optim.budget import CLOCK_STARTS, FREE_UPDATES
from tests.trainer.runs import make_run, output, train


def test_sides_share_the_cards_and_one_failure_stops_no_other(tmp_path: Path) -> None:
    place = Workplace(tmp_path, ["0", "2", "3"])
    assert place.cards == {"ours": ["0"], "rival": ["2", "3"]}
    assert Workplace(tmp_path, ["0"]).cards == {"ours": ["0"], "rival": ["0"]}
    meeting, finished = threading.Barrier(2, timeout=20), []

    def side(name: str) -> None:
        meeting.wait()  # both run at the same time
        if name == "ours":
            raise UserError("diverged")
        finished.append(name)

    with pytest.raises(UserError, match="diverged"):
        place.both(side)
    assert finished == ["rival"]


def test_without_a_gpu_nothing_is_prepared_in_vain(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "books").mkdir()
    monkeypatch.setenv("LAMBERT_DATA", str(tmp_path))
    monkeypatch.setattr(five_minute, "_cards", lambda: [""])
    monkeypatch.setattr("sys.argv", ["five_minute", "--work", str(tmp_path / "work")])
    with pytest.raises(UserError, match="no GPU"):
        five_minute.main()
    assert not (tmp_path / "work").exists()


def test_a_failed_command_shows_the_end_of_its_log(tmp_path: Path) -> None:
    place = Workplace(tmp_path, [""])
    with pytest.raises(UserError, match=r"(?s)probe failed \(3\).*lost the way"):
        place.command("probe", "-c", "import sys; print('lost the way'); sys.exit(3)")


def leave_run(work: Path, side: str, name: str) -> Path:
    """Folder of the best run of a side, trained."""
    options = {"shape": "512x8", "batch": 256, "lr": 5e-4, "masking": 0.15, "dropout": 0.0}
    done = {"options": options, "tokens_per_s": 2e6, "seconds": 300.0, "updates": 9000}
    (work / name / "hf").mkdir(parents=True)
    (work / name / "hf/rival.json").write_text(json.dumps(done | {"compile_seconds": 9.0}))
    (work / f"best-{side}.json").write_text(json.dumps(name))
    return work / name


def test_table_takes_the_mean_over_what_all_have(tmp_path: Path) -> None:
    def leave(model: str, task: str, seed: int, rate: float = 1e-4, **best: float) -> None:
        of = folders[model == "rival"]
        file = of / model / task / f"{rate:g}-{seed}" / "results.json"
        file.parent.mkdir(parents=True)
        file.write_text(json.dumps({"best": best | {"lr": rate}}))

    folders = [leave_run(tmp_path, side, f"a-run-of-{side}") / "finetune" for side in SIDES]
    for model, plus in (("ours", 6.0), ("rival", 0.0)):
        for seed in (1, 2):
            leave(model, "sst-2", seed, accuracy=80 + plus + seed)
            leave(model, "sst-2", seed, 5e-5, accuracy=70 + plus + seed)
        leave(model, "mrpc", 1, f1=80 + plus, accuracy=60.0)
    leave("ours", "sst-2", 1, 2e-4, accuracy=99.0)  # the rival did not get to this rate
    leave("ours", "sst-2", 3, accuracy=99.0)  # nor to this seed
    leave("ours", "rte", 1, accuracy=99.0)  # nor to this task
    leave("random", "mrpc", 1, f1=50.0, accuracy=50.0)
    table = collect(*folders)
    assert table["ours"]["sst-2"] == {
        "mean": 87.5,
        "spread": pytest.approx(0.7071, abs=1e-3),
        "seeds": 2,
        "rate": 1e-4,
    }
    assert table["rival"]["mean"] == (81.5 + 70.0) / 2
    assert table["ours"]["mean"] - table["rival"]["mean"] == 4.5
    assert "mean" not in table["random"]  # it has one of the two
    assert "| mean of mrpc, sst-2 | 80.25 | 75.75 |" in write_report(tmp_path)
    leave_run(tmp_path, "ours", "a-later-run")  # better, and not fine-tuned
    text = write_report(tmp_path)
    assert "| mean of mrpc, sst-2 |  | 75.75 |  |" in text and "87.5" not in text
    assert score_of("cola", {"matthews": 12.0, "accuracy": 70.0}) == 12.0


def test_long_runs_are_told_apart_each_at_its_own_rate(tmp_path: Path) -> None:
    def leave(model: str, task: str, seed: int, rate: float, spearman: float) -> None:
        file = tmp_path / model / task / f"{rate:g}-{seed}" / "results.json"
        file.parent.mkdir(parents=True)
        file.write_text(json.dumps({"best": {"spearman": spearman, "lr": rate}}))

    for model, rate in (("ours", 1e-4), ("rival", 2e-4)):
        leave(model, "sts-b", 1, 1e-4, 50.0 if rate == 1e-4 else 40.0)
        leave(model, "sts-b", 1, 2e-4, 45.0)
        leave(model, "sts-b-long", 1, rate, 80.0 + 1e4 * rate)
    leave("ours", "sts-b-long", 2, 1e-4, 99.0)  # the rival did not get to this seed
    table = collect(tmp_path)
    assert {m: table[m]["sts-b-long"]["mean"] for m in table} == {"ours": 81.0, "rival": 82.0}
    assert {m: table[m]["sts-b-long"]["rate"] for m in table} == {"ours": 1e-4, "rival": 2e-4}
    assert {m: table[m]["mean"] for m in table} == {"ours": 50.0, "rival": 45.0}
    assert table["ours"]["tasks in the mean"] == ["sts-b"]


@pytest.mark.parametrize("until", [[], [time.time() + 600]], ids=["no limit", "a limit"])
def test_order_of_the_jobs(
    until: list[float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seeds of the pretrained models, the others at the best rate; then long ones and random
    weights, first seeds before second ones."""
    done: list[tuple[str, str, float, int]] = []

    class Inline(Executor):
        _processes = None

        def __init__(self, *_: object) -> None: ...

        def submit(self, job: Any, /, *given: Any, **_: Any) -> Future[str]:  # type: ignore[override]
            model, task, rate, seed, _, where, _ = given
            done.append((model, task, rate, seed))
            Path(where).mkdir(parents=True)
            best = {"spearman": 10 * rate if seed == 1 else 1.0, "accuracy": 50.0, "lr": rate}
            (Path(where) / "results.json").write_text(json.dumps({"best": best}))
            future: Future[str] = Future()
            threading.Timer(0.01, future.set_result, [""]).start()  # waited for, as a real job is
            return future

        def shutdown(self, *_: object, **__: object) -> None: ...

    monkeypatch.setattr(tuning, "ProcessPoolExecutor", Inline)
    models = {"ours": "a", "random": "random:a"}
    tuning.run_jobs(
        *(models, {"ours": 2, "random": 2}, "", tmp_path, [""], 1, *until),
        rates=(1e-4, 2e-4), tasks=("sts-b", "sst-2"), long=True,
    )  # fmt: skip
    order = [(m, t, s) for m, t, _, s in done]
    own = [("a", "sts-b", 1)] * 2 + [("a", "sst-2", 1)] * 2
    own += [("a", "sts-b", 2), ("a", "sst-2", 2)]
    drawn = [("random:a", "sts-b", 1)] * 2 + [("random:a", "sst-2", 1)] * 2
    drawn_later = [("random:a", "sts-b", 2), ("random:a", "sst-2", 2)]
    long = [("a", "sts-b-long", s) for s in (1, 2)]
    assert order == [*own, long[0], *drawn, long[1], *drawn_later]
    assert {r for _, t, r, s in done if t == "sts-b-long" or (t == "sts-b" and s > 1)} == {2e-4}


def test_a_run_by_the_clock_is_described_to_its_last_update(tmp_path: Path) -> None:
    """Also those behind the last one that was logged; what the first updates took is told apart."""
    run = make_run(tmp_path / "ours")
    options = ("train.max_minutes=0.005", "train.log_every=50", "phases.0.mask_probability=0.1")
    assert train(run, *options) == [0], output(run)
    (tmp_path / "shards").symlink_to(run / "shards")
    cells, updates = describe(tmp_path, "ours"), checkpoints(run / "train")[-1][0]
    assert updates > FREE_UPDATES and cells["updates"] == str(updates)
    assert 0 < float(cells["apart"]) < 600
    assert ", 0.1 then 0.15, dropout" in cells["settings"]
    starts = [r["step"] for r in read_log(run / "train/log.jsonl") if r.get("text") == CLOCK_STARTS]
    assert starts == [FREE_UPDATES]


@pytest.mark.parametrize("there", [[], ["rival"], ["ours", "rival"]])
def test_report_of_the_sides_that_have_run(tmp_path: Path, there: list[str]) -> None:
    """A side is a training, its scores and its best run; what is not there leaves no cell."""
    for side in there:
        leave_run(tmp_path, side, side)
        if side == "rival":  # ours is not scored yet
            scores = {side: {"mlm_loss": 2.582, "blimp": 68.1, "device": "a card"}}
            (tmp_path / f"finals-{side}.json").write_text(json.dumps(scores))
    text = write_report(tmp_path)
    lines = {line.split(" | ")[0].strip("| "): line for line in text.splitlines()}
    assert ("updates" in lines) == ("held-out MLM loss (nats)" in lines) == bool(there)
    if there:
        ours = "9,000" if "ours" in there else ""
        assert lines["updates"] == f"| updates | {ours} | 9,000 |  |"
        assert lines["held-out MLM loss (nats)"] == "| held-out MLM loss (nats) |  | 2.582 |  |"
        assert lines["card"] == "| card |  | a card |  |"
        assert "| rival | 2.5820 | 68.10 | 0 |" in text
        assert "pseudo-perplexity" not in text


def test_tries_are_recipes_and_options_that_exist() -> None:
    tries = {s: [*TRIES[s].values(), *TRIES_LATER[s].values(), *FINALS[s].values()] for s in SIDES}
    for options in [*tries["ours"], *ABLATIONS.values()]:
        recipe = load_recipe("five-minute", options)
        check_recipe(recipe, list(recipe.shards))
        name = recipe.phases[0].shards
        check_objective(resolve_model(recipe.model, 16384), name, recipe.shards[name].objective)
    for options in tries["rival"]:
        rival.parser().parse_args(["--rows", "a", "--tokenizer", "b", "--out", "c", *options])
    assert len(tries["rival"]) >= len(tries["ours"])
    every = [*tables(TRIES), *tables(TRIES_LATER), *ABLATIONS, *tables(FINALS)]
    assert len(set(every)) == len(every)  # one name, one run


def tables(of: dict[str, dict[str, list[str]]]) -> list[str]:
    return [name for side in SIDES for name in of[side]]


def test_runs_by_name_of_one_side(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A side without runs does nothing; rows that differ from the recipe's are built for the run."""
    runs = named(["crops-16", "bf16", "1024x4-late-pairs"])
    assert list(runs) == ["ours"] and named(["rival-512x6"]) == {"rival": FINALS["rival"]}
    with pytest.raises(UserError, match="--runs crops-17 is not known"):
        named(["bf16", "crops-17"])
    assert list(named(["bf16", " crops-16 ", "", "bf16"])["ours"]) == ["bf16", "crops-16"]
    with pytest.raises(UserError, match="--runs names no run"):
        named(["", " "])
    place, commands = Workplace(tmp_path, [""], ["phases.0.steps=7"]), {}
    monkeypatch.setattr(
        place, "command", lambda name, *words, card="": commands.update({name: words})
    )
    monkeypatch.setattr(place, "score", lambda names, *_: {n: {"mlm_loss": len(n)} for n in names})
    best = []
    run_all(place, "finals", runs, 0.1, tmp_path, 1.0, 0, lambda *found: best.append(found))
    assert best == [("ours", "bf16")]
    assert sorted(commands) == [
        *("1024x4-late-pairs-build", "1024x4-late-pairs-train"),
        *("bf16-train", "crops-16-build", "crops-16-train"),
    ]
    late = commands["1024x4-late-pairs-build"]
    assert [word for before, word in zip(late, late[1:]) if before == "--set"] == ["few", "mixed"]
    shared = {name: (tmp_path / name / "shards").is_symlink() for name in runs["ours"]}
    assert shared == {"crops-16": False, "bf16": True, "1024x4-late-pairs": False}
    assert set(TASKS) == {"sst-2", "mrpc", "rte", "cola", "sts-b", "rt-polarity", "wnut-17"}


def test_what_was_made_of_earlier_weights_goes_when_a_run_is_trained_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or it would be scored, and fine-tuned, by them."""
    place, updates = Workplace(tmp_path, [""]), [5]

    def command(name: str, *_: str, card: str = "") -> None:
        checkpoint = tmp_path / f"a/train/checkpoints/step-{updates[-1]:08d}/checkpoint.json"
        if name == "a-train" and not checkpoint.exists():
            checkpoint.parent.mkdir(parents=True)
            checkpoint.write_text("{}")

    def made(name: str) -> list[bool]:
        return [(tmp_path / name / folder).exists() for folder in ("hf", "finetune")]

    def make(name: str) -> None:
        for file in ("hf/lambert.json", "finetune/sst-2/1e-4-1/results.json"):
            (tmp_path / name / file).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name / file).write_text("{}")

    monkeypatch.setattr(place, "command", command)
    for shared in ("vocab", "shards"):
        (tmp_path / shared).mkdir()
    place.ours("a", 0.1, [], "")
    make("a")
    place.ours("a", 0.1, [], "")  # nothing to do
    assert made("a") == [True, True]
    time.sleep(0.05)  # a clock of files has ticks
    updates.append(9)
    place.ours("a", 0.2, [], "")
    assert made("a") == [False, False]
    make("b")
    place.rival("b", 0.1, [], "")  # always from the start
    assert made("b") == [False, False]


def test_only_runs_that_have_finals_are_fine_tuned(tmp_path: Path) -> None:
    trained, late = five_minute.trained, named(["1024x4-late-pairs"])
    with pytest.raises(UserError, match="no run of ours-768x6, rival-512x6"):
        trained(tmp_path, FINALS, False)
    leave_run(tmp_path, "ours", "bf16")
    assert trained(tmp_path, FINALS, False) == {"ours": "bf16"}  # the best, whichever it was
    assert trained(tmp_path, named(["bf16", "crops-16"]), True) == {"ours": "bf16"}
    for asked in (late, named(["bf16", "640x5-lr-1e-3"])):
        with pytest.raises(UserError, match=r"no run of (1024x4-late-pairs|640x5-lr-1e-3)\n"):
            trained(tmp_path, asked, True)
    with pytest.raises(UserError, match="no such folder"):
        write_report(tmp_path / "nowhere")
