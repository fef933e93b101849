"""`zk plan`: what of a model fits on a machine, before training with AdamW."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import json
import math
import re
import sys
import textwrap
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
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
OPTIONS = {"device": "--gpu", "host": "--ram", "nvme": "--nvme"}
# the share that training may take; the rest is for the system and fragmentation
USABLE = {"device": 0.92, "host": 0.9, "nvme": 1.0}
PRICES = {"device": 1000, "host": 50, "nvme": 1}  # of a byte, about, in those of a drive
CARDS = {"3090": 24, "4090": 24, "a100": 80, "h100": 80, "h200": 141}  # GiB
WAYS = (  # stage, tiers of parameters and of states: those that are near come first
    *((stage, "device", "device") for stage in range(4)),
    (2, "device", "host"),
    (3, "device", "host"),
    (3, "host", "host"),
    (3, "auto", "auto"),
    (2, "device", "nvme"),
    (3, "host", "nvme"),
    (3, "nvme", "nvme"),
)
# width, blocks, heads, key heads, widths of head and MLP, vocabulary, tied; first: the default
_TABLE = """
llama3:8b 4096 32 32 8 128 14336 128256 0
llama3:1b 2048 16 32 8 64 8192 128256 1
llama3:3b 3072 28 24 8 128 8192 128256 1
llama3:70b 8192 80 64 8 128 28672 128256 0
llama2:7b 4096 32 32 32 128 11008 32000 0
llama2:13b 5120 40 40 40 128 13824 32000 0
mistral:7b 4096 32 32 8 128 14336 32768 0
qwen2.5:7b 3584 28 28 4 128 18944 152064 0
qwen2.5:32b 5120 64 40 8 128 27648 152064 0
qwen3:8b 4096 36 32 8 128 12288 151936 0
"""
_ROWS = {name: row for name, *row in map(str.split, _TABLE.strip().splitlines())}
# family, version and size of llama:8b, meta-llama/Llama-3.1-8B-Instruct, qwen2.5:7b
_NAME = r"(?:.*/)?(?:meta-)?([a-z]+)-?(\d(?:\.5)?)?(?:\.\d)?(?:[-:](\d+(?:\.\d+)?b)\b.*)?"


# ---- models, without memory ----------------------------------------------------------------------


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
        return _decoder(*map(int, _ROWS[row]))
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


def _decoder(
    width: int, blocks: int, heads: int, kv_heads: int, head: int, inner: int, vocab: int, tied: int
) -> nn.Module:
    """A decoder with the matrices of a row of the table."""
    kv = width, kv_heads * head
    shapes = [(width, heads * head), kv, kv, (heads * head, width)]
    shapes += [(width, inner), (width, inner), (inner, width)]
    layer = functools.partial(nn.Linear, bias=False)
    with torch.device("meta"):
        model = nn.Module()
        model.words = nn.Embedding(vocab, width)
        model.blocks = nn.ModuleList(
            nn.Sequential(*(layer(*shape) for shape in shapes)) for _ in range(blocks)
        )
        model.head = nn.Identity() if tied else layer(width, vocab)
    return model


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
    numels = [param.numel() for param in model.parameters()]
    return {
        "blocks": blocks,
        "width": width,
        "made": sum(made for made, _ in layers),
        "vocab": vocab,
        "numel": sum(numels),
        "largest": max(numels),
    }


@functools.lru_cache(8)
def placed_sizes(model: nn.Module, dtype: Any, state_dtype: str, ranks: int) -> list[Size]:
    """What a unit's elements take, as a ZeroOptimizer with AdamW keeps them."""
    adam = AdamRule(torch.optim.AdamW(one for one in model.parameters() if one.requires_grad))
    kept, sizes = StateDtype(state_dtype), []
    for unit in units_of(model, dtype):
        unit.lay_out(ranks, ranks)
        is_kept = unit.is_trained and kept.is_for(unit, adam.inner)
        fields = kept.codec(unit, adam.codec(unit.dtype)).fields if is_kept else {}
        sizes.append(Size.of(unit, fields, model))
    return sizes


# ---- machines and plans --------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class Machine:
    """Memory. Up to 8 ranks share a machine's RAM and drive."""

    gpu_nbytes: int | None  # of each rank; None: no GPU, so that the device's memory is the host's
    ram_nbytes: int
    nvme_nbytes: int = 0
    world: int = 1

    @classmethod
    def of(cls, gpu: str | None, ram: str | None, nvme: str | None, world: int) -> Machine:
        """The machine that options describe. What they leave out is this machine's."""
        return cls(
            gpu_nbytes=gpu_nbytes_of(gpu),
            ram_nbytes=parse_nbytes(ram or host_memory()[0], "--ram"),
            nvme_nbytes=parse_nbytes(nvme, "--nvme") if nvme else 0,
            world=world,
        )

    def capacity(self, memory: str) -> int:
        """Bytes of a rank that training may take."""
        here = min(self.world, 8)
        shared = {"host": self.ram_nbytes // here, "nvme": self.nvme_nbytes // here}
        return int(USABLE[memory] * shared.get(memory, self.gpu_nbytes or 0))

    def option(self, memory: str, nbytes: int) -> str:
        """The option of a machine on which a rank may take so many bytes of a memory."""
        ranks = 1 if memory == "device" else min(self.world, 8)
        return f"{OPTIONS[memory]} {math.ceil(nbytes * ranks / USABLE[memory] / GIB)}GiB"


def gpu_nbytes_of(said: str | None) -> int | None:
    """Bytes of a GPU by its name or size; this machine's if nothing is said, or None without one."""
    if said is None and torch.cuda.is_available():
        return torch.cuda.get_device_properties(0).total_memory
    name = (said or "none").lower()
    if name == "none":
        return None
    if name in CARDS:
        return CARDS[name] * GIB
    if not name[0].isdecimal():
        raise ValueError(f"--gpu must be 24GiB, none or one of {', '.join(CARDS)}; got {said!r}")
    return parse_nbytes(name, "--gpu")


@dataclasses.dataclass(frozen=True)
class Row:
    """One choice of stage and tiers, with the bytes of a rank."""

    config: ZeroConfig
    sizes: Counter[tuple[str, str]]  # (tier, kind) -> bytes
    used: Counter[str]  # memory -> bytes
    missing: dict[str, int]  # memory -> bytes too few
    most: int  # tokens of a step for which there is memory

    def options(self) -> dict[str, Any]:
        """The options of a ZeroOptimizer, as Python and JSON can write them."""
        return {"stage": self.config.stage, **changes(self.config, ZeroConfig())}

    def dump(self) -> dict[str, Any]:
        """The row as JSON can hold it."""
        nbytes = {f"{tier}_{kind}_nbytes": n for (tier, kind), n in self.sizes.items()}
        told = {"config": self.options(), "missing": self.missing, "most_tokens": self.most}
        return {**told, **nbytes}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """A model, a machine, and how the one is to be trained on the other."""

    name: str
    model: nn.Module
    machine: Machine
    tokens: int = 4096  # of a step on a rank
    dtype: str = "bf16"
    state_dtype: str = "fp32"

    def __post_init__(self) -> None:
        self.row(next(self.choices()))  # which refuses what no choice can have

    @property
    def near(self) -> str:
        """The memory that computes."""
        return "host" if self.machine.gpu_nbytes is None else "device"

    def token_nbytes(self, dtype: torch.dtype) -> dict[str, int]:
        """Bytes that a token needs while a step computes, where blocks are checkpointed."""
        facts, size = sizes_of(self.model), dtype.itemsize
        return {
            "activations": size * (facts["blocks"] * facts["width"] + 3 * facts["made"]),
            "logits": (size + 12) * facts["vocab"],  # and three times in fp32
        }

    def row(self, config: ZeroConfig) -> Row:
        """Bytes of one choice. ValueError where budgets are too small."""
        config, ranks = self.budgeted(config), self.machine.world
        units = placed_sizes(self.model, config.dtype, self.state_dtype, ranks)
        placement = Placement(config, units, ranks, self.near == "host")
        budgets = {name: getattr(config, f"{name}_budget") or 0 for name in ("device", "host")}
        sizes = placement.footprint(placement.places(budgets))
        of_token = self.token_nbytes(config.dtype)  # type: ignore[arg-type]
        for kind, nbytes in of_token.items():
            sizes["device", kind] = self.tokens * nbytes
        used = placement.by_memory(sizes)
        spare = {name: self.machine.capacity(name) - used[name] for name in NAMES}
        missing = {name: -nbytes for name, nbytes in spare.items() if nbytes < 0}
        more = spare[self.near] // max(sum(of_token.values()), 1)
        return Row(config, sizes, used, missing, self.tokens + more)

    def budgeted(self, config: ZeroConfig) -> ZeroConfig:
        """The same choice; "auto" tiers get as budgets, in GiB, what nothing else needs."""
        if config.optimizer_tier != "auto":
            return config
        away: dict[str, Any] = {"param_tier": "host", "optimizer_tier": "host", "nvme_path": None}
        needed = self.row(dataclasses.replace(config, **away)).used["device"]
        room = self.machine.capacity("device") - needed, self.machine.capacity("host")
        grain = GIB if room[0] > 4 * GIB else 1 << 20
        device, host = (nbytes // grain * grain for nbytes in room)
        return dataclasses.replace(config, device_budget=device, host_budget=host)

    def choices(self) -> Iterator[ZeroConfig]:
        """Every sensible stage and tiers, those that are near first."""
        has_gpu, has_drive = self.near == "device", self.machine.nvme_nbytes
        there = {"device": has_gpu, "host": True, "nvme": has_drive, "auto": has_gpu}
        for stage, param, state in (way for way in WAYS if there[way[2]]):
            if self.machine.world == 1 and param == "device" and stage != 2:
                continue  # alone, stages differ only in what leaves the device
            fields: Any = {"stage": stage, "param_tier": param, "optimizer_tier": state}
            if has_drive and state in ("nvme", "auto"):
                fields["nvme_path"] = "/path/on/the/drive"
            if has_gpu and state != "device" and stage == 3:
                fields["overlap_step"] = True
            if self.state_dtype != "fp32":
                fields["state_dtype"] = self.state_dtype
            yield ZeroConfig(dtype=self.dtype, **fields)

    def answer(self) -> tuple[list[Row], Row]:
        """All choices, and the first that fits, or the one that lacks least."""
        rows = []
        for config in self.choices():
            with contextlib.suppress(ValueError):  # "auto" has no room for a budget
                rows.append(self.row(config))
        lacks = [sum(PRICES[name] * n for name, n in row.missing.items()) for row in rows]
        return rows, rows[lacks.index(min(lacks))]

    def changed(self, rows: list[Row]) -> Iterator[str]:
        """Single options with which something fits."""
        for memory in ("device", "host"):
            alone = [row for row in rows if [*row.missing] == [memory]]
            most = max((row.most for row in alone), default=0)
            if most > 0 and memory == self.near:
                yield f"--tokens {most}"
            if alone:
                yield self.machine.option(memory, min(row.used[memory] for row in alone))
        fewer = "bf16" if self.dtype == "fp16" else "8bit"
        _, best = dataclasses.replace(self, state_dtype=fewer).answer()
        if not best.missing:
            yield f"--state-dtype {fewer}"
        drive = dataclasses.replace(self.machine, nvme_nbytes=1 << 60)
        _, best = dataclasses.replace(self, machine=drive).answer()
        if not best.missing:
            yield self.machine.option("nvme", best.used["nvme"])


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


# ---- the answer ----------------------------------------------------------------------------------


def _gib(nbytes: float) -> str:
    return f"{nbytes / GIB:,.{int(nbytes < 10_000 * GIB)}f}" if nbytes else "-"


def advice(plan: Plan, rows: list[Row], best: Row) -> Iterator[str]:
    """The call for the best row or, where nothing fits, the changes that would."""
    if best.missing:
        lacks = [f"{_gib(n)} GiB of {NAMES[name]} memory" for name, n in best.missing.items()]
        yield "Nothing fits. The nearest choice lacks {}.".format("\nand ".join(lacks))
        found = list(plan.changed(rows))
        yield "What would fit, each alone:" if found else "More GPU memory or ranks are needed."
        yield from (f"  {option}" for option in found)
        return
    yield "* Recommended:\n\nzero = {"
    for name, value in best.options().items():
        yield f'    "{name}": {json.dumps(value) if isinstance(value, str) else repr(value)},'
    yield "}\n\nFor ZeroTrainer(zero=zero), or in a loop:\n"
    yield "adamw = torch.optim.AdamW(model.parameters())"
    yield "optimizer = zk.ZeroOptimizer(model, adamw, **zero)"


def report(plan: Plan, rows: list[Row], best: Row) -> Iterator[str]:
    """The answer, in lines of 80 columns."""
    machine, sizes = plan.machine, sizes_of(plan.model)
    yield f"{plan.name}: {count(sizes['numel'])} parameters, {sizes['blocks']} blocks"
    memory = map(_gib, (machine.gpu_nbytes or 0, machine.ram_nbytes, machine.nvme_nbytes))
    yield "{} GiB of GPU, {} of RAM, {} of drive; ranks: {}".format(*memory, machine.world)
    yield f"{plan.tokens:,} tokens a step; 92% of GPU and 90% of RAM may be used\n"
    yield "stage params optimizer     GPU    host   drive fits"
    for row in rows:
        config, star = row.config, "*" * (row is best and not row.missing)
        cells = f"{config.stage}{star:4} {config.param_tier:6} {config.optimizer_tier:9}"
        cells += "".join(f"{_gib(row.used[name]):>8}" for name in NAMES)
        lacks = ", ".join(f"-{_gib(nbytes)} {NAMES[name]}" for name, nbytes in row.missing.items())
        yield f"{cells} {lacks or f'yes, up to {row.most:,} tokens'}"
    yield from ("", *advice(plan, rows, best))
    gpu, ram = map(_gib, deepspeed_nbytes(plan, best.config))
    ours = " and ".join(_gib(best.used[name]) for name in ("device", "host"))
    yield f"\nDeepSpeed's estimator: {gpu} GiB of GPU, {ram} of RAM; zk: {ours}."
    used = (_gib(best.sizes["device", kind]) for kind in ("activations", "logits"))
    yield "Of zk's, activations take {} GiB and logits {}; these are estimates.".format(*used)
