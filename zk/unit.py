"""Units: parameters that travel together, and their places in one flat buffer."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from zk.logs import require
from zk.memory import round_up

ALIGN = 16  # elements: every parameter starts on a cache line
LARGE = 1 << 24  # elements: a module outside of blocks that has so many is one, as an embedding


@dataclasses.dataclass(eq=False)
class Unit:
    """Parameters of one precision that travel together. It owns no memory: integers and names."""

    name: str
    module: nn.Module
    """The module whose forward uses the unit."""
    names: list[str]
    params: list[nn.Parameter]

    def __post_init__(self) -> None:
        first = self.params[0]
        self.dtype, self.device, self.is_trained = first.dtype, first.device, first.requires_grad
        self.shapes = [param.shape for param in self.params]
        self.strides = [dense_strides(param) for param in self.params]
        self.sizes = [param.numel() for param in self.params]

    def lay_out(self, ranks: int, sharers: int) -> None:
        """Place parameters in a buffer that ``ranks`` reduce and ``sharers`` hold a shard of."""
        self.offsets, stop = [], 0  # of each parameter's first element
        for size in self.sizes:
            self.offsets.append(stop)
            stop = round_up(stop + size, ALIGN)
        self.numel = round_up(max(stop, 1), ranks * ALIGN)
        stops = [*self.offsets[1:], self.numel]  # of each parameter's region, padding included
        self.regions = [bound for pair in zip(self.offsets, stops, strict=True) for bound in pair]
        self.shard_numel = self.numel // sharers

    def views(self, full: Tensor) -> list[Tensor]:
        """The parameters within ``full`` (numel,)."""
        places = zip(self.shapes, self.strides, self.offsets, strict=True)
        base = full.storage_offset()
        return [full.as_strided(shape, stride, base + at) for shape, stride, at in places]

    def flat(self, index: int, value: Tensor) -> Tensor:
        """``value``, of the shape of parameter ``index``, as (size,) in the parameter's own order."""
        shape, stride = self.shapes[index], self.strides[index]
        if value.stride() != stride:
            value = value.new_empty_strided(shape, stride).copy_(value)
        return value.as_strided((self.sizes[index],), (1,), value.storage_offset())

    def check(self, index: int) -> None:
        """RuntimeError for a parameter that is not what and where it was."""
        param = self.params[index]
        if (param.shape, param.dtype, param.device) != (self.shapes[index], self.dtype, self.device):
            raise RuntimeError(
                f"parameter {self.names[index]!r} was moved or converted after ZeroOptimizer took it, "
                f"to {param.dtype} on {param.device}, {tuple(param.shape)}: use dtype= and device="
            )

    def within(self, start: int, stop: int, *numbers: int) -> Iterator[tuple[int, slice, slice]]:
        """Parameters with elements in the buffer's [start, stop); of these ``numbers``, or of all.

        Yields:
            the parameter's number, its elements from ``start`` on, and the same within the parameter.
        """
        for index in numbers or range(len(self.sizes)):
            first = self.offsets[index]
            low, high = max(first, start), min(first + self.sizes[index], stop)
            if low < high:
                yield index, slice(low - start, high - start), slice(low - first, high - first)


def dense_strides(param: Tensor) -> tuple[int, ...]:
    """The strides of a parameter's copy: its own where they leave no gaps (channels_last)."""
    return torch.empty_like(param, device="meta", memory_format=torch.preserve_format).stride()


def blocks_of(model: nn.Module) -> dict[str, nn.Module]:
    """The outermost entries of ModuleLists, by name."""
    found: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and not is_inside(name, found):
            found |= {f"{name}.{key}": block for key, block in module.named_children()}
    return found


def is_inside(name: str, blocks: Iterable[str]) -> bool:
    """Tell if the module of that name is one of ``blocks``, or part of one."""
    return any(f"{name}.".startswith(f"{block}.") for block in blocks)


def chosen_blocks(model: nn.Module, units: Sequence[str | type[nn.Module]]) -> dict[str, nn.Module]:
    """The modules that ``units`` names, or classes of; ValueError for an entry that names none."""
    modules, found = dict(model.named_modules()), set[str]()
    for entry in units:
        kinds = (entry,) if isinstance(entry, type) else ()
        chosen = {name for name, m in modules.items() if name == entry or isinstance(m, kinds)}
        words = repr(getattr(entry, "__name__", entry))
        require(chosen, f"units: the model has no module {words}; see model.named_modules()")
        found |= chosen
    return {name: module for name, module in modules.items() if name in found and name}


def find_units(model: nn.Module, blocks: dict[str, nn.Module], kind_of: Any) -> list[Unit]:
    """A unit for each block's parameters of one kind.

    A module with a true ``travels_alone`` is a block wherever it is, and so is a LARGE one of no
    block. Other parameters, and those that several blocks share, are the model's own.
    """
    homes: dict[nn.Parameter, str] = {}
    alone = {name: m for name, m in model.named_modules() if getattr(m, "travels_alone", False)}
    large = {
        name: module
        for name, module in model.named_modules()
        if not (module._modules or is_inside(name, blocks))
        and sum(map(Tensor.numel, module.parameters())) >= LARGE
    }
    blocks = blocks | large | alone
    for name, block in blocks.items():  # an inner block comes later, and takes its own
        for param in block.parameters():
            is_inner = param not in homes or name in alone or name.startswith(f"{homes[param]}.")
            homes[param] = name if is_inner else ""
    kinds: dict[Any, list[Any]] = {}
    for name, param in model.named_parameters():
        own = param.dtype, param.requires_grad, kind_of(name, param)
        kinds.setdefault((homes.get(param, ""), own), []).append((name, param))
    return [
        Unit(home or "model", blocks.get(home, model), *map(list, zip(*found, strict=True)))
        for (home, _), found in kinds.items()
    ]
