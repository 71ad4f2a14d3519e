import socket
import subprocess
import sys

import pytest

from cluster.environment import FIRST_PORT, PORTS, distributed_environment, job_port
from configs import UserError

SLURM = {
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "8",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
    "SLURM_JOB_NODELIST": "gpu[008-009]",
}
OMPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}


def pick(env, *keys):
    result = distributed_environment(env)
    return tuple(result[key] for key in keys)


def test_one_process_alone_has_a_free_port_of_its_own():
    env = distributed_environment({})
    assert (env["RANK"], env["WORLD_SIZE"], env["LOCAL_RANK"]) == ("0", "1", "0")
    assert env["MASTER_ADDR"] == "127.0.0.1"
    assert int(env["MASTER_PORT"]) > 1023


def test_slurm_step():
    keys = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    assert pick(SLURM, *keys) == ("5", "8", "1", "4", "gpu008", str(job_port(SLURM)))


def test_slurm_step_on_a_part_of_the_allocation_meets_on_its_own_first_node():
    assert pick(SLURM | {"SLURM_STEP_NODELIST": "gpu009"}, "MASTER_ADDR") == ("gpu009",)


def test_uneven_tasks_per_node():
    env = SLURM | {"SLURM_STEP_TASKS_PER_NODE": "3(x2),2", "SLURM_NODEID": "2"}
    assert pick(env, "LOCAL_WORLD_SIZE") == ("2",)


def test_ports_differ_between_jobs_steps_and_lives():
    other = [{"SLURM_JOB_ID": "78"}, {"SLURM_STEP_ID": "1"}, {"SLURM_RESTART_COUNT": "1"}]
    ports = {job_port(SLURM), *(job_port(SLURM | change) for change in other)}
    assert len(ports) == 4
    assert all(FIRST_PORT <= port < FIRST_PORT + PORTS for port in ports)


def test_explicit_variables_win_over_slurm():
    env = SLURM | {"RANK": "1", "WORLD_SIZE": "16", "LOCAL_RANK": "1", "MASTER_ADDR": "h"}
    assert pick(env, "RANK", "WORLD_SIZE", "MASTER_ADDR") == ("1", "16", "h")


def test_open_mpi_wins_over_the_slurm_task_of_its_daemon():
    env = SLURM | OMPI
    assert pick(env, "RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR") == ("3", "4", "1", "gpu008")
    with pytest.raises(UserError, match="MASTER_ADDR is not set"):
        distributed_environment(OMPI)
    assert pick(OMPI | {"MASTER_ADDR": "h"}, "MASTER_ADDR") == ("h",)


def test_ranks_of_one_mpirun_agree_on_a_port_whatever_step_their_daemon_is():
    one = OMPI | {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "PMIX_NAMESPACE": "prterun-a-17@1"}
    assert job_port(one) == job_port(one | {"SLURM_STEP_ID": "4"})
    assert job_port(one) != job_port(one | {"PMIX_NAMESPACE": "prterun-a-18@1"})


def test_pmi():
    env = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
    assert pick(env, "RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR") == (
        "1",
        "2",
        "1",
        "127.0.0.1",
    )


def test_deepspeed_counts_local_processes_under_another_name():
    env = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_SIZE": "2", "MASTER_ADDR": "h"}
    assert pick(env, "LOCAL_WORLD_SIZE") == ("2",)


def test_a_task_that_sees_one_gpu_uses_that_one():
    assert pick(SLURM | {"CUDA_VISIBLE_DEVICES": "3"}, "LOCAL_RANK") == ("0",)
    assert pick(SLURM | {"CUDA_VISIBLE_DEVICES": "4,5,6,7"}, "LOCAL_RANK") == ("1",)


@pytest.mark.parametrize(
    ("env", "named"),
    [
        ({"RANK": "0"}, "WORLD_SIZE"),
        ({"RANK": "1", "WORLD_SIZE": "2"}, "LOCAL_RANK"),
        ({"RANK": "x", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}, "RANK=x"),
        ({"RANK": "2", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}, "RANK=2"),
        (
            {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "2"},
            "LOCAL_RANK=3",
        ),
        ({"MASTER_PORT": "http"}, "MASTER_PORT=http"),
        ({"MASTER_PORT": "70000"}, "MASTER_PORT=70000"),
        (SLURM | {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}, "SLURM_NTASKS=8"),
        (SLURM | {"SLURM_LOCALID": "3", "CUDA_VISIBLE_DEVICES": "0,1"}, "CUDA_VISIBLE_DEVICES=0,1"),
        (SLURM | {"SLURM_JOB_NODELIST": "gpu[8-"}, "node list"),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "4"}, "without srun"),
    ],
)
def test_contradictions_are_refused_by_name(env, named):
    with pytest.raises(UserError) as caught:
        distributed_environment(env)
    assert named in str(caught.value)


def test_a_port_in_use_is_told_before_anything_heavy():
    with socket.socket() as holder:
        holder.bind(("", 0))
        holder.listen()
        port = str(holder.getsockname()[1])
        with pytest.raises(UserError, match=f"port {port} on .* is in use"):
            distributed_environment({"MASTER_PORT": port})
        env = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_PORT": port}
        agent = env | {"TORCHELASTIC_USE_AGENT_STORE": "True"}
        assert pick(agent, "MASTER_PORT") == (port,)  # there torchrun itself holds it
        with pytest.raises(UserError, match="in use"):
            distributed_environment(env)
        other_rank = env | {"RANK": "1", "LOCAL_RANK": "1"}
        assert pick(other_rank, "MASTER_PORT") == (port,)  # only rank 0 will listen


def test_nothing_heavy_is_imported():
    code = (
        "import sys, cluster.environment; print({'torch', 'numpy', 'deepspeed'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
