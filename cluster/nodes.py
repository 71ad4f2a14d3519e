"""SLURM's node lists, read exactly: `gpu[008-011],login,rack[0-1]b[01-02]`.

A form this does not know is an error, never a guess: a wrong first name would become the
rendezvous address of a whole job.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import product

from configs.errors import UserError

_NAME = re.compile(r"[A-Za-z0-9_.-]+")
_RANGE = re.compile(r"([0-9]+)(?:-([0-9]+))?")
_PIECE = re.compile(r"\[([^\[\]]*)\]|([A-Za-z0-9_.-]+)")
MAX_NODES = 100_000


def expand(text: str) -> list[str]:
    """The names in `text`, in its order, zeros kept.

    Raises:
        UserError: unbalanced brackets, an empty entry, a range that runs backwards or changes its
            width, a name twice, a character no host name has.
    """
    names: list[str] = []
    for entry in _split(text):
        names.extend(_expand_entry(entry, text))
        if len(names) > MAX_NODES:
            raise _bad(text, f"names more than {MAX_NODES} nodes")
    twice = (
        {name for name in names if names.count(name) > 1} if len(set(names)) < len(names) else ()
    )
    if twice:
        raise _bad(text, f"names {sorted(twice)[0]} twice")
    return names


def fold(names: Iterable[str]) -> str:
    """A node list that `expand` turns back into exactly `names`; neighbours share one bracket."""
    entries: list[str] = []
    runs: list[tuple[str, list[str]]] = []  # a prefix and the trailing digits of neighbouring names
    for name in names:
        match = re.search(r"[0-9]+$", name)
        prefix, digits = (name[: match.start()], match.group()) if match else (name, "")
        if digits and runs and runs[-1][0] == prefix and runs[-1][1][-1]:
            runs[-1][1].append(digits)
        else:
            runs.append((prefix, [digits]))
    for prefix, numbers in runs:
        if len(numbers) == 1:
            entries.append(prefix + numbers[0])
        else:
            entries.append(f"{prefix}[{','.join(_ranges(numbers))}]")
    return ",".join(entries)


def _ranges(numbers: list[str]) -> list[str]:
    out: list[list[str]] = []
    for digits in numbers:
        last = out[-1][-1] if out else ""
        if last and len(last) == len(digits) and int(digits) == int(last) + 1:
            out[-1].append(digits)
        else:
            out.append([digits])
    return [run[0] if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in out]


def _bad(text: str, why: str) -> UserError:
    return UserError(
        f"node list {text!r} {why}", "expected SLURM's form, such as gpu[008-011],login or n1,n2"
    )


def _split(text: str) -> list[str]:
    """Splits at the commas outside of brackets."""
    entries, depth, start = [], 0, 0
    for at, char in enumerate(text):
        depth += (char == "[") - (char == "]")
        if depth not in (0, 1):
            raise _bad(text, "has brackets that do not match")
        if char == "," and depth == 0:
            entries.append(text[start:at])
            start = at + 1
    if depth:
        raise _bad(text, "has brackets that do not match")
    return [*entries, text[start:]]


def _expand_entry(entry: str, text: str) -> list[str]:
    choices: list[list[str]] = []
    size, at = 1, 0
    for match in _PIECE.finditer(entry):
        if match.start() != at:
            break
        at = match.end()
        choices.append([match[2]] if match[2] else _numbers(match[1], text))
        size *= len(choices[-1])
        if size > MAX_NODES:
            raise _bad(text, f"names more than {MAX_NODES} nodes")
    if at != len(entry) or not entry:
        raise _bad(text, f"has the entry {entry!r}, which is not a node name")
    return ["".join(parts) for parts in product(*choices)]


def _numbers(inside: str, text: str) -> list[str]:
    out: list[str] = []
    for part in inside.split(","):
        match = _RANGE.fullmatch(part)
        if not match:
            raise _bad(text, f"has {part!r} in brackets, which is neither a number nor a range")
        low, high = match[1], match[2] or match[1]
        padded = len(low) > 1 and low[0] == "0"
        same_width = len(high) == len(low)
        if int(high) < int(low) or not (same_width or (len(high) > len(low) and high[0] != "0")):
            raise _bad(text, f"has the range {part!r}, which runs backwards or changes its width")
        if int(high) - int(low) >= MAX_NODES:
            raise _bad(text, f"names more than {MAX_NODES} nodes")
        width = len(low) if padded else 1
        out.extend(f"{n:0{width}d}" for n in range(int(low), int(high) + 1))
    return out
