"""Jobs of a chain as their scripts run them, without SLURM: srun starts the one task here."""

from __future__ import annotations

import filecmp
import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import yaml

from cluster.slurm.chain import build_chain, local_shards
from cluster.slurm.render import render
from cluster.status import progress
from configs import load_recipe
from configs.loading import to_dict
from configs.schema import Profile
from pretrain.checkpoint.folder import checkpoints
from tests.trainer.runs import fresh, losses, output, train
from tests.trainer.test_phase_time import CLOCK, END, SWITCHES, options

SETS = ("len32", "len48")
REST = "{shards: len48, global_batch: 16, steps: 1}"  # a set is copied once, however many phases it has


class Chain:
    """The training jobs of a run's recipe; their commands are noted in place of the training."""

    def __init__(self, run: Path, *overrides: str, **profile: Any) -> None:
        self.run, self.slurm, self.bin = run, run / "slurm", run / "bin"
        recipe = load_recipe(run / "recipe.yaml", overrides)
        for folder in (self.slurm, self.bin):
            folder.mkdir(exist_ok=True)
        file = self.slurm / "recipe.yaml"
        file.write_text(yaml.safe_dump(to_dict(recipe)))
        site = Profile(tasks_per_node=1, preflight=False, python="note", **profile)
        self.local = Path(local_shards(recipe, site))
        self.jobs = {j.name: j for j in build_chain(recipe, file, site) if j.trains}
        for job in self.jobs.values():
            script = render(job, recipe, site, self.slurm, run)
            (self.slurm / f"{job.name}.sbatch").write_text(script)
        self.command("srun", 'while [[ $1 == --* ]]; do shift; done; exec "$@"')
        self.command("note", f'printf "%s\\n" "$@" > {run}/noted')

    def command(self, name: str, text: str) -> None:
        (self.bin / name).write_text(f"#!/bin/bash\n{text}\n")
        (self.bin / name).chmod(0o755)

    def start(self, name: str) -> subprocess.CompletedProcess[str]:
        env = {"PATH": f"{self.bin}:{os.environ['PATH']}", "SLURM_JOB_ID": "1"}
        env |= {"SLURM_JOB_NODELIST": "n1", "SLURM_NNODES": "1"}
        line = ["bash", str(self.slurm / f"{name}.sbatch")]
        return subprocess.run(line, capture_output=True, text=True, env=env, timeout=600)

    def trained(self) -> list[str]:
        """The overrides that the last script gave to `pretrain train RECIPE`."""
        words = (self.run / "noted").read_text().split("\n")[:-1]
        assert words[:4] == ["-m", "pretrain", "train", str(self.slurm / "recipe.yaml")]
        return words[4:]


def staging(run: Path) -> tuple[Chain, Path]:
    """A chain of three phases on two sets, and where its copies lie."""
    phases = "phases=[{{shards: len32, name: a, global_batch: 24, steps: 2}}, {}, {}]"
    two, three = (REST.replace("{", f"{{name: {name}, ") for name in "bc")
    chain = Chain(run, phases.format(two, three), stage_shards_to=str(run / "a node's disk"))
    return chain, chain.local


def test_runs_of_one_name_do_not_share_copies(run: Path, tmp_path: Path) -> None:
    """Each would replace the other's while it trains."""
    site = Profile(stage_shards_to="/local")
    recipes = [load_recipe(run / "recipe.yaml", [f"work_dir={w}"]) for w in (run, run, tmp_path)]
    one, again, other = (local_shards(recipe, site) for recipe in recipes)
    assert one == again != other


def same_files(ours: Path, theirs: Path) -> bool:
    names = [{str(p.relative_to(f)) for p in f.rglob("*") if p.is_file()} for f in (ours, theirs)]
    return names[0] == names[1] and not any(
        filecmp.cmpfiles(ours, theirs, names[0], shallow=False)[1:]
    )


def test_each_job_trains_on_copies_of_all_sets(run: Path) -> None:
    """A phase on one set was refused for lack of the next one's."""
    chain, local = staging(run)
    for name, step in (("train-a", 2), ("train-b", 3), ("train-c", 4)):
        done = chain.start(name)
        assert done.returncode == 0, done.stderr
        assert sorted(p.name for p in local.iterdir()) == list(SETS)
        (run / "shards").rename(run / "away")
        try:
            assert train(run, *chain_phases(chain), *chain.trained()) == [0], output(run)
        finally:
            (run / "away").rename(run / "shards")
        assert max(losses(run)) == step


def chain_phases(chain: Chain) -> list[str]:
    phases = yaml.safe_load((chain.slurm / "recipe.yaml").read_text())["phases"]
    return [f"phases={json.dumps(phases)}"]


def test_copies_that_are_not_whole_are_made_again(run: Path) -> None:
    """Cut by a kill, by a power failure, thinned out, or of other shards; whole ones stay."""
    chain, local = staging(run)
    one, two = (local / name for name in SETS)
    theirs = [run / "shards" / name for name in SETS]

    def check() -> list[int]:
        done = chain.start("train-a")
        assert done.returncode == 0, done.stderr
        assert all(map(same_files, (one, two), theirs))
        assert sorted(p.name for p in local.iterdir()) == list(SETS)
        return [folder.stat().st_ino for folder in (one, two)]

    (local / "len32.part").mkdir(parents=True)
    (local / "len32.part" / "index.json").write_text("of a killed job")
    (local / "len32.part" / "part-00009.arrow").touch()
    first = check()
    assert check() == first
    (local / "len48.part").mkdir()
    assert check() == first
    os.truncate(two / "part-00001.arrow", 100)
    second = check()
    assert second[0] == first[0]
    (one / "held-out" / "part-00000.arrow").unlink()
    check()
    (two / "index.json").write_text("of other shards")
    (two / "part-00007.arrow").touch()
    check()


def test_a_disk_too_small_for_the_copies_is_told_with_the_sizes(run: Path) -> None:
    """Before anything is copied, of all sets together; what lies there whole needs no room."""
    chain, local = staging(run)
    sizes = [
        -(-sum(p.stat().st_size for p in (run / "shards" / name).rglob("*") if p.is_file()) // 1024)
        for name in SETS
    ]
    real = shutil.which("df")
    free = sum(sizes) - 1  # du counts folders too
    chain.command("df", f"{real} \"$@\" | awk 'NR == 2 {{ $4 = {free} }} {{ print }}'")
    done = chain.start("train-a")
    assert done.returncode == 2
    told = f"{free * 1024 / 1e9:.3g} GB are free"
    for text in (
        f":{local}: copies of the shards take",
        "len32 ",
        "len48 ",
        told,
        "stage_shards_to",
    ):
        assert text in done.stderr
    assert done.stderr.count("copies of the shards") == 1  # trying again is no use
    assert "stopped rc=2: copying shards failed" in (chain.slurm / "train-a.lives").read_text()
    assert not (run / "noted").exists() and not any(local.iterdir())
    shutil.copytree(run / "shards" / "len32", local / "len32")
    assert chain.start("train-a").returncode == 0
    assert chain.start("train-a").returncode == 0


def test_shards_that_are_gone_are_named_and_their_copy_is_kept(run: Path) -> None:
    chain, local = staging(run)
    assert chain.start("train-a").returncode == 0
    (run / "shards").rename(run / "away")
    done = chain.start("train-b")
    assert done.returncode == 1 and f"{run}/shards/len32: no shards" in done.stderr
    assert same_files(local / "len32", run / "away" / "len32")


def named(phases: list[str]) -> list[str]:
    return [*phases, *(f"phases.{n}.name={name}" for n, name in enumerate("abc"))]


def test_phases_that_the_time_ends_leave_later_jobs_nothing_to_do(
    base: Path, tmp_path: Path
) -> None:
    """And these end well, so that export and evaluation follow. Jobs stop at sums of steps, which a
    phase that ends early lets the first job reach in a later one."""
    by_steps, by_time = f"update {END}/{END} (100%)", "update 31 (100% of 0.5 min)"
    for last, stop, status in ((END - SWITCHES[-1], END, by_steps), (40, 31, by_time)):
        run = fresh(base, tmp_path / f"last-{last}")
        ours = named(options(last))
        chain = Chain(run, *ours)
        assert len(chain.jobs) == 3
        for name in chain.jobs:
            assert chain.start(name).returncode == 0
            assert train(run, *ours, *chain.trained(), accident=CLOCK) == [0], output(run)
            assert [step for step, _ in checkpoints(run / "train")] == [*SWITCHES, stop]
            first = name == next(iter(chain.jobs))
            assert ("nothing to do" in output(run)) != first
        line = progress(run)[0]
        assert status in line and "ETA" not in line


def test_a_job_may_stop_in_a_later_phase_and_the_next_goes_on(run: Path) -> None:
    """At the first phase's steps, 12, of which the time has left 10."""
    few = [*named(options()), "phases.0.steps=12"]
    chain = Chain(run, *few)
    for name, stop in zip(chain.jobs, (12, END, END)):
        assert chain.start(name).returncode == 0
        assert train(run, *few, *chain.trained(), accident=CLOCK) == [0], output(run)
        assert max(losses(run)) == stop
