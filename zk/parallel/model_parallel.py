"""Ranks that have other parts of the model (tensor or pipeline parallel), each with data parallel ranks of its own.

Everything that decides on a step goes over all of them: the norm of the gradients, overflow, errors. A parameter that several parts have is
``replicated``, and counts once. Checkpoints have the whole model, under the names and shapes that it has without model parallel ranks.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from zk.parallel.comm import Comm, Group
from zk.parallel.dtensors import meshes_of, pieces_of_dtensors
from zk.tiles import Piece, pieces_of


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
    if group is not None:
        carrier = _only_dimension(group) if isinstance(group, DeviceMesh) else group
        ranks = dist.get_process_group_ranks(carrier)
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


def _only_dimension(mesh: DeviceMesh) -> dist.ProcessGroup:
    if mesh.ndim != 1:
        raise ValueError(f"model_parallel_group is a mesh of {mesh.ndim} dimensions; give one of them, such as mesh['tensor']")
    return mesh.get_group()


# the shape of a parameter in the whole model, and where in each dimension a part of it begins and ends; None where that is not known
_Box = tuple[list[int], list[list[int]]] | None


def _box_of(piece: Piece) -> _Box:
    return list(piece.shape), [[cut.start, cut.stop] for cut in piece.place]


def _box(name: str, param: Tensor, replicated: Sequence[str] | None, part: int, count: int) -> _Box:
    """The place of a plain tensor, of which ``count`` parts of one size make the whole, or of which all have the same."""
    along, shape = _cut_along(name, param, replicated), list(param.shape)
    if along is None:
        return None
    place = [[0, size] for size in shape]
    if along is not True:
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


def _cut_along(name: str, param: Tensor, replicated: Sequence[str] | None) -> int | bool | None:
    """The dimension in which a parameter is cut over model parallel ranks; True for one that all have alike, None where that is not known."""
    if replicated is not None and any(f".{words}." in f".{name}." for words in replicated):
        return True
    if getattr(param, "tensor_model_parallel", False):
        return getattr(param, "partition_dim", None) if getattr(param, "partition_stride", 1) == 1 else None
    return True if replicated is None else None  # as Megatron has it


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
