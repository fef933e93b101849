"""Models larger than memory: a constructor is recorded, and run again for each unit.

Inside ``deferred_init`` new tensors have no memory, and what is done to them is written down.
Random numbers are drawn and dropped, and the generator's state before each draw is kept: a
ZeroOptimizer makes the same bits as plain construction under the same seed, one unit at a time.
Source: ZeRO-Infinity, arXiv 2104.07857, section 7.2.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_leaves, tree_map_only

from zk.addons.promised import promise, promise_of
from zk.config import parse_device

CPU, META = torch.device("cpu"), torch.device("meta")
# in-place calls after which nothing is left of what was there before
FILLS = "normal_ uniform_ zero_ fill_ copy_ random_ bernoulli_ exponential_ log_normal_ cauchy_"
# what is written in training, which the schema does not say
STATISTICS = {"native_batch_norm": ("running_mean", "running_var")}
SEEDED = torch.Tag.nondeterministic_seeded
_numbers = itertools.count()


@dataclasses.dataclass(eq=False, slots=True)
class View:
    """A tensor in a memory that does not exist."""

    memory: Memory
    dtype: torch.dtype
    layout: tuple[Any, ...]
    """Offset, size, strides."""

    @classmethod
    def of(cls, tensor: Tensor) -> View:
        memory: Any = promise_of(tensor)
        layout = int(tensor.storage_offset()), tensor.size(), tensor.stride()
        return cls(memory, tensor.dtype, layout)


@dataclasses.dataclass(eq=False, slots=True)
class Op:
    """One call, to be made again on tensors with memory."""

    func: Any
    given: Any
    """Its arguments: args, kwargs."""
    outputs: list[View]
    before: list[Op]
    """What wrote the bytes that it reads."""
    random: Tensor | None
    """The state of the generator before it, if it draws."""
    dtype: torch.dtype = dataclasses.field(default_factory=torch.get_default_dtype)
    """torch's default, of what is made without one."""
    number: int = dataclasses.field(default_factory=_numbers.__next__)


class Memory:
    """Promises the bytes of one storage as a constructor leaves them."""

    def __init__(self, nbytes: int, device: torch.device):
        self.nbytes, self.device = nbytes, device
        self.writers: list[Op] = []  # the last one
        self.versions = {0}  # of tensors on it, when construction was over

    def saw(self, tensor: Tensor) -> bool:
        return tensor._version in self.versions

    def make(self, tensor: Tensor) -> Tensor:
        storages: dict[Memory, torch.UntypedStorage] = {}

        def real(view: View) -> Any:
            if view.memory not in storages:
                room = torch.empty(view.memory.nbytes, dtype=torch.uint8, device=CPU)
                storages[view.memory] = room.untyped_storage()
            made: Any = torch.empty(0, dtype=view.dtype, device=CPU)
            return made.set_(storages[view.memory], *view.layout)

        with torch.no_grad(), torch.random.fork_rng(devices=[]), contextlib.ExitStack() as stack:
            stack.callback(torch.set_default_dtype, torch.get_default_dtype())
            for op in needed_for(self.writers):
                torch.set_default_dtype(op.dtype)
                if op.random is not None:
                    torch.set_rng_state(op.random)
                made = again(op.func, op.given, real, View)
                for output, value in zip(op.outputs, tensors_in(made), strict=True):
                    storages.setdefault(output.memory, value.untyped_storage())
        return real(View.of(tensor))  # type: ignore[no-any-return]


def needed_for(ops: list[Op]) -> list[Op]:
    """The calls, in order, whose effects are in what ``ops`` leave."""
    found, stack = set(ops), [*ops]
    while stack:
        new = set(stack.pop().before) - found
        found |= new
        stack += new
    return sorted(found, key=lambda op: op.number)


def tensors_in(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


class Answers(TorchFunctionMode):
    """Tells constructors that recorded tensors are in host memory, as they will be."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in ANSWERS and isinstance(promise_of(args[0]), Memory):
            return ANSWERS[func]
        here = {"device": CPU} if func is Tensor.new_tensor else {}
        return func(*args, **here | (kwargs or {}))


_T: Any = Tensor
ANSWERS = {_T.is_meta.__get__: False, _T.device.__get__: CPU}


class Recorder(TorchDispatchMode):
    """Makes tensors without memory, and writes down what happens to them."""

    def __init__(self, device: torch.device):
        super().__init__()  # type: ignore[no-untyped-call]
        self.device = device
        self.seen: list[Tensor] = []  # tensors that were written to, or made

    def __exit__(self, *error: Any) -> None:
        """Construction is over: what is written from now on would be lost."""
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        for tensor in self.seen:
            View.of(tensor).memory.versions.add(tensor._version)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunction():
            return self.call(func, args, on_cpu(kwargs or {}))

    def call(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        tensors, name = tensors_in((args, kwargs)), func._schema.name.split("::")[1]
        arguments = {argument.name: argument.alias_info for argument in func._schema.arguments}
        metas = [tensor for tensor in tensors if tensor.is_meta]
        if not metas and (tensors or "device" not in arguments):
            return func(*args, **kwargs)  # on values that are there
        if strangers := [t for t in metas if not isinstance(promise_of(t), Memory)]:
            raise RuntimeError(
                f"deferred_init: {func} takes a tensor of shape {tuple(strangers[0].shape)} "
                "without memory that was not made in it; build all of the model in the context"
            )
        given = dict(zip(arguments, args, strict=False)) | kwargs
        also, named = STATISTICS.get(name, ()), arguments.items()
        writes = [key for key, alias in named if key in also or (alias and alias.is_write)]
        written = tensors_in([given.get(key) for key in writes])
        options = kwargs | dict.fromkeys(arguments.keys() & {"device"}, META)
        try:
            if any(not tensor.is_meta for tensor in written):  # take values that are not there yet
                return again(func, (args, kwargs), value_of)
            result = again(func, (args, options), without_memory)
        except (NotImplementedError, RuntimeError):  # item(), nonzero(): it depends on values
            if written:
                raise
            return again(func, (args, kwargs), value_of)
        if not metas and not any(tensor.nbytes for tensor in tensors_in(result)):
            return func(*args, **kwargs)  # torch sets storages to it
        new = [tensor for tensor in tensors_in(result) if promise_of(tensor) is None]
        for tensor in new:
            promise(tensor, Memory(tensor.untyped_storage().nbytes(), self.device))
        if new or written:  # else it is a view
            self.seen += new + written
            self.record(func, (args, kwargs), result, written, name in FILLS.split())
        return result

    def record(self, func: Any, given: Any, result: Any, written: Any, fills: bool) -> None:
        """Write a call down: it makes or changes tensors without memory."""
        random = draw(func, given, fills) if SEEDED in func.tags else None
        reads = [tensor for tensor in tensors_in(given) if tensor.is_meta]
        whole = fills and reads[0].is_contiguous()  # then nothing is left of what it was
        whole = whole and reads[0].nbytes == View.of(reads[0]).memory.nbytes
        memories = dict.fromkeys(View.of(tensor).memory for tensor in reads[whole:])
        before = [op for memory in memories for op in memory.writers]
        outputs = [View.of(tensor) for tensor in tensors_in(result)]
        op = Op(func, tree_map_only(Tensor, kept_of, given), outputs, before, random)
        for view in (*outputs, *map(View.of, written)):
            view.memory.writers = [op]


def without_memory(tensor: Tensor) -> Tensor:
    """What stands for a tensor where results are not computed; a number stands for itself."""
    return tensor if tensor.is_meta or tensor.ndim == 0 else empty_as(tensor, META)


def empty_as(tensor: Tensor, device: torch.device = CPU) -> Tensor:
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=device)


def kept_of(tensor: Tensor) -> Any:
    """What a record keeps of a tensor: a copy of values, as they may change."""
    return View.of(tensor) if tensor.is_meta else tensor.detach().clone()


def again(func: Any, given: Any, stand_in: Callable[[Any], Any], kind: Any = Tensor) -> Any:
    """The call with something else in place of its tensors."""
    args, kwargs = tree_map_only(kind, stand_in, given)
    return func(*args, **kwargs)


def value_of(tensor: Tensor) -> Tensor:
    memory = promise_of(tensor)
    return tensor if memory is None else memory.make(tensor)


def draw(func: Any, given: Any, fills: bool) -> Tensor:
    """Draw what ``func`` would, so that later draws are the same; returns the state before."""
    if given[1].get("generator") is not None:
        raise RuntimeError(
            f"deferred_init: {func} draws from a generator of its own; use the default one "
            "(torch.manual_seed)"
        )
    state = torch.get_rng_state()
    again(func, given, empty_as if fills else value_of)
    return state


def on_cpu(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments without the meta device. RuntimeError for one that would draw other numbers."""
    device = kwargs.get("device") or CPU
    if torch.device(device).type not in ("cpu", "meta"):
        raise RuntimeError(
            f"deferred_init draws initial values on the CPU, and the model asks for {device}; "
            f"leave it out there and write deferred_init(device={str(device)!r})"
        )
    return kwargs | dict.fromkeys(kwargs.keys() & {"device"}, CPU)


@contextlib.contextmanager
def deferred_init(device: torch.device | str | None = None) -> Iterator[None]:
    """Context: modules built inside hold no memory, and ZeroOptimizer makes them unit by unit.

    The values have the same bits as plain construction. All that a constructor does to tensors is
    followed, with torch's default generator of the CPU: any initializer, also in place, on views,
    or depending on values through ``item()``. After the context such a model goes to
    load_pretrained or ZeroOptimizer; it cannot compute. What is written to it before is refused
    when it is made, but for writes through ``.data``, which nobody sees.

    Args:
        device: where the model will compute; None takes a GPU where there is one.

    Raises:
        RuntimeError: for a context within another, for initial values from another generator, and
            for a constructor that asks for another device than the CPU.
    """
    if any(isinstance(mode, Recorder) for mode in _get_current_dispatch_mode_stack()):
        raise RuntimeError(
            "deferred_init is entered within deferred_init; one context is enough for all modules"
        )
    where = default_device() if device is None else parse_device(device, "device")
    with Recorder(where), Answers():
        yield


def default_device() -> torch.device:
    """The current GPU; the CPU where there is none."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else CPU
