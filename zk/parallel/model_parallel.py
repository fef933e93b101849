"""Ranks that have other parts of the model (tensor or pipeline parallel), each with data parallel ranks of its own.

Everything that decides on a step goes over all of them: the norm of the gradients, overflow, errors. A parameter that several parts have is
``replicated``, and counts once. Checkpoints have the whole model, under the names and shapes that it has without model parallel ranks.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from zk.parallel.comm import Group, Solo
from zk.tiles import Piece, pieces_of


@dataclasses.dataclass(frozen=True, slots=True)
class Parts:
    """The part of the model that this rank has, and the ranks that have the others."""

    everyone: Solo | Group
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


def connect_parts(comm: Solo | Group, group: dist.ProcessGroup | DeviceMesh | None, replicated: Sequence[str] | None, model: nn.Module) -> Parts:
    """Find the ranks that have the other parts of the model. On all of them.

    Args:
        comm: the data parallel ranks.
        group, replicated: as ZeroConfig has them.

    Raises:
        ValueError: where the groups are no grid of data parallel and model parallel ranks, or what is replicated is not known.
    """
    if group is None:
        return Parts(comm)
    ranks = dist.get_process_group_ranks(_only_dimension(group) if isinstance(group, DeviceMesh) else group)
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
    if replicated is None and not any(hasattr(param, "tensor_model_parallel") for param in model.parameters()):
        raise ValueError(
            "model_parallel_group= needs to know which parameters its ranks have in common, so that the norm counts each once: name them with "
            "replicated_params=['norm', 'position_embedding'] ([] if there are none, as in a pipeline), or set param.tensor_model_parallel and "
            "param.partition_dim of those that are cut"
        )
    everyone = Group(_carrier(comm, group), ranks=union)
    mine = {name: [list(param.shape), _cut_along(name, param, replicated)] for name, param in model.named_parameters()}
    said = everyone.exchange(json.dumps([part, comm.rank == 0, mine]), "joining the parts of the model")
    return _compared(everyone, part, len(ranks), [json.loads(words) for words in said])


def _only_dimension(mesh: DeviceMesh) -> dist.ProcessGroup:
    if mesh.ndim != 1:
        raise ValueError(f"model_parallel_group is a mesh of {mesh.ndim} dimensions; give one of them, such as mesh['tensor']")
    return mesh.get_group()


def _carrier(comm: Solo | Group, group: dist.ProcessGroup | DeviceMesh) -> Any:
    """A group whose backend and timeout those of all ranks have."""
    return comm.row if isinstance(comm, Group) else _only_dimension(group) if isinstance(group, DeviceMesh) else group


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
    for name, (shape, along) in mine.items():
        holders = [number for number, params in enumerate(parts) if name in params]
        others = [parts[number][name] for number in holders]
        if along is None and len(holders) > 1:
            unclear[name] = f"model parallel ranks {holders} have one each"
        elif any(other != [shape, along] for other in others):
            raise ValueError(
                f"model parallel ranks have parameter {name!r} in other shapes, or cut in other ways ({others}); parts are of one size, and what is "
                "replicated is so on all ranks that have it"
            )
        elif along is True:
            elsewhere |= {name} if holders[0] != part else set()
        elif along is not None:
            size = shape[along]
            whole = tuple(size * count if dim == along else extent for dim, extent in enumerate(shape))
            place = tuple(slice(part * size, (part + 1) * size) if dim == along else slice(0, extent) for dim, extent in enumerate(shape))
            pieces[name] = Piece(name, whole, place)
    shared = [name for name in mine if all(name in params for params in parts)]
    return Parts(everyone, part, count, [leaders[number] for number in range(count)], frozenset(elsewhere), shared, unclear, pieces)
