"""Every choice of stage and tiers for a model on a machine, the fastest that fits, and the largest model."""

from __future__ import annotations

import contextlib
import dataclasses
from collections import defaultdict
from typing import Any

import torch
from torch import nn

from zk.config import ZeroConfig, changes
from zk.core.units import Unit
from zk.kernels.codec import state_fields
from zk.offload.streamed import best_share
from zk.tools.plan.footprint import CPU, Footprint, footprint_of
from zk.tools.plan.optimizers import check_optimizer, has_kernel, rules_of, shape_of_numel
from zk.tools.plan.shape import Shape, whole
from zk.tools.plan.speed import Machine, Step, step_of

# stage, tier of parameters, tier of the optimizer; the simplest first
_CHOICES = [(stage, "device", tier) for stage in range(4) for tier in ("device", "host", "nvme", "auto")]
_CHOICES += [(3, "host", "host"), (3, "host", "nvme"), (3, "nvme", "host"), (3, "nvme", "nvme"), (3, "auto", "auto")]
# how near the largest model is looked for: 2% of its parameters; and the most times the given model, in each of its proportions
_NEAR = 1.02 ** (1 / 3)
_LIMIT = 1e6
# an update in the background must be worth this much of the step to be recommended
_WORTH = 0.95
# how often budgets are made smaller, and by how much at least
_TRIES = 8
_SLACK = 1 << 20


@dataclasses.dataclass(frozen=True, slots=True)
class Option:
    """One choice of stage and tiers."""

    config: ZeroConfig
    found: Footprint
    missing: dict[str, int]  # memory -> bytes too few
    step: Step
    other: Step | None = None  # of several micro-batches: in the other order, slower
    vertical: bool = False  # ``step`` is that of ``accumulate``

    @property
    def fits(self) -> bool:
        return not self.missing


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    """The choices."""

    shape: Shape
    machine: Machine
    tokens: int
    micro_batches: int
    options: list[Option]
    best: Option | None  # the fastest that fits
    largest: dict[str, tuple[Shape, ZeroConfig]]  # device, host, nvme: with nothing beyond that tier
    update_on: str | float  # as was asked for


def footprint(shape: Shape, config: ZeroConfig, machine: Machine, tokens: int = 0, micro_batches: int = 1) -> Footprint:
    """Bytes of training ``shape`` with its optimizer on each rank, for ``tokens`` tokens of activations (none: 0), in micro-batches that go together.

    ``config`` names a dtype, and both budgets with "auto" tiers. Raises ValueError where the budgets do not do, as ZeroOptimizer does.
    """
    assert isinstance(config.dtype, torch.dtype) and config.computes is not None
    shape = shape.part(machine.tensor)
    model, units, blocks = nn.Module(), list[Unit](), defaultdict[Any, nn.Module](nn.Module)
    experts = config.stage == 3 and machine.shards == 1  # travel alone; over ranks those that are in use are there with their block
    matrices, others = list[nn.Parameter](), list[nn.Parameter]()
    for alike in shape.units:
        parts = (experts and alike.parts) or (dataclasses.replace(alike, count=1),)
        made, block = list[Unit](), blocks[alike.block, alike.count]
        for one in parts:
            shapes = one.shapes or [shape_of_numel(numel, shape.width) for numel in one.numels]
            params = [nn.Parameter(torch.empty(size, device="meta"), requires_grad=one.trained) for size in shapes]
            place = model if one.rest else block
            if made:
                block.expert = place = nn.Module()
            inside = [param for param in params if param.ndim == 2 and not one.rest and one.trained]
            outside = [param for param in params if param.ndim != 2 or one.rest or not one.trained]
            matrices += inside
            others += outside
            is_widened = one.dtype is None and config.compute_dtype is not None
            for together in (inside, outside) if shape.optimizer == "muon" else (params,):  # what others update travels apart
                unit = Unit("", [place], together, [], one.trained, one.dtype or config.dtype, CPU, is_widened=is_widened)
                made += [unit] * one.count * bool(together)
        units += made * alike.count
    rules, groups = rules_of(shape.optimizer, matrices, others)
    wide = config.grad_accum_dtype.itemsize // config.dtype.itemsize if micro_batches > 1 else 1  # type: ignore[union-attr]
    found = footprint_of(model, units, config, machine.shards, machine.joined, rules, groups, wide=wide)
    found.sizes["device", "scales"] = sum(one.count * one.beside_nbytes for one in shape.units)
    found.sizes["device", "dequantized"] = config.computes.itemsize * max((one.dequantized for one in shape.units), default=0)
    if machine.replicas > 1:  # the largest shard in fp32, its parts as they are sent and as they come, and the mean
        shard = max(unit.numel for unit in found.units) // machine.shards
        found.sizes["device", "replicas"] = shard * (3 * torch.float32.itemsize + config.dtype.itemsize)
    found.sizes = +found.sizes
    if tokens:
        size = config.computes.itemsize
        found.sizes["device", "activations"] = activations_nbytes(shape, tokens, size, micro_batches)
    return found


def activations_nbytes(shape: Shape, tokens: int, size: int = 2, micro_batches: int = 1) -> int:
    """Estimate activations: inputs of all blocks (checkpointing), and, of one micro-batch, a block that is computed again, and the logits.

    Inside a block: two norms, queries, keys, values, their mix and the output. Of its MLP, the tensors that backward needs and the gradients
    of its product or activation, three times what is inside. Attention keeps no matrix of scores. Of the logits: themselves, and their
    log-softmax and two gradients in fp32.
    """
    block = 8 * shape.width + 3 * shape.ffn
    return tokens * size * shape.width * shape.layers + -(-tokens // micro_batches) * (size * block + (size + 12) * shape.vocab)


def configs(
    machine: Machine,
    dtype: str | torch.dtype,
    state_dtype: str | torch.dtype,
    nvme_path: str,
    update_on: str | float = "auto",
    compute_dtype: str | torch.dtype | None = None,
    optimizer: str = "adamw",
) -> list[ZeroConfig]:
    """Every sensible choice, the simplest first. ``update_on``: of state that rests in other memory than a GPU's."""
    said: dict[str, Any] = {"elementwise": True} if optimizer == "lion" else {}  # torch has none
    ZeroConfig(optimizer_tier="host", update_on=update_on)  # which refuses another word, also where there is no GPU
    found = []
    for stage, param_tier, optimizer_tier in _CHOICES:
        tiers: Any = {"param_tier": param_tier, "optimizer_tier": optimizer_tier}
        if (machine.joined and ("auto" in tiers.values() or optimizer_tier == "device")) or ("nvme" in tiers.values() and not machine.nvme_nbytes):
            continue
        drive = nvme_path if machine.nvme_nbytes and {"nvme", "auto"} & set(tiers.values()) else None
        tiers |= {"update_on": update_on} if optimizer_tier != "device" and not machine.joined else {}
        if compute_dtype is None or stage == 3:
            found.append(
                ZeroConfig(
                    stage=stage,
                    dtype=dtype,
                    compute_dtype=compute_dtype,
                    state_dtype=state_dtype,
                    nvme_path=drive,
                    overlap_step="auto",
                    **tiers,
                    **said,
                )
            )
    return found


def consider(shape: Shape, config: ZeroConfig, machine: Machine, tokens: int, micro_batches: int = 1) -> Option | None:
    """One choice, with "auto" of ``overlap_step`` and ``update_on`` replaced by what is worth it. None if there is no room for "auto" tiers."""
    if config.update_on != "auto" or machine.joined:
        return as_given(shape, config, machine, tokens, micro_batches)
    by_host = as_given(shape, dataclasses.replace(config, update_on="host"), machine, tokens, micro_batches)
    if not by_host or config.optimizer_tier == "device":
        return by_host
    assert isinstance(config.dtype, torch.dtype) and isinstance(config.state_dtype, torch.dtype)
    kept, size = state_fields(config.dtype, ("exp_avg", "exp_avg_sq"), config.state_dtype, True).values(), config.dtype.itemsize
    share = best_share(machine.update_rates, sum(dtype.itemsize for dtype in kept), size, config.param_tier in ("device", "auto"))
    split = as_given(shape, dataclasses.replace(config, update_on=share), machine, tokens, micro_batches) if share else None
    if not split or split.fits < by_host.fits or split.step.seconds > _WORTH * by_host.step.seconds:
        return by_host
    return split


def as_given(shape: Shape, config: ZeroConfig, machine: Machine, tokens: int, micro_batches: int = 1) -> Option | None:
    """One choice, with the update on the side that ``config`` says. None if "auto" tiers find no room."""
    if "auto" in (config.param_tier, config.optimizer_tier):
        divided = _divided(shape, config, machine, tokens, micro_batches)
        if not divided:
            return None
        config, found = divided
    else:
        found = footprint(shape, config, machine, tokens, micro_batches)

    # overlap_step, bytes, and the part of updates that can begin in backward
    ways: list[tuple[bool | str, Footprint, float]] = [(config.overlap_step, found, 1.0)]
    if config.overlap_step == "auto":
        ways = [(False, found, 0.0)]
        if not machine.joined and found.sizes["host", "grad"] + found.sizes["nvme", "grad"]:
            ways.append((True, found, 0.0))
            ways.append(("backward", *_with_shadows(shape, config, machine, tokens, micro_batches)))

    def best(vertical: bool) -> Option:
        chosen, *others = (
            Option(
                dataclasses.replace(config, overlap_step=overlap_step),
                sizes,
                machine.lacks(sizes),
                step_of(shape, sizes, config, machine, tokens, overlap_step, micro_batches, vertical, shadows),
                vertical=vertical,
            )
            for overlap_step, sizes, shadows in ways
        )
        for other in others:
            if other.step.seconds <= _WORTH * chosen.step.seconds and len(other.missing) <= len(chosen.missing):  # worth it
                chosen = other
        return chosen

    orders = [best(vertical) for vertical in ((False, True) if micro_batches > 1 else (False,))]
    first, *slower = sorted(orders, key=lambda order: order.step.seconds)
    return dataclasses.replace(first, other=slower[0].step if slower else None)


def _with_shadows(shape: Shape, config: ZeroConfig, machine: Machine, tokens: int, micro_batches: int) -> tuple[Footprint, float]:
    """Bytes with ``overlap_step="backward"``, and the part of the updates that there are shadows for.

    They take half of the host memory that is left, as without a budget, or all that a budget leaves.
    """
    found = footprint(shape, dataclasses.replace(config, overlap_step="backward"), machine, tokens, micro_batches)
    whole = found.sizes["host", "shadow"]
    room = max(0, machine.capacity("host") - found.on("host") + whole) // (2 if config.host_budget is None else 1)
    found.sizes["host", "shadow"] = min(whole, room)
    return found, found.sizes["host", "shadow"] / whole if whole else 1.0


def _divided(shape: Shape, config: ZeroConfig, machine: Machine, tokens: int, micro_batches: int) -> tuple[ZeroConfig, Footprint] | None:
    """With budgets that leave room for all that is not training state; None where there are none."""
    room = {tier: machine.capacity(tier) for tier in ("device", "host")}
    with contextlib.suppress(ValueError):  # no room is left
        for _ in range(_TRIES):
            room = {tier: nbytes // _SLACK * _SLACK for tier, nbytes in room.items()}  # what can be read
            config = dataclasses.replace(config, device_budget=room["device"], host_budget=room["host"])
            found = footprint(shape, config, machine, tokens, micro_batches)
            over = {tier: nbytes for tier, nbytes in machine.lacks(found).items() if tier in room}
            if not over:
                return config, found
            for tier, nbytes in over.items():
                room[tier] -= nbytes * 5 // 4 + _SLACK  # what leaves for the drive still has a copy of its parameters in the host
    return None


def largest(shape: Shape, config: ZeroConfig, machine: Machine, tokens: int, micro_batches: int = 1) -> Shape | None:
    """The largest model of that shape that fits with this choice; None if no size does."""

    def fits(factor: float) -> bool:
        try:
            return not machine.lacks(footprint(shape.grown(factor), config, machine, tokens, micro_batches))
        except ValueError:
            return False

    low = 1.0
    while low < _LIMIT and fits(2 * low):
        low *= 2
    while not fits(low):
        low /= 2
        if low < 1 / _LIMIT:
            return None
    high = 2 * low
    while high / low > _NEAR:
        middle = (low * high) ** 0.5
        low, high = (middle, high) if fits(middle) else (low, middle)
    return shape.grown(low)


def plan(
    shape: Shape,
    machine: Machine,
    tokens: int,
    dtype: str = "bf16",
    state_dtype: str = "fp32",
    nvme_path: str = "/nvme",
    micro_batches: int = 1,
    update_on: str | float = "auto",
    compute_dtype: str | None = None,
) -> Plan:
    """Look at every choice. ValueError where ranks, or the model, or tokens, cannot be divided as is asked for."""
    _check_division(shape, machine)
    check_optimizer(shape.optimizer, ZeroConfig(state_dtype=state_dtype).state_dtype, update_on)
    if not has_kernel(shape.optimizer):
        update_on = "host"
    if tokens % micro_batches:
        raise ValueError(f"--accumulate must divide --tokens, those of a step; {tokens} is not divided by {micro_batches}")
    every = configs(machine, dtype, state_dtype, nvme_path, update_on, compute_dtype, shape.optimizer)
    options = [option for config in every if (option := consider(shape, config, machine, tokens, micro_batches))]
    fitting = (option for option in options if option.fits)
    # of those that are alike, as all stages are on one rank: parameters that are not moved, and the higher stage
    best = min(fitting, key=lambda option: (option.step.seconds, option.config.stage == 3, -option.config.stage), default=None)
    most: dict[str, tuple[Shape, ZeroConfig]] = {}
    for config in every:
        tiers = {config.param_tier, config.optimizer_tier}
        if config.stage != 3 or "auto" in tiers:
            continue  # which no other stage is better than
        name = next(tier for tier in ("nvme", "host", "device") if tier in tiers)
        found = largest(shape, config, machine, tokens, micro_batches)
        if found and (name not in most or found.num_params > most[name][0].num_params):
            most[name] = found, config
    return Plan(shape, machine, tokens, micro_batches, options, best, most, update_on)


def faster(found: Plan) -> dict[str, float]:
    """Changes that make the best step at least a tenth shorter, with its seconds then: bf16 moments, twice the RAM, a drive that is twice as fast."""
    assert found.best
    config, machine = found.best.config, found.machine
    assert isinstance(config.dtype, torch.dtype)
    path = str(config.nvme_path[0]) if config.nvme_path else "/nvme"  # type: ignore[index]
    gib = machine.ram_nbytes / 2**30
    changed = {
        'state_dtype="bf16"': (machine, torch.bfloat16 if has_kernel(found.shape.optimizer) else config.state_dtype),
        f"{gib:.0f} GiB more RAM": (dataclasses.replace(machine, ram_nbytes=2 * machine.ram_nbytes), config.state_dtype),
        "a drive twice as fast": (dataclasses.replace(machine, disk_gbps=2 * machine.disk_gbps), config.state_dtype),
    }
    helps: dict[str, float] = {}
    for what, (where, state) in changed.items():
        every = configs(where, config.dtype, state, path, found.update_on, config.compute_dtype, found.shape.optimizer)
        options = (consider(found.shape, one, where, found.tokens, found.micro_batches) for one in every)
        shortest = min((option.step.seconds for option in options if option and option.fits), default=found.best.step.seconds)
        if shortest < 0.9 * found.best.step.seconds:
            helps[what] = shortest
    return helps


def _check_division(shape: Shape, machine: Machine) -> None:
    if machine.world % (machine.tensor * machine.replicas):
        raise ValueError(
            f"--tensor {machine.tensor} times --replicate {machine.replicas} must divide the ranks; --world is {machine.world}, so take a multiple "
            f"of {machine.tensor * machine.replicas}"
        )
    if machine.replicas > 1 and machine.shards == 1:
        raise ValueError(
            f"--replicate {machine.replicas} leaves one rank to each replica, and nothing would be partitioned; --world must be at least twice "
            f"--tensor times --replicate, {2 * machine.tensor * machine.replicas}, or leave --replicate out"
        )
    if machine.tensor == 1:
        return
    if shape.decoder is None or shape.divided is not whole:
        raise ValueError(
            f"--tensor cuts gpt:SIZE, moe:SIZE or a config.json, without --adapters; {shape.name!r} is none: give a module:factory that builds the "
            "part of one tensor parallel rank, and in --world the ranks that have the same part"
        )
    for name in ("heads", "kv_heads", "ffn"):
        if getattr(shape.decoder, name) % machine.tensor:
            raise ValueError(
                f"--tensor must divide the model's {name}; {shape.name!r} has {getattr(shape.decoder, name)}, and --tensor is {machine.tensor} "
                "(sizes that can be divided: gpt:layers=96,width=12288,heads=96)"
            )


def shown(config: ZeroConfig) -> dict[str, Any]:
    """The stage, and the fields that differ from the defaults, as they may be written."""
    return {"stage": config.stage, **changes(config, ZeroConfig())}


def as_python(config: ZeroConfig) -> str:
    """The constructor call."""
    return f"zk.ZeroConfig({', '.join(f'{name}={value!r}' for name, value in shown(config).items())})"


def as_dict(found: Plan) -> dict[str, Any]:
    """All of it, as JSON can hold it."""

    def model(shape: Shape) -> dict[str, Any]:
        return {name: getattr(shape, name) for name in ("num_params", "num_active", "num_trained", "layers", "width")}

    def option(one: Option) -> dict[str, Any]:
        return {
            "config": shown(one.config),
            "fits": one.fits,
            "missing_nbytes": one.missing,
            "nbytes": {tier: one.found.on(tier) for tier in ("device", "host", "nvme")},
            "kinds": {f"{tier}_{kind}_nbytes": nbytes for (tier, kind), nbytes in sorted(one.found.sizes.items()) if nbytes},
            "step_s": one.step.seconds,
            "of_no_offload": one.step.of_no_offload,
            "bound": one.step.bound,
            "busy_s": one.step.busy,
            "phases_s": one.step.phases,
            "sent_nbytes": one.step.sent,
            "moved_nbytes": one.step.moved,
            "vertical": one.vertical,
            "other_order": one.other and {"step_s": one.other.seconds, "bound": one.other.bound, "moved_nbytes": one.other.moved},
        }

    return {
        "model": {"name": found.shape.name, **model(found.shape)},
        "optimizer": found.shape.optimizer,
        "machine": dataclasses.asdict(found.machine),
        "tokens": found.tokens,
        "micro_batches": found.micro_batches,
        "options": [option(one) for one in found.options],
        "recommended": found.best and {**option(found.best), "python": as_python(found.best.config)},
        "largest": {tier: {**model(shape), "config": shown(config)} for tier, (shape, config) in found.largest.items()},
    }
