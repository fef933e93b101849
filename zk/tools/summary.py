"""Where the bytes of training state are: ``optimizer.summary()``, ``print(optimizer)``, the start block."""

from __future__ import annotations

import dataclasses
import os
import shutil
import textwrap
from collections import Counter, defaultdict
from typing import TYPE_CHECKING, Any

import torch

from zk import __version__
from zk.addon import Addon
from zk.config import NAMES, ZeroConfig
from zk.kernels.eight_bit import CODES
from zk.logs import is_quiet, log, say
from zk.memory import host_memory
from zk.offload.tiers import link_to
from zk.placement import Place, Placement, Size

if TYPE_CHECKING:
    from zk.optimizer import ZeroOptimizer

KINDS = {"param": "parameters", "grad": "gradients", "master": "master", "moments": "moments"}
KEPT = {  # how states are kept, where that is worth a word
    ("master", torch.float32): "fp32 master",
    ("master", torch.int16): "fp32 master split",
    ("master", CODES): "24-bit master",
    ("exp_avg", torch.bfloat16): "bf16 moments",
    ("exp_avg", CODES): "8-bit moments",
}
COUNTS = {10**12: "T", 10**9: "B", 10**6: "M", 1000: "K", 0: ""}
SIZES = {1 << 40: "TiB", 1 << 30: "GiB", 1 << 20: "MiB", 1 << 10: "KiB", 0: "B"}


def count(number: int) -> str:
    """As a person would say it: "1.34B"."""
    least = next(least for least in COUNTS if number >= least)
    return f"{number / (least or 1):.3g}{COUNTS[least]}"


def size(nbytes: float) -> str:
    """As a person would say it: "1.5 GiB"."""
    least = next(least for least in SIZES if nbytes >= least)
    return f"{nbytes / (least or 1):,.{int(least > 0)}f} {SIZES[least]}"


@dataclasses.dataclass(frozen=True, slots=True)
class Summary:
    """Bytes of this rank's training state by kind and tier, at the fullest point of a step."""

    heading: str
    tiers: dict[str, tuple[str, int, int]]
    """Tier -> name, bytes that are free, bytes that there are."""
    nbytes: dict[str, dict[str, int]]
    """Tier -> kind -> bytes."""

    def __repr__(self) -> str:
        lines = [wrapped(self.heading, " | ")]
        for tier, (name, free, whole) in self.tiers.items():
            kinds = self.nbytes.get(tier, {})
            said = ", ".join(f"{kind} {size(nbytes)}" for kind, nbytes in kinds.items())
            total, percent = sum(kinds.values()), 100 * sum(kinds.values()) / max(whole, 1)
            share = f"{percent:.1f}%" if percent >= 0.05 else "<0.1%"
            there = f"{name} {size(free)} free of {size(whole)}"
            state = f", state {size(total)} ({share}): {said}" if said else ""
            lines.append(wrapped(there + state, ", "))
        return "\n".join(lines)


def wrapped(text: str, between: str) -> str:
    """Lines of at most 80 columns, cut where ``between`` is."""
    kept = text.replace(" ", "\0").replace(between.replace(" ", "\0"), between.rstrip() + " ")
    lines = textwrap.wrap(kept, 80, subsequent_indent="  ", break_long_words=False)
    return "\n".join(lines).replace("\0", " ")


def placed(optimizer: ZeroOptimizer) -> tuple[Placement, list[Place]]:
    """The arithmetic of an optimizer's bytes, and the place of each unit."""
    layout, stores = optimizer._layout, optimizer._runtime.stores
    sizes = [Size.of(store.unit, store.codec.fields, optimizer.model) for store in stores]
    joined = link_to(layout.device) is None
    found = Placement(optimizer.config, sizes, layout.comm.size, joined)
    return found, [layout.places[store.unit] for store in stores]


def summary(optimizer: ZeroOptimizer) -> Summary:
    """Bytes of each kind of training state on each tier, of this rank, at the fullest point of a step."""
    placement, places = placed(optimizer)
    nbytes: dict[str, Counter[str]] = defaultdict(Counter)
    for (tier, kind), amount in placement.footprint(places).items():
        memory = "host" if placement.joined and tier == "device" else tier
        nbytes[memory][KINDS.get(kind, "buffers")] += amount
    return Summary(heading(optimizer), memories(optimizer, placement.joined), dict(nbytes))


def heading(optimizer: ZeroOptimizer) -> str:
    """What trains, in which precision, on how many ranks."""
    layout, units = optimizer._layout, [store.unit for store in optimizer._runtime.stores]
    elements, trained = Counter[Any](), 0
    for unit in units:
        elements[NAMES.get(unit.dtype, str(unit.dtype))] += sum(unit.sizes)
        trained += sum(unit.sizes) * unit.is_trained
    dtypes = " and ".join(dtype for dtype, _ in elements.most_common())
    fields = [store.codec.fields for store in optimizer._trained]
    pairs = ((kind, one.get(kind)) for kind in ("master", "exp_avg") for one in fields)
    kept = [KEPT[pair] for pair in dict.fromkeys(pairs) if pair in KEPT]
    numbers = f"{count(elements.total())} parameters"
    numbers += f" ({count(trained)} trained)" * (trained < elements.total())
    ranks, threads = layout.comm.size, layout.num_threads
    parts = (
        f"zk {__version__}",
        f"stage {optimizer.config.stage}",
        ", ".join([dtypes, *kept]),
        f"{ranks} rank{'s' * (ranks > 1)}, {threads} thread{'s' * (threads > 1)}{' each' * (ranks > 1)}",
        f"{numbers} in {len(units)} unit{'s' * (len(units) > 1)}",
    )
    return " | ".join(parts)


def memories(optimizer: ZeroOptimizer, joined: bool) -> dict[str, tuple[str, int, int]]:
    """The memories that training may use: name, bytes that are free, and that there are."""
    whole, free = host_memory()
    found = {"host": ("host", free, whole)}
    if not joined:
        free, whole = torch.cuda.mem_get_info(optimizer._layout.device)
        found = {"device": ("GPU", free, whole), **found}
    for tier in optimizer._layout.tiers.keys() & {"nvme"}:
        paths: Any = optimizer.config.nvme_path
        drives = {os.stat(path).st_dev: shutil.disk_usage(path) for path in paths}.values()
        free, whole = sum(drive.free for drive in drives), sum(drive.total for drive in drives)
        found[tier] = f"...{paths[0][-13:]}", free, whole
    return found


def described(optimizer: ZeroOptimizer) -> str:
    """What ``print(optimizer)`` shows: the summary, and the options as Python that can be copied."""
    if not optimizer._runtime.stores:
        return "ZeroOptimizer, closed"
    options = changes(optimizer.config, ZeroConfig())
    lines = "".join(f"    {name}={value!r},\n" for name, value in options.items())
    return f"{summary(optimizer)}\nzk.ZeroConfig(\n{lines})"


class Shown(Addon):
    """Shows the summary of a new ZeroOptimizer on stderr.

    Uses of the core: the seam ``attach``.
    """

    def attach(self, optimizer: ZeroOptimizer) -> None:
        if is_quiet() or optimizer._layout.comm.rank:
            return
        try:
            shown = summary(optimizer)
        except Exception:  # a line less to read is no reason to end a run
            log.exception("the summary could not be made")
            return
        say(str(shown))


# ---- options as they may be written in Python or JSON --------------------------------------------


def written(value: Any) -> Any:
    """The value of an option, as a user writes it."""
    if isinstance(value, tuple):
        return [*value] if len(value) > 1 else value[0]
    return NAMES.get(value) or (str(value) if isinstance(value, torch.device) else value)


def changes(config: ZeroConfig, before: ZeroConfig) -> dict[str, Any]:
    """The options of ``config`` that differ."""
    unwritten = "process_group", "units", "keep_dtype", "addons", "options"
    now, then = ({**one.options, **vars(one)} for one in (config, before))
    names = [name for name, v in now.items() if name not in unwritten and then.get(name) != v]
    found = {name: written(now[name]) for name in names}
    for name in found.keys() & {"device_budget", "host_budget"}:
        gib, rest = divmod(found[name] or 1, 1 << 30)
        found[name] = found[name] if rest else f"{gib}GiB"
    return found
