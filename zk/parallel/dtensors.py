"""DTensor parameters, as torch's parallelize_module makes them: which ranks have the other parts, and the place of this one in the whole."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from zk.owners import is_dtensor, rebuilt
from zk.tiles import Piece

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


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
    local, (shape, _) = param._local_tensor, _box_of(param)
    if type(local) is not Tensor and not isinstance(local, nn.Parameter):
        raise ValueError(f"parameter {name!r} is a DTensor around a {type(local).__name__}, and zk trains plain tensors: quantize no parts")
    if tuple(local.shape) != tuple(shape):
        raise ValueError(
            f"parameter {name!r} is a DTensor of shape {tuple(param.shape)} and placements {param.placements}, of which this rank has "
            f"{tuple(local.shape)} instead of {tuple(shape)}; make it with distribute_tensor, or with DTensor.from_local(..., shape=, stride=)"
        )


def _box_of(param: Any) -> tuple[Sequence[int], Sequence[int]]:
    """The shape of this rank's part, and its first element in the whole; parts may be uneven."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    return compute_local_shape_and_global_offset(param.shape, param.device_mesh, param.placements)


def pieces_of_dtensors(model: nn.Module) -> dict[str, Piece]:
    """The place of each DTensor parameter's part in the whole, by name."""
    found = {}
    for name, param in _named(model):
        place = (slice(first, first + size) for size, first in zip(*_box_of(param), strict=True))
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
