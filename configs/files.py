"""Folders and files that appear whole or not at all, and one process at a time in a folder."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, TextIO

from configs.errors import UserError, refusal

LOCK = ".lock"


def make_folder(folder: Path, elsewhere: str = "choose another place with work_dir=...") -> Path:
    """Makes a folder and those above it, as needed.

    elsewhere: how the command at hand is told another place.

    Raises:
        UserError: the folder, and why it cannot be made (below a file, no rights, /proc) or written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        known = refusal(error, elsewhere)
        remedy = known.remedy if known else elsewhere
        raise UserError(f"{folder}: cannot be made ({error.strerror})", remedy) from None
    if not os.access(folder, os.W_OK):
        raise UserError(f"{folder}: may not be written", elsewhere)
    return folder


def named(path: str | Path) -> Path:
    """A path that ends in a name of its own, for what is to lie beside it: `.` and `..` spelt out."""
    path = Path(path)
    return path if path.name not in ("", "..") else path.resolve()


def lock_folder(
    folder: Path, work: str, elsewhere: str = "take another folder with work_dir=..."
) -> TextIO:
    """Makes a folder and keeps others from the same `work` in it while the file returned is open.

    The lock goes when the process does, however it ends. A file system without locks has none.

    Raises:
        UserError: another process holds it, or the folder cannot be made.
    """
    file = (make_folder(folder, elsewhere) / LOCK).open("w")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise UserError(
            f"{folder}: another {work} is running here",
            f"wait for it, stop it, or {elsewhere}",
        ) from None
    except OSError:
        pass
    return file


@contextmanager
def folder_beside(out: Path) -> Iterator[Path]:
    """An empty folder in which to make what `out` shall be. It takes the place of `out`, or of what
    that links to, when the block has ended well, and goes when it has not. One process at a time for
    that place; what a killed one left half done is thrown away.

    Raises:
        UserError: another process is at it, the folder cannot be made, or `out` cannot be replaced.
    """
    out = out.resolve()
    if out.is_mount():
        raise UserError(
            f"{out}: a mount point, which is replaced by nothing", "name a folder in it"
        )
    fresh, old = (out.with_name(f".{out.name}.{age}") for age in ("new", "old"))
    with lock_folder(fresh, f"making of {out.name}", "name another folder"):
        for left in fresh.iterdir():
            if left.is_dir() and not left.is_symlink():
                shutil.rmtree(left)
            elif left.name != LOCK:
                left.unlink()
        try:
            yield fresh
        except BaseException:
            shutil.rmtree(fresh, ignore_errors=True)  # the disk may be full because of it
            raise
        if out.exists():
            shutil.rmtree(old, ignore_errors=True)
            out.rename(old)
        fresh.rename(out)
        shutil.rmtree(old, ignore_errors=True)
        (out / LOCK).unlink(missing_ok=True)


def read_json(path: Path, remedy: str, shape: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """What a small JSON file says, an object each.

    Args:
        shape: what a reader relies on: of each key its type, or [shape of all entries] of a list, or
            the shape of an object. Other keys are left to the reader.

    Raises:
        UserError: it is damaged, or was edited so that a key is missing or of another type; names the
            file and the key, and the remedy.
    """
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is damaged: {error}", remedy) from None
    if not isinstance(values, dict):
        raise UserError(f"{path} is damaged: it holds no JSON object", remedy)
    if key := _misfit(values, shape or {}):
        raise UserError(f"{path} is damaged: {key}", remedy)
    return values


def _misfit(value: Any, shape: Any, name: str = "") -> str:
    """Which key does not fit, and what it should be; "" when all do."""
    below: Iterable[tuple[Any, Any, Any]] = ()
    if isinstance(shape, Mapping) and isinstance(value, dict):
        below = ((key, value.get(key), wanted) for key, wanted in shape.items())
    elif isinstance(shape, list) and isinstance(value, list):
        below = ((number, one, shape[0]) for number, one in enumerate(value))
    else:
        kind = dict if isinstance(shape, Mapping) else list if isinstance(shape, list) else shape
        fits = isinstance(value, kind) and (kind is bool or not isinstance(value, bool))
        return "" if fits else f"{name} is missing or not {getattr(kind, '__name__', kind)}"
    found = (_misfit(one, wanted, f"{name}.{key}".lstrip(".")) for key, one, wanted in below)
    return next(filter(None, found), "")


_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def publish(path: Path, write: Callable[[BinaryIO], object], durable: bool = True) -> None:
    """Writes a file beside its place, flushes it to the disk, then renames it: complete or absent.

    durable=False: the renaming may be lost with the machine's power, and the folder may be moved by
    whoever sees the file.
    """
    temporary = path.with_name(f".{path.name}.{os.uname().nodename}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.errno in _FULL:
            error.filename = error.filename or str(path)  # a full disk does not say of which file
        raise
    if durable:
        sync_folder(path.parent)


def publish_text(path: Path, text: str) -> None:
    """`publish` of UTF-8 with the line ends it has."""
    publish(path, lambda file: file.write(text.encode()))


def sync_folder(folder: Path) -> None:
    """Makes renames in a folder durable."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
