"""Tests and measures zk on one GPU in less than ten minutes: `make gpu`, or

    python benchmarks/gpu.py [--minutes 9.5] [--sections floors,12/stage2] [--dry-run]

Each row is a process, those that say most first. What fails, does not fit or takes too long is a
line of the report, DATE-gpu-NAME.md, which is written anew after each row. Training has phases: the
model is built, memory is pinned for the optimizer, a backward has touched that of gradients, and a
first step that of states. ``--dry-run``: tiny sizes, also on the software GPU.
"""

import datetime
import multiprocessing
import os
import re
import signal
import sys
import time
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

ROOT = Path(__file__).absolute().parent.parent
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT)]  # this zk, whichever is installed
os.environ |= {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True", "ZK_QUIET": "1"}
# ruff: noqa: E402
import pytest
import torch
from cases import adam, clock, link
from gpu_model import PIECE, SIZES, TINY, GPTConfig, build

import zk
from tests import softgpu
from zk.tools import doctor
from zk.tools.metrics import peak_nbytes
from zk.tools.plan import Machine, Plan

FORK: Any = multiprocessing.get_context("fork")  # starts at once; this process must not wake CUDA
GIB, MICRO, TOKENS = 1 << 30, 8192, (8192, 16384, 65536)  # tokens of a micro-batch, and of steps
RATES = {"matrices": 600.0, "host": 120.0, "pinned, both at once": 100.0}  # or floors
NOTES = "needs", "built", "pinned", "touched", "first step", "tests"  # kinds of facts of a row
Say = Callable[[str, Any], None]  # a kind of fact, and one of it
Said = dict[str, list[Any]]  # by a row, of each kind


class Row(NamedTuple):
    name: str  # with its section
    limit: float  # seconds
    work: Callable[["Row", Say, Any], None]
    given: Any = None  # options of ZeroOptimizer, or tests, and the few of a dry run


def device(row: Row, say: Say, options: Any) -> None:
    """The machine; matrices; and the link, whose copies are compared with their sources."""
    gpu = torch.cuda.get_device_name(clock.the_gpu())
    cpu = re.findall(r"model name.*: (.*)", Path("/proc/cpuinfo").read_text())[:1]
    facts = [f"{one.what} {one.found}" for one in (*doctor.packages(), *doctor.machine())]
    say("machine", (gpu, "; ".join([gpu, *cpu, f"Linux {os.uname().release}", *facts])))
    size, nbytes, rounds = (128, 1 << 18, 2) if options.dry_run else (8192, GIB, 7)
    rate = clock.matmul_tflops(clock.the_gpu(), size, rounds=rounds)
    say("floor", ("matrices", f"bf16 product of {size}", rate, "TFLOP/s"))
    found = link.measure(nbytes, rounds)
    doubt = "" if found.settings["page_locked"] else ", but the system locks no pages"
    for one in found.rows:
        say("floor", (one["name"], f"link, {one['name']}{doubt}", one["gbps"], "GB/s"))


def host_memory(row: Row, say: Say, options: Any) -> None:
    """Page-locking, of memory that 0, 1 or all threads have touched; the CPU update; the drive."""
    cores, less = len(os.sched_getaffinity(0)), 1 << (10 * options.dry_run)
    for gib, threads in [(gib, threads) for gib in (1, 4) for threads in (0, 1, cores)]:
        touched, locked, refused = link.page_lock(gib * GIB // less, threads)
        what = f"page-lock {gib} GiB, touched by {threads} threads in {touched:.2f} s{refused}"
        say("floor", ("lock", what, locked, "s"))
    param = torch.ones((1 << 26) // less, dtype=torch.bfloat16)
    for threads in sorted({1, cores, *(2**n for n in range(2, 7) if 2**n < cores)}, reverse=True):
        update = adam.by_zk(param, torch.full_like(param, 1e-3), num_threads=threads)
        rate = adam.SPLIT * param.numel() / median(clock.seconds_of(update, 3)) / 1e9
        what = f"CPU Adam, {threads} threads, {adam.SPLIT} bytes a parameter"
        say("floor", ("host", what, rate, "GB/s"))
    options.nvme.mkdir(parents=True, exist_ok=True)
    read, written, direct = doctor.measure_drive(str(options.nvme), 2 * GIB // less)
    past = "" if direct else ", through the page cache"
    say("floor", ("drive", f"drive, read{past}", read / 1e9, "GB/s"))
    say("floor", ("drive", f"drive, written{past}", written / 1e9, "GB/s"))


def test(row: Row, say: Say, options: Any) -> None:
    """Tests for devices. Each verdict is said, so that those before a limit count."""
    (tests, few), counts = row.given, Counter[str]()

    class Verdicts:
        def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
            if report.when == "call" or report.outcome != "passed":
                counts[report.outcome + f" {report.nodeid}" * report.failed] += 1
                say("tests", dict(counts))

    os.chdir(ROOT)
    fewer = ["-p", "tests.softgpu.plugin", "-k", few] if options.dry_run else []
    arguments = ["-vv", "--tb=short", "-p", "no:cacheprovider", *tests, *fewer]
    if (status := pytest.main(arguments, plugins=[Verdicts()])) or not counts:
        raise RuntimeError(f"{status!r}: the log says why")


def plan(size: GPTConfig, tokens: int, micro: int, zero: dict[str, Any]) -> tuple[Any, str, bool]:
    """Options, with budgets for "auto"; what they need; whether it fits. None: bf16 moments."""
    model, there = build(size, torch.device("meta")), Machine.of(None, None, None, 1)
    blocks = size.layers * (tokens if zero else micro) + 28 * micro  # what they keep, and compute
    working = 2 * size.width * blocks + 14 * size.vocab * min(micro, PIECE)  # about
    room = Machine(gpu_nbytes=there.gpu_nbytes - int(working / 0.92), ram_nbytes=there.ram_nbytes)
    used = Counter(device=8 * sum(param.numel() for param in model.parameters()))
    fits = used["device"] <= room.capacity("device")
    if zero:
        config = zk.ZeroConfig(**{"dtype": "bf16", "clip_grad_norm": 1.0, **zero})
        try:
            row = Plan(name="", model=model, machine=room, tokens=0).row(config)
        except ValueError as error:  # "auto" finds no room
            return zero, f"{tokens:,} tokens: {error}", False
        zero, used, fits = row.options(), row.used, not row.missing
    needs = f"for {tokens:,} tokens {working / GIB:.1f} GiB of activations"
    for name in ("device", "host"):
        needs += f", {used[name] / GIB:.1f} of {there.capacity(name) / GIB:.1f} GiB of the {name}"
    return zero, needs, fits


def backward(net: Any, optimizer: Any, batches: Any) -> float:
    """Forward and backward of micro-batches, which zk takes block by block. Returns the loss."""
    if isinstance(optimizer, zk.ZeroOptimizer) and len(batches) > 1:
        return float(sum(optimizer.accumulate(batches, lambda net, ids: net(ids) / len(batches))))
    losses = []
    for ids in batches:
        losses.append(net(ids) / len(batches))
        losses[-1].backward()
    return sum(map(float, losses))


def train(row: Row, say: Say, options: Any) -> None:
    """Steps of plain torch, or by zk with the options given, of several numbers of tokens."""
    model, gpu, start = row.name.partition("/")[0], clock.the_gpu(), time.perf_counter()
    size, scale, patience = (TINY, 1024, 0.0) if options.dry_run else (SIZES[model], 1, 4.0)
    counts = [tokens // scale for tokens in (TOKENS[:1] if model == "12" else TOKENS)]
    for most, part in [(most, part) for most in range(len(counts), 0, -1) for part in (1, 2)]:
        micro = MICRO // part // scale
        zero, needs, fits = plan(size, counts[most - 1], micro, row.given or {})
        if fits:
            break
    else:
        raise MemoryError(f"does not fit: {needs}")
    say("needs", needs)
    if options.dry_run and zero.get("param_tier") == "auto":
        zero["device_budget"] = 1 << 20  # so that states are divided

    def now() -> float:  # when compute has done all; copies and updates may go on beside it
        torch.cuda.current_stream().synchronize()
        return time.perf_counter() - start

    net = build(size, gpu)
    say("built", f"at {now():.1f} s")
    params, how = list(net.parameters()), {"lr": 1e-4, "betas": (0.9, 0.95), "weight_decay": 0.1}
    optimizer: Any = torch.optim.AdamW(params, fused=None if zero else True, **how)
    facts = {"micro": micro, "numel": sum(param.numel() for param in params), "away": 0.0}
    facts |= {"mode": zero.get("overlap_step"), "on_device": "update_on" in zero}
    if zero:
        optimizer = zk.ZeroOptimizer(net, optimizer, **zero)
        nbytes = {tier: kinds["moments"] for tier, kinds in optimizer.summary().nbytes.items()}
        facts["away"] = 1 - nbytes.get("device", 0) / sum(nbytes.values())
    say("pinned", f"at {now():.1f} s")
    for tokens in counts[:most]:
        torch.manual_seed(0)
        ids = torch.randint(0, size.vocab, (tokens // size.context, size.context + 1)).to(gpu)
        batches, whole, compute = ids.split(micro // size.context), list[float](), list[float]()
        torch.cuda.reset_peak_memory_stats()
        while len(whole) < 2 or (len(whole) < 6 and sum(whole[1:]) < patience):
            began, is_first = now(), "first" not in facts
            loss = backward(net, optimizer, batches)
            compute.append(now() - began)
            if is_first:
                facts["first"] = loss
                say("touched", f"at {now():.1f} s")
            norm = 0.0 if zero else torch.nn.utils.clip_grad_norm_(params, 1.0)
            optimizer.step()
            optimizer.zero_grad()
            whole.append(now() - began)
            if is_first:
                say("first step", f"at {now():.1f} s")
            if len(whole) > 1:  # the first one is a warm-up
                facts |= {"tokens": tokens, "loss": loss, "norm": float(norm or optimizer.norm)}
                facts |= {"seconds": median(whole[1:]), "compute": median(compute[1:])}
                near = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
                facts["peaks"] = ", ".join(f"{n / GIB:.1f}" for n in (peak_nbytes(), *near))
                say("step", facts)


CPU = {"stage": 3, "optimizer_tier": "host", "overlap_step": True}
HOST = {"stage": 3, "optimizer_tier": "host", "param_tier": "host"}
AUTO = {"stage": 3, "optimizer_tier": "auto", "param_tier": "auto", "overlap_step": True}
KERNELS = ("tests/test_kernels.py", "tests/test_checkpoint_device.py"), "public_door"
OTHERS = ("tests/addons", "tests/core", "-m", "device or device_only"), "tiled_linear and sum_over"
ROWS = (
    Row("floors/device", 30, device),
    Row("12/stage2", 75, train, {"stage": 2, "optimizer_tier": "host"}),
    Row("12/torch", 60, train),
    Row("floors/host_memory", 40, host_memory),
    Row("12/stage3", 60, train, HOST),
    Row("12/overlap", 60, train, {**HOST, "overlap_step": True}),
    Row("tests/kernels", 75, test, KERNELS),
    Row("12/backward", 60, train, {**HOST, "overlap_step": "backward", "clip_grad_norm": 1e6}),
    Row("12/on_device", 60, train, {**HOST, "overlap_step": True, "update_on": "device"}),
    Row("12/auto", 60, train, AUTO),
    Row("7b/torch", 80, train),
    Row("7b/cpu", 150, train, CPU),
    Row("14b/auto", 200, train, AUTO),
    Row("7b/on_device", 150, train, {**CPU, "update_on": "device"}),
    Row("7b/auto", 150, train, AUTO),
    Row("14b/torch", 120, train),
    Row("14b/cpu", 200, train, CPU),
    Row("tests/others", 150, test, OTHERS),
)


def child(row: Row, options: Any, there: Any) -> None:
    """Work on a row; this process and all that it starts are one group."""
    outcome = "done"
    try:
        os.setpgid(0, 0)
        Path("/proc/self/oom_score_adj").write_text("1000")  # ends before the one that reports
        os.dup2(os.open(options.out / "gpu.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND), 1)
        os.dup2(1, 2)
        if options.dry_run and not torch.cuda.is_available():
            softgpu.install()
            os.environ.update(softgpu.environment())
        row.work(row, lambda kind, value: there.send((kind, value)), options)
        softgpu.check()
    except BaseException as error:
        outcome = f"failed: {type(error).__name__}: {error}"[:400]
        sys.excepthook(*sys.exc_info())
    sys.stdout.flush()
    there.send(("outcome", outcome))
    os._exit(0)


def follow(row: Row, options: Any, limit: float) -> Said:
    """Work on a row in a process. What it has said, and how it ended."""
    (here, there), start, said = FORK.Pipe(False), time.monotonic(), defaultdict[str, Any](list)
    process = FORK.Process(target=child, args=(row, options, there))
    process.start()
    os.setpgid(process.pid, process.pid)
    there.close()
    outcome = f"failed: over its limit of {limit:.0f} s"
    try:
        while not said["outcome"] and here.poll(max(0.0, start + limit - time.monotonic())):
            kind, fact = here.recv()
            said[kind].append(fact)
            print(f"{row.name}  {kind} {fact}"[:200], file=sys.stderr, flush=True)
    except EOFError:
        outcome = "failed: killed, as where host memory runs out"
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.join()
    said["outcome"] = said["outcome"] or [f"{outcome}; its status is {process.exitcode}"]
    said["seconds"] = [time.monotonic() - start]
    return said


def bound(compute: float, update: float, mode: Any) -> float:
    """Seconds of a step by formula: the update runs beside forward, or beside "backward" too."""
    hidden = {True: compute / 4, "backward": compute}.get(mode, 0.0)
    return compute + max(0.0, update - hidden)


CURVE = "row|tokens|s/step|tokens/s|forward, backward s|% of states away|exposed ns/parameter|"
CURVE += "% of no offload|formula s|% of formula|peaks GiB|norm|micro-batch|loss"
NOTE = """
Medians after a warm-up step; bf16, exact, clipped to 1.0 (backward: 1e6, as a clip would undo it),
fp32 master and moments. No offload: plain torch, bf16 moments, no master; scaled by tokens, or of
matrices where it has no row (~). Exposed: beyond its forward and backward. Formula: those and, for
states that are away, 30 bytes of host memory a parameter, or 10 each way over the link (on_device),
at rates above, or 600 TFLOP/s, 120 and 50 GB/s. Peaks: of host, of device, and reserved there.
"""


def curve(found: dict[str, Said]) -> Iterator[str]:
    """Steps over tokens, beside plain torch's and the formula's."""
    floors = sorted((rate, name) for said in found.values() for name, _, rate, _ in said["floor"])
    rates = RATES | {name: rate for rate, name in floors}
    steps = {(name, one["tokens"]): one for name, said in found.items() for one in said["step"]}
    for (name, tokens), step in steps.items():
        model, seconds, numel = name.partition("/")[0], step["seconds"], step["numel"]
        plain = [one for (row, _), one in steps.items() if row == f"{model}/torch"]
        least = 8 * numel * tokens / rates["matrices"] / 1e12
        by_matrices = {"tokens": tokens, "seconds": least, "compute": least}
        near = min(plain, key=lambda one: abs(one["tokens"] - tokens), default=by_matrices)
        about = "" if near is steps.get((f"{model}/torch", tokens)) else "~"
        whole, compute = (near[what] * tokens / near["tokens"] for what in ("seconds", "compute"))
        way, nbytes = ("pinned, both at once", 20) if step["on_device"] else ("host", 30)
        formula = bound(compute, numel * step["away"] * nbytes / rates[way] / 1e9, step["mode"])
        firsts = [one["first"] for (row, _), one in steps.items() if row.startswith(f"{model}/")]
        differ = ", but the first ones differ" * (max(firsts) - min(firsts) > 1e-3 * max(firsts))
        yield (
            f"{name}|{tokens:,}|{seconds:.3f}|{tokens / seconds:,.0f}|{step['compute']:.3f}|"
            f"{100 * step['away']:.0f}|{about}{(seconds - compute) / numel * 1e9:.3f}|"
            f"{about}{100 * whole / seconds:.0f}|{formula:.3f}|{100 * formula / seconds:.0f}|"
            f"{step['peaks']}|{step['norm']:.2f}|{step['micro']}|{step['loss']:.3f}{differ}"
        )


def table(titles: str, rows: Iterable[str]) -> list[str]:
    return [f"|{row}|" for row in (titles, "---" + "|---" * titles.count("|"), *rows)] + [""]


def report(found: dict[str, Said], options: Any) -> Path:
    """Write the machine and its floors, the curve, and how each row ended."""
    floors, ends, gpu, machine = list[str](), list[str](), "no GPU", "not described"
    for name, said in found.items():
        gpu, machine = (said["machine"] or [(gpu, machine)])[-1]
        floors += [f"{what}|{rate:.3g} {unit}" for _, what, rate, unit in said["floor"]]
        notes = "; ".join(f"{kind} {said[kind][-1]}" for kind in NOTES if said[kind])
        cells = [re.sub(r"[|\n]+", " ", one) for one in (said["outcome"][0], notes)]
        ends.append("|".join([name, f"{sum(said['seconds']):.1f}", *cells]))
    dry = ["**A dry run: tiny sizes. No figure means anything.**", ""] * options.dry_run
    command = f"`python benchmarks/gpu.py {' '.join(sys.argv[1:])}`"
    lines = [f"# {gpu}, {datetime.date.today()}", "", machine, "", command, "", *dry]
    lines += [*table("floor|rate", floors), NOTE, *table(CURVE, curve(found))]
    name = re.sub(r"\W+", "-", f"{gpu} {options.sections}".strip()).lower()
    path: Path = options.out / f"{datetime.date.today()}-gpu-{name}.md"
    path.write_text("\n".join([*lines, *table("row|s|outcome|needs and phases", ends)]))
    return path


def main() -> None:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--sections", default="", help="comma-separated sections, or section/name for one row")
    add("--minutes", type=float, default=9.5, help="time for everything")
    add("--out", type=Path, default=ROOT / "benchmarks" / "results", help="folder for the report")
    add("--nvme", type=Path, default=ROOT / "runs" / "nvme", help="folder on the drive to measure")
    add("--dry-run", action="store_true", help="tiny sizes, also without a GPU")
    options = parser.parse_args()
    words, names = tuple(options.sections.split(",")), [row.name for row in ROWS]
    if unknown := [word for word in words if not any(name.startswith(word) for name in names)]:
        sys.exit(f"there is no {', '.join(unknown)}; there are {', '.join(names)}")
    options.out.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + 60 * options.minutes
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # no process stays
    chosen = [row for row in ROWS if row.name.startswith(words)]
    found: dict[str, Said] = {row.name: defaultdict(list, outcome=["not run"]) for row in chosen}
    for row in chosen:
        if (limit := min(row.limit, deadline - time.monotonic())) > 0:
            found[row.name] = follow(row, options, limit)
        path = report(found, options)
    print(path.read_text(), path)
    failed = [name for name, said in found.items() if "failed" in str(said["outcome"])]
    sys.exit(any(options.dry_run or name.startswith("tests") for name in failed))


if __name__ == "__main__":
    main()
