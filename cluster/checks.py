"""What a node says about itself before a long job: GPUs, package versions, disk."""

from __future__ import annotations

import os
import platform
import shutil
import socket
import subprocess
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path

from configs.checkpoints import bytes_left_behind, saves_to_hold

PACKAGES = (
    "torch",
    "deepspeed",
    "megatron-core",
    "transformers",
    "pyarrow",
    "numpy",
    "lambert-bert",
)


@dataclass
class NodeReport:
    """One process's view of its node; `problems` are sentences that name what is wrong."""

    rank: int
    host: str = ""
    versions: dict[str, str] = field(default_factory=dict)
    gpus: list[str] = field(default_factory=list)
    driver: str = ""
    free_gb: float = 0.0
    problems: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, object]:
        return asdict(self)


def examine(
    rank: int, folder: Path, gpus: int, checkpoint_gb: float = 0.0, keep: int = 0
) -> NodeReport:
    """Looks at this node. folder: the run's, where checkpoints will be written, `keep` of them kept.
    gpus: how many must be there."""
    report = NodeReport(rank, socket.gethostname(), versions())
    if gpus:
        report.gpus, report.driver, report.problems = gpu_health(gpus)
    report.free_gb, problem = writable_space(folder, checkpoint_gb, keep)
    if problem:
        report.problems.append(problem)
    return report


def versions() -> dict[str, str]:
    """Installed versions of what the losses depend on, read without importing it."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "missing"
    return found


def gpu_health(expected: int) -> tuple[list[str], str, list[str]]:
    """(names, driver, problems) from nvidia-smi: count, uncorrected ECC errors, rows being remapped."""
    keys = "name,driver_version,ecc.errors.uncorrected.volatile.total,memory.used"
    try:
        text = subprocess.run(
            ["nvidia-smi", f"--query-gpu={keys}", "--format=csv,noheader,nounits"],
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        ).stdout
    except FileNotFoundError:
        return [], "", [f"nvidia-smi is missing, {expected} GPUs were expected"]
    except subprocess.TimeoutExpired:
        return [], "", ["nvidia-smi hangs: a GPU has probably fallen off the bus"]
    except subprocess.CalledProcessError as error:
        return [], "", [f"nvidia-smi fails: {(error.stderr or error.stdout).strip()}"]
    return read_gpu_table(text, expected)


def read_gpu_table(text: str, expected: int) -> tuple[list[str], str, list[str]]:
    """The same from nvidia-smi's CSV lines: name, driver, ECC errors, memory in use (MiB)."""
    names, driver, problems = [], "", []
    for index, line in enumerate(text.strip().splitlines()):
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) != 4:
            problems.append(f"GPU {index}: nvidia-smi says {line.strip()!r}")
            continue
        name, driver, ecc, used = cells
        names.append(name)
        if ecc.isdigit() and int(ecc) > 0:
            problems.append(f"GPU {index} ({name}) has {ecc} uncorrected memory errors")
        if used.isdigit() and int(used) > 2000:
            problems.append(f"GPU {index} ({name}): {used} MiB are held by another process")
    if len(names) < expected:
        problems.append(f"{len(names)} GPUs answer, {expected} were expected")
    if len(set(names)) > 1:
        problems.append(f"GPUs differ: {', '.join(sorted(set(names)))}")
    return names, driver, problems


def writable_space(folder: Path, checkpoint_gb: float, keep: int) -> tuple[float, str]:
    """(free GB, problem): writes a small file where checkpoints will go; asks `quota` if it is there.

    Those that an earlier job of this run has saved hold a part of what `keep` of them take."""
    probe = folder / f".preflight-{socket.gethostname()}-{os.getpid()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe.write_bytes(b"x" * 4096)
        probe.unlink()
    except OSError as error:
        return 0.0, f"{folder} cannot be written: {error.strerror}"
    free = shutil.disk_usage(folder).free / 1e9
    left = quota_left_gb(folder)
    free = free if left is None else min(free, left)
    train = folder / "train"
    need_gb = checkpoint_gb * saves_to_hold(train, keep) - bytes_left_behind(train) / 1e9
    if free < need_gb:
        of = "free" if left is None or left > free else "left of the quota"
        return free, f"{free:.1f} GB {of} at {folder}, the checkpoints to come need {need_gb:.1f}"
    return free, ""


def quota_left_gb(folder: Path) -> float | None:
    """What `quota` still allows on the file system of `folder`; None where there is no quota."""
    if shutil.which("quota") is None:
        return None
    try:
        device = subprocess.run(
            ["df", "--output=source", str(folder)], capture_output=True, text=True, timeout=20
        ).stdout.split()[-1]
        text = subprocess.run(["quota", "-wp"], capture_output=True, text=True, timeout=20).stdout
    except (OSError, subprocess.TimeoutExpired, IndexError):
        return None
    return read_quota(text, device)


def read_quota(text: str, device: str) -> float | None:
    """`quota -wp` lines: file system, 1-KiB blocks used (with * when over), soft limit, hard limit, ..."""
    for line in text.splitlines():
        cells = line.split()
        if len(cells) >= 4 and cells[0] == device:
            used, soft, hard = (int(c.rstrip("*")) for c in cells[1:4])
            limit = hard or soft
            return max(limit - used, 0) * 1024 / 1e9 if limit else None
    return None


def compare(reports: list[NodeReport]) -> list[str]:
    """Sentences about what differs between nodes; the odd ones out are named."""
    problems = []
    for name in sorted({key for report in reports for key in report.versions}):
        problems += _odd_ones(name, {r.host: r.versions.get(name, "missing") for r in reports})
    problems += _odd_ones("NVIDIA driver", {r.host: r.driver for r in reports if r.driver})
    problems += _odd_ones(
        "GPU", {r.host: ", ".join(sorted(set(r.gpus))) for r in reports if r.gpus}
    )
    return problems


def _odd_ones(what: str, by_host: dict[str, str]) -> list[str]:
    values = list(by_host.values())
    if len(set(values)) <= 1:
        return []
    usual = max(sorted(set(values)), key=values.count)
    return [
        f"{host}: {what} is {value}, on the others {usual}"
        for host, value in sorted(by_host.items())
        if value != usual
    ]
