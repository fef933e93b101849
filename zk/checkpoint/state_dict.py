"""The whole model in host memory."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor

from zk.checkpoint.manifest import buffers_of, cuts_of
from zk.config import parse_dtype
from zk.optimizer import ZeroOptimizer
from zk.parallel.gather import place_of
from zk.precision import CASTABLE


@torch.no_grad()
def consolidated_state_dict(
    optimizer: ZeroOptimizer,
    dtype: str | torch.dtype | None = None,
    *,
    rank0_only: bool = False,
    names: Collection[str] | None = None,
) -> dict[str, Tensor]:
    """The whole model in host memory, by the names of ``model.state_dict()``. Call it on all ranks.

    Args:
        dtype: of the parameters: "fp32" gives the masters, None what each is trained in. Integers,
            codes and buffers stay as they are.
        rank0_only: the other ranks take part and get an empty dict, so a machine holds it once.
        names: of parameters that are wanted; None: all.

    Tied parameters share memory. For large models, save a checkpoint and let ``zk export`` write it.
    """
    wanted = parse_dtype(dtype, "dtype") if dtype is not None else None
    optimizer._settle()
    is_kept = not rank0_only or optimizer._layout.comm.rank == 0
    cuts, full, named = cuts_of(optimizer.model), dict[Tensor, Tensor](), dict[str, Tensor]()
    for name, param in optimizer.model.named_parameters(remove_duplicate=False):
        cut, place = cuts[name], place_of(param)
        if place is None or (names is not None and cut.whole not in names):
            continue
        if param not in full:
            store, index = place
            is_cast = wanted is not None and store.unit.dtype in CASTABLE
            value = store.read("master" if is_cast and store.unit.is_trained else "param", index)
            value = value if is_kept else value.new_empty(0)
            full[param] = value.to("cpu", wanted if is_cast else value.dtype).contiguous()
        if is_kept and cut.shape == param.shape:
            named[name] = full[param]
        elif is_kept:
            like = torch.empty(cut.shape, dtype=full[param].dtype)
            named.setdefault(cut.whole, like)[cut.place] = full[param]
    beside = dict(buffers_of(optimizer, all_names=True)) if is_kept else {}
    return named | {name: value.to("cpu", copy=True) for name, value in beside.items()}
