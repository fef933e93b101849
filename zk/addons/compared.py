"""Ranks compare options and models before anything is made: one that has another is refused on all.

It is there for every optimizer. Uses of the core: the seams ``check`` and ``comm``, ``Comm.words``.
"""

import zlib
from typing import Any

import torch

from zk.addon import Addon

# options that may differ by rank
OWN = "process_group", "nvme_path", "device", "num_threads", "device_budget", "host_budget"


class Compared(Addon):
    """Compared are options, those of param_groups, and shape, dtype and order of each parameter.

    A checksum goes first: ranks that agree exchange nothing else.
    """

    def check(self, model: Any, optimizers: Any, config: object) -> None:
        values = {name: value for name, value in vars(config).items() if name not in OWN}
        for number, group in enumerate(g for one in optimizers for g in one.param_groups):
            options = group | {"params": len(group["params"]), "name": ""}
            values |= {f"param_groups[{number}][{key!r}]": value for key, value in options.items()}
        for name, param in model.named_parameters():
            steps = f", strides {param.stride()}" * (not param.is_contiguous())
            frozen = ", frozen" * (not param.requires_grad)
            values[f"parameter {name!r}"] = f"{tuple(param.shape)} of {param.dtype}{steps}{frozen}"
        self.values = {name: str(readable(value)) for name, value in values.items()}

    def comm(self, comm: Any) -> Any:
        agree(comm, "options and models", self.values)
        return comm


def agree(comm: Any, about: str, mine: dict[Any, Any]) -> None:
    """ValueError on all ranks where one has another value, by its name: who has what."""
    if len({*comm.words(about, zlib.crc32(repr(sorted(mine.items())).encode()))}) > 1:
        first, *_ = said = comm.words(about, mine)
        rank, other = next(pair for pair in enumerate(said) if pair[1] != first)
        name = next(name for name in first | other if first.get(name) != other.get(name))
        raise ValueError(
            f"{about} must be the same on all ranks: {name} is {first.get(name, 'nothing')} on rank 0 "
            f"and {other.get(name, 'nothing')} on rank {rank}"
        )


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
    is_known = isinstance(value, int | float | str | type | torch.dtype | None)
    return value if is_known or hasattr(value, "__dataclass_fields__") else type(value).__name__
