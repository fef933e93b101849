"""The record of a run: its losses and times, its experts in use, and the timeline of one step."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

import zk
from zk.tools.train.gpt import GPT
from zk.tools.train.mixture import Mixture, MixtureConfig


@dataclasses.dataclass(frozen=True, slots=True)
class Routing:
    """One step of a mixture of experts."""

    experts: float  # in use, the mean of the blocks
    numel: int  # of parameters in use: of these experts, and what every token uses
    needed_nbytes: float  # from this rank's drive, for what is in use
    fetched_nbytes: int  # from there


@dataclasses.dataclass(slots=True)
class Record:
    """The figures that a run leaves for its report."""

    losses: list[float] = dataclasses.field(default_factory=list)
    valid: dict[int, float] = dataclasses.field(default_factory=dict)
    step_ms: list[float] = dataclasses.field(default_factory=list)
    check_losses: list[float] = dataclasses.field(default_factory=list)
    routing: list[Routing] = dataclasses.field(default_factory=list)


@contextlib.contextmanager
def routed(model: GPT, optimizer: zk.ZeroOptimizer, record: Record) -> Iterator[None]:
    """Note which experts one step uses on any rank, and what it fetches from this rank's drive; nothing of a model without experts."""
    if not isinstance(model, Mixture):
        yield
        return
    loads: list[Tensor] = []  # of each micro-batch
    before = optimizer.metrics()
    with model.register_forward_hook(lambda *_: loads.append(model.load)):
        yield
    used = torch.stack(loads).to("cpu", torch.float64)
    optimizer.comm.all_reduce(used)
    metrics, key = optimizer.metrics(), "fetched_nbytes"
    fetched = int(metrics.get(key, 0) - before.get(key, 0))
    experts = used.any(0).sum().item() / len(model.blocks)
    record.routing.append(Routing(experts, *_needed(model, optimizer, metrics, used > 0), fetched))


def _needed(
    model: Mixture, optimizer: zk.ZeroOptimizer, metrics: Mapping[str, float], used: Tensor
) -> tuple[int, float]:
    """Parameters that a step uses, and bytes that it has to fetch for them from this rank's drive.

    Parameters for each forward and backward, and once more with master, moments and gradient for the update. What was added to a gradient
    that rests there was read first.

    Args:
        metrics: the optimizer's.
        used: the experts of each micro-batch, (micro-batches, layers, experts).
    """
    config, sizes = optimizer.config, model.config
    assert isinstance(sizes, MixtureConfig)
    assert isinstance(config.dtype, torch.dtype)
    assert isinstance(config.state_dtype, torch.dtype)
    total = sum(param.numel() for param in model.parameters())
    shared = total - used[0].numel() * sizes.expert_numel
    passes = len(used) * shared + int(used.sum()) * sizes.expert_numel
    updated = shared + int(used.any(0).sum()) * sizes.expert_numel
    # bytes on this rank's drive for each element of the model
    param, master, moments = (
        metrics.get(f"nvme_{kind}_nbytes", 0) / total
        for kind in ("param", "master", "moments")
    )
    precision = config.dtype if len(used) == 1 else torch.float32
    grad = moments / (2 * config.state_dtype.itemsize) * precision.itemsize
    needed = param * (2 * passes + updated)
    needed += (master + moments) * updated
    needed += grad * (updated if config.stage == 1 else passes)
    return updated, needed
