"""Ceilings on the size of what a reader has to know. A ceiling falls with the code; none rises."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
NEXT = ROOT / "zk" / "next"  # the second core, which becomes zk: see its ARCHITECTURE.md
# folder or file, pattern of its files, lines at most; the second core and its tests apart
CEILINGS = {
    "zk": ("*.py", 23_400),
    "zk": ("*.py", 8_660),
    "zk/core": ("*.py", 4_710),
    "zk/tools": ("*.py", 1_490),
    "zk/nn": ("*.py", 2_000),
    "zk/checkpoint": ("*.py", 2_460),
    "zk/integrations": ("*.py", 950),
    "tests": ("*.py", 31_650),
    "tests/core": ("*.py", 4_500),
    "docs": ("*.md", 3_300),
    "README.md": ("", 130),
}
BELOW = ("kernels", "offload", "parallel", "core", "config", "optimizer")
ABOVE = ("integrations",)


def lines_of(name: str, pattern: str) -> int:
    """Lines of a file, or of all files in a folder that the pattern matches."""
    path = ROOT / name
    files = path.rglob(pattern) if path.is_dir() else [path]
    apart = () if name in ("zk", "tests/core") else (NEXT, ROOT / "tests" / "next")
    return sum(file.read_text().count("\n") for file in files if not any(file.is_relative_to(room) for room in apart))


@pytest.mark.parametrize("name", CEILINGS)
def test_a_room_stays_below_its_ceiling(name: str) -> None:
    pattern, most = CEILINGS[name]
    found = lines_of(name, pattern)
    assert found <= most, f"{name} has {found:,} lines; the ceiling is {most:,}: write it shorter, or delete something"


def test_the_core_imports_nothing_that_stands_on_it() -> None:
    for path in (ROOT / "zk").rglob("*.py"):
        if path.relative_to(ROOT / "zk").parts[0].removesuffix(".py") not in BELOW:
            continue
        for node in ast.parse(path.read_text()).body:
            module = node.module or "" if isinstance(node, ast.ImportFrom) else ""
            assert not module.startswith(tuple(f"zk.{room}" for room in ABOVE)), f"{path.relative_to(ROOT)} imports {module}"
