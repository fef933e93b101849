"""Ranks that have other parts of the model (tensor or pipeline parallel), each with data parallel ranks of its own; DTensors, which are such parts.

Everything that decides on a step goes over all of them: the norm of the gradients, overflow, errors. A parameter that several parts have is
``replicated``, and counts once. Checkpoints have the whole model, under the names and shapes that it has without model parallel ranks.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from zk.core.owners import is_dtensor, rebuilt
from zk.nn.tiles import Piece, pieces_of
from zk.parallel.comm import Comm, Group, ranks_of


@dataclasses.dataclass(frozen=True, slots=True)
class Parts:
    """The part of the model that this rank has, and the ranks that have the others."""

    everyone: Comm
    """The data parallel ranks of all parts."""
    part: int = 0
    count: int = 1
    leaders: Sequence[int] = (0,)
    """The first data parallel rank of each part, in ``everyone``."""
    elsewhere: frozenset[str] = frozenset()
    """Replicated parameters that another part counts, and saves."""
    shared: Sequence[str] = ()
    """Parameters that every part has, or a piece of them."""
    unclear: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Parameters that cannot be saved, as their place in the whole model is not known, and why."""
    pieces: Mapping[str, Piece] = dataclasses.field(default_factory=dict)
    """Parameters that are pieces of larger ones."""

    def pieces_of(self, model: nn.Module) -> dict[str, Piece]:
        """The place of parameters, by name, in those of the whole model: of tiles, and of what is cut over model parallel ranks."""
        return {**self.pieces, **pieces_of(model)}


def connect_parts(comm: Comm, group: dist.ProcessGroup | DeviceMesh | None, replicated: Sequence[str] | None, model: nn.Module) -> Parts:
    """Find the ranks that have the other parts of the model. On all of them.

    Args:
        comm: the data parallel ranks.
        group, replicated: as ZeroConfig has them.

    Raises:
        ValueError: where the groups are no grid of data parallel and model parallel ranks, or what is replicated is not known.
    """
    meshes = meshes_of(model, comm.ranks)
    if isinstance(group, DeviceMesh) and group.ndim != 1:
        raise ValueError(f"model_parallel_group is a mesh of {group.ndim} dimensions; give one of them, such as mesh['tensor']")
    if group is not None:
        carrier = group.get_group() if isinstance(group, DeviceMesh) else group
        ranks = ranks_of(carrier, "model_parallel_group")
    elif meshes:
        over = max(meshes, key=len)
        ranks, carrier = list(over), meshes[over].get_group(0)
    else:
        return Parts(comm)
    if not all(set(ranks).issuperset(over) for over in meshes):
        raise ValueError(f"DTensors are distributed over ranks {' and '.join(map(str, meshes))}; give all of them as model_parallel_group=")
    if dist.get_rank() not in ranks:
        raise ValueError(f"this rank, {dist.get_rank()}, is not in model_parallel_group, which has ranks {ranks}")
    if len(ranks) == 1:
        return Parts(comm)
    part = ranks.index(dist.get_rank())
    rows = [json.loads(said) for said in comm.exchange(json.dumps([ranks, part]), "joining the parts of the model")]
    union = sorted({rank for row, _ in rows for rank in row})
    if {place for _, place in rows} != {part} or len(union) != len(rows) * len(ranks):
        raise ValueError(
            f"process_group has to be the ranks with the same part of the model, and model_parallel_group those with the same data; the ranks of "
            f"this process_group are in model_parallel_groups {[row for row, _ in rows]}, with numbers {[place for _, place in rows]}"
        )
    if replicated is None and not meshes and not any(hasattr(param, "tensor_model_parallel") for param in model.parameters()):
        raise ValueError(
            "model_parallel_group= needs to know which parameters its ranks have in common, so that the norm counts each once: name them with "
            "replicated_params=['norm', 'position_embedding'] ([] if there are none, as in a pipeline), or set param.tensor_model_parallel and "
            "param.partition_dim of those that are cut"
        )
    everyone = Group(comm.row if isinstance(comm, Group) else carrier, ranks=union)  # with its backend and timeout
    known = pieces_of_dtensors(model)
    mine = {
        name: _box_of(known[name]) if name in known else _box(name, param, replicated, part, len(ranks))
        for name, param in model.named_parameters()
    }
    said = everyone.exchange(json.dumps([part, comm.rank == 0, mine]), "joining the parts of the model")
    return _compared(everyone, part, len(ranks), [json.loads(words) for words in said])


# the shape of a parameter in the whole model, and where in each dimension a part of it begins and ends; None where that is not known
_Box = tuple[list[int], list[list[int]]] | None


def _box_of(piece: Piece) -> _Box:
    return list(piece.shape), [[cut.start, cut.stop] for cut in piece.place]


def _box(name: str, param: Tensor, replicated: Sequence[str] | None, part: int, count: int) -> _Box:
    """The place of a plain tensor, of which ``count`` parts of one size make the whole, or that is replicated; None where that is not known."""
    shape, place = list(param.shape), [[0, size] for size in param.shape]
    if replicated is not None and any(f".{words}." in f".{name}." for words in replicated):
        return shape, place
    if not getattr(param, "tensor_model_parallel", False):
        return (shape, place) if replicated is None else None  # as Megatron has it
    along = getattr(param, "partition_dim", None)
    if along is None or getattr(param, "partition_stride", 1) != 1:
        return None
    size = shape[along]
    shape[along], place[along] = size * count, [part * size, (part + 1) * size]
    return shape, place


def _make_up_the_whole(boxes: Sequence[_Box]) -> bool:
    """Tell if parts are of one whole, and have each of its elements once, but for parts that are the same."""
    known = [box for box in boxes if box is not None]
    places = {tuple(map(tuple, place)) for _, place in known}
    if len(known) < len(boxes) or any(shape != known[0][0] for shape, _ in known):
        return False
    for one, other in itertools.combinations(places, 2):
        if all(start < its_stop and its_start < stop for (start, stop), (its_start, its_stop) in zip(one, other, strict=True)):
            return False  # they have elements in common
    return sum(math.prod(stop - start for start, stop in place) for place in places) == math.prod(known[0][0])


def _compared(everyone: Group, part: int, count: int, said: Sequence[tuple[int, bool, dict[str, Any]]]) -> Parts:
    """Compare the parameters of all parts."""
    leaders = {its: rank for rank, (its, is_first, _) in enumerate(said) if is_first}
    parts = [said[leaders[number]][2] for number in range(count)]
    mine = parts[part]
    elsewhere, pieces, unclear = set(), dict[str, Piece](), dict[str, str]()
    for name, box in mine.items():
        boxes = {number: params[name] for number, params in enumerate(parts) if name in params}
        if box is None and len(boxes) > 1:
            unclear[name] = f"model parallel ranks {list(boxes)} have one each"
        if box is None:
            continue
        shape, place = box
        if not _make_up_the_whole(list(boxes.values())):
            raise ValueError(
                f"model parallel ranks have parameter {name!r} in other shapes, or cut in other ways (whole shape, and place: "
                f"{list(boxes.values())}); what is replicated is so on all ranks that have it, and parts make up the whole"
            )
        elsewhere |= {name} if next(number for number, other in boxes.items() if other == box) != part else set()
        if place != [[0, size] for size in shape]:
            pieces[name] = Piece(name, tuple(shape), tuple(slice(*cut) for cut in place))
    shared = [name for name in mine if all(name in params for params in parts)]
    return Parts(everyone, part, count, [leaders[number] for number in range(count)], frozenset(elsewhere), shared, unclear, pieces)


def _named(model: nn.Module) -> Iterator[tuple[str, Any]]:
    return ((name, param) for name, param in model.named_parameters() if is_dtensor(param))


def check_dtensor(name: str, param: Any) -> None:
    """Check that each rank has a box of the whole tensor, of values that are the parameter's own."""
    for placement in param.placements:
        if not placement.is_replicate() and type(placement).__name__ != "Shard":
            raise ValueError(
                f"parameter {name!r} is a DTensor with placement {placement}, and zk trains Shard(dim) and Replicate(): redistribute it before the "
                "optimizer is made. A sum that is not taken yet (Partial) is no value to update; _StridedShard is what fully_shard makes of tensor "
                "parallel ranks' parts: leave fully_shard out, as zk partitions over data parallel ranks itself"
            )
    cut = [placement.dim for placement in param.placements if placement.is_shard()]
    if len(set(cut)) != len(cut):
        raise ValueError(
            f"parameter {name!r} is a DTensor with placements {param.placements}: two dimensions of its mesh cut the same dimension of it; "
            "distribute it over one mesh dimension with as many ranks"
        )
    local, (shape, _) = param._local_tensor, _local_box(param)
    if type(local) is not Tensor and not isinstance(local, nn.Parameter):
        raise ValueError(f"parameter {name!r} is a DTensor around a {type(local).__name__}, and zk trains plain tensors: quantize no parts")
    if tuple(local.shape) != tuple(shape):
        raise ValueError(
            f"parameter {name!r} is a DTensor of shape {tuple(param.shape)} and placements {param.placements}, of which this rank has "
            f"{tuple(local.shape)} instead of {tuple(shape)}; make it with distribute_tensor, or with DTensor.from_local(..., shape=, stride=)"
        )


def _local_box(param: Any) -> tuple[Sequence[int], Sequence[int]]:
    """The shape of this rank's part, and its first element in the whole; parts may be uneven."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    return compute_local_shape_and_global_offset(param.shape, param.device_mesh, param.placements)


def pieces_of_dtensors(model: nn.Module) -> dict[str, Piece]:
    """The place of each DTensor parameter's part in the whole, by name."""
    found = {}
    for name, param in _named(model):
        place = (slice(first, first + size) for size, first in zip(*_local_box(param), strict=True))
        found[name] = Piece(name, tuple(param.shape), tuple(place))
    return found


def meshes_of(model: nn.Module, ranks: Sequence[int]) -> dict[tuple[int, ...], DeviceMesh]:
    """The meshes that DTensor parameters are distributed over, by their ranks. ``ranks`` train together, on other data each."""
    meshes: dict[tuple[int, ...], DeviceMesh] = {}
    for name, param in _named(model):
        mesh = param.device_mesh
        over = tuple(mesh.mesh.flatten().tolist())
        together = sorted(set(over).intersection(ranks))
        if len(together) > 1:
            raise ValueError(
                f"parameter {name!r} is a DTensor over ranks {list(over)}, of which process_group has {together}. Those have the same "
                "part of the model, and other data: give that dimension of the mesh alone, process_group=mesh['data'], and distribute parameters "
                "over the others, mesh['tensor']. Leave fully_shard out: zk partitions over data parallel ranks itself"
            )
        meshes[over] = mesh
    return meshes


def show(_module: nn.Module, state: dict[str, Any], *_: Any) -> None:
    """A hook on ``state_dict()``: make its DTensors, which are views of a unit's buffer, such as torch can copy and pickle."""
    for key, value in state.items():
        if is_dtensor(value):
            state[key] = rebuilt(value, lambda local: local)


def join_parts(model: nn.Module, values: dict[Tensor, Tensor]) -> None:
    """Replace values, in host memory, of parts of DTensor parameters by those of the whole. On all ranks.

    In the model's order, which they share: units are others where some parameters count elsewhere.
    """
    for _, param in _named(model):
        part = param._local_tensor
        if part in values:
            values[part] = rebuilt(param, lambda local: values[local].to(local.device)).full_tensor().cpu()  # type: ignore[attr-defined]


def is_first_part(model: nn.Module) -> bool:
    """Tell if this rank is the first of those that DTensor parameters are distributed over."""
    return not any(any(param.device_mesh.get_coordinate()) for _, param in _named(model))
