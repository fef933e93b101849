"""State dicts of torch's format: of a ZeroOptimizer, or of one of its several optimizers, and how one is taken over; of the whole model."""

from __future__ import annotations

import copy
import functools
import itertools
from collections import defaultdict
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor, nn

from zk.checkpoint import base, save
from zk.core.checks import check_group, check_options, check_scale_and_counters
from zk.core.logs import log
from zk.core.owners import has_codes, inner_tensors, is_coded, is_dtensor, rebuilt
from zk.core.precision import CASTABLE
from zk.nn.tiles import pieces_of
from zk.parallel.comm import together
from zk.parallel.model_parallel import is_first_part, join_parts


def export(optimizer: Any) -> dict[str, Any]:
    """See ``ZeroOptimizer.state_dict``."""
    optimizer._check_open()
    if optimizer.integrity.interrupted:
        log.warning("this state_dict() is of mixed parameters and state: %s", optimizer.integrity.interrupted)
    else:
        optimizer.updates.settle()
    optimizer._keep_state()
    shown, optimizer.state = optimizer.state, defaultdict(dict)
    # what user code has is not to change while an update goes on beside it
    own_part, copies = optimizer.config.stage == 3 and optimizer.comm.shards > 1, bool(optimizer.config.overlap_step)
    try:
        if any(held.steps for held in optimizer.held):
            for held in optimizer.held:
                optimizer.state.update(held.export_state(own_part, copies))  # type: ignore[arg-type]
        plain = torch.optim.Optimizer.state_dict(optimizer)
    finally:
        optimizer.state = shown
    plain["zk"] = {"loss_scale": optimizer.scaler.state_dict(), "counters": dict(optimizer.counters)}
    return plain


def part(optimizer: Any, inner: torch.optim.Optimizer) -> dict[str, Any]:
    """The part of ``state_dict()`` that is of one of several optimizers, as plain torch loads it."""
    plain, own = optimizer.state_dict(), {id(group) for group in inner.param_groups}
    groups = [saved for group, saved in zip(optimizer.param_groups, plain["param_groups"], strict=True) if id(group) in own]
    numbers = {key: number for number, key in enumerate(key for group in groups for key in group["params"])}
    state = {numbers[key]: kept for key, kept in plain["state"].items() if key in numbers}
    return {"state": state, "param_groups": [{**group, "params": [numbers[key] for key in group["params"]]} for group in groups]}


def load(optimizer: Any, state_dict: dict[str, Any]) -> None:
    """See ``ZeroOptimizer.load_state_dict``."""
    optimizer._check_open()
    all_of_them = functools.partial(together, optimizer.everyone, "load_state_dict()")
    for hook in optimizer._optimizer_load_state_dict_pre_hooks.values():
        state_dict = hook(optimizer, state_dict) or state_dict
    with all_of_them():
        params = _saved_params(optimizer, state_dict)
    # (Adagrad has a state of what is frozen, too)
    states = state_dict["state"]
    given = {
        key: states[key] for key, param in params.items() if key in states and (optimizer.units[param][0].shard or states[key].get("step") != 0)
    }
    frozen = [params[key] for key in given if optimizer.units[params[key]][0].shard is None]
    if frozen:
        optimizer.unfreeze(frozen)  # as they had been when it was saved
    with all_of_them():
        plan: list[Callable[[], None]] = []
        for key, param in params.items():
            held, index = optimizer.units[param]
            if key in given:
                plan += held.import_plan(index, given[key])
            elif index in held.steps:
                plan.append(functools.partial(held.forget_state, index))
    for held in optimizer._trained:
        held.shown_state.clear()
    if not optimizer.integrity.interrupted:
        optimizer.updates.apply_delayed()
    optimizer.updates.join()
    if optimizer.integrity.interrupted:
        optimizer._drop_gradients()  # which the step that ended half-way was given
    # masters of 16 bit parameters come along, and are their values; fp32 parameters are no part of it
    keys = (key for group in state_dict["param_groups"] for key in group["params"])
    with_values = all("master" in states.get(key, {}) for key in keys) and all(held.shard is None or held.shard.has_master for held in optimizer.held)
    with optimizer.integrity.replacing("load_state_dict()", ("state", "parameters") if with_values else ("state",)):
        for group, saved in zip(optimizer.param_groups, state_dict["param_groups"], strict=True):
            group.update({key: copy.deepcopy(value) for key, value in saved.items() if key != "params"})  # the state stays the caller's
        for held in optimizer._trained:
            held.settle()
        with all_of_them():  # all of it, before ranks exchange anything
            for write in plan:
                write()
        for held in optimizer._trained:
            held.republish()
        if "zk" in state_dict:
            optimizer.scaler.load_state_dict(state_dict["zk"]["loss_scale"])
            optimizer.counters.update(state_dict["zk"]["counters"])
            for rates in list(optimizer.clock.rates):
                rates.restart()
    for post_hook in optimizer._optimizer_load_state_dict_post_hooks.values():
        post_hook(optimizer)


def _saved_params(optimizer: Any, state_dict: dict[str, Any]) -> dict[int, nn.Parameter]:
    """The parameter of each key of a state, after checking that its groups and options fit."""
    if not {"state", "param_groups"} <= set(state_dict):
        raise ValueError(f"a state_dict of an optimizer has 'state' and 'param_groups'; got {sorted(map(str, state_dict))}")
    if not state_dict["state"] and state_dict.get("zk", {"counters": {"steps": 0}})["counters"]["steps"]:
        raise ValueError(
            f"the state is of an optimizer after {state_dict['zk']['counters']['steps']} steps, and has no parameter's; load what state_dict() "
            "returned after these steps"
        )
    if "zk" in state_dict:
        check_scale_and_counters(state_dict["zk"], "the state")
    saved_groups = state_dict["param_groups"]
    saved_sizes, sizes = ([len(group["params"]) for group in groups] for groups in (saved_groups, optimizer.param_groups))
    if saved_sizes != sizes:
        raise ValueError(
            f"the state has groups of {saved_sizes} parameters, this optimizer of {sizes}; build the same groups in the same order first"
        )
    for number, (group, saved, rule) in enumerate(zip(optimizer.param_groups, saved_groups, optimizer.rules, strict=True)):
        check_options(number, group, saved, "the state")
        check_group(optimizer.units, {**group, **saved, "params": group["params"]}, rule)
    pairs = (zip(saved["params"], group["params"], strict=True) for group, saved in zip(optimizer.param_groups, saved_groups, strict=True))
    return {key: param for key, param in itertools.chain.from_iterable(pairs) if not is_coded(param)}


def consolidated(optimizer: Any, wanted: torch.dtype | None, rank0_only: bool, names: Collection[str] | None) -> dict[str, Tensor]:
    """See ``ZeroOptimizer.consolidated_state_dict``."""
    is_kept = not rank0_only or (optimizer.comm.rank == 0 and is_first_part(optimizer.model))
    full: dict[Tensor, Tensor] = {}
    all_named, tiles = optimizer.model.named_parameters(remove_duplicate=False), pieces_of(optimizer.model)
    shown = ((name, tiles[name].whole if name in tiles else name, param) for name, param in all_named)
    chosen = [entry for entry in shown if names is None or entry[1] in names]
    as_is = {tensor: has_codes(param) or tensor.dtype not in CASTABLE for _, _, param in chosen for _, tensor in inner_tensors(param)}
    for held in optimizer.held:
        if as_is.keys().isdisjoint(held.unit.params):
            continue
        for param, values in held.masters().items():
            if param in as_is and (is_kept or held.unit.around):
                full[param] = values.to("cpu", held.unit.dtype if wanted is None or as_is[param] else wanted).contiguous()
        held.release()
    join_parts(optimizer.model, full)
    with optimizer.partition.reading():
        added = {name: value for _, name, value in base.entries_of(optimizer.model) if names is None or name in names}
    if not is_kept:
        return {}
    named: dict[str, Tensor] = {}
    for name, shown_as, param in chosen:
        if param in full and name in tiles:
            whole = named.setdefault(shown_as, torch.empty(tiles[name].shape, dtype=full[param].dtype))
            whole[tiles[name].place] = full[param]
        elif all(tensor in full for _, tensor in inner_tensors(param)):
            named[name] = full[next(inner_tensors(param))[1]] if is_dtensor(param) else rebuilt(param, full.__getitem__)
    beside = {**added, **dict(save.buffers_of(optimizer, all_names=True))}
    return {**named, **{name: value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else value for name, value in beside.items()}}
