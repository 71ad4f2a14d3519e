"""Who am I among the processes of this job? RANK, WORLD_SIZE, ... from whatever started us.

Only the standard library: the answer (or the refusal) comes before torch is imported.
"""

from __future__ import annotations

import os
import socket
import zlib
from collections.abc import Mapping

from cluster.nodes import expand
from configs.errors import UserError

# Below the range of ports that the kernel hands out by itself (32768 and up on Linux).
FIRST_PORT, PORTS = 15000, 17000

# (what started us, rank, world size, rank on this node, processes on this node), asked in this
# order. mpirun inside an allocation starts its daemons as SLURM tasks, so MPI is asked first.
_SOURCES = (
    ("torchrun or deepspeed", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    (
        "Open MPI",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    (
        "MVAPICH",
        "MV2_COMM_WORLD_RANK",
        "MV2_COMM_WORLD_SIZE",
        "MV2_COMM_WORLD_LOCAL_RANK",
        "MV2_COMM_WORLD_LOCAL_SIZE",
    ),
    ("SLURM", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_TASKS_ON_THIS_NODE"),
    ("PMI", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
)


def distributed_environment(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT, ready for os.environ.

    LOCAL_RANK is the index of the GPU to use: 0 where the scheduler shows each task only its own.
    LOCAL_WORLD_SIZE counts the processes on this node. A process that nothing started in a group
    is rank 0 of 1, with a free port.

    Raises:
        UserError: variables that contradict each other or are half set; fewer visible GPUs than
            processes on this node; on rank 0, a MASTER_PORT that another process holds.
    """
    env = dict(os.environ if environ is None else environ)
    env["SLURM_TASKS_ON_THIS_NODE"] = str(_slurm_tasks_here(env))
    found = _find_source(env)
    if found is None:
        _refuse_batch_shell(env)
        rank, world, local_rank, local_world = 0, 1, 0, 1
        address, port = "127.0.0.1", env.get("MASTER_PORT", "")
    else:
        name, rank, world, local_rank, local_world = found
        address = env.get("MASTER_ADDR") or _master_address(env, name, world, local_world)
        port = env.get("MASTER_PORT") or (str(job_port(env)) if world > 1 else "")
    if port and not (port.isdigit() and 0 < int(port) < 65536):
        raise UserError(
            f"MASTER_PORT={port} is not a port", "choose one from 1024 to 65535, or unset it"
        )
    # torchrun's agent itself holds the port and the workers connect to it.
    agent_holds_port = env.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if port and rank == 0 and not agent_holds_port:
        _refuse_used_port(int(port))
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_RANK": str(_device_index(env, local_rank, local_world)),
        "LOCAL_WORLD_SIZE": str(local_world),
        "MASTER_ADDR": address,
        "MASTER_PORT": port or str(free_port()),
    }


def job_port(env: Mapping[str, str]) -> int:
    """A rendezvous port that all tasks of a SLURM step agree on and other steps do not use.

    Depends on job, step and restart count: two jobs that share a node differ, and so does a
    requeued job from a process of its former life.
    """
    if "OMPI_COMM_WORLD_RANK" in env:  # mpirun's daemons are SLURM steps of different numbers
        step = zlib.crc32(env.get("PMIX_NAMESPACE", "").encode())
    else:
        step = _int(env, "SLURM_STEP_ID", 0)
    seed = _int(env, "SLURM_JOB_ID", 0) * 31 + step * 7 + _int(env, "SLURM_RESTART_COUNT", 0)
    return FIRST_PORT + seed % PORTS


def free_port() -> int:
    """A port nobody holds at this moment (loopback)."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _find_source(env: Mapping[str, str]) -> tuple[str, int, int, int, int] | None:
    for name, rank_key, world_key, local_key, local_world_key in _SOURCES:
        if name == "SLURM" and "SLURM_STEP_ID" not in env:
            continue  # the batch shell: it carries SLURM_PROCID=0 but is no task
        if rank_key not in env:
            continue
        missing = [key for key in (world_key, local_key) if key not in env]
        if name != "SLURM" and world_key not in missing and _int(env, world_key) == 1:
            missing = []
        if missing:
            raise UserError(
                f"{rank_key}={env[rank_key]} is set, but not {' and '.join(missing)}",
                "set all of them (torchrun, deepspeed and srun do), or unset them all",
            )
        rank, world = _int(env, rank_key), _int(env, world_key)
        local_rank = _int(env, local_key, 0)
        local_world = _int(env, local_world_key, 0) or _int(
            env, "LOCAL_SIZE", 0
        )  # deepspeed's name
        if not local_world:
            local_world = world if _is_loopback(env) else local_rank + 1
        if not 0 <= rank < world:
            raise UserError(
                f"{rank_key}={rank} does not fit {world_key}={world}",
                f"ranks run from 0 to {world_key} - 1; unset leftovers of another launcher",
            )
        if not 0 <= local_rank < local_world <= world:
            raise UserError(
                f"{local_key}={local_rank} does not fit {local_world} processes on this node, {world} in all",
                "unset leftovers of another launcher",
            )
        _refuse_leftovers(env, rank_key, world_key, world)
        return name, rank, world, local_rank, local_world
    return None


def _is_loopback(env: Mapping[str, str]) -> bool:
    return env.get("MASTER_ADDR", "127.0.0.1") in ("127.0.0.1", "localhost", "::1")


def _refuse_leftovers(env: Mapping[str, str], rank_key: str, world_key: str, world: int) -> None:
    """RANK=0 WORLD_SIZE=1 exported by hand would make every task of a step the only process."""
    if rank_key != "RANK":
        return
    for size_key in ("OMPI_COMM_WORLD_SIZE", "SLURM_NTASKS"):
        in_group = size_key != "SLURM_NTASKS" or "SLURM_STEP_ID" in env
        if in_group and size_key in env and world < _int(env, size_key):
            raise UserError(
                f"{world_key}={world} contradicts {size_key}={env[size_key]}",
                "RANK and WORLD_SIZE were set by hand or left over: unset them",
            )


def _refuse_batch_shell(env: Mapping[str, str]) -> None:
    tasks = _int(env, "SLURM_NTASKS", 1)
    if "SLURM_PROCID" in env and "SLURM_STEP_ID" not in env and tasks > 1:
        raise UserError(
            f"SLURM allotted {tasks} tasks, but this process was started without srun",
            "put srun (or torchrun, deepspeed) before the command; `env -u SLURM_PROCID` for one process",
        )


def expand_counts(text: str) -> list[int]:
    """SLURM's counts per node: `4(x2),3` -> [4, 4, 3]; an unknown form gives []."""
    counts: list[int] = []
    for part in text.split(","):
        count, _, times = part.rstrip(")").partition("(x")
        if not count.isdigit() or (times and not times.isdigit()):
            return []
        counts += [int(count)] * int(times or 1)
    return counts


def _slurm_tasks_here(env: Mapping[str, str]) -> int:
    """Tasks of this step on this node; 0 when unknown."""
    text = env.get("SLURM_STEP_TASKS_PER_NODE") or env.get("SLURM_TASKS_PER_NODE") or ""
    counts, node = expand_counts(text), _int(env, "SLURM_NODEID", 0)
    return counts[node] if node < len(counts) else 0


def _master_address(env: Mapping[str, str], name: str, world: int, local_world: int) -> str:
    if world == local_world:
        return "127.0.0.1"
    nodes = env.get("SLURM_JOB_NODELIST", "")
    if name == "SLURM":  # a step may run on a part of the allocation
        nodes = env.get("SLURM_STEP_NODELIST") or nodes
    if not nodes:
        raise UserError(
            f"{name} started {world} processes on several nodes, but MASTER_ADDR is not set",
            "mpirun -x MASTER_ADDR=<host of rank 0>; deepspeed --launcher_args='-x MASTER_ADDR=<host>'",
        )
    return expand(nodes)[0]


def _device_index(env: Mapping[str, str], local_rank: int, local_world: int) -> int:
    visible = env.get("CUDA_VISIBLE_DEVICES")
    if not visible:
        return local_rank
    count = len(visible.split(","))
    if count == 1:  # --gpus-per-task or --gpu-bind: each task sees its own
        return 0
    if local_rank >= count:
        raise UserError(
            f"{local_world} processes on {socket.gethostname()}, but CUDA_VISIBLE_DEVICES={visible}",
            "one process per GPU: ask for as many GPUs as tasks on each node",
        )
    return local_rank


def _refuse_used_port(port: int) -> None:
    with socket.socket() as probe:
        # As the store that will listen there does: a port in TIME_WAIT counts as free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except PermissionError:
            raise UserError(f"MASTER_PORT={port} needs root", "choose one from 1024 up") from None
        except OSError:
            raise UserError(
                f"port {port} on {socket.gethostname()} is in use by another process",
                "set MASTER_PORT to a free one, or end what is left of an earlier run",
            ) from None


def _int(env: Mapping[str, str], key: str, default: int | None = None) -> int:
    text = env.get(key)
    if text is None and default is not None:
        return default
    try:
        return int(text or "")
    except ValueError:
        raise UserError(f"{key}={text} is not a number", "unset it or correct it") from None
