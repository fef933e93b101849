"""In: a model that ZeroOptimizer is about to take over. Out: nothing, or a MemoryError on all ranks, before anything is changed.

What is refused could not have run: counted is what cannot be done without (zk/plan/needs.py).
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from zk.config import ZeroConfig
from zk.memory import ranks_here
from zk.offload.rules import rule_for
from zk.parallel.comm import MEMORY, Group, Solo
from zk.parallel.layout import Layout
from zk.plan import needs
from zk.plan.needs import MEMORIES, Case
from zk.plan.remedy import refusal
from zk.units import Unit

_UNKNOWN = -1


def refuse_what_cannot_fit(
    model: nn.Module,
    stored: Mapping[Tensor, torch.dtype],
    inner: torch.optim.Optimizer,
    units: Sequence[Unit],
    layouts: Sequence[Layout],
    config: ZeroConfig,
    comm: Solo | Group,
    device: torch.device,
    joined: bool,
) -> None:
    """Raise MemoryError, on all ranks, if what the optimizer is about to take is more than there is on any of them. Nothing is changed."""
    case = Case(model, stored, units, layouts, rule_for(inner), inner, device, joined, comm.world, ranks_here(comm.world))
    paths = [os.fspath(path) for path in config.nvme_path or ()]  # type: ignore[union-attr, arg-type]
    needed, free = case.needed(config, at_least=True), needs.free_memory(device, joined, paths)
    everywhere = torch.zeros(comm.world, 2, len(MEMORIES), dtype=torch.int64)
    everywhere[comm.rank, 0] = torch.tensor([needed.get(memory, 0) for memory in MEMORIES])
    everywhere[comm.rank, 1] = torch.tensor([free.get(memory, _UNKNOWN) for memory in MEMORIES])
    comm.all_reduce(everywhere, MEMORY)
    rows = [(dict(zip(MEMORIES, n, strict=True)), _known(f)) for n, f in everywhere.tolist()]
    short = [rank for rank, row in enumerate(rows) if needs.lacking(*row)]
    if short:
        raise MemoryError(refusal(case, config, rows, short))


def _known(free: Sequence[int]) -> dict[str, int]:
    return {memory: nbytes for memory, nbytes in zip(MEMORIES, free, strict=True) if nbytes != _UNKNOWN}
