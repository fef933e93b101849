"""`zk.gather`: a context in which parameters that stage 3 keeps partitioned are full, readable and, if wished, writable."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn

from zk.core.owners import inner_tensors, owner_of
from zk.core.store import UnitStore


@contextlib.contextmanager
def gather(params: nn.Parameter | Iterable[Tensor], *, write: bool = False) -> Iterator[None]:
    """Make parameters full inside the context; a collective at stage 3, so enter it on all ranks.

    Args:
        params: one parameter or several (``model.parameters()``). Those that no ZeroOptimizer holds are left as they are.
        write: values written inside are kept: the first rank's are sent to all, and masters follow. Without it, what is
            written to partitioned parameters is an error on exit.

    Memory: the units that the parameters belong to, in full, on every rank, until the context ends.
    """
    given = [params] if isinstance(params, nn.Parameter) else list(params)
    if not all(isinstance(param, Tensor) for param in given):
        raise TypeError(f"zk.gather takes parameters, such as model.parameters(); got {params!r}")
    wanted = [tensor for param in given for _, tensor in inner_tensors(param)]
    held: dict[UnitStore, list[int]] = {}
    for param in wanted:
        owner = owner_of(param)
        if owner is not None:
            owner._check_open()
            if write:
                owner.saver.finish()  # which may read what is written here
                owner.updates.wait()  # which publishes on the same ranks
            unit, index = owner.units[param]
            held.setdefault(unit, []).append(index)
    entered = list[UnitStore]()
    try:
        for unit in held:
            unit.arrive()
            unit.pin()
            entered.append(unit)
        try:
            with contextlib.ExitStack() as saving:
                for owner in dict.fromkeys(map(owner_of, wanted)) if torch.is_grad_enabled() else ():
                    if owner is not None and owner.partition.by_storage:  # there is memory that goes
                        saving.enter_context(owner.partition.saving())
                yield
        except RuntimeError as error:
            if "saved tensor hooks" in str(error):
                error.add_note("zk: torch.func within zk.gather(params) needs torch.no_grad() around that, as no graph outside needs params then")
            raise
        if write:
            for unit, indices in held.items():
                unit.keep_written(indices)
    finally:
        lost = False
        for unit in entered:
            if unit.is_partitioned and not write and unit.pins == 1:  # else what is around this keeps what it has written
                lost |= unit.is_changed()
                unit.note_versions()
            unit.unpin()
    if lost:
        raise RuntimeError(
            "parameters were written within zk.gather(params), which makes them full to be read; use zk.gather(params, write=True), which keeps "
            "what is written"
        )
