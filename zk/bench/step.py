"""In: a GPT's size and a ZeroConfig. Out: a training step with it beside one of plain torch: seconds, and the peak of memory.

Each trains in a process of its own. Plain torch has fp32 weights, autocast for 16 bits, and fused AdamW. zk's first losses are compared with
plain torch's before it is timed. The floor is the step's matrix products at the rate of large ones.
"""

from __future__ import annotations

import dataclasses
import multiprocessing
import time
import traceback
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import nn

from zk.bench.clock import Report, Row, matmul_tflops, wait
from zk.config import ZeroConfig
from zk.memory import peak_nbytes
from zk.offload.cpu_adam import CPUAdam
from zk.optimizer import ZeroOptimizer
from zk.train.gpt import GPT, GPTConfig

_COMPARED = 3
# relative difference of losses: the rounding of 16 bits where plain torch keeps fp32 weights, none to speak of in fp32
_NEAR = {torch.float32: 1e-4, torch.bfloat16: 0.02, torch.float16: 0.02}


@dataclasses.dataclass(frozen=True, slots=True)
class Job:
    """What is trained."""

    model: GPTConfig
    zero: ZeroConfig
    batch: int
    rounds: int
    threads: int


def _warm(plain: bool) -> None:
    """Load what an update loads, so that it is not counted as training's memory."""
    weight = nn.Parameter(torch.ones(64))
    weight.square().sum().backward()  # type: ignore[no-untyped-call]
    (torch.optim.AdamW([weight], fused=True) if plain else CPUAdam([weight])).step()


def _run(job: Job, plain: bool, expected: list[float]) -> dict[str, Any]:
    """In a process of its own: losses of the first steps, sorted seconds of the others, and the peak of memory beyond the start's."""
    torch.set_num_threads(job.threads)
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    on_cpu = device.type == "cpu"
    _warm(plain)
    before = peak_nbytes() if on_cpu else 0
    model = GPT(job.model).to(device)
    adam = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True if plain else None)
    dtype = job.zero.dtype if isinstance(job.zero.dtype, torch.dtype) else torch.float32
    optimizer: Any = adam
    if not plain:
        optimizer = ZeroOptimizer(model, adam, job.zero)
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, job.model.vocab, (job.batch, job.model.context + 1), generator=generator).to(device)
    scaler = torch.amp.GradScaler(device.type, enabled=plain and dtype == torch.float16)

    def step() -> float:
        with torch.autocast(device.type, dtype, enabled=plain and dtype != torch.float32):
            loss = model(ids[:, :-1], ids[:, 1:])
        if plain:
            scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
            scaler.step(adam)
            scaler.update()
        else:
            optimizer.backward(loss)
            optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    losses = [step() for _ in range(_COMPARED)]
    near = _NEAR[dtype]
    for number, (mine, theirs) in enumerate(zip(losses, expected, strict=False)):
        if not abs(mine - theirs) <= near * abs(theirs):
            raise RuntimeError(f"step {number + 1} has loss {mine:.6f}, and {theirs:.6f} in plain torch: not within {near:g}, so it is not timed")
    seconds = []
    for _ in range(job.rounds):
        wait(device)
        start = time.perf_counter()
        step()
        wait(device)
        seconds.append(time.perf_counter() - start)
    if not plain:
        optimizer.close()
    peak = peak_nbytes() - before if on_cpu else torch.cuda.max_memory_allocated(device)
    return {"losses": losses, "seconds": sorted(seconds), "peak_nbytes": peak}


def _child(pipe: Connection, job: Job, plain: bool, expected: list[float]) -> None:
    try:
        pipe.send(_run(job, plain, expected))
    except (RuntimeError, ValueError, OSError, MemoryError, TypeError) as error:
        expects = isinstance(error, (ValueError, OSError, MemoryError))  # what the user can mend has no traceback
        pipe.send({"error": str(error) if expects else traceback.format_exc(), "mend": expects})


def _apart(job: Job, plain: bool, expected: list[float]) -> dict[str, Any]:
    """Run it in a new process. ValueError for what the user can mend, RuntimeError for anything else."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(there, job, plain, expected))
    process.start()
    there.close()
    try:
        found: dict[str, Any] = here.recv()
    except EOFError:
        process.join()
        raise RuntimeError(f"the process that trains {'plain torch' if plain else 'with zk'} ended with {process.exitcode}") from None
    process.join()
    if "error" in found:
        raise (ValueError if found["mend"] else RuntimeError)(found["error"])
    return found


def measure(model: GPTConfig, zero: ZeroConfig, batch: int = 4, rounds: int = 10, plain: bool = True, matmul_size: int = 1024) -> Report:
    """Median, p20 and p80 of a step, plain torch's first unless it is left out (for models that it cannot hold)."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = zero.dtype if isinstance(zero.dtype, torch.dtype) else torch.float32
    tflops = matmul_tflops(device, matmul_size, dtype)
    job = Job(model, zero, batch, rounds, torch.get_num_threads())
    with torch.device("meta"):
        num_params = sum(param.numel() for name, param in GPT(model).named_parameters() if "tokens" not in name and "positions" not in name)
    floor = 6 * num_params * batch * model.context / tflops / 1e12
    rows, losses = [], list[float]()
    for name in ("plain torch", "zk") if plain else ("zk",):
        found = _apart(job, name != "zk", losses)
        losses = found["losses"]
        notes = {"peak_nbytes": found["peak_nbytes"], "first_losses": losses}
        rows.append(Row(name, found["seconds"], floor, {"tokens_per_s": batch * model.context}, notes))
    return Report("step", {"matmul_tflops": tflops}, rows, {"num_params": num_params, "batch": batch, "device": device.type})
