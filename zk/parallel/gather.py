"""``zk.gather``: values of parameters that rest elsewhere, whole, to be read or changed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from zk.logs import require
from zk.parallel.gradient import in_backward
from zk.parallel.runtime import RUNTIMES
from zk.store import UnitStore

Places = dict[Any, tuple[UnitStore, int]]


@contextlib.contextmanager
def gather(
    params: nn.Parameter | Iterable[nn.Parameter | None],
    *,
    kind: str = "param",
    write: bool = False,
) -> Iterator[list[Tensor]]:
    """Make values of parameters whole inside the context. Enter it on all ranks.

    Args:
        params: one parameter or several, such as ``model.parameters()``.
        kind: "param": the parameters themselves; "grad": their reduced gradients; "master", "exp_avg"
            or another name of the optimizer's: its states, in fp32.
        write: keep what is changed inside, also by an error: the first rank's values are sent to all.

    Yields:
        the values, in the order of ``params``: the parameters themselves, or copies of other kinds.

    Memory: for "param" the units of the parameters, in full, on every rank, until the context ends.
    """
    wanted: list[Any] = [params] if isinstance(params, Tensor | nn.Module) else list(params)
    for one in wanted:
        words = f"zk.gather takes parameters, such as model.parameters(); got {type(one).__name__}"
        require(isinstance(one, nn.Parameter | None), words, TypeError)
    given = {*wanted}  # which ranks may give in other orders
    places = {p: place_of(p) for runtime in RUNTIMES for p in runtime.store_of if p in given}
    stores = dict.fromkeys(store for store, _ in places.values())
    runtimes = dict.fromkeys(r for store in stores for r in RUNTIMES if store in r.stores)
    # forward and backward are of the parameters that they have begun with, and so is what is read
    is_settled = (write or kind != "param") and not in_backward()
    for runtime in runtimes if is_settled else ():
        for before_step in runtime.seams.before_step * (not runtime.depth):
            before_step()
    if kind != "param":
        yield from gathered_states(wanted, places, stores, kind, write)
        return
    with contextlib.ExitStack() as stack:
        for runtime in runtimes:
            stack.enter_context(runtime.holding([s for s in stores if s in runtime.stores]))
        try:
            yield wanted
        finally:  # an error inside undoes nothing, and ranks that have none keep what is written
            if write:
                keep_written(places, stores)
    for store in stores:
        if store.full is None:
            store.check_unchanged()


def place_of(param: Any) -> Any:
    """The store that has ``param``, and its number there; None for what no optimizer has."""
    stores = [runtime.store_of[param] for runtime in RUNTIMES if param in runtime.store_of]
    return next(((s, i) for s in stores for i, p in enumerate(s.unit.params) if p is param), None)


@torch.no_grad()
def keep_written(places: Places, stores: Iterable[UnitStore]) -> None:
    """Make what the first rank has written everybody's, the masters' too."""
    for param, (store, _) in places.items():
        store.layout.comm.broadcast(store.unit.name, param.data)
        torch.autograd.graph.increment_version(param)
    for store in stores:
        try:
            store.absorb()
        finally:
            store.take_back()
        store.publish()


@torch.no_grad()
def gathered_states(
    wanted: list[Any], places: Places, stores: Iterable[UnitStore], kind: str, write: bool
) -> Iterator[list[Tensor]]:
    """The context for kinds other than "param"."""
    for param in wanted:
        kinds = places[param][0].kinds if param in places else ["no ZeroOptimizer"]
        require(kind in kinds, f"zk.gather: a parameter has no {kind!r}: it has {', '.join(kinds)}")
    for store in stores if kind == "grad" else ():
        if in_backward():
            store.grad.collect()  # this rank's so far
        else:
            store.layout.reducer.settle()
    values = {param: store.read(kind, index) for param, (store, index) in places.items()}
    try:
        with torch.enable_grad():
            yield [values[param] for param in wanted]
    finally:
        for param, (store, index) in places.items() if write else ():
            store.layout.comm.broadcast(store.unit.name, values[param])
            store.write(kind, index, values[param])
        for store in stores if write else ():
            store.publish()
