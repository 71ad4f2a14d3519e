"""Ends the whole job when one rank dies or hangs, and says which one and where it stood.

Without it the others wait in a collective for ever, or until a time-out half an hour later that
names the wrong rank. Each rank has a thread that writes a sign of life to a small TCP store held by
rank 0 every second; rank 0's thread looks at all of them and publishes a verdict; every thread acts
on it: the stacks of its process to standard error and to train/stacks/, then exit code 77.

- An exception on a rank: `fail` publishes it and every rank ends with that rank's error.
- A dead process or machine: its signs of life stop.
- A hang: its main thread has not called `beat` for too long (also measured by what is usual for this
  run, so that a slow machine is not taken for a hung one). All ranks stop beating then (they wait
  for the hung one), so the ranks with the fewest beats are the ones named; ranks therefore have to
  beat at the same places.

Limits are shares of guard.hang_timeout_s, so that the job has ended when that time is over. Time in
which all processes were stopped by SIGTSTP (Ctrl-Z, a scheduler's suspend) does not count, though a
collective has a patience of its own, half an hour. A bare SIGSTOP gives no time to disarm the timer
against C code that keeps the interpreter: when it is over, the process ends at SIGCONT with exit code 1.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from configs.errors import LOST_RANK_EXIT, UserError

_HANG_SHARE, _DEAD_SHARE = 0.75, 0.4
_STARTUP_S = 3600.0  # until the first update is done: building, compiling, loading
_GAPS = 31
_PEER_ERRORS = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "NCCL error",
                "ncclRemoteError", "Socket Timeout", "Timed out waiting")  # fmt: skip


class Watchdog:
    """Started on every rank once the process group is there; see the module's text.

    Args:
        folder: where stacks go. timeout_s: guard.hang_timeout_s; 0 = off.
        store: a torch.distributed TCPStore of its own (None for one process); see `connect`.
    """

    def __init__(
        self,
        folder: Path,
        timeout_s: float,
        rank: int = 0,
        world: int = 1,
        store: Any = None,
        poll_s: float = 1.0,
        leave: Callable[[int], Any] = os._exit,
    ) -> None:
        self.folder, self.timeout_s, self.rank, self.world = folder, timeout_s, rank, world
        self.store, self.poll_s, self.leave = store, poll_s, leave
        self._lock, self._stopped_s = threading.RLock(), 0.0  # held while the process is stopped
        self._beats, self._what, self._at = 0, "start", self._now()
        self._extra, self._running = _STARTUP_S, False
        self._gaps: deque[float] = deque(maxlen=_GAPS)
        self._ticks, self._done = 0, threading.Event()
        self._seen: dict[int, tuple[str, float]] = {}
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        if timeout_s > 0:
            self._say_alive()
            self._thread.start()
        self._wakeup: tuple[int, int] | None = None
        main = threading.current_thread() is threading.main_thread()
        if timeout_s > 0 and main and signal.getsignal(signal.SIGTSTP) == signal.SIG_DFL:
            self._stop_orderly()

    # --- called by the training loop

    def beat(self, what: str) -> None:
        """The main thread has come to `what` (a word or two); all ranks beat at the same places."""
        now = self._now()
        if self._running and not self._extra:
            self._gaps.append(now - self._at)
        self._beats, self._what, self._at = self._beats + 1, what, now

    def running(self) -> None:
        """The first update is done: from now on silence is a hang."""
        self._running, self._extra = True, 0.0
        self._at = self._now()

    @contextlib.contextmanager
    def patience(self, seconds: float) -> Iterator[None]:
        """Silence inside may last so much longer (compiling, evaluating, saving)."""
        before, self._extra = self._extra, self._extra + seconds
        try:
            yield
        finally:
            self._extra, self._at = before, self._now()

    def fail(self, error: BaseException) -> None:
        """Tells the other ranks what ended this one. The caller goes on to raise the error."""
        if self.timeout_s <= 0:
            return
        if self.store is None:  # whoever catches the error may go on with something else
            self._stand_down()
            return
        code, text = LOST_RANK_EXIT, "".join(traceback.format_exception(error)).strip()
        if isinstance(error, UserError):  # the others leave with its own code, too
            code, text = error.exit_code, str(error)
        elif isinstance(error, KeyboardInterrupt):
            code, text = 130, "interrupted"
        elif any(sign in text for sign in _PEER_ERRORS):
            # A peer's death looks like this from here; its own silence is about to name it.
            self._done.wait(self.timeout_s)
        with contextlib.suppress(RuntimeError):
            self._publish(code, f"{self._name()} failed in {self._what}:\n{text}")
            self._let_others_read()
        self._done.set()

    def close(self) -> None:
        """The orderly end, on every rank: nobody takes it for a death."""
        if self.timeout_s <= 0:
            return
        self._stand_down()
        if self.store is None:
            return
        with contextlib.suppress(RuntimeError):
            self.store.set(f"rank/{self.rank}", "null")  # gone, not dead
            self.store.add("left", 1)
            end = time.monotonic() + self.timeout_s
            while (
                self.rank == 0 and time.monotonic() < end and self.store.add("left", 0) < self.world
            ):
                time.sleep(0.02)

    def _stand_down(self) -> None:
        self._done.set()
        self._thread.join()
        faulthandler.cancel_dump_traceback_later()
        if self._wakeup is not None:
            (read, write), self._wakeup = self._wakeup, None
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGTSTP, signal.SIG_DFL)
            os.write(write, b"\0")
            self._stopper.join()
            os.close(read)
            os.close(write)

    def _stop_orderly(self) -> None:
        """SIGTSTP is answered by a thread of its own: the main one may wait in a collective for a rank
        that has stopped already, and the watchdog's for its store."""
        read, write = os.pipe()
        os.set_blocking(write, False)
        others = signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        if others != -1:  # a notebook's event loop hears of its signals there
            signal.set_wakeup_fd(others)
            os.close(read)
            os.close(write)
            return
        self._wakeup = read, write
        signal.signal(signal.SIGTSTP, lambda number, frame: None)  # else the number is not written
        self._stopper = threading.Thread(target=self._stop_when_told, args=(read,), daemon=True)
        self._stopper.start()

    def _stop_when_told(self, read: int) -> None:
        while numbers := os.read(read, 1):
            if numbers[0] == signal.SIGTSTP:
                with self._lock:  # nobody arms the timer again or looks at the clock before
                    faulthandler.cancel_dump_traceback_later()
                    since = time.monotonic()
                    # Stops all threads, and this one before the call returns, which is at SIGCONT.
                    signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)
                    self._stopped_s += time.monotonic() - since
            elif not numbers[0]:
                return

    def _now(self) -> float:
        """Seconds on a clock that stands still while the process is stopped."""
        with self._lock:
            stopped_s = self._stopped_s  # first: a stop between the two must not look like silence
            return time.monotonic() - stopped_s

    # --- the thread

    def _watch(self) -> None:
        while not self._done.wait(self.poll_s):
            try:
                verdict = self._look()
            except RuntimeError:  # the store is gone
                verdict = f"{LOST_RANK_EXIT} rank 0 is gone"
            if verdict and not self._done.is_set():
                code, text = verdict.split(" ", 1)
                self._end(int(code), text)
                return

    def _look(self) -> str:
        self._say_alive()
        if self.store is None:
            verdict = self._judge({0: self._sign()})
            return verdict and f"{LOST_RANK_EXIT} {verdict}"
        if self.store.check(["verdict"]):
            return str(self.store.get("verdict").decode())
        if self.rank == 0:
            signs = self._signs()
            verdict = self._judge(signs)
            if verdict:
                verdict = self._publish(LOST_RANK_EXIT, verdict)
            return verdict
        return ""

    def _publish(self, code: int, text: str) -> str:
        """The first verdict stands, as it is the cause and later ones follow from it."""
        return str(self.store.compare_set("verdict", "", f"{code} {text}").decode())

    def _sign(self) -> dict[str, Any]:
        limit = max(_HANG_SHARE * self.timeout_s, 2 * max(self._gaps, default=0.0))
        return {"tick": self._ticks, "beats": self._beats, "what": self._what, "name": self._name(),
                "age": self._now() - self._at, "limit": limit + self._extra,
                "dead": self.timeout_s * (1.0 if self._extra else _DEAD_SHARE)}  # fmt: skip

    def _say_alive(self) -> None:
        self._ticks += 1
        if self.store is not None:
            self.store.set(f"rank/{self.rank}", json.dumps(self._sign()))
        # A C thread: it shows the stacks and ends the process even if a call keeps the GIL.
        limit = self.timeout_s * (2.0 if self._extra else _HANG_SHARE)
        with self._lock:
            faulthandler.dump_traceback_later(limit, exit=True, file=2)  # 2: standard error

    def _signs(self) -> dict[int, dict[str, Any]]:
        started = [
            r for r in range(self.world) if r in self._seen or self.store.check([f"rank/{r}"])
        ]
        texts = self.store.multi_get([f"rank/{r}" for r in started])
        now = self._now()
        for rank, raw in zip(started, texts):
            text = raw.decode()
            if self._seen.get(rank, ("", 0.0))[0] != text:
                self._seen[rank] = text, now
        signs = {rank: json.loads(self._seen[rank][0]) for rank in started}
        return {rank: sign for rank, sign in signs.items() if sign}

    def _judge(self, signs: dict[int, dict[str, Any]]) -> str:
        now = self._now()
        silent = {r: now - at for r, (_, at) in self._seen.items() if r in signs}
        dead = [r for r, age in silent.items() if age > signs[r]["dead"]]
        if not dead and all(sign["age"] <= sign["limit"] for sign in signs.values()):
            return ""
        fewest = min(sign["beats"] for sign in signs.values())
        named = dead or [r for r, sign in signs.items() if sign["beats"] == fewest]
        usual = 10 * self.poll_s
        return "\n".join(
            _charge(signs[r], silent.get(r, 0.0), min(usual, signs[r]["dead"])) for r in named
        )

    def _end(self, code: int, verdict: str) -> None:
        faulthandler.cancel_dump_traceback_later()
        print(f"error: {verdict}", file=sys.stderr, flush=True)
        if code == LOST_RANK_EXIT:
            self._show_stacks(verdict)
        self._let_others_read()
        self.leave(code)

    def _let_others_read(self) -> None:
        """A verdict of rank 0's must be read before the store ends, which is with its process."""
        if self.rank == 0 and self.store is not None:
            time.sleep(3 * self.poll_s)

    def _show_stacks(self, verdict: str) -> None:
        with contextlib.suppress(OSError):
            stacks = self.folder / "stacks"
            stacks.mkdir(parents=True, exist_ok=True)
            with (stacks / f"rank-{self.rank}.txt").open("w") as file:
                file.write(f"{verdict}\n\n")
                file.flush()
                faulthandler.dump_traceback(file)
            if self._name() in verdict:  # one stack on the screen: the one that matters
                faulthandler.dump_traceback(2)
        print(
            f"rank {self.rank} leaves; all stacks are in {self.folder / 'stacks'}; "
            "the same command goes on from the last checkpoint",
            file=sys.stderr,
            flush=True,
        )

    def _name(self) -> str:
        return f"rank {self.rank} ({socket.gethostname()}, pid {os.getpid()})"


def _charge(sign: dict[str, Any], silent: float, usual: float) -> str:
    if silent > usual:
        return (
            f"{sign['name']} gave no sign of life for {silent:.0f} s, last seen in "
            f"{sign['what']}: the process died, was stopped, or its machine is lost"
        )
    return f"{sign['name']} hangs in {sign['what']} since {sign['age']:.0f} s"


def connect(rank: int, world: int, device: Any = "cpu") -> Any:
    """A store of the watchdog's own on rank 0's machine, or None for one process.

    Needs the default process group; its port is free and told to the others by a broadcast.
    """
    if world == 1:
        return None
    import datetime

    import torch
    import torch.distributed as dist

    host = os.environ.get("MASTER_ADDR", "127.0.0.1")
    wait = datetime.timedelta(seconds=60)
    store = None
    if rank == 0:
        store = dist.TCPStore(host, 0, None, True, wait, wait_for_workers=False)
    port = torch.tensor([store.port if store else 0], device=device)
    dist.broadcast(port, 0)
    if store is None:
        store = dist.TCPStore(host, int(port.item()), None, False, wait, wait_for_workers=False)
    return store
