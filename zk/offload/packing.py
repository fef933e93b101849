"""Packing: the tensors that an optimizer keeps of whole parameters, of any shape and dtype, in the bytes of a chunk beside what it keeps by element.

Bytes lie in the order of parameters, so those of a chunk, which holds whole parameters, are consecutive, and move with it.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

PACKED = "packed"  # the name of these bytes among the fields of a chunk
EVERYTHING = slice(0, 1 << 62)  # as one chunk
_ALIGN = 64  # bytes, as torch's allocator aligns


@dataclasses.dataclass(frozen=True, slots=True)
class Wrapper:
    """A tensor subclass around some tensors, as ``__tensor_flatten__`` describes it."""

    name: str  # of the state
    kind: Any
    context: Any
    shape: torch.Size
    strides: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Kept:
    """One tensor that an optimizer keeps of a parameter."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    inside: Wrapper | None = None

    @classmethod
    def of(cls, value: Tensor | float, inside: Wrapper | None = None) -> Kept:
        """Describe a tensor, or a number of Python's."""
        if not isinstance(value, Tensor):
            return cls((), (), torch.float64)
        return cls(tuple(value.shape), torch.empty_like(value, device="meta").stride(), value.dtype, inside)

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize


def _is_wrapper(value: Any) -> bool:
    return is_traceable_wrapper_subclass(value) and not hasattr(value, "full_tensor")  # a DTensor is a part of something whole


def flattened(state: Mapping[str, Any]) -> dict[str, Any]:
    """A state with what is inside of wrappers in their place: "exp_avg.codes"."""
    flat: dict[str, Any] = {}
    for name, value in state.items():
        if _is_wrapper(value):
            flat |= {f"{name}.{inner}": getattr(value, inner) for inner in value.__tensor_flatten__()[0]}
        else:
            flat[name] = value
    return flat


def wrappers_of(state: Mapping[str, Any]) -> dict[str, Wrapper]:
    """The wrapper around each tensor of a ``flattened`` state, by its name, where there is one."""
    found: dict[str, Wrapper] = {}
    for name, value in state.items():
        if _is_wrapper(value):
            inner, context = value.__tensor_flatten__()
            wrapper = Wrapper(name, type(value), context, value.shape, value.stride())
            found |= {f"{name}.{one}": wrapper for one in inner}
    return found


def wrapped(state: Mapping[str, Any], kept: Mapping[str, Kept]) -> dict[str, Any]:
    """Undo ``flattened``: the wrappers that ``kept`` describes, around tensors of ``state``."""
    values, inside = dict[str, Any](), dict[str, tuple[Wrapper, dict[str, Tensor]]]()
    for name, value in state.items():
        wrapper = kept[name].inside if name in kept else None
        if wrapper is None:
            values[name] = value
        else:
            inside.setdefault(wrapper.name, (wrapper, {}))[1][name.removeprefix(f"{wrapper.name}.")] = value
    made = {name: one.kind.__tensor_unflatten__(inner, one.context, one.shape, one.strides) for name, (one, inner) in inside.items()}
    return values | made


def part_of(fields: Mapping[str, Tensor], here: slice) -> dict[str, Tensor]:
    """Some elements of the fields of a chunk; what is packed stays whole."""
    return {name: field if name == PACKED else field[here] for name, field in fields.items()}


def packed_nbytes(kept: Mapping[str, Kept]) -> int:
    """Bytes that all that is kept of one parameter takes."""
    return sum(-(-one.nbytes // _ALIGN) * _ALIGN for one in kept.values())


class Packing:
    """Places of what is kept of the parameters in one rank's slice of a unit.

    Args:
        starts: the first element of each parameter in the slice, by number; of those that are there.
        kept: of each parameter of the unit, by name.
    """

    def __init__(self, starts: Mapping[int, int], kept: Sequence[Mapping[str, Kept]]) -> None:
        self.kept, self.indices = kept, sorted(starts, key=lambda index: starts[index])
        sizes = [packed_nbytes(kept[index]) for index in self.indices]
        self.starts, self.ends = [starts[index] for index in self.indices], [0, *itertools.accumulate(sizes)]
        self.offsets = dict(zip(self.indices, self.ends, strict=False))

    @property
    def nbytes(self) -> int:
        return self.ends[-1]

    def _numbers(self, chunk: slice) -> tuple[int, int]:
        return bisect.bisect_left(self.starts, chunk.start), bisect.bisect_left(self.starts, chunk.stop)

    def bytes_of(self, chunk: slice) -> slice:
        """The bytes of a chunk of the slice."""
        first, last = self._numbers(chunk)
        return slice(self.ends[first], self.ends[last])

    def inside(self, chunk: slice) -> list[int]:
        """Numbers of the parameters in a chunk."""
        first, last = self._numbers(chunk)
        return self.indices[first:last]

    def views(self, index: int, packed: Tensor, chunk: slice) -> dict[str, Tensor]:
        """View what is kept of a parameter in the ``packed`` bytes of the chunk that it is in."""
        views, start = {}, self.offsets[index] - self.bytes_of(chunk).start
        for name, one in self.kept[index].items():
            views[name] = packed[start : start + one.nbytes].view(one.dtype).as_strided(one.shape, one.strides)
            start += packed_nbytes({name: one})
        return views
