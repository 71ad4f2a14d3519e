"""What a run leaves behind: log, TensorBoard, progress, and the report made from them."""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
import sys

import pytest

from configs import UserError
from configs.console import duration
from configs.log import cut_log, read_log
from configs.model import model_flops, resolve_model
from configs.schema import Recipe
from pretrain.data.batches import GlobalBatch
from pretrain.report import curve, load_run, main, plot_loss, render, train_folder
from pretrain.telemetry import Telemetry, peak_flops

BATCH = GlobalBatch([], 1800, 96, 11000, 1_300_000, 0.02, 0.5)


def telemetry(folder, total=10, name="run", **options) -> Telemetry:
    recipe = Recipe(name=name)
    return Telemetry(folder, recipe, resolve_model(recipe.model, 1000), total=total, **options)


def train(folder, first=1, last=10, name="run", **options) -> None:
    t = telemetry(folder, name=name, resumed=first - 1, **options)
    if first == 1:
        t.evaluation(0, {"mlm_loss": 7.0, "mlm_accuracy": 0.0, "unigram_loss": 6.1})
    for k in range(first, last + 1):
        values = {"loss": 8.0 - k / 10, "mlm_loss": 7.0 - k / 10, "nsp_loss": 0.7, "lr": 1e-3 * k,
                  "grad_norm": 1.0, "trust_ratio_min": 0.1, "trust_ratio_50": 1.0}  # fmt: skip
        t.update(k, values, BATCH, seconds=0.5, data_wait_s=0.001)
    t.evaluation(last, {"mlm_loss": 6.0, "mlm_accuracy": 0.1, "unigram_loss": 6.1})
    t.event(last, "saved <checkpoint>")
    t.close()


def test_a_line_holds_rates_by_the_documented_formula(tmp_path) -> None:
    train(tmp_path, device_name="NVIDIA H100 80GB HBM3", world=2)
    records = read_log(tmp_path / "log.jsonl")
    assert [r["kind"] for r in records] == ["eval", *["train"] * 10, "eval", "event"]
    line = records[1]
    flops = model_flops(resolve_model(Recipe().model, 1000), 11000, 1_300_000, 1800, 96)
    assert line["tokens_per_s"] == pytest.approx(22000)
    assert line["sequences_per_s"] == pytest.approx(192)
    assert line["model_tflops"] == pytest.approx(flops / 0.5 / 2 / 1e12)
    assert line["mfu"] == pytest.approx(flops / 0.5 / 2 / 989e12)
    assert line["packing_waste"] == pytest.approx(0.02)
    assert line["data_wait"] == pytest.approx(0.002)
    assert line["memory_gb"] > 0 and line["epoch"] == 0.5 and line["step"] == 1


def test_a_resumed_run_has_every_update_once(tmp_path) -> None:
    train(tmp_path, 1, 10)
    with (tmp_path / "log.jsonl").open("a") as log:
        log.write('{"kind": "train", "step": 11, "lo')  # killed while writing
    train(tmp_path, 6, 10)
    records = read_log(tmp_path / "log.jsonl")
    assert [r["step"] for r in records if r["kind"] == "train"] == list(range(1, 11))
    assert [r["step"] for r in records if r["kind"] == "eval"] == [0, 10]


@pytest.mark.parametrize(
    "dirt",
    [b"\xff\xfe\n", b"[1, 2]\n", b"7\n", b'{"kind": "train"}\n', b'{"step": "x"}\n', b"\0\n"]
    + [
        b'{"kind": "train", "step": 3, "time": 1.0, %s}\n' % odd
        for odd in (b'"loss": "x"', b'"lr": null', b'"spent_s": [1]')
    ]
    + [
        b'{"step": 3, "seconds": {}}\n',
        b'{"kind": ["train"], "step": 3}\n',
        b'{"kind": "eval", "step": 3, "time": "x"}\n',
    ]
    + [b'{"kind": "event", "step": 3, "time": "nan"}\n'],
)
def test_lines_that_are_no_records_stop_nobody(tmp_path, dirt: bytes) -> None:
    train(tmp_path, 1, 10)
    log = tmp_path / "log.jsonl"
    whole = read_log(log)
    first, rest = log.read_bytes().split(b"\n", 1)
    log.write_bytes(dirt + first + b"\n" + dirt + rest + dirt)
    assert read_log(log) == read_log(log, 10**9) == whole
    cut_log(log, 10)
    assert dirt not in log.read_bytes() and read_log(log) == whole


def test_the_end_of_a_log_is_read_from_its_first_whole_line_on(tmp_path) -> None:
    train(tmp_path, 1, 10)
    log = tmp_path / "log.jsonl"
    whole = read_log(log)
    for size in (0, 1, 100, 2000, 10**9):
        end = read_log(log, size)
        assert end == whole[len(whole) - len(end) :]
    assert read_log(tmp_path / "none.jsonl", 10) == []


def test_resuming_at_the_end_of_a_whole_log_leaves_it_as_it_is(tmp_path) -> None:
    train(tmp_path)
    before = (tmp_path / "log.jsonl").read_bytes()
    cut_log(tmp_path / "log.jsonl", 10)
    assert (tmp_path / "log.jsonl").read_bytes() == before


def test_log_every_averages_the_rates_of_the_updates_between(tmp_path) -> None:
    recipe = Recipe()
    recipe.train.log_every = 4
    t = Telemetry(tmp_path, recipe, resolve_model(recipe.model, 1000), total=10)
    assert [k for k in range(1, 11) if t.wants(k)] == [1, 4, 8, 10]
    for k in range(1, 11):
        t.update(k, {"loss": 1.0} if t.wants(k) else {}, BATCH, seconds=float(k))
    t.close()
    lines = read_log(tmp_path / "log.jsonl")
    assert [r["step"] for r in lines] == [1, 4, 8, 10]
    assert lines[1]["tokens_per_s"] == pytest.approx(3 * 11000 / (2 + 3 + 4))


@pytest.mark.parametrize("every", [1, 4, 10])
def test_the_report_counts_the_time_of_all_updates(tmp_path, every) -> None:
    """It was that of the logged ones: a tenth of it with train.log_every=10."""
    recipe = Recipe()
    recipe.train.log_every = every
    t = Telemetry(tmp_path, recipe, resolve_model(recipe.model, 1000), total=34)
    seconds = {k: 100.0 * k for k in range(1, 35)}
    for k, took in seconds.items():
        t.update(k, {"loss": 1.0}, BATCH, seconds=took)
    t.close()
    assert f"<td>{duration(sum(seconds.values()))}</td>" in render([load_run(tmp_path)])
    log = tmp_path / "log.jsonl"
    old = [{k: v for k, v in r.items() if k != "stretch_s"} for r in read_log(log)]
    log.write_text("".join(json.dumps(r) + "\n" for r in old))
    logged = sum(took for k, took in seconds.items() if t.wants(k))
    assert f"<td>{duration(logged)}</td>" in render([load_run(tmp_path)])


def test_only_rank_0_writes(tmp_path) -> None:
    train(tmp_path / "other", rank=1)
    assert not (tmp_path / "other").exists()


def test_nan_is_kept_and_the_file_stays_json(tmp_path) -> None:
    t = telemetry(tmp_path)
    t.update(1, {"loss": math.nan, "grad_norm": math.inf}, BATCH, 1.0)
    t.close()
    json.loads((tmp_path / "log.jsonl").read_text(), parse_constant=lambda name: pytest.fail(name))
    (line,) = read_log(tmp_path / "log.jsonl")
    assert math.isnan(line["loss"]) and math.isinf(line["grad_norm"])


def test_tensorboard_holds_the_curves(tmp_path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    train(tmp_path)
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    losses = events.Scalars("train/loss")
    assert [e.step for e in losses] == list(range(1, 11))
    assert losses[3].value == pytest.approx(7.6)
    assert events.Scalars("eval/mlm_loss")[-1].value == 6.0


def test_progress_goes_to_the_log_with_loss_and_speed(tmp_path, capsys) -> None:
    train(tmp_path)
    out = capsys.readouterr().out
    assert "train: 10/10 updates (100%)" in out and "loss 7.0000" in out and "22.0k tokens/s" in out


@pytest.mark.parametrize(
    ("device", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H100 NVL", 835e12),
        ("NVIDIA H200", 989e12),
        ("NVIDIA H200 NVL", 835e12),
        ("NVIDIA GH200 480GB", 989e12),
        ("NVIDIA B200", 2250e12),
        ("NVIDIA GB200", 2500e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA A10", 125e12),
        ("NVIDIA A10G", 70e12),
        ("NVIDIA L40S", 362e12),
        ("NVIDIA L4", 121e12),
        ("Tesla V100-SXM2-32GB", 125e12),
        ("Tesla V100-PCIE-16GB", 112e12),
        ("Tesla T4", 65e12),
        ("NVIDIA GeForce RTX 4090", 165e12),
        # Other cards, whose names only begin or go on like those.
        ("NVIDIA L40", None),
        ("NVIDIA RTX A1000", None),
        ("NVIDIA RTX A4000", None),
        ("NVIDIA A16", None),
        ("NVIDIA T400 4GB", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA GeForce RTX 3090 Ti", None),
        ("", None),
    ],
)
def test_peaks_of_cards(device, peak) -> None:
    assert peak_flops(device, "bf16") == peak_flops(device, "fp16") == peak
    assert peak_flops(device, "fp8") == (peak and 2 * peak)
    assert peak_flops(device, "fp32") is None


@pytest.fixture
def two_runs(tmp_path):
    for name in ("one", "two"):
        train(tmp_path / name / "train", name=name)
    return tmp_path / "one", tmp_path / "two"


def test_report_is_one_page_with_both_runs_and_nothing_to_fetch(two_runs, capsys) -> None:
    assert main([str(run) for run in two_runs]) == 0
    page = (two_runs[0] / "train" / "report.html").read_text()
    assert str(two_runs[0] / "train" / "report.html") in capsys.readouterr().out
    assert page.count("data:image/png;base64,") >= 8
    assert set(re.findall(r'(?:src|href)="([^"]{5})', page)) == {"data:"} and "<script" not in page
    assert ">one<" in page and ">two<" in page
    assert "6.0000" in page and "22,000" in page
    assert "saved &lt;checkpoint&gt;" in page
    assert (two_runs[0] / "train" / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_a_report_takes_the_place_of_a_report_only(two_runs, tmp_path) -> None:
    run, page = str(two_runs[0]), tmp_path / "curves.html"
    for _ in range(2):  # the second replaces the first
        assert main([run, "--output", str(page)]) == 0
    assert page.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    others = {"mine.yaml": "mine.yaml", "page.html": "page.html", "other.html": "other.png"}
    for output, there in others.items():
        (tmp_path / there).write_text("mine")
        with pytest.raises(UserError, match=output if output == "mine.yaml" else there):
            main([run, "--output", str(tmp_path / output)])
        assert (tmp_path / there).read_text() == "mine"


def test_a_log_without_a_record_is_called_damaged(tmp_path) -> None:
    (tmp_path / "train").mkdir()
    (tmp_path / "train/log.jsonl").write_bytes(b"\x00\x00 {")
    with pytest.raises(UserError, match="not one line of it is a record"):
        load_run(tmp_path)


@pytest.mark.parametrize("content", ["[]", "{}", '{"name": "x"}', '{"name": "x", "model": "bert"}'])
def test_a_damaged_recipe_is_named_and_the_log_reported(tmp_path, capsys, content) -> None:
    train(tmp_path / "one" / "train")
    noted = tmp_path / "one" / "train" / "recipe.json"
    noted.write_text(content)
    assert main([str(tmp_path / "one")]) == 0
    assert capsys.readouterr().out.count(f"{noted} is damaged") == 1
    page = (noted.parent / "report.html").read_text()
    assert ">one<" in page and "6.0000" in page and "22,000" in page


def test_runs_of_one_name_are_told_apart_by_folder(tmp_path) -> None:
    for place in ("a", "b"):
        train(tmp_path / place / "train", name="same")
    page = render([load_run(tmp_path / place) for place in ("a", "b")])
    assert "same (a)" in page and "same (b)" in page
    shutil.copytree(tmp_path / "a", tmp_path / "b" / "a")
    page = render([load_run(tmp_path / place) for place in ("a", "b/a")])
    assert f"same ({tmp_path}/a)" in page and f"same ({tmp_path}/b/a)" in page


def test_a_run_may_be_given_as_any_of_its_folders(two_runs) -> None:
    work = two_runs[0]
    inside = work / "train" / "checkpoints" / "step-10"
    inside.mkdir(parents=True)
    for run in (work, work / "train", work / "train" / "checkpoints", inside):
        assert train_folder(run).resolve() == (work / "train").resolve()


def test_long_curves_keep_their_mean_and_their_end() -> None:
    records = [{"step": k, "loss": float(k)} for k in range(1, 10_001)]
    steps, values = curve(records, "loss")
    assert len(steps) <= 1500 and steps[-1] == 10_000
    assert values.mean() == pytest.approx(5000.5, rel=1e-3)


def test_plot_of_a_run_without_evaluation(tmp_path) -> None:
    t = telemetry(tmp_path)
    t.update(1, {"loss": 1.0, "mlm_loss": 1.0}, BATCH, 1.0)
    t.close()
    assert plot_loss(load_run(tmp_path), tmp_path / "l.png").stat().st_size > 1000


def test_a_text_where_a_held_out_score_belongs_is_left_out(tmp_path) -> None:
    train(tmp_path)
    with (tmp_path / "log.jsonl").open("a") as log:
        log.write('{"kind": "eval", "step": 10, "mlm_loss": "x", "mlm_accuracy": 0.25}\n')
    page = render([load_run(tmp_path)])
    assert "held-out MLM accuracy" in page and "held-out MLM loss" not in page


def test_what_is_no_run_is_named(tmp_path, repo) -> None:
    with pytest.raises(UserError, match="nothing-here"):
        load_run(tmp_path / "nothing-here")
    (tmp_path / "log.jsonl").write_text("")
    with pytest.raises(UserError, match="no update is finished"):
        load_run(tmp_path)
    done = subprocess.run(
        [sys.executable, "-m", "pretrain", "report", str(tmp_path / "nothing-here")],
        capture_output=True, text=True, cwd=repo,
    )  # fmt: skip
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "nothing-here: no training log" in done.stderr
