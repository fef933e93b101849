"""The record of a run: its losses and times, its bytes by tier in one step, and the timeline of another."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator

import torch

import zk
from zk.timeline import Recorder, Resource, Timeline, note, now_ns
from zk.train.gpt import GPT

_HOOKS: dict[str, tuple[Resource, bool]] = {  # of a block: what it is in then, and whether that begins
    "register_forward_pre_hook": ("forward", True),
    "register_forward_hook": ("forward", False),
    "register_full_backward_pre_hook": ("backward", True),
    "register_full_backward_hook": ("backward", False),
}


@dataclasses.dataclass(slots=True)
class Record:
    """The figures that a run leaves for its report."""

    losses: list[float] = dataclasses.field(default_factory=list)
    valid: dict[int, float] = dataclasses.field(default_factory=dict)
    step_ms: list[float] = dataclasses.field(default_factory=list)
    # one step: (phase, {"device param": bytes, ...}) at each sampling point, in order
    nbytes: list[tuple[str, dict[str, int]]] = dataclasses.field(default_factory=list)
    check_losses: list[float] = dataclasses.field(default_factory=list)
    profiled: tuple[int, Timeline] | None = None  # number of a step, from 1, and its timeline


@contextlib.contextmanager
def _at_blocks(model: GPT, call: Callable[..., None]) -> Iterator[None]:
    """Call ``call(block, resource, begins, *of the hook)`` where the forward and backward of each block begin and end."""
    with contextlib.ExitStack() as stack:
        for index, block in enumerate(model.blocks):
            for register, when in _HOOKS.items():
                stack.enter_context(getattr(block, register)(functools.partial(call, f"blocks.{index}", *when)))
        yield


@contextlib.contextmanager
def profiled(model: GPT, device: torch.device, record: Record, step: int) -> Iterator[None]:
    """Record the timeline of step number ``step``, with a span for each block's forward and backward."""
    began: dict[tuple[str, Resource], int] = {}

    def mark(block: str, resource: Resource, begins: bool, *_: object) -> None:
        if begins:
            began[block, resource] = now_ns()
        elif (block, resource) in began:
            note(resource, block, began.pop((block, resource)), now_ns(), holds=True)

    with _at_blocks(model, mark), Recorder(device) as recorder:
        yield
    record.profiled = (step, recorder.timeline)


@contextlib.contextmanager
def watched(model: GPT, optimizer: zk.ZeroOptimizer, record: Record) -> Iterator[Callable[[str], None]]:
    """Note the bytes of every tier as one step goes through its phases, block by block."""

    def sample(phase: str) -> None:
        record.nbytes.append((phase, {f"{tier} {kind}": nbytes for (tier, kind), nbytes in state_nbytes(optimizer).items()}))

    def at_block(block: str, resource: Resource, begins: bool, *_: object) -> None:
        if begins == (resource == "forward"):  # before a block's forward, and after its backward
            sample(resource)

    with _at_blocks(model, at_block):
        sample("start")
        yield sample


def state_nbytes(optimizer: zk.ZeroOptimizer) -> dict[tuple[str, str], int]:
    """Bytes of this rank's training state, by tier and kind."""
    found: dict[tuple[str, str], int] = {}
    for key, value in optimizer.metrics().items():
        tier, _, kind = key.removesuffix("_nbytes").partition("_")
        if key.endswith("_nbytes") and tier in ("device", "host", "nvme"):
            found[tier, kind.replace("_", " ")] = int(value)
    return found
