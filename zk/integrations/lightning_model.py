"""In: a model before or after training. Out: before, on its way to where it computes; after, plain and whole in host memory."""

from __future__ import annotations

import os
from collections.abc import Mapping

import torch
from torch import nn

from zk.logs import log
from zk.memory import host_memory, ranks_here
from zk.offload.tiers import readable
from zk.optimizer import ZeroOptimizer
from zk.parallel.released import is_released, unmark


def to_device(module: nn.Module, device: torch.device) -> None:
    """Move what has memory; what has none yet will be made there."""
    if not any(tensor.is_meta for tensor in (*module.parameters(), *module.buffers())):
        module.to(device)
        return
    for tensor in (*module.parameters(), *module.buffers()):
        if not tensor.is_meta:
            tensor.data = tensor.data.to(device)


def will_be_on(module: nn.Module, device: torch.device) -> None:
    """Modules of Lightning say that they are on ``device``; a ZeroOptimizer takes parameters from where they are to where they rest."""
    for part in module.modules():
        if isinstance(getattr(part, "_device", None), torch.device):
            part._device = device  # type: ignore[assignment]


def share_cores(num_processes: int) -> None:
    """torchrun says how many ranks share this machine, and so its cores and memory; Lightning, which can start them as well, does not."""
    os.environ.setdefault("LOCAL_WORLD_SIZE", str(num_processes))


def agreed(optimizer: ZeroOptimizer, yes: bool) -> bool:
    """Whether all ranks say so."""
    no = torch.tensor([float(not yes)], dtype=torch.float64)
    optimizer.comm.all_reduce(no)
    return not no.any()


def can_be_read(model: nn.Module) -> bool:
    """Whether every parameter has its values, also without an optimizer."""
    return not any(is_released(param) for param in model.parameters())


def make_whole(optimizer: ZeroOptimizer, buffer_dtypes: Mapping[str, torch.dtype], masters: bool, anyway: bool | None) -> bool:
    """Close an optimizer and leave its model plain, in host memory, on every rank; fp32 if ``masters``. All ranks call it.

    Args:
        anyway: True does not look whether there is room, False does not do it; None does if half of the free memory is enough.

    Returns whether the model can be read. What stage 3 has partitioned cannot, where it was not made whole.
    """
    model = optimizer.model
    nbytes = sum(param.numel() * (4 if masters else param.element_size()) for param in model.parameters())
    nbytes *= ranks_here(optimizer.comm.world)
    free = host_memory()[1]
    if anyway is False or not agreed(optimizer, anyway is True or nbytes <= free // 2):
        optimizer.close()
        readable_still = can_be_read(model)
        if anyway is None:
            log.warning(
                "parameters %s: the whole model would take %s of host memory, of which %s are free. Checkpoints saved while training have "
                "it (python -m zk export); gather_at_end=True tries all the same, and False says nothing",
                "stay as they were trained" if readable_still else "stay partitioned and can be read no more",
                readable(nbytes),
                readable(free),
            )
        return readable_still
    values = optimizer.consolidated_state_dict("fp32" if masters else None)
    optimizer.close()
    for name, param in model.named_parameters():
        unmark(param)
        param.grad = None
        param.data = values[name]
    for name, buffer in model.named_buffers():
        buffer.data = buffer.data.to(buffer_dtypes.get(name, buffer.dtype))
    return True
