"""Checks and measurements of zk on one GPU, within ten minutes, and a dated report of them. `make gpu`, or

    python benchmarks/gpu.py [--minutes 9.5] [--sections floors,7b/zk_stage2] [--out FOLDER] [--nvme FOLDER] [--host 120GiB]

Jobs run in the order of their worth, each in a process of its own. A job that fails, runs out of memory or exceeds its time limit is a row of
the report, and the next job runs. A job that no longer fits into ``--minutes`` is a row "not run: time". The report is written anew after each
job: DATE-gpu.md, from the rows in DATE-gpu.jsonl beside it. With ``--sections`` the rows of other jobs stay, so that a second run can add what
a first one did not reach.

Before a job of training steps runs, ``zk plan`` says what it needs. What cannot fit in host memory is not tried. ``--dry-run`` executes
everything in tiny sizes, on a CPU if there is no GPU. The exit status is 1 if a test failed.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import datetime
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import torch

HERE = Path(__file__).absolute().parent
ROOT, RESULTS = HERE.parent, HERE / "results"
sys.path[:0] = [str(HERE), str(ROOT)]  # where zk is not installed, this one is meant anyway

from gpu_common import GIB, MARK  # noqa: E402
from gpu_plan import Planned, Row, of, plan_job  # noqa: E402
from gpu_report import read, report  # noqa: E402
from gpu_step import Job  # noqa: E402

from zk.config import parse_nbytes  # noqa: E402

BACK_S = 20.0  # to wait for the host memory of a process that has ended
TOKENS = (8192, 16384, 65536)
LONG = TOKENS[-1:]
BITS = "every_stage_and_tier or device_tier_trains or clipping or fp16 or one_inf"


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Run:
    """One process of the benchmark."""

    section: str
    name: str
    limit: float  # seconds
    least: float  # seconds below which it is not worth a start; 0: it always runs
    command: tuple[str, ...] = ()  # arguments of python
    job: Job | None = None  # training steps, instead of a command


def _pytest(*arguments: str) -> tuple[str, ...]:
    return ("-m", "pytest", "-vv", "--tb=short", "-p", "no:cacheprovider", "-p", "no:xdist", *arguments)


def runs(dry: bool) -> list[Run]:
    """All runs, those of the most worth first."""

    def part(name: str, limit: float, least: float) -> Run:
        return Run("kernels" if name == "kernels" else "floors", name, limit, least, (str(HERE / "gpu_floors.py"), name))

    def steps(section: str, limit: float, system: str, model: str, tokens: tuple[int, ...], name: str = "", **job: Any) -> Run:
        return Run(section, name or system, limit, 25.0, job=Job(system, model, tokens, seconds=20.0 if len(tokens) == 1 else 8.0, **job))

    software = "-p", "tests.softgpu.plugin"  # the dry run's device
    few = (*software, "-k", "every_stage_and_tier and 3-host") if dry else ("-k", BITS)
    rest = (*software, "-k", "link and not 64k") if dry else ("-k", f"not ({BITS})")
    kernels = ("-k", "flatten and not hypothesis") if dry else ()
    qwen, cap = "Qwen2.5-7B", 40 * GIB
    overlap = {"overlap_step": True}
    found = [
        part("machine", 60, 0),
        part("floors", 60, 15),
        Run("bits", "test_gpu", 75, 15, _pytest("tests/test_gpu.py", *few)),
        steps("7b", 80, "torch", qwen, TOKENS),
        steps("7b", 110, "zk_stage2", qwen, TOKENS),
        steps("7b", 80, "zk_stage3", qwen, LONG),
        steps("7b", 90, "zk_auto", qwen, LONG, cap=cap, keep_last=GIB),
        steps("7b", 110, "fsdp2", qwen, LONG),
        steps("14b", 110, "zk_auto", "Qwen2.5-14B", (32768,)),
        steps("tutorial", 80, "zk_stage2", "GPT-2 10B", (10240,), cap=cap, zero={"state_dtype": "bf16"}),
        steps("overlap", 110, "zk_stage3", qwen, TOKENS, zero=overlap),
        part("kernels", 60, 15),
        steps("nvme", 90, "zk_nvme", "GPT-2 1.3B", LONG, zero=overlap),
        Run("tests", "test_kernels", 150, 20, _pytest("tests/test_kernels.py", *kernels)),
        Run("tests", "test_gpu", 150, 20, _pytest("tests/test_gpu.py", *rest)),
    ]
    if not dry:
        return found
    small = []
    for run in found:
        if run.job is not None:
            tokens = tuple(count // 256 for count in run.job.tokens)
            job = dataclasses.replace(run.job, tokens=tokens, seconds=0.0, keep_last=None if run.job.keep_last is None else 0)
            job = dataclasses.replace(job, cap=(2 << 20) + 8192 * max(tokens) if job.system == "zk_auto" else job.cap)  # so that state is divided
            run = dataclasses.replace(run, job=job)
        small.append(dataclasses.replace(run, least=min(run.least, 1.0), command=(*run.command, *["--dry-run"] * (run.name in _PARTS))))
    return small


_PARTS = ("machine", "floors", "kernels")


class Session:
    """One call of this program: its rows, its report and its time."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.dry = options, options.dry_run
        self.deadline = time.monotonic() + 60 * options.minutes
        stem = f"{datetime.date.today()}-gpu" + "-dry" * self.dry
        options.out.mkdir(parents=True, exist_ok=True)
        self.markdown, self.jsonl = options.out / f"{stem}.md", options.out / f"{stem}.jsonl"
        work = ROOT / "runs" if options.out == RESULTS else options.out
        work.mkdir(parents=True, exist_ok=True)
        self.log = work / f"{stem}.log"
        self.rows: list[Row] = read(self.jsonl)
        self.child: subprocess.Popen[bytes] | None = None
        self.failed = False

    def add(self, run: Run, kind: str, **values: Any) -> None:
        """Add one row."""
        now = datetime.datetime.now().isoformat(timespec="seconds")
        self.rows.append({**values, "section": run.section, "name": run.name, "kind": kind, "dry": self.dry, "time": now})

    def write(self) -> None:
        """Write the rows and the report of them."""
        self.jsonl.write_text("".join(json.dumps(row) + "\n" for row in self.rows))
        self.markdown.write_text(report(self.rows, " ".join(["python benchmarks/gpu.py", *sys.argv[1:]])))

    def plan(self, run: Run) -> Planned:
        """Plan a job, and replace the row of its earlier plan."""
        assert run.job is not None
        found = plan_job(run.job, self.rows, self.dry, self.options.nvme, self.options.host)
        job = {name: getattr(run.job, name) for name in ("system", "model", "tokens", "cap")}
        values = {**dataclasses.asdict(found), **job}
        earlier = of(self.rows, "plan", section=run.section, name=run.name)
        if earlier:
            earlier[0].update(values)
        else:
            self.add(run, "plan", **values)
        return found

    # ---- running ---------------------------------------------------------------------------------------------------------

    def execute(self, run: Run) -> None:
        """Run one process until it ends or its time does, and add its rows."""
        left = self.deadline - time.monotonic()
        if run.least and left < run.least:
            self.add(run, "outcome", outcome=f"not run: time (--sections {run.section}/{run.name} runs it)", seconds=0.0)
            return
        command = list(run.command)
        if run.job is not None:
            found = self.plan(run)
            if found.refused:
                self.add(run, "outcome", outcome=f"not run: {found.refused}", seconds=0.0)
                return
            job = dataclasses.replace(run.job, zero=found.zero)
            command = [str(HERE / "gpu_step.py"), json.dumps(dataclasses.asdict(job)), *["--dry-run"] * self.dry]
        elif run.name in _PARTS:
            command += ["--nvme", str(self.options.nvme)]
        limit = min(left, run.limit) if run.least else run.limit
        print(f"{left:5.0f} s left  {run.section}/{run.name}, {limit:.0f} s at most", file=sys.stderr, flush=True)
        self._follow(run, command, limit)

    def _follow(self, run: Run, command: list[str], limit: float) -> None:
        started, before = time.monotonic(), _used_nbytes()
        peak, outcome = before, "done"
        environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        with self.log.open("ab") as log:
            log.write(f"\n==== {run.section}/{run.name}: {' '.join(command)}\n".encode())
            log.flush()
            begin = log.tell()
            # in a process group of its own, so that everything it starts ends with it
            self.child = subprocess.Popen(
                [sys.executable, *command], cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT, process_group=0
            )
            try:
                while (status := self.child.poll()) is None:
                    peak = max(peak, _used_nbytes())
                    if time.monotonic() - started > limit:
                        outcome = f"failed: over its time limit of {limit:.0f} s"
                        break
                    time.sleep(0.05 if self.dry else 0.2)
            finally:
                self.end_child()
        with self.log.open("rb") as log:
            log.seek(begin)
            output = log.read().decode(errors="replace").splitlines()
        found = list(_rows_in(output))
        if outcome == "done" and status:
            lines = [line for line in output if line.strip() and not line.startswith(MARK)]
            said = [row["reason"] for row in found if row["kind"] == "failed"] or lines[-1:]
            ended = signal.Signals(-status).name if status < 0 else f"status {status}"
            ended += ", as when host memory runs out" * (status == -signal.SIGKILL)
            outcome = " ".join(["failed:", *said])[:300] + f" ({ended})"
        for row in found:
            self.add(run, **row)
        if "pytest" in command:
            self.failed |= bool(status) or any(" FAILED" in line for line in output)  # also those before it was ended
            tail = output[-60:] if status else []
            self.add(run, "tests", summary=_summary(output), tail=tail)
        kept = 0 if self.dry else _wait_for_memory(before)
        self.add(run, "outcome", outcome=outcome, seconds=time.monotonic() - started, host_nbytes=peak - before, kept_nbytes=kept)
        for row in found:
            if row["kind"] == "step":
                print(f"         {row['tokens']:,} tokens: {row['median']:.3f} s, {row['tokens'] / row['median']:,.0f} tokens/s", file=sys.stderr)
        if outcome != "done":
            print(f"         {outcome}", file=sys.stderr, flush=True)

    def end_child(self) -> None:
        """End the process in flight and everything it started."""
        child, self.child = self.child, None
        if child is not None and child.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()  # its memory is given back before it can be waited for


def _rows_in(output: list[str]) -> Iterator[dict[str, Any]]:
    for line in output:
        if line.startswith(MARK):
            with contextlib.suppress(ValueError):  # a line that was cut off
                yield json.loads(line.removeprefix(MARK))


def _summary(output: list[str]) -> str:
    """The last line of pytest, or how many tests had ended when it was killed."""
    words = (" passed", " failed", " skipped", " error")
    ends = [line.strip("= ") for line in output if line.startswith("=") and any(word in line for word in words)]
    counts = ", ".join(f"{sum(f' {word}' in line for line in output)} {word.lower()}" for word in ("PASSED", "FAILED", "SKIPPED"))
    return ends[-1] if ends else f"{counts}, and no end"


def _used_nbytes() -> int:
    """Host memory in use, also by drivers."""
    memory = psutil.virtual_memory()
    return int(memory.total - memory.available)


def _wait_for_memory(before: int) -> int:
    """Wait until the host memory of a process that has ended is free. Return the bytes that are not."""
    stop = time.monotonic() + BACK_S
    while (kept := _used_nbytes() - before) > GIB and time.monotonic() < stop:
        time.sleep(0.2)
    return max(0, kept)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the report")
    parser.add_argument("--sections", default="", help="comma-separated sections, or section/name for one run of a section")
    parser.add_argument("--minutes", type=float, default=9.5, help="time for everything")
    parser.add_argument("--nvme", type=Path, default=ROOT / "runs" / "nvme", help="folder on the drive to measure")
    parser.add_argument("--host", help="host memory to count on, such as 120GiB; by default what the system reports")
    parser.add_argument("--dry-run", action="store_true", help="tiny sizes, also without a GPU")
    options = parser.parse_args()
    if not options.dry_run and not torch.cuda.is_available():
        sys.exit("torch sees no GPU here; --dry-run executes all parts without one, and zk doctor says what there is")
    options.host = parse_nbytes(options.host, "--host") if options.host else None
    options.out, options.nvme = options.out.absolute(), options.nvme.absolute()
    every = runs(options.dry_run)
    wanted = set(filter(None, options.sections.split(",")))
    known = {run.section for run in every} | {f"{run.section}/{run.name}" for run in every}
    if unknown := wanted - known:
        sys.exit(f"there is no section {', '.join(sorted(unknown))}; there are {', '.join(dict.fromkeys(run.section for run in every))}")
    chosen = [run for run in every if not wanted or wanted & {run.section, f"{run.section}/{run.name}"}]
    session = Session(options)
    again = {(run.section, run.name) for run in chosen}
    session.rows = [row for row in session.rows if wanted and (row["section"], row["name"]) not in again]
    if not of(session.rows, "machine") and every[0] not in chosen:
        chosen.insert(0, every[0])  # plans need the machine
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the report is written and no process stays
    try:
        for run in chosen:
            session.execute(run)
            if not of(session.rows, "machine"):
                sys.exit(f"the machine could not be described; see {session.log}")
            if run.section == "floors":  # what fits is said first, and again with measured rates
                for other in chosen:
                    if other.job is not None:
                        session.plan(other)
            session.write()
    finally:
        session.end_child()
        session.write()
    print(session.markdown.read_text())
    print(f"{max(0.0, session.deadline - time.monotonic()):.0f} s left; report: {session.markdown}")
    sys.exit(1 if session.failed else 0)


if __name__ == "__main__":
    main()
