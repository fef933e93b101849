"""The whole model in host memory."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from zk.checkpoint.manifest import buffers_of, tiles_of
from zk.options import parse_dtype
from zk.precision import CASTABLE

if TYPE_CHECKING:
    from zk.optimizer import ZeroOptimizer


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
    tiles, store_of = tiles_of(optimizer.model), optimizer._runtime.store_of
    full: dict[Tensor, Tensor] = {}
    named: dict[str, Tensor] = {}
    for name, param in optimizer.model.named_parameters(remove_duplicate=False):
        shown_as = tiles[name].whole if name in tiles else name
        if param not in store_of or (names is not None and shown_as not in names):
            continue
        store = store_of[param]
        if param not in full:
            index = next(i for i, own in enumerate(store.unit.params) if own is param)
            is_cast = wanted is not None and store.unit.dtype in CASTABLE
            kind = "master" if is_cast and store.unit.is_trained else "param"
            value = store.read(kind, index)
            if is_kept:
                full[param] = value.to("cpu", wanted if is_cast else value.dtype).contiguous()
        if is_kept and name in tiles:
            tile = tiles[name]
            like = torch.empty(tile.shape, dtype=full[param].dtype)
            named.setdefault(shown_as, like)[tile.place] = full[param]
        elif is_kept:
            named[name] = full[param]
    if not is_kept:
        return {}
    beside = buffers_of(optimizer, all_names=True)
    return named | {name: value.to("cpu", copy=True) for name, value in beside}
