"""The train command as a user runs it: whole runs, stops of every kind, other layouts, launchers."""

from __future__ import annotations

import json
import random
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from cluster.environment import free_port
from configs.log import read_log
from pretrain.checkpoint import latest, load_logical, read_meta, save_logical
from pretrain.checkpoint.folder import KINDS, checkpoints
from tests.downstream.test_blimp import blimp_file
from tests.forked import REPO, finish
from tests.trainer.runs import (
    UPDATES,
    evaluations,
    fresh,
    interrupt,
    losses,
    make_run,
    output,
    spell,
    start,
    train,
    wait_for_step,
)

GOLDEN = Path(__file__).with_name("golden.json")
HANGS = [("hang:8:1", 1, "data"), ("read:8:1", 1, "data"), ("pass:8:0", 0, "forward")]


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """An uninterrupted run of 36 updates over two phases, one process."""
    run = make_run(tmp_path_factory.mktemp("whole") / "run")
    assert train(run) == [0], output(run)
    assert sorted(losses(run)) == list(range(1, UPDATES + 1))
    assert "checkpoint after 36 of 36 updates" in output(run)
    return run


def test_golden_losses(whole):
    """Thread count pinned; other versions of torch may differ in the last bits."""
    for key, values in json.loads(GOLDEN.read_text()).items():
        wanted = {int(step): value for step, value in values.items()}
        assert losses(whole, key) == pytest.approx(wanted, abs=1e-4, rel=1e-4), key
    assert losses(whole, "lr")[6] == pytest.approx(0.01)
    assert losses(whole, "lr")[UPDATES] == 0


def test_a_finished_run_is_not_trained_again(whole):
    before = (whole / "train" / "log.jsonl").read_bytes()
    assert train(whole) == [0]
    assert "nothing to do: 36 of 36 updates are done" in output(whole)
    assert train(whole, "train.stop_at=20") == [0]
    assert (whole / "train" / "log.jsonl").read_bytes() == before


def test_held_out_rows_are_scored_at_start_and_end(whole):
    assert sorted(evaluations(whole)) == [0, UPDATES]
    assert [step for step, _ in checkpoints(whole / "train")] == [30, 35, 36]


def test_b29_every_choice_of_lamb_is_logged(whole, tmp_path):
    """Of the two published variants and their bounds, which one this run takes."""
    run = fresh(whole, tmp_path / "run")
    assert train(run, "train.stop_at=1") == [0], output(run)
    (line,) = [line for line in output(run).splitlines() if line.startswith("LAMB: ")]
    said = dict(pair.split(" ", 1) for pair in line.removeprefix("LAMB: ").split(", "))
    asked = json.loads((run / "train" / "recipe.json").read_text())["optimizer"]
    assert said == {key: str(value) for key, value in asked.items()} and "trust_ratio_max" in said


def kill_and_go_on(whole: Path, run: Path, accidents: list[str]) -> None:
    """Every accident kills the run; going on, the rest of it is the same to the last bit (B41)."""
    for accident in accidents:
        assert train(run, accident=accident) == [-signal.SIGKILL], (accident, output(run))
    assert train(run) == [0], output(run)
    for key in ("loss", "mlm_loss", "nsp_accuracy", "lr", "grad_norm", "trust_ratio_50"):
        assert losses(run, key) == losses(whole, key), key
    assert evaluations(run) == evaluations(whole)


def test_b41_resume_after_kills_is_bit_equal(whole, tmp_path):
    """Between checkpoints, inside a save, and over the change of phases (moments go on)."""
    run = fresh(whole, tmp_path / "run")
    kill_and_go_on(whole, run, ["update:8", "save:4", "update:29"])


@pytest.mark.slow
def test_resume_after_twenty_random_kills_is_bit_equal(whole, tmp_path):
    draw = random.Random(1)
    done = 0
    for number in range(4):
        accidents = []
        at = 1
        for _ in range(5):
            at = draw.randint(at, min(at + 8, UPDATES))
            saved = (at - 1) // 5
            inside_a_save = saved < 6 and draw.random() < 0.4
            accidents.append(f"save:{draw.randint(1, 2)}" if inside_a_save else f"update:{at}")
        run = fresh(whole, tmp_path / str(number))
        kill_and_go_on(whole, run, accidents)
        done += len(accidents)
    assert done == 20


def test_b39_a_rank_killed_in_a_save_ends_the_job_and_the_next_start_goes_on(whole, tmp_path):
    run = fresh(whole, tmp_path / "run")
    codes = train(run, "guard.hang_timeout_s=12", size=2, accident="save:2:1")
    assert codes == [77, -signal.SIGKILL], output(run)
    assert "rank 1" in output(run)
    left = [p.name for p in (run / "train" / "checkpoints").iterdir()]
    assert any(name.startswith("step-00000010.partial-") for name in left)
    assert latest(run / "train").name == "step-00000005"
    assert train(run, "train.stop_at=12", size=2) == [0, 0], output(run)
    assert "step-00000010.partial-" in output(run)
    assert "goes on from update 5" in output(run)
    assert losses(run) == pytest.approx(
        {k: v for k, v in losses(whole).items() if k <= 12}, abs=1e-4
    )


@pytest.fixture(scope="module")
def hung(whole, tmp_path_factory) -> dict[str, tuple[Path, list[int | None]]]:
    """Accident -> (run, exit codes); all at the same time, since they mostly wait."""
    folder = tmp_path_factory.mktemp("hung")
    runs = {accident: fresh(whole, folder / accident[:4]) for accident, *_ in HANGS}
    jobs = {a: start(run, "guard.hang_timeout_s=10", size=2, accident=a) for a, run in runs.items()}
    return {accident: (runs[accident], finish(job)) for accident, job in jobs.items()}


@pytest.mark.parametrize(("accident", "bad", "part"), HANGS)
def test_a_hung_rank_ends_the_job_by_name_and_part(hung, accident, bad, part):
    run, codes = hung[accident]
    assert codes == [77, 77], output(run)
    said = [line for line in output(run).splitlines() if " hangs in " in line]
    assert len(said) == 1 and said[0].startswith(f"error: rank {bad} ("), output(run)
    assert f" hangs in {part} since" in said[0]
    assert latest(run / "train").name == "step-00000005"


def test_b51_a_signal_saves_at_the_next_update_and_a_second_one_is_ignored(whole, tmp_path):
    run = fresh(whole, tmp_path / "run")
    processes = start(run, "checkpoint.every=0", size=2)
    wait_for_step(run, 3)
    interrupt(processes[1:])  # one rank hears it, all leave
    interrupt(processes[1:], signal.SIGUSR1)
    interrupt(processes[1:])
    assert finish(processes) == [75, 75], output(run)
    step = checkpoints(run / "train")[-1][0]
    assert 3 <= step < UPDATES
    assert f"checkpoint after {step} of 36" in output(run)
    assert train(run) == [0], output(run)
    assert losses(run) == pytest.approx(losses(whole), abs=1e-4)
    assert losses(run, "lr") == losses(whole, "lr")


def test_a_phase_reads_on_where_an_earlier_one_left_its_set(whole, tmp_path):
    run = fresh(whole, tmp_path / "run")
    assert train(run, "phases.1.shards=len32", "train.stop_at=26") == [0], output(run)
    rows = {1: 24, 24: 24 * 24, 25: 24 * 24 + 16, 26: 24 * 24 + 32}
    assert {k: losses(run, "epoch")[k] for k in rows} == {k: n / 150 for k, n in rows.items()}


def test_ctrl_c_saves_first(whole, tmp_path):
    run = fresh(whole, tmp_path / "run")
    processes = start(run, "checkpoint.every=0")
    wait_for_step(run, 3)
    interrupt(processes, signal.SIGINT)
    assert finish(processes) == [75], output(run)
    assert "SIGINT: saving at the next update" in output(run)
    assert checkpoints(run / "train")[-1][0] >= 3


def test_other_layouts_go_on_from_one_another(whole, tmp_path):
    """tp 2 -> dp 2 with ZeRO-1 in DeepSpeed and other micro-batches -> one process, 1e-4."""
    run = fresh(whole, tmp_path / "run")
    assert train(run, "parallel.tp=2", "train.stop_at=10", size=2) == [0, 0], output(run)
    first = losses(run)
    assert first == pytest.approx({k: v for k, v in losses(whole).items() if k <= 10}, abs=1e-5)
    options = ("train.stop_at=20", "parallel.micro_batch_tokens=128", "parallel.zero_stage=2")
    assert train(run, *options, size=2) == [0, 0], output(run)
    assert "DeepSpeedEngine" in output(run)
    assert train(run, "parallel.micro_batch_tokens=1024") == [0], output(run)
    assert losses(run) == pytest.approx(losses(whole), abs=1e-4)
    # B31: the rate goes by updates, whatever the processes and the accumulation
    assert losses(run, "lr") == losses(whole, "lr")


def test_a_damaged_newest_checkpoint_falls_back_to_the_one_before(whole, tmp_path):
    run = fresh(whole, tmp_path / "run")
    shutil.copytree(whole / "train", run / "train")
    shutil.rmtree(latest(run / "train"))
    path = next(latest(run / "train").glob("*.safetensors"))
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)
    assert train(run) == [0], output(run)
    assert "step-00000035 is damaged and skipped" in output(run)
    assert "was altered" in output(run)
    assert "goes on from update 30" in output(run)
    assert losses(run) == losses(whole)


def test_a_damaged_checkpoint_does_not_outlive_the_good_ones(whole, tmp_path):
    """It has the higher number: with keep=1 it was kept, and what was saved after it was removed."""
    run = fresh(whole, tmp_path / "run")
    assert train(run, "train.stop_at=20", "checkpoint.keep=2") == [0], output(run)
    path = next(latest(run / "train").glob("*.safetensors"))
    path.write_bytes(path.read_bytes()[:-4])
    options = ("train.stop_at=17", "checkpoint.keep=1", "checkpoint.every=100")
    assert train(run, *options) == [0], output(run)
    assert [step for step, _ in checkpoints(run / "train")] == [17, 20]
    assert train(run, "train.stop_at=20") == [0], output(run)
    assert "goes on from update 17" in output(run)
    assert losses(run) == {k: v for k, v in losses(whole).items() if k <= 20}


def test_starting_anew_keeps_its_own_checkpoints_and_sets_the_earlier_ones_aside(whole, tmp_path):
    """Their higher numbers would have pruned the new ones, and the next start gone on from them."""
    run = fresh(whole, tmp_path / "run")
    shutil.copytree(whole / "train", run / "train")
    assert train(run, "checkpoint.resume=false", "train.stop_at=7") == [0], output(run)
    assert [step for step, _ in checkpoints(run / "train")] == [5, 7]
    aside = run / "train" / "checkpoints-before-1"
    assert f"the earlier checkpoints and log are in {aside}" in output(run)
    assert (aside / "log.jsonl").read_bytes() == (whole / "train" / "log.jsonl").read_bytes()
    assert (aside / "step-00000036" / "checkpoint.json").is_file()
    assert train(run, "train.stop_at=8") == [0], output(run)
    assert "goes on from update 7" in output(run)
    assert losses(run) == {k: v for k, v in losses(whole).items() if k <= 8}


def test_b33_nan_for_three_updates_in_fp16_recovers(whole, tmp_path):
    run = fresh(whole, tmp_path / "run")
    options = ("train.precision=fp16", "train.stop_at=24")
    assert train(run, *options, accident="nan:5-7") == [0], output(run)
    skipped = losses(run, "skipped")
    assert [step for step, s in skipped.items() if s] == [5, 6, 7]
    assert losses(run, "loss_scale")[24] == 65536 / 8
    assert losses(run, "lr") == {k: v for k, v in losses(whole, "lr").items() if k <= 24}
    close = [abs(losses(run)[k] - losses(whole)[k]) for k in range(8, 25)]
    assert max(close) < 0.1


def test_b33_nan_for_good_in_fp16_stops_and_saves_no_nan(whole, tmp_path):
    run = fresh(whole, tmp_path / "run")
    options = ("train.precision=fp16", "guard.max_skipped_updates=20", "checkpoint.every=1")
    code = train(run, *options, accident="nan:8")
    assert code == [76], output(run)
    assert "20 updates in a row" in output(run)
    assert min(losses(run, "loss_scale").values()) >= 1
    for kind in KINDS:
        for tensor in load_logical(latest(run / "train"), kind).values():
            assert tensor.isfinite().all()


def test_nan_in_full_precision_stops_after_the_patience(whole, tmp_path):
    run = fresh(whole, tmp_path / "run")
    assert train(run, accident="nan:8") == [76], output(run)
    assert "3 in a row (guard.nan_patience=3)" in output(run)
    assert latest(run / "train").name == "step-00000005"


def test_no_periodic_checkpoint_is_made_while_updates_are_skipped(whole, tmp_path):
    """With keep=1 it took the place of the last good one; what a start ends with is saved."""
    run = fresh(whole, tmp_path / "run")
    options = ("checkpoint.every=1", "checkpoint.keep=1")
    assert train(run, *options, accident="nan:8") == [76], output(run)
    assert "a checkpoint of before update 8" in output(run)
    assert [step for step, _ in checkpoints(run / "train")] == [7]
    assert train(run, *options, "train.stop_at=9", accident="nan:8") == [0], output(run)
    assert latest(run / "train").name == "step-00000009"


@pytest.mark.parametrize(("step", "size"), [(10, 2), (36, 1)])
def test_weights_that_an_update_made_nan_are_not_saved(whole, tmp_path, step, size):
    """In the last update no later loss would show it; with two processes one alone has it."""
    run = fresh(whole, tmp_path / "run")
    codes = train(run, size=size, accident=f"weights:{step}:{size - 1}")
    assert codes == [76] * size, output(run)
    assert f"update {step} left weights or moments that are not finite" in output(run)
    saved = (step - 1) // 5 * 5
    assert latest(run / "train").name == f"step-{saved:08d}"


def test_training_starts_from_weights_alone(whole, tmp_path):
    """An imported model in the run's own folder, or in another that checkpoint.init_from names."""
    run, other = fresh(whole, tmp_path / "run"), fresh(whole, tmp_path / "other")
    source = latest(whole / "train")
    meta = {k: v for k, v in read_meta(source).items() if k in ("model", "tokenizer_fingerprint")}
    save_logical(run / "train", load_logical(source), meta)
    assert train(run, "train.stop_at=3") == [0], output(run)
    assert train(other, "train.stop_at=3", f"checkpoint.init_from={whole}") == [0], output(other)
    assert "weights from" in output(other)
    assert evaluations(run)[0] == evaluations(other)[0] == evaluations(whole)[UPDATES]
    assert losses(run) == losses(other)
    assert losses(run, "lr") == {k: v for k, v in losses(whole, "lr").items() if k <= 3}


def by_launcher(run: Path, *command: str) -> dict[int, float]:
    done = subprocess.run(
        [*command, str(run / "recipe.yaml"), "train.stop_at=6"],
        cwd=REPO,
        capture_output=True,
        text=True,
        timeout=1200,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return losses(run)


def test_the_launchers_give_identical_losses(whole, tmp_path):
    """python and torchrun with one process; torchrun and deepspeed with two."""
    tools = Path(sys.executable).parent
    port = f"--master-port={free_port()}"
    torchrun = [sys.executable, "-m", "torch.distributed.run", port, "--nproc-per-node"]
    one = by_launcher(fresh(whole, tmp_path / "a"), *torchrun, "1", "-m", "pretrain", "train")
    assert one == {k: v for k, v in losses(whole).items() if k <= 6}
    two = by_launcher(fresh(whole, tmp_path / "b"), *torchrun, "2", "-m", "pretrain", "train")
    deepspeed = [sys.executable, str(tools / "deepspeed"), f"--master_port={free_port()}"]
    three = by_launcher(
        fresh(whole, tmp_path / "c"),
        *deepspeed,
        "--num_accelerators",
        "2",
        "--module",
        "pretrain",
        "train",
    )
    assert two == three
    assert two == pytest.approx(one, abs=1e-5)


@pytest.mark.parametrize("stage", [1, 2])
def test_deepspeed_runs_in_one_process(whole, tmp_path, stage):
    run = fresh(whole, tmp_path / "run")
    options = ("parallel.engine=deepspeed", f"parallel.zero_stage={stage}", "train.stop_at=6")
    assert train(run, *options) == [0], output(run)
    assert "starts: DeepSpeedEngine, tp 1 x dp 1" in output(run)
    six = {k: v for k, v in losses(whole).items() if k <= 6}
    assert losses(run) == pytest.approx(six, abs=1e-6)


def test_a_zero_shot_probe_stands_beside_the_held_out_scores(whole, tmp_path, real_data):
    run = fresh(whole, tmp_path / "run")
    (run / "vocab").unlink()
    spell(run / "vocab")
    probe = f"train.probe={real_data / 'blimp' / 'blimp.parquet'}"
    assert train(
        run, probe, "train.probe_pairs=67", "train.stop_at=2", "model.max_position_embeddings=256"
    ) == [0]
    scores = {
        r["step"]: r["blimp"] for r in read_log(run / "train" / "log.jsonl") if r["kind"] == "eval"
    }
    assert set(scores) == {0, 2}, output(run)
    assert all(0 <= s <= 100 for s in scores.values())


def test_ranks_that_reach_each_others_memory(whole, tmp_path, monkeypatch):
    """Passes of several shapes that use the same slots each time, and evaluations and probes of
    other shapes in between, some of them too large for a slot: the losses are those of one process."""
    run = fresh(whole, tmp_path / "run")
    (run / "vocab").unlink()
    spell(run / "vocab")
    monkeypatch.setenv("SHARED_FILES", str(tmp_path / "files"))
    probe = (f"train.probe={blimp_file(tmp_path)}", "train.probe_pairs=30", "train.eval_every=3")
    overrides = ("parallel.tp=2", "train.stop_at=26", *probe)
    assert train(run, *overrides, size=2, accident="peers:0") == [0, 0], output(run)
    assert "tp 2 x dp 1, tokens shared out by copy engines" in output(run)
    wanted = {k: v for k, v in losses(whole).items() if k <= 26}
    assert losses(run) == pytest.approx(wanted, abs=1e-5)
    assert sorted(evaluations(run)) == [*range(0, 25, 3), 26]


def test_machines_with_other_cards_pack_alike(whole, tmp_path):
    run = fresh(whole, tmp_path / "run")
    overrides = ("parallel.micro_batch_tokens=0", "train.stop_at=3")
    assert train(run, *overrides, size=2, accident="card:128:1") == [0, 0], output(run)
    assert "micro-batches of up to 128 tokens" in output(run)
    assert losses(run) == pytest.approx({k: losses(whole)[k] for k in (1, 2, 3)}, abs=1e-5)
