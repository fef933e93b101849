"""Where every byte of training state rests: ``optimizer.summary()``, ``print(optimizer)``, and the block at the start."""

from __future__ import annotations

import dataclasses
import os
import shutil
import sys
import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from zk.core.fit import footprint_of
from zk.core.memory import host_memory, ranks_here
from zk.core.nbytes import placed_of
from zk.core.placement import Place
from zk.core.words import count, named, short, size
from zk.logs import is_quiet, log, say

_ROWS = {"param": "parameters", "in_place": "in your files", "grad": "gradients", "master": "master", "moments": "moments"}
_SMALL_NBYTES, _WIDTH = 1 << 30, 80


@dataclasses.dataclass(frozen=True, slots=True)
class Summary:
    """Bytes of this rank's training state by kind and tier, at the fullest point of a step."""

    heading: str
    tiers: dict[str, tuple[str, int, int, int]]
    """Tier -> name, bytes that are free, bytes that there are, and this rank's share of those."""
    nbytes: dict[str, dict[str, int]]
    """Kind -> tier -> bytes."""
    notes: tuple[str, ...]

    def total(self, tier: str) -> str:
        """Bytes on a tier and their share of it: "1.5 GiB (6.4%)"."""
        nbytes, mine = sum(row.get(tier, 0) for row in self.nbytes.values()), self.tiers[tier][3]
        percent = 100 * nbytes / max(mine, 1)
        share = f" ({percent:.1f}%)" if percent >= 0.05 else " (<0.1%)"
        return size(nbytes) + share * (mine > 0) if nbytes else "-"

    def __repr__(self) -> str:
        if sum(sum(row.values()) for row in self.nbytes.values()) < _SMALL_NBYTES:
            lines = []
            for tier, (name, free, whole, _) in self.tiers.items():
                kinds = ", ".join(f"{kind} {size(row[tier])}" for kind, row in self.nbytes.items() if row.get(tier))
                room = f" {size(free)} free of {size(whole)}" if whole else ""
                lines += [wrap(f"{name}{room}, state {self.total(tier)}: {kinds}", ", ")] if kinds else []
        else:
            cells = [(name, f"{size(free)} free", f"of {size(whole)}") if whole else (name, "", "") for name, free, whole, _ in self.tiers.values()]
            rows = [["", *row] for row in zip(*cells, strict=True)]
            rows += [[kind, *(size(row.get(tier, 0)) or "-" for tier in self.tiers)] for kind, row in self.nbytes.items()]
            rows.append(["total", *map(self.total, self.tiers)])
            widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
            lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        return "\n".join([wrap(self.heading, " | "), *lines, *(wrap(note, " ") for note in self.notes)])


def wrap(text: str, between: str) -> str:
    """Lines of at most 80 columns, cut where ``between`` is."""
    kept = text.replace(" ", "\0").replace(between.replace(" ", "\0"), between.rstrip() + " ")
    lines = textwrap.wrap(kept, _WIDTH, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
    return "\n".join(lines).replace("\0", " ")


def configured(config: Any) -> str:
    """A ZeroConfig as Python that can be copied: one field a line, without those that have their defaults, bytes as GiB."""
    lines = []
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        value = named(value) if isinstance(value, torch.dtype) else value
        if value != field.default:
            value = f"{float(value) / 2**30:.4g}GiB" if field.name.endswith("_budget") else value
            lines.append(f"    {field.name}={value!r},\n")
    return f"zk.ZeroConfig(\n{''.join(lines)})" if lines else "zk.ZeroConfig()"


def rows_of(optimizer: Any, sizes: Mapping[tuple[str, str], int]) -> dict[str, dict[str, int]]:
    """Bytes by the name of their kind and tier; where device and host are one memory, it is "host"."""
    nbytes = {kind: Counter[str]() for kind in (*_ROWS.values(), "buffers")}
    for (tier, kind), amount in sizes.items():
        nbytes[_ROWS.get(kind, "buffers")]["host" if tier == "device" and optimizer.transfer.joined else tier] += amount
    return {kind: dict(row) for kind, row in nbytes.items() if any(row.values())}


def sizes_of(optimizer: Any, placed: Sequence[Place]) -> Counter[tuple[str, str]]:
    """Bytes of this rank by tier and kind at the fullest point of a step, as zk.core.fit counts them, with units on these tiers."""
    units, joined = [held.unit for held in optimizer.held], optimizer.transfer.joined
    groups, device, config = optimizer.param_groups, optimizer.device, optimizer.config
    sizes = footprint_of(optimizer.model, units, config, optimizer.comm.shards, joined, optimizer.rules, groups, device, placed=placed).sizes
    in_place = sum(held.nbytes.get("in_place", 0) for held, (tier, *_) in zip(optimizer.held, placed, strict=True) if tier == "nvme")
    if in_place and ("files", "in_place") not in sizes:
        sizes["nvme", "param"] -= in_place
        sizes["nvme", "in_place"] += in_place
    return sizes


def summary_of(optimizer: Any) -> Summary:
    """The summary of a ZeroOptimizer, of this rank."""
    placed = placed_of(optimizer)
    nbytes, sides = rows_of(optimizer, sizes_of(optimizer, placed)), Counter[bool]()
    for place in placed:
        sides[place.streams] += sum(numel for tier, numel in place.parts if tier != "device")
    notes = []
    if sides[True]:
        notes.append(f"the GPU updates {sides[True] / sides.total():.0%} of the optimizer state outside its memory, streamed through it")
    return Summary(_heading(optimizer), _tiers(optimizer, {tier for row in nbytes.values() for tier in row}), nbytes, tuple(notes))


def _heading(optimizer: Any) -> str:
    config, held, world = optimizer.config, optimizer.held, optimizer.everyone.world
    elements = Counter[torch.dtype]()
    for store in held:
        elements[store.unit.dtype] += sum(param.numel() for param in store.unit.params)
    shards = [store.shard for store in held if store.shard is not None]
    trained = sum(param.numel() for store in held if store.shard is not None for param in store.unit.users)
    dtypes = " and ".join(named(dtype) for dtype, _ in elements.most_common()) + " computed in fp32" * any(store.unit.is_widened for store in held)
    is_split, has_master = any(shard.is_split for shard in shards), any(shard.has_master for shard in shards)
    master = ", fp32 master split" if is_split else ", fp32 master" if has_master else ""
    if config.state_dtype == torch.uint8:
        master = ", 24-bit master" * (is_split or has_master) + ", 8-bit moments"
    numbers = f"{count(elements.total())} parameters{f' ({count(trained)} trained)' if trained < elements.total() else ''}"
    ranks, threads = f"{world} rank{'s' * (world > 1)}", f"{optimizer.num_threads} thread{'s' * (optimizer.num_threads > 1)}"
    version = sys.modules["zk"].__version__
    return f"zk {version} | stage {config.stage} | {dtypes}{master} | {ranks}, {threads}{' each' * (world > 1)} | {numbers} in {len(held)} units"


def _tiers(optimizer: Any, used: set[str]) -> dict[str, tuple[str, int, int, int]]:
    ranks = ranks_here(optimizer.everyone.world)
    shared = f" for {ranks} ranks" if ranks > 1 else ""
    whole, free = host_memory()
    found = {"host": (f"host{shared}", free, whole, whole // ranks)}
    if not optimizer.transfer.joined:
        free, whole = torch.cuda.mem_get_info(optimizer.device)
        found = {"device": ("GPU", free, whole, whole), **found}
    if "nvme" in used:
        paths = [path for path in optimizer.config.nvme_path if os.path.isdir(path)]
        drives = {os.stat(path).st_dev: shutil.disk_usage(path) for path in paths}.values()
        whole, free = sum(drive.total for drive in drives), sum(drive.free for drive in drives)
        found["nvme"] = short(optimizer.config.nvme_path[0], 16), free, whole, whole // ranks
    return found | ({"files": ("your files", 0, 0, 0)} if "files" in used else {})


def show_once(optimizer: Any) -> None:
    """Show the summary of a new ZeroOptimizer: on stderr, or in the output of a notebook's cell."""
    if is_quiet() or optimizer.everyone.rank:
        return
    try:
        shown = summary_of(optimizer)
    except Exception:  # a line less to read is no reason to end a run
        log.exception("the summary could not be made")
        return
    shell = sys.modules.get("IPython")
    if shell is not None and type(shell.get_ipython()).__name__ == "ZMQInteractiveShell":
        shell.display.display(shown)
    else:
        say(str(shown))
