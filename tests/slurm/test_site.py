"""What a site cannot give is said before anything is queued; what it gives is understood."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from cluster.environment import FIRST_PORT

from .mini import PATIENCE


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"partition": "mian"}, "partition=mian does not exist\n  -> did you mean main"),
        ({"gpus_per_node": 3}, "gpus_per_node asks for 3, partition main has 2 GPUs"),
        ({"nodes": 5}, "nodes asks for 5, partition main has 4 nodes"),
        ({"tasks_per_node": 2, "cpus_per_task": 3}, "asks for 6 CPUs, partition main has 4"),
        ({"sbatch_options": {"nodelist": "gpu99"}}, "sbatch --test-only"),
        ({"sbatch_options": {"gpus": "none"}}, "sbatch --test-only"),
        ({"time_limit": "soon"}, "time_limit=soon is no time"),
        ({"partion": "main"}, "unknown key partion\n  -> did you mean partition"),
    ],
)
def test_invalid_profile_is_refused_by_name(new_run, cluster, change, named):
    run = new_run("invalid").standin()
    run.profile |= change
    assert named in run.submit(fails=True)
    assert "invalid" not in cluster.run("squeue", "-h", "-a", "-t", "all", "-o", "%j")


def test_a_run_folder_that_cannot_be_written(new_run, tmp_path):
    (tmp_path / "file").touch()
    run = new_run("readonly").standin()
    run.recipe["work_dir"] = str(tmp_path / "file" / "work")
    assert "cannot be written" in run.submit(fails=True)


def test_no_daemon_of_the_cluster_holds_a_port_that_a_job_may_get(cluster):
    settings = dict(item.split("=") for item in (cluster.folder / "settings").read_text().split())
    assert 1024 <= int(settings["BASE"]) < int(settings["BASE"]) + 99 < FIRST_PORT


def test_b49_ranks_of_a_step_over_padded_and_mixed_names(cluster, repo):
    code = (
        "import json, os, socket; from cluster.environment import distributed_environment as d;"
        "print(json.dumps([os.environ['SLURM_JOB_NODELIST'], socket.gethostname(), d()]))"
    )
    text = cluster.run(
        "srun", "-N4", "-n7", "-m", "block", sys.executable, "-c", code, cwd=repo, timeout=200
    )
    lines = [json.loads(line) for line in text.splitlines()]
    assert {line[0] for line in lines} == {"alpha,gpu[08-10]"}
    by_rank = {int(env["RANK"]): (host, env) for _, host, env in lines}
    assert sorted(by_rank) == list(range(7))
    assert {env["MASTER_ADDR"] for _, env in by_rank.values()} == {by_rank[0][0]}
    assert len({env["MASTER_PORT"] for _, env in by_rank.values()}) == 1
    hosts = [host for host, _ in by_rank.values()]
    for host, env in by_rank.values():
        assert int(env["LOCAL_WORLD_SIZE"]) == hosts.count(host)


def test_one_gpu_per_task_is_understood(cluster, repo):
    code = "from cluster.environment import distributed_environment as d; print(d()['LOCAL_RANK'])"
    line = ["-N1", "-n2", "--gres=gpu:2", sys.executable, "-c", code]
    assert sorted(cluster.run("srun", *line, cwd=repo).split()) == ["0", "1"]
    # one task, one GPU visible
    each = ["-N1", "-n1", "--gres=gpu:1", sys.executable, "-c", code]
    assert cluster.run("srun", *each, cwd=repo).split() == ["0"]


def test_forgetting_srun_is_told(cluster, repo, tmp_path):
    script = tmp_path / "job.sh"
    script.write_text(f"#!/bin/sh\ncd {repo}\n{sys.executable} -m cluster launch -- true\n")
    done = subprocess.run(
        ["sbatch", "-W", "-n2", "-o", str(tmp_path / "log"), str(script)], capture_output=True
    )
    assert done.returncode == 2
    assert "put srun" in (tmp_path / "log").read_text()


def test_launch_gives_every_task_its_variables(cluster, repo):
    show = "echo $RANK $WORLD_SIZE $LOCAL_RANK $MASTER_ADDR"
    line = ["-N2", "-n4", sys.executable, "-m", "cluster", "launch", "--", "sh", "-c", show]
    ranks = sorted(cluster.run("srun", *line, cwd=repo).splitlines())
    assert [text.split()[:2] for text in ranks] == [[str(r), "4"] for r in range(4)]
    assert len({text.split()[3] for text in ranks}) == 1


def test_preflight_over_nodes_names_the_bad_one(cluster, repo, tmp_path):
    line = ["-N2", "-n2", sys.executable, "-m", "cluster", "preflight", "--no-all-reduce"]
    text = cluster.run("srun", *line, "--folder", str(tmp_path), cwd=repo)
    assert "2 processes on 2 nodes, versions equal" in text
    # one node sees another torch: a package folder that only its hostname gets
    bad = tmp_path / "bad"
    (bad / "torch-0.1.dist-info").mkdir(parents=True)
    (bad / "torch-0.1.dist-info" / "METADATA").write_text("Name: torch\nVersion: 0.1\n")
    shell = f'case $(hostname) in gpu09) export PYTHONPATH={bad};; esac; exec "$@"'
    done = subprocess.run(
        ["srun", "-N2", "-n2", "-w", "alpha,gpu09", "sh", "-c", shell, "-", *line[2:], "--folder", str(tmp_path)],
        capture_output=True,
        text=True,
        cwd=repo,
        timeout=120 * PATIENCE,
    )  # fmt: skip
    assert done.returncode != 0
    assert "gpu09: torch is 0.1" in done.stderr or "alpha: torch is" in done.stderr
