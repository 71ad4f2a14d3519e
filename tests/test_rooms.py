"""What the rooms of the house know of one another (ARCHITECTURE.md, the first picture)."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOMS = ("configs", "data_prep", "pretrain", "cluster")
# room -> what it may import of the others, besides what lies below it.
KNOWN = {
    "configs": set(),
    "data_prep": {"configs"},
    "pretrain": {"configs", "data_prep.shards", "cluster.environment"},
    "cluster": {"configs"},
}


def imported(file: Path) -> set[str]:
    """Modules of any room that a file imports, wherever in it."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text("utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
        elif isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
    return {module for module in found if module.split(".")[0] in ROOMS}


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_imports_only_what_it_may(room: str, repo: Path) -> None:
    allowed = KNOWN[room] | {room}
    for file in sorted((repo / room).rglob("*.py")):
        for module in imported(file):
            whole = any(module == a or module.startswith(f"{a}.") for a in allowed)
            assert whole, f"{file.relative_to(repo)} imports {module}"
