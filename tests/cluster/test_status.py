import json
import time

import pytest

from cluster import status
from cluster.submit import _refuse_queued
from configs import UserError

CHAIN = {
    "run": "r",
    "profile": "site",
    "command": "python -m cluster submit r",
    "jobs": [
        {"name": "prep", "id": "7"},
        {"name": "train-a", "id": "8"},
        {"name": "export", "id": "9"},
    ],
}
EDITED = [json.dumps({k: v for k, v in CHAIN.items() if k != gone}) for gone in CHAIN]
EDITED += [json.dumps(CHAIN | {"jobs": jobs}) for jobs in ([7], [{"name": "prep", "id": 7}], [{}])]


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A run whose jobs SLURM knows no more (its commands are not there)."""
    monkeypatch.setenv("PATH", "/nowhere")
    slurm = tmp_path / "work" / "slurm"
    slurm.mkdir(parents=True)
    (slurm / "chain.json").write_text(json.dumps(CHAIN))
    (slurm / "recipe.yaml").write_text("phases: [{steps: 100}, {steps: 50}]\n")
    (slurm / "prep.done").touch()
    (slurm / "prep.lives").write_text(
        "2026-01-01T00:00:00 job=7 life=0 step=0 started on n1\n"
        "2026-01-01T00:00:00 job=7 life=0 step=0 finished\n"
    )
    return slurm.parent


def write_training(work, steps, last="", every=10, minutes=0):
    """Log, recipe and checkpoints of `steps` updates of two seconds, the last one two seconds ago."""
    train, now = work / "train", time.time()
    train.mkdir(parents=True)
    with (train / "log.jsonl").open("w") as log:
        for step in range(1, steps + 1):
            line = {"kind": "train", "step": step, "loss": 9 - step / 10, "lr": 1e-3}
            line |= {"tokens_per_s": 1234.0, "time": now - 2 * (steps + 1 - step)}
            line |= {"spent_s": 2 * step} if minutes else {}
            log.write(json.dumps(line) + "\n")
        log.write(last)
    for step in range(every, steps + 1, every):
        (train / "checkpoints" / f"step-{step:08d}").mkdir(parents=True)
        (train / "checkpoints" / f"step-{step:08d}" / "checkpoint.json").touch()
    (train / "checkpoints" / "step-00000099").mkdir()  # not complete
    for name in ("step-00000098.partial-1a2", "step-00000097.kept"):
        (train / "checkpoints" / name).mkdir()
        (train / "checkpoints" / name / "checkpoint.json").touch()
    recipe = {"phases": [{"steps": 100}, {"steps": 50}], "train": {"max_minutes": minutes}}
    (train / "recipe.json").write_text(json.dumps(recipe))


def test_one_screen_from_files_alone(run):
    slurm = run / "slurm"
    (slurm / "train-a.lives").write_text(
        "2026-01-01T00:00:00 job=8 life=0 step=0 started on n1\n"
        "2026-01-01T00:00:00 job=8 life=1 step=40 started on n1\n"
        "2026-01-01T00:00:00 job=8 life=1 step=40 stopped rc=77: failed twice at step 40\n"
    )
    (slurm / "train-a.log").write_text("".join(f"line {n}\n" for n in range(100)))
    write_training(run, 40, last='{"kind": "train", "step": 41, "lo')  # being written
    screen = status.screen(run)
    assert len(screen.splitlines()) <= 40
    for text in (
        "prep               7         COMPLETED",
        "STOPPED",
        "failed twice at step 40",
        "update 40/150 (27%), loss 5.0000",
        "1,234 tokens/s",
        "ETA 3:40",
        "last checkpoint: " + str(run / "train" / "checkpoints" / "step-00000040"),
        "line 99",
        "python -m cluster submit r",
    ):
        assert text in screen, text
    assert "line 87\n" not in screen


@pytest.mark.parametrize("marked", [True, False])
@pytest.mark.parametrize(
    ("job_id", "events", "state"),
    [
        ("", [], "COMPLETED"),  # finished before: not queued again
        ("", ["job=3 life=0 step=9 stopped rc=1: x"], "COMPLETED"),
        ("8", [], "UNKNOWN"),
        ("8", ["job=3 life=0 step=9 finished"], "UNKNOWN"),
        ("8", ["job=3 life=0 step=9 finished", "job=8 life=0 step=0 started on n1"], "UNKNOWN"),
        ("8", ["job=3 life=0 step=9 finished", "job=8 life=0 step=9 stopped rc=1: x"], "STOPPED"),
        ("8", ["job=8 life=0 step=9 stopped rc=1: x", "job=3 life=0 step=9 finished"], "STOPPED"),
        ("8", ["job=8 life=0 step=0 started on n1", "job=8 life=1 step=9 finished"], "COMPLETED"),
    ],
)
def test_a_job_is_not_known_by_what_an_earlier_chain_left(run, marked, job_id, events, state):
    """Its marker is older than what the job of this chain says, or has not said yet."""
    slurm = run / "slurm"
    (slurm / "train-a.lives").write_text("".join(f"2026-01-01T00:00:00 {e}\n" for e in events))
    if marked:
        (slurm / "train-a.done").touch()
    found = status.from_files(slurm, "train-a", job_id)
    assert found.state == (state if marked or job_id else "STOPPED" if events else "UNKNOWN")


def test_before_the_first_update(run):
    assert "no update yet" in status.screen(run)


def test_a_run_without_slurm_shows_its_training(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    work = tmp_path / "runs" / "mine"
    write_training(work, 25)
    assert status.find_run("mine").absolute() == work
    assert status.find_run(str(work / "train")) == work
    screen = status.screen(work)
    for text in (
        "no jobs are known",
        "update 25/150 (17%), loss 6.5000, lr 0.001, 1,234 tokens/s, ETA 4:10",
        "last checkpoint: " + str(work / "train" / "checkpoints" / "step-00000020"),
    ):
        assert text in screen, text


@pytest.mark.parametrize(
    ("minutes", "said", "left"),
    [
        (2, "update 25 (42% of 2 min), loss 6.5", ", ETA 1:10 of running"),
        (5, "update 25/150 (17%), loss 6.5", ", ETA 4:10 of running"),  # the updates end before
        (0.5, "update 25 (100% of 0.5 min), loss 6.5", "1,234 tokens/s\n"),
    ],
)
def test_a_limit_of_time(tmp_path, minutes, said, left):
    write_training(tmp_path, 25, minutes=minutes)
    screen = status.screen(tmp_path)
    assert said in screen and left in screen


STEPS = ["0", "-5", "1.5", ".inf", ".nan", "null", '"7"']
TRAIN = [
    "null",
    "7",
    *(f'{{"max_minutes": {minutes}}}' for minutes in STEPS if minutes not in ("0", "1.5")),
]


@pytest.mark.parametrize(
    "content",
    ["", "{", "[]", "null", '{"phases": 3}', "[" * 3000]
    + [f'{{"phases": [{{"steps": {steps}}}]}}' for steps in STEPS]
    + [f'{{"phases": [{{"steps": 7}}], "train": {train}}}' for train in TRAIN],
)
def test_a_damaged_recipe_is_named_and_the_log_shown(run, content):
    write_training(run, 25)
    (run / "slurm" / "recipe.yaml").write_text(content)
    screen = status.screen(run)  # the trainer's own says it too
    assert "update 25/150 (17%)" in screen and "recipe.yaml is damaged" in screen
    (run / "train" / "recipe.json").write_text(content)
    screen = status.screen(run)
    for text in (
        "update 25/?, loss 6.5",
        "recipe.json is damaged",
        "prep               7",
        "step-0",
    ):
        assert text in screen, text


@pytest.mark.parametrize("content", ["", "{", "[]", "null", "{}", '{"jobs": 3}', *EDITED])
def test_a_damaged_list_of_jobs_is_named_and_the_training_shown(run, content):
    write_training(run, 25)
    (run / "slurm" / "chain.json").write_text(content)
    screen = status.screen(run)
    assert "chain.json is damaged" in screen and "update 25/150 (17%)" in screen
    with pytest.raises(UserError, match="chain.json is damaged.*\n.*delete .*chain.json"):
        _refuse_queued(run / "slurm")


def test_a_job_of_a_name_that_no_file_can_have(run):
    write_training(run, 25)
    (run / "slurm" / "chain.json").write_text(
        json.dumps(CHAIN | {"jobs": [{"name": "a\0b", "id": "7"}]})
    )
    assert "update 25/150 (17%)" in status.screen(run)


def test_a_run_without_any_recipe_shows_its_training(tmp_path):
    write_training(tmp_path, 25)
    (tmp_path / "train" / "recipe.json").unlink()
    assert "update 25/?" in status.screen(tmp_path)


def test_where_nothing_was_submitted_or_trained(tmp_path):
    with pytest.raises(UserError, match="nothing submitted, nothing trained"):
        status.find_run(str(tmp_path))
