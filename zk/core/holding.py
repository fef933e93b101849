"""Holding: units of the model come into stores, when the optimizer is made, and when more is trained later."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import weakref
from collections.abc import Callable, Collection, Sequence
from typing import Any

from torch import nn

from zk.core.checks import check_whole
from zk.core.hooks import Hook, weakly
from zk.core.memory import trim
from zk.core.store import UnitStore
from zk.core.units import Unit, find_units
from zk.parallel.comm import together
from zk.parallel.released import own_grad


def find(optimizer: Any) -> list[Unit]:
    """The units of the model as it is now."""
    number = {param: index for index, group in enumerate(optimizer.param_groups) for param in group["params"]}
    config, rules, kinds = optimizer.config, optimizer.rules, None
    experts = config.stage == 3  # below it nothing is gathered
    if any(rule is not rules[0] for rule in rules):
        kinds = {param: f"the optimizer of group {rules.index(rules[index])}" for param, index in number.items()}
    moves = optimizer.device, config.device is not None, experts, optimizer.comm.world if experts else 1, optimizer.parts.elsewhere
    return find_units(optimizer.model, number, optimizer.stored, config.units, *moves, kinds, config.compute_dtype and config.dtype)


def agree(optimizer: Any, numbered: Sequence[tuple[int, Unit]]) -> None:
    """Agree with the other ranks on units that are about to be held, each as its number."""
    optimizer.comm.names = names = [store.unit.name for store in optimizer.held]
    for number, unit in numbered:
        names[number : number + 1] = [unit.name]
    params = {
        f"parameter {name!r}": f"{tuple(param.shape)} in memory format {unit.orders.get(index, 'contiguous')}, "
        f"{unit.dtype}{', as fp32' * unit.is_widened}, in unit {unit.name!r}"
        for _, unit in numbered
        for index, (name, param) in enumerate(zip(unit.names, unit.params, strict=True))
    }
    optimizer.comm.agree(params, "hold different models")


def hold(optimizer: Any, unit: Unit, number: int) -> None:
    """Move a unit's parameters into its store, as this number."""
    held, is_another = optimizer.assembly.hold(number, unit, optimizer.partition, optimizer.grads), number == len(optimizer.held)
    optimizer.held[number : number + 1] = [held]
    for position, param in (*enumerate(unit.params), *unit.around.items()):
        optimizer.units[param] = (held, position)
    held.owner = weakref.ref(optimizer)
    if held.shard is not None:
        held.loss_scale, held.clip, held.gradients = optimizer.grads.loss_scale, weakly(optimizer._clip), weakref.ref(optimizer.gradients)
        if optimizer.speculation is not None:
            held.has_taken = weakly(optimizer.speculation.has_come)
            if not optimizer.config.keep_gradients:
                held.hands_over = weakly(optimizer.speculation.hands_over)
    if optimizer.config.overlap_step and is_another:  # see in which order forward uses the units, and let each wait for its own update
        uses = functools.partial(weakly(optimizer.updates.forward_uses), number)
        optimizer.handles += [anchor.register_forward_pre_hook(Hook(uses)) for anchor in unit.anchors]
    trim()


def complete(optimizer: Any) -> None:
    """Take the memory that updates need which begin early, or end late; note which parameters of the groups are not trained, and may be later."""
    if optimizer.speculation is not None or optimizer.updates.delay is not None:
        optimizer.assembly.cast_shadows(optimizer.held, optimizer.updates.delay is not None)
    optimizer.frozen = [
        param
        for group in optimizer.param_groups
        for param in group["params"]
        if param not in optimizer.units or optimizer.units[param][0].shard is None
    ]


def unfreeze(optimizer: Any, params: Collection[nn.Parameter], new: Sequence[Unit]) -> None:
    """See ``ZeroOptimizer.unfreeze``."""
    chosen = set(params)
    optimizer.assembly.rules = optimizer.rules
    optimizer.assembly.regroup()
    optimizer.saver.finish()
    optimizer.updates.apply_delayed()
    optimizer.updates.wait()
    optimizer.partition.reset()
    given_up = [store for store in optimizer.held if not chosen.isdisjoint(store.unit.users)]
    for store in optimizer._trained:  # buffers of the drive may be others afterwards
        store.shard.drop_attempt()  # type: ignore[union-attr]
    taken, numbers = {store.unit.name for store in optimizer.held}, itertools.count(len(optimizer.held))

    def another(unit: Unit) -> tuple[int, Unit]:
        """The unit under a name and a number that no other has."""
        names = (f"{unit.name} ({count})" if count > 1 else unit.name for count in itertools.count(1))
        name = next(name for name in names if name not in taken)
        taken.add(name)
        return next(numbers), dataclasses.replace(unit, name=name)

    moves: list[tuple[UnitStore | None, list[tuple[int, Unit]]]] = []
    for store in given_up:
        unit = store.unit
        by_rule: dict[int | None, list[int]] = {}  # None: what stays frozen
        for index, param in enumerate(unit.users):
            by_rule.setdefault(id(optimizer.assembly.rule_of[param]) if param in chosen else None, []).append(index)
        parts = [unit.part(by_rule[rule], rule is not None, unit.name) for rule in sorted(by_rule, key=lambda rule: rule is not None)]
        moves.append((store, [(store.index, parts[0]), *map(another, parts[1:])]))
    moves += [(None, [another(unit)]) for unit in new]
    numbered = [entry for _, entries in moves for entry in entries]
    agree(optimizer, numbered)
    with together(optimizer.comm, "making room for what is trained from now on"):
        check_whole([unit for _, unit in numbered], optimizer.assembly.rule, optimizer.parts.pieces_of(optimizer.model))
        optimizer.assembly.place([unit for _, unit in numbered], [store.unit for store in given_up])
    optimizer.grads.in_backward |= optimizer.comm.world == 1 and optimizer.assembly.updates_elsewhere
    given_up.clear()  # each one's memory is freed when its parameters are elsewhere
    try:
        while moves:
            before, entries = moves.pop(0)
            if before is not None:
                before.pin()
                optimizer.partition.remove(before)
            for number, unit in entries:
                hold(optimizer, unit, number)
    except BaseException as error:
        optimizer._fail(error)
        optimizer.integrity.tear(error)
        raise
    for held in optimizer._trained:
        for index, param in enumerate(held.unit.users):
            if param in chosen and own_grad(param) is not None:
                held.kept.add(index)
    optimizer.partition.attach()
    if optimizer.config.dtype is not None:
        optimizer.handles += optimizer.casts.attach()
    complete(optimizer)


def add_group(optimizer: Any, add: Callable[[], None]) -> None:
    """See ``ZeroOptimizer.add_param_group``; ``add`` is torch's own."""
    if len(optimizer.inners) > 1:
        raise ValueError("no group can be added to a list of optimizers; make each with all its groups, also of parameters that are frozen now")
    groups, before = optimizer.inners[0].param_groups, len(optimizer.param_groups)
    groups[:], optimizer.param_groups = optimizer.param_groups, groups  # other ones may have been assigned
    try:
        with together(optimizer.comm, "add_param_group()"):
            add()
            stored = optimizer._checked()
        optimizer._agree()
    except BaseException:
        del optimizer.param_groups[before:]
        raise
    optimizer.stored = stored
    new = [
        unit.part(indices, unit.trained, unit.name)
        for unit in find(optimizer)
        if (indices := [index for index, param in enumerate(unit.params) if param not in optimizer.units])
    ]
    added = optimizer.param_groups[-1]["params"]
    unfreeze(optimizer, [param for param in added if param in optimizer.units and param.requires_grad], new)
