import shutil
import subprocess
import sys

import pytest

from cluster.checks import NodeReport, compare, examine, read_gpu_table, read_quota
from cluster.environment import free_port
from cluster.preflight import remedy_of

H100 = "NVIDIA H100 80GB HBM3, 550.54, 0, 4"


def test_healthy_gpus():
    names, driver, problems = read_gpu_table("\n".join([H100] * 8), 8)
    assert (len(names), driver, problems) == (8, "550.54", [])


@pytest.mark.parametrize(
    ("table", "named"),
    [
        ("\n".join([H100] * 7), "7 GPUs answer, 8 were expected"),
        ("\n".join([H100] * 7 + [H100.replace(" 0,", " 12,")]), "GPU 7 .* 12 uncorrected"),
        ("\n".join([H100] * 7 + [H100.replace(", 4", ", 70000")]), "GPU 7 .*another process"),
        ("\n".join([H100] * 7 + ["[GPU is lost]"]), "GPU 7"),
        ("\n".join([H100] * 7 + [H100.replace("H100", "A100")]), "GPUs differ"),
    ],
)
def test_a_bad_gpu_is_named(table, named):
    problems = read_gpu_table(table, 8)[2]
    assert any(__import__("re").search(named, problem) for problem in problems), problems


def test_the_node_with_another_version_is_named():
    reports = [NodeReport(i, f"gpu{i}", {"torch": "2.11.0"}) for i in range(3)]
    assert compare(reports) == []
    reports[1].versions["torch"] = "2.13.0"
    assert compare(reports) == ["gpu1: torch is 2.13.0, on the others 2.11.0"]


def test_disk(tmp_path):
    assert examine(0, tmp_path / "new", 0, 0.001, 3).problems == []
    assert "checkpoints to come need" in examine(0, tmp_path, 0, 1e9, 3).problems[0]
    file = tmp_path / "file"
    file.touch()
    assert "cannot be written" in examine(0, file / "run", 0).problems[0]


@pytest.mark.parametrize("keep", [1, 3])
@pytest.mark.parametrize("there", range(6))
def test_checkpoints_that_are_there_need_no_room_again(tmp_path, monkeypatch, keep, there):
    """Of a requeued job or a second phase: as the training itself counts them (pretrain.check_disk)."""
    saved = tmp_path / "train" / "checkpoints"
    for step in range(1, there + 1):
        (saved / f"step-{step:08d}").mkdir(parents=True)
        (saved / f"step-{step:08d}" / "checkpoint.json").touch()
    (saved / "step-00000099").mkdir(parents=True)  # not complete
    for left in (0, 10**9):  # of a killed save, which goes first
        (saved / "step-00000100.partial-1a2").mkdir(exist_ok=True)
        with (saved / "step-00000100.partial-1a2" / "part").open("wb") as file:
            file.truncate(left)
        more = max(1, keep + 1 - there)
        for free, fits in (
            (more * 7 * 10**9 - left, True),
            (more * 7 * 10**9 - left - 10**8, False),
        ):
            usage = shutil._ntuple_diskusage(total=10**12, used=0, free=free)
            monkeypatch.setattr(shutil, "disk_usage", lambda _, usage=usage: usage)
            assert (examine(0, tmp_path, 0, 7.0, keep).problems == []) == fits


def test_quota():
    text = "Disk quotas for user ann (uid 7):\nhome:/x 9000000* 8000000 10000000 6days 1 0 0\n"
    assert read_quota(text, "home:/x") == pytest.approx(1000000 * 1024 / 1e9)
    assert read_quota(text, "other:/x") is None
    assert read_quota("a:/b 5 0 0 1 0 0\n", "a:/b") is None  # no limit


def preflight(rank, world, port, *arguments, cwd, **more):
    env = {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank)}
    env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "PATH": "/usr/bin:/bin", **more}
    line = [sys.executable, "-m", "cluster", "preflight", "--no-all-reduce", *arguments]
    return subprocess.Popen(
        line, env=env, cwd=cwd, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


def test_all_ranks_agree_and_a_bad_one_is_named(repo, tmp_path):
    good, file = tmp_path / "run", tmp_path / "file"
    file.touch()
    port = free_port()
    both = [preflight(r, 2, port, "--folder", str(good), cwd=repo) for r in (0, 1)]
    outputs = [p.communicate(timeout=600) for p in both]
    assert [p.returncode for p in both] == [0, 0], outputs
    assert "2 processes on 1 nodes" in outputs[0][0]

    folders = [good, file / "run"]
    both = [preflight(r, 2, port, "--folder", str(folders[r]), cwd=repo) for r in (0, 1)]
    outputs = [p.communicate(timeout=600) for p in both]
    assert [p.returncode for p in both] == [2, 2], outputs
    assert "cannot be written" in outputs[0][1]
    assert "exclude" in outputs[0][1]


def test_who_does_not_come_and_who_cannot_reach(repo, tmp_path):
    port = free_port()
    alone = [
        preflight(0, 2, port, "--wait", "1", "--folder", str(tmp_path), cwd=repo),
        preflight(1, 2, free_port(), "--wait", "1", "--folder", str(tmp_path), cwd=repo),
    ]
    outputs = [p.communicate(timeout=600) for p in alone]
    assert [p.returncode for p in alone] == [2, 2]
    assert "no word from rank 1" in outputs[0][1]
    assert "cannot reach the first node" in outputs[1][1]


def test_a_shared_folder_is_no_node_to_leave_out():
    full = [f"n{k}: 3.0 GB free at /w, the checkpoints to come need 40.0" for k in (1, 2)]
    assert "no node is to blame" in remedy_of(full, 2)
    assert "exclude: 'n1'" in remedy_of(full[:1], 2)
    assert "exclude: 'n[1-2]'" in remedy_of(["n1: GPU 3 lost", "n2: GPU 1 lost"], 2)
    assert "did not start" in remedy_of(["only 1 of 2 reported"], 2)
