"""Measurements and tests of zk on one GPU within ten minutes, and a dated report of them: `make gpu`, or

    python benchmarks/gpu.py [--minutes 9.5] [--sections floors,12/stage2] [--out FOLDER] [--nvme FOLDER] [--dry-run]

Each row is a process, those of the most worth first. What fails, does not fit or exceeds its limit is a row of the report, which is written anew
after each: DATE-gpu-NAME.md, with the sections in its name if some are chosen. ``--dry-run``: tiny sizes, on the software GPU if there is no other.

Rows of training say their phases: built (the model), pinned (the optimizer is made, and has page-locked memory), touched (a backward has ended, and
memory of gradients is there), first step (that of states too), and each step: forward, backward, clip to a norm of 1, update. A step ends when
compute has done it: with ``overlap_step`` the update runs beside the next. Micro-batches of a step go through ``optimizer.accumulate``.
"""

import argparse
import datetime
import functools
import multiprocessing
import os
import re
import signal
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).absolute().parent.parent
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT)]  # where zk is not installed, this one is meant anyway
os.environ |= {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True", "ZK_QUIET": "1"}
# ruff: noqa: E402
import pytest
import torch
from cases import adam, clock, link
from gpu_model import SIZES, TINY, Size, build
from torch import Tensor

import zk
from tests import softgpu
from zk.memory import aligned
from zk.tools import doctor
from zk.tools.metrics import peak_nbytes
from zk.tools.plan import Machine, Plan

FORK: Any = multiprocessing.get_context("fork")  # rows start at once; this process itself must not wake CUDA
GIB, RESULTS = 1 << 30, ROOT / "benchmarks" / "results"
TOKENS, MICRO = (8192, 16384, 65536), 8192  # of steps, and of micro-batches
LIMITS = {"matrices": 600.0, "host": 120.0, "both at once": 100.0}  # TFLOP/s and GB/s that stand in for floors that were not measured
KERNELS, OTHERS = ("tests/test_kernels.py", "tests/test_checkpoint_device.py"), ("tests/addons", "tests/core", "-m", "device or device_only")
Say = Callable[..., None]
Row = tuple[str, str, float, Callable[[Say, argparse.Namespace], None]]  # section, name, seconds at most, work
Found = list[dict[str, Any]]  # what rows have said, with their section and name


def rows() -> list[Row]:
    def steps(section: str, name: str, limit: float, tokens: tuple[int, ...] = TOKENS, **zero: Any) -> Row:
        return section, name, limit, functools.partial(train, model=section, counts=tokens, zero=zero)

    twelve, cpu = functools.partial(steps, "12", limit=60, tokens=TOKENS[:1]), {"stage": 3, "optimizer_tier": "host"}
    overlap, host = {**cpu, "overlap_step": True}, {**cpu, "param_tier": "host"}
    auto = {"stage": 3, "param_tier": "auto", "optimizer_tier": "auto", "overlap_step": True}
    return [
        *(("floors", floor.__name__, 40.0, floor) for floor in (device, host_memory)),
        twelve("torch"),
        twelve("stage2", stage=2, optimizer_tier="host"),
        twelve("stage3", **host),
        twelve("overlap", **host, overlap_step=True),
        ("tests", "kernels", 75.0, functools.partial(test, few="public_door", arguments=KERNELS)),
        twelve("backward", **host, overlap_step="backward", clip_grad_norm=1e6),  # a clip would undo it
        twelve("on_device", **host, overlap_step=True, update_on="device"),
        twelve("auto", **auto),
        steps("7b", "torch", 80),
        steps("7b", "cpu", 150, **overlap),
        steps("14b", "auto", 200, **auto),
        steps("7b", "on_device", 150, **overlap, update_on="device"),
        steps("7b", "auto", 150, **auto),
        steps("14b", "torch", 120),
        steps("14b", "cpu", 200, **overlap),
        ("tests", "others", 150.0, functools.partial(test, few="tiled_linear and sum_over", arguments=OTHERS)),
    ]


def device(say: Say, options: argparse.Namespace) -> None:
    """The machine; matrices; and the link, whose copies are compared with their sources."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    cpu = re.search(r"model name.*: (.*)", Path("/proc/cpuinfo").read_text())
    words = [gpu, cpu.group(1) if cpu else os.uname().machine, f"Linux {os.uname().release}"]
    say(gpu=gpu, machine="; ".join([*words, *(f"{one.what} {one.found}" for one in (*doctor.packages(), *doctor.machine()))]))
    size, nbytes, rounds = (128, 1 << 18, 2) if options.dry_run else (8192, GIB, 7)
    rate = clock.matmul_tflops(clock.default_device(), size, rounds=rounds)
    say(floor="matrices", what=f"bf16 product of {size}", rate=rate, unit="TFLOP/s")
    found = link.measure(nbytes, rounds)
    for row in found.rows:
        what = f"link, {row['name']}" + ", but the system locks no pages" * (not found.settings["page_locked"])
        say(floor=row["name"].removeprefix("pinned, "), what=what, rate=row["gbps"], unit="GB/s")


def host_memory(say: Say, options: argparse.Namespace) -> None:
    """Seconds to page-lock memory that 0, 1 or all threads have touched, and bytes that the CPU update moves, by threads; the drive."""
    here: Any = link.link_to(clock.the_gpu())
    sizes, cores = ((1 << 20, 1 << 21) if options.dry_run else (GIB, 4 * GIB)), len(os.sched_getaffinity(0))
    for nbytes, threads in [(size, threads) for size in sizes for threads in (0, 1, cores)]:
        memory, start = aligned(nbytes), time.perf_counter()
        torch.set_num_threads(max(1, threads))
        memory[: nbytes * bool(threads)].fill_(1)
        touched = time.perf_counter()
        here.pin(memory)
        what = f"page-lock {nbytes / GIB:.3g} GiB, touched by {threads} threads in {touched - start:.2f} s" + ": refused" * here.refuses
        say(floor="lock", what=what, rate=time.perf_counter() - touched, unit="s")
        here.unpin(memory)
    param, grad = (torch.full((1 << 14 if options.dry_run else 1 << 26,), value, dtype=torch.bfloat16) for value in (1.0, 1e-3))
    for threads in sorted({1, cores, *(2**n for n in range(2, 7) if 2**n < cores)}, reverse=True):
        rate = 26 * param.numel() / statistics.median(clock.seconds_of(adam.by_zk(param, grad, num_threads=threads), 3)) / 1e9
        say(floor="host", what=f"CPU Adam, {threads} threads, 26 bytes a parameter", rate=rate, unit="GB/s")
    options.nvme.mkdir(parents=True, exist_ok=True)
    *rates, direct = doctor.measure_drive(str(options.nvme), 1 << 20 if options.dry_run else 2 * GIB)
    for name, rate in zip(("read", "written"), rates, strict=True):
        say(floor="drive", what=f"drive, {name}" + ", through the page cache" * (not direct), rate=rate / 1e9, unit="GB/s")


def test(say: Say, options: argparse.Namespace, arguments: tuple[str, ...], few: str) -> None:
    """Tests for devices; each verdict is said, so that those before a limit count."""
    counts, failed = Counter[str](), list[str]()

    class Verdicts:
        def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
            if report.when == "call" or report.outcome != "passed":
                counts[report.outcome] += 1
                failed.extend([report.nodeid.rpartition("/")[2]] * report.failed)
                say(tests=f"{dict(counts)} {', '.join(failed[:20])}")

    os.chdir(ROOT)
    fewer = ["-p", "tests.softgpu.plugin", "-k", few] if options.dry_run else []
    status = pytest.main(["-vv", "--tb=short", "-p", "no:cacheprovider", *arguments, *fewer], plugins=[Verdicts()])
    if status or not counts:
        raise RuntimeError(f"{status!r}; {', '.join(failed[:5]) or 'the log says why'}")


def plan(size: Size, tokens: int, micro: int, zero: dict[str, Any]) -> tuple[dict[str, Any], str, bool]:
    """Options, with budgets for "auto"; what they need; and whether it fits. No options: plain torch with bf16 moments and no fp32 master."""
    model, there = build(size, torch.device("meta")), Machine.of(None, None, None, 1)
    working, used = size.working_nbytes(tokens if zero else micro, micro), Counter(device=8 * sum(p.numel() for p in model.parameters()))
    room = Machine(gpu_nbytes=(there.gpu_nbytes or 4 * GIB) - int(working / 0.92), ram_nbytes=there.ram_nbytes)
    fits = used["device"] <= room.capacity("device")
    if zero:
        try:
            row = Plan(name="", model=model, machine=room, tokens=0).row(zk.ZeroConfig(**{"dtype": "bf16", "clip_grad_norm": 1.0, **zero}))
        except ValueError as error:  # "auto" finds no room
            return zero, f"{tokens:,} tokens: {error}", False
        zero, used, fits = row.options(), row.used, not row.missing
    needs = [f"{used[name] / GIB:.1f} of {there.capacity(name) / GIB:.1f} GiB of the {name}" for name in ("device", "host")]
    return zero, f"{tokens:,} tokens need {' and '.join(needs)}, and on the device {working / GIB:.1f} of activations", fits


def train(say: Say, options: argparse.Namespace, model: str, counts: tuple[int, ...], zero: dict[str, Any]) -> None:
    """Steps of plain torch, or by zk with the options ``zero``, for several numbers of tokens."""
    size, scale, patience, device = (*((TINY, 1024, 0.0) if options.dry_run else (SIZES[model], 1, 4.0)), clock.default_device())
    for most, micro in [(most, MICRO // part // scale) for most in range(len(counts), 0, -1) for part in (1, 2)]:
        chosen, needs, fits = plan(size, counts[most - 1] // scale, micro, zero)
        if fits:
            break
    say(needs=needs, mode=zero.get("overlap_step"), by="both at once" if "update_on" in zero else "host")
    if not fits:
        raise MemoryError(f"not run, as it does not fit: {needs}")
    chosen |= {"device_budget": 1 << 20} if options.dry_run and zero.get("param_tier") == "auto" else {}  # so that states are divided
    start, on_gpu = time.perf_counter(), device.type == "cuda"

    def now() -> float:
        """When compute has done what it was asked to do; copies and updates on other streams may go on."""
        if on_gpu:
            torch.cuda.current_stream().synchronize()
        return time.perf_counter()

    def phase(name: str, **values: Any) -> None:
        peaks = peak_nbytes(), *([torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()] if on_gpu else [])
        say(phase=name, at=now() - start, memory=[f"{peak / GIB:.1f}" for peak in peaks], **values)

    def backward(batches: Sequence[Tensor]) -> float:
        """Returns the loss."""
        if zero and len(batches) > 1:
            return float(sum(optimizer.accumulate(batches, lambda net, ids: net(ids) / len(batches))))
        losses = []
        for ids in batches:
            losses.append(net(ids) / len(batches))
            losses[-1].backward()
        return float(sum(loss.detach() for loss in losses))

    net = build(size, device)
    numel = sum(param.numel() for param in net.parameters())
    phase("built")
    inner = torch.optim.AdamW(net.parameters(), fused=None if zero else True, lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1)
    optimizer: Any = zk.ZeroOptimizer(net, inner, **chosen) if zero else inner
    moments = {tier: kinds.get("moments", 0) for tier, kinds in optimizer.summary().nbytes.items()} if zero else {"device": 1}
    phase("pinned", away=1 - moments.get("device", 0) / sum(moments.values()), numel=numel)
    for number, tokens in enumerate(count // scale for count in counts[:most]):
        torch.manual_seed(0)
        ids, taken = torch.randint(0, size.vocab, (tokens // size.context, size.context + 1)), list[float]()
        batches = ids.to(device).split(micro // size.context)
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
        while len(taken) < 2 or (len(taken) < 6 and sum(taken[1:]) < patience):  # the first one is a warm-up
            began, is_first = now(), not (number or taken)
            loss, middle = backward(batches), now()
            if is_first:
                phase("touched")
            if not zero:
                torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            taken.append(now() - began)
            said = {"tokens": tokens, "seconds": taken[-1], "backward": middle - began, "loss": loss, "norm": getattr(optimizer, "norm", 0.0)}
            phase("first step" if is_first else "step", warm=len(taken) > 1, micro=micro, **said)


def bound(compute: float, update: float, mode: Any) -> float:
    """Seconds of a step by formula. True: the update runs beside forward, a quarter of compute; "backward": beside all of it."""
    return max(compute, update) if mode == "backward" else compute + max(0.0, update - compute / 4 * (mode is True))


def of(found: Found, kind: str, **where: Any) -> Found:
    return [one for one in found if kind in one and all(one.get(name) == value for name, value in where.items())]


def table(head: str, lines: Iterable[Sequence[Any]]) -> list[str]:
    titles = head.split("|")
    return ["| " + " | ".join(str(cell).replace("|", "/") for cell in line) + " |" for line in (titles, ["---"] * len(titles), *lines)] + [""]


def curve(found: Found) -> Iterator[list[Any]]:
    """Steps beside plain torch's and the formulas."""
    rates = {name: max((one["rate"] for one in of(found, "floor", floor=name)), default=rate) for name, rate in LIMITS.items()}
    medians: dict[Any, Any] = {}
    for last in of(found, "tokens", warm=True):
        key = {name: last[name] for name in ("section", "name", "tokens")}
        seconds, backward = (statistics.median(one[what] for one in of(found, what, warm=True, **key)) for what in ("seconds", "backward"))
        medians[(*key.values(),)] = seconds, backward, last
    for (section, name, tokens), (seconds, backward, last) in medians.items():
        way = of(found, "needs", section=section, name=name)[-1] | of(found, "away", section=section, name=name)[-1]
        numel, losses = way["numel"], [one["loss"] for one in of(found, "loss", section=section, phase="first step")]
        by_matrices = (tokens, *[8 * numel * tokens / rates["matrices"] / 1e12] * 2)
        plain = [(key[2], *values) for key, values in medians.items() if key[:2] == (section, "torch")]
        near = min(plain, key=lambda one: abs(one[0] - tokens), default=by_matrices)
        whole, compute = near[1] * tokens / near[0], near[2] * tokens / near[0]
        update = numel * way["away"] * (30 if way["by"] == "host" else 20) / rates[way["by"]] / 1e9
        formula, about = bound(compute, update, way["mode"]), "" if plain and near[0] == tokens else "~"
        yield [
            *(section, name, f"{tokens:,}", f"{seconds:.3f}", f"{tokens / seconds:,.0f}", f"{backward:.3f}", f"{100 * way['away']:.0f}"),
            *(f"{about}{(seconds - compute) / numel * 1e9:.3f}", f"{about}{100 * whole / seconds:.0f}", f"{formula:.3f}"),
            *(f"{100 * formula / seconds:.0f}", ", ".join(last["memory"]), f"{last['norm']:.2f}", last["micro"]),
            f"{last['loss']:.3f}" + ", but the first ones differ" * (max(losses) - min(losses) > 1e-3 * max(losses)),
        ]


HEAD = "model|row|tokens|s/step|tokens/s|forward, backward s|% of states away|exposed ns/parameter|% of no offload|formula s|% of formula|"
HEAD += "peak GiB: host, device, reserved|norm|micro-batch|loss"
NOTE = """Medians after a warm-up step; bf16, exact, clipped to 1.0 (row backward: 1e6), fp32 master and moments. No offload: plain torch, bf16
moments, no master; scaled by tokens (~), or of matrices (~) where it has no row. Exposed: beyond its forward and backward. Formula: those, and
30 bytes of host memory a parameter, or 10 each way over the link (on_device), for states that are away; at rates above, or 600 TFLOP/s, 120
and 50 GB/s.
"""


def report(found: Found, options: argparse.Namespace) -> str:
    here = (of(found, "machine") or [{"machine": "not described", "gpu": "no GPU"}])[-1]
    command = f"Command: `python benchmarks/gpu.py {' '.join(sys.argv[1:])}`"
    lines = [f"# {here['gpu']}, {datetime.date.today()}", "", here["machine"], "", command, ""]
    lines += ["**A dry run: tiny sizes. No figure means anything.**", ""] * options.dry_run
    lines += table("floor|rate", [(one["what"], f"{one['rate']:.3g} {one['unit']}") for one in of(found, "floor")])
    lines, ends = [*lines, NOTE, *table(HEAD, curve(found))], []
    for end in of(found, "outcome"):
        own = {name: end[name] for name in ("section", "name")}
        said = [one["needs"] for one in of(found, "needs", **own)] + [one["tests"] for one in of(found, "tests", **own)[-1:]]
        said += [f"{one['phase']} at {one['at']:.1f} s" for one in of(found, "phase", **own) if one["phase"] != "step"]
        ends.append((f"{end['section']}/{end['name']}", f"{end['took']:.1f}", end["outcome"], "; ".join(said)))
    return "\n".join([*lines, *table("row|s|outcome|needs and phases", ends)])


def child(row: Row, options: argparse.Namespace, log: Path, there: Any) -> None:
    """Run a row; this process and all that it starts are one group."""
    code = 1
    try:
        os.setpgid(0, 0)
        Path("/proc/self/oom_score_adj").write_text("1000")  # where host memory runs out, not the process ends that writes the report
        os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), 1), os.dup2(1, 2)
        if options.dry_run and not torch.cuda.is_available():
            softgpu.install()
            os.environ.update(softgpu.environment())
        row[-1](lambda **said: there.send(said), options)
        softgpu.check()
        code = 0
    except BaseException as error:
        there.send({"failed": f"{type(error).__name__}: {error}"[:400]})
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        os._exit(code)


def follow(row: Row, options: argparse.Namespace, limit: float, log: Path, hear: Callable[[dict[str, Any]], None]) -> str:
    """Run a row in a process, and hear what it says as it does. Returns how it ended."""
    (here, there), stop, reason, outcome = FORK.Pipe(False), time.monotonic() + limit, "", f"failed: over its limit of {limit:.0f} s"
    process = FORK.Process(target=child, args=(row, options, log, there))
    process.start()
    os.setpgid(process.pid, process.pid)
    there.close()
    try:
        while here.poll(max(0.0, stop - time.monotonic())):
            hear(said := here.recv())
            reason = said.get("failed", reason)
    except EOFError:
        outcome = ""
    finally:
        os.killpg(process.pid, signal.SIGKILL)  # one that has said all is ending, and its status is known
        process.join()
    killed = f"{signal.Signals(-process.exitcode).name}, as when host memory runs out" if process.exitcode < 0 else ""
    return outcome or (f"failed: {killed or reason}" if process.exitcode else "done")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sections", default="", help="comma-separated sections, or section/name for one row")
    parser.add_argument("--minutes", type=float, default=9.5, help="time for everything")
    parser.add_argument("--out", type=lambda name: Path(name).absolute(), default=RESULTS, help="folder for the report")
    parser.add_argument("--nvme", type=lambda name: Path(name).absolute(), default=ROOT / "runs" / "nvme", help="folder on the drive to measure")
    parser.add_argument("--dry-run", action="store_true", help="tiny sizes, also without a GPU")
    options, every = parser.parse_args(), rows()
    wanted, names = set(filter(None, options.sections.split(","))), {f"{section}/{name}" for section, name, *_ in every}
    if unknown := wanted - names - {section for section, *_ in every}:
        sys.exit(f"there is no {', '.join(sorted(unknown))}; there are {', '.join(sorted(names))}")
    chosen = [row for row in every if not wanted or wanted & {row[0], f"{row[0]}/{row[1]}"}]
    deadline, work = time.monotonic() + 60 * options.minutes, ROOT / "runs" if options.out == RESULTS else options.out
    for folder in (work, options.out):
        folder.mkdir(parents=True, exist_ok=True)
    found: Found = []
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # no process stays
    for row in chosen:
        start = time.monotonic()

        def hear(said: dict[str, Any], row: Row = row) -> None:
            found.append({"section": row[0], "name": row[1], **said})
            print(f"{deadline - time.monotonic():5.0f} s left  {row[0]}/{row[1]}  {said}"[:240], file=sys.stderr, flush=True)

        limit = min(row[2], deadline - start)
        outcome = follow(row, options, limit, work / "gpu.log", hear) if limit > 0 else "not run: time"
        hear({"outcome": outcome, "took": time.monotonic() - start})
        gpu = re.sub(r"\W+", "-", f"{next((one['gpu'] for one in of(found, 'gpu')), 'none')} {options.sections}".strip()).lower()
        path = options.out / f"{datetime.date.today()}-gpu-{gpu}.md"
        path.write_text(report(found, options))
    print(path.read_text(), path)
    sys.exit(any(one["outcome"].startswith("failed") and (options.dry_run or one["section"] == "tests") for one in of(found, "outcome")))


if __name__ == "__main__":
    main()
