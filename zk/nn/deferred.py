"""Recording of a module's constructor, so that parameters get their values when, and where, they are first needed.

``deferred_init`` runs a model's own construction on tensors without memory and records what is done to each. Random numbers are drawn
and dropped, so the generator's state before each draw is known, and later draws are the same. ZeroOptimizer makes the values one
parameter at a time: the same bits as plain construction under the same seed.
Source: ZeRO-Infinity, arXiv 2104.07857, section 7.2 (initialization of models that exceed memory).
"""

from __future__ import annotations

import bisect
import contextlib
import dataclasses
import functools
import itertools
import weakref
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

from zk.core.memory import aligned
from zk.core.options import parse_device
from zk.core.owners import inner_tensors

if TYPE_CHECKING:
    from zk.offload.nvme import Excerpt

_CPU = torch.device("cpu")
# in-place calls after which nothing is left of what was there before
_FILLS = {"normal_", "uniform_", "zero_", "fill_", "copy_", "random_", "bernoulli_", "exponential_", "log_normal_", "cauchy_", "geometric_"}
# what changes running_mean and running_var in training, and does not say so in its schema
_WRITES_STATISTICS = {"aten::native_batch_norm", "aten::cudnn_batch_norm", "aten::miopen_batch_norm"}


@dataclasses.dataclass(slots=True)
class _Op:
    """One call on tensors without memory, to be made again on real ones."""

    func: Any
    args: Any
    kwargs: dict[str, Any]
    outputs: list[Tensor]
    reads: list[int]  # storages whose bytes it needs
    place: torch.device  # where plain construction would have run it
    random: Tensor | None  # the state of the generator there before it
    dtype: torch.dtype  # torch's default, of what is made without one


def _is_meta(tensor: Tensor) -> bool:
    """Tell if ``tensor`` has no memory. Tensor.is_meta says no while a model is recorded."""
    return tensor.device.type == "meta"


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _room(nbytes: int, place: torch.device) -> Tensor:
    """Bytes without content."""
    return aligned(nbytes) if place.type == "cpu" else torch.empty(nbytes, dtype=torch.uint8, device=place)


class Recording:
    """The record of a construction, in order. Lives as long as one of the parameters that were registered in it."""

    def __init__(self, device: torch.device) -> None:
        self.device = device  # where the model will compute
        self.places: dict[int, torch.device] = {}  # storage -> where plain construction would have made it
        self.ops: list[_Op] = []
        self.writers: dict[int, list[int]] = {}  # storage -> the ops that made or changed it
        self.tensors: dict[int, list[Tensor]] = {}  # storage -> tensors that were seen on it
        self.versions: dict[int, set[int]] = {}  # storage -> their versions when construction was over

    def __deepcopy__(self, memo: Any) -> Recording:
        return self  # a copied tensor remembers the same construction

    def place_of(self, tensor: Tensor) -> torch.device:
        """The device on which plain construction would have ``tensor``."""
        return self.places.get(_storage(tensor), _CPU) if _is_meta(tensor) else tensor.device

    def add(self, op: _Op, writes: Sequence[Tensor]) -> None:
        self.ops.append(op)
        for storage in {_storage(tensor) for tensor in writes}:
            self.places.setdefault(storage, op.place)
            self.writers.setdefault(storage, []).append(len(self.ops) - 1)
        for tensor in writes:
            self.tensors.setdefault(_storage(tensor), []).append(tensor)

    def end(self) -> None:
        """Construction is over."""
        for tensor in itertools.chain.from_iterable(self.tensors.values()):
            self.versions.setdefault(_storage(tensor), {0}).add(tensor._version)  # by where it lies now: .half() and .to() move it
            if isinstance(tensor, nn.Parameter) and _SOURCE in tensor.__dict__ and not isinstance(tensor, _WithoutMemory):
                tensor.__class__ = _stand_in(type(tensor))  # type: ignore[assignment]
        self.tensors.clear()

    def saw(self, tensor: Tensor) -> bool:
        return tensor._version in self.versions.get(_storage(tensor), ())

    def place(self, dtype: torch.dtype) -> Excerpt | None:
        """None: values that a constructor makes are in no file."""
        return None

    def knows(self, tensor: Tensor) -> bool:
        return _storage(tensor) in self.writers

    def _needed(self, storage: int) -> list[_Op]:
        """The ops, in order, whose effects the bytes of ``storage`` carry."""
        stack, followed = [(storage, len(self.ops))], set[tuple[int, int]]()
        while stack:
            current, before = stack.pop()
            writers = self.writers.get(current, [])
            for index in reversed(writers[: bisect.bisect_left(writers, before)]):
                if (current, index) in followed:
                    break  # and with it all that is before
                followed.add((current, index))
                reads = self.ops[index].reads
                stack += [(read, index) for read in reads if read != current]
                if current not in reads:
                    break  # it overwrites everything
        return [self.ops[index] for index in sorted({index for _, index in followed})]

    def make(self, tensor: Tensor) -> Tensor:
        """The values of ``tensor`` as plain construction would have left them, and where."""
        memory: dict[int, torch.UntypedStorage] = {}

        def real(meta: Tensor) -> Tensor:
            if not _is_meta(meta):
                return meta
            key = _storage(meta)
            if key not in memory:
                memory[key] = _room(meta.untyped_storage().nbytes(), self.places.get(key, _CPU)).untyped_storage()
            view = torch.empty(0, dtype=meta.dtype, device=memory[key].device)
            return view.set_(memory[key], meta.storage_offset(), meta.size(), meta.stride())  # type: ignore[call-overload, no-any-return]

        needed = self._needed(_storage(tensor))
        drawn = {op.place for op in needed if op.random is not None and op.place.type == "cuda"}
        with contextlib.ExitStack() as stack, torch.no_grad(), torch.random.fork_rng(drawn, device_type="cuda"):
            stack.callback(torch.set_default_dtype, torch.get_default_dtype())
            for op in needed:
                torch.set_default_dtype(op.dtype)
                if op.random is not None:
                    set_random_state(op.place, op.random)
                args, kwargs = tree_map_only(Tensor, real, (op.args, op.kwargs))
                made = _tensors(op.func(*args, **kwargs))
                for meta, value in zip(op.outputs, made, strict=True):
                    memory.setdefault(_storage(meta), value.untyped_storage())
        return real(tensor.detach())


def random_state(place: torch.device) -> Tensor:
    """The state of the default generator there."""
    return torch.cuda.get_rng_state(place) if place.type == "cuda" else torch.get_rng_state()


def set_random_state(place: torch.device, state: Tensor) -> None:
    """Go on from ``state`` there."""
    torch.cuda.set_rng_state(state, place) if place.type == "cuda" else torch.set_rng_state(state)


_LOOKS = {Tensor.tolist, Tensor.numpy, Tensor.__array__, Tensor.__repr__, Tensor.__format__}
_FROM_NUMBERS = {torch.tensor, torch.as_tensor, torch.asarray}


class _Calls(TorchFunctionMode):
    """Calls that the recorder would not see as they are.

    ``tensor[indices] = number`` makes the number a tensor, copying makes a storage, and looking at values ends in C.
    """

    def __init__(self, recording: Recording) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.recording = recording

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _LOOKS and _is_meta(args[0]) and self.recording.knows(args[0]):
            with _disable_current_modes():
                return func(self.recording.make(args[0]).requires_grad_(args[0].requires_grad), *args[1:], **kwargs)
        if func is Tensor.__setitem__ and isinstance(args[2], (bool, int, float, complex)):
            args = (*args[:2], torch.tensor(args[2], dtype=args[0].dtype))
        if func is Tensor.new_tensor and _is_meta(args[0]):
            func, args, kwargs = torch.tensor, args[1:], {"dtype": args[0].dtype, **kwargs}
        if func in _FROM_NUMBERS and str(kwargs.get("device")) == "meta":
            kwargs = {**kwargs, "device": None}  # that of another tensor here
        if func is Tensor.__deepcopy__ and not _is_meta(args[0]):
            with _disable_current_modes():  # what has memory is copied by its storage, and that is made like a tensor
                return func(*args, **kwargs)  # type: ignore[no-untyped-call]
        return func(*args, **kwargs)


class _Recorder(TorchDispatchMode):
    """Turns every tensor that is made into one without memory, and writes down what happens to it."""

    def __init__(self, recording: Recording) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.recording = recording

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = _tensors((args, kwargs))
        metas = [tensor for tensor in tensors if _is_meta(tensor)]
        takes_device = any(argument.name == "device" for argument in func._schema.arguments)
        moves = tensors and str(kwargs.get("device")) == "meta"  # to where another tensor is
        if not metas and not moves and (tensors or not takes_device):
            return func(*args, **kwargs)  # real values that the user brought
        if lost := [tuple(tensor.shape) for tensor in metas if not self.recording.knows(tensor)]:
            what = f"{func} takes a tensor of shape {lost[0]} without memory that was not made in it"
            raise RuntimeError(f"deferred_init: {what}; build all of the model within one deferred_init")
        written = _written(func, args, kwargs)
        if not all(map(_is_meta, written)):  # a real tensor takes values that do not exist yet
            return self._on_values(func, args, kwargs)
        place = self._place(tensors, kwargs.get("device"))
        kwargs = {key: value for key, value in kwargs.items() if key != "pin_memory"}
        meta_args, meta_kwargs = tree_map_only(Tensor, _without_memory, (args, kwargs))
        if takes_device:
            meta_kwargs, kwargs = {**meta_kwargs, "device": torch.device("meta")}, {**kwargs, "device": place}
        state = self._draw(func, args, kwargs, place) if torch.Tag.nondeterministic_seeded in func.tags else None
        try:
            result = func(*meta_args, **meta_kwargs)
        except (NotImplementedError, RuntimeError):
            if not tensors or written:
                raise
            if state is not None:
                set_random_state(place, state)  # it was drawn above, to no end
            # the result depends on values: tensor.item(), nonzero() and their like
            return self._on_values(func, args, kwargs)
        outputs, given = _tensors(result), {_storage(tensor) for tensor in metas}
        new = [tensor for tensor in outputs if _storage(tensor) not in given]
        if written or new:
            are_whole = (one.storage_offset() == 0 and one.is_contiguous() and one.nbytes == one.untyped_storage().nbytes() for one in written)
            overwritten = {_storage(tensor) for tensor in written} if _fills(func) and all(are_whole) else set()
            others = {_storage(tensor) for tensor in metas if not any(tensor is target for target in written)}
            reads = [storage for storage in given if storage not in overwritten or storage in others]
            # objects of our own, as parameters will be given memory; copies of what is real, as it may change
            args, kwargs, outputs = tree_map_only(Tensor, _kept, (args, kwargs, outputs))
            self.recording.add(_Op(func, args, kwargs, outputs, reads, place, state, torch.get_default_dtype()), [*written, *new])
        return result

    def _on_values(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The call on tensors that are made for it."""
        args, kwargs = tree_map_only(Tensor, lambda tensor: self.recording.make(tensor) if _is_meta(tensor) else tensor, (args, kwargs))
        return func(*args, **kwargs)

    def _place(self, tensors: list[Tensor], asked: torch.device | None) -> torch.device:
        """The device on which plain construction would run an operation on ``tensors``: numbers that a GPU draws are other ones than the CPU's."""
        if asked is None:
            return next((place for place in map(self.recording.place_of, tensors) if place.type == "cuda"), _CPU)
        return parse_device(asked) if asked.type == "cuda" else _CPU

    def _draw(self, func: Any, args: Any, kwargs: dict[str, Any], place: torch.device) -> Tensor:
        """Draw what ``func`` would, so that the generator goes on as it would; returns its state before."""
        if kwargs.get("generator") is not None:
            raise RuntimeError(f"deferred_init: {func} draws from a generator of its own; use the default one (torch.manual_seed)")

        def scratch(tensor: Tensor) -> Tensor:
            room = _room(tensor.untyped_storage().nbytes(), self.recording.place_of(tensor))
            return room.view(tensor.dtype).as_strided(tensor.size(), tensor.stride())

        state, made = random_state(place), scratch if _fills(func) else self.recording.make
        args, kwargs = tree_map_only(Tensor, lambda tensor: made(tensor) if _is_meta(tensor) else tensor, (args, kwargs))
        func(*args, **kwargs)
        return state


def _fills(func: Any) -> bool:
    """Tell if nothing is left of what a tensor was before."""
    return func._schema.name.split("::")[1] in _FILLS


def _written(func: Any, args: Any, kwargs: dict[str, Any]) -> list[Tensor]:
    """The tensors that a call writes to."""
    arguments = {argument.name: argument.alias_info for argument in func._schema.arguments}
    given = {**dict(zip(arguments, args, strict=False)), **kwargs}
    names = [name for name, alias in arguments.items() if alias is not None and alias.is_write]
    if func._schema.name in _WRITES_STATISTICS and given.get("training"):
        names += ["running_mean", "running_var"]
    return [given[name] for name in names if isinstance(given.get(name), Tensor)]


def _kept(tensor: Tensor) -> Tensor:
    return tensor.detach() if _is_meta(tensor) else tensor.detach().clone()


def _without_memory(tensor: Tensor) -> Tensor:
    if _is_meta(tensor) or tensor.ndim == 0:
        return tensor
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta")


class Source(Protocol):
    """A source of values for a tensor without memory."""

    @property
    def device(self) -> torch.device:
        """The device that the model will compute on."""

    def make(self, tensor: Tensor) -> Tensor:
        """The values, in host memory or on a GPU."""

    def saw(self, tensor: Tensor) -> bool:
        """Tell if the tensor is as it was when the source was given to it."""

    def place(self, dtype: torch.dtype) -> Excerpt | None:
        """The bytes of the values in a file, if they lie there in ``dtype``, one after the other."""


class _WithoutMemory:
    """Mixed into the class of parameters whose values do not exist yet, so that writes which autograd does not count are refused."""

    @property
    def data(self) -> Tensor:
        raise RuntimeError(
            "this parameter's values do not exist yet, so they cannot be read, written or converted: initialize inside zk.deferred_init(), and "
            "convert with ZeroOptimizer(dtype=...), which makes them"
        )

    @data.setter
    def data(self, value: Tensor) -> None:
        self.data  # noqa: B018  (raises)


@functools.cache
def _stand_in(kind: type[Tensor]) -> type[Tensor]:
    return type(kind.__name__, (_WithoutMemory, kind), {"__module__": kind.__module__})


# a storage without memory -> the recording that made it
_RECORDINGS: weakref.WeakValueDictionary[int, Recording] = weakref.WeakValueDictionary()
_SOURCE = "_zk_source"


@contextlib.contextmanager
def deferred_init(device: torch.device | str | None = None) -> Iterator[None]:
    """Context: modules built inside hold no memory; ``ZeroOptimizer`` makes their values unit by unit, the same bits as plain construction.

    Args:
        device: where the model will compute; None takes a GPU where there is one.

    All that a constructor does to tensors is followed (any initializer, also in place, on views, or depending on values through
    ``item()``), with torch's default generators: what is built with ``device="cuda"`` is drawn by that GPU, anything else by the CPU.
    After the context such a model can be given to ZeroOptimizer or load_pretrained; it cannot compute, and what changes its parameters
    in between is refused when they are made.

    Raises:
        RuntimeError: for a context within another, and for initial values from another generator than the default one.
    """
    recording = Recording(default_device() if device is None else parse_device(device))

    def registered(_module: nn.Module | None, _name: str, tensor: Tensor | None) -> None:
        if tensor is not None and _is_meta(tensor) and recording.knows(tensor):
            tensor.__dict__[_SOURCE] = recording  # keeps it alive
            recording.tensors.setdefault(_storage(tensor), []).append(tensor)

    copy_parameter = nn.Parameter.__deepcopy__

    def deepcopy(param: nn.Parameter, memo: dict[int, Any]) -> nn.Parameter:
        copied: nn.Parameter = copy_parameter(param, memo)  # type: ignore[no-untyped-call]
        registered(None, "", copied)
        return copied

    # torch's initializers look at is_meta and do nothing for tensors without memory; here they are to be followed
    if "is_meta" in torch.Tensor.__dict__:
        raise RuntimeError("deferred_init is entered within deferred_init; one context around all modules is enough")
    torch.Tensor.is_meta = property(lambda tensor: False)  # type: ignore[assignment, method-assign]
    handles = [
        nn.modules.module.register_module_parameter_registration_hook(registered),
        nn.modules.module.register_module_buffer_registration_hook(registered),
    ]
    # copies are not registered: torch puts them into the module's dict
    nn.Parameter.__deepcopy__ = deepcopy  # type: ignore[method-assign, assignment]
    try:
        with _Calls(recording), _Recorder(recording):
            yield
    finally:
        nn.Parameter.__deepcopy__ = copy_parameter  # type: ignore[method-assign]
        del torch.Tensor.is_meta
        for handle in handles:
            handle.remove()
        for storage in recording.writers:
            _RECORDINGS[storage] = recording
        recording.end()


def _source(tensor: Tensor) -> Source | None:
    """A source of values for a tensor without memory."""
    source: Source | None = tensor.__dict__.get(_SOURCE)
    return source if source is not None else _RECORDINGS.get(_storage(tensor))


def compute_device(model: nn.Module) -> torch.device:
    """The device that the model computes on, also if its parameters do not exist yet."""
    params = (tensor for param in model.parameters() for _, tensor in inner_tensors(param))
    return next((device_of(param) for param in params if not _is_meta(param) or can_make(param)), default_device())


def device_of(tensor: Tensor) -> torch.device:
    """The device that a tensor is on, or will be once its values are made."""
    source = _source(tensor) if _is_meta(tensor) else None
    return tensor.device if source is None else source.device


def default_device() -> torch.device:
    """The current GPU; the CPU where there is none."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def can_make(tensor: Tensor) -> bool:
    """Tell if the values of a tensor without memory are known."""
    return _source(tensor) is not None


def place_of(tensor: Tensor, dtype: torch.dtype) -> Excerpt | None:
    """The bytes of a file that are the values, in ``dtype``, of a tensor without memory; None if they have to be made."""
    source = _source(tensor) if _is_meta(tensor) else None
    return source.place(dtype) if source is not None and source.saw(tensor) else None


def values_of(tensor: Tensor, name: str) -> Tensor:
    """The values of a parameter or buffer: its own, or, where it has no memory, newly made. RuntimeError if it was changed since."""
    if not _is_meta(tensor):
        return tensor.detach()
    source = _source(tensor)
    assert source is not None
    if not source.saw(tensor):
        raise RuntimeError(
            f"{name!r} was written or converted after deferred_init or load_pretrained, where it had no memory; initialize inside the context, "
            "and convert with ZeroOptimizer(dtype=...)"
        )
    return source.make(tensor)


def promise(tensor: Tensor, source: Source) -> None:
    """From now on ``source`` makes the values of a tensor without memory."""
    tensor.__dict__[_SOURCE] = source


def give_memory(tensor: Tensor, values: Tensor) -> None:
    """Make a tensor without memory hold ``values``; it stays the same object, in every module and optimizer that has it."""
    if isinstance(tensor, _WithoutMemory):
        tensor.__class__ = type(tensor).__mro__[2]  # type: ignore[assignment]
    fresh = values.detach().requires_grad_(tensor.requires_grad)
    # torch.utils.swap_tensors, but for its refusal of weak references: what they refer to is the object, and that stays
    torch._C._swap_tensor_impl(tensor, fresh)
    tensor.__dict__.pop(_SOURCE, None)
