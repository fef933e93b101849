"""This rank's part of one parameter's optimizer state as a tensor that torch.distributed.checkpoint saves, loads and makes whole.

At stage 3 over several ranks each one holds a run of a parameter's elements. torch asks a DTensor which boxes it has of the whole tensor, to write
or read them in place, and to become whole for ``full_state_dict=True``. A run of elements is none of DTensor's shardings, so ``Part`` is one for
these questions only, and refuses to compute.
"""

from __future__ import annotations

import dataclasses
import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from zk.core.owners import is_dtensor, local_of
from zk.core.units import flat_of, inverse_of, shaped_of
from zk.offload.packing import Kept
from zk.parallel.comm import Group

_MESHES: weakref.WeakKeyDictionary[Group, DeviceMesh] = weakref.WeakKeyDictionary()
_ATEN = torch.ops.aten


@dataclasses.dataclass(frozen=True, slots=True)
class Box:
    """Elements of a tensor that are a box of it, and consecutive in a part."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    start: int  # of the first, in the part


def boxes(shape: Sequence[int], piece: slice) -> Iterator[Box]:
    """The fewest boxes that make up the elements ``piece`` of a tensor that lies row by row: incomplete rows, whole rows between them."""
    if math.prod(shape) == 0:
        yield Box((0,) * len(shape), tuple(shape), 0)  # all there is, so that the tensor is known to a checkpoint
        return
    here, strides = piece.start, [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    while here < piece.stop:
        offsets = [here // stride % size for stride, size in zip(strides, shape, strict=True)]
        sizes = [1] * len(shape)
        for dim, stride in enumerate(strides):
            if here % stride == 0 and here + stride <= piece.stop:  # the outermost dimension of which something whole begins here
                sizes[dim:] = min(shape[dim] - offsets[dim], (piece.stop - here) // stride), *shape[dim + 1 :]
                break
        yield Box(tuple(offsets), tuple(sizes), here - piece.start)
        here += math.prod(sizes)


@dataclasses.dataclass(frozen=True, slots=True)
class Place:
    """Which elements of a parameter each rank has."""

    shape: torch.Size
    order: tuple[int, ...] | None  # of the dimensions, in which elements are counted
    pieces: tuple[slice, ...]  # by rank
    unit: int
    comm: Group

    @classmethod
    def of(cls, held: Any, index: int, kept: Kept | None = None) -> Place:
        """Of a parameter, or of what one rank has ``kept`` of a whole one."""
        assert isinstance(held.comm, Group)
        ranks = range(held.comm.shards)
        if kept is None:
            pieces = tuple(held.layout.part(index, held.layout.shard(rank))[1] for rank in ranks)
            return cls(held.unit.params[index].shape, held.unit.orders.get(index), pieces, held.index, held.comm)
        pieces = tuple(slice(0, kept.numel * (index in held.shard.packing_of(rank).offsets)) for rank in ranks)
        return cls(torch.Size(kept.shape), None, pieces, held.index, held.comm)

    @property
    def mine(self) -> slice:
        return self.pieces[self.comm.shard_rank]

    def is_cut_as(self, other: Place) -> bool:
        """Check that every rank has the same elements, in the same order."""
        return self.pieces == other.pieces and self.order == other.order

    def __deepcopy__(self, memo: object) -> Place:
        return self


class Elements(Tensor):
    """The elements of a Part, flat. The whole tensor can be copied into them too, as torch does for ``broadcast_from_rank0``."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    place: Place

    def copy_(self, source: Tensor, non_blocking: bool = False) -> Tensor:
        if source.shape == self.place.shape:
            source = flat_of(source, self.place.order)[self.place.mine]
        return super().copy_(source, non_blocking)


class Part(DTensor):
    """One rank's elements of a tensor of optimizer state; ``to_local()`` are these, flat, ``full_tensor()`` (on all ranks) is all of it."""

    place: Place

    @classmethod
    def make(cls, values: Tensor, place: Place) -> Part:
        """``values`` (flat, host memory) are this rank's elements."""
        comm = place.comm
        mesh = _MESHES.get(comm)
        if mesh is None:
            mesh = _MESHES[comm] = DeviceMesh.from_group(comm.control, "cpu")  # no collective
            weakref.finalize(mesh, vars(mesh).clear)  # at exit it lets go of the process group, whose threads would outlive Python
        strides = torch.empty(place.shape, device="meta").stride()
        spec = DTensorSpec(mesh, (Replicate(),), tensor_meta=TensorMeta(place.shape, strides, values.dtype))
        part = cls(values, spec, requires_grad=False)  # type: ignore[call-arg, arg-type]
        part.place = place
        return part

    def to_local(self, *, grad_placements: Any = None) -> Tensor:
        """(n,) this rank's elements, which may be none."""
        elements = self._local_tensor.as_subclass(Elements)
        elements.place = self.place
        return elements

    def redistribute(self, device_mesh: Any = None, placements: Any = None, **_: Any) -> DTensor:
        """The whole tensor on every rank; a collective."""
        if placements is None or not all(placement.is_replicate() for placement in placements):
            raise ValueError(f"optimizer state at stage 3 can become whole (placements=[Replicate()]); got placements={placements}")
        return DTensor.from_local(self.full_tensor(), self.device_mesh, [Replicate()], run_check=False)

    def full_tensor(self, *, grad_placements: Any = None) -> Tensor:
        """All of it, in the parameter's shape, in host memory; a collective."""
        sizes = [piece.stop - piece.start for piece in self.place.pieces]
        mine = self._local_tensor.new_zeros(max(sizes))
        mine[: self._local_tensor.numel()] = self._local_tensor
        full = mine.new_empty(len(sizes) * max(sizes))
        self.place.comm.all_gather(self.place.unit, full, mine).wait()
        rows = full.view(len(sizes), -1)
        flat = torch.cat([row[:size] for row, size in zip(rows, sizes, strict=True)])
        return shaped_of(flat, self.place.shape, self.place.order)

    # ---- what torch.distributed.checkpoint asks ------------------------------------------------------------------------------

    def _chunks(self) -> list[tuple[ChunkStorageMetadata, Box]]:
        shape, order = self.place.shape, self.place.order or range(len(self.place.shape))
        back = inverse_of(order)
        return [
            (ChunkStorageMetadata(torch.Size(box.offsets[at] for at in back), torch.Size(box.sizes[at] for at in back)), box)
            for box in boxes([shape[dim] for dim in order], self.place.mine)
        ]

    def __create_write_items__(self, fqn: str, object: Any) -> list[WriteItem]:
        properties = TensorProperties.create_from_tensor(self._local_tensor)
        return [
            WriteItem(MetadataIndex(fqn, chunk.offsets), WriteItemType.SHARD, tensor_data=TensorWriteData(chunk, properties, self.place.shape))
            for chunk, _ in self._chunks()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [chunk for chunk, _ in self._chunks()]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        chunk, box = next((chunk, box) for chunk, box in self._chunks() if chunk.offsets == index.offset)
        return shaped_of(self._local_tensor[box.start : box.start + math.prod(box.sizes)], chunk.sizes, self.place.order)

    # ---- what else is done with a state_dict ---------------------------------------------------------------------------------

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Copies, moves and memory for them; whether this rank's elements are equal. Else a part cannot do what is asked of the whole."""
        part: Part = args[0]
        kwargs = {key: value for key, value in (kwargs or {}).items() if key != "memory_format"}
        if func is _ATEN.equal.default and all(isinstance(side, Part) and side.place.is_cut_as(part.place) for side in args):
            return torch.equal(*(side._local_tensor for side in args))
        if func is _ATEN.new_empty.default:
            return cls.make(part._local_tensor.new_empty(part._local_tensor.shape, **kwargs), part.place)
        if func not in (_ATEN.detach.default, _ATEN.clone.default, _ATEN._to_copy.default):
            raise ValueError(  # Python would hide a TypeError of an operator
                f"{func} needs all of a tensor of which this rank has a part (optimizer state, stage 3); take full_tensor(), on all ranks, or "
                "to_local() for this rank's elements"
            )
        return cls.make(func(part._local_tensor, **kwargs), part.place)

    def __deepcopy__(self, memo: dict[int, Any]) -> Part:
        copied = memo[id(self)] = Part.make(self._local_tensor.clone(), self.place)
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        """In files of torch.save (its protocol is 2): this rank's elements, flat. Anywhere else they would be taken for something whole."""
        if protocol != 2:
            raise ValueError(
                "a part of optimizer state (stage 3) was pickled to be sent elsewhere; send full_tensor() or get_optimizer_state_dict(..., "
                "StateDictOptions(full_state_dict=True)), and in async_save use threads (the default), not processes"
            )
        return self._local_tensor.__reduce_ex__(protocol)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"Part(elements {self.place.mine.start} to {self.place.mine.stop} of {tuple(self.place.shape)}: {self._local_tensor})"


def part_of(held: Any, index: int, read: Callable[[slice], Tensor]) -> Part:
    """This rank's elements of what ``read`` gives for parameter ``index``, in fp32."""
    values = read(held.mine(index)).cpu().numpy()
    # by way of numpy: the same memory, as a storage that begins there; DTensor's own address, which is 0, would be counted from the storage's begin
    return Part.make(torch.from_numpy(values), Place.of(held, index))


def part_of_kept(held: Any, index: int, kept: Kept, value: Tensor | None) -> Part:
    """The same of what is kept of a whole parameter, of which this rank has the ``value``, or nothing."""
    flat = torch.empty(0, dtype=kept.dtype) if value is None else value.cpu().reshape(-1).clone()
    return Part.make(flat, Place.of(held, index, kept))


def values_of(value: DTensor, held: Any, index: int, kept: Kept | None = None) -> Tensor:
    """The values in ``value`` for parameter ``index``: this rank's elements of a Part that is cut alike, else all of it (a collective).

    For a DTensor that is this rank's part of it. ``kept``: describes what is kept of a whole parameter.
    """
    if isinstance(value, Part) and value.place.is_cut_as(Place.of(held, index, kept)):
        return value._local_tensor
    user = held.unit.user(index)
    if is_dtensor(user) and not isinstance(value, Part) and value.shape == user.shape:
        return local_of(value, user)
    return value.full_tensor()
