"""Breaks zk in one place at a time, and shows whether a test notices.

    python -m tests.mutate [--only PART-OF-FILE:LINE ...] [--list]
    python -m tests.mutate zk/store.py [--number 20] [--seed 0] [--device TEST ...] [--host TEST ...] [--only ...] [--list]

Without a file each mutant lacks one of the waits that keep copies between device and host memory right. WAITS has what a wait looks like, and
TESTS the files in which it is looked for. Of a file each mutant has one condition turned round, or one statement less, chosen by the seed.

Tests run in a copy of the project that has the mutant: on the software GPU, then on the host. A failure, a race, a crash or a hang kills it.
Before, they run on the project as it is: what fails then would kill every mutant.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import functools
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent

# file -> its tests on the software GPU, and on the host
TESTS: dict[str, tuple[list[str], list[str]]] = {
    "zk/offload/tiers.py": (["tests/core/test_device.py"], ["tests/core/test_tiers.py"]),
    "zk/offload/drive.py": (["tests/core/test_device.py", "-k", "nvme or any_order"], ["tests/core/test_tiers.py"]),
    "zk/offload/file.py": ([], ["tests/core/test_files.py", "tests/core/test_tiers.py"]),
    "zk/store.py": (["tests/core/test_device.py"], ["tests/core/test_behaviour.py", "tests/core/test_ranks.py"]),
    "zk/addons/overlap.py": (["tests/core/test_device.py", "-k", "overlap_step or any_order"], ["tests/core/test_tiers.py"]),
    "zk/nn/activations.py": (["tests/core/test_nn_activations.py"], []),
    "zk/checkpoint/save.py": (["tests/test_checkpoint_device.py"], ["tests/core/test_checkpoint.py"]),
}
# a wait, as part of a line -> the line without it
WAITS = (
    (r"^( *)[^=#]*\.(wait|wait_for|wait_event|synchronize|follow|record_stream|join)\(.*\)( +#.*)?$", r"\1pass"),
    (r"^( *)self\.behind\.append\(.*\)$", r"\1pass"),
    (r"^( *)self\.note\((.*?)(, part)?\)$", r"\1\2"),
    (r", (after|self\.moving\(part\)|\[self\.mark\(\)(, \*after)?\]|\[block\.event\])\)", r", [])"),
    (r"^( *)with torch\.cuda\.stream\(.*\):$", r"\1if True:"),
    (r"^( *self\.in_flight) = (\[.+)$", r"\1 = (\2, [])[1]"),
    (r"^( *(?!self\.near|self\.event)\w+\.(event|near|updating|gathering)) = (?!None)(.*?)( +#.*)?$", r"\1 = (\3, None)[1]"),
)
NEAREST = {ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">"}
OPPOSITE = {ast.Eq: "!=", ast.NotEq: "==", ast.Is: "is not", ast.IsNot: "is", ast.In: "not in", ast.NotIn: "in"}


class Mutant(NamedTuple):
    """One file with one fault."""

    file: str
    line: int
    what: str
    text: str  # of the whole file

    def __str__(self) -> str:
        return f"{self.file}:{self.line}  {self.what}"


def without_waits(file: str) -> list[Mutant]:
    """All of a file, in order."""
    lines = (ROOT / file).read_text().splitlines()
    found = [(at, line, re.sub(*wait, line)) for at, line in enumerate(lines) for wait in WAITS]
    texts = {(at, line, new): "\n".join([*lines[:at], new, *lines[at + 1 :], ""]) for at, line, new in found if new != line}
    return [Mutant(file, at + 1, f"{line.strip()}  ->  {new.strip()}", text) for (at, line, new), text in texts.items()]


def broken(file: str, number: int, seed: int) -> list[Mutant]:
    """As many mutants, chosen at random, in the order of their lines."""
    text = (ROOT / file).read_text()
    data, starts = text.encode(), [0]
    for line in data.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    found = dict[tuple[int, int, str], Mutant]()

    def source(node: ast.AST) -> str:
        return ast.get_source_segment(text, node) or ""

    def change(node: Any, new: str) -> None:
        start, stop = starts[node.lineno - 1] + node.col_offset, starts[node.end_lineno - 1] + node.end_col_offset
        changed = (data[:start] + new.encode() + data[stop:]).decode()
        found[start, stop, new] = Mutant(file, node.lineno, " ".join(f"{source(node)}  ->  {new}".split()), changed)

    for node in ast.walk(ast.parse(text)):
        conditions = [node.test] if isinstance(node, (ast.If, ast.While, ast.IfExp)) else node.ifs if isinstance(node, ast.comprehension) else []
        for condition in conditions:
            if not (isinstance(condition, ast.Compare) and type(condition.ops[0]) in OPPOSITE) and source(condition) != "TYPE_CHECKING":
                change(condition, f"(not ({source(condition)}))")
        if isinstance(node, ast.BoolOp):
            change(node, f" {'or' if isinstance(node.op, ast.And) else 'and'} ".join(f"({source(value)})" for value in node.values))
        if isinstance(node, ast.Compare) and len(node.ops) == 1:
            change(node, f"({source(node.left)}) {(NEAREST | OPPOSITE)[type(node.ops[0])]} ({source(node.comparators[0])})")
        is_call = isinstance(node, ast.Expr) and not isinstance(node.value, ast.Constant)
        is_kept = isinstance(node, ast.Assign) and isinstance(node.targets[0], (ast.Attribute, ast.Subscript))
        if is_call or is_kept or isinstance(node, (ast.AugAssign, ast.Raise, ast.Continue, ast.Break)):
            change(node, "pass")
    every = [found[place] for place in sorted(found)]
    return sorted(random.Random(seed).sample(every, min(number, len(every))), key=lambda mutant: mutant.line)


def failure(mutant: Mutant | None, tests: list[str], on_device: bool, limit_s: float) -> str:
    """Run the tests of a mutant, or of the project as it is, in a copy of the project: what ended them, if anything did."""
    options = ["-x", "-q", "-p", "no:cacheprovider", "-p", "no:benchmark", "--no-header", "--tb=no", *["-p", "tests.softgpu.plugin"] * on_device]
    with tempfile.TemporaryDirectory(prefix="zk-mutant-") as folder, tempfile.TemporaryFile("w+", errors="replace") as output:
        root = Path(folder) / "project"
        shutil.copytree(ROOT, root, ignore=lambda folder, names: {".git", ".venv", "runs", "site"} & set(names) if folder == str(ROOT) else ())
        if mutant:
            (root / mutant.file).write_text(mutant.text)
        command, environment = [sys.executable, "-m", "pytest", *options, *tests], {**os.environ, "PYTHONPATH": str(root)}
        process = subprocess.Popen(command, cwd=root, env=environment, stdout=output, stderr=output, start_new_session=True)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(limit_s)
        status = process.poll()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # it, and ranks that it left
        process.wait()
        output.seek(0)
        text = output.read().splitlines()
    failed = next((line for line in text if line.startswith(("FAILED", "ERROR", "Fatal"))), text[-1] if text else "crashed")
    return "hangs" if status is None else failed if status else ""


def survivors_of(mutants: list[Mutant], device_tests: list[str], host_tests: list[str]) -> list[Mutant]:
    """Print what becomes of each mutant of a file, two at once; returns those that no test notices."""
    left = mutants
    for tests, on_device in [place for place in ((device_tests, True), (host_tests, False)) if place[0]]:
        began = time.monotonic()
        if said := failure(None, tests, on_device, 3600.0):
            sys.exit(f"nothing is broken, and a test fails already: {said}")
        found = functools.partial(failure, tests=tests, on_device=on_device, limit_s=60 + 3 * (time.monotonic() - began))
        tried, left = left, []
        with ThreadPoolExecutor(2) as pool:
            for mutant, said in zip(tried, pool.map(found, tried), strict=True):
                left += [] if said else [mutant]
                print(f"{mutant}\n    {said or 'not noticed here'}", flush=True)
    return left


def main() -> int:
    parser = argparse.ArgumentParser("python -m tests.mutate", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("file", nargs="?")
    parser.add_argument("--only", nargs="+", default=[""], metavar="PART-OF-FILE:LINE")
    parser.add_argument("--number", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", nargs="*", metavar="TEST", help="for the software GPU")
    parser.add_argument("--host", nargs="*", metavar="TEST")
    parser.add_argument("--list", action="store_true", help="name the mutants, and try none")
    options = parser.parse_args()
    os.environ |= {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive", "TRITON_INTERPRET": "1"}
    survivors, total = list[Mutant](), 0
    for file in [options.file] if options.file else TESTS:
        mutants = broken(file, options.number, options.seed) if options.file else without_waits(file)
        mutants = [one for one in mutants if any(part in f"{one.file}:{one.line}" for part in options.only)]
        given = (options.device or [], options.host or []) if options.device or options.host else TESTS.get(file, ([], []))
        total += len(mutants)
        assert any(given) or options.list, "which tests? --device, --host"
        if options.list:
            print(*mutants, sep="\n")
        elif mutants:
            survivors += survivors_of(mutants, *given)
    print(*(f"SURVIVED  {mutant}" for mutant in survivors), sep="\n")
    print(f"{total} mutants" if options.list else f"{total} mutants: {total - len(survivors)} killed, {len(survivors)} survived")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
