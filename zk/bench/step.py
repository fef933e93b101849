"""A training step of a GPT with a ZeroConfig beside one of plain torch: seconds, and the peak of memory.

Each trains in a process of its own. Plain torch has fp32 weights, autocast for 16 bits, and fused AdamW. zk's first losses are compared with
plain torch's before it is timed. The floor is the step's matrix products at the rate of large ones.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import math
import multiprocessing
from typing import Any

import torch
from torch import nn

from zk.bench.clock import Report, matmul_tflops, row_of, seconds_of
from zk.config import ZeroConfig
from zk.core.memory import peak_nbytes
from zk.nn.deferred import default_device
from zk.offload.cpu_adam import CPUAdam
from zk.optimizer import ZeroOptimizer
from zk.tools.gpt import GPT, GPTConfig

_COMPARED = 3
# relative difference of losses: the rounding of 16 bits where plain torch keeps fp32 weights, none to speak of in fp32
_NEAR = {torch.float32: 1e-4, torch.bfloat16: 0.02, torch.float16: 0.02}


@dataclasses.dataclass(frozen=True, slots=True)
class Job:
    """A model, how it is trained, and how often."""

    model: GPTConfig
    zero: ZeroConfig
    batch: int
    rounds: int
    threads: int

    @property
    def dtype(self) -> torch.dtype:
        return self.zero.dtype if isinstance(self.zero.dtype, torch.dtype) else torch.float32


def _warm(plain: bool) -> None:
    """Load what an update loads, so that it is not counted as training's memory."""
    weight = nn.Parameter(torch.ones(64))
    weight.square().sum().backward()  # type: ignore[no-untyped-call]
    (torch.optim.AdamW([weight], fused=True) if plain else CPUAdam([weight])).step()


def run(job: Job, plain: bool, expected: list[float]) -> dict[str, Any]:
    """Losses of the first steps, sorted seconds of later ones, and the peak of memory beyond the start's. RuntimeError for other losses."""
    torch.set_num_threads(job.threads)
    torch.manual_seed(0)
    device = default_device()
    _warm(plain)
    before = peak_nbytes()
    model = GPT(job.model).to(device)
    adam = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True if plain else None)
    optimizer: Any = adam if plain else ZeroOptimizer(model, adam, job.zero)
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, job.model.vocab, (job.batch, job.model.context + 1), generator=generator).to(device)
    scaler = torch.amp.GradScaler(device.type, enabled=plain and job.dtype == torch.float16)

    def step() -> float:
        with torch.autocast(device.type, job.dtype, enabled=plain and job.dtype != torch.float32):
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

    losses, near = [step() for _ in range(_COMPARED)], _NEAR[job.dtype]
    for number, (mine, theirs) in enumerate(zip(losses, expected, strict=False)):
        if not abs(mine - theirs) <= near * abs(theirs):
            raise RuntimeError(f"step {number + 1} has loss {mine:.6f}, and {theirs:.6f} in plain torch: not within {near:g}, so it is not timed")
    seconds = seconds_of(step, job.rounds, device, patience_s=math.inf)
    if not plain:
        optimizer.close()
    peak = peak_nbytes() - before if device.type == "cpu" else torch.cuda.max_memory_allocated(device)
    return {"losses": losses, "seconds": seconds, "peak_nbytes": peak}


def apart(job: Job, plain: bool, expected: list[float]) -> dict[str, Any]:
    """``run`` in a new process, with its errors."""
    with concurrent.futures.ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        try:
            return process.submit(run, job, plain, expected).result()
        except concurrent.futures.process.BrokenProcessPool:
            trains = "plain torch" if plain else "with zk"
            raise RuntimeError(f"the process that trains {trains} was ended from outside, as the kernel does when memory runs out") from None


def measure(model: GPTConfig, zero: ZeroConfig, batch: int = 4, rounds: int = 10, plain: bool = True, matmul_size: int = 1024) -> Report:
    """Median, p20 and p80 of a step, plain torch's first unless it is left out (for models that it cannot hold)."""
    job = Job(model, zero, batch, rounds, torch.get_num_threads())
    tflops = matmul_tflops(default_device(), matmul_size, job.dtype)
    with torch.device("meta"):
        num_params = sum(param.numel() for name, param in GPT(model).named_parameters() if "tokens" not in name and "positions" not in name)
    floor_s = 6 * num_params * batch * model.context / tflops / 1e12
    rows, losses = [], list[float]()
    for name in ("plain torch", "zk") if plain else ("zk",):
        found = apart(job, name != "zk", losses)
        losses = found["losses"]
        amounts = {"tokens_per_s": batch * model.context}
        rows.append(row_of(name, found["seconds"], floor_s, amounts, peak_nbytes=found["peak_nbytes"], first_losses=losses))
    return Report("step", {"matmul_tflops": tflops}, rows, {"num_params": num_params, "batch": batch, "device": default_device().type})
