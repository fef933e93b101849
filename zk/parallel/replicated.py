"""Parameters that are full on every rank (stages 0-2): views of one flat buffer, and the slice that this rank updates."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from zk.events import COMPLETED, Awaited
from zk.memory import zeros
from zk.parallel.comm import Group, Solo
from zk.parallel.layout import Layout
from zk.units import Unit, strides_of


def flatten_params(unit: Unit, layout: Layout, values_of: Callable[[Tensor, str], Tensor] | None) -> Tensor:
    """The unit's parameters as one new flat buffer (layout.numel,), in the widest precision among them; padding is zero.

    ``values_of(param, name)`` gives each one's values; None leaves zeros, for a rank that will be sent the first rank's.
    """
    widest = max((param.dtype for param in unit.params), key=lambda dtype: dtype.itemsize)
    flat = zeros(layout.numel, widest, unit.device, inherited=not unit.trained)
    for index, param in enumerate(unit.params):
        if values_of is not None:
            flat[layout.whole(index)] = unit.flat(index, values_of(param, unit.names[index]))
    return flat


def view_params(unit: Unit, layout: Layout, full: Tensor) -> None:
    """Make every parameter of the unit a view of ``full`` (layout.numel,)."""
    for index, param in enumerate(unit.params):
        view = unit.shaped(index, full[layout.whole(index)])
        if param.is_floating_point() and param.dtype != view.dtype:
            param.grad = None  # of the old precision
        param.data = view


def adopt_replaced(unit: Unit, layout: Layout, full: Tensor) -> list[int]:
    """Parameters that were given other memory, or lie in it otherwise (``param.data = ...``), become views of ``full`` again, with their new values.

    Returns their numbers.

    RuntimeError for one that has another dtype or shape, or is elsewhere.
    """
    found, start, size = [], full.data_ptr(), full.element_size()
    for index, param in enumerate(unit.params):
        offset, numel = layout.offsets[index], layout.numels[index]
        is_alike, strides = param.dtype == full.dtype and param.numel() == numel, strides_of(param.shape, unit.orders.get(index))
        if is_alike and (not numel or (param.data_ptr() == start + offset * size and param.stride() == strides)):
            continue
        if not is_alike or param.device != full.device:
            raise RuntimeError(
                f"parameter {unit.names[index]!r} was moved or converted after ZeroOptimizer took it (model.to(), .half() or a new "
                ".data); move the model first, then wrap it, and use dtype= to convert"
            )
        place = unit.shaped(index, full[layout.whole(index)])
        place.copy_(param.detach().clone())  # it may lie where it goes to
        param.data = place
        found.append(index)
    return found


class ReplicatedParams:
    """Stages 0-2: parameters stay full on the device; after the update each rank's slice is gathered to all.

    Args:
        unit: whose parameters; they become views of ``full``.
        index: the unit's number, the same on all ranks.
        layout: of the flat buffer.
        comm: the ranks.
        initial: (layout.numel,) values to start from.
        partitioned: False (stage 0) lets every rank update everything.
    """

    def __init__(self, unit: Unit, index: int, layout: Layout, comm: Solo | Group, initial: Tensor, partitioned: bool) -> None:
        self.unit, self.index, self.layout, self.comm = unit, index, layout, comm
        self.held = layout.shard(comm.rank) if partitioned else slice(0, layout.numel)
        self.full = initial if initial.dtype == unit.dtype else initial.to(unit.dtype)
        self.shard = self.full[self.held]
        view_params(unit, layout, self.full)

    @property
    def is_whole(self) -> bool:
        """Tell if this rank's slice is everything."""
        return self.shard.numel() == self.full.numel()

    def publish(self) -> Awaited:
        """Gather the updated slices to every rank."""
        if self.is_whole:
            return COMPLETED
        return self.comm.all_gather(self.index, self.full, self.shard)

    def settle(self) -> None:
        """Nothing to do: nobody reads the slice."""

    def gather(self) -> None:
        """Nothing to do: parameters are full."""

    def pin(self) -> None:
        """Nothing to do: parameters are never released."""

    def unpin(self) -> None:
        """Nothing to do: parameters are never released."""

    @property
    def nbytes(self) -> dict[str, int]:
        return {"param": self.full.nbytes, "gathered": 0}
