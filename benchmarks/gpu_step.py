"""Training steps of one system with one model, for several numbers of tokens. Part of `make gpu`, which plans each job.

    python benchmarks/gpu_step.py JOB [--dry-run]

A job is JSON, the fields of ``Job``. All systems begin with the same weights and one step on the same sequence: its loss shows that they train
the same model. Each number of tokens then has a warm-up step, and steps on one batch until ``seconds`` are spent, two at least. A step is what
a user's loop does: forward, backward, clipping to a norm of 1, update. It ends when compute has done it; with ``overlap_step`` the update runs
in the background of the next step.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import math
import os
import socket
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from cases.clock import wait
from gpu_common import die_first, emit
from gpu_model import SIZES, Size, batch, build, context_of, tiny
from torch import nn

import zk
from zk.nn.deferred import default_device
from zk.offload.tiers import link_to
from zk.tools.metrics import peak_nbytes

CLIP = 1.0
OPTIONS: dict[str, Any] = {"lr": 1e-4, "betas": (0.9, 0.95), "weight_decay": 0.1}


@dataclasses.dataclass(frozen=True, slots=True)
class Job:
    """A system, a model and what is measured of them."""

    system: str  # "torch", "fsdp2", or a name that begins with "zk"
    model: str  # a key of SIZES
    tokens: tuple[int, ...]
    cap: int | None = None  # bytes of device memory that torch's allocator may take
    zero: dict[str, Any] = dataclasses.field(default_factory=dict)  # ZeroConfig
    keep_last: int | None = None  # bytes of activations that stay on the device, the others are offloaded; None: all stay
    seconds: float = 20.0  # that measured steps of one number of tokens are to take


@dataclasses.dataclass(slots=True)
class Trained:
    """A system that is ready to train."""

    model: nn.Module
    update: Callable[[], None]  # after backward: clip, step, zero_grad
    metrics: Callable[[], dict[str, float]] = dict
    notes: tuple[str, ...] = ()


def plain(job: Job, size: Size, stack: contextlib.ExitStack) -> Trained:
    """Plain PyTorch on the device: fused AdamW on bf16 parameters, bf16 moments, no fp32 master."""
    model = build(size, default_device())
    optimizer = torch.optim.AdamW(model.parameters(), fused=True, **OPTIONS)

    def update() -> None:
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()

    return Trained(model, update)


def fsdp2(job: Job, size: Size, stack: contextlib.ExitStack) -> Trained:
    """FSDP2 with CPUOffloadPolicy on one rank: a group for each block, and fused AdamW on bf16 parameters in pinned host memory."""
    from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

    device = default_device()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", LOCAL_WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.distributed.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    stack.callback(torch.distributed.destroy_process_group)
    how: dict[str, Any] = {
        "mesh": torch.distributed.init_device_mesh(device.type, (1,)),
        "offload_policy": CPUOffloadPolicy(pin_memory=device.type == "cuda"),
    }
    model = build(size, device)
    for block in model.blocks:
        fully_shard(block, **how)
    fully_shard(model, **how)
    params = list(model.parameters())
    optimizer = torch.optim.AdamW(params, fused=True, **OPTIONS)

    def update() -> None:
        norm = nn.utils.get_total_norm([param.grad for param in params if param.grad is not None])
        full = norm.full_tensor() if isinstance(norm, torch.distributed.tensor.DTensor) else norm
        nn.utils.clip_grads_with_norm_(params, CLIP, full)
        optimizer.step()
        optimizer.zero_grad()

    return Trained(model, update)


def by_zk(job: Job, size: Size, stack: contextlib.ExitStack) -> Trained:
    """zk with the job's ZeroConfig."""
    model = build(size, default_device())
    inner = torch.optim.AdamW(model.parameters(), **OPTIONS)
    optimizer = stack.enter_context(zk.ZeroOptimizer(model, inner, zk.ZeroConfig(**job.zero)))

    def update() -> None:
        optimizer.step()
        optimizer.zero_grad()

    link = link_to(default_device())
    notes = ("host memory is not page-locked",) if link is not None and link.refuses else ()
    return Trained(model, update, optimizer.metrics, notes)


def system_of(job: Job) -> Callable[[Job, Size, contextlib.ExitStack], Trained]:
    """Maker of the job's system."""
    return by_zk if job.system.startswith("zk") else {"torch": plain, "fsdp2": fsdp2}[job.system]


def wait_for_compute() -> None:
    """Wait for the stream that computes. Copies on other streams may go on."""
    if torch.cuda.is_available():
        torch.cuda.current_stream(default_device()).synchronize()


def forget_peaks() -> None:
    """Give cached device memory back and start the peaks anew."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(default_device())


def peaks() -> dict[str, int]:
    """Peaks in bytes: tensors on the device, memory that torch's allocator took for them, this process in host memory."""
    device, on_gpu = default_device(), torch.cuda.is_available()
    return {
        "device_nbytes": torch.cuda.max_memory_allocated(device) if on_gpu else 0,
        "reserved_nbytes": torch.cuda.max_memory_reserved(device) if on_gpu else 0,
        "rss_nbytes": peak_nbytes(),
    }


def measure(job: Job, size: Size, trained: Trained, num_tokens: int, context: int) -> None:
    """Time steps of ``num_tokens`` and print them as a row."""
    ids, targets = batch(size, num_tokens, context, default_device())
    losses: list[torch.Tensor] = []
    seconds: list[float] = []
    backward: list[float] = []
    forget_peaks()
    before = trained.metrics()
    offload = zk.offload_activations(trained.model, keep_last=job.keep_last) if job.keep_last is not None else contextlib.nullcontext()
    last = time.perf_counter()
    while len(seconds) < 3 or sum(seconds[1:]) + seconds[-1] <= job.seconds:  # the first one is the warm-up
        with offload:
            loss = trained.model(ids, targets)
        loss.backward()
        losses.append(loss.detach())
        del loss
        wait_for_compute()  # an update begins with the norm, which waits for backward anyway
        backward.append(time.perf_counter() - last)
        trained.update()
        wait_for_compute()
        now = time.perf_counter()
        seconds.append(now - last)
        last = now
        print(f"  {num_tokens} tokens, step {len(seconds)}: {seconds[-1]:.3f} s", flush=True)
    after, values = trained.metrics(), [float(value) for value in losses]
    moved = {name: (after[name] - before[name]) / len(seconds) for name in ("fetched_nbytes", "evicted_nbytes") if name in after}
    emit(
        "step",
        tokens=num_tokens,
        seconds=seconds,
        median=statistics.median(seconds[1:]),
        backward_seconds=statistics.median(backward[1:]),
        losses=values,
        sound=all(map(math.isfinite, values)) and values[-1] < values[0] and not after.get("skipped_steps", 0),
        notes=trained.notes,
        moved=moved,
        **peaks(),
    )


def run(job: Job, dry: bool) -> None:
    """Build the system, train the common first step, and measure each number of tokens."""
    size = tiny(SIZES[job.model]) if dry else SIZES[job.model]
    context, device = context_of(size, dry), default_device()
    if job.cap and device.type == "cuda":
        torch.cuda.set_per_process_memory_fraction(min(1.0, job.cap / torch.cuda.get_device_properties(device).total_memory), device)
    start = time.perf_counter()
    with contextlib.ExitStack() as stack:
        trained = system_of(job)(job, size, stack)
        wait(device)
        emit("built", seconds=time.perf_counter() - start, **peaks())
        loss = trained.model(*batch(size, context, context, device))
        loss.backward()
        trained.update()
        emit("first", loss=float(loss.detach()))
        del loss
        for num_tokens in job.tokens:
            measure(job, size, trained, num_tokens, context)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("job", type=json.loads)
    parser.add_argument("--dry-run", action="store_true")
    options = parser.parse_args()
    die_first()
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    try:
        run(Job(**options.job), options.dry_run)
    except Exception as error:
        emit("failed", reason=f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}")
        raise


if __name__ == "__main__":
    main()
