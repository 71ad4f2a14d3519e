"""The real rooms on the real scheduler: MPI preparation, training, export and evaluation."""

from __future__ import annotations

import filecmp
import json
import random
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster.nodes import expand

from .mini import Cluster, Run, wait_for

WORDS = [
    "kiln",
    "glaze",
    "clay",
    "fire",
    "wheel",
    "bowl",
    "ash",
    "salt",
    "slip",
    "jar",
    "potter",
    "hand",
    "oven",
    "night",
    "river",
    "stone",
]


def write_books(folder: Path) -> None:
    draw = random.Random(7)
    folder.mkdir(parents=True)
    for book in range(12):
        paragraphs = [
            " ".join(
                " ".join(draw.choices(WORDS, k=draw.randint(4, 12))).capitalize() + "."
                for _ in range(draw.randint(2, 6))
            )
            for _ in range(30)
        ]
        (folder / f"book{book:02d}.txt").write_text("\n\n".join(paragraphs) + "\n")


def real(run: Run, books: Path) -> Run:
    """The demo's shape at the smallest size."""
    run.recipe |= {
        "seed": 3,
        "sources": [{"kind": "books", "path": str(books)}],
        "vocab": {"size": 200, "min_frequency": 1},
        "prep": {"held_out": 0.1, "workers": 1},
        "shards": {"len64": {"max_length": 64}},
        "model": {
            "preset": "bert-tiny",
            "hidden_size": 32,
            "num_heads": 2,
            "max_position_embeddings": 64,
        },
        "parallel": {"micro_batch_tokens": 512},
        "phases": [
            {"name": "a", "shards": "len64", "global_batch": 16, "steps": 150},
            {"name": "b", "shards": "len64", "global_batch": 16, "steps": 4},
        ],
        "train": {"precision": "fp32", "eval_rows": 16, "threads": 1},
        "checkpoint": {"every": 20},
        "guard": {"hang_timeout_s": 60},
    }
    run.profile |= {
        "prep_nodes": 2,
        "environment": {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"},
    }
    return run


@pytest.fixture(scope="module")
def books(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("text") / "books"
    write_books(folder)
    return folder


@pytest.fixture(scope="module")
def quiet(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory, books: Path) -> Iterator[Run]:
    """The undisturbed chain."""
    run = real(Run(cluster, tmp_path_factory.mktemp("real") / "quiet"), books)
    run.profile["sbatch_options"] = {"exclude": "alpha,gpu08"}  # where the other one is disturbed
    run.profile["preflight"] = True
    run.submit()
    yield run
    run.cancel()


def test_chain(quiet, repo):
    quiet.finish(400)
    assert sorted(quiet.losses()) == list(range(1, 155))
    assert (quiet.work / "hf" / "config.json").exists()
    assert "2 processes on 2 nodes, versions equal" in quiet.output("train-a")
    assert "all-reduce of 64 MB over 2 processes" in quiet.output("train-a")
    screen = subprocess.run(
        [sys.executable, "-m", "cluster", "status", str(quiet.work)],
        capture_output=True,
        text=True,
        cwd=repo,
        check=True,
    ).stdout
    assert screen.count("COMPLETED") == 5
    assert "update 154/154" in screen


def test_mpi_prep_over_two_nodes_gives_the_bytes_of_one_process(quiet, repo, tmp_path):
    quiet.wait_state("prep", "COMPLETED", seconds=200)
    assert "--mpi=pmix" in (quiet.work / "slurm" / "prep.sbatch").read_text()
    recipe = str(quiet.folder / "recipe.yaml")
    shutil.copytree(quiet.work / "vocab", tmp_path / "vocab")
    line = [sys.executable, "-m", "data_prep", "build", recipe, f"work_dir={tmp_path}"]
    subprocess.run(line, cwd=repo, check=True, capture_output=True)
    ours, theirs = tmp_path / "shards" / "len64", quiet.work / "shards" / "len64"
    names = sorted(p.relative_to(ours) for p in ours.rglob("*") if p.is_file())
    parts = [name for name in names if name.suffix in (".arrow", ".u16", ".u8", ".json")]
    assert any(name.suffix == ".arrow" for name in parts)
    same, differ, missing = filecmp.cmpfiles(ours, theirs, [str(n) for n in parts], shallow=False)
    assert (differ, missing) == ([], [])


def test_preempted_and_cut_training_ends_with_the_same_losses(quiet, cluster, new_run, books):
    quiet.wait_state("prep", "COMPLETED", seconds=200)
    run = real(new_run("disturbed"), books)
    shutil.copytree(quiet.work / "vocab", run.work / "vocab")
    run.profile |= {"partition": "low", "prep_nodes": 1}
    run.profile["sbatch_options"] = {"exclude": "gpu09,gpu10"}
    run.submit()
    run.wait_step(2, 240)
    cluster.run(
        "sbatch",
        "-p",
        "high",
        "-w",
        "alpha,gpu08",
        "-N2",
        "--exclusive",
        "-o",
        "/dev/null",
        "--wrap",
        "sleep 1",
    )
    wait_for(lambda: run.restarts() == 1, 120, "the preemption", run.report)
    saved_at = run.step()
    run.wait_step(saved_at + 2, 240)
    nodes = expand(run.lives("train-a").split("started on ")[-1].split()[0])
    cluster.do("kill-node", nodes[-1])
    try:
        wait_for(lambda: run.restarts() == 2, 200, "the power cut", run.report)
    finally:
        cluster.do("start-node", nodes[-1])
    run.wait_state("train-b", "COMPLETED", seconds=400)
    quiet.finish(400)
    assert run.losses() == quiet.losses()


def test_b19_a_prep_that_fails_ends_at_once_and_says_why(quiet, new_run, tmp_path):
    quiet.wait_state("prep", "COMPLETED", seconds=200)
    run = real(new_run("unreadable"), tmp_path / "no-such-books")
    shutil.copytree(quiet.work / "vocab", run.work / "vocab")
    run.submit()
    run.wait_state("prep", "FAILED", seconds=60)
    run.wait_state("evaluate", "CANCELLED")
    assert "no-such-books" in run.output("prep")
    assert "stopped rc=2" in run.lives("prep")


# pdsh calls this: a node of the allocation, reached by srun where a site has ssh.
SSH = """#!/bin/bash
while [[ $1 == -* ]]; do case $1 in -o | -l | -p) shift 2 ;; *) shift ;; esac; done
node=$1; shift
exec srun --overlap --nodes=1 --ntasks=1 --ntasks-per-node=1 --nodelist="$node" bash -c "$*" < /dev/null
"""


@pytest.mark.parametrize("launcher", ["slurm", "openmpi", "pdsh"])
def test_deepspeed_launcher_starts_two_by_two(quiet, repo, tmp_path, launcher):
    """With the command line that `cluster hostfile` prints."""
    quiet.wait_state("prep", "COMPLETED", seconds=200)
    work, log, script = tmp_path / "work", tmp_path / "log", tmp_path / "job.sh"
    for name in ("vocab", "shards"):
        shutil.copytree(quiet.work / name, work / name)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "ssh").write_text(SSH)
    (tmp_path / "bin" / "ssh").chmod(0o755)
    recipe = f"{quiet.folder}/recipe.yaml work_dir={work} train.stop_at=4 parallel.tp=2"
    script.write_text(
        "#!/bin/bash\nset -e\n"
        f"export PATH={tmp_path}/bin:{Path(sys.executable).parent}:$PATH OMP_NUM_THREADS=1 DS_ACCELERATOR=cpu\n"
        "export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1  # only this test is root\n"
        f"cd {repo}\n"
        f"python -m cluster hostfile --slots 2 -o {tmp_path}/hosts > {tmp_path}/said\n"
        f"line=$(grep -- '--launcher {launcher}' {tmp_path}/said)\n"
        f'recipe="{recipe}"; eval "${{line/RECIPE/$recipe}}"\n'
    )
    cluster = quiet.cluster
    line = ["sbatch", "--parsable", "-N2", "--ntasks-per-node=2", "--exclude=gpu08", "-o", str(log)]
    job = cluster.run(*line, str(script)).strip()
    ends = ("COMPLETED", "FAILED", "CANCELLED")
    state = wait_for(lambda: (now := cluster.state(job)) in ends and now, 300, "the training")
    assert state == "COMPLETED", log.read_text()[-5000:]
    assert "tp 2 x dp 2" in log.read_text()
    records = [json.loads(text) for text in (work / "train" / "log.jsonl").read_text().splitlines()]
    assert [r["step"] for r in records if r["kind"] == "train"] == [1, 2, 3, 4]
