"""``zk.gather``: values of parameters that rest elsewhere, whole, to be read or changed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn

from zk.parallel.runtime import RUNTIMES
from zk.store import UnitStore

Place = tuple[UnitStore, int]


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
        write: keep what is changed inside: the first rank's values are sent to all.

    Yields:
        the values, in the order of ``params``: the parameters themselves, or copies of other kinds.

    Memory: for "param" the units of the parameters, in full, on every rank, until the context ends.
    """
    wanted = [params] if isinstance(params, nn.Parameter) else list(params)
    places = {param: place for param in wanted for place in [place_of(param)] if place is not None}
    if kind != "param":
        yield from gathered_states(wanted, places, kind, write)
        return
    with contextlib.ExitStack() as stack:
        stores = dict.fromkeys(store for store, _ in places.values())
        owners = {store: owner for owner in RUNTIMES for store in owner.stores}
        for runtime in dict.fromkeys(map(owners.__getitem__, stores)):  # on all ranks in one order
            stack.enter_context(runtime.holding([s for s in stores if owners[s] is runtime]))
        try:
            yield wanted  # type: ignore[misc]
            if write:
                keep_written(places)
        except BaseException:  # what it has left half-done is not kept
            for store, _ in places.values():
                store.take_back()
            raise
    for store in stores:
        if store.full is None:
            store.check_unchanged()


def place_of(param: nn.Parameter | None) -> Place | None:
    """The store that has ``param``, and its number there; None for what no optimizer has."""
    stores = [runtime.store_of[param] for runtime in RUNTIMES if param in runtime.store_of]
    return next(((s, i) for s in stores for i, p in enumerate(s.unit.params) if p is param), None)


@torch.no_grad()
def keep_written(places: dict[nn.Parameter, Place]) -> None:
    """Make what the first rank has written everybody's, the masters' too."""
    for param, (store, _) in places.items():
        store.layout.comm.broadcast(store.unit.name, param.data)
        torch.autograd.graph.increment_version(param)
    for store in dict.fromkeys(store for store, _ in places.values()):
        store.absorb()
        store.publish()


@torch.no_grad()
def gathered_states(
    wanted: list[nn.Parameter], places: dict[nn.Parameter, Place], kind: str, write: bool
) -> Iterator[list[Tensor]]:
    """The context for kinds other than "param"."""
    for param in wanted:
        kinds = places[param][0].kinds if param in places else ["no ZeroOptimizer"]
        if kind not in kinds:
            raise ValueError(f"zk.gather: a parameter has no {kind!r}: it has {', '.join(kinds)}")
    stores = dict.fromkeys(store for store, _ in places.values())
    for store in stores if kind == "grad" else ():
        store.grad.collect()  # what users have assigned
    values = [store.read(kind, index) for store, index in map(places.__getitem__, wanted)]
    with torch.enable_grad():
        yield values
    for param, value in zip(wanted if write else (), values, strict=False):
        store, index = places[param]
        store.layout.comm.broadcast(store.unit.name, value)
        store.write(kind, index, value)
    for store in stores if write else ():
        store.publish()
