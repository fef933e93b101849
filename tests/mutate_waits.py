"""Removes every wait that keeps copies between device and host memory right, one at a time, and shows which test notices.

    python -m tests.mutate_waits [part of "file:line" ...] [--list] [--remember]

A wait is a statement (``event.wait()``, ``link.follow(event)`` ...), an event that a copy or a write comes after, or one that is kept to be
waited for. They are found in the syntax tree, so a new one is tried as soon as it is written. Each mutant runs in a process of its own, forked
from one that has imported torch and nothing of zk: on the software GPU the tests of its file, then, in another process, those that run on the
host. The first failure, a race, a hang or a crash ends it. One that survives must be explained below. Before all that the package runs as it
is: what fails then would kill every mutant. What killed a mutant the last time is in mutate_waits.json, and is tried first; ``--remember``
writes that file.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import dataclasses
import faulthandler
import functools
import io
import json
import os
import re
import select
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence

from tests import mutant as carried
from tests.mutant import ROOT

# file -> its tests on the software GPU, and on the host
FILES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "zk/offload/tiers.py": (("tests/core/test_device.py",), ("tests/core/test_tiers.py",)),
    "zk/offload/drive.py": (("tests/core/test_device.py", "-k", "nvme or any_order"), ("tests/core/test_tiers.py",)),
    "zk/offload/file.py": ((), ("tests/core/test_files.py", "tests/core/test_tiers.py")),
    "zk/store.py": (("tests/core/test_device.py",), ("tests/core/test_behaviour.py", "tests/core/test_ranks.py")),
    "zk/addons/overlap.py": (("tests/core/test_device.py", "-k", "overlap_step or any_order"), ("tests/core/test_tiers.py",)),
    "zk/nn/activations.py": (("tests/core/test_nn_activations.py",), ()),
    "zk/checkpoint/save.py": (("tests/test_checkpoint_device.py",), ("tests/core/test_checkpoint.py",)),
}
REMEMBERED = ROOT / "tests" / "mutate_waits.json"  # "file function: what" -> what killed it
TIMEOUT_S = 90.0  # for one case or test, so that a busy machine does not pass for a mutant that hangs

# (file, function, what is removed) -> why nothing can notice
EQUIVALENT: dict[tuple[str, str, str], str] = {}

# statements that are nothing but a wait
_WAITS = frozenset("wait wait_for wait_event synchronize follow record_stream join".split())  # noqa: SIM905
_COPIES = frozenset(("copy", "offload", "upload", "write_async"))  # are told what to come after
_AFTER = re.compile(r"^(after|self\.moving\(part\)|\[.*(mark\(\)|event|after).*\])$")
_HOLDERS = frozenset(("in_flight", "event", "near", "updating", "gathering"))  # of what is to be waited for
_LISTS = frozenset(("behind",))


@dataclasses.dataclass(frozen=True)
class Mutant:
    """One file with one wait less."""

    file: str
    line: int
    function: str
    what: str
    source: str  # of the whole file

    @property
    def key(self) -> tuple[str, str, str]:
        return self.file, self.function, self.what

    @property
    def killer(self) -> str:
        """The case or test that killed it the last time; empty where none is known."""
        return _remembered().get(self.label, "")

    @property
    def label(self) -> str:
        return f"{self.file} {self.function}: {self.what}"


@functools.cache
def _remembered() -> dict[str, str]:
    return json.loads(REMEMBERED.read_text()) if REMEMBERED.exists() else {}


class _Finder(ast.NodeVisitor):
    """Collects (start, stop, replacement, what) in the text of a file."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.starts = [0]
        for line in text.splitlines(keepends=True):
            self.starts.append(self.starts[-1] + len(line.encode()))
        self.data = text.encode()
        self.names: list[str] = []
        self.found: list[tuple[int, int, str, str, int, str]] = []

    def _span(self, node: ast.AST) -> tuple[int, int]:
        return self.starts[node.lineno - 1] + node.col_offset, self.starts[node.end_lineno - 1] + node.end_col_offset  # type: ignore[attr-defined]

    def _source(self, node: ast.AST) -> str:
        start, stop = self._span(node)
        return self.data[start:stop].decode()

    def _add(self, node: ast.AST, replacement: str, what: str) -> None:
        self.found.append((*self._span(node), replacement, " ".join(what.split()), node.lineno, ".".join(self.names)))  # type: ignore[attr-defined]

    def _scope(self, node: ast.ClassDef | ast.FunctionDef) -> None:
        self.names.append(node.name)
        self.generic_visit(node)
        self.names.pop()

    visit_ClassDef = visit_FunctionDef = _scope

    def visit_Expr(self, node: ast.Expr) -> None:
        call = node.value
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute):
            if call.func.attr in _WAITS:
                self._add(node, "; ".join(map(self._source, call.args)) or "pass", self._source(node))
            elif call.func.attr == "note" or (call.func.attr == "append" and getattr(call.func.value, "attr", "") in _LISTS):
                self._add(node, self._source(call.args[0]), self._source(node))
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        name = node.func.attr if isinstance(node.func, ast.Attribute) else ""
        for value in [*node.args, *(keyword.value for keyword in node.keywords)] if name in _COPIES else ():
            if _AFTER.match(self._source(value)):
                self._add(value, "[]", f"{name}(after {self._source(value)})")
        if self._source(node).startswith("torch.cuda.stream("):
            self._add(node, "__import__('contextlib').nullcontext()", f"{self._source(node)} -> with compute")
        self.generic_visit(node)

    def visit_Assign(self, node: ast.Assign) -> None:
        for target in node.targets:
            held = target.value if isinstance(target, ast.Subscript) else target
            attribute = held.attr if isinstance(held, ast.Attribute) and self.names[-1] != "__init__" else ""
            is_nothing = isinstance(node.value, ast.Constant) and node.value.value is None
            if attribute in _HOLDERS and not is_nothing and self._source(target) != "self.near":  # near: what an event keeps
                what, value = self._source(node), self._source(node.value)
                if isinstance(target, ast.Subscript):
                    self._add(node, value, what)
                else:
                    nothing = "[]" if isinstance(node.value, (ast.BinOp, ast.List, ast.ListComp)) else "None"
                    self._add(node.value, f"({value}, {nothing})[1]", what)
        self.generic_visit(node)


def mutants() -> list[Mutant]:
    """Of all files, in order."""
    result = []
    for file in FILES:
        path = ROOT / file
        text = path.read_text()
        finder = _Finder(text)
        finder.visit(ast.parse(text))
        for start, stop, replacement, what, line, function in sorted(finder.found, key=lambda one: one[0]):
            source = (finder.data[:start] + replacement.encode() + finder.data[stop:]).decode()
            ast.parse(source)
            same = sum(one.function == function and one.what.split(" #")[0] == what for one in result if one.file == file)
            result.append(Mutant(file, line, function, f"{what} #{same + 1}" if same else what, source))
    return result


# ---- running a mutated package ------------------------------------------------------------------------------------------------


class _First:
    """A pytest plugin: tells each test that begins, and keeps the first that failed."""

    failed = ""

    def __init__(self, begins: Callable[[str], None]) -> None:
        self.begins = begins

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.begins(nodeid)

    def pytest_runtest_logreport(self, report: object) -> None:
        if getattr(report, "failed", False) and not self.failed:
            self.failed = str(getattr(report, "nodeid", "?"))

    def pytest_collectreport(self, report: object) -> None:
        self.pytest_runtest_logreport(report)


Begins = Callable[[str], None]
Check = Callable[[Begins], str]  # told what begins; returns what failed


def _pytest(*arguments: str) -> Check:
    def run(begins: Begins) -> str:
        import pytest

        from tests import softgpu

        first = _First(begins)
        options = ["-x", "-q", "-p", "no:cacheprovider", "-p", "no:benchmark", "--no-header", "--rootdir", str(ROOT)]
        options += ["-p", "tests.softgpu.plugin"] * softgpu.installed()
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            code = pytest.main([*options, *arguments], plugins=[first])
        return first.failed or (f"pytest ended with {code}" if code else "")

    return run


def _as_before(mutant: Mutant) -> Iterator[Check]:
    """What killed it the last time."""
    yield _pytest(str(ROOT / mutant.killer.removeprefix(_HOST)))


def _on_device(mutant: Mutant) -> Iterator[Check]:
    """What a mutant must pass on the software GPU."""
    yield from map(_pytest_of, filter(None, [FILES[mutant.file][0]]))


def _on_host(mutant: Mutant) -> Iterator[Check]:
    """What it must pass there, if nothing on the software GPU has noticed."""
    yield from map(_pytest_of, filter(None, [FILES[mutant.file][1]]))


def _pytest_of(arguments: tuple[str, ...]) -> Check:
    return _pytest(*arguments)


_PHASES = (_as_before, _on_device, _on_host)
_HOST = "host "  # before what killed a mutant there


_END = b"END "  # what comes after it is what killed the mutant


def _child(mutant: Mutant, phase: int, pipe: int) -> None:
    """In a forked process: install the mutant, run the checks, say which one failed."""
    os.setsid()  # with the ranks that it may spawn
    faulthandler.disable()
    devnull = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(devnull, stream)
    warnings.simplefilter("ignore")
    import tempfile

    with tempfile.NamedTemporaryFile("w", suffix=".json") as source:
        json.dump([mutant.file, mutant.source], source)
        source.flush()
        os.environ[carried.VARIABLE] = source.name
        carried.carry()
        import torch

        torch.set_num_threads(1)
        if _PHASES[phase] is _on_device or (_PHASES[phase] is _as_before and not mutant.killer.startswith(_HOST)):
            from tests import softgpu

            softgpu.install()
            os.environ.update(softgpu.environment())
        current = killed = ""

        def begins(name: str) -> None:
            nonlocal current
            current = name
            os.write(pipe, f"{name}\n".encode())

        try:
            for check in _PHASES[phase](mutant):
                killed = check(begins)
                if killed:
                    break
        except BaseException as error:
            killed = f"{current}: {type(error).__name__}: {error}"
        os.write(pipe, _END + killed.replace("\n", " ").encode()[:1000] + b"\n")


@dataclasses.dataclass
class _Running:
    mutant: Mutant
    phase: int
    pid: int
    pipe: int
    deadline: float
    said: bytes = b""


def _start(mutant: Mutant, phase: int) -> _Running:
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reader)
        try:
            _child(mutant, phase, writer)
        finally:
            os._exit(0)
    os.close(writer)
    return _Running(mutant, phase, pid, reader, time.monotonic() + TIMEOUT_S)


def _ended(running: _Running) -> str | None:
    """What killed the mutant ("" for nothing), None while it runs."""
    open_still = True
    if select.select([running.pipe], [], [], 0.02)[0]:
        heard = os.read(running.pipe, 1 << 16)
        running.said += heard
        running.deadline, open_still = time.monotonic() + TIMEOUT_S, bool(heard)
    lines = running.said.split(b"\n")
    ended = next((line for line in lines[:-1] if line.startswith(_END)), None)
    late = time.monotonic() > running.deadline
    if ended is None and open_still and not late:
        return None
    with contextlib.suppress(ProcessLookupError):
        os.killpg(running.pid, signal.SIGKILL)  # and the ranks that it spawned
    os.waitpid(running.pid, 0)
    os.close(running.pipe)
    if ended is not None:
        return ended[len(_END) :].decode(errors="replace")
    began = lines[-2].decode(errors="replace") if len(lines) > 1 else "its imports"
    return f"hangs in {began}" if late else f"crashes in {began}"


def run(chosen: Sequence[Mutant], report: Callable[[Mutant, str, str], None], at_once: int = 2) -> None:
    """Try every mutant; calls ``report(mutant, what killed it, in which case or test)`` as they end."""
    waiting, running = [(mutant, 0 if mutant.killer else 1) for mutant in chosen], list[_Running]()
    while waiting or running:
        while waiting and len(running) < at_once:
            running.append(_start(*waiting.pop(0)))
        for one in list(running):
            killed = _ended(one)
            if killed is None:
                continue
            running.remove(one)
            if not killed and one.phase + 1 < len(_PHASES):
                waiting.insert(0, (one.mutant, one.phase + 1))
            else:
                began = one.said.split(b"\n")[:-1]
                last = [line.decode(errors="replace") for line in began if not line.startswith(_END)][-1:]
                host = _HOST if _PHASES[one.phase] is _on_host else ""
                report(one.mutant, killed, one.mutant.killer if one.phase == 0 else host + "".join(last))


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser("python -m tests.mutate_waits", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("wanted", nargs="*", metavar="part of file:line")
    parser.add_argument("--list", action="store_true", help="name the waits, and try none")
    parser.add_argument("--remember", action="store_true", help="write what has noticed each to mutate_waits.json")
    options = parser.parse_args(arguments)
    found, wanted = mutants(), options.wanted
    chosen = [one for one in found if not wanted or any(part in f"{one.file}:{one.line}" for part in wanted)]
    if options.list:
        for one in chosen:
            print(f"{one.file}:{one.line} {one.function}: {one.what}")
        print(len(chosen), "waits")
        return 0
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: autograd's threads keep the number they begin with
    # what every mutant needs and none changes
    import hypothesis  # noqa: F401
    import numba  # noqa: F401
    import pytest  # noqa: F401
    import torch
    import torch.testing  # noqa: F401

    import tests.conftest  # noqa: F401

    kinds = {one.file for one in chosen}
    broken: list[str] = []
    unchanged = [Mutant(file, 0, "", "", (ROOT / file).read_text()) for file in sorted(kinds)]
    run(unchanged, lambda mutant, failed, _: broken.append(f"{mutant.file}: {failed}") if failed else None)
    if broken:
        print("nothing is removed, and there are failures already:", *broken, sep="\n  ")
        return 2

    outcomes, killers = dict[Mutant, str](), dict[str, str]()

    def report(mutant: Mutant, killed: str, killer: str) -> None:
        outcomes[mutant] = killed
        if killed:
            killers[mutant.label] = killer
        reason = EQUIVALENT.get(mutant.key)
        verdict = killed.splitlines()[0] if killed else f"survived, explained: {reason}" if reason else "SURVIVED"
        print(f"{mutant.file}:{mutant.line}  {mutant.function}: {mutant.what}\n    {verdict}", flush=True)

    run(chosen, report)
    survived = [one for one, killed in outcomes.items() if not killed]
    unexplained = [one for one in survived if one.key not in EQUIVALENT]
    print(f"\n{len(outcomes)} waits removed: {len(outcomes) - len(survived)} killed, {len(survived)} survived, {len(unexplained)} unexplained")
    for one in unexplained:
        print(f"  SURVIVED {one.file}:{one.line} {one.function}: {one.what}")
    if options.remember:
        kept = {label: killer for label, killer in _remembered().items() if wanted and label in {one.label for one in found}}
        REMEMBERED.write_text(json.dumps({**kept, **killers}, indent=1, sort_keys=True) + "\n")
    stale = [] if wanted else [key for key in EQUIVALENT if key not in {one.key for one in survived}]
    for key in stale:
        print(f"  explained, and not among the survivors: {key}")
    return 1 if unexplained or stale else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
