"""`zk plan`: memory and step time of a model on a machine, before training.

Bytes come from the optimizer's own arithmetic, for the model's units without memory. Times come
from a formula at published rates; they are not measured.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import textwrap
from collections import Counter
from collections.abc import Iterator
from typing import Annotated, Any, NamedTuple

import torch
import typer
from torch import nn

from zk.config import ZeroConfig, changes
from zk.core.checks import check_state_dtype
from zk.core.fit import Footprint, footprint_of
from zk.core.precision import stored_dtypes
from zk.core.units import find_units
from zk.offload.rules import rule_for
from zk.tools.models import CARDS, GIB, Machine, model_of

NAMES = {"device": "GPU", "host": "host", "nvme": "drive"}
TOKENS = (16384, 8192, 4096, 2048, 1024, 512)  # of a step, tried in this order
OPTIMIZERS = {"adamw": "AdamW", "sgd": "SGD", "adafactor": "Adafactor"}  # SGD with momentum
SIZES = [gib for power in range(4, 13) for gib in (1 << power, 3 << power - 1)]  # that are tried
_MODEL = "gpt:10b, llama:8b, a hub name, a config.json, or module:factory."
_GPU = f"Memory of each GPU (24GiB), or {', '.join(CARDS)}, or none. Default: this machine's."
_TOKENS = f"Tokens of a step on each rank. Default: as many as fit, up to {TOKENS[0]}."
_KINDS = {
    "parameters": ("param",), "gradients": ("grad",), "lower half of fp32 masters": ("master",),
    "optimizer state": ("moments",), "parameter copies to update": ("param_copy",),
    "parameters in use": ("gathered",), "gradients in flight": ("bucket", "fresh"),
    "buffers": ("buffer", "spare", "shadow"), "activations (estimate)": ("activations",),
    "logits (estimate)": ("logits",),
}


@functools.lru_cache(8)
def sizes_of(model: nn.Module) -> dict[str, int]:
    """Blocks, their width, what an MLP makes of a token, vocabulary, and numbers of parameters."""
    numels = {param: param.numel() for param in model.parameters()}
    units = find_units(model, dict.fromkeys(numels, 0))
    shapes = Counter(tuple(sorted(tuple(param.shape) for param in unit.params)) for unit in units)
    block, blocks = shapes.most_common(1)[0]
    sides = Counter(side for shape in block if len(shape) == 2 for side in shape)
    tables = [tuple(one.weight.shape) for one in model.modules() if isinstance(one, nn.Embedding)]
    vocab, width = max(tables, default=(0, max(sides, key=lambda side: sides[side], default=0)))
    inner = max((side for side in sides if side != width), default=width)
    inner *= max(1, sides[inner] - 1)  # the last layer of an MLP makes the width of it
    trained = sum(numel for param, numel in numels.items() if param.requires_grad)
    found = {"numel": sum(numels.values()), "trained": trained, "largest": max(numels.values())}
    return found | {"blocks": blocks, "width": width, "inner": inner, "vocab": vocab}


@functools.lru_cache(8)
def units_of(model: nn.Module, dtype: torch.dtype, experts: bool, optimizer: str) -> Any:
    """Units, of which alike ones are one object, then rules and groups of the optimizer."""
    params = [param for param in model.parameters() if param.requires_grad]
    momentum = {"momentum": 0.9} if optimizer == "sgd" else {}
    made = getattr(torch.optim, OPTIMIZERS[optimizer])(params, **momentum)
    trained = {param: 0 for group in made.param_groups for param in group["params"]}
    units = find_units(model, trained, stored_dtypes(model, dtype), experts=experts)
    firsts: dict[Any, Any] = {}
    for place, unit in enumerate(units):
        alike = unit.trained, unit.dtype, unit.anchors[0] is model
        units[place] = firsts.setdefault((alike, *(param.shape for param in unit.params)), unit)
    return units, [rule_for(made)], made.param_groups


class Row(NamedTuple):
    """One choice of stage and tiers, with the bytes of a rank."""

    config: ZeroConfig
    found: Footprint
    missing: dict[str, int]  # memory -> bytes too few
    seconds: float  # of a step
    bound: str  # the resource that takes most of them


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """A model, a machine, and how the one is to be trained on the other."""

    name: str
    model: nn.Module
    machine: Machine
    tokens: int | None = None  # of a step on a rank; None: as many as fit
    dtype: str = "bf16"
    optimizer: str = "adamw"
    state_dtype: str = "fp32"

    def bytes(self, config: ZeroConfig, tokens: int) -> Footprint:
        """Bytes of one rank by tier and kind. ValueError for options that do not go together.

        Activations are an estimate, with every block checkpointed: the inputs of all blocks, and of
        one block its tensors and their gradients. Logits are there in ``dtype``, and three times in
        fp32: their log-softmax and two gradients.
        """
        assert isinstance(config.dtype, torch.dtype)
        units, rules, groups = units_of(self.model, config.dtype, config.stage == 3, self.optimizer)
        if config.state_dtype != torch.float32:
            check_state_dtype(config.state_dtype, rules, groups, {})
        where = self.machine.world, self.machine.gpu_nbytes is None
        found = footprint_of(self.model, units, config, *where, rules, groups)
        size, sizes = config.dtype.itemsize, sizes_of(self.model)
        block = sizes["width"] * (sizes["blocks"] + 8) + 3 * sizes["inner"]
        found.sizes["device", "activations"] = tokens * size * block
        found.sizes["device", "logits"] = tokens * (size + 12) * sizes["vocab"]
        return found

    def row(self, config: ZeroConfig, tokens: int) -> Row | None:
        """One choice. "auto" tiers get the largest budgets that fit, in GiB; None if none do."""
        if config.optimizer_tier != "auto":
            return self._row(config, tokens)
        grain = GIB if self.machine.capacity("device") > 4 * GIB else 1 << 20
        room = {name: self.machine.capacity(name) // grain for name in ("device", "host")}
        while min(room.values()) > 0:
            budgets: Any = {f"{name}_budget": count * grain for name, count in room.items()}
            try:
                row = self._row(dataclasses.replace(config, **budgets), tokens)
            except ValueError:  # the budgets are too small
                break
            if not row.missing:
                return row
            less = {name: -(-row.missing.get(name, 0) // grain) for name in room}
            room = {name: room[name] - (less[name] or "nvme" in row.missing) for name in room}
        return None

    def _row(self, config: ZeroConfig, tokens: int) -> Row:
        found = self.bytes(config, tokens)
        over = {name: found.on(name) - self.machine.capacity(name) for name in NAMES}
        return Row(config, found, +Counter(over), *step_of(self, config, found, tokens))

    def choices(self) -> Iterator[ZeroConfig]:
        """Every sensible stage and tiers, the simplest first."""
        has_gpu, has_drive = self.machine.gpu_nbytes is not None, self.machine.nvme_nbytes > 0
        stages = (0, 1, 2, 3) if self.machine.world > 1 else (2,)
        tiers = [(stage, "device", tier) for stage in stages for tier in (*NAMES, "auto")]
        pairs = (("host", "host"), ("host", "nvme"), ("nvme", "nvme"), ("auto", "auto"))
        tiers += [(3, *pair) for pair in pairs]
        for stage, param, state in tiers:
            if (not has_gpu and state in ("device", "auto")) or (not has_drive and state == "nvme"):
                continue
            fields: dict[str, Any] = {"stage": stage, "param_tier": param, "optimizer_tier": state}
            fields |= {"dtype": self.dtype, "state_dtype": self.state_dtype}
            if has_drive and state in ("nvme", "auto"):
                fields["nvme_path"] = "/path/on/the/drive"
            away = has_gpu and state != "device"
            yield ZeroConfig(**fields, overlap_step=away)
            if away and state != "nvme" and self.optimizer == "adamw":
                yield ZeroConfig(**fields, overlap_step=True, update_on="device")

    def rows(self, tokens: int) -> list[Row]:
        """All choices, each with the update on the side that fits and is faster."""
        found: dict[Any, Row] = {}
        for row in filter(None, (self.row(config, tokens) for config in self.choices())):
            key = row.config.stage, row.config.param_tier, row.config.optimizer_tier
            other = found.setdefault(key, row)
            if (len(row.missing), row.seconds) < (len(other.missing), 0.95 * other.seconds):
                found[key] = row
        return list(found.values())

    def answer(self) -> Answer:
        """All choices for ``tokens``, or for as many as fit."""
        for tokens in (self.tokens,) if self.tokens else TOKENS:
            rows = self.rows(tokens)
            fitting = [row for row in rows if not row.missing]
            if fitting:
                break
        fastest = min((row.seconds for row in fitting), default=0.0)
        best = next((row for row in fitting if row.seconds <= 1.03 * fastest), None)
        return Answer(self, tokens, rows, best)

    def changed(self) -> Iterator[tuple[str, Answer]]:
        """Single options with which something fits, of each kind the smallest change."""
        tried: dict[str, list[Any]] = {
            "tokens": [count for k in range(7, 0, -1) if (count := (self.tokens or 0) * k // 8)],
            "state_dtype": ["bf16", "8bit"] * (self.optimizer == "adamw"),
            "nvme_nbytes": [GIB * gib for gib in SIZES[6:]],
            "ram_nbytes": [GIB * gib for gib in SIZES],
            "gpu_nbytes": [GIB * gib for gib in (16, 24, 32, 48, 80, 141)],
            "world": [2, 4, 8, 16, 32, 64],
        }
        for field, values in tried.items():
            now = getattr(self.machine, field, 0)
            for value in values if now is not None else ():  # no GPU
                change: dict[str, Any] = {field: value}
                if hasattr(self.machine, field):
                    change = {"machine": dataclasses.replace(self.machine, **change)}
                answer = dataclasses.replace(self, **change).answer()
                if answer.best and (not now or value > now):
                    option = f"--{field.removesuffix('_nbytes').replace('_', '-')}"
                    yield f"{option} {f'{value // GIB}GiB' if 'nbytes' in field else value}", answer
                    break


class Answer(NamedTuple):
    """All choices for a number of tokens, and the simplest of the fastest that fit."""

    plan: Plan
    tokens: int
    rows: list[Row]
    best: Row | None

    def price(self, row: Row) -> tuple[str, str]:
        """Seconds of a step, and tokens per second of all ranks."""
        seconds = f"{row.seconds:,.{2 if row.seconds < 100 else 0}f} s"
        return seconds, f"{self.tokens * self.plan.machine.world / row.seconds:,.0f}"


def step_of(plan: Plan, config: ZeroConfig, found: Footprint, tokens: int) -> tuple[float, str]:
    """Seconds of a step, and the resource that most of them are spent on.

    Compute takes 8 operations for each parameter and token: 2 in forward, 4 in backward, and 2 for
    blocks that are computed again. The update waits for the norm of all gradients: the next forward
    alone can hide it, with ``overlap_step``. In each phase the busiest resource decides.
    """
    machine, on, size = plan.machine, found.on, config.dtype.itemsize  # type: ignore[union-attr]
    numel, trained = (sizes_of(plan.model)[name] for name in ("numel", "trained"))
    compute = (6 * numel + 2 * trained) * tokens / machine.tflops / 1e12
    grads = {name: on(name, "grad") for name in ("host", "nvme")}
    state = {name: on(name, "master") + on(name, "moments") for name in grads}
    apart, streams = machine.gpu_nbytes is not None, config.update_on == "device"
    away, kept, param = sum(grads.values()), sum(state.values()), on("nvme", "param")
    fetched = (found.sizes["host", "param"] + param) * apart
    # the CPU reads and writes state and parameters, reads gradients, and copies of the last two
    # cross the link; copies read and write state that the GPU updates, or that rests on a drive
    dram = (2 * (kept + away) if streams else 2 * kept + 5 * away) + 2 * state["nvme"]
    others = size * (machine.world - 1) / machine.world  # bytes of an element that other ranks send
    gathered = numel * others * (config.stage == 3)
    link, here = 1e9 * machine.link_gbps, min(machine.world, 8)
    read, written = 1e9 * machine.read_gbps / here, 1e9 * machine.written_gbps / here
    backward = {
        "compute": 0.75 * compute,
        "the link": max(fetched, away * apart) / link,
        "the drive": param / read + grads["nvme"] / written,
        "the other ranks": (gathered + trained * others * (2 - (config.stage > 0))) / link,
    }
    forward = {
        "compute": 0.25 * compute,
        "the link": fetched / link,
        "the drive": param / read,
        "the other ranks": gathered / link,
    }
    update = {
        "the CPU update": dram * here / 1e9 / machine.dram_gbps,
        "the link": (kept + away) * streams / link,
        "the drive": (state["nvme"] + grads["nvme"]) / read + (state["nvme"] + param) / written,
        "the other ranks": trained * others * (config.stage in (1, 2)) / link,
    }
    beside = {name: forward.get(name, 0) + update.get(name, 0) for name in {**forward, **update}}
    phases = (backward, beside) if config.overlap_step else (backward, forward, update)
    slowest = [max((phase[name], name) for name in phase) for phase in phases]
    return sum(seconds for seconds, _ in slowest), max(slowest)[1]


def deepspeed_nbytes(plan: Plan, config: ZeroConfig) -> tuple[float, float]:
    """GPU and host bytes by DeepSpeed 0.19's ``estimate_zero{2,3}_model_states_mem_needs``."""
    total, largest = (sizes_of(plan.model)[name] for name in ("numel", "largest"))
    ranks, here = plan.machine.world, min(plan.machine.world, 8)
    is_off, params_too = config.optimizer_tier != "device", config.param_tier != "device"
    if config.stage < 3:
        gpu = 2 * total + (0 if is_off else 18 * total / ranks)
        return gpu, 1.5 * total * (max(4 * ranks, 16) if is_off else 4 * here)
    if is_off:
        gpu = 4 * largest + (0 if params_too else 2 * total / ranks)
        return gpu, 1.5 * (18 if params_too else 16) * total / -(-ranks // here)
    return 4 * largest + 18 * total / ranks, 6 * largest * here


def _gib(nbytes: float) -> str:
    return f"{nbytes / GIB:,.1f}" if nbytes else ""


def as_dict(row: Row) -> dict[str, Any]:
    """A row as JSON can hold it."""
    fields = {"stage": row.config.stage, **changes(row.config, ZeroConfig())}
    nbytes = {f"{memory}_{kind}_nbytes": n for (memory, kind), n in row.found.sizes.items() if n}
    missing = {f"{memory}_missing_nbytes": n for memory, n in row.missing.items()}
    return {"config": fields, "step_s": row.seconds, "bound": row.bound, **missing, **nbytes}


def table(answer: Answer) -> Iterator[str]:
    """The choices, with the bytes of a rank in GiB."""
    yield "stage params optimizer update     GPU    host   drive fits         step tokens/s"
    for row in answer.rows:
        stage, tier = f"{row.config.stage}{'*' * (row is answer.best)}", row.config.optimizer_tier
        side = "GPU" if "device" in (row.config.update_on, tier) else "CPU"
        cells = f"{stage:5} {row.config.param_tier:6} {tier:9} {side:6}"
        cells += "".join(f"{_gib(row.found.on(name)):>8}" for name in NAMES)
        lacks = ", ".join(f"-{_gib(nbytes)} {NAMES[name]}" for name, nbytes in row.missing.items())
        yield f"{cells} {lacks or 'yes {:>13} {:>8}'.format(*answer.price(row))}"


def recommended(answer: Answer, row: Row) -> Iterator[str]:
    """What to write for a row."""
    fields, name = as_dict(row)["config"], answer.plan.optimizer
    made = f"torch.optim.{OPTIMIZERS[name]}(model.parameters(){', momentum=0.9' * (name == 'sgd')})"
    options = [f"{field}={json.dumps(fields[field])}".replace("true", "True") for field in fields]
    seconds, rate = answer.price(row)
    yield f"\n* Recommended: {seconds} a step, {rate} tokens/s, bound by {row.bound}\n\nIn a loop:\n"
    yield ",\n    ".join(["optimizer = zk.ZeroOptimizer(\n    model", made, *options]) + ",\n)"
    yield "\nFor ZeroTrainer(zero=...):\n"
    yield from textwrap.wrap(json.dumps(fields), 79, break_on_hyphens=False)


def report(answer: Answer) -> Iterator[str]:
    """The answer, in lines of 80 columns."""
    plan, tokens, rows, best = answer
    machine, sizes, world = plan.machine, sizes_of(plan.model), plan.machine.world
    nearest = best or min(rows, key=lambda row: sum(row.missing.values()))
    yield f"{plan.name}: {sizes['numel'] / 1e9:.3g}B parameters, {sizes['blocks']} blocks"
    memory = {"GPU": machine.gpu_nbytes, "RAM": machine.ram_nbytes, "drive": machine.nvme_nbytes}
    there = ", ".join(f"{_gib(nbytes)} GiB of {name}" for name, nbytes in memory.items() if nbytes)
    yield there + f", {world} ranks, {min(world, 8)} of them on a machine" * (world > 1)
    most = " (the most that fits)" * (not plan.tokens and best is not None and tokens < TOKENS[0])
    yield f"{tokens:,} tokens a step{most}; 92% of GPU and 90% of RAM may be used\n"
    yield from table(answer)
    if best:
        yield from recommended(answer, best)
    else:
        lacks = [f"{_gib(n)} GiB of {NAMES[name]} memory" for name, n in nearest.missing.items()]
        yield f"\nNothing fits. The nearest choice lacks {' and '.join(lacks)}.\nWhat would fit:"
        for option, its in list(plan.changed()) or dataclasses.replace(plan, tokens=None).changed():
            seconds, rate = its.price(its.best)  # type: ignore[arg-type]
            yield f"  {option:18} {seconds} a step of {its.tokens:,} tokens, {rate} tokens/s"
    yield f"\n{'GiB on each rank':30}" + "".join(f"{name:>8}" for name in NAMES.values())
    for words, kinds in _KINDS.items():
        cells = [sum(nearest.found.sizes[name, kind] for kind in kinds) for name in NAMES]
        if any(cells):
            yield (f"{words:30}" + "".join(f"{_gib(nbytes):>8}" for nbytes in cells)).rstrip()
    logits = nearest.found.sizes["device", "logits"]
    if logits > 0.2 * machine.capacity("device" if machine.gpu_nbytes else "host"):
        words = f"{sizes['vocab']:,} words"
        yield f"\nLogits of {words} take {_gib(logits)} GiB; a fused loss takes none."
    if machine.gpu_nbytes and plan.optimizer == "adamw" and sizes["trained"] == sizes["numel"]:
        gpu, ram = map(_gib, deepspeed_nbytes(plan, nearest.config))
        ours = " and ".join(_gib(nearest.found.on(name)) or "0" for name in ("device", "host"))
        yield f"\nDeepSpeed's estimator: {gpu} GiB of GPU, {ram} of RAM; zk: {ours}."
    yield "\nTimes are estimates from published rates, not measured:"
    yield f"{machine.tflops:.3g} TFLOP/s ({machine.source}),"
    disk = f"drive {machine.read_gbps:g} and {machine.written_gbps:g}"
    yield f"GB/s: link {machine.link_gbps:g}, RAM {machine.dram_gbps:g} (16 cores), {disk}"


def plan(
    model: Annotated[str, typer.Argument(metavar="MODEL", help=_MODEL)],
    gpu: Annotated[str | None, typer.Option(help=_GPU)] = None,
    ram: Annotated[str | None, typer.Option(help="Memory of a machine (128GiB).")] = None,
    nvme: Annotated[str, typer.Option(help="Room on a machine's drive (1TiB).")] = "none",
    world: Annotated[int, typer.Option(min=1, help="Ranks. Up to 8 share a machine.")] = 1,
    tokens: Annotated[int | None, typer.Option(min=1, help=_TOKENS)] = None,
    dtype: Annotated[str, typer.Option(help="bf16, fp16 or fp32.")] = "bf16",
    optimizer: Annotated[str, typer.Option(help=f"{', '.join(OPTIMIZERS)}.")] = "adamw",
    state_dtype: Annotated[str, typer.Option(help="AdamW's moments: fp32, bf16, 8bit.")] = "fp32",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Estimate memory and step time of a model before training. Exit code 1: nothing fits."""
    if optimizer not in OPTIMIZERS:
        raise ValueError(f"--optimizer must be one of {', '.join(OPTIMIZERS)}; got {optimizer!r}")
    how: Any = {"dtype": dtype, "optimizer": optimizer, "state_dtype": state_dtype}
    machine = Machine.of(gpu, ram, nvme, world)
    what: Any = {"name": model, "model": model_of(model), "machine": machine, "tokens": tokens}
    answer = Plan(**what, **how).answer()
    found = {"model": model, **sizes_of(answer.plan.model), "tokens": answer.tokens}
    found |= {"rows": list(map(as_dict, answer.rows))}
    found |= {"recommended": answer.best and as_dict(answer.best)}
    typer.echo("\n".join([json.dumps(found, indent=1)] if as_json else report(answer)))
    raise typer.Exit(0 if answer.best else 1)
