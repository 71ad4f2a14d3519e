"""What every source shares: documents, units of work, finding and fingerprinting input files."""

from __future__ import annotations

import hashlib
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from fnmatch import fnmatch
from glob import glob
from pathlib import Path

from configs.errors import UserError
from configs.schema import SourceConfig
from data_prep.sources.encoding import Tally

RANGE_BYTES = 32 << 20  # raw text of one unit of work, about
SMALL_UNIT = 6 << 20  # of a unit put together from small files, so that a few MB use all cores
HASH_CHUNK = 64 << 20
TO_THE_END = -1
# text-00003-of-00005.parquet, also with the hash that older data sets have before the dot.
_NUMBERED = re.compile(r"(.*?)(\d{5})-of-(\d{5})(?:-[0-9a-f]{8,})?((?:\.[^/]*)?)")


@dataclass
class Document:
    """A document: `paragraphs` of running text, or whole sentences when `presplit`."""

    id: str
    paragraphs: list[str]
    presplit: bool = False


@dataclass(frozen=True)
class Piece:
    """Part of a file: bytes, or rows or row groups of a table, [start, end); end -1 = to the end."""

    path: str
    start: int = 0
    end: int = TO_THE_END


@dataclass(frozen=True)
class Range:
    """A unit of work: depends on the input alone, never on workers. `size`: raw bytes, about."""

    source: str
    index: int
    pieces: tuple[Piece, ...]
    size: int
    fingerprint: str  # of the content of every file it reads, and of which part is its own


class Source(ABC):
    """A corpus. Subclasses give `plan` (pieces of each unit) and `documents`."""

    suffixes: tuple[str, ...] = ()
    looks_like = ""
    cuts: tuple[str, ...] = ("file", "window")  # what a document may be (sources.N.document)

    def __init__(self, config: SourceConfig) -> None:
        self.config = config
        self.name = config.title

    @abstractmethod
    def plan(self) -> list[tuple[list[Piece], int]]:
        """Pieces and approximate raw size of each unit of work, in the order of the corpus."""

    @abstractmethod
    def documents(self, unit: Range, tally: Tally) -> Iterator[Document]:
        """Documents of one unit, streaming; what is left out or read otherwise is counted in `tally`.

        Raises:
            UserError: a file is damaged, or is not of this source's kind.
        """

    def ranges(self) -> list[Range]:
        """Every unit of work of this corpus. Reads all input once, to fingerprint it."""
        planned = self.plan()
        hashes = self.hashes(sorted({piece.path for pieces, _ in planned for piece in pieces}))
        units = []
        for index, (pieces, size) in enumerate(planned):
            digest = hashlib.blake2b(digest_size=16)
            for piece in pieces:
                digest.update(f"{hashes[piece.path]} {piece.start} {piece.end}\n".encode())
            units.append(Range(self.name, index, tuple(pieces), size, digest.hexdigest()))
        return units

    def hashes(self, paths: Sequence[str]) -> dict[str, str]:
        """Content hash of each file."""
        return hash_files(paths)

    def id_of(self, piece: Piece) -> str:
        """How documents of a piece are called: the file below the source's folder, and its start."""
        path = Path(piece.path)
        root = Path(self.config.path)
        name = path.relative_to(root).as_posix() if path.is_relative_to(root) else path.name
        shown = name if name != "." else path.name
        return f"{self.name}/{shown}" + (f"@{piece.start}" if piece.start else "")

    def files(self) -> list[Path]:
        """Input files in a fixed order; raises UserError when there are none."""
        return find_files(self.config, self.suffixes, self.looks_like)


def find_files(config: SourceConfig, suffixes: Sequence[str], looks_like: str) -> list[Path]:
    """The files a source names (a file, a folder or a glob), sorted by path.

    Raises:
        UserError: nothing there, an empty file, or no file with one of `suffixes`.
    """
    where = f"source {config.name or config.path!r} (kind: {config.kind})"
    if not config.path:
        raise UserError(f"{where}: no path", "set sources.N.path to a file, folder or glob")
    path = Path(config.path)
    if path.is_dir():
        found = sorted(files_below(path))
        wanted = [p for p in found if p.name.lower().endswith(tuple(suffixes))]
        if found and not wanted:
            raise UserError(
                f"{where}: {path} has no file of this kind, only {found[0].name} and the like",
                f"{config.kind} reads {looks_like}; choose another kind?",
            )
    elif path.is_file():
        wanted = [path]
    else:
        wanted = sorted(Path(p) for p in glob(str(path), recursive=True) if not Path(p).is_dir())  # noqa: PTH207
    if not wanted:
        raise UserError(
            f"{where}: {path.absolute()} is missing or empty",
            f"{config.kind} reads {looks_like}; paths are relative to the folder you start from",
        )
    for file in wanted:
        check_file(file, where)
    if not path.is_file():
        check_numbered([str(file) for file in wanted], ["*" if path.is_dir() else str(path)], where)
    return wanted


def check_numbered(names: Iterable[str], patterns: Sequence[str], where: str) -> None:
    """Refuses a set of files numbered I-of-N that lacks some which one of `patterns` would have taken."""
    there: dict[tuple[str, int, str], set[int]] = {}
    for name in names:
        if match := _NUMBERED.fullmatch(name):
            there.setdefault((match[1], int(match[3]), match[4]), set()).add(int(match[2]))
    missing = []
    for (start, count, end), numbers in there.items():
        first = int(0 not in numbers and count in numbers)  # most count from 0, some from 1
        absent = sorted(set(range(first, first + count)) - numbers)
        names = [f"{start}{number:05d}-of-{count:05d}{end}" for number in absent]
        missing += [name for name in names if any(matches(name, p) for p in patterns)]
    if missing:
        more = f" and {len(missing) - 4} more" if len(missing) > 4 else ""
        raise UserError(
            f"{where}: of the numbered files {', '.join(missing[:4])}{more} {'are' if missing[1:] else 'is'}"
            " missing",
            "download again what is missing; for a part of the set on purpose, name its files in the"
            " path: .../text-0000[0-3]-of-00041.parquet",
        )


def matches(name: str, pattern: str) -> bool:
    """Whether a glob takes a file's name; ** stands for any number of folders, none included."""
    return fnmatch(name, pattern) or fnmatch(name, pattern.replace("**/", ""))


def check_file(file: Path, where: str) -> None:
    """Refuses a link to nothing and an empty file: parts of a corpus that would be missing."""
    if not file.exists():
        raise UserError(
            f"{where}: {file} is a link to a file that is not there", "mend or remove the link"
        )
    if file.stat().st_size == 0:
        raise UserError(f"{where}: {file} is an empty file", "download it again or remove it")


def files_below(folder: Path) -> Iterator[Path]:
    """Files of a folder and the folders in it, through links (once, should a link lead back);
    links to nothing too, so that no part of a corpus goes missing in silence."""

    def refuse(error: OSError) -> None:
        raise UserError(f"{error.filename}: cannot be read ({error.strerror})", "check its rights")

    seen = set()
    for here, below, names in os.walk(folder, onerror=refuse, followlinks=True):
        real = os.path.realpath(here)
        if real in seen:
            below.clear()
            continue
        seen.add(real)
        below.sort()
        for name in names:
            file = Path(here, name)
            if not name.startswith(".") and (file.is_file() or file.is_symlink()):
                yield file


def group_files(files: Iterable[Path], expansion: int = 3) -> list[tuple[list[Piece], int]]:
    """Whole files, put together until a unit has about SMALL_UNIT of raw text."""
    units: list[tuple[list[Piece], int]] = []
    pieces: list[Piece] = []
    size = 0
    for file in files:
        packed = file.suffix.lower() in (".gz", ".bz2", ".zst", ".xz")
        pieces.append(Piece(str(file)))
        size += file.stat().st_size * (expansion if packed else 1)
        if size >= SMALL_UNIT:
            units.append((pieces, size))
            pieces, size = [], 0
    if pieces:
        units.append((pieces, size))
    return units


def cut_bytes(file: Path, step: int, expansion: int = 1) -> list[tuple[list[Piece], int]]:
    """A file in byte ranges of `step`."""
    size = file.stat().st_size
    return [
        ([Piece(str(file), start, min(start + step, size))], min(step, size - start) * expansion)
        for start in range(0, size, step)
    ]


def hash_files(paths: Sequence[str]) -> dict[str, str]:
    """Content hash of each file, many chunks at a time (hashing leaves the interpreter lock)."""

    def one(job: tuple[str, int]) -> bytes:
        path, start = job
        digest = hashlib.blake2b(digest_size=16)
        with open(path, "rb") as file:
            file.seek(start)
            left = HASH_CHUNK
            while left and (block := file.read(min(1 << 20, left))):
                digest.update(block)
                left -= len(block)
        return digest.digest()

    jobs = [
        (path, start)
        for path in paths
        for start in range(0, max(Path(path).stat().st_size, 1), HASH_CHUNK)
    ]
    totals = {path: hashlib.blake2b(digest_size=16) for path in paths}
    with ThreadPoolExecutor(8) as pool:
        for (path, start), digest in zip(jobs, pool.map(one, jobs)):
            totals[path].update(start.to_bytes(8, "little") + digest)
    return {
        path: f"{Path(path).stat().st_size}-{digest.hexdigest()}" for path, digest in totals.items()
    }
