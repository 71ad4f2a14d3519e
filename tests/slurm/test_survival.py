"""Faults of a cluster, forced on the stand-in trainer: afterwards its losses are those of a quiet run.

Scenarios that leave the cluster whole run side by side, since most of their time is waiting.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from cluster.nodes import expand
from cluster.slurm.chain import local_shards
from configs.schema import Profile, Recipe

from .mini import Cluster, Run, wait_for

STEPS = 40


def quiet_losses() -> dict[int, float]:
    state, losses = 1, {}
    for update in range(STEPS):
        state = (state * 6364136223846793005 + update) % 2**64
        losses[update + 1] = state / 2**64
    return losses


def finish(run: Run, seconds: float = 200) -> None:
    run.finish(seconds)
    assert run.losses() == quiet_losses(), run.report()


def chain_runs_in_order_and_is_not_run_again(run: Run) -> None:
    run.move("a %j of it's own")  # what a shell and sbatch take for more than a name
    run.standin(update_s=0.05).submit()
    refused = run.submit(fails=True)
    assert "of this run is" in refused
    finish(run)
    assert len(run.log()) == STEPS
    assert run.restarts() == 0
    assert run.output("train-a")
    assert run.submit().count("finished before") == 5


def b51_signal_ahead_of_the_time_limit(run: Run) -> None:
    run.standin(update_s=1.0)
    run.recipe["phases"] = [{"name": "a", "steps": STEPS}]
    run.profile |= {"time_limit": "2", "signal_lead_s": 100, "nodes": 1, "tasks_per_node": 2}
    run.submit()
    finish(run)
    assert len(run.log()) == STEPS  # saved each time: no update was done twice
    assert run.restarts() >= 1
    assert run.lives("train-a").count("signal USR1") == run.restarts()


def b51_another_signal(run: Run) -> None:
    run.profile["signal"] = "USR2"
    run.standin(update_s=0.2).submit()
    run.wait_step(5)
    run.cluster.run("scancel", "--batch", "--signal=USR2", run.ids["train-a"])
    finish(run)
    assert len(run.log()) == STEPS
    assert run.restarts() == 1


def b51_term_only_and_twice(run: Run) -> None:
    run.standin(update_s=0.2).submit()
    run.wait_step(5)
    line = ["scancel", "--signal=TERM", run.ids["train-a"]]
    first, second = (subprocess.Popen(line) for _ in range(2))
    assert first.wait() == 0 or second.wait() == 0
    finish(run)
    assert len(run.log()) == STEPS
    assert run.restarts() == 1


def b51_preemption_saves_and_requeues_once(run: Run) -> None:
    run.profile |= {"nodes": 1, "tasks_per_node": 2, "sbatch_options": {"nodelist": "alpha"}}
    run.profile["partition"] = "low"
    run.standin(update_s=0.2).submit()
    run.wait_step(5)
    intruder = ["sbatch", "-p", "high", "-w", "alpha", "--exclusive", "-o", "/dev/null"]
    run.cluster.run(*intruder, "--wrap", "sleep 1")
    finish(run)
    assert len(run.log()) == STEPS  # saved at the next update: nothing was done twice
    assert run.restarts() == 1
    assert run.lives("train-a").count("started on") == 2


def cancelled_by_a_person_stays_cancelled(run: Run) -> None:
    run.standin(update_s=0.3).submit()
    run.wait_step(3)
    run.cluster.run("scancel", run.ids["train-a"])
    run.wait_state("train-a", "CANCELLED")
    run.wait_state("train-b", "CANCELLED")
    wait_for(lambda: "no requeue" in run.lives("train-a"), 20, "the word about it", run.report)
    at = run.step()
    assert run.submit().count("finished before") == 1  # prep
    finish(run)
    assert [line["step"] for line in run.log()].count(at) == 1


def shards_are_copied_to_each_node_once(run: Run) -> None:
    """Those of all phases by the first job, from a node that a killed one had left."""
    shards, site = run.work / "shards", Profile(stage_shards_to=str(run.folder / "local"))
    local = Path(local_shards(Recipe(name=run.recipe["name"], work_dir=str(run.work)), site))
    run.recipe["shards"] = {"one": {}, "two": {}}
    for phase, name in zip(run.recipe["phases"], ("one", "two")):
        phase["shards"] = name
        (shards / name).mkdir(parents=True)
        (shards / name / "index.json").write_text(name)
    (local / "one.part").mkdir(parents=True)
    (local / "one.part" / "index.json").write_text("half")
    run.profile |= {"stage_shards_to": site.stage_shards_to, "nodes": 1, "tasks_per_node": 2}
    run.standin(update_s=0.01).submit()
    run.wait_state("train-a", "COMPLETED", seconds=200)
    copies = {name: local / name / "index.json" for name in ("one", "two")}
    assert {name: copy.read_text() for name, copy in copies.items()} == {n: n for n in copies}
    made = [copy.stat().st_ino for copy in copies.values()]
    finish(run)
    assert [copy.stat().st_ino for copy in copies.values()] == made
    assert sorted(local.iterdir()) == [copy.parent for copy in copies.values()]
    for job in ("train-a", "train-b"):
        script = (run.work / "slurm" / f"{job}.sbatch").read_text()
        assert f"train.shards_dir={local}" in script


def a_rank_that_exits_is_started_again(run: Run) -> None:
    failing_once(run, "exit@15:1")


def a_rank_that_hangs_is_started_again(run: Run) -> None:
    failing_once(run, "hang@15:1")


def failing_once(run: Run, fault: str) -> None:
    run.standin(fault).submit()
    finish(run)
    assert run.restarts() == 0  # within the allocation, without the queue
    assert len(re.findall(r"step=14 failed rc=\d+", run.lives("train-a"))) == 1


def failing_twice_at_the_same_step_stops_with_the_reason(run: Run) -> None:
    run.standin("exit@15:1:always").submit()
    run.wait_state("train-a", "FAILED", seconds=100)
    run.wait_state("evaluate", "CANCELLED")
    assert "failed twice at step 14" in run.lives("train-a")
    assert run.step() == 14
    assert "the planned fault" in run.output("train-a")


def a_torchrun_per_node_hands_signals_on(run: Run) -> None:
    starter_hands_signals_on(run, "torchrun")


def a_deepspeed_per_node_hands_signals_on(run: Run) -> None:
    starter_hands_signals_on(run, "deepspeed")


def starter_hands_signals_on(run: Run, starter: str) -> None:
    run.profile |= {"starter": starter, "tasks_per_node": 2}
    run.standin(update_s=0.3).submit()
    run.wait_step(3, 100)
    run.cluster.run("scancel", "--batch", "--signal=USR1", run.ids["train-a"])
    finish(run)
    assert len(run.log()) == STEPS
    assert run.restarts() == 1


SIDE_BY_SIDE: list[Callable[[Run], None]] = [
    b51_signal_ahead_of_the_time_limit,
    a_torchrun_per_node_hands_signals_on,
    a_deepspeed_per_node_hands_signals_on,
    b51_preemption_saves_and_requeues_once,
    b51_another_signal,
    b51_term_only_and_twice,
    cancelled_by_a_person_stays_cancelled,
    chain_runs_in_order_and_is_not_run_again,
    shards_are_copied_to_each_node_once,
    a_rank_that_exits_is_started_again,
    a_rank_that_hangs_is_started_again,
    failing_twice_at_the_same_step_stops_with_the_reason,
]


@pytest.fixture(scope="module")
def scenarios(
    cluster: Cluster, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Future[None]]]:
    folder = tmp_path_factory.mktemp("survival")
    runs = {s.__name__: Run(cluster, folder / s.__name__[:20]) for s in SIDE_BY_SIDE}
    for name, run in runs.items():  # alpha is left to those that preempt each other
        if "preemption" not in name:
            run.profile["sbatch_options"] = {"exclude": "alpha"}
    with ThreadPoolExecutor(6) as pool:
        futures = {s.__name__: pool.submit(s, runs[s.__name__]) for s in SIDE_BY_SIDE}
        yield futures
        for future in futures.values():
            future.cancel()
    for run in runs.values():
        run.cancel()


@pytest.mark.parametrize("name", [s.__name__ for s in SIDE_BY_SIDE])
def test_scenario(scenarios, name):
    scenarios[name].result()


def test_power_cut_of_a_node(new_run, cluster):
    run = new_run("cut")
    run.standin(update_s=0.2).submit()
    run.wait_step(12)
    nodes = expand(run.lives("train-a").split("started on ")[1].split()[0])
    assert len(nodes) == 2
    cluster.do("kill-node", nodes[-1])
    try:
        finish(run)
        assert run.restarts() == 1
    finally:
        cluster.do("start-node", nodes[-1])


def test_controller_crash(new_run, cluster):
    run = new_run("controller")
    run.standin(update_s=1.0).submit()
    run.wait_step(10)  # an update a second: SLURM writes its memory of the jobs up to 5 s late
    cluster.do("kill-ctld")
    at = run.step()
    try:
        run.wait_step(at + 3)  # the training does not notice
    finally:
        cluster.do("start-ctld")
    finish(run)
    assert len(run.log()) == STEPS
