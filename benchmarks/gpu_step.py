"""Training steps on one GPU: one system, one model, several numbers of tokens per step. Part of `make gpu`, which says what to run.

A job is JSON: {"system": ..., "size": ... or "layers": ..., "tokens": [...], "warmup": 2, "steps": 3, "cap": bytes or null}. Every step of
one number of tokens is on the same batch, so the loss falls, and systems that train the same model have the same losses. A step is what a
user's loop does: forward, backward, clipping to a norm of 1, update; it ends when the device has done it. With ``overlap_step`` the update
goes on beside the next step, so a step is the time from the end of one to the end of the next.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import shutil
import socket
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from gpu_common import GIB, Bench, arguments, bench_of
from gpu_model import SIZES, Size, batch, build, of_layers
from torch import nn

import zk
from zk.config import parse_nbytes

LR, BETAS, DECAY, CLIP = 1e-4, (0.9, 0.95), 0.1, 1.0
OPTIONS: dict[str, Any] = {"lr": LR, "betas": BETAS, "weight_decay": DECAY}
# bytes of one parameter on the host: gradient 2, parameter 2, lower half of its master 2, moments 8
HOST_NBYTES = 14
# the same on the device, of state that is updated there: a copy of the parameter, the gradient, half a master, moments
DEVICE_NBYTES = 14
# on the drive: parameter, half a master, moments, and room for an fp32 gradient
NVME_NBYTES = 16


@dataclasses.dataclass(slots=True)
class Trained:
    """A system that is ready to train."""

    update: Callable[[], None]  # after backward: clip, step, zero_grad
    model: nn.Module
    metrics: Callable[[], dict[str, float]] = dict
    finish: Callable[[], None] = lambda: None  # what goes on beside training ends
    note: str = ""


Make = Callable[[Bench, Size, contextlib.ExitStack, dict[str, Any]], Trained]


def plain(bench: Bench, size: Size, stack: contextlib.ExitStack, job: dict[str, Any]) -> Trained:
    """Plain PyTorch: bf16 parameters, fp32 master and moments, fused AdamW, all on the device."""
    model = build(size, torch.bfloat16, bench.device)
    params = list(model.parameters())
    masters = [nn.Parameter(param.detach().float()) for param in params]
    optimizer = torch.optim.AdamW(masters, fused=True, **OPTIONS)

    def update() -> None:
        for param, master in zip(params, masters, strict=True):
            assert param.grad is not None
            master.grad, param.grad = param.grad.float(), None
        nn.utils.clip_grad_norm_(masters, CLIP)
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            torch._foreach_copy_(params, masters)

    return Trained(update, model)


def fsdp2(bench: Bench, size: Size, stack: contextlib.ExitStack, job: dict[str, Any]) -> Trained:
    """FSDP2 with CPUOffloadPolicy: a group for each block, bf16 compute, fp32 parameters and fused AdamW on the host; one rank."""
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", LOCAL_WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.distributed.init_process_group("gloo" if bench.dry else "cpu:gloo,cuda:nccl")
    stack.callback(torch.distributed.destroy_process_group)
    mesh = torch.distributed.init_device_mesh(bench.device.type, (1,))
    how: dict[str, Any] = {
        "mesh": mesh,
        "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16),
        "offload_policy": CPUOffloadPolicy(pin_memory=not bench.dry),
    }
    model = build(size, torch.float32, bench.device)
    for block in model.blocks:
        fully_shard(block, **how)
    fully_shard(model, **how)
    params = list(model.parameters())
    optimizer = torch.optim.AdamW(params, fused=True, **OPTIONS)

    def update() -> None:
        grads = [param.grad for param in params if param.grad is not None]
        norm = nn.utils.get_total_norm(grads)
        full = norm.full_tensor() if isinstance(norm, torch.distributed.tensor.DTensor) else norm
        nn.utils.clip_grads_with_norm_(params, CLIP, full)
        optimizer.step()
        optimizer.zero_grad()

    return Trained(update, model)


def zk_system(stage: int, optimizer_tier: str, param_tier: str = "device", **options: Any) -> Make:
    """zk at a stage, with these tiers."""

    def make(bench: Bench, size: Size, stack: contextlib.ExitStack, job: dict[str, Any]) -> Trained:
        stack.enter_context(bench.link())
        given = dict(options)
        if "nvme" in (optimizer_tier, param_tier):
            folder = Path(job["nvme"])
            folder.mkdir(parents=True, exist_ok=True)
            given["nvme_path"] = folder
        given |= job.get("options", {})
        model = build(size, torch.bfloat16, bench.device, deferred=True)
        inner = torch.optim.AdamW(model.parameters(), **OPTIONS)
        place = {"stage": stage, "param_tier": param_tier, "optimizer_tier": job.get("optimizer_tier", optimizer_tier)}
        optimizer = stack.enter_context(zk.ZeroOptimizer(model, inner, dtype="bf16", clip_grad_norm=CLIP, **place, **given))

        def update() -> None:
            optimizer.step()
            optimizer.zero_grad()

        arena = optimizer.transfer.arena if optimizer.transfer is not None else None
        note = "" if arena is None or arena.is_pinned else "host memory is not page-locked"
        return Trained(update, model, optimizer.metrics, optimizer.synchronize, note)

    return make


SYSTEMS: dict[str, Make] = {
    "torch": plain,
    "fsdp2_offload": fsdp2,
    "zk_device": zk_system(2, "device"),
    "zk_stage2": zk_system(2, "host"),
    "zk_stage2_overlap": zk_system(2, "host", overlap_step=True),
    "zk_stage3": zk_system(3, "host", "host"),
    "zk_stage3_overlap": zk_system(3, "host", "host", overlap_step=True),
    "zk_nvme": zk_system(3, "nvme", "nvme"),
    "zk_nvme_overlap": zk_system(3, "nvme", "nvme", overlap_step=True),
    "zk_nvme_part": zk_system(3, "nvme", "host"),
}


def size_of(job: dict[str, Any]) -> Size:
    """Of the job's model."""
    return of_layers(job["layers"]) if "layers" in job else SIZES[job["size"]]


def check_room(job: dict[str, Any], bench: Bench) -> None:
    """Refuse what cannot be, before the machine's memory or drive is full."""
    numel, system = size_of(job).numel, job["system"]
    if "nvme" in system:
        Path(job["nvme"]).mkdir(parents=True, exist_ok=True)
        kept = parse_nbytes(job.get("options", {}).get("host_budget", 1), "host_budget")
        needed, free, where = NVME_NBYTES * numel - kept, shutil.disk_usage(job["nvme"]).free, "the drive"
    elif "stage" in system:
        on_device = job.get("options", {}).get("device_budget", 0) // DEVICE_NBYTES
        needed, free, where = HOST_NBYTES * (numel - on_device) + 2 * on_device, bench.host_nbytes, "host memory"
    elif "fsdp" in system:
        needed, free, where = 16 * numel, bench.host_nbytes, "host memory"
    else:
        return
    if needed > free:
        raise RuntimeError(f"not tried: it needs {needed / GIB:.1f} GiB of {where}, and there are {free / GIB:.1f}")


@contextlib.contextmanager
def _activations(on: bool, model: nn.Module) -> Iterator[Callable[[], contextlib.AbstractContextManager[object]]]:
    """What forward runs in."""
    offload = zk.offload_activations(model, keep_last="1GiB") if on else None
    yield lambda: offload if offload is not None else contextlib.nullcontext()


def measure(bench: Bench, job: dict[str, Any], size: Size, trained: Trained, num_tokens: int, position: int, offloaded: bool) -> None:
    """Time steps of ``num_tokens``, which come at ``position`` in the job, and write them down."""
    ids, targets = batch(size, num_tokens, bench.device)
    losses, seconds, parts = [], [], []
    bench.forget_peaks()
    before: dict[str, float] = {}
    with _activations(offloaded, trained.model) as context:
        bench.wait()
        last = time.perf_counter()
        for number in range(job["warmup"] + job["steps"]):
            if number == job["warmup"]:
                before = trained.metrics()
            with context():
                loss = trained.model(ids, targets)
            loss.backward()
            losses.append(loss.detach())
            loss = None
            bench.wait_for_compute()  # (an update begins with the norm, which is waited for anyway)
            parts.append(time.perf_counter() - last)
            trained.update()
            bench.wait_for_compute()
            now = time.perf_counter()
            seconds.append(now - last)
            last = now
            _watch(bench, number, seconds[-1])
    after = trained.metrics()
    values = [float(value) for value in losses]
    warm = seconds[job["warmup"] :]
    median = statistics.median(warm)
    skipped = after.get("skipped_steps", 0)
    moved = {name: (after[name] - before.get(name, 0)) / len(warm) for name in ("fetched_nbytes", "evicted_nbytes", "stall_ms") if name in after}
    bench.emit(
        "step",
        system=job["system"],
        model=job.get("size") or f"{size.numel / 1e9:.2f}B",
        numel=size.numel,
        tokens=num_tokens,
        position=position,
        seconds=warm,
        all_seconds=seconds,
        backward_seconds=statistics.median(parts[job["warmup"] :]),
        median=median,
        tokens_per_s=num_tokens / median,
        tflops=6 * size.numel * num_tokens / median / 1e12,
        hardware_tflops=8 * size.numel * num_tokens / median / 1e12,
        losses=values,
        sound=all(map(math.isfinite, values)) and values[-1] < values[0] and not skipped,
        cap=job.get("cap"),
        activations_offloaded=offloaded,
        note=trained.note,
        tiers={name: value for name, value in after.items() if name.endswith("_nbytes") and name not in moved},
        moved=moved,
        **bench.memory(),
    )


def _watch(bench: Bench, number: int, seconds: float) -> None:
    print(f"  {bench.section}/{bench.job}: step {number}, {seconds:.3f} s", flush=True)


def timeline(bench: Bench, size: Size, trained: Trained, num_tokens: int) -> None:
    """One more step, recorded: when each resource was busy, and how much of that was behind compute."""
    from zk.timeline import Recorder

    ids, targets = batch(size, num_tokens, bench.device)
    with Recorder(bench.device) as recorder:
        trained.model(ids, targets).backward()
        trained.update()
        bench.wait_for_compute()
    found = recorder.timeline
    overlap = [dataclasses.asdict(row) for row in found.overlap()]
    whole_ms = (found.stop_ns - found.start_ns) / 1e6
    bench.emit("timeline", tokens=num_tokens, whole_ms=whole_ms, overlap=overlap, training_thread=found.training_thread())


def run(bench: Bench, job: dict[str, Any]) -> None:
    """One job, from making the model to the last number of tokens; what does not fit is written down as such, and the next is tried."""
    check_room(job, bench)
    size = size_of(job)
    if job.get("cap"):
        bench.cap(job["cap"])
    with contextlib.ExitStack() as stack:
        start = time.perf_counter()
        trained = SYSTEMS[job["system"]](bench, size, stack, job)
        bench.wait()
        bench.emit("built", system=job["system"], numel=size.numel, seconds=time.perf_counter() - start, **bench.memory())
        for position, num_tokens in enumerate(job["tokens"]):
            offloaded = num_tokens in job.get("offload_activations_at", ())
            try:
                measure(bench, job, size, trained, num_tokens, position, offloaded)
            except torch.cuda.OutOfMemoryError as error:
                reason = f"out of device memory at {num_tokens} tokens: {str(error).splitlines()[0]}"
                bench.emit("failed", system=job["system"], tokens=num_tokens, numel=size.numel, cap=job.get("cap"), reason=reason)
                break  # what is left of the graph may hold memory
        else:
            if job.get("timeline"):
                timeline(bench, size, trained, job["tokens"][0])
            trained.finish()


def largest_layers(host_nbytes: int, cap: int, use_device: bool) -> tuple[int, int]:
    """By arithmetic: how deep a model as wide as 7B may be with 90% of the host's memory under a cap of device memory, and how many bytes
    of the cap are left for state, which is 0 without ``use_device``."""
    one, rest = of_layers(1).layer_numel, of_layers(1).rest_numel
    host = int(0.9 * host_nbytes)
    spare = max(0, cap - working_nbytes()) if use_device else 0
    on_device = spare // DEVICE_NBYTES  # parameters whose state is there; their own values rest on the host
    numel = (host - 2 * on_device) // HOST_NBYTES + on_device
    return max(1, (numel - rest) // one), spare


def working_nbytes(tokens: int = 4096, layers: int = 48) -> int:
    """Device memory of a step at stage 3 of a model as wide as 7B beside its state, an estimate from above: the unit in use, the one gathered
    ahead, the left-over one; gradient buckets of three; one block's activations; inputs of all blocks; logits; 2 GiB for what is cut up."""
    size = of_layers(layers)
    units = 2 * size.layer_numel + size.rest_numel
    buckets = 2 * size.layer_numel + 2 * size.rest_numel
    block = 34 * tokens * size.width  # bf16 elements saved and made in forward and backward of one block
    logits = min(tokens, size.piece) * size.vocab * 5  # bf16, fp32, and the gradient of both
    return 2 * (units + buckets + block + tokens * size.width * layers + logits) + 2 * GIB


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("what", help="the job, JSON")
    options = parser.parse_args()
    bench, job = bench_of(options), json.loads(options.what)
    try:
        run(bench, job)
    except Exception as error:
        reason = next(iter(str(error).splitlines()), "")
        bench.emit("failed", system=job["system"], cap=job.get("cap"), reason=f"{type(error).__name__}: {reason}")
        raise


if __name__ == "__main__":
    main()
