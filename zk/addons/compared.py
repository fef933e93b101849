"""Ranks compare options and models before anything is made: one that has another is refused on all.

It is there for every optimizer. Uses of the core: the seams ``check`` and ``comm``, ``Comm.words``.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from zk.addon import Addon
from zk.config import ZeroConfig
from zk.parallel.comm import Comm

Inners = list[torch.optim.Optimizer]
OWN = "process_group", "nvme_path", "device", "num_threads", "device_budget", "host_budget"


class Compared(Addon):
    def check(self, model: nn.Module, optimizers: Inners, config: ZeroConfig) -> None:
        groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        self.values: Any = readable(alike(model, groups, config))

    def comm(self, comm: Comm) -> Comm:
        agree(comm, "options and models", self.values)
        return comm


def agree(comm: Comm, about: str, values: Mapping[str, object]) -> None:
    """ValueError on all ranks where one has another value, by its name: who has what."""
    mine = {name: str(value) for name, value in values.items()}
    if len(set(comm.words(about, zlib.crc32(repr(sorted(mine.items())).encode())))) == 1:
        return
    said = comm.words(about, mine)
    for name in dict.fromkeys(name for each in said for name in each):
        first, *others = (each.get(name, "nothing") for each in said)
        for rank, other in enumerate(others, 1):
            if other != first:
                raise ValueError(
                    f"{about} must be the same on all ranks: {name} is {first} on rank 0 and "
                    f"{other} on rank {rank}"
                )


def alike(model: nn.Module, groups: list[dict[str, Any]], config: ZeroConfig) -> dict[str, object]:
    """Values that must be the same on all ranks, by name."""
    values = {name: value for name, value in vars(config).items() if name not in OWN}
    for number, group in enumerate(groups):
        options = group | {"params": len(group["params"]), "name": ""}
        values |= {f"param_groups[{number}][{key!r}]": value for key, value in options.items()}
    values |= {
        f"parameter {name!r}": f"{tuple(param.shape)} of {param.dtype}"
        + f", strides {param.stride()}" * (not param.is_contiguous())
        + ("" if param.requires_grad else ", frozen")
        for name, param in model.named_parameters()
    }
    return values


def readable(value: Any) -> object:
    """``value``, in words that are the same in every process: what only this one could read is its type."""
    if isinstance(value, (list, tuple)):
        return tuple(map(readable, value))
    if isinstance(value, dict):
        return {name: readable(one) for name, one in value.items()}
    if hasattr(value, "tolist"):  # a tensor, or a number of numpy's
        return readable(value.tolist())
    if isinstance(value, float) and value.is_integer():
        return int(value)
    is_known = value is None or isinstance(value, (bool, int, float, str, type, torch.dtype))
    return value if is_known or hasattr(value, "__dataclass_fields__") else type(value).__name__
