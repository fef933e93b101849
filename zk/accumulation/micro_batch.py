"""The forward of one micro-batch, in a thread that stops at each block, with random numbers, attributes and settings of its own."""

from __future__ import annotations

import contextlib
import contextvars
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from zk.nn.deferred import random_state, set_random_state

Edge = tuple[Any, int]  # a node of the graph, and the number of its output
Changes = dict[tuple[nn.Module, str], Any]  # values of attributes

# settings of the process that a forward may change around a block
_SETTINGS: tuple[tuple[Callable[[], Any], Callable[[Any], Any]], ...] = (
    (torch.get_default_dtype, torch.set_default_dtype),
    (torch.backends.cuda.flash_sdp_enabled, torch.backends.cuda.enable_flash_sdp),
    (torch.backends.cuda.mem_efficient_sdp_enabled, torch.backends.cuda.enable_mem_efficient_sdp),
    (torch.backends.cuda.math_sdp_enabled, torch.backends.cuda.enable_math_sdp),
    (torch.backends.cuda.cudnn_sdp_enabled, torch.backends.cuda.enable_cudnn_sdp),
)
_ABSENT = object()


class Stopped(Exception):
    """Ends the thread of a micro-batch, as another one has failed."""


class Random:
    """States of the generators, of the host and of the device that computes."""

    def __init__(self, device: torch.device) -> None:
        self.places = list(dict.fromkeys((torch.device("cpu"), device)))

    def seeded(self, seed: int) -> list[Tensor]:
        """States of new generators with this seed."""
        return [torch.Generator(place).manual_seed(seed).get_state() for place in self.places]

    def now(self, before: list[Tensor]) -> list[Tensor]:
        """States as they are; ``before`` itself if they have not changed, so that calls share it: it has 5 KB."""
        states = [random_state(place) for place in self.places]
        return before if before and all(map(torch.equal, before, states)) else states

    def set(self, states: Sequence[Tensor]) -> None:
        """Go on from ``states``."""
        for place, state in zip(self.places, states, strict=True):
            set_random_state(place, state)


class Attributes:
    """Attributes that each micro-batch has set on the model's modules, which the others do not see.

    ``base`` is what all see, of attributes that anybody has set. A micro-batch's own values are put over it where it runs, and taken away again.
    """

    def __init__(self, model: nn.Module) -> None:
        self.modules = set(model.modules())
        self.base: Changes = {}

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Context: what is set on modules, and deleted, is noted before."""
        set_to, delete = nn.Module.__setattr__, nn.Module.__delattr__

        def note(module: nn.Module, name: str, value: Any) -> None:
            if module in self.modules and name not in module._parameters:
                before = _space(module, name).get(name, _ABSENT)
                if before is not value:
                    self.base.setdefault((module, name), before)

        def noted_set(module: nn.Module, name: str, value: Any) -> None:
            note(module, name, value)
            set_to(module, name, value)

        def noted_delete(module: nn.Module, name: str) -> None:
            note(module, name, _ABSENT)
            delete(module, name)

        nn.Module.__setattr__, nn.Module.__delattr__ = noted_set, noted_delete  # type: ignore[assignment,method-assign]
        try:
            yield
        finally:
            nn.Module.__setattr__, nn.Module.__delattr__ = set_to, delete  # type: ignore[method-assign]

    def changes(self) -> Changes:
        """Values that differ from the base now."""
        now = {(module, name): _space(module, name).get(name, _ABSENT) for module, name in self.base}
        return {key: value for key, value in now.items() if value is not self.base[key]}

    def put(self, values: Changes) -> None:
        """Set attributes, or delete them."""
        for (module, name), value in values.items():
            if value is _ABSENT:
                _space(module, name).pop(name, None)
            else:
                _space(module, name)[name] = value

    def take_away(self, values: Collection[tuple[nn.Module, str]]) -> None:
        """Make these what they are in the base."""
        self.put({key: self.base[key] for key in values})

    def keep(self, values: Changes) -> None:
        """Make them what all see."""
        self.put(values)
        self.base.update(values)


def _space(module: nn.Module, name: str) -> dict[str, Any]:
    """The dictionary that an attribute is in."""
    return module._buffers if name in module._buffers else module.__dict__


@contextlib.contextmanager
def settings_of(own: list[Any]) -> Iterator[None]:
    """Context: the process has the settings ``own``, which are kept up to date; empty ones are as outside."""
    outside = [get() for get, _ in _SETTINGS]

    def change(before: Sequence[Any], after: Sequence[Any]) -> None:
        for (_, set_to), old, new in zip(_SETTINGS, before, after, strict=True):
            if old != new:
                set_to(new)

    change(outside, own or outside)
    try:
        yield
    finally:
        own[:] = [get() for get, _ in _SETTINGS]
        change(own, outside)


class MicroBatch(threading.Thread):
    """The forward of one micro-batch. It runs between ``go_on`` and its next call of a block.

    Args:
        number: of the micro-batch.
        compute: what loss_fn makes of it.
        random: where its random numbers begin.
    """

    def __init__(self, number: int, compute: Callable[[], Any], random: list[Tensor]) -> None:
        super().__init__(name=f"zk micro-batch {number}", daemon=True)
        self.compute: Callable[[], Any] | None = compute
        self.random, self.context = random, contextvars.copy_context()
        self.go, self.stands = threading.Event(), threading.Event()
        self.waiting: Any = None  # the call that it waits for
        self.calls: list[Any] = []  # those that backward has to go through
        self.turn = (0, -1)  # of the last call: how often it had come back to an earlier block, and the block's position
        self.first_use: dict[Edge, int] = {}  # number of the first call that takes what comes from there
        self.pending: dict[Edge, tuple[GradientEdge, Tensor]] = {}  # gradients that have not gone on
        self.progress: dict[str, Any] = {}  # of Partition
        self.attributes: Changes = {}
        self.settings: list[Any] = []
        self.result: Any = None  # of loss_fn
        self.loss: Tensor | None = None  # that it has asked backward of
        self.error: BaseException | None = None
        self.stopped = self.ended = False

    def run(self) -> None:
        """Compute the loss."""
        self.go.wait()
        try:
            if not self.stopped and self.compute is not None:
                self.result = self.context.run(self.compute)
        except BaseException as error:
            self.error = error
        finally:
            self.waiting, self.compute, self.ended = None, None, True
            self.stands.set()

    @staticmethod
    def defer(loss: Tensor) -> bool:
        """In the thread of a micro-batch: note that backward is asked of ``loss``, which comes later. False in any other thread."""
        thread = threading.current_thread()
        if not isinstance(thread, MicroBatch) or thread.ended:
            return False
        thread.loss = loss if thread.loss is None else thread.loss + loss
        return True

    def wait_for(self, call: Any) -> None:
        """Stop until the call has been made."""
        self.waiting = call
        self.go.clear()
        self.stands.set()
        self.go.wait()
        if self.stopped:
            raise Stopped

    def go_on(self) -> None:
        """Let it run until it waits for a call, or ends; then return, also where this is interrupted."""
        self.waiting = None
        self.stands.clear()
        self.go.set()
        try:
            self.stands.wait()
        except BaseException:
            self.stands.wait()
            raise
