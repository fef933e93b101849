"""Everything there is to check and to measure on one GPU, in less than ten minutes, and a dated report of it. `make gpu`, or

    python benchmarks/gpu.py [--sections tests,link,...] [--total SECONDS] [--out FOLDER] [--nvme FOLDER] [--host 120GiB]

Sections run in the order of importance, each job in a process of its own, so that one that fails or runs out of memory does not end the
others. Each section has a budget of seconds; what it leaves over goes to those after it, and what is not over at the end of the budget is
ended and reported as not measured. After every job the report is written anew: DATE-gpu.md, with pictures, from DATE-gpu.jsonl (which is
in runs/ with the log, unless --out names a folder). Figures of sections that are not run again stay, so what was not reached can be
measured in a second run (``--sections caps,nvme``), which gives all its time to these; --fresh forgets them.

``--dry-run`` runs every part in tiny sizes on a CPU whose link to itself is pretended. Ends with an error if a test failed.
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
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil
import torch

HERE = Path(__file__).absolute().parent
ROOT = HERE.parent
RESULTS = HERE / "results"
sys.path.insert(0, str(ROOT))  # where zk is not installed, this one is meant anyway

from gpu_common import GIB, write_row  # noqa: E402
from gpu_report import cut, picture, read, report  # noqa: E402
from gpu_step import largest_layers, of_layers  # noqa: E402
from report import plot, table  # noqa: E402

from zk.config import parse_nbytes  # noqa: E402

CAP = 32 * GIB
ALL_TOKENS = (65536, 16384, 4096)


@dataclasses.dataclass(frozen=True, slots=True)
class Job:
    """One process."""

    name: str
    command: Sequence[str]
    least: float = 10.0  # seconds below which it is not worth a start
    most: float = 300.0
    after: Callable[[Run, int, str], None] | None = None  # makes rows of its exit status and its output
    unless: Callable[[Run], str] | None = None  # a reason not to run it; empty: run it


@dataclasses.dataclass(frozen=True, slots=True)
class Section:
    """What is measured together."""

    name: str
    budget: float  # seconds of 540
    jobs: Callable[[Run], list[Job]]


class Run:
    """One run of this program."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.dry = options, options.dry_run
        self.date = datetime.date.today()
        self.host_nbytes = parse_nbytes(options.host, "--host") if options.host else psutil.virtual_memory().total
        stem = f"{self.date}-gpu" + ("-dry" if self.dry else "")
        work = ROOT / "runs" if options.out == RESULTS else options.out  # of the results, the report and the pictures are kept
        for folder in (options.out, work):
            folder.mkdir(parents=True, exist_ok=True)
        self.markdown, self.rows, self.log = options.out / f"{stem}.md", work / f"{stem}.jsonl", work / f"{stem}.log"
        self.pictures = {name: options.out / f"{stem}{name}.png" for name in ("", "-steps")}
        self.started, self.failed = time.monotonic(), False
        self.child: subprocess.Popen[bytes] | None = None

    # ---- commands ------------------------------------------------------------------------------------------------------------

    def part(self, script: str, section: str, job: str, *more: str) -> list[str]:
        """A command that runs one of the other scripts."""
        command = [sys.executable, str(HERE / script), "--rows", str(self.rows), "--section", section, "--job", job]
        command += ["--host-nbytes", str(self.host_nbytes)]
        return [*command, *(["--dry-run"] if self.dry else []), *more]

    def step(self, section: str, system: str, size: str, name: str = "", least: float = 15.0, most: float = 90.0, **job: Any) -> Job:
        """A job of training steps."""
        what = {"system": system, "size": size, "tokens": ALL_TOKENS, "warmup": 2, "steps": 3, "nvme": str(self.options.nvme), **job}
        what["timeline"] = self.options.timeline
        if "layers" in what:
            del what["size"]
        if self.dry:
            what.pop("layers", None)
            tokens = dict(zip(ALL_TOKENS, (256, 128, 64), strict=True))
            what |= {"size": "tiny", "tokens": [tokens[n] for n in what["tokens"]], "steps": 2, "warmup": 1}
            what["offload_activations_at"] = [tokens[n] for n in what.get("offload_activations_at", ())]
            if "device_budget" in what.get("options", {}):
                what["options"] = {"device_budget": 700_000}
            if "host_budget" in what.get("options", {}):
                what["options"] = {"host_budget": "8MiB"}
        name = name or system
        return Job(name, self.part("gpu_step.py", section, name, json.dumps(what)), 1.0 if self.dry else least, most)

    # ---- running -------------------------------------------------------------------------------------------------------------

    def run_job(self, section: str, job: Job, deadline: float) -> None:
        """Run a job until it ends, or until ``deadline``, and write down how it went."""
        started, left = time.monotonic(), deadline - time.monotonic()
        reason = job.unless(self) if job.unless is not None else ""
        if not reason and left < job.least:
            reason = f"no time was left (make gpu ARGS='--sections {section}')"
        if reason:
            self.outcome(section, job.name, reason, 0.0)
            return
        limit = min(left, job.most)
        print(f"{started - self.started:5.0f} s  {section}/{job.name}, {limit:.0f} s at most", file=sys.stderr, flush=True)
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
        with self.log.open("ab") as log:
            log.write(f"\n==== {section}/{job.name}: {' '.join(map(str, job.command))}\n".encode())
            log.flush()
            begin = log.tell()
            # a group of its own, which can be ended with all that it started
            self.child = subprocess.Popen(job.command, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT, process_group=0)
            try:
                status = self.child.wait(limit)
                outcome = "done" if status == 0 else f"it ended with status {status}"
                if status == -signal.SIGKILL:
                    outcome = "it was killed from outside (host memory?)"
            except subprocess.TimeoutExpired:
                self.end_child()
                status, outcome = 124, f"it was ended after {limit:.0f} s, its time"
            finally:
                self.end_child()
        with self.log.open("rb") as log:
            log.seek(begin)
            output = log.read().decode(errors="replace")
        if job.after is not None:
            job.after(self, status, output)
        elif outcome != "done":
            last = [line for line in output.splitlines() if line.strip()][-1:]
            outcome += f": {last[0][:300]}" if last and status != 124 else ""
        self.outcome(section, job.name, outcome, time.monotonic() - started)
        self.show(section, job.name)

    def end_child(self) -> None:
        """End the process under way, and what it started."""
        child, self.child = self.child, None
        if child is not None and child.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(20)

    def outcome(self, section: str, job: str, outcome: str, seconds: float) -> None:
        """Write down how a job ended."""
        write_row(self.rows, section=section, job=job, kind="outcome", outcome=outcome, seconds=seconds, dry=self.dry)
        if outcome != "done":
            print(f"         {section}/{job}: {outcome}", file=sys.stderr, flush=True)

    def show(self, section: str, job: str) -> None:
        """A line for each step that was measured, for who watches."""
        for row in read(self.rows):
            if row["kind"] == "step" and (row["section"], row["job"]) == (section, job):
                print(
                    f"         {row['model']} {row['tokens']} tokens: {row['median']:.3f} s ({row['backward_seconds']:.3f} backward), "
                    f"{row['tflops']:.1f} TFLOP/s, device {row['reserved_nbytes'] / GIB:.1f} GiB, losses {row['losses'][0]:.4f} to "
                    f"{row['losses'][-1]:.4f}",
                    file=sys.stderr,
                    flush=True,
                )

    def write(self) -> str:
        """The report of what there is by now."""
        rows = read(self.rows)
        asked = {"models": ("tiny", "tiny"), "tokens": 256, "cap": CAP} if self.dry else {}
        text = report(rows, str(self.date), **asked)
        self.markdown.write_text(text)
        with contextlib.suppress(ImportError):
            picture(rows, self.pictures["-steps"], model="tiny" if self.dry else "1.3B")
        return text

    def forget(self, jobs: set[tuple[str, str]]) -> None:
        """Leave out of the file what is to be measured again."""
        if not self.rows.exists():
            return
        again = jobs | {(section, "") for section, _ in jobs}  # budgets belong to no job
        kept = [] if self.options.fresh else [row for row in read(self.rows) if (row["section"], row["job"]) not in again]
        self.rows.write_text("".join(json.dumps(row) + "\n" for row in kept))


# ---- what to run -------------------------------------------------------------------------------------------------------------


def _pytest(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "pytest", "--tb=short", "-p", "no:cacheprovider", *arguments]


def _summary(output: str) -> str:
    lines = [line for line in output.splitlines() if any(word in line for word in (" passed", " failed", " skipped", " error"))]
    return lines[-1].strip("= ") if lines else "no summary: it did not come to its end"


def _tested(job: str, section: str = "tests") -> Callable[[Run, int, str], None]:
    def after(run: Run, status: int, output: str) -> None:
        run.failed |= status != 0
        tail = output.splitlines()[-60:] if status else []
        write_row(run.rows, section=section, job=job, kind="tests", summary=_summary(output), returncode=status, tail=tail, dry=run.dry)

    return after


_LARGE = "64k_features"


def tests(run: Run) -> list[Job]:
    """What pytest says on the GPU."""
    only = ("-k", "flatten and not hypothesis") if run.dry else ("--durations=5",)
    return [
        Job("test_gpu", _pytest("tests/test_gpu.py", "--durations=5", "-k", f"not {_LARGE}"), 5, 90, _tested("test_gpu")),
        Job("test_kernels", _pytest("tests/test_kernels.py", *only), 5, 150, _tested("test_kernels")),
    ]


def large(run: Run) -> list[Job]:
    """The test of a layer that does not fit; it takes longer than all others together."""
    return [Job("test_large", _pytest("tests/test_gpu.py", "-k", _LARGE), 5, 120, _tested("test_large", "large"))]


def link(run: Run) -> list[Job]:
    """The machine."""
    return [Job(name, run.part("gpu_link.py", "link", name), 3, 60) for name in ("machine", "link", "device", "host")]


def step(run: Run) -> list[Job]:
    """1.3B on what zk has, and on plain PyTorch."""
    systems = ("zk_device", "zk_stage2", "zk_stage2_overlap", "torch", "zk_stage3_overlap", "zk_stage3")
    return [run.step("step", system, "1.3B") for system in systems]


def peers(run: Run) -> list[Job]:
    """The same elsewhere."""
    return [run.step("peers", "fsdp2_offload", "1.3B")]


def seven(run: Run) -> list[Job]:
    """7B: under a cap first, then what else there is time for. Its steps grow, so that the first is soon there."""
    how = {"tokens": ALL_TOKENS[::-1], "warmup": 1, "steps": 2, "least": 60.0, "most": 240.0}
    long = ALL_TOKENS[0]
    return [
        run.step("seven", "zk_stage3", "7B", "zk_stage3 under 32 GiB", cap=CAP, offload_activations_at=[long], **how),
        run.step("seven", "zk_device", "7B", **{**how, "least": 40.0}),
        run.step("seven", "zk_stage3_overlap", "7B", "zk_stage3_overlap under 32 GiB", cap=CAP, offload_activations_at=[long], **how),
        run.step("seven", "zk_stage2", "7B", **how),
        run.step("seven", "zk_stage2_overlap", "7B", **how),
        run.step("seven", "zk_nvme_part", "7B", options={"host_budget": "64GiB"}, **{**how, "tokens": (ALL_TOKENS[1],), "steps": 1}),
    ]


def caps(run: Run) -> list[Job]:
    """The largest models that arithmetic allows, the smallest cap first: what trains under it trains under the others."""
    jobs = []
    for gib, use_device in ((16, False), (32, True), (24, True)):
        layers, spare = largest_layers(run.host_nbytes, gib * GIB, use_device)
        bound = {"cap": gib * GIB, "layers": layers, "numel": of_layers(layers).numel, "spare": spare}
        write_row(run.rows, section="caps", job=f"{gib} GiB", kind="bound", dry=run.dry, **bound)
        how: dict[str, Any] = {"optimizer_tier": "auto", "options": {"device_budget": spare}} if spare else {}
        how |= {"layers": layers, "tokens": (ALL_TOKENS[2],), "warmup": 1, "steps": 1, "cap": gib * GIB}
        jobs.append(run.step("caps", "zk_stage3", "7B", f"{gib} GiB", least=60.0, most=200.0, **how))
    return jobs


def kernels(run: Run) -> list[Job]:
    """Each kernel against its floor."""
    results = run.rows.with_suffix(".kernels.json")

    def red(run: Run) -> str:
        found = [row for row in read(run.rows) if row["kind"] == "tests" and row["job"] == "test_kernels"]
        # (124: they were ended before they could fail)
        return "the kernels' tests failed: what is red is not measured" if found and found[-1]["returncode"] not in (0, 124) else ""

    def after(run: Run, status: int, output: str) -> None:
        if results.exists() and results.stat().st_size:
            measured = json.loads(results.read_text())
            text = "\n".join(table(measured).splitlines()[4:])
            tail = output.splitlines()[-20:]
            write_row(run.rows, section="kernels", job="kernels", kind="kernels", markdown=text, returncode=status, tail=tail, dry=run.dry)
            with contextlib.suppress(ImportError):
                plot(measured, run.pictures[""])
        results.unlink(missing_ok=True)

    only = ("-k", "flatten and small and zk") if run.dry else ()
    command = _pytest("benchmarks/bench_kernels.py", "--benchmark-columns=median", f"--benchmark-json={results}", *only)
    return [Job("kernels", command, 3 if run.dry else 15, 200, after, red)]


def nvme(run: Run) -> list[Job]:
    """1.3B with everything on the drive: one size, as each step moves 40 GB."""
    tokens = (ALL_TOKENS[0],)
    jobs = [run.step("nvme", name, "1.3B", least=40.0, most=200.0, tokens=tokens, warmup=1, steps=2) for name in ("zk_nvme", "zk_nvme_overlap")]
    return jobs if run.options.sections is not None else jobs[:1]


def disk(run: Run) -> list[Job]:
    """The drive alone."""
    return [Job("disk", run.part("gpu_link.py", "disk", "disk", "--nvme", str(run.options.nvme)), 5, 60)]


SECTIONS = (
    Section("tests", 85, tests),
    Section("link", 35, link),
    Section("step", 130, step),
    Section("peers", 40, peers),
    Section("seven", 105, seven),
    Section("caps", 60, caps),
    Section("kernels", 30, kernels),
    Section("nvme", 25, nvme),
    Section("disk", 15, disk),
    Section("large", 15, large),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the report")
    parser.add_argument("--sections", help="some of " + ",".join(section.name for section in SECTIONS))
    parser.add_argument("--jobs", help="of these sections, only jobs with these names, separated by commas")
    parser.add_argument("--total", type=float, default=540.0, help="seconds for all of it")
    parser.add_argument("--nvme", type=Path, default=ROOT / "runs" / "nvme", help="folder on the drive to measure")
    parser.add_argument("--host", help="host memory to count on, such as 120GiB; by default what the system says it has")
    parser.add_argument("--timeline", action="store_true", help="record one more step of each system: what was hidden behind compute")
    parser.add_argument("--fresh", action="store_true", help="forget what was measured earlier on this day")
    parser.add_argument("--dry-run", action="store_true", help="tiny sizes, on a CPU")
    options = parser.parse_args()
    if not options.dry_run and not torch.cuda.is_available():
        sys.exit("there is no GPU here; `make test` interprets and compiles the kernels without one, --dry-run goes through all parts")
    names = options.sections.split(",") if options.sections else [section.name for section in SECTIONS]
    unknown = set(names) - {section.name for section in SECTIONS}
    if unknown:
        sys.exit(f"there is no section {', '.join(sorted(unknown))}; there are {', '.join(section.name for section in SECTIONS)}")
    options.out, options.nvme = options.out.absolute(), options.nvme.absolute()
    run = Run(options)
    chosen = [section for section in SECTIONS if section.name in names]
    wanted = set(options.jobs.split(",")) if options.jobs else None
    spare_rows = run.rows
    run.rows = run.rows.with_suffix(".names")  # (some sections write rows when they name their jobs)
    named = {(section.name, job.name) for section in chosen for job in section.jobs(run) if wanted is None or job.name in wanted}
    run.rows.unlink(missing_ok=True)
    run.rows = spare_rows
    run.forget(named)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the report is written, and no process is left
    scale, budget = options.total / sum(section.budget for section in chosen), 0.0
    try:
        for section in chosen:
            budget += section.budget * scale
            write_row(run.rows, section=section.name, job="", kind="budget", seconds=section.budget * scale, dry=run.dry)
            for job in section.jobs(run):
                if wanted is None or job.name in wanted:
                    run.run_job(section.name, job, run.started + budget)
                    run.write()
    finally:
        run.end_child()
        text = run.write()
    start = text.find("## Asked, and measured")
    print(text[start : text.find("\n## ", start + 1)])
    print(f"{cut(time.monotonic() - run.started, 0)} s; report: {run.markdown}")
    sys.exit(1 if run.failed else 0)


if __name__ == "__main__":
    main()
