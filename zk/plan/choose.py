"""In: a model's shape and a machine. Out: Plan: every choice of stage and tiers, its bytes and its step; the best; the largest model."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch

from zk.config import ZeroConfig
from zk.plan.memory import Footprint, Machine, footprint
from zk.plan.shape import Shape
from zk.plan.speed import Step, step_of

# how near the largest model is looked for
_PRECISION = 1.02
# a step beside training must be worth this much of the step to be recommended
_WORTH = 0.95
# how often budgets are made smaller, and by how much at least
_TRIES = 8
_SLACK = 1 << 20
_LIMIT = 1e6  # times the given model, in each of its proportions


@dataclasses.dataclass(frozen=True, slots=True)
class Option:
    """One choice of stage and tiers."""

    found: Footprint
    missing: dict[str, int]  # memory -> bytes too few
    step: Step

    @property
    def config(self) -> ZeroConfig:
        return self.found.config

    @property
    def fits(self) -> bool:
        return not self.missing


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    """What there is to choose from."""

    shape: Shape
    machine: Machine
    tokens: int
    options: list[Option]
    best: Option | None  # the fastest that fits
    largest: dict[str, tuple[Shape, ZeroConfig]]  # device, host, nvme: with nothing beyond that tier


def configs(machine: Machine, dtype: str | torch.dtype, state_dtype: str | torch.dtype, nvme_path: str) -> Iterator[ZeroConfig]:
    """Every sensible choice, the simplest first."""

    def made(stage: int, param_tier: str, optimizer_tier: str) -> ZeroConfig:
        drive = nvme_path if "nvme" in (param_tier, optimizer_tier) or ("auto" in (param_tier, optimizer_tier) and machine.nvme_nbytes) else None
        return ZeroConfig(
            stage=stage,
            dtype=dtype,
            state_dtype=state_dtype,
            param_tier=param_tier,  # type: ignore[arg-type]
            optimizer_tier=optimizer_tier,  # type: ignore[arg-type]
            nvme_path=drive,
        )

    optimizer_tiers = [] if machine.joined else ["device"]
    optimizer_tiers += ["host"] + ["nvme"] * (machine.nvme_nbytes > 0) + ["auto"] * (not machine.joined)
    for stage in (0, 1, 2, 3):
        for tier in optimizer_tiers:
            yield made(stage, "device", tier)
    for tier in ["host"] + ["nvme"] * (machine.nvme_nbytes > 0):
        yield made(3, "host", tier)
    if machine.nvme_nbytes:
        yield made(3, "nvme", "host")
        yield made(3, "nvme", "nvme")
    if not machine.joined:
        yield made(3, "auto", "auto")


def consider(shape: Shape, config: ZeroConfig, machine: Machine, tokens: int) -> Option | None:
    """One choice, its update beside training where that is worth it. None if "auto" finds no room."""
    is_auto = "auto" in (config.param_tier, config.optimizer_tier)
    found = _divided(shape, config, machine, tokens) if is_auto else footprint(shape, config, machine, tokens)
    if found is None:
        return None
    step = step_of(shape, found, machine, tokens)
    if not machine.joined and found.updated.keys() - {"device"}:
        beside = step_of(shape, found, machine, tokens, overlap_step=True)
        if beside.seconds < _WORTH * step.seconds:
            step, found.config = beside, dataclasses.replace(found.config, overlap_step=True)
    return Option(found, found.missing(machine), step)


def _divided(shape: Shape, config: ZeroConfig, machine: Machine, tokens: int) -> Footprint | None:
    """With budgets that leave room for all that is not training state; None where there are none."""
    budgets = {tier: machine.capacity(tier) for tier in ("device", "host")}
    for _ in range(_TRIES):
        budgets = {tier: nbytes - nbytes % _SLACK for tier, nbytes in budgets.items()}  # what can be read
        if min(budgets.values()) <= 0:
            return None
        try:
            found = footprint(shape, dataclasses.replace(config, device_budget=budgets["device"], host_budget=budgets["host"]), machine, tokens)
        except ValueError:
            return None
        missing = found.missing(machine)
        if not missing.keys() & budgets.keys():
            return found
        for tier in missing.keys() & budgets.keys():
            budgets[tier] -= missing[tier] * 5 // 4 + _SLACK  # what leaves for the drive still has a copy of its parameters in the host
    return None


def largest(shape: Shape, config: ZeroConfig, machine: Machine, tokens: int) -> Shape | None:
    """The largest model of that shape that fits with this choice; None if no size does."""

    def fits(factor: float) -> bool:
        try:
            return not footprint(shape.grown(factor), config, machine, tokens).missing(machine)
        except ValueError:
            return False

    low, high = 1.0, 1.0
    if fits(1.0):
        while high < _LIMIT and fits(high * 2):
            high *= 2
        low, high = high, high * 2
    else:
        while not fits(low / 2):
            low /= 2
            if low < 1 / _LIMIT:
                return None
        low, high = low / 2, low
    while high / low > _PRECISION ** (1 / 3):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if fits(middle) else (low, middle)
    return shape.grown(low)


def plan(shape: Shape, machine: Machine, tokens: int, dtype: str = "bf16", state_dtype: str = "fp32", nvme_path: str = "/nvme") -> Plan:
    """Look at every choice."""
    every = list(configs(machine, dtype, state_dtype, nvme_path))
    options = [option for config in every if (option := consider(shape, config, machine, tokens)) is not None]
    fitting = [option for option in options if option.fits]
    # of those that are alike, as all stages are on one rank: parameters that are not moved, and the higher stage
    best = min(fitting, key=lambda option: (option.step.seconds, option.config.stage == 3, -option.config.stage), default=None)
    grown: dict[str, tuple[Shape, ZeroConfig]] = {}
    for name, config in _deepest(every):
        found = largest(shape, config, machine, tokens)
        if found is not None and (name not in grown or found.num_params > grown[name][0].num_params):
            grown[name] = found, config
    return Plan(shape, machine, tokens, options, best, grown)


def _deepest(every: list[ZeroConfig]) -> Iterator[tuple[str, ZeroConfig]]:
    """The choices that may hold the most within each memory: what stage 3 can do, and no other stage better."""
    for config in every:
        tiers = {config.param_tier, config.optimizer_tier}
        if config.stage == 3 and "auto" not in tiers:
            yield next(tier for tier in ("nvme", "host", "device") if tier in tiers), config


def shown(config: ZeroConfig) -> dict[str, Any]:
    """The fields that differ from the defaults, as they may be written."""
    given: dict[str, Any] = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if isinstance(value, torch.dtype):
            value = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}[value]
        if field.name.endswith("_budget") and isinstance(value, int):
            value = next((f"{value // size}{unit}" for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20)) if value % size == 0), value)
        if field.name == "nvme_path" and value is not None:
            value = value[0] if len(value) == 1 else list(value)
        if value != field.default or field.name == "stage":
            given[field.name] = value
    return given


def as_python(config: ZeroConfig) -> str:
    """The constructor call."""
    return f"zk.ZeroConfig({', '.join(f'{name}={value!r}' for name, value in shown(config).items())})"


def as_dict(found: Plan) -> dict[str, Any]:
    """All of it, as JSON can hold it."""

    def option(one: Option) -> dict[str, Any]:
        return {
            "config": shown(one.config),
            "fits": one.fits,
            "missing_nbytes": one.missing,
            "nbytes": {tier: one.found.on(tier) for tier in ("device", "host", "nvme")},
            "kinds": {f"{tier}_{kind}_nbytes": nbytes for (tier, kind), nbytes in sorted(one.found.sizes.items())},
            "step_s": one.step.seconds,
            "bound": one.step.bound,
            "busy_s": one.step.busy,
            "phases_s": one.step.phases,
        }

    return {
        "model": {"name": found.shape.name, "num_params": found.shape.num_params, "layers": found.shape.layers, "width": found.shape.width},
        "machine": dataclasses.asdict(found.machine),
        "tokens": found.tokens,
        "options": [option(one) for one in found.options],
        "recommended": None if found.best is None else {**option(found.best), "python": as_python(found.best.config)},
        "largest": {
            tier: {"num_params": shape.num_params, "layers": shape.layers, "width": shape.width, "config": shown(config)}
            for tier, (shape, config) in found.largest.items()
        },
    }
