"""Removes every wait that keeps copies between device and host memory right, one at a time, and shows which test notices.

    python -m tests.mutate_waits [part of "file:line" ...] [--list] [--remember]

A wait is a statement (``event.wait()``, ``link.follow(event)``, ``held.arrive()`` ...), an event that a copy comes after, or one that is
handed on: as an argument of what releases memory, as an attribute, as what a function returns. They are found in the syntax tree, so a new
one is tried as soon as it is written. Each mutant runs in a process of its own, forked from one that has imported torch and nothing of zk:
on the software GPU first cases of the parity grid (tests/test_parity_device.py runs the same ones), then the tests of the file that it is in;
then, in another process, those of its tests that run on the host. The first failure, a race, a hang or a crash ends it. One that survives must
be explained below. Before all that the package runs as it is: what fails then would kill every mutant. What killed a mutant the last time is in
mutate_waits.json, and is tried first; ``--remember`` writes that file.
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
from unittest import mock

from tests import mutant as carried
from tests.mutant import ROOT

FILES = (
    "zk/offload/streams.py",
    "zk/offload/transfer.py",
    "zk/offload/tiers.py",
    "zk/offload/state.py",
    "zk/offload/section.py",
    "zk/offload/streamed.py",
    "zk/core/speculation.py",
    "zk/offload/pinned.py",
    "zk/offload/pipeline.py",
    "zk/offload/spill.py",
    "zk/core/events.py",
    "zk/offload/worker.py",
    "zk/parallel/comm.py",
    "zk/parallel/partitioned.py",
    "zk/parallel/grads.py",
    "zk/parallel/released.py",
    "zk/core/store.py",
    "zk/parallel/gather.py",
    "zk/checkpoint/shown.py",
    "zk/checkpoint/load.py",
    "zk/optimizer.py",
    "zk/core/updates.py",
    "zk/core/holding.py",
    "zk/checkpoint/state_dicts.py",
    "zk/core/assemble.py",
    "zk/nn/activations.py",
    "zk/offload/stash.py",
    "zk/offload/snapshot.py",
    "zk/checkpoint/save.py",
)
REMEMBERED = ROOT / "tests" / "mutate_waits.json"  # "file function: what" -> what killed it
TIMEOUT_S = 90.0  # for one case or test, so that a busy machine does not pass for a mutant that hangs
COMPLETED = "__import__('zk.core.events', fromlist=['COMPLETED']).COMPLETED"

# (file, function, what is removed) -> why nothing can notice
EQUIVALENT: dict[tuple[str, str, str], str] = {
    (
        *("zk/offload/section.py", "Shadow.update"),
        "self.param.copies[chunk.start] = section.transfer.upload(section.part_of(self.near, chunk), updated, mark)",
    ): (
        "the shadow is written next a step later, by a gradient that compute made after parameters of the same stream had come"
    ),
    ("zk/offload/section.py", "Section.take_home", "taken.param.copies[chunk.start] = param.copies[chunk.start]"): (
        "the shadow is written next a step later, by a gradient that compute made once it had waited for this copy of its parameters"
    ),
    ("zk/offload/tiers.py", "ResidentFields.exchange", "self.reader = other.reader"): (
        "a shadow is read by no upload: what stays is a reader of memory that is now the shadow's, which is waited for without need"
    ),
    ("zk/offload/tiers.py", "ResidentFields.exchange", "other.reader = self.reader"): (
        "the shadow is written next a step later, by a gradient that compute made with parameters that were read later than these"
    ),
    ("zk/offload/section.py", "Attempt.run", "update(after self.mark)"): (
        "the update waits for its gradient, which compute made after it had read that memory for the last time, a step before"
    ),
    ("zk/offload/section.py", "Shadow.update", "upload(after mark)"): (
        "only copies of one stream touch that memory; the mark is for what compute did with it before it was allocated, which no test can hold up"
    ),
    ("zk/offload/streamed.py", "Stream.copy", "torch.cuda.stream(self.stream) -> with compute"): (
        "compute's stream follows the same events, so the copy is as right there; it would queue behind all that compute has been asked to do"
    ),
    ("zk/offload/spill.py", "Spill.write", "self._after_writes(offset, buffer.nbytes, by_write=True)"): (
        "a piece is written from the one buffer that has it: open() has waited for that buffer's last write, drop() for other buffers'"
    ),
    ("zk/parallel/released.py", "_use", "entry[2].wait()"): (
        "a unit that is gone has no update in flight: the thread's job keeps it, and an error does"
    ),
    ("zk/checkpoint/load.py", "_fill", "held.settle()"): (
        "of a frozen unit that is being gathered: on a device home.write() waits for the upload, and publish() gathers again; between ranks on "
        "the host the collective reads that memory, and nothing here can hold it up"
    ),
    ("zk/optimizer.py", "ZeroOptimizer.consolidated_state_dict", "self.updates.settle()"): (
        "each unit is waited for as it is read; over NCCL this keeps the collectives of two communicators apart, which no test can hold up"
    ),
    ("zk/optimizer.py", "ZeroOptimizer._reduce", "self.speculation.settle()"): (
        "an update that begins while step() completes a gradient is waited for and taken, or not, as those before it are: it saves work"
    ),
    ("zk/optimizer.py", "ZeroOptimizer._close_memory", "self.assembly.stream.synchronize()"): (
        "page-locked memory is given back by Link.unpin, which waits for the same streams, and copies of other memory are over when they return"
    ),
    ("zk/core/holding.py", "unfreeze", "optimizer.updates.wait()"): (
        "stores that are given up are waited for as they are pinned, and the others stay as they are; over NCCL, again, it keeps two "
        "communicators apart"
    ),
}

# statements that are nothing but a wait
_WAITS = frozenset(
    "wait wait_for synchronize _wait follow arrive settle stall join _settle _after_writes".split()  # noqa: SIM905
)
# a call of these may be told what to come after
_TOLD = frozenset(("release", "close", "evict", "_give", "give", "publish", "take_home", "offload_to", "upload", "update", "beside"))
_EVENT = re.compile(r"^(after|(self\.)?uploaded|event|mark|\w+\.mark|self\.reader|\*busy|.*\.arriving|.*\.events\[.*\]|.*\.event)$")
# attributes that hold what is to be waited for
_HOLDERS = frozenset(("reader", "copies", "left", "writer", "after", "arriving", "event", "busy", "request", "uploaded", "read"))
_TICKETS = frozenset(("added", "underway", "pending"))


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
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr in _WAITS:
            inner = call.func.value
            if call.func.attr == "wait" and isinstance(inner, ast.Call):
                self._add(node, self._source(inner), f"{self._source(node)} -> without the wait")
            elif call.func.attr == "follow":
                self._add(node, self._source(call.args[0]), self._source(node))
            else:
                self._add(node, "pass", self._source(node))
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        name = node.func.attr if isinstance(node.func, ast.Attribute) else ""
        values = [*node.args, *(keyword.value for keyword in node.keywords)]
        if name in ("offload", "upload", "beside"):
            for value in values:
                if isinstance(value, ast.List) and value.elts and "mark" in self._source(value):
                    self._add(value, "[]", f"{name}(after {self._source(value)})")
        if name == "beside" and isinstance(node.func, ast.Attribute):
            owner = self._source(node.func.value)
            if owner.endswith("transfer"):
                self._add(node, f"__import__('contextlib').nullcontext({owner}.mark)", f"{self._source(node)} -> with compute")
        if name == "stream" and self._source(node).startswith("torch.cuda.stream("):
            self._add(node, "__import__('contextlib').nullcontext()", f"{self._source(node)} -> with compute")
        for keyword in node.keywords:
            if keyword.arg == "mark":
                self._add(keyword.value, COMPLETED, f"{name or self._source(node.func)}(mark={self._source(keyword.value)})")
        if name in _TOLD:
            for value in node.args + [keyword.value for keyword in node.keywords if keyword.arg != "mark"]:
                if _EVENT.match(self._source(value)):
                    star = "*" if isinstance(value, ast.Starred) else ""
                    self._add(value, "*()" if star else COMPLETED, f"{name}(after {self._source(value)})")
        self.generic_visit(node)

    def visit_Assign(self, node: ast.Assign) -> None:
        for target in node.targets:
            pairs = [(target, node.value)]
            if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                pairs = list(zip(target.elts, node.value.elts, strict=True))
            for place, value in pairs:
                held = place.value if isinstance(place, ast.Subscript) else place
                attribute = held.attr if isinstance(held, ast.Attribute) and self.names[-1] != "__init__" else ""
                nothing = (isinstance(value, ast.Constant) and value.value is None) or self._source(value) in ("COMPLETED", "()")
                instead = COMPLETED if attribute in _HOLDERS else "None" if attribute in _TICKETS else ""
                if attribute == "last" and isinstance(place, ast.Subscript):
                    instead = COMPLETED
                what = f"{self._source(place)} = {self._source(value)}"
                if isinstance(place, ast.Subscript) and attribute == "writes":
                    self._add(node, "pass", what)
                elif instead and not nothing and (attribute != "read" or isinstance(value, ast.Call)):
                    if isinstance(target, ast.Tuple):
                        self._add(value, instead, what)
                    else:
                        self._add(node, f"{self._source(node)}; {self._source(place)} = {instead}", what)
        self.generic_visit(node)

    def visit_Return(self, node: ast.Return) -> None:
        value = node.value
        if value is not None:
            source = self._source(value)
            if source in ("event", "uploaded", "copied") or re.match(r".*\.events\[.*\]$", source):
                self._add(value, COMPLETED, f"return {source}")
            elif "publish()" in source or source == "reached()" or source.startswith("self.comm.all_gather("):
                self._add(value, f"({source}, {COMPLETED})[1]", f"return {source}")
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


def _grid(file: str, name: str = "") -> Iterator[Check]:
    """Cases of tests/test_parity_device.py in one process, those that differ most from each other first; or the one of this name."""
    from tests.parity import Case, run_case
    from tests.test_parity_device import DEVICE_CASES, OVERLAPPED
    from zk.offload.cpu_adam import default_engine

    cases = [case for case in [*OVERLAPPED, *DEVICE_CASES] if case.stage in (1, 2, 3)]
    spread: dict[object, Case] = {}
    for case in cases:
        spread.setdefault((case.stage == 3, case.tier, case.overlap_step, case.accumulation > 1, case.params), case)
    if name:
        spread = dict(enumerate(case for case in cases if f"parity {case}" == name))

    def runner(case: Case) -> Check:
        def run(begins: Begins) -> str:
            begins(f"parity {case}")
            with mock.patch.dict(os.environ):  # the engine of the update, which it sets
                found = run_case(case)
            default_engine.cache_clear()
            return f"parity {case}: {found.splitlines()[0][:200]}" if found else ""

        return run

    order = sorted(spread.values(), key=lambda case: (case.tier == "nvme") != (file == "zk/offload/spill.py"))
    yield from map(runner, order)


_RANKS = (
    *("zk/core/store.py", "zk/parallel/comm.py", "zk/parallel/partitioned.py", "zk/parallel/grads.py", "zk/optimizer.py", "zk/offload/pipeline.py"),
    *("zk/offload/transfer.py", "zk/parallel/gather.py"),
)


def _as_before(mutant: Mutant) -> Iterator[Check]:
    """What killed it the last time."""
    yield from _grid(mutant.file, mutant.killer) if mutant.killer.startswith("parity ") else [_pytest(str(ROOT / mutant.killer.removeprefix(_HOST)))]


def _on_device(mutant: Mutant) -> Iterator[Check]:
    """What a mutant must pass on the software GPU, the most likely failure first."""
    file = mutant.file
    if file in ("zk/nn/activations.py", "zk/offload/stash.py"):
        yield _pytest("tests/test_activations_device.py")
        return
    if file == "zk/offload/pinned.py":
        yield _pytest("tests/test_pinned.py")
    elif file in ("zk/offload/snapshot.py", "zk/checkpoint/save.py"):
        yield _pytest("tests/test_checkpoint_device.py")
        return
    else:
        yield from _grid(file)
    if file in ("zk/offload/section.py", "zk/offload/streamed.py", "zk/offload/tiers.py", "zk/offload/transfer.py"):
        yield _pytest("tests/test_update_on.py")
    if file == "zk/optimizer.py":
        yield _pytest("tests/test_update_on.py", "-k", "nothing_streams_any_more")
    if file in ("zk/offload/section.py", "zk/core/speculation.py"):
        yield _pytest("tests/test_speculation.py")
    if file in ("zk/offload/section.py", "zk/core/updates.py"):
        yield _pytest("tests/test_delay.py")
    if file == "zk/offload/streams.py":
        yield _pytest("tests/test_streams.py", "tests/test_gpu.py", "-k", "not every_stage_and_tier")
    yield _pytest("tests/test_waits.py", "-k", "not two_ranks")
    if file in _RANKS:
        yield _pytest("tests/test_waits.py", "-k", "two_ranks")
        yield _pytest("tests/test_gpu_order.py", "tests/test_gpu_placement.py")
    if file in ("zk/core/store.py", "zk/optimizer.py", "zk/core/updates.py", "zk/core/events.py", "zk/offload/worker.py", "zk/offload/pipeline.py"):
        yield _pytest("tests/test_overlap_device.py")
    if file in ("zk/parallel/comm.py", "zk/core/store.py", "zk/offload/transfer.py"):
        yield _pytest("tests/test_parity_device.py", "-k", "in_the_background-2")
    if file in ("zk/parallel/partitioned.py", "zk/core/store.py"):
        yield _pytest("tests/test_parity_device.py", "-k", "in_step-2")
    if file == "zk/parallel/comm.py":
        yield _pytest("tests/test_model_parallel.py")


_SLOW_ACTIVATIONS = "not training_with_zero and not losses_and_gradients and not other_precisions"


def _on_host(mutant: Mutant) -> Iterator[Check]:
    """What it must pass there, if nothing on the software GPU has noticed."""
    file = mutant.file
    if file in ("zk/nn/activations.py", "zk/offload/stash.py"):
        yield _pytest("tests/test_activations.py", "-k", _SLOW_ACTIVATIONS)
    if file in ("zk/offload/snapshot.py", "zk/checkpoint/save.py"):
        yield _pytest("tests/test_checkpoint.py", "-k", "beside or user_wrote or fails or program")
    if file == "zk/offload/spill.py":
        yield _pytest("tests/test_nvme_coherence.py")
    if file in ("zk/core/store.py", "zk/parallel/gather.py", "zk/optimizer.py", "zk/core/updates.py", "zk/core/events.py", "zk/offload/worker.py", "zk/offload/pipeline.py"):  # noqa: E501
        yield _pytest("tests/test_overlap.py")
    if file == "zk/core/store.py":
        yield _pytest("tests/test_optimizers.py::test_where_state_is_when_it_is_updated_and_how_many_ranks_have_it_change_no_bit[2]")
    if file == "zk/core/updates.py":
        yield _pytest("tests/test_delay.py", "-k", "not plain_torch")
    if file == "zk/optimizer.py":
        yield _pytest("tests/test_export.py", "-k", "not ranks")


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

    apart = ("activations.py", "stash.py", "pinned.py", "spill.py")  # these have checks of their own
    kinds = {one.file if one.file.endswith(apart) else "zk/core/store.py" for one in chosen}
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
