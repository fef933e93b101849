"""Optimizer states in torch's own format: state_dict() and its way back."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch

from zk.logs import require
from zk.offload.rules import is_field, numbers_of

if TYPE_CHECKING:
    from zk.optimizer import ZeroOptimizer
    from zk.store import UnitStore


def order_of(optimizer: ZeroOptimizer) -> dict[Any, int]:
    """Parameters by their numbers in torch's state dicts."""
    return {p: n for n, p in enumerate(p for g in optimizer.param_groups for p in g["params"])}


def states_of_inners(optimizer: ZeroOptimizer) -> dict[str, Any]:
    """What the user's optimizers had before, in torch's format."""
    order = order_of(optimizer)
    states = {order[p]: state for inner in optimizer._inners for p, state in inner.state.items()}
    return {"state": states, "param_groups": optimizer.param_groups}


def states_of(optimizer: ZeroOptimizer) -> dict[str, Any]:
    """What ZeroOptimizer.state_dict returns."""
    order, states = order_of(optimizer), {}
    for store in optimizer._trained:
        kept = [*store.rule.names, *["master"] * (store.unit.dtype != torch.float32)]
        for index, count in enumerate(store.steps):
            if count:
                numbers = store.rule.numbers(store.groups[index], count)
                where = store.states[0].device  # the device may be too small for all
                values = {kind: store.whole(kind, index).to(where) for kind in kept}
                states[order[store.unit.params[index]]] = copy.deepcopy(numbers) | values
    groups = [
        group | {"params": [order[param] for param in group["params"]]}
        for group in optimizer.param_groups
    ]
    scale = optimizer._scaler.state_dict()
    return {"state": dict(sorted(states.items())), "param_groups": groups, "loss_scale": scale}


def check_states(optimizer: ZeroOptimizer, given: dict[str, Any]) -> None:
    """ValueError for states that are not of these parameters, or of another kind of optimizer."""
    own, other = (
        [len(group["params"]) for group in groups]
        for groups in (optimizer.param_groups, given["param_groups"])
    )
    require(
        own == other,
        f"the states are of groups of {other} parameters, and this optimizer has groups of {own}: "
        "load them into an optimizer with the groups that they were saved from",
    )
    order = order_of(optimizer)
    for store in optimizer._trained:
        for name, param in zip(store.unit.names, store.unit.params, strict=True):
            state = given["state"].get(order[param], {})
            kinds = store.rule.names if state.keys() - {"master"} else ()
            missing = ", ".join(repr(kind) for kind in kinds if kind not in state)
            require(
                not missing,
                f"the states of {name!r} have no {missing}: they are of another kind of optimizer",
            )
            for kind, value in state.items():
                if is_field(value):
                    require(
                        value.shape == param.shape,
                        f"{kind!r} of {name!r} has shape {tuple(value.shape)}, and the parameter "
                        f"{tuple(param.shape)}: the states are of another model",
                    )


def load_states(optimizer: ZeroOptimizer, given: dict[str, Any]) -> None:
    """What ZeroOptimizer.load_state_dict does."""
    for group, saved in zip(optimizer.param_groups, given["param_groups"], strict=True):
        group.update({name: value for name, value in saved.items() if name != "params"})
    if "loss_scale" in given:
        optimizer._scaler.load_state_dict(given["loss_scale"])
    order = order_of(optimizer)
    for store in optimizer._trained:
        for index, param in enumerate(store.unit.params):
            load_param(store, index, given["state"].get(order[param], {}))
        store.publish()
    optimizer._torn = optimizer._runtime.broken = ""


def load_param(store: UnitStore, index: int, state: dict[str, Any]) -> None:
    """Overwrite one parameter's states; what ``state`` lacks begins anew."""
    trained = any(name != "master" for name in state)
    store.steps[index] = int(state.get("count", state.get("step", trained)))
    own = *store.rule.names, "master", "count"  # of a parameter without dimensions all are scalars
    counters = {name: value for name, value in numbers_of(state).items() if name not in own}
    store.rule.know(store.groups[index], store.steps[index], counters)
    for kind in store.rule.names:
        value = state.get(kind)
        store.write(kind, index, torch.zeros(()) if value is None else value)
    if "master" in state:
        store.write("master", index, state["master"])
