"""In: what a model needs and what is free, on each rank. Out: a refusal in words: a table, and the smallest changes that fit, to be pasted."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from zk.config import ZeroConfig
from zk.offload.tiers import readable
from zk.plan import needs
from zk.plan.needs import MEMORIES, Case, lacking

_DEPTH = ("device", "host", "nvme")
# how often a budget is made smaller, and ranks are doubled, before that is given up
_TRIES = 8
_MOST_RANKS = 1 << 12
# for how many changes ranks are counted: each is asked about a dozen times
_ASKED = 4


def refusal(case: Case, config: ZeroConfig, rows: Sequence[tuple[dict[str, int], dict[str, int]]], short: Sequence[int]) -> str:
    """``rows``: (needed, free) by rank, memory -> bytes; ``short``: the ranks that have too little."""
    needed, free = rows[short[0]]
    who = ""
    if case.world > 1:
        named = ", ".join(map(str, short[:8])) + (f" and {len(short) - 8} more" if len(short) > 8 else "")
        who = f" on rank{'s' * (len(short) > 1)} {named} of {case.world}"
    together = f"host and drive: for the {case.local} ranks of a machine; " if case.local > 1 else ""
    lines = [f"there is not enough memory{who} for this model with {_pasted(config, ZeroConfig()) or 'the defaults'}. Nothing has been changed."]
    lines.append(f"{'':8}{'still needed':>14}{'free':>14}")
    few = lacking(needed, free)
    for memory, name in MEMORIES.items():
        if memory in free:
            over = f"   {readable(few[memory])} too few" if memory in few else ""
            lines.append(f"{name:8}{readable(max(0, needed[memory])):>14}{readable(free[memory]):>14}{over}")
    lines.append(
        f"({together}beyond what the model holds now, at the fullest moment; activations are not known, and come on top. check_memory=False goes "
        "on regardless)"
    )
    # what is free on all ranks
    least = {memory: min(f[memory] for _, f in rows if memory in f) for memory in MEMORIES if any(memory in f for _, f in rows)}
    return "\n".join([*lines, *_remedies(case, config, least)])


def _remedies(case: Case, config: ZeroConfig, free: dict[str, int]) -> Iterator[str]:
    """Lines that name what would fit, the smallest change first."""
    folder, room = (config.nvme_path, free.get("nvme", 0)) if config.nvme_path else _folder(case)
    free = {**free, "nvme": room}
    tried = list(_changed(case, config, folder, free))
    chosen = next((one for one in tried if _fits(case, one, free, at_least=False)), None)
    if chosen is not None:
        yield f"The smallest change that fits: {_pasted(chosen, config)}"
    else:
        chosen = next((one for one in tried if _fits(case, one, free, at_least=True)), None)
        if chosen is not None:
            yield f"The smallest change that may fit, with nothing to spare: {_pasted(chosen, config)}"
    has_moments = config.state_dtype == torch.float32 and any(case.rule.state_names(group) for group in case.inner.param_groups)
    halved = [dataclasses.replace(one, state_dtype="bf16") for one in (config, *tried)] if has_moments else []
    smaller = next((one for one in (halved[:1] if chosen else halved) if _fits(case, one, free, at_least=False)), None)
    if smaller is not None:
        yield f"What changes results, and fits: {_pasted(smaller, config)}"
    if chosen is None and smaller is None:
        yield _nothing(case, [config, *tried], config, free)
    partitioned = itertools.islice((one for one in tried if one.stage == 3), _ASKED) if chosen is None else ()
    for one in (config, *partitioned):
        ranks = _ranks(case, one, free)
        if ranks:
            change = _pasted(one, config)
            yield f"More ranks: {change or 'this'} fits from {ranks} ranks on, {case.local} to a machine with as much memory as this one"
            break


def _fits(case: Case, config: ZeroConfig, free: dict[str, int], at_least: bool, world: int | None = None) -> bool:
    try:
        return not lacking(case.needed(config, at_least, world), free)
    except ValueError:  # a budget
        return False


def _changed(case: Case, config: ZeroConfig, folder: Any, free: dict[str, int]) -> Iterator[ZeroConfig]:
    """What keeps the results: higher stages, cheaper tiers, smaller budgets, nothing asked ahead; the fewest changes first."""
    yield from _other_budgets(case, config, free)
    found: list[ZeroConfig] = []
    tiers_of = {tier: dict.fromkeys((tier, *_DEPTH)) for tier in (config.param_tier, config.optimizer_tier)}
    for stage, param_tier, optimizer_tier, prefetch in itertools.product(
        range(config.stage, 4), tiers_of[config.param_tier], tiers_of[config.optimizer_tier], {config.prefetch, 0}
    ):
        drive = config.nvme_path or (folder if {"nvme", "auto"} & {param_tier, optimizer_tier} else None)
        tiers = {"stage": stage, "param_tier": param_tier, "optimizer_tier": optimizer_tier, "prefetch": prefetch, "nvme_path": drive}
        for budgets in ({}, {"device_budget": None}, {"device_budget": None, "host_budget": None}):
            try:
                found.append(dataclasses.replace(config, **tiers, **budgets))  # type: ignore[arg-type]
                break
            except ValueError:  # these do not go together
                continue

    def size_of(one: ZeroConfig) -> tuple[int, int, int, int]:
        """Of the change: the fewest settings, and of these the fastest memory."""
        changes = _shown(one, config).keys() - {"nvme_path"}
        depth = sum(_DEPTH.index(tier) for tier in (one.param_tier, one.optimizer_tier) if tier in _DEPTH)
        return int(one.prefetch != config.prefetch), len(changes), depth, one.stage

    yield from sorted((one for one in found if one != config), key=size_of)


def _other_budgets(case: Case, config: ZeroConfig, free: dict[str, int]) -> Iterator[ZeroConfig]:
    """Budgets that are more than there is, made smaller; of what is too much for the drive, as much as there is room for in the host's memory."""
    one = config
    if "nvme" in (config.param_tier, config.optimizer_tier) and config.host_budget is None and free["host"] // case.local > 10:
        one = dataclasses.replace(config, host_budget=_rounded(free["host"] // case.local * 9 // 10))
        yield one
    for _ in range(_TRIES):
        try:
            few, found = lacking(case.needed(one, at_least=False), free), case.footprint(one, False, case.world)[1]
        except ValueError:
            break
        budgets = {"device": one.device_budget, "host": one.host_budget}
        smaller = {}
        for memory, over in few.items():
            budget, share = budgets.get(memory), case.local if memory == "host" else 1
            if isinstance(budget, int):
                smaller[f"{memory}_budget"] = _rounded(min(budget, found.on(memory)) - over // share * 9 // 8)
        if not smaller or min(smaller.values()) <= 0:
            break
        one = dataclasses.replace(one, **smaller)  # type: ignore[arg-type]
        yield one
    if "nvme" in (config.param_tier, config.optimizer_tier) and config.host_budget is not None:
        yield dataclasses.replace(config, host_budget=None)


def _rounded(nbytes: int) -> int:
    """Down, to what can be read."""
    unit = next((size for size in (1 << 30, 1 << 20) if nbytes >= 10 * size), 1 << 20 if nbytes >= 1 << 20 else 1 << 10)
    return nbytes // unit * unit


def _ranks(case: Case, config: ZeroConfig, free: dict[str, int]) -> int:
    """The fewest ranks, more than there are, with which it fits; 0 if no number does."""
    if config.stage == 0:
        return 0
    low, high = case.world, 2 * case.world
    while not _fits(case, config, free, at_least=False, world=high):
        low, high = high, 2 * high
        if high > _MOST_RANKS:
            return 0
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if _fits(case, config, free, at_least=False, world=middle) else (middle, high)
    return high


def _nothing(case: Case, tried: Sequence[ZeroConfig], config: ZeroConfig, free: dict[str, int]) -> str:
    """By how little the nearest choice fails."""
    nearest: tuple[int, ZeroConfig, dict[str, int]] | None = None
    for one in tried:
        try:
            needed = case.needed(one, at_least=True)
        except ValueError:
            continue
        over = sum(lacking(needed, free).values())
        if nearest is None or over < nearest[0]:
            nearest = over, one, needed
    assert nearest is not None, "what was refused has been asked for"
    _, one, needed = nearest
    few = lacking(needed, free)
    said = ", and ".join(f"{readable(needed[m])} of {MEMORIES[m]}{' memory' * (m != 'nvme')} where {readable(free[m])} are free" for m in few)
    return f"Nothing that zk can do on this machine fits: the nearest, {_pasted(one, config) or 'this'}, needs at least {said}"


def _folder(case: Case) -> tuple[str, int]:
    """A folder on a drive to name in a suggestion, that with the most room, and the room."""
    from zk.doctor import in_memory  # with all that it looks at

    folders = [str(Path.cwd()), tempfile.gettempdir()]
    usable = [one for one in folders if os.access(one, os.W_OK) and not in_memory(Path(one))]
    rooms = [(needs.free_memory(case.device, case.joined, [one])["nvme"], one) for one in usable]
    room, folder = max(rooms, key=lambda found: found[0], default=(0, folders[0]))
    return folder, room


def _shown(config: ZeroConfig, before: ZeroConfig) -> dict[str, Any]:
    """The fields that differ, as they may be written."""
    fields: dict[str, Any] = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if value == getattr(before, field.name) or field.name in ("process_group", "units"):
            continue
        if isinstance(value, torch.dtype):
            value = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}[value]
        elif field.name.endswith("_budget") and value is not None:
            value = next(
                (f"{value // size}{unit}" for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)) if value % size == 0), value
            )
        elif field.name == "nvme_path" and value is not None:
            value = value[0] if len(value) == 1 else list(value)
        fields[field.name] = value
    return fields


def _pasted(config: ZeroConfig, before: ZeroConfig) -> str:
    """The fields that differ, as arguments."""
    shown = _shown(config, before).items()
    return ", ".join(f"{name}={json.dumps(value) if isinstance(value, str) else repr(value)}" for name, value in shown)
