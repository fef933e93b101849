"""Does a step take as long as its slowest resource? Compute, link and update that take a given time each, against the model of their overlap.

    python benchmarks/overlap_model.py [--units 8] [--steps 6]
    python benchmarks/overlap_model.py --micro 4 --units 4

No GPU: compute and update sleep, and the link (throttled.ThrottledLink) moves a given number of bytes per second, so all that
is measured is whether zk lets them run beside one another. With f, b, d, u the milliseconds that one of N units takes in forward, in backward,
on the link in one direction, and in its update:

    step(), update inside      N f  +  max(N b, b + (N-2) d)  +  max(N u + d, u + N d)
    overlap_step=True                  max(N b + d, b + N d)  +  max(N f + u + d, N u + d + f, N d + u + f)
    overlap_step="backward"            max(N b + d, b + N d)  +  max over i < R of (i+1) u + d + (N-i) f

Each maximum is over the resources that work beside one another, and the rest is the tail: the first or last unit's share of the others.
The first two know the norm of all gradients before anything is updated, so no update begins before the end of backward. With "backward"
updates begin as gradients arrive, and R units are left when the norm is known; the device has room for updated parameters before they count.
The limit of clipping is above the norm in all rows. Backward does not run further ahead of the link than two buckets, which bounds the device's
memory. A unit is four pieces on the link, as one of 32M parameters is. Ends with an error if a row takes 15% longer than the model.

With ``--micro M``: stage 3 with parameters and optimizer on the host and overlap_step, M micro-batches in a step, one after the other (with and
without activation checkpointing) and block by block, against what compute alone takes with checkpointing, M N (2 f + b).
"""

from __future__ import annotations

import argparse
import datetime
import functools
import itertools
import os
import statistics
import sys
import time
from typing import Any
from unittest import mock

import torch
from throttled import ThrottledLink, pretend
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import zk
from zk.offload import rules, transfer

NUMEL = 1 << 20  # of a unit: 2 MiB in 16 bits
TOLERANCE = 0.15
# forward, backward, link (each way), update: milliseconds of one unit
RATIOS = {
    "compute is the slowest": (30, 60, 15, 15),
    "link is the slowest": (15, 30, 70, 20),
    "update is the slowest": (15, 30, 20, 70),
    "all alike": (40, 40, 40, 40),
}
OF_MICRO_BATCHES = {"link is slow": (40, 40, 120, 80), "update is slow": (40, 40, 40, 240), "all alike": (40, 40, 40, 40)}


class _Compute(torch.autograd.Function):
    """Takes its time in both directions; the weight's gradient is the weight."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, forward_s: float, backward_s: float) -> Tensor:
        ctx.backward_s = backward_s
        ctx.save_for_backward(weight)
        time.sleep(forward_s)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        time.sleep(ctx.backward_s)
        return grad, ctx.saved_tensors[0].clone(), None, None


class Block(nn.Module):
    def __init__(self, forward_s: float, backward_s: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((NUMEL,), 1e-4))
        self.forward_s, self.backward_s = forward_s, backward_s

    def forward(self, x: Tensor) -> Tensor:
        return _Compute.apply(x, self.weight, self.forward_s, self.backward_s)


def model_ms(units: int, forward: float, backward: float, link: float, update: float, overlap_step: bool | str) -> float:
    """Milliseconds of a step, by the formula above."""
    n, f, b, d, u = units, forward, backward, link, update
    if overlap_step == "backward":
        known = max(n * b + d, b + n * d)
        left = max(1, n - int((known - b - d) / u))
        return known + max((i + 1) * u + d + (n - i) * f for i in range(left))
    if overlap_step:
        return max(n * b + d, b + n * d) + max(n * f + u + d, n * u + d + f, n * d + u + f)
    return n * f + max(n * b, b + (n - 2) * d) + max(n * u + d, n * d + u)


def measured_ms(
    units: int, steps: int, times: tuple[float, float, float, float], order: str = "", micro: int = 1, **options: Any
) -> tuple[float, float]:
    """The median step, and the time that the busier direction of the link was busy in one step, in milliseconds.

    ``order`` of several micro-batches: "vertical", "checkpointed" or neither.
    """
    forward, backward, link, update = (ms / 1e3 for ms in times)
    adam_ = rules.adam_

    def slow_adam(param: Tensor, *args: Any, **kwargs: Any) -> None:
        end = time.perf_counter() + update * param.numel() / NUMEL
        adam_(param, *args, **kwargs)
        time.sleep(max(0.0, end - time.perf_counter()))

    blocks = nn.Sequential(*[Block(forward, backward) for _ in range(units)])
    for block in blocks if order == "checkpointed" else ():
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
    pieces = mock.patch.object(transfer, "PIECE_NUMEL", NUMEL // 4)
    with pieces, pretend(ThrottledLink(2 * NUMEL / link)) as throttled, mock.patch.object(rules, "adam_", slow_adam):
        inner = torch.optim.AdamW(blocks.parameters(), lr=1e-6)
        options = {"stage": 2, "dtype": "bf16", "optimizer_tier": "host", "clip_grad_norm": 1.0, **options}
        with zk.ZeroOptimizer(blocks, inner, **options) as optimizer:
            starts = []
            for _ in range(steps + 1):
                starts.append(time.perf_counter())
                batches = [torch.zeros(1, requires_grad=True) for _ in range(micro)]
                if order == "vertical":
                    optimizer.accumulate(batches, lambda model, x: model(x).sum())
                for x in batches if order != "vertical" else ():
                    blocks(x).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            starts.append(time.perf_counter())
            optimizer.synchronize()
            busy = max(throttled.down.busy_s, throttled.up.busy_s) / (steps + 1)
    took = [stop - start for start, stop in itertools.pairwise(starts[1:])]  # the first step meets nothing in flight
    return statistics.median(took) * 1e3, busy * 1e3


def of_micro_batches(units: int, steps: int, micro: int) -> None:
    """Both orders, as multiples of compute alone."""
    print(f"{micro} micro-batches, {units} units; ms of one unit in forward, backward, on the link, in its update. {datetime.date.today()}\n")
    print("| | f b d u | compute | one after the other | with checkpointing | block by block |")
    print("|---|---|---:|---:|---:|---:|")
    for name, times in OF_MICRO_BATCHES.items():
        compute = micro * units * (2 * times[0] + times[1])
        place: dict[str, Any] = {"stage": 3, "param_tier": "host", "overlap_step": True}
        found = [measured_ms(units, steps, times, order, micro, **place)[0] for order in ("", "checkpointed", "vertical")]
        cells = " | ".join(f"{ms:.0f} ({ms / compute:.2f})" for ms in found)
        print(f"| {name} | {' '.join(map(str, times))} | {compute} | {cells} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--units", type=int, default=8)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--micro", type=int, default=1, help="micro-batches in a step")
    options = parser.parse_args()
    os.environ["ZK_QUIET"] = "1"  # a summary asks for the memory of the GPU
    if options.micro > 1:
        of_micro_batches(options.units, options.steps, options.micro)
        return
    print(f"{options.units} units; ms of one unit in forward, backward, on the link, in its update; clipping on. {datetime.date.today()}\n")
    print("| slowest | f b d u | overlap | one after the other | model | measured | measured / model |")
    print("|---|---|---|---:|---:|---:|---:|")
    worst = 0.0
    for name, times in RATIOS.items():
        alone, _ = measured_ms(options.units, max(2, options.steps // 2), times, overlap=False)
        for overlap_step in (False, True, "backward"):
            want = model_ms(options.units, *times, overlap_step)
            room = {"device_budget": "1GiB"} if overlap_step == "backward" else {}
            got, _ = measured_ms(options.units, options.steps, times, overlap_step=overlap_step, **room)
            worst = max(worst, got / want - 1)
            how = {False: "step()", True: "overlap_step=True", "backward": 'overlap_step="backward"'}[overlap_step]
            print(f"| {name} | {' '.join(map(str, times))} | {how} | {alone:.0f} | {want:.0f} | {got:.0f} | {got / want:.2f} |", flush=True)
    print(f"\nAt most {worst:.0%} longer than the model (asked: {TOLERANCE:.0%}).")
    sys.exit(worst > TOLERANCE)


if __name__ == "__main__":
    main()
