"""`zk plan`: memory and step time of a model on a machine, before training with AdamW."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import itertools
import json
import re
import sys
import textwrap
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import typer
from torch import nn

from zk.addons.state_dtype import StateDtype
from zk.config import ZeroConfig, parse_nbytes
from zk.memory import host_memory
from zk.nn.deferred import deferred_init
from zk.offload.rules import AdamRule
from zk.placement import Placement, Size
from zk.precision import dtypes_of
from zk.tools.gpt import GPT, config_of
from zk.tools.summary import changes, count
from zk.unit import Unit, blocks_of, find_units

GIB = 1 << 30
NAMES = {"device": "GPU", "host": "host", "nvme": "drive"}
TOKENS = (16384, 8192, 4096, 2048, 1024, 512)  # of a step, tried in this order
_RESOURCES = ("compute", "the link", "the drive", "other ranks", "the CPU update")
# the share that training may take; the rest is for the system and fragmentation
USABLE = {"device": 0.92, "host": 0.9, "nvme": 1.0}
PRICES = {"device": 1000, "host": 50, "nvme": 1}  # of a byte, about, in those of a drive
# published: GiB, dense bf16 TFLOP/s, and GB/s of the link each way, as copies reach it
CARDS = {"3090": (24, 71, 25), "4090": (24, 165, 25), "a100": (80, 312, 25)}
CARDS |= {"h100": (80, 989, 50), "h200": (141, 989, 50)}
# width, blocks, heads, key heads, widths of head and MLP, vocabulary, tied; first: the default
_TABLE = """
llama3:8b 4096 32 32 8 128 14336 128256 0; llama3:1b 2048 16 32 8 64 8192 128256 1
llama3:3b 3072 28 24 8 128 8192 128256 1; llama3:70b 8192 80 64 8 128 28672 128256 0
llama2:7b 4096 32 32 32 128 11008 32000 0; mistral:7b 4096 32 32 8 128 14336 32768 0
qwen2.5:7b 3584 28 28 4 128 18944 152064 0; qwen3:8b 4096 36 32 8 128 12288 151936 0
llama2:13b 5120 40 40 40 128 13824 32000 0; qwen2.5:32b 5120 64 40 8 128 27648 152064 0
"""
_ROWS = {name: row for name, *row in map(str.split, re.split("[;\n]", _TABLE.strip()))}
# family, version and size of llama:8b, meta-llama/Llama-3.1-8B-Instruct, qwen2.5:7b
_NAME = r"(?:.*/)?(?:meta-)?([a-z]+)-?(\d(?:\.5)?)?(?:\.\d)?(?:[-:](\d+(?:\.\d+)?b)\b.*)?"


def model_of(spec: str) -> nn.Module:
    """The model, without memory, of a name (of the hub, too), a config.json, or a factory."""
    if spec.lower().startswith("gpt:"):
        sizes = config_of(spec, 1024)
        if sizes.layers > 500:
            raise ValueError(f"gpt: has at most 20,000b parameters; got {spec!r}; give gpt:10b")
        with torch.device("meta"):
            return GPT(sizes)
    name = re.fullmatch(_NAME, spec.lower())
    family, version, size = name.groups() if name else ("", "", "")
    known = re.compile(f"{family}{version or '[23]?'}:{size or '.*'}")
    for row in filter(known.fullmatch, _ROWS):
        return _decoder(*_ROWS[row])
    try:
        return _found(spec)
    except Exception as error:  # a factory can raise anything
        said = textwrap.shorten(f"{type(error).__name__}: {error}", 300)
    raise ValueError(
        f"No model can be made of {spec!r} ({said}). A model is gpt:SIZE (gpt:10b), a config.json, "
        "a name in the local cache of the hub, module:factory (a function without arguments that "
        f"returns an nn.Module), or one of {', '.join(_ROWS)}"
    )


def _found(spec: str) -> nn.Module:
    """The model, without memory, of transformers or a factory. They raise what they raise."""
    if Path(spec).exists() or re.fullmatch(r"[\w.-]+/[\w.-]+", spec):
        import transformers

        config = transformers.AutoConfig.from_pretrained(spec, local_files_only=True)
        with torch.device("meta"):
            return transformers.AutoModelForCausalLM.from_config(config)  # type: ignore
    module, _, path = spec.partition(":")
    sys.path.insert(0, "")  # the folder that the command runs in
    factory: Any = functools.reduce(getattr, path.split("."), importlib.import_module(module))
    with deferred_init("cpu"):
        made = factory()
    if not isinstance(made, nn.Module):
        raise TypeError(f"it returned {made!r:.60}")
    return made


def _decoder(*row: str) -> nn.Module:
    """A decoder with the matrices of a row of the table."""
    width, blocks, heads, kv_heads, head, inner, vocab, tied = map(int, row)
    ends = [(width, count * head) for count in (heads, kv_heads, kv_heads)]
    ends += [(heads * head, width), (width, inner), (width, inner), (inner, width)]
    with torch.device("meta"):
        model, layer = nn.Module(), functools.partial(nn.Linear, bias=False)
        made = (nn.Sequential(*(layer(*shape) for shape in ends)) for _ in range(blocks))
        model.words, model.blocks = nn.Embedding(vocab, width), nn.ModuleList(made)
        model.head = nn.Identity() if tied else layer(width, vocab)
    return model


@dataclasses.dataclass(frozen=True, kw_only=True)
class Machine:
    """Memory, and rates in 1e9 bytes/s. Up to 8 ranks share a machine's RAM, CPU and drive."""

    gpu_nbytes: int | None  # of each rank; None: no GPU, so that the device's memory is the host's
    ram_nbytes: int
    nvme_nbytes: int = 0
    world: int = 1
    tflops: float = 2.4  # 1e12 operations/s of a rank
    source: str = "16 cores"  # of tflops
    link_gbps: float = 25.0  # between host and GPU each way, and between ranks
    dram_gbps: float = 120.0
    read_gbps: float = 13.0  # of a Gen5 drive
    written_gbps: float = 9.0

    @classmethod
    def of(cls, gpu: str | None, ram: str | None, nvme: str | None, world: int) -> Machine:
        """The machine that options describe. What they leave out is this machine's."""
        here: Any = not gpu and torch.cuda.is_available() and torch.cuda.get_device_properties(0)
        sizes: dict[str, Any] = {"ram_nbytes": parse_nbytes(ram or host_memory()[0], "--ram")}
        sizes |= {"nvme_nbytes": parse_nbytes(nvme, "--nvme") if nvme else 0, "world": world}
        name = here.name if here else gpu or "none"
        if name == "none":
            return cls(gpu_nbytes=None, **sizes)
        card = next((card for card in CARDS if re.search(rf"\b(rtx)?{card}\b", name.lower())), "")
        gib, tflops, link = CARDS.get(card, (0, 250, 25))
        if not (here or gib or name[0].isdecimal()):
            raise ValueError(f"--gpu must be 24GiB, none, {', '.join(CARDS)} or such; got {name!r}")
        source = f"40% of the {tflops} of {card or 'an unknown card'}"
        nbytes = here.total_memory if here else gib * GIB or parse_nbytes(name, "--gpu")
        return cls(gpu_nbytes=nbytes, tflops=0.4 * tflops, source=source, link_gbps=link, **sizes)

    def capacity(self, memory: str) -> int:
        """Bytes of a rank that training may take."""
        here = min(self.world, 8)
        shared = {"host": self.ram_nbytes // here, "nvme": self.nvme_nbytes // here}
        return int(USABLE[memory] * shared.get(memory, self.gpu_nbytes or 0))


@functools.lru_cache(8)
def units_of(model: nn.Module, dtype: Any = None) -> list[Unit]:
    """The units of a model that is trained in ``dtype``."""
    dtype_of = dtypes_of(model, dtype, None)
    units = find_units(model, blocks_of(model), lambda name, param: dtype_of(param))
    for unit in units:
        unit.dtype = dtype_of(unit.params[0])
    return units


@functools.lru_cache(8)
def sizes_of(model: nn.Module) -> dict[str, int]:
    """Blocks, their width, what the layers of one make of a token, vocabulary, and parameters."""
    shapes = Counter(tuple(map(tuple, unit.shapes)) for unit in units_of(model))
    block, blocks = shapes.most_common(1)[0]
    layers = [shape for shape in block if len(shape) == 2]
    words = [tuple(one.weight.shape) for one in model.modules() if isinstance(one, nn.Embedding)]
    vocab, width = max(words, default=(0, max((inner for _, inner in layers), default=0)))
    numels = {param: param.numel() for param in model.parameters()}
    return {
        "blocks": blocks,
        "width": width,
        "made": sum(made for made, _ in layers),
        "vocab": vocab,
        "numel": sum(numels.values()),
        "largest": max(numels.values()),
        "trained": sum(numels[param] * param.requires_grad for param in numels),
    }


@functools.lru_cache(8)
def placed_sizes(model: nn.Module, dtype: Any, state_dtype: str, ranks: int) -> list[Size]:
    """What a unit's elements take, as a ZeroOptimizer with AdamW keeps them."""
    adam = AdamRule(torch.optim.AdamW(one for one in model.parameters() if one.requires_grad))
    kept, sizes = StateDtype(state_dtype), []
    for unit in units_of(model, dtype):
        unit.lay_out(ranks, ranks)
        fields = kept.codec(unit, adam.codec(unit.dtype)).fields if unit.is_trained else {}
        sizes.append(Size.of(unit, fields, model))
    return sizes


class Row(NamedTuple):
    """One choice of stage and tiers, with the bytes of a rank."""

    config: ZeroConfig
    sizes: Counter[tuple[str, str]]  # (memory, kind) -> bytes
    missing: dict[str, int] = {}  # noqa: RUF012  memory -> bytes too few
    tokens: int = 0  # of a step, on all ranks
    seconds: float = 0.0  # of a step
    bound: str = ""  # the resource that takes most of them

    def on(self, memory: str, *kinds: str) -> int:
        """Bytes in a memory, of some kinds or of all."""
        return sum(n for (m, k), n in self.sizes.items() if m == memory and k in (kinds or (k,)))

    def price(self) -> str:
        """Seconds of a step, and tokens per second."""
        rate, digits = self.tokens / self.seconds, 2 if self.seconds > 0.1 else 5
        shown = f"{rate:,.0f}" if rate < 1e6 else f"{rate:.3g}"
        return f"{self.seconds:10,.{digits}f} s {shown:>8}"

    def dump(self) -> dict[str, Any]:
        """The row as JSON can hold it."""
        config = {"stage": self.config.stage, **changes(self.config, ZeroConfig())}
        nbytes = {f"{memory}_{kind}_nbytes": n for (memory, kind), n in self.sizes.items()}
        return {"config": config, "missing": self.missing, "step_s": self.seconds, **nbytes}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """A model, a machine, and how the one is to be trained on the other."""

    name: str
    model: nn.Module
    machine: Machine
    tokens: int | None = None  # of a step on a rank; None: as many as fit
    dtype: str = "bf16"
    state_dtype: str = "fp32"

    def bytes(self, config: ZeroConfig, tokens: int) -> Row:
        """Bytes of one rank; blocks are checkpointed. ValueError for budgets that are too small."""
        joined, ranks = self.machine.gpu_nbytes is None, self.machine.world
        units = placed_sizes(self.model, config.dtype, self.state_dtype, ranks)
        placement = Placement(config, units, ranks, joined)
        budgets = {name: getattr(config, f"{name}_budget") or 0 for name in ("device", "host")}
        sizes = placement.footprint(placement.places(budgets))
        facts = sizes_of(self.model)
        size = config.dtype.itemsize  # type: ignore[union-attr]
        block = facts["blocks"] * facts["width"] + 3 * facts["made"]
        sizes["device", "activations"] = tokens * size * block
        sizes["device", "logits"] = tokens * (size + 12) * facts["vocab"]  # and 3 in fp32
        found = Counter[tuple[str, str]]()
        for (tier, kind), nbytes in sizes.items():
            found["host" if joined and tier == "device" else tier, kind] += nbytes
        return Row(config, found)

    def row(self, config: ZeroConfig, tokens: int) -> Row | None:
        """One choice. "auto" tiers get the largest budgets that fit, in GiB; None if none do."""
        room = {name: self.machine.capacity(name) for name in NAMES}
        grain = GIB if room["device"] > 4 * GIB else 1 << 20
        is_auto = config.optimizer_tier == "auto"
        budgets = {name: room[name] // grain for name in ("device", "host") if is_auto}
        while min(budgets.values(), default=1) > 0:
            fields: Any = {f"{name}_budget": count * grain for name, count in budgets.items()}
            one = dataclasses.replace(config, **fields)
            try:
                found = self.bytes(one, tokens)
            except ValueError:  # the budgets are too small
                break
            missing = {name: n - room[name] for name in NAMES if (n := found.on(name)) > room[name]}
            if not (is_auto and missing):
                seconds, bound = step_of(self, found, tokens)
                return Row(one, found.sizes, missing, tokens * self.machine.world, seconds, bound)
            less = {name: -(-missing.get(name, 0) // grain) for name in budgets}
            budgets = {name: n - (less[name] or "nvme" in missing) for name, n in budgets.items()}
        return None

    def choices(self) -> Iterator[ZeroConfig]:
        """Every sensible stage and tiers, the simplest first."""
        has_gpu, has_drive = self.machine.gpu_nbytes is not None, self.machine.nvme_nbytes > 0
        there = {"device": has_gpu, "host": True, "nvme": has_drive, "auto": has_gpu}
        stages = range(4) if self.machine.world > 1 else [2]
        ways = [(stage, "device", state) for stage in stages for state in there]
        ways += [(3, "host", "host"), (3, "host", "nvme"), (3, "nvme", "nvme"), (3, "auto", "auto")]
        for stage, param, state in (way for way in ways if there[way[2]]):
            drive = "/path/on/the/drive" if has_drive and state in ("nvme", "auto") else None
            fields: Any = {"stage": stage, "param_tier": param, "optimizer_tier": state}
            fields |= {"dtype": self.dtype, "nvme_path": drive}
            if has_gpu and state != "device" and stage == 3:
                fields["overlap_step"] = True
            if self.state_dtype != "fp32":
                fields["state_dtype"] = self.state_dtype
            yield ZeroConfig(**fields)

    def answer(self) -> tuple[list[Row], Row]:
        """All choices, and the simplest of the fastest that fit, or the one that lacks least."""
        for tokens in [self.tokens] if self.tokens else TOKENS:
            rows = list(filter(None, (self.row(config, tokens) for config in self.choices())))
            fitting = [row for row in rows if not row.missing]
            if fitting:
                most = 1.03 * min(row.seconds for row in fitting)
                return rows, next(row for row in fitting if row.seconds <= most)
        return rows, min(rows, key=lambda row: sum(PRICES[k] * n for k, n in row.missing.items()))

    def changed(self) -> Iterator[tuple[str, Row]]:
        """Single options with which something fits, of each kind the smallest change."""
        now, changed = self.tokens or TOKENS[-1], functools.partial(dataclasses.replace, self)
        counts = sorted({*TOKENS, *(now * k // 8 for k in range(1, 8))}, reverse=True)
        kinds = [[(f"--tokens {n}", changed(tokens=n)) for n in counts if 0 < n < now]]
        kinds += [[(f"--state-dtype {one}", changed(state_dtype=one))] for one in ("bf16", "8bit")]
        rams = [gib << power for power in range(3, 11) for gib in (2, 3)]
        make = functools.partial(dataclasses.replace, self.machine)
        for name, gibs in (("nvme", [1024, 8192]), ("ram", rams)):
            field = f"{name}_nbytes"
            new = {n: make(**{field: n * GIB}) for n in gibs if n * GIB > vars(self.machine)[field]}
            kinds.append([(f"--{name} {gib}GiB", changed(machine=new[gib])) for gib in new])
        for kind in kinds:
            answers = ((option, plan.answer()[1]) for option, plan in kind)
            yield from itertools.islice((one for one in answers if not one[1].missing), 1)


def step_of(plan: Plan, row: Row, tokens: int) -> tuple[float, str]:
    """Seconds of a step, and the resource that takes most: in each phase the busiest decides."""
    machine, config, on, world = plan.machine, row.config, row.on, plan.machine.world
    size, here = config.dtype.itemsize, min(world, 8)  # type: ignore[union-attr]
    numel, trained = (sizes_of(plan.model)[name] for name in ("numel", "trained"))
    # 8 operations for each parameter and token, 2 of them to compute blocks again
    compute = (6 * numel + 2 * trained) * tokens / machine.tflops / 1e12
    apart = machine.gpu_nbytes is not None
    away = on("host", "grad") + on("nvme", "grad")
    on_drive, param = on("nvme", "master", "moments"), on("nvme", "param")
    kept = on("host", "master", "moments") + on_drive
    fetched = (on("host", "param") + param) * apart
    # the CPU reads and writes state and parameters, reads gradients, and copies of the last two
    # cross the link; copies read and write state that rests on a drive
    dram = 2 * kept + 5 * away + 2 * on_drive
    others = size * (world - 1) / world  # bytes of an element that other ranks send
    gathered = numel * others * (config.stage == 3)
    link = 1e9 * machine.link_gbps
    read, written = 1e9 * machine.read_gbps / here, 1e9 * machine.written_gbps / here
    reduced = gathered + trained * others * (2 - (config.stage > 0))
    stored = param / read + on("nvme", "grad") / written
    backward = [0.75 * compute, max(fetched, away * apart) / link, stored, reduced / link, 0.0]
    forward = [0.25 * compute, fetched / link, param / read, gathered / link, 0.0]
    stored = (on_drive + on("nvme", "grad")) / read + (on_drive + param) / written
    update = [0.0, 0.0, stored, trained * others * (config.stage in (1, 2)) / link]
    update.append(dram * here / 1e9 / machine.dram_gbps)
    both = list(map(sum, zip(forward, update, strict=True)))
    phases = (backward, both) if "overlap_step" in config.options else (backward, forward, update)
    slowest = [max(zip(phase, _RESOURCES, strict=True)) for phase in phases]
    return sum(seconds for seconds, _ in slowest), max(slowest)[1]


def deepspeed_nbytes(plan: Plan, config: ZeroConfig) -> tuple[float, float]:
    """GPU and host bytes by DeepSpeed 0.19's ``estimate_zero{2,3}_model_states_mem_needs``."""
    total, largest = (sizes_of(plan.model)[name] for name in ("numel", "largest"))
    ranks, here = plan.machine.world, min(plan.machine.world, 8)
    is_off, params_too = config.optimizer_tier != "device", config.param_tier != "device"
    if config.stage < 3:
        gpu = 2 * total + 18 * total / ranks * (not is_off)
        return gpu, 1.5 * total * (max(4 * ranks, 16) if is_off else 4 * here)
    if is_off:
        gpu = 4 * largest + 2 * total / ranks * (not params_too)
        return gpu, 1.5 * (16 + 2 * params_too) * total / -(-ranks // here)
    return 4 * largest + 18 * total / ranks, 6 * largest * here


def _gib(nbytes: float) -> str:
    return f"{nbytes / GIB:,.{int(nbytes < 10_000 * GIB)}f}" if nbytes else "-"


def advice(plan: Plan, best: Row) -> Iterator[str]:
    """The call for the best row or, where nothing fits, the changes that would."""
    if best.missing:
        lacks = [f"{_gib(n)} GiB of {NAMES[name]} memory" for name, n in best.missing.items()]
        yield "Nothing fits. The nearest choice lacks {}.".format("\nand ".join(lacks))
        found = list(plan.changed())
        yield "What would fit, each alone:" if found else "More GPU memory or ranks are needed."
        for option, row in found:
            yield f"  {option:18} {row.price()} tokens/s, {row.tokens:,} tokens a step"
        return
    yield f"* Recommended, bound by {best.bound}:\n\nzero = {{"
    for name, value in best.dump()["config"].items():
        yield f'    "{name}": {json.dumps(value) if isinstance(value, str) else repr(value)},'
    yield "}\n\nFor ZeroTrainer(zero=zero) or, in a loop with optimizer.backward(loss):\n"
    yield "adamw = torch.optim.AdamW(model.parameters())"
    yield "optimizer = zk.ZeroOptimizer(model, adamw, **zero)"


def report(plan: Plan, rows: list[Row], best: Row) -> Iterator[str]:
    """The answer, in lines of 80 columns."""
    machine, sizes, tokens = plan.machine, sizes_of(plan.model), best.tokens // plan.machine.world
    yield f"{plan.name}: {count(sizes['numel'])} parameters, {sizes['blocks']} blocks"
    memory = map(_gib, (machine.gpu_nbytes or 0, machine.ram_nbytes, machine.nvme_nbytes))
    yield "{} GiB of GPU, {} of RAM, {} of drive; ranks: {}".format(*memory, machine.world)
    most = " (the most that fits)" * (not plan.tokens and not best.missing and tokens < TOKENS[0])
    yield f"{tokens:,} tokens a step{most}; 92% of GPU and 90% of RAM may be used\n"
    yield "stage params optimizer     GPU    host   drive fits         step tokens/s"
    for row in rows:
        config, star = row.config, "*" * (row is best and not row.missing)
        cells = f"{config.stage}{star:4} {config.param_tier:6} {config.optimizer_tier:9}"
        cells += "".join(f"{_gib(row.on(name)):>8}" for name in NAMES)
        lacks = ", ".join(f"-{_gib(nbytes)} {NAMES[name]}" for name, nbytes in row.missing.items())
        yield f"{cells} {lacks or f'yes  {row.price()}'}"
    yield from ("", *advice(plan, best))
    gpu, ram = map(_gib, deepspeed_nbytes(plan, best.config))
    ours = " and ".join(_gib(best.on(name)) for name in ("device", "host"))
    yield f"\nDeepSpeed's estimator: {gpu} GiB of GPU, {ram} of RAM; zk: {ours}."
    where = "device" if machine.gpu_nbytes else "host"
    used = [_gib(best.on(where, kind)) for kind in ("activations", "logits")]
    yield "Of zk's, activations take {} GiB and logits {}; these are estimates.".format(*used)
    yield f"\nEstimates by published rates: {machine.tflops:.3g} TFLOP/s ({machine.source}),"
    yield "GB/s: link {:g}, RAM {:g}, drive {:g}/{:g}".format(*dataclasses.astuple(machine)[-4:])


def plan(
    model: Annotated[str, typer.Argument(help="gpt:10b, llama:8b, config.json, module:factory.")],
    gpu: Annotated[str | None, typer.Option(help=f"24GiB, none, {', '.join(CARDS)}.")] = None,
    ram: Annotated[str | None, typer.Option(help="Memory of a machine (128GiB).")] = None,
    nvme: Annotated[str | None, typer.Option(help="Room on a machine's drive (1TiB).")] = None,
    world: Annotated[int, typer.Option(min=1, help="Ranks. Up to 8 share a machine.")] = 1,
    tokens: Annotated[int | None, typer.Option(min=1, help="Of a step on each rank.")] = None,
    dtype: Annotated[str, typer.Option(help="bf16, fp16 or fp32.")] = "bf16",
    state_dtype: Annotated[str, typer.Option(help="AdamW's moments: fp32, bf16, 8bit.")] = "fp32",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Estimate memory and step time of a model before training. Exit code 1: nothing fits."""
    StateDtype(state_dtype)  # which refuses what it does not know
    machine, how = Machine.of(gpu, ram, nvme, world), {"dtype": dtype, "state_dtype": state_dtype}
    what = Plan(name=model, model=model_of(model), machine=machine, tokens=tokens, **how)
    rows, best = what.answer()
    found = {"tokens": best.tokens, "best": best.dump(), "rows": list(map(Row.dump, rows))}
    typer.echo(json.dumps(found) if as_json else "\n".join(report(what, rows, best)))
    raise typer.Exit(bool(best.missing))
