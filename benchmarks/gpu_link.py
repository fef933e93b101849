"""What the machine can do: link to the device, host memory, matrix unit, drive. Part of `make gpu`, which says what to run.

``link``: copies of 1 MiB to 1 GiB each way and both at once, by torch (pinned memory, a stream for each direction: the floor) and through
zk's Arena, link and Transfer; results are compared with their sources before anything is timed. ``host``: triad and CPU Adam by threads.
``device``: bf16 matrices of 8192, and copies within the device. ``disk``: zk.offload.nvme.File, written and read whole.
"""

from __future__ import annotations

import importlib
import os
import platform
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from gpu_common import GIB, Bench, arguments, bench_of
from torch import Tensor

from zk.kernels.step import AdamStep
from zk.memory import aligned, zeros
from zk.offload.cpu_adam import adam_, default_engine
from zk.offload.nvme import Engine, File, can_bypass_cache
from zk.offload.pinned import Arena
from zk.offload.streams import link_to
from zk.offload.transfer import PIECE_NUMEL, Transfer, pieces_of

DIRECTIONS = ("down", "up", "both")  # device to host, host to device
_CPU = torch.device("cpu")


def _slices(total: int, nbytes: int) -> list[slice]:
    """Pieces of ``nbytes``, 256 MiB or at least one."""
    return [slice(start, start + nbytes) for start in range(0, min(total, max(nbytes, 256 << 20)), nbytes)]


def _by_torch(bench: Bench, total: int) -> Callable[[str, int], None]:
    """Copies in pinned memory as plain PyTorch makes them; call with a direction and the bytes of a piece."""
    pinned = not bench.dry
    host_down, host_up = (torch.zeros(total, dtype=torch.uint8).pin_memory() if pinned else torch.zeros(total, dtype=torch.uint8) for _ in range(2))
    near_down, near_up = (torch.zeros(total, dtype=torch.uint8, device=bench.device) for _ in range(2))
    streams: dict[str, torch.cuda.Stream] = {} if bench.dry else {name: torch.cuda.Stream() for name in ("down", "up")}

    def copy(direction: str, target: Tensor, source: Tensor) -> None:
        if bench.dry:
            target.copy_(source)
            return
        with torch.cuda.stream(streams[direction]):
            target.copy_(source, non_blocking=True)

    def run(direction: str, nbytes: int) -> None:
        for piece in _slices(total, nbytes):
            if direction != "up":
                copy("down", host_down[piece], near_down[piece])
            if direction != "down":
                copy("up", near_up[piece], host_up[piece])

    return run


def _by_zk(bench: Bench, total: int, arena: Arena) -> tuple[Callable[[str, int], None], Callable[[str], None]]:
    """The same through a Transfer: in pieces of given bytes, and in its own pieces as gradients and parameters move."""
    transfer = Transfer(link_to(bench.device), arena, overlap=True)
    numel = total // 2
    host_up, host_down = transfer.memory(numel, torch.bfloat16), arena.acquire(numel, torch.bfloat16)
    near_down = torch.randn(numel, device=bench.device).bfloat16()
    near_up = torch.full((numel,), float("nan"), dtype=torch.bfloat16, device=bench.device)

    def run(direction: str, nbytes: int) -> None:
        events = []
        for piece in _slices(total, nbytes):
            part = slice(piece.start // 2, piece.stop // 2)
            if direction != "up":
                events.append(transfer.offload_to(host_down.tensor[part], near_down[part]))
            if direction != "down":
                events.append(transfer.upload(near_up[part], host_up[part]))
        for event in events[-2:]:
            event.wait()

    def as_trained(direction: str) -> None:
        pieces = pieces_of(numel)
        arrival = transfer.offload(near_down, pieces) if direction != "up" else None
        events = [transfer.upload(near_up[piece], host_up[piece]) for piece in pieces] if direction != "down" else []
        if arrival is not None:
            arrival.whole()
            arrival.drop()
        if events:
            events[-1].wait()

    host_up.copy_(torch.arange(numel, dtype=torch.int32).bfloat16())
    host_down.tensor.fill_(float("nan"))
    run("both", total)
    bench.wait()
    assert torch.equal(host_down.tensor, near_down.cpu()), "what was offloaded is not what was on the device"
    assert torch.equal(near_up.cpu(), host_up), "what was uploaded is not what was on the host"
    near_up.fill_(float("nan"))
    arrival = transfer.offload(near_down, pieces_of(numel))
    for piece in pieces_of(numel):
        transfer.follow(transfer.upload(near_up[piece], host_up[piece]))
    assert torch.equal(arrival.whole(), near_down.cpu()) and torch.equal(near_up.cpu(), host_up), "pieces of a transfer are not their sources"
    arrival.drop()
    return run, as_trained


def copies(bench: Bench) -> None:
    """The link, by size and direction."""
    total = 1 << 22 if bench.dry else GIB
    sizes = (1 << 20, 1 << 22) if bench.dry else tuple(1 << shift for shift in (20, 22, 24, 26, 28, 30))
    rounds = 2 if bench.dry else 5
    with bench.link():
        plain = _by_torch(bench, total)
        arena = Arena(link_to(bench.device), 3 * total)  # a source, a target, and the target that a Transfer takes itself
        pieces, as_trained = _by_zk(bench, total, arena)
        bench.emit("pinned", pinned=arena.is_pinned, nbytes=arena.nbytes)
        for nbytes in sizes:
            moved = sum(piece.stop - piece.start for piece in _slices(total, nbytes))
            for direction in DIRECTIONS:
                for system, run in (("torch", plain), ("zk", pieces)):
                    seconds = bench.seconds(lambda run=run, d=direction, n=nbytes: run(d, n), rounds)  # type: ignore[misc]
                    gbps = moved * (2 if direction == "both" else 1) / seconds / 1e9
                    bench.emit("copy", system=system, direction=direction, nbytes=nbytes, gbps=gbps)
        for direction in DIRECTIONS:
            seconds = bench.seconds(lambda d=direction: as_trained(d), rounds)  # type: ignore[misc]
            gbps = total * (2 if direction == "both" else 1) / seconds / 1e9
            bench.emit("copy", system="zk transfer", direction=direction, nbytes=2 * PIECE_NUMEL, gbps=gbps)
        arena.close()


def _threads() -> Iterator[int]:
    cores = len(os.sched_getaffinity(0))
    yield from (count for count in (1, 2, 4, 8, 16, 32, 64) if count < cores)
    yield cores


def host(bench: Bench) -> None:
    """Host memory: a = b + s c over 1 GiB each, and the update of 128M parameters, by threads."""
    import numba

    @numba.njit(parallel=True, fastmath=True)  # type: ignore[untyped-decorator]
    def triad(a, b, c, s):  # type: ignore[no-untyped-def]
        for i in numba.prange(a.size):
            a[i] = b[i] + s * c[i]

    numel, rounds = (1 << 18, 2) if bench.dry else (1 << 28, 5)
    a, b, c = (zeros(numel, torch.float32, _CPU).fill_(value) for value in (0.0, 1.0, 2.0))
    triad(a.numpy(), b.numpy(), c.numpy(), 3.0)
    assert bool((a == 7).all())
    for threads in _threads():
        numba.set_num_threads(threads)
        seconds = bench.seconds(lambda: triad(a.numpy(), b.numpy(), c.numpy(), 3.0), rounds)
        bench.emit("triad", system="numba", threads=threads, gbps=3 * a.nbytes / seconds / 1e9)
    numba.set_num_threads(max(_threads()))
    torch.set_num_threads(max(_threads()))
    seconds = bench.seconds(lambda: torch.add(b, c, alpha=3.0, out=a), rounds)
    bench.emit("triad", system="torch", threads=torch.get_num_threads(), gbps=3 * a.nbytes / seconds / 1e9)

    numel //= 2
    param, grad = (zeros(numel, torch.bfloat16, _CPU).fill_(value) for value in (1.0, 1e-3))
    master = zeros(numel, torch.int16, _CPU)
    m, v = (zeros(numel, torch.float32, _CPU).fill_(1e-6) for _ in range(2))
    step = AdamStep(1e-4, 0.9, 0.95, 1e-8, 0.1, True, 1)
    for threads in _threads():
        seconds = bench.seconds(lambda n=threads: adam_(param, grad, master, m, v, step, num_threads=n), rounds)  # type: ignore[misc]
        bench.emit("cpu adam", engine=default_engine(), threads=threads, ns_per_param=seconds / numel * 1e9, gbps=26 * numel / seconds / 1e9)


def device(bench: Bench) -> None:
    """The device alone."""
    size, rounds = (256, 2) if bench.dry else (8192, 20)
    a, b = (torch.randn(size, size, device=bench.device).bfloat16() for _ in range(2))
    out = torch.empty_like(a)
    seconds = bench.seconds(lambda: torch.mm(a, b, out=out), rounds, warmup=3)
    bench.emit("matmul", size=size, tflops=2 * size**3 / seconds / 1e12)
    source = torch.ones(1 << 20 if bench.dry else 1 << 28, device=bench.device)
    target = torch.zeros_like(source)
    seconds = bench.seconds(lambda: target.copy_(source), rounds, warmup=3)
    bench.emit("device copy", gbps=2 * source.nbytes / seconds / 1e9)


def machine(bench: Bench) -> None:
    """What is there, and in which versions."""
    found: dict[str, object] = {"python": platform.python_version(), "linux": platform.release()}
    found |= {"torch": torch.__version__, "cuda": torch.version.cuda}
    for name in ("triton", "cupy", "numba"):
        try:
            found[name] = importlib.import_module(name).__version__
        except ImportError:
            found[name] = "not there"
    found["cores"] = len(os.sched_getaffinity(0))
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    found["cpu"] = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
    found["host_nbytes"] = bench.host_nbytes
    if bench.device.type == "cuda":
        found["gpu"] = torch.cuda.get_device_name(bench.device)
        found["free_nbytes"], found["device_nbytes"] = torch.cuda.mem_get_info(bench.device)
        found["capability"] = ".".join(map(str, torch.cuda.get_device_capability(bench.device)))
        query = ["nvidia-smi", "--query-gpu=driver_version,pcie.link.gen.max,pcie.link.width.max", "--format=csv,noheader"]
        try:
            answer = subprocess.run(query, capture_output=True, text=True, check=True, timeout=20).stdout.splitlines()[0].split(", ")
            found["driver"], found["pcie"] = answer[0], f"generation {answer[1]}, {answer[2]} lanes"
        except (OSError, subprocess.SubprocessError, IndexError):
            found["driver"] = found["pcie"] = "unknown"
    else:
        found |= {"gpu": "no GPU (dry run)", "device_nbytes": 0, "free_nbytes": 0, "capability": "0", "driver": "none", "pcie": "none"}
    bench.emit("machine", **found)


def disk(bench: Bench, folder: Path) -> None:
    """The drive: whole passes over a file."""
    folder.mkdir(parents=True, exist_ok=True)
    nbytes, block = (1 << 22, 1 << 20) if bench.dry else (2 * GIB, 64 << 20)
    path = folder / "zk-bench-gpu.bin"
    buffers = [aligned(block).fill_(index + 1) for index in range(4 if bench.dry else 8)]
    engine = Engine(4, 4 << 20)
    try:
        with File(path, nbytes, engine=engine) as file:

            def whole(write: bool) -> None:
                for index, offset in enumerate(range(0, nbytes, block)):
                    (file.write_async if write else file.read_async)(buffers[index % len(buffers)], offset)
                file.wait()

            for write in (True, False):
                seconds = bench.seconds(lambda w=write: whole(w), 1 if bench.dry else 2)  # type: ignore[misc]
                bench.emit("disk", write=write, gbps=nbytes / seconds / 1e9, nbytes=nbytes, direct=can_bypass_cache(str(folder)))
            for buffer in buffers:
                buffer.zero_()
            file.read(buffers[0], block)
            assert bool((buffers[0] == 2).all()), "what was read is not what was written"
    finally:
        engine.close()
        path.unlink(missing_ok=True)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--nvme", type=Path, default=Path("runs/nvme"))
    options = parser.parse_args()
    bench = bench_of(options)
    if options.job == "disk":
        disk(bench, options.nvme)
    else:
        {"machine": machine, "link": copies, "host": host, "device": device}[options.job](bench)


if __name__ == "__main__":
    main()
