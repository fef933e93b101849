"""Ceilings on what a reader has to know, by room. None rises."""

from __future__ import annotations

import ast
import io
import tokenize
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
CEILINGS = {  # room: lines, tokens of code
    "core": (4_500, 32_000),  # zk/*.py, parallel, offload but for the CPU update
    "kernels": (1_700, 14_000),  # and the CPU update
    "addons": (2_200, 16_000),
    "nn": (1_000, 7_500),
    "checkpoint": (1_350, 10_500),
    "integrations": (1_000, 7_000),
    "tools": (1_600, 12_500),
}
PROSE = {"tests/**/*.py": 24_000, "docs/**/*.md": 2_500, "README.md": 130}
ABOVE = "addons", "nn", "checkpoint", "integrations", "tools"  # what the core does not import
LAYOUT = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER, tokenize.ENCODING}
REMEDY = "write it shorter, make it an add-on that can be deleted, or leave it out: the ceiling stays"


def room_of(path: Path) -> str:
    room = path.relative_to(ROOT / "zk").parts[0]
    if room == "offload":
        return "kernels" if path.name.startswith("cpu_adam") else "core"
    return room if room in CEILINGS else "core"


def files_of(room: str) -> list[Path]:
    return [path for path in sorted((ROOT / "zk").rglob("*.py")) if room_of(path) == room]


def tokens_of(text: str) -> int:
    """Python's tokens, without comments, docstrings and layout."""
    owners = (node for node in ast.walk(ast.parse(text)) if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)))
    docstrings = {node.body[0].lineno for node in owners if ast.get_docstring(node) is not None}
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return sum(t.type not in LAYOUT and not (t.type == tokenize.STRING and t.start[0] in docstrings) for t in tokens)


@pytest.mark.parametrize("room", CEILINGS)
def test_a_room_stays_below_its_ceiling(room: str) -> None:
    texts = [path.read_text() for path in files_of(room)]
    found = sum(text.count("\n") for text in texts), sum(map(tokens_of, texts))
    assert all(have <= most for have, most in zip(found, CEILINGS[room], strict=True)), f"{room}: {found} of {CEILINGS[room]} lines, tokens: {REMEDY}"


@pytest.mark.parametrize("files", PROSE)
def test_tests_and_prose_stay_below_theirs(files: str) -> None:
    found = sum(path.read_text().count("\n") for path in ROOT.glob(files))
    assert found <= PROSE[files], f"{files}: {found} of {PROSE[files]} lines: {REMEDY}"


def test_the_core_imports_nothing_that_stands_on_it() -> None:
    for_users = {ROOT / "zk" / name for name in ("__init__.py", "__main__.py")}
    for path in {*files_of("core"), *files_of("kernels")} - for_users:
        nodes = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ImportFrom)]
        assert not [node.module for node in nodes if (node.module or "").startswith(tuple(f"zk.{room}" for room in ABOVE))], path


def test_ifs_and_widths() -> None:
    texts = [path.read_text() for path in (ROOT / "zk").rglob("*.py")]
    lines = [line for text in texts for line in text.splitlines() if line.strip()]
    ifs = sum(isinstance(node, (ast.If, ast.IfExp)) for text in texts for node in ast.walk(ast.parse(text)))
    assert ifs <= 0.07 * sum(text.count("\n") for text in texts), f"{ifs} ifs, more than 7 in 100 lines: {REMEDY}"
    assert sorted(map(len, lines))[int(0.95 * len(lines))] <= 100, "more than a twentieth of the lines is wider than 100 characters"
