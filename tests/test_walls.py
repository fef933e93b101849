"""Ceilings on what a reader has to know. None rises: write it shorter, make it an add-on that can be deleted, or leave it out."""

import ast
import functools
import io
import tokenize
from pathlib import Path

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
PROSE = {"tests/**/*.py": 14_000, "docs/**/*.md": 2_500, "README.md": 130}
ABOVE = tuple(f"zk.{room}" for room in CEILINGS if room not in ("core", "kernels"))  # what these two do not import
LAYOUT = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER, tokenize.ENCODING}
FILES = {path: path.read_text() for path in sorted((ROOT / "zk").rglob("*.py"))}
TREES = {path: ast.parse(text) for path, text in FILES.items()}
FOR_USERS = ROOT / "zk/__init__.py", ROOT / "zk/__main__.py"
LINES = sum(text.count("\n") for text in FILES.values())


def room_of(path: Path) -> str:
    room = path.relative_to(ROOT / "zk").parts[0]
    return "kernels" if path.name.startswith("cpu_adam") else room if room in CEILINGS else "core"


@functools.cache
def tokens_of(path: Path) -> int:
    """Python's tokens, without comments, docstrings and layout."""
    owners = (node for node in ast.walk(TREES[path]) if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)))
    skipped = {node.body[0].lineno for node in owners if ast.get_docstring(node) is not None}
    tokens = tokenize.generate_tokens(io.StringIO(FILES[path]).readline)
    return sum(t.type not in LAYOUT and not (t.type == tokenize.STRING and t.start[0] in skipped) for t in tokens)


def test_a_room_stays_below_its_ceiling() -> None:
    for room, (lines, tokens) in CEILINGS.items():
        paths = [path for path in FILES if room_of(path) == room]
        found = sum(FILES[path].count("\n") for path in paths), sum(map(tokens_of, paths))
        assert found[0] <= lines and found[1] <= tokens, f"{room}: {found} of {lines, tokens}. {__doc__}"


def test_prose_ifs_and_widths_stay_below_theirs_and_the_core_imports_nothing_that_stands_on_it() -> None:
    for files, most in PROSE.items():
        assert sum(path.read_text().count("\n") for path in ROOT.glob(files)) <= most, f"{files}: {__doc__}"
    ifs = sum(isinstance(node, (ast.If, ast.IfExp)) for tree in TREES.values() for node in ast.walk(tree))
    widths = sorted(len(line) for text in FILES.values() for line in text.splitlines() if line.strip())
    assert ifs <= 0.07 * LINES and sum(map(tokens_of, FILES)) <= 7.5 * LINES and widths[int(0.95 * len(widths))] <= 100, __doc__
    below = [tree for path, tree in TREES.items() if room_of(path) in ("core", "kernels") and path not in FOR_USERS]
    imports = [node.module or "" for tree in below for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    assert not [module for module in imports if module.startswith(ABOVE)]
