"""One system's training step, in a process of its own: prints a line of JSON with seconds per step, losses and peak resident memory.

usage: python benchmarks/peers/step.py SYSTEM [--steps N] [--warmup N] [--layers N --width N --batch N --micro N]
"""

from __future__ import annotations

import argparse
import json
import math
import os
import socket
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from zk.tools.gpt import GPT, GPTConfig

LR, BETAS, DECAY = 1e-4, (0.9, 0.95), 0.1
CLIP = [1.0]  # 0: gradients are not clipped
STATE_DTYPE = ["fp32"]  # of zk
MicroBatches = Sequence[tuple[Tensor, Tensor]]  # token ids and targets
Step = Callable[[MicroBatches], float]
MICRO = [1]  # micro-batches in a step
ROWS = 256  # of a weight that are fp32 at once
METERS: list[Callable[[], dict[str, float]]] = []  # of systems that count what they move


class InBlocks(torch.autograd.Function):
    """Products of bf16 in fp32 by blocks of rows, for a CPU without kernels for them: memory as with such kernels, and most of the speed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.has_bias = bias is not None
        wide = x.reshape(-1, x.shape[-1]).float()
        y = x.new_empty(len(wide), len(weight))
        for start in range(0, len(weight), ROWS):
            y[:, start : start + ROWS] = wide @ weight[start : start + ROWS].float().t()
        return (y if bias is None else y + bias).view(*x.shape[:-1], len(weight))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        g, wide = grad.reshape(-1, grad.shape[-1]).float(), x.reshape(-1, x.shape[-1]).float()
        of_x, of_weight = torch.zeros_like(wide), torch.empty_like(weight)
        for start in range(0, len(weight), ROWS):
            rows = slice(start, start + ROWS)
            of_x += g[:, rows] @ weight[rows].float()
            of_weight[rows] = g[:, rows].t() @ wide
        return of_x.to(x.dtype).view(x.shape), of_weight, g.sum(0).to(x.dtype) if ctx.has_bias else None


def peak_nbytes() -> int:
    """The high-water mark of resident memory; by /proc, so that any commit of zk can be measured."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM"))


def one_rank_environment() -> None:
    """What torch.distributed wants to know about a world of one."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", LOCAL_WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))


def torch_autocast(model: nn.Module) -> Step:
    """fp32 parameters, bf16 compute by autocast, fused AdamW: plain PyTorch's way to mixed precision."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=BETAS, weight_decay=DECAY, fused=True)

    def step(batches: MicroBatches) -> float:
        for ids, targets in batches:
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(ids, targets)
            (loss / len(batches)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP[0] or math.inf)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step


def torch_bf16(model: nn.Module) -> Step:
    """bf16 parameters and moments, no master: least memory, but small updates are lost."""
    model.bfloat16()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=BETAS, weight_decay=DECAY, fused=True)

    def step(batches: MicroBatches) -> float:
        for ids, targets in batches:
            loss = model(ids, targets)
            (loss / len(batches)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP[0] or math.inf)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step


def fsdp2(model: nn.Module) -> Step:
    """FSDP2, bf16 compute, fp32 master."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    one_rank_environment()
    torch.distributed.init_process_group("gloo")
    mesh = torch.distributed.init_device_mesh("cpu", (1,))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=BETAS, weight_decay=DECAY, fused=True)

    def step(batches: MicroBatches) -> float:
        for ids, targets in batches:
            loss = model(ids, targets)
            (loss / len(batches)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP[0] or math.inf)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step


def nvme_path() -> str:
    """The folder for the NVMe tiers: $ZK_BENCH_NVME, or one under the current folder."""
    folder = os.environ.get("ZK_BENCH_NVME", "runs/nvme")
    os.makedirs(folder, exist_ok=True)
    return folder


def deepspeed(model: nn.Module, stage: int, tier: str = "cpu") -> Step:
    """DeepSpeed ZeRO with the optimizer (and at stage 3 the parameters) offloaded to the CPU or to NVMe."""
    import deepspeed as ds

    one_rank_environment()
    place: dict[str, object] = {"device": tier}
    if tier == "nvme":
        place |= {"nvme_path": nvme_path(), "pin_memory": True}
    zero: dict[str, object] = {"stage": stage, "offload_optimizer": place}
    if stage == 3:
        zero["offload_param"] = place
    if tier == "nvme":  # what its own tuner proposes: O_DIRECT through libaio, reads and writes overlapped with the update
        zero["offload_optimizer"] = {**place, "pipeline_read": True, "pipeline_write": True, "buffer_count": 4}
        # as many buffers as parameters that may be in flight, each for the largest; with fewer it ends with "Not enough buffers"
        zero["offload_param"] = {**place, "buffer_count": 64, "buffer_size": 1 << 23}
    config: dict[str, object] = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": MICRO[0],
        "gradient_clipping": CLIP[0],
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": LR, "betas": BETAS, "weight_decay": DECAY}},
        "zero_optimization": zero,
    }
    if tier == "nvme":
        config["aio"] = {"block_size": 1 << 20, "queue_depth": 8, "intra_op_parallelism": 1, "single_submit": False, "overlap_events": True}
    engine, *_ = ds.initialize(model=model, model_parameters=model.parameters(), config=config)

    def step(batches: MicroBatches) -> float:
        for ids, targets in batches:
            loss = engine(ids, targets)
            engine.backward(loss)
            engine.step()
        return loss.item()

    return step


def zk(model: nn.Module, stage: int, tier: str = "host", accumulates: bool = False, **options: object) -> Step:
    """zk with the optimizer (and at stage 3 the parameters) on a tier; its micro-batches one by one, or block by block."""
    from zk import ZeroOptimizer

    inner = torch.optim.AdamW(model.parameters(), lr=LR, betas=BETAS, weight_decay=DECAY)
    tiers = {"optimizer_tier": tier, "param_tier": tier if stage == 3 else "device"}
    if tier == "nvme":
        options["nvme_path"] = nvme_path()
    options.setdefault("state_dtype", STATE_DTYPE[0])
    optimizer = ZeroOptimizer(model, inner, stage=stage, dtype="bf16", clip_grad_norm=CLIP[0] or None, **tiers, **options)
    METERS.append(optimizer.metrics)

    def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        loss: Tensor = model(*batch) / MICRO[0]
        return loss

    def step(batches: MicroBatches) -> float:
        if accumulates:
            loss = optimizer.accumulate(batches, loss_of)[-1] * MICRO[0]
        for ids, targets in () if accumulates else batches:
            loss = model(ids, targets)
            (loss / len(batches)).backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step


SYSTEMS: dict[str, Callable[[nn.Module], Step]] = {
    "torch_autocast": torch_autocast,
    "torch_bf16": torch_bf16,
    "fsdp2": fsdp2,
    "deepspeed_zero2": lambda model: deepspeed(model, 2),
    "deepspeed_zero3": lambda model: deepspeed(model, 3),
    "deepspeed_zero3_nvme": lambda model: deepspeed(model, 3, "nvme"),
    "zk_stage2": lambda model: zk(model, 2),
    "zk_stage3": lambda model: zk(model, 3),
    "zk_stage3_device": lambda model: zk(model, 3, "device"),
    "zk_stage3_nvme": lambda model: zk(model, 3, "nvme"),
    "zk_stage3_accumulate": lambda model: zk(model, 3, accumulates=True),
    "zk_stage3_nvme_accumulate": lambda model: zk(model, 3, "nvme", accumulates=True),
    "zk_stage3_nvme_cached": lambda model: zk(model, 3, "nvme", host_budget="1.75GiB"),
    "zk_stage3_overlap_step": lambda model: zk(model, 3, "host", overlap_step=True),
    "zk_stage3_nvme_overlap_step": lambda model: zk(model, 3, "nvme", overlap_step=True),
    "zk_stage3_nvme_cached_overlap_step": lambda model: zk(model, 3, "nvme", host_budget="1.75GiB", overlap_step=True),
    "zk_stage3_nvme_bf16_moments": lambda model: zk(model, 3, "nvme", host_budget="1.75GiB", state_dtype="bf16"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("system", choices=SYSTEMS)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--micro", type=int, default=1, help="micro-batches in a step")
    parser.add_argument("--clip", type=float, default=1.0, help="norm to clip to; 0: no clipping")
    parser.add_argument("--state-dtype", default="fp32", help="of zk's optimizer state")
    parser.add_argument("--in-turns", action="store_true", help="wait for a line of input before each step, and print a line after it")
    parser.add_argument("--in-blocks", action="store_true", help="compute products of bf16 in fp32, where the CPU has no kernels for them")
    options = parser.parse_args()
    if options.in_blocks:
        nn.Linear.forward = lambda self, x: InBlocks.apply(x, self.weight, self.bias)  # type: ignore[method-assign]
    MICRO[0], CLIP[0], STATE_DTYPE[0] = options.micro, options.clip, options.state_dtype
    torch.manual_seed(0)
    model = GPT(GPTConfig(vocab=4096, width=options.width, layers=options.layers, heads=16, context=options.context))
    num_params = sum(p.numel() for p in model.parameters())
    step = SYSTEMS[options.system](model)
    draws = torch.Generator().manual_seed(1)
    shape = (options.warmup + options.steps, options.micro, options.batch, options.context + 1)
    seconds, losses = [], []
    before: list[dict[str, float]] = []
    for number, drawn in enumerate(torch.randint(0, 4096, shape, generator=draws)):
        if number == options.warmup:
            before = [meter() for meter in METERS]
        if options.in_turns:
            sys.stdin.readline()
        start = time.perf_counter()
        losses.append(step([(ids[:, :-1].contiguous(), ids[:, 1:].contiguous()) for ids in drawn]))
        seconds.append(time.perf_counter() - start)
        if options.in_turns:
            print("TURN", flush=True)
    peak = peak_nbytes()
    warm = seconds[options.warmup :]
    report = {"system": options.system, "params": num_params, "seconds": warm, "median": statistics.median(warm), "losses": losses, "peak_rss": peak}
    for earlier, meter in zip(before, METERS, strict=True):
        later = meter()
        for name in ("fetched_nbytes", "evicted_nbytes"):
            report[name] = (later.get(name, 0) - earlier.get(name, 0)) / options.steps
    sys.stdout.write("\nRESULT " + json.dumps(report) + "\n")
    sys.stdout.flush()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
