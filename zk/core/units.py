"""Units, the sets of parameters that travel together: tiles, blocks of a list, what is left over. Tied ones count once.

The flat buffer of a unit is laid out here, in integers only; padding is decided here and nowhere else.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from zk.core.owners import has_codes, inner_tensors, is_dtensor, local_of, rebuilt
from zk.nn.tiles import Tile

# Every parameter starts on a multiple of this many elements: 64 bytes at 16 bits, a cache line and an AVX-512 register.
ALIGN = 32
# One that no slice or chunk may cut starts on a page, in 16 bits, as chunks of a file do.
PAGE = 2048


def round_up(numel: int, multiple: int) -> int:
    """The smallest multiple of ``multiple`` that is at least ``numel``."""
    return -(-numel // multiple) * multiple


def overlap(first: slice, second: slice) -> tuple[slice, slice]:
    """The elements that two ranges have in common, counted from the begin of each; maybe empty."""
    start = max(first.start, second.start)
    stop = max(start, min(first.stop, second.stop))
    return slice(start - first.start, stop - first.start), slice(start - second.start, stop - second.start)


@dataclasses.dataclass(frozen=True, slots=True)
class Layout:
    """The place of each parameter in a unit's flat buffer, and the slice of that buffer that each rank holds."""

    numels: tuple[int, ...]  # elements of each parameter
    offsets: tuple[int, ...]  # its first element in the flat buffer
    stops: tuple[int, ...]  # behind it, and behind the padding after it
    numel: int  # elements of the flat buffer, a multiple of world * ALIGN
    world: int
    is_whole: bool = False  # no slice cuts a parameter

    @classmethod
    def of(cls, numels: Sequence[int], world: int, is_whole: bool = False) -> Layout:
        """Lay parameters of ``numels`` elements one after the other, for ``world`` ranks (at least 1).

        ``is_whole``: the largest go to the ranks first, each to the one that has the fewest elements so far; slices are as long as the longest.
        """
        if world < 1 or any(numel < 0 for numel in numels):
            raise ValueError(f"a layout needs world >= 1 and sizes >= 0; got world={world}, numels={tuple(numels)}")
        by_rank: list[list[int]] = [list(range(len(numels)))]
        align, shard = ALIGN, 0
        if is_whole:
            align, by_rank, taken = PAGE, [[] for _ in range(world)], [0] * world
            for index in sorted(range(len(numels)), key=lambda index: -numels[index]):
                rank = taken.index(min(taken))
                by_rank[rank].append(index)
                taken[rank] += round_up(numels[index], PAGE)
            shard = max(taken)
        offsets, end = [0] * len(numels), 0
        for rank, indices in enumerate(by_rank):
            end = max(end, rank * shard)
            for index in sorted(indices):
                offsets[index] = end
                end = round_up(end + numels[index], align)
        numel = world * shard or round_up(end, world * ALIGN)
        order = [index for indices in by_rank for index in sorted(indices)]
        stops = dict(zip(order, [*(offsets[index] for index in order[1:]), numel], strict=False))
        return cls(tuple(numels), tuple(offsets), tuple(stops[index] for index in range(len(numels))), numel, world, is_whole)

    @property
    def shard_numel(self) -> int:
        """Elements of one rank's slice, the same on every rank."""
        return self.numel // self.world

    def regions(self, indices: Sequence[int]) -> list[int]:
        """Bounds of what these parameters take, each with the padding after it: start, stop, start, ..."""
        return [bound for index in indices for bound in (self.offsets[index], self.stops[index])]

    def shard(self, rank: int) -> slice:
        """The slice of the flat buffer that ``rank`` holds."""
        return slice(rank * self.shard_numel, (rank + 1) * self.shard_numel)

    def uncut(self, held: slice) -> list[slice]:
        """The parts of the slice ``held`` that no chunk may cut, in elements of that slice."""
        places = [(offset, round_up(offset + numel, PAGE)) for offset, numel in zip(self.offsets, self.numels, strict=True) if self.is_whole]
        return [slice(start - held.start, stop - held.start) for start, stop in places if held.start <= start < stop <= held.stop]

    def whole(self, index: int) -> slice:
        """The slice of the flat buffer that parameter ``index`` takes."""
        return slice(self.offsets[index], self.offsets[index] + self.numels[index])

    def part(self, index: int, held: slice) -> tuple[slice, slice]:
        """The share of the slice ``held`` of the flat buffer in parameter ``index``: (slice of held, slice of the parameter); maybe empty."""
        return overlap(held, self.whole(index))


_CONTAINERS = (nn.ModuleList, nn.ModuleDict)


@dataclasses.dataclass(slots=True, eq=False)
class Unit:
    """Parameters that are gathered, reduced and updated together. All of one dtype, all trained or all frozen."""

    name: str  # the module's path in the model, e.g. "transformer.h.3"
    anchors: list[nn.Module]  # a forward of any of these uses the unit
    params: list[nn.Parameter]
    names: list[str]  # full parameter names, in the order of params
    trained: bool  # in one of the optimizer's groups, with requires_grad
    dtype: torch.dtype  # what the parameters are stored in once zk holds them
    device: torch.device  # where they compute
    orders: dict[int, tuple[int, ...]] = dataclasses.field(default_factory=dict)  # as of ``order_of``, of parameters that have one
    # over several ranks, the block around a list of experts, of the experts and of what is left of the block: each rank may use other ones
    chooser: nn.Module | None = None
    is_counted: bool = True  # in the norm of gradients, and saved; other ranks have the same parameters, and do so otherwise
    around: dict[int, nn.Parameter] = dataclasses.field(default_factory=dict)  # the DTensors that parameters are this rank's part of
    members: dict[nn.Module, int] = dataclasses.field(default_factory=dict)  # the blocks of a unit of several, and the place of each
    is_widened: bool = False  # full parameters are fp32, cast from ``dtype`` as they are gathered, and their gradients too

    @property
    def computes(self) -> torch.dtype:
        """The dtype of full parameters, and of gradients as backward makes them."""
        return torch.float32 if self.is_widened else self.dtype

    @property
    def widest(self) -> torch.dtype:
        """The widest precision among the parameters as they are now."""
        return max((param.dtype for param in self.params), key=lambda dtype: dtype.itemsize)

    @property
    def numel(self) -> int:
        return sum(param.numel() for param in self.params)

    @property
    def is_expert(self) -> bool:
        """Tell if the forward of the unit's ``chooser`` may leave the unit out on some ranks."""
        return self.chooser is not None and self.chooser not in self.anchors

    def ends_with(self, module: nn.Module, is_backward: bool) -> bool:
        """Tell if the unit is used no more after this anchor of it, by the order in which its blocks are defined."""
        last = 0 if is_backward else len(self.members) - 1
        return self.members.get(module, last) == last

    def user(self, index: int) -> nn.Parameter:
        """Parameter ``index`` as it is in the model and in groups: itself, or the DTensor around it."""
        return self.around.get(index, self.params[index])

    @property
    def users(self) -> list[nn.Parameter]:
        """All parameters, as they are in the model and in groups."""
        return [self.around.get(index, param) for index, param in enumerate(self.params)] if self.around else self.params

    @property
    def objects(self) -> list[nn.Parameter]:
        """All tensors that share the memory of the parameters."""
        return [*self.params, *self.around.values()]

    @property
    def versions(self) -> list[int]:
        """How often each parameter was written, from inside of a DTensor or through it."""
        return [param._version + (self.around[index]._version if index in self.around else 0) for index, param in enumerate(self.params)]

    def part(self, indices: Sequence[int], trained: bool, name: str) -> Unit:
        """A unit of some of the parameters alone."""
        orders = {new: self.orders[index] for new, index in enumerate(indices) if index in self.orders}
        params = [self.params[index] for index in indices]
        names = [self.names[index] for index in indices]
        around = {new: self.around[index] for new, index in enumerate(indices) if index in self.around}
        return dataclasses.replace(self, name=name, params=params, names=names, trained=trained, orders=orders, around=around)

    def flat(self, index: int, value: Tensor) -> Tensor:
        """Lay out ``value``, shaped as parameter ``index``, as it lies in a flat buffer: (numel,), a view where it is laid out so."""
        return flat_of(local_of(value, self.users[index]), self.orders.get(index))

    def shown(self, index: int, flat: Tensor) -> Tensor:
        """``flat`` (numel,) as the user's parameter ``index`` is: a DTensor around it, where that is one."""
        return rebuilt(self.user(index), lambda _: self.shaped(index, flat))

    def shaped(self, index: int, flat: Tensor) -> Tensor:
        """View ``flat`` (numel,) with the shape and the memory format of parameter ``index``."""
        return shaped_of(flat, self.params[index].shape, self.orders.get(index))


def order_of(tensor: Tensor) -> tuple[int, ...] | None:
    """The dimensions from the slowest to the fastest in memory, of a tensor that is dense and not row by row (channels_last); else None."""
    order = tuple(sorted(range(tensor.ndim), key=tensor.stride, reverse=True))
    with torch._C.DisableTorchFunctionSubclass():  # one that is released has strides, too
        return order if order != tuple(range(tensor.ndim)) and tensor.numel() and tensor.permute(order).is_contiguous() else None


def flat_of(tensor: Tensor, order: tuple[int, ...] | None) -> Tensor:
    """The elements of ``tensor`` with its dimensions in ``order``: (numel,)."""
    return (tensor if order is None else tensor.permute(order)).reshape(-1)


def shaped_of(flat: Tensor, shape: tuple[int, ...], order: tuple[int, ...] | None) -> Tensor:
    """Undo ``flat_of``: a view of ``flat`` (numel,) that has ``shape``."""
    if order is None:
        return flat.view(shape)
    return flat.view([shape[dim] for dim in order]).permute(inverse_of(order))


def inverse_of(order: Sequence[int]) -> list[int]:
    """The place of each dimension in ``order``."""
    return sorted(range(len(order)), key=order.__getitem__)


@functools.cache
def strides_of(shape: torch.Size, order: tuple[int, ...] | None) -> tuple[int, ...]:
    """The strides that ``shaped_of`` gives."""
    return shaped_of(torch.empty(shape.numel(), device="meta"), shape, order).stride()


def _has_blocks(module: nn.Module) -> bool:
    """Tell if the children are blocks: of lists, and of dicts that have one class of modules with modules inside, such as layers by number."""
    if isinstance(module, nn.ModuleDict):
        return len(set(map(type, module.values()))) == 1 and all(any(child.children()) for child in module.values())
    return isinstance(module, (nn.ModuleList, nn.Sequential))


def _blocks(module: nn.Module, path: str) -> Iterable[tuple[str, nn.Module]]:
    """The children of every outermost list of blocks, descending through containers that are never called themselves."""
    for name, child in module.named_children():
        child_path = f"{path}.{name}" if path else name
        if _has_blocks(module) and not isinstance(child, _CONTAINERS):
            yield child_path, child
        else:
            yield from _blocks(child, child_path)


# of so many small blocks in a list, neighbours travel together, up to so many bytes: each unit takes requests to a drive, and turns of threads
_MANY, TOGETHER_NBYTES = 16, 1 << 19


def _join_small(units: dict[tuple[Any, ...], Unit], blocks: Collection[str]) -> None:
    """Make one unit of small neighbours among ``blocks`` that are alike in all that the rest of the key says."""
    lists: dict[tuple[Any, ...], list[list[tuple[Any, ...]]]] = {}
    taken: dict[tuple[Any, ...], int] = {}
    for key, unit in units.items():
        path, *alike = key
        if path not in blocks or unit.chooser is not None:
            continue
        nbytes, place = unit.numel * unit.dtype.itemsize, (path.rpartition(".")[0], *alike)
        if place not in taken or taken[place] + nbytes > TOGETHER_NBYTES:
            taken[place] = 0
            lists.setdefault(place, []).append([])
        taken[place] += nbytes
        lists[place][-1].append(key)
    for runs in lists.values():
        for keys in runs if sum(map(len, runs)) >= _MANY else ():
            first, *others = (units[key] for key in keys)
            if not others:
                continue
            first.members = {unit.anchors[0]: place for place, unit in enumerate((first, *others))}
            first.name = f"{first.name} to {others[-1].name}"
            for key, unit in zip(keys[1:], others, strict=True):
                first.params += unit.params
                first.names += unit.names
                first.anchors += [anchor for anchor in unit.anchors if anchor not in first.anchors]
                del units[key]


# elements of the smallest member of a list inside of a block that is a unit of its own
_SMALLEST = 1 << 12


def _experts(block: nn.Module, path: str) -> Iterable[tuple[str, nn.Module]]:
    """The members of each ModuleList inside of a block whose members are of one class: mostly only some of them are called."""
    for name, module in block.named_modules():
        if not isinstance(module, nn.ModuleList) or len(module) < 2:
            continue
        if len(set(map(type, module))) == 1 and min(sum(param.numel() for param in member.parameters()) for member in module) >= _SMALLEST:
            yield from ((f"{path}.{name}.{index}", member) for index, member in enumerate(module))


def _chosen(model: nn.Module, wanted: Sequence[str | type[nn.Module]]) -> Iterable[tuple[str, nn.Module]]:
    """The modules that ``wanted`` names, by path or by class, inner ones first; ValueError for an entry that matches nothing."""
    names = {entry for entry in wanted if isinstance(entry, str)}
    classes = tuple(entry for entry in wanted if isinstance(entry, type))
    matched = [(path, module) for path, module in model.named_modules() if path and (path in names or isinstance(module, classes))]
    found = {path for path, _ in matched}
    missing = [name for name in names if name not in found]
    missing += [cls.__name__ for cls in classes if not any(isinstance(module, cls) for _, module in matched)]
    if missing:
        raise ValueError(f"units: the model has no module {', '.join(map(repr, missing))}; names are those of model.named_modules()")
    return sorted(matched, key=lambda entry: -entry[0].count("."))


def _note_choosers(model: nn.Module, units: Mapping[tuple[Any, ...], Unit], modules: Mapping[str, nn.Module]) -> None:
    """Note the chooser of units in a list inside of a block, and of such blocks. ``modules``: of all blocks, experts and tiles, by path."""
    inside: dict[nn.Module, set[nn.Module]] = {}
    for (path, *_), unit in units.items():
        steps = path.split(".")
        around = [prefix for prefix in (".".join(steps[:count]) for count in range(1, len(steps) + 1)) if prefix in modules]
        members = [prefix for prefix in around[1:] if not isinstance(modules[prefix], Tile)]
        if any(isinstance(model.get_submodule(prefix.rpartition(".")[0]), _CONTAINERS) for prefix in members):
            block = modules[around[0]]
            if block not in inside:
                inside[block] = set(block.modules())
            if inside[block].issuperset(unit.anchors):  # else something outside of the block uses it as well
                unit.chooser = block
    for unit in units.values():
        block = unit.anchors[0]
        if block in inside and inside[block].issuperset(unit.anchors):
            unit.chooser = block


def find_units(
    model: nn.Module,
    groups: Mapping[Tensor, int],
    stored: Mapping[Tensor, torch.dtype] | None = None,
    wanted: Sequence[str | type[nn.Module]] | None = None,
    device: torch.device | None = None,
    moved: bool = False,
    experts: bool = False,
    world: int = 1,
    elsewhere: Collection[str] = (),
    kinds: Mapping[Tensor, str] | None = None,
    widened: torch.dtype | None = None,
) -> list[Unit]:
    """Split the model's parameters into units, in order of definition, what is left over last.

    Args:
        model: any module.
        groups: the parameters that the optimizer updates, and the index of each one's group: members of a group lie side by side.
        stored: the dtype that each parameter will have; None keeps their own.
        wanted: names or classes of the modules that become units, each without those inside of it; None takes the blocks of the model's
            outermost ModuleLists, Sequentials, and ModuleDicts of one class of blocks.
        device: where parameters that have no memory yet will compute; all of them, if they are ``moved``.
        experts: members of ModuleLists inside of blocks are units too, where they are of one class.
        world: ranks, which may use other experts each.
        elsewhere: names of parameters that other ranks count in the norm of gradients: units of their own.
        kinds: names of the optimizers of parameters, where there are several: units of their own, too.
        widened: a dtype; parameters stored in it are fp32 while they are full, but for codes, which their own code reads.
    """
    tiles = [(path, module) for path, module in model.named_modules() if isinstance(module, Tile)]
    blocks = list(_chosen(model, wanted) if wanted is not None else _blocks(model, ""))
    joined = {path for path, module in blocks if wanted is None and not isinstance(module, Tile)}
    if experts and wanted is None:
        blocks = [entry for path, block in blocks for entry in (*_experts(block, path), (path, block))]
    owner: dict[int, str] = {}  # id of a module -> path of the block it is part of
    for path, block in (*tiles, *blocks):  # a tile is a block of its own, wherever it is
        for module in block.modules():
            owner.setdefault(id(module), path)
    units: dict[tuple[Any, ...], Unit] = {}
    home: dict[Tensor, Unit] = {}
    around: dict[Tensor, nn.Parameter] = {}
    anchors = dict((*blocks, *tiles))
    for module_path, module in model.named_modules(remove_duplicate=False):
        path = owner.get(id(module), "")
        own = [(user, inner_tensors(user, name)) for name, user in module.named_parameters(prefix=module_path, recurse=False)]
        for user, name, param in ((user, *entry) for user, inner in own for entry in inner):
            if param not in home:
                if is_dtensor(user):
                    around[param] = user
                grouped = around.get(param, param)
                is_trained = grouped in groups and grouped.requires_grad
                dtype = param.dtype if stored is None else stored[param]
                is_counted = name not in elsewhere
                place = device if (param.is_meta or moved) and device is not None else param.device
                kind = kinds[grouped] if kinds and is_trained else ""
                is_widened = dtype == widened and not has_codes(user)
                key = (path, is_trained, dtype, place, is_counted, kind, is_widened)
                if key not in units:
                    label = path or "rest"
                    if any(unit.name == label for unit in units.values()):
                        replicated = "" if is_counted else ", replicated"
                        by = f" by {kind}" * bool(kind)
                        stored_as = str(dtype).removeprefix("torch.") + ", as fp32" * is_widened
                        label += f" ({'trained' if is_trained else 'frozen'}{by}, {stored_as}{replicated})"
                    its = is_trained, dtype, place
                    units[key] = Unit(label, [anchors[path] if path else model], [], [], *its, is_counted=is_counted, is_widened=is_widened)
                home[param] = unit = units[key]
                unit.params.append(param)  # type: ignore[arg-type]
                unit.names.append(name)
            anchor = anchors[path] if path else module
            if anchor not in home[param].anchors:
                home[param].anchors.append(anchor)  # a tied parameter is used by this one too, a left-over one by the module that owns it
    if world > 1:
        _note_choosers(model, units, anchors)
    _join_small(units, joined)
    for unit in units.values():
        pairs = sorted(zip(unit.params, unit.names, strict=True), key=lambda pair: groups.get(around.get(pair[0], pair[0]), 0))
        unit.params, unit.names = [param for param, _ in pairs], [name for _, name in pairs]
        unit.around = {index: around[param] for index, param in enumerate(unit.params) if param in around}
        unit.orders = {index: order for index, param in enumerate(unit.params) if (order := order_of(param)) is not None}
    return sorted(units.values(), key=lambda unit: unit.anchors[0] is model)
