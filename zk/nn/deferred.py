"""Models larger than memory: a constructor is recorded, and run again for each unit.

Inside ``deferred_init`` large tensors have no memory, and what is done to them is written down. Random
numbers are drawn and dropped, and the generator's state before each draw is kept: a ZeroOptimizer
makes the same bits as plain construction under the same seed, one unit at a time.
Source: ZeRO-Infinity, arXiv 2104.07857, section 7.2.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_leaves, tree_map_only

from zk.options import parse_device
from zk.promised import promise, promise_of

SMALL = 1 << 16  # bytes: smaller tensors that a constructor begins with are made at once
CPU = torch.device("cpu")
# in-place calls after which nothing is left of what was there before
FILLS = {"normal_", "uniform_", "zero_", "fill_", "copy_", "random_", "bernoulli_", "exponential_"}
FILLS |= {"log_normal_", "cauchy_", "geometric_"}
# what changes statistics in training and does not say so in its schema
STATISTICS = "native_batch_norm", ("running_mean", "running_var")
_numbers = itertools.count()


@dataclasses.dataclass(eq=False, slots=True)
class View:
    """A tensor in a memory that does not exist."""

    memory: Memory
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, tensor: Tensor) -> View:
        memory = promise_of(tensor)
        assert isinstance(memory, Memory)
        size, stride = tensor.size(), tensor.stride()
        return cls(memory, tensor.dtype, size, stride, int(tensor.storage_offset()))


@dataclasses.dataclass(eq=False, slots=True)
class Op:
    """One call, to be made again on tensors with memory."""

    number: int
    func: Any
    args: Any
    kwargs: dict[str, Any]
    outputs: list[View]
    before: list[Op]
    """What wrote the bytes that it reads."""
    random: Tensor | None
    """The state of the generator before it, if it draws."""
    dtype: torch.dtype
    """torch's default, of what is made without one."""


class Memory:
    """Promises the bytes of one storage as a constructor leaves them."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self.nbytes, self.device = nbytes, device
        self.last: Op | None = None  # that wrote to it
        self.versions = {0}  # of tensors on it, when construction was over

    def saw(self, tensor: Tensor) -> bool:
        return tensor._version in self.versions

    def make(self, tensor: Tensor) -> Tensor:
        memories: dict[Memory, torch.UntypedStorage] = {}

        def real(view: View) -> Tensor:
            if view.memory not in memories:
                room = torch.empty(view.memory.nbytes, dtype=torch.uint8, device=CPU)
                memories[view.memory] = room.untyped_storage()
            storage, made = memories[view.memory], torch.empty(0, dtype=view.dtype, device=CPU)
            return made.set_(storage, view.offset, view.size, view.stride)  # type: ignore[call-overload, no-any-return]

        with torch.no_grad(), torch.random.fork_rng(devices=[]), contextlib.ExitStack() as stack:
            stack.callback(torch.set_default_dtype, torch.get_default_dtype())
            for op in needed_for(self.last):
                torch.set_default_dtype(op.dtype)
                if op.random is not None:
                    torch.set_rng_state(op.random)
                args, kwargs = tree_map_only(View, real, (op.args, op.kwargs))
                made = tensors_in(op.func(*args, **kwargs))
                for output, value in zip(op.outputs, made, strict=True):
                    memories.setdefault(output.memory, value.untyped_storage())
        return real(View.of(tensor))


def needed_for(last: Op | None) -> list[Op]:
    """The calls, in order, whose effects are in what ``last`` leaves."""
    found, stack = set[Op](), [last] if last is not None else []
    while stack:
        op = stack.pop()
        if op not in found:
            found.add(op)
            stack += op.before
    return sorted(found, key=lambda op: op.number)


def tensors_in(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


class Answers(TorchFunctionMode):
    """Tells constructors that recorded tensors are in host memory, as they will be."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in ANSWERS:
            with torch._C.DisableTorchFunction():
                if isinstance(promise_of(args[0]), Memory):
                    return ANSWERS[func]
        if func is Tensor.new_tensor:
            kwargs = {"device": CPU, **kwargs}
        return func(*args, **kwargs)


ANSWERS: dict[Any, Any] = {Tensor.is_meta.__get__: False, Tensor.device.__get__: CPU}  # type: ignore[attr-defined]


class Recorder(TorchDispatchMode):
    """Makes large tensors without memory, and writes down what happens to them."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.device = device
        self.seen: list[Tensor] = []  # tensors that were written to, or made

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunction():
            return self.call(func, args, on_cpu(kwargs or {}))

    def call(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        tensors = tensors_in((args, kwargs))
        metas = [tensor for tensor in tensors if tensor.is_meta]
        arguments = {argument.name: argument.alias_info for argument in func._schema.arguments}
        name = func._schema.name.split("::")[1]
        makes = "device" in arguments and (not tensors or name.startswith("new_"))
        if not metas and not makes:
            return self.with_values(func, args, kwargs)
        for tensor in metas:
            if not isinstance(promise_of(tensor), Memory):
                raise RuntimeError(
                    f"deferred_init: {func} takes a tensor of shape {tuple(tensor.shape)} without "
                    "memory that was not made in it; build all of the model within deferred_init"
                )
        given = dict(zip(arguments, args, strict=False)) | kwargs
        writes = [key for key, alias in arguments.items() if alias is not None and alias.is_write]
        if name == STATISTICS[0] and given["training"]:
            writes += STATISTICS[1]
        written = tensors_in([given.get(key) for key in writes])
        try:
            bare, options = tree_map_only(Tensor, without_memory, (args, kwargs))
            if "device" in arguments:
                options["device"] = torch.device("meta")
            if any(not tensor.is_meta for tensor in written):  # take values that are not there yet
                return on_values(func, args, kwargs)
            result = func(*bare, **options)
        except (NotImplementedError, RuntimeError):  # item(), nonzero(): it depends on values
            if written:
                raise
            return on_values(func, args, kwargs)
        if not metas and sum(tensor.nbytes for tensor in tensors_in(result)) <= SMALL:
            return self.with_values(func, args, kwargs)
        self.record(func, args, kwargs, result, metas, written)
        return result

    def with_values(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """A call on values that are there; what it makes will go to the device with the others."""
        result = func(*args, **kwargs)
        for tensor in tensors_in(result):
            is_new = not any(torch._C._is_alias_of(tensor, given) for given in tensors_in(args))  # type: ignore[attr-defined]
            if is_new and tensor.layout is torch.strided:
                promise(tensor, Memory(0, self.device))
        return result

    def record(
        self,
        func: Any,
        args: Any,
        kwargs: dict[str, Any],
        result: Any,
        metas: list[Tensor],
        written: list[Tensor],
    ) -> None:
        """Write a call down: it makes or changes tensors without memory."""
        new = [tensor for tensor in tensors_in(result) if promise_of(tensor) is None]
        if not (new or written):
            return  # a view
        random = None
        fills = func._schema.name.split("::")[1] in FILLS
        if torch.Tag.nondeterministic_seeded in func.tags:
            random = draw(func, args, kwargs, fills)
        for tensor in new:
            promise(tensor, Memory(tensor.untyped_storage().nbytes(), self.device))
        reads = {View.of(tensor).memory: None for tensor in metas}
        targets = {id(tensor) for tensor in written}
        others = {View.of(tensor).memory for tensor in metas if id(tensor) not in targets}
        for tensor in written if fills else ():
            memory = View.of(tensor).memory
            if tensor.is_contiguous() and tensor.nbytes == memory.nbytes and memory not in others:
                reads.pop(memory, None)
        before = [memory.last for memory in reads if memory.last is not None]
        given = tree_map_only(Tensor, kept_of, (args, kwargs))
        outputs = [View.of(tensor) for tensor in tensors_in(result)]
        dtype = torch.get_default_dtype()
        op = Op(next(_numbers), func, given[0], given[1], outputs, before, random, dtype)
        for tensor in (*new, *written):
            View.of(tensor).memory.last = op
            self.seen.append(tensor)

    def end(self) -> None:
        """Construction is over: what is written from now on would be lost."""
        for tensor in self.seen:
            View.of(tensor).memory.versions.add(tensor._version)
        self.seen.clear()


def without_memory(tensor: Tensor) -> Tensor:
    """What stands for a tensor where results are not computed; a number stands for itself."""
    if tensor.is_meta or tensor.ndim == 0:
        return tensor
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta")


def kept_of(tensor: Tensor) -> Any:
    """What a record keeps of a tensor: a copy of values, as they may change."""
    return View.of(tensor) if tensor.is_meta else tensor.detach().clone()


def on_values(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """The call on tensors that are made for it."""
    args, kwargs = tree_map_only(Tensor, value_of, (args, kwargs))
    return func(*args, **kwargs)


def value_of(tensor: Tensor) -> Tensor:
    memory = promise_of(tensor)
    return memory.make(tensor) if memory is not None else tensor


def draw(func: Any, args: Any, kwargs: dict[str, Any], fills: bool) -> Tensor:
    """Draw what ``func`` would, so that later draws are the same; returns the state before."""
    if kwargs.get("generator") is not None:
        raise RuntimeError(
            f"deferred_init: {func} draws from a generator of its own; use the default one "
            "(torch.manual_seed)"
        )

    def scratch(tensor: Tensor) -> Tensor:
        return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=CPU)

    state = torch.get_rng_state()
    made = tree_map_only(Tensor, scratch if fills else value_of, (args, kwargs))
    func(*made[0], **made[1])
    return state


def on_cpu(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments without the meta device. RuntimeError for a device that would draw other numbers."""
    device = kwargs.get("device")
    if device is None:
        return kwargs
    if torch.device(device).type not in ("cpu", "meta"):
        raise RuntimeError(
            f"deferred_init draws initial values on the CPU, and the model asks for {device}; leave "
            f"it out there and write deferred_init(device={str(device)!r})"
        )
    return {**kwargs, "device": CPU}


@contextlib.contextmanager
def deferred_init(device: torch.device | str | None = None) -> Iterator[None]:
    """Context: modules built inside hold no memory, and ZeroOptimizer makes them unit by unit.

    The values have the same bits as plain construction. All that a constructor does to tensors is
    followed, with torch's default generator of the CPU: any initializer, also in place, on views, or
    depending on values through ``item()``. After the context such a model goes to load_pretrained
    or ZeroOptimizer; it cannot compute. What is written to it before is refused when it is made,
    but for writes through ``.data``, which nobody sees.

    Args:
        device: where the model will compute; None takes a GPU where there is one.

    Raises:
        RuntimeError: for a context within another, for initial values from another generator, and
            for a constructor that asks for another device than the CPU.
    """
    if any(isinstance(mode, Recorder) for mode in _get_current_dispatch_mode_stack()):
        raise RuntimeError(
            "deferred_init is entered within deferred_init; one context around all modules is enough"
        )
    recorder = Recorder(default_device() if device is None else parse_device(device, "device"))
    try:
        with Answers(), recorder:
            yield
    finally:
        recorder.end()


def default_device() -> torch.device:
    """The current GPU; the CPU where there is none."""
    found = torch.cuda.is_available()
    return torch.device("cuda", torch.cuda.current_device()) if found else CPU
