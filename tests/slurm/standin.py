"""A trainer without training: keeps the real one's contract with schedulers, in milliseconds.

`python standin.py -m pretrain train RECIPE ...` is this; any other command line runs as python's.
Ranks meet through a socket after each update (the place of the all-reduce). The "loss" of an
update depends on all earlier ones, so a lost or repeated update shows in all that follow.

STANDIN_FAULT, e.g. `exit@5:1` or `hang@5:1`: rank 1 exits with 1 (or sleeps) before update 5, in
the first try only; `exit@5:1:always` does it each time. STANDIN_UPDATE_S: seconds an update.
"""

import json
import os
import signal
import socket
import sys
import time
from pathlib import Path

if sys.argv[1:4] != ["-m", "pretrain", "train"]:
    os.execv(sys.executable, [sys.executable, *sys.argv[1:]])

import yaml  # noqa: E402

from cluster.environment import distributed_environment  # noqa: E402

SAVED, LOST = 75, 77


def main() -> int:
    recipe = yaml.safe_load(Path(sys.argv[4]).read_text())
    overrides = dict(text.split("=", 1) for text in sys.argv[5:])
    stop_at = int(overrides["train.stop_at"])
    names = overrides.get("guard.save_signals", "[SIGTERM,SIGUSR1]").strip("[]").split(",")
    received: list[int] = []
    for name in names:
        signal.signal(getattr(signal, name), lambda number, _: received.append(number))

    env = distributed_environment()
    rank, world = int(env["RANK"]), int(env["WORLD_SIZE"])
    folder = Path(recipe["work_dir"]) / "train"
    folder.mkdir(parents=True, exist_ok=True)
    pointer = folder / "checkpoint.json"
    update, state = json.loads(pointer.read_text()) if pointer.exists() else (0, 1)
    peers = meet(env, rank, world, recipe["guard"]["hang_timeout_s"])
    log = open(folder / "log.jsonl", "a") if rank == 0 else None  # noqa: SIM115
    while update < stop_at:
        fault(folder, rank, update + 1)
        time.sleep(float(os.environ.get("STANDIN_UPDATE_S", "0.05")))
        stop = agree(peers, rank, bool(received))
        update, state = update + 1, (state * 6364136223846793005 + update) % 2**64
        if log:
            line = {"kind": "train", "step": update, "loss": state / 2**64, "lr": 1e-3}
            line |= {
                "tokens_per_s": 1000.0,
                "job": os.environ.get("SLURM_JOB_ID", ""),
                "time": time.time(),
            }
            print(json.dumps(line), file=log, flush=True)
        if rank == 0 and (stop or update == stop_at or update % recipe["checkpoint"]["every"] == 0):
            temporary = pointer.with_suffix(".tmp")
            temporary.write_text(json.dumps([update, state]))
            temporary.replace(pointer)
        if stop:
            for name in names:  # a further signal must not change the exit code
                signal.signal(getattr(signal, name), signal.SIG_IGN)
            agree(peers, rank, True)
            return SAVED
    return 0


def fault(folder: Path, rank: int, update: int) -> None:
    kind, _, where = os.environ.get("STANDIN_FAULT", "").partition("@")
    if not where:
        return
    at, who, *always = where.split(":")
    done = folder / "fault-done"
    if update == int(at) and rank == int(who) and (always or not done.exists()):
        done.touch()
        if kind == "hang":
            time.sleep(3600)
        print("the planned fault", file=sys.stderr)
        sys.exit(1)


def meet(env: dict, rank: int, world: int, timeout: float) -> list:
    if world == 1:
        return []
    # torchrun's own store holds MASTER_PORT
    beside = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    address = (env["MASTER_ADDR"], int(env["MASTER_PORT"]) + beside)
    if rank == 0:
        server = socket.create_server(("", address[1]))
        server.settimeout(120)
        peers = [server.accept()[0] for _ in range(world - 1)]
    else:
        for _ in range(1200):
            try:
                peers = [socket.create_connection(address, timeout=30)]
                break
            except OSError:
                time.sleep(0.1)
        else:
            sys.exit(LOST)
    for peer in peers:
        peer.settimeout(timeout)
    return peers


def agree(peers: list, rank: int, mine: bool) -> bool:
    """True on every rank if it is True on one."""
    try:
        if rank == 0:
            votes = [peer.recv(1) for peer in peers]
            if b"" in votes:
                raise OSError("a rank is gone")
            answer = b"1" if mine or b"1" in votes else b"0"
            for peer in peers:
                peer.sendall(answer)
            return answer == b"1"
        for peer in peers:
            peer.sendall(b"1" if mine else b"0")
            answer = peer.recv(1)
            if not answer:
                raise OSError("rank 0 is gone")
            return answer == b"1"
        return mine
    except OSError as error:
        print(f"lost a rank: {error}", file=sys.stderr)
        os._exit(LOST)


sys.exit(main())
