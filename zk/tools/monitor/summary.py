"""Summary of an optimizer: the bytes of each kind of training state on each tier, and those that a step moves. As text, and as HTML."""

from __future__ import annotations

import dataclasses
import html
import os
import shutil
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from zk.core.memory import host_memory, ranks_here
from zk.core.placement import Place
from zk.tools.monitor import measured
from zk.tools.monitor.words import bar, count, seconds, short, size
from zk.tools.plan.footprint import footprint_of

# kinds of ZeroOptimizer.metrics() and of zk.tools.plan -> rows of the table; everything else is in "buffers"
ROWS = {"param": "parameters", "in_place": "parameters, in your files", "grad": "gradients", "master": "master", "moments": "moments"}
REST = "buffers"
COLORS = {
    "parameters": "#4c78a8",
    "parameters, in your files": "#9ecae9",
    "gradients": "#f58518",
    "master": "#54a24b",
    "moments": "#b279a2",
    REST: "#bab0ac",
}
_DTYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


def on_tier(nbytes: Mapping[str, Mapping[str, int]], tier: str) -> int:
    """Bytes of all kinds on a tier, of a table kind -> tier -> bytes."""
    return sum(row.get(tier, 0) for row in nbytes.values())


@dataclasses.dataclass(frozen=True, slots=True)
class Summary:
    """A table of bytes by kind and tier, with what is said around it. ``text()``, and ``_repr_html_`` for notebooks."""

    heading: str
    capacity: dict[str, tuple[str, int]]
    """Tier -> its name, such as "GPU 24 GiB", and the bytes of it that are this rank's."""
    nbytes: dict[str, dict[str, int]]
    """Kind -> tier -> bytes of this rank."""
    notes: tuple[str, ...]
    """Lines below the table."""
    traffic: Traffic

    def text(self) -> str:
        """The heading, a table with a bar for each tier, and the notes."""
        rows = [["", *(label for label, _ in self.capacity.values())]]
        rows += [[kind, *(size(row.get(tier, 0)) or "-" for tier in self.capacity)] for kind, row in self.nbytes.items()]
        totals = ((on_tier(self.nbytes, tier), whole) for tier, (_, whole) in self.capacity.items())
        rows.append(["total", *(f"{size(nbytes) or '-':9} {bar(nbytes / max(1, whole))}" for nbytes, whole in totals)])
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        return "\n".join([self.heading, *lines, *self.notes])

    def __str__(self) -> str:
        return self.text()

    __repr__ = __str__

    def _repr_html_(self) -> str:
        """The same for notebooks: a bar for each tier, with a part for each kind."""
        parts = [f"<div style='font-family:sans-serif;font-size:13px'><b>{html.escape(self.heading)}</b><table>"]
        for tier, (label, whole) in self.capacity.items():
            total = on_tier(self.nbytes, tier)
            cells = "".join(
                f"<span title='{kind} {size(row[tier])}' style='display:inline-block;height:14px;min-width:2px;background:{COLORS[kind]};"
                f"width:{100 * row[tier] / max(whole, total, 1):.2f}%'></span>"
                for kind, row in self.nbytes.items()
                if row.get(tier)
            )
            bar = f"<div style='width:320px;line-height:0;text-align:left;background:#eee'>{cells}</div>"
            parts.append(f"<tr><td style='text-align:left'>{html.escape(label)}</td><td>{bar}</td><td>{size(total) or '-'}</td></tr>")
        kinds = (f"<span style='color:{COLORS[kind]}'>&#9632;</span> {kind} {size(sum(row.values()))}" for kind, row in self.nbytes.items())
        notes = "".join(f"<div>{html.escape(note)}</div>" for note in self.notes)
        return "".join([*parts, "</table><div>", " &nbsp; ".join(kinds), f"</div>{notes}</div>"])


@dataclasses.dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes that one rank moves in a step of one micro-batch that uses all parameters."""

    read: int
    """From the drive."""
    written: int
    """To the drive."""
    uploaded: int
    """From the host to the device, if these are two memories."""
    offloaded: int
    """From the device to the host."""


def nbytes_of(optimizer: Any) -> Counter[tuple[str, str]]:
    """Bytes of this rank's training state now, by tier and kind."""
    found = Counter[tuple[str, str]]()
    for held in optimizer.held:
        for kind, nbytes in held.nbytes.items():
            found["device" if kind == "gathered" else held.param_tier, kind] += nbytes
        for tier, kind, nbytes in held.shard.nbytes if held.shard is not None else ():
            found[tier, kind] += nbytes
    on_cpu = optimizer.held[0].unit.device.type == "cpu"
    found["host" if on_cpu and optimizer.config.optimizer_tier != "device" else "device", "grad"] += optimizer.grads.nbytes
    if optimizer.assembly.stream is not None:
        found["device", "buffer"] += optimizer.assembly.stream.nbytes
    if "nvme" in optimizer.tiers:
        found["host", "buffer"] += optimizer.tiers["nvme"].spill.buffer_nbytes
    return found


def rows_of(optimizer: Any, sizes: Mapping[tuple[str, str], int]) -> dict[str, dict[str, int]]:
    """Bytes by row of the table and tier; where device and host are one memory, it is "host"."""
    on_host = {"device": "host"} if optimizer.transfer.joined else {}
    nbytes = {kind: dict[str, int]() for kind in (*ROWS.values(), REST)}
    for (tier, kind), amount in sizes.items():
        row, where = nbytes[ROWS.get(kind, REST)], on_host.get(tier, tier)
        row[where] = row.get(where, 0) + amount
    return {kind: row for kind, row in nbytes.items() if any(row.values())}


def placed_of(optimizer: Any) -> list[Place]:
    """The place of each unit, as it was chosen."""
    placed = []
    for held in optimizer.held:
        sections = held.shard.sections if held.shard else ()
        parts = tuple((section.tier, section.numel) for section in sections if section.state.chunks)
        placed.append(Place(held.param_tier, parts, any(section.stream is not None for section in sections)))
    return placed


def sizes_of(optimizer: Any, placed: Sequence[Place]) -> Counter[tuple[str, str]]:
    """Bytes of this rank by tier and kind at the fullest point of a step, as zk.tools.plan counts them, with units on these tiers."""
    units, joined = [held.unit for held in optimizer.held], optimizer.transfer.joined
    groups, device, config = optimizer.param_groups, optimizer.device, optimizer.config
    sizes = footprint_of(optimizer.model, units, config, optimizer.comm.shards, joined, optimizer.rules, groups, device, placed=placed).sizes
    in_place = sum(held.nbytes.get("in_place", 0) for held, (tier, *_) in zip(optimizer.held, placed, strict=True) if tier == "nvme")
    if in_place and ("files", "in_place") not in sizes:
        sizes["nvme", "param"] -= in_place
        sizes["nvme", "in_place"] += in_place
    return sizes


def traffic_of(optimizer: Any, placed: Sequence[Place], sizes: Counter[tuple[str, str]]) -> Traffic:
    """Bytes that a step of one micro-batch moves with units on these tiers. ``sizes``: of ``sizes_of`` them."""
    gathered = sizes["nvme", "param"] + sizes["nvme", "in_place"] + sizes["files", "in_place"]
    on_drive = (held for held, (tier, *_) in zip(optimizer.held, placed, strict=True) if tier == "nvme" and held.shard is not None)
    trained = sum(held.nbytes.get("param", 0) for held in on_drive)
    grads, state = sizes["nvme", "grad"], sizes["nvme", "master"] + sizes["nvme", "moments"]
    uploaded, offloaded = 0, 0
    if not optimizer.transfer.joined:
        used = sizes["host", "param"] + gathered if sizes["device", "gathered"] else 0
        uploaded, offloaded = 2 * used + sizes["host", "param_copy"], sizes["host", "grad"] + grads
    for held, (tier, parts, streams) in zip(optimizer.held, placed, strict=True):
        if streams:
            numel, size = sum(count for name, count in parts if name != "device"), held.unit.dtype.itemsize
            moved = optimizer.assembly.state_nbytes(held.unit) + size * (tier != "device")
            uploaded, offloaded = uploaded + numel * (moved + size), offloaded + numel * moved
    kept = optimizer.config.keep_gradients  # else the update finds them in memory, and the parameters that backward has fetched
    return Traffic(2 * gathered + kept * (trained + grads) + state, trained + kept * grads + state, uploaded, offloaded)


def summary_of(optimizer: Any) -> Summary:
    """The summary of a ZeroOptimizer, of this rank."""
    placed = placed_of(optimizer)
    sizes = sizes_of(optimizer, placed)
    nbytes, traffic = rows_of(optimizer, sizes), traffic_of(optimizer, placed, sizes)
    capacity = _capacity(optimizer, {tier for row in nbytes.values() for tier in row})
    return Summary(_heading(optimizer), capacity, nbytes, (*_notes(optimizer, traffic), *_sides(optimizer, placed)), traffic)


def _sides(optimizer: Any, placed: Sequence[Place]) -> Iterator[str]:
    """A line for optimizer state that streams through the device."""
    counts = Counter[bool]()
    for place in placed:
        counts[place.streams] += sum(count for tier, count in place.parts if tier != "device")
    if counts[True]:
        rest = f", and {optimizer.num_threads} threads update the rest" if counts[False] else ""
        yield f"the GPU updates {counts[True] / counts.total():.0%} of the optimizer state that is not in its memory, which streams through it{rest}"


def _heading(optimizer: Any) -> str:
    config, held = optimizer.config, optimizer.held
    elements = Counter[torch.dtype]()
    for store in held:
        elements[store.unit.dtype] += sum(param.numel() for param in store.unit.params)
    total = elements.total()
    trained = sum(param.numel() for store in held if store.shard is not None for param in store.unit.users)
    dtypes = " and ".join(_DTYPES.get(dtype, str(dtype).removeprefix("torch.")) for dtype, _ in elements.most_common())
    dtypes += " computed in fp32" * any(store.unit.is_widened for store in held)
    shards = [store.shard for store in held if store.shard is not None]
    is_split, has_master = any(shard.is_split for shard in shards), any(shard.has_master for shard in shards)
    master = ", fp32 master split" if is_split else ", fp32 master" if has_master else ""
    if config.state_dtype == torch.uint8:
        master = ", 24-bit master" * (is_split or has_master) + ", 8-bit moments"
    world = optimizer.everyone.world
    some = f" ({count(trained)} trained)" if trained < total else ""
    version, units = sys.modules["zk"].__version__, f"{len(held)} unit{'s' * (len(held) > 1)}"
    ranks = f"{world} rank{'s' * (world > 1)}"
    return f"zk {version} | stage {config.stage} | {dtypes}{master} | {ranks} | {count(total)} parameters{some} in {units}"


def _capacity(optimizer: Any, used: set[str]) -> dict[str, tuple[str, int]]:
    """Name and size of each tier that there is, or that is used."""
    found: dict[str, tuple[str, int]] = {}
    ranks = ranks_here(optimizer.everyone.world)
    shared = f" / {ranks} ranks" if ranks > 1 else ""
    if not optimizer.transfer.joined:
        whole = torch.cuda.get_device_properties(optimizer.device).total_memory
        found["device"] = f"GPU {size(whole)}", whole
    whole = host_memory()[0]
    found["host"] = f"host {size(whole)}{shared}", whole // ranks
    if "nvme" in used:
        drives = {os.stat(path).st_dev: shutil.disk_usage(path).total for path in optimizer.config.nvme_path if os.path.isdir(path)}
        whole = sum(drives.values())
        found["nvme"] = f"{short(optimizer.config.nvme_path[0])} {size(whole)}{shared}", whole // ranks
    if "files" in used:
        found["files"] = "your files", 0
    return found


def _notes(optimizer: Any, traffic: Traffic) -> list[str]:
    """The bytes that a step moves, and the time that takes at rates that were measured here."""
    notes, who = [], "one step of each rank" if optimizer.everyone.world > 1 else "one step"
    if traffic.read or traffic.written:
        rates = measured.drive(optimizer.config.nvme_path)
        moves = " and ".join(
            f"{verb} {size(nbytes)} {where} the drive"
            for verb, nbytes, where in (("reads", traffic.read, "from"), ("writes", traffic.written, "to"))
            if nbytes
        )
        if rates is not None:
            taken = ranks_here(optimizer.everyone.world) * (traffic.read / rates["read"] + traffic.written / rates["write"])
            moves += f": {seconds(taken)} at the {rates['read'] / 1e9:.2f} and {rates['write'] / 1e9:.2f} GB/s measured here"
        notes.append(f"{who} {moves}")
    if traffic.uploaded or traffic.offloaded:
        notes.append(f"{who} moves {size(traffic.uploaded) or 'nothing'} to the GPU and {size(traffic.offloaded) or 'nothing'} from it")
    return notes


def metrics_of(optimizer: Any) -> dict[str, float]:
    """See ``ZeroOptimizer.metrics``."""
    prefetcher = optimizer.partition.prefetcher
    moved: dict[str, float] = optimizer.tiers["nvme"].metrics() if "nvme" in optimizer.tiers else {}
    if optimizer.transfer.nbytes:
        moved["pinned_nbytes"] = optimizer.transfer.nbytes
    if optimizer.saver.stall_ms:
        moved["save_stall_ms"] = optimizer.saver.stall_ms
    return {
        **optimizer.counters,
        **(optimizer.speculation.counters if optimizer.speculation is not None else {}),
        "grad_norm": optimizer.factors.norm,
        "loss_scale": optimizer.scaler.scale,
        "gathers": prefetcher.uses,
        "prefetch_hits": prefetcher.hits,
        **moved,
        **{f"{tier}_{kind}_nbytes": nbytes for (tier, kind), nbytes in nbytes_of(optimizer).items()},
        **optimizer.rates.take(),
    }
