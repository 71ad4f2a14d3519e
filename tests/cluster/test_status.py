import json
import time

import pytest

from cluster import status
from configs import UserError


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A run whose jobs SLURM knows no more (its commands are not there)."""
    monkeypatch.setenv("PATH", "/nowhere")
    slurm = tmp_path / "work" / "slurm"
    slurm.mkdir(parents=True)
    jobs = [
        {"name": "prep", "id": "7"},
        {"name": "train-a", "id": "8"},
        {"name": "export", "id": "9"},
    ]
    chain = {"run": "r", "profile": "site", "command": "python -m cluster submit r", "jobs": jobs}
    (slurm / "chain.json").write_text(json.dumps(chain))
    (slurm / "recipe.yaml").write_text("phases: [{steps: 100}, {steps: 50}]\n")
    (slurm / "prep.done").touch()
    return slurm.parent


def test_one_screen_from_files_alone(run):
    slurm, now = run / "slurm", time.time()
    (slurm / "train-a.lives").write_text(
        "2026-01-01T00:00:00 job=8 life=0 step=0 started on n1\n"
        "2026-01-01T00:00:00 job=8 life=1 step=40 started on n1\n"
        "2026-01-01T00:00:00 job=8 life=1 step=40 stopped rc=77: failed twice at step 40\n"
    )
    (slurm / "train-a.log").write_text("".join(f"line {n}\n" for n in range(100)))
    (run / "train").mkdir()
    with open(run / "train" / "log.jsonl", "w") as log:
        for step in range(1, 41):
            line = {"kind": "train", "step": step, "loss": 9 - step / 10, "lr": 1e-3}
            line |= {"tokens_per_s": 1234.0, "time": now - 2 * (41 - step)}
            log.write(json.dumps(line) + "\n")
        log.write('{"kind": "train", "step": 41, "lo')  # being written
    screen = status.screen(run)
    assert len(screen.splitlines()) <= 40
    for text in (
        "prep               7         COMPLETED",
        "STOPPED",
        "failed twice at step 40",
        "update 40/150 (27%), loss 5.0000",
        "1,234 tokens/s",
        "ETA 3:40",
        "line 99",
        "python -m cluster submit r",
    ):
        assert text in screen, text
    assert "line 87\n" not in screen


def test_before_the_first_update(run):
    assert "no update yet" in status.screen(run)


def test_a_run_that_was_never_submitted(tmp_path):
    with pytest.raises(UserError, match="no chain of jobs"):
        status.find_run(str(tmp_path))
