"""Rules: the arithmetic of the user's torch optimizers, for any slice of any flat buffer or for whole parameters; or a refusal with the reason."""

from __future__ import annotations

import abc
import copy
import dataclasses
import functools
import inspect
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from zk.kernels.reference import update_chunks
from zk.kernels.step import AdamStep
from zk.offload.cpu_adam import adam_
from zk.offload.packing import PACKED, Kept, Wrapper, flattened, part_of, wrapped, wrappers_of

Scalars = Mapping[str, float]  # the state of one parameter that is no tensor of elements, by name: ``step``, ``mu_product``


@dataclasses.dataclass(frozen=True, slots=True)
class Run:
    """Consecutive elements of a shard that are updated alike."""

    part: slice  # of the shard
    group: Mapping[str, Any]  # the options of their param_group
    step: int  # of this update, from 1
    scalars: Scalars | None = None  # before this update; None: the parameters have no state yet
    # of one whole parameter: views its elements (numel,) in its shape, and what is kept of it in the packed bytes of a chunk
    shaped: Callable[[Tensor], Tensor] | None = dataclasses.field(default=None, compare=False)
    views: Callable[[Tensor, slice], dict[str, Tensor]] | None = dataclasses.field(default=None, compare=False)
    kept: Mapping[str, Kept] = dataclasses.field(default_factory=dict, compare=False)  # which are described so


class Rule(abc.ABC):
    """Arithmetic of an optimizer."""

    splits_master = False  # a bf16 parameter may keep only the lower half of its master (needs a second moment: see codec.py)
    is_whole = False  # updates whole parameters in their shape; else what one element becomes depends on no other element
    numbers: Mapping[str, type] = {}  # kinds of Python's numbers among what is kept of whole parameters, by name
    templates: Mapping[str, Any] | None = None  # the kind of each of ``Scalars``, where the optimizer's own step() keeps them; None: ``step`` alone

    @abc.abstractmethod
    def state_names(self, group: Mapping[str, Any]) -> tuple[str, ...]:
        """Names of the state that parameters of ``group`` need, as torch's optimizer calls them: of each element, unless the rule ``is_whole``."""

    def kept(self, group: Mapping[str, Any], shape: Sequence[int], strides: Sequence[int]) -> dict[str, Kept]:
        """Describe what is kept of a whole parameter of ``group``, by name; nothing where that is kept for each element."""
        return {}

    @abc.abstractmethod
    def update(self, fields: Mapping[str, Tensor], grad: Tensor, run: Run, grad_scale: float, num_threads: int) -> None:
        """Update in place: ``fields`` has param, master if there is one, and the states, of elements of the run.

        All are (n,), but for the states of a rule that ``is_whole``, which are as they are kept.
        """

    def has_kernel(self, group: Mapping[str, Any]) -> bool:
        """Tell if a kernel on the device has the bits of the update in host memory, for parameters of ``group``."""
        return False

    def scalars(self, group: Mapping[str, Any], before: Scalars | None) -> Scalars | None:
        """The scalars of a parameter after one more update; None where ``step`` is all there is."""
        return None

    def stored(self, scalars: Scalars) -> dict[str, Any]:
        """Scalars as the optimizer keeps them."""
        kept = ((name, (self.templates or {})[name], value) for name, value in scalars.items())
        return {name: torch.full_like(one, value) if isinstance(one, Tensor) else type(one)(value) for name, one, value in kept}


@dataclasses.dataclass(frozen=True, slots=True)
class Change:
    """Update of a shard in one step."""

    rule: Rule
    runs: Sequence[Run]
    grad_scale: float  # what the gradient is multiplied by on the way

    def apply(self, fields: Mapping[str, Tensor], grad: Tensor, elements: slice, num_threads: int) -> None:
        """Update ``fields``, which are these ``elements`` of the shard, by their ``grad``: what lies in each run."""
        for run in self.runs:
            start, stop = max(run.part.start, elements.start), min(run.part.stop, elements.stop)
            if start < stop:
                is_uncut = (start, stop) == (run.part.start, run.part.stop)
                assert is_uncut or not self.rule.is_whole, "a chunk cuts a parameter that is updated whole"
                here = slice(start - elements.start, stop - elements.start)
                of_run = part_of(fields, here)
                packed = of_run.pop(PACKED, None)
                if run.views is not None and packed is not None:
                    of_run |= run.views(packed, elements)
                self.rule.update(of_run, grad[here], run, self.grad_scale, num_threads)


@dataclasses.dataclass
class AdamRule(Rule):
    """torch.optim.Adam and AdamW."""

    decoupled: bool
    splits_master = True

    def state_names(self, group: Mapping[str, Any]) -> tuple[str, ...]:
        return ("exp_avg", "exp_avg_sq", "max_exp_avg_sq") if group.get("amsgrad") else ("exp_avg", "exp_avg_sq")

    def has_kernel(self, group: Mapping[str, Any]) -> bool:
        return not group.get("amsgrad")

    def update(self, fields: Mapping[str, Tensor], grad: Tensor, run: Run, grad_scale: float, num_threads: int) -> None:
        step, kept = AdamStep.of(run.group, self.decoupled, run.step, grad_scale), (fields.get("master"), fields["exp_avg"], fields["exp_avg_sq"])
        adam_(fields["param"], grad, *kept, step, max_exp_avg_sq=fields.get("max_exp_avg_sq"), num_threads=num_threads)


@dataclasses.dataclass
class SGDRule(Rule):
    """torch.optim.SGD, with momentum, dampening and Nesterov."""

    def state_names(self, group: Mapping[str, Any]) -> tuple[str, ...]:
        return ("momentum_buffer",) if group["momentum"] else ()

    def update(self, fields: Mapping[str, Tensor], grad: Tensor, run: Run, grad_scale: float, num_threads: int) -> None:
        group = run.group
        lr, momentum, decay = float(group["lr"]), float(group["momentum"]), float(group["weight_decay"])

        def update(x: Tensor, g: Tensor, piece: slice) -> None:
            if decay:
                g = g.add(x, alpha=decay)
            if momentum:
                buffer = fields["momentum_buffer"]
                held = buffer[piece].float()  # the buffer itself where it is fp32
                if run.step == 1:
                    held.copy_(g)
                else:
                    held.mul_(momentum).add_(g, alpha=1 - group["dampening"])
                if held.dtype != buffer.dtype:
                    buffer[piece] = held
                g = g.add(held, alpha=momentum) if group["nesterov"] else held
            x.add_(g, alpha=-lr)

        update_chunks(fields, grad, -grad_scale if group["maximize"] else grad_scale, update)


# options that choose between ways to compute the same; slices take the plain one
_PLAIN = {"foreach": False, "fused": None, "capturable": False}
# elements that one call of a step() updates: few enough for caches, enough that the call costs little
_STEP_NUMEL = 1 << 17


class OwnStep(Rule):
    """Any optimizer, by its own step(), over each slice as if that was a parameter.

    For each call a worker is made, the user's optimizer with one parameter: the fp32 master, the gradient in fp32, and states where they lie.

    Args:
        optimizer: the user's; its attributes are read in every update.
    """

    _shape: tuple[int, ...] = (12,)  # of a parameter that is updated to see what becomes of it

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer, self.name = optimizer, type(optimizer).__name__
        self.step: Callable[[Any], Any] = _unhooked(type(optimizer).step)  # hooks are called once a step, and not for each slice
        self.templates: dict[str, Any] = {}
        self.numbers: dict[str, type] = {}  # of Python's that are kept of whole parameters, as they depend on values
        self._names: dict[str, tuple[str, ...]] = {}  # by options
        self._after: dict[int, tuple[Mapping[str, Any], dict[Any, Scalars]]] = {}  # by the id of the options, which are kept with it, and scalars

    def worker(self, values: Sequence[Tensor], group: Mapping[str, Any], states: Sequence[dict[str, Any]]) -> Any:
        """The user's optimizer, but with ``values`` as its only parameters, and their ``states``."""
        params, worker = [nn.Parameter(value) for value in values], object.__new__(type(self.optimizer))
        plain = {name: option for name, option in _PLAIN.items() if name in group}
        held = defaultdict(dict, {param: state for param, state in zip(params, states, strict=True) if state})
        vars(worker).update({name: kept for name, kept in vars(self.optimizer).items() if name != "step"})
        vars(worker).update(param_groups=[{**group, **plain, "params": params}], state=held)
        return worker

    @torch.no_grad()
    def call(self, value: Tensor, grad: Tensor, group: Mapping[str, Any], state: dict[str, Any]) -> Any:
        """Update ``value`` (any shape) by ``grad``; return the worker, whose only parameter has its new state."""
        worker = self.worker([value], group, [state])
        param = worker.param_groups[0]["params"][0]
        param.grad = grad
        self.step(worker)
        if param.data_ptr() != value.data_ptr():  # the optimizer has put another tensor there
            value.copy_(param)
        return worker

    def state_names(self, group: Mapping[str, Any]) -> tuple[str, ...]:
        key = _signature(group)
        if key not in self._names:
            value, found = self._example, list[str]()
            for name, kept in self._state(self.call(value, torch.ones_like(value), options_of(group), {})).items():
                if isinstance(kept, Tensor) and kept.shape == value.shape:
                    found.append(name)
                elif _is_number(kept):
                    self.templates[name] = kept
                elif kept is not None:
                    kind = f"a tensor of shape {tuple(kept.shape)}" if isinstance(kept, Tensor) else f"a {type(kept).__name__}"
                    raise TypeError(
                        f"{self.name} cannot be partitioned by elements: its state {name!r} is {kind} for a parameter of shape "
                        f"{tuple(value.shape)}; pass parameterwise=True instead, if what it makes of a parameter depends on no other parameter"
                    )
            self._names[key] = tuple(found)
        return self._names[key]

    @property
    def _example(self) -> Tensor:
        return torch.ones(self._shape, dtype=torch.float32)

    def _examples(self, group: Mapping[str, Any]) -> dict[str, Any]:
        """States of the example."""
        return {name: torch.ones_like(self._example) for name in self.state_names(group)}

    def _state(self, worker: Any, number: int = 0) -> dict[str, Any]:
        """The state of a parameter of the worker, without wrappers."""
        return flattened(self._whole_state(worker, number))

    def _whole_state(self, worker: Any, number: int = 0) -> dict[str, Any]:
        return dict(worker.state.get(worker.param_groups[0]["params"][number], {}))

    def scalars(self, group: Mapping[str, Any], before: Scalars | None) -> Scalars:
        if len(self._after) > 64:
            self._after.clear()
        _, found = self._after.setdefault(id(group), (group, {}))
        key = None if before is None else tuple(before.items())
        if key not in found:
            value, examples = self._example, self._examples(group)
            state = {} if before is None else self.stored(before) | examples
            after = self._state(self.call(value, torch.ones_like(value), options_of(group), state))
            found[key] = {name: as_number(after[name]) for name in self.templates if name in after}
        return found[key]

    def update(self, fields: Mapping[str, Tensor], grad: Tensor, run: Run, grad_scale: float, num_threads: int) -> None:
        values = {name: fields[name] for name in ("param", "master") if name in fields}
        kept, shaped = {name: field for name, field in fields.items() if name not in values}, run.shaped or (lambda flat: flat)

        def update(x: Tensor, g: Tensor, piece: slice) -> None:
            mine = kept if self.is_whole else {name: field[piece] for name, field in kept.items()}
            self.call_on(shaped(x), shaped(g), run, mine)

        update_chunks(values, grad, grad_scale, update, len(grad) if self.is_whole else _STEP_NUMEL)

    def call_on(self, value: Tensor, grad: Tensor, run: Run, kept: Mapping[str, Tensor]) -> Any:
        """Update ``value`` by ``grad``, and what is ``kept``, where it lies; return the worker."""
        shown = {name: self.numbers[name](field.item()) if name in self.numbers else field for name, field in kept.items()}
        state = {} if run.scalars is None else self.stored(run.scalars) | wrapped(shown, run.kept)
        worker = self.call(value, grad, run.group, state)
        after = self._state(worker)
        there = {name for name, now in after.items() if now is not None} - self.templates.keys()
        for what, names in (("begun", there - kept.keys()), ("ceased", (kept.keys() - there) if self.is_whole else ())):
            if names:
                raise RuntimeError(
                    f"{self.name} has {what} to keep {', '.join(sorted(names))} in update {run.step}, and room is made once: an optimizer must keep "
                    "the same states from its first step on"
                )
        for name, field in kept.items():
            now = after.get(name)
            if isinstance(now, Tensor) and (now.shape, now.dtype) != (field.shape, field.dtype):
                raise RuntimeError(
                    f"{self.name} has made of its state {name!r}, {tuple(field.shape)} {field.dtype}, {tuple(now.shape)} {now.dtype} in update "
                    f"{run.step}, and there is room for what it was: an optimizer must keep states of one shape and dtype"
                )
            if not isinstance(now, Tensor) and now is not None:
                field.fill_(now)
            elif now is not None and now.data_ptr() != field.data_ptr():
                field.copy_(now)
        return worker

    def try_out(self, group: Mapping[str, Any]) -> None:
        """Update a small tensor whole, in halves and in another order; TypeError if that makes a difference, or something is kept elsewhere."""
        draws = torch.Generator().manual_seed(0)
        start, grads = torch.randn(203, generator=draws), torch.randn(4, 203, generator=draws)
        ways = {"in halves": torch.arange(203).split(102), "in another order": (torch.randperm(203, generator=draws),)}
        whole = self._tried(start, grads, group, (torch.arange(203),))
        for way, parts in ways.items():
            for name, value in self._tried(start, grads, group, parts).items():
                number = int((value != whole[name]).sum())
                if number:
                    raise TypeError(
                        f"{self.name} is not elementwise, as elementwise=True says: after 4 steps over 203 elements {name} differs in {number} of "
                        f"them if they are updated {way}; ranks hold slices, so use torch.optim.AdamW, or another optimizer that is elementwise"
                    )

    def _tried(self, start: Tensor, grads: Tensor, group: Mapping[str, Any], parts: Sequence[Tensor]) -> dict[str, Tensor]:
        """Update ``parts`` (indices) of a parameter by all ``grads``; return what each element has become."""
        made = {name: torch.zeros_like(start) for name in ("the parameter", *self.state_names(group))}
        for part in parts:
            alone = _Alone(self, group, start[part])
            for step, grad in enumerate(grads, 1):
                before = _copied(vars(self.optimizer))
                worker = alone.update(grad[part], step)
                changed = _changed(before, alone.options, worker)
                numbers = {name: as_number(kept) for name, kept in self._state(worker).items() if name not in made and kept is not None}
                changed += [f"state[...][{name!r}]" for name, number in numbers.items() if alone.known[name] != number]
                if changed:
                    raise TypeError(
                        f"{self.name} is not elementwise, as elementwise=True says: its step() changes {', '.join(changed)}, beyond the states of "
                        "elements and numbers that follow from options alone, so ranks that update slices would not agree; use torch.optim.AdamW"
                    )
            for name, value in made.items():
                value[part] = alone.known[name]
        return made


Shapes = Callable[[torch.Size], Mapping[str, Sequence[int]]]  # of a parameter's shape: those of its states, by name


def _of_adafactor(shape: torch.Size) -> Mapping[str, Sequence[int]]:
    return {"row_var": (*shape[:-1], 1), "col_var": (*shape[:-2], 1, shape[-1])} if len(shape) > 1 else {"variance": shape}


class WholeStep(OwnStep):
    """Any optimizer, by its own step(), over whole parameters in their shape. What it keeps of each is packed, as it keeps it.

    Args:
        optimizer: as of OwnStep.
        shapes: of what it keeps, in fp32; None: a parameter of ones of each shape is updated once, to see it.
    """

    is_whole = True

    def __init__(self, optimizer: torch.optim.Optimizer, shapes: Shapes | None = None) -> None:
        super().__init__(optimizer)
        self.shapes = shapes
        self._kept: dict[Any, dict[str, Kept]] = {}  # by shape, strides and options
        self._shape = next((_smaller(param.shape, 4) for group in optimizer.param_groups for param in group["params"] if param.numel()), (3, 4))

    def state_names(self, group: Mapping[str, Any]) -> tuple[str, ...]:
        return tuple(self.kept(group, self._shape, self._example.stride()))

    def _examples(self, group: Mapping[str, Any]) -> dict[str, Any]:
        kept = self.kept(group, self._shape, self._example.stride())
        states = ((name, torch.ones(one.shape, dtype=one.dtype)) for name, one in kept.items())
        return wrapped({name: self.numbers[name](1) if name in self.numbers else one for name, one in states}, kept)

    def kept(self, group: Mapping[str, Any], shape: Sequence[int], strides: Sequence[int]) -> dict[str, Kept]:
        if 0 in shape:  # nothing is updated
            return {}
        key = tuple(shape), tuple(strides), _signature(group)
        if key not in self._kept:
            if not self._kept:
                self._find_numbers(group)
            value = torch.empty_strided(tuple(shape), tuple(strides), dtype=torch.float32, device="meta" if self.shapes else "cpu")
            if self.shapes is not None:  # one in the parameter's shape has its strides
                sizes = self.shapes(value.shape).items()
                states = {name: torch.empty_like(value) if size == value.shape else value.new_empty(size) for name, size in sizes}
            else:
                states = self._whole_state(self.call(value.fill_(1), torch.ones_like(value), options_of(group), {}))
            flat = {name: one for name, one in flattened(states).items() if one is not None and name not in self.templates}
            around = wrappers_of(states)
            self._kept[key] = {name: self._described(name, one, around.get(name)) for name, one in flat.items()}
        return self._kept[key]

    def _find_numbers(self, group: Mapping[str, Any]) -> None:
        """Tell the numbers that follow from options and counts: they are the same whatever the values are."""
        found = []
        for factor in (1.0, 3.0):
            value = factor * self._example
            found.append(self._state(self.call(value, torch.full_like(value, factor + 1), options_of(group), {})))
        for name, one in found[0].items():
            if _is_number(one) and as_number(one) == as_number(found[1][name]):
                self.templates[name] = one

    def _described(self, name: str, value: Any, around: Wrapper | None) -> Kept:
        is_plain = isinstance(value, (int, float)) or (type(value) in (Tensor, nn.Parameter) and value.layout is torch.strided)
        if not is_plain or name in ("param", "master", PACKED):
            raise TypeError(
                f"{self.name} cannot be partitioned: its state {name!r} is a {type(value).__name__}, and zk keeps plain tensors and numbers, under "
                "other names than 'param' and 'master'; use an optimizer that keeps no more"
            )
        if not isinstance(value, Tensor):
            self.numbers[name] = type(value)
        return Kept.of(value, around)

    def try_out(self, group: Mapping[str, Any]) -> None:
        """Update small parameters together, and each alone with what is kept of it packed; TypeError if that makes a difference."""
        shapes = list(dict.fromkeys(_smaller(param.shape, 64) for param in group["params"] if param.numel()))[:3]
        draws = torch.Generator().manual_seed(0)
        values = [torch.randn(shape, generator=draws, dtype=torch.float32) for shape in (*shapes, *shapes[:1])]
        alone, together = [_Alone(self, group, value) for value in values], self.worker(values, options_of(group), [{} for _ in values])
        params, after_one = together.param_groups[0]["params"], dict[str, Any]()
        for step in range(1, 5):
            grads = [torch.randn(value.shape, generator=draws, dtype=torch.float32) for value in values]
            for param, one, grad in zip(params, alone, grads, strict=True):
                param.grad = grad.clone()
                one.update(grad, step)
            with torch.no_grad():
                self.step(together)
            for number, one in enumerate(alone):
                differ = one.differs_from(params[number], self._state(together, number))
                if differ:
                    raise TypeError(
                        f"{self.name} is not parameterwise, as parameterwise=True says: in step {step} {', '.join(differ)} of a parameter of shape "
                        f"{tuple(one.value.shape)} becomes something else if parameters are updated one by one; ranks hold whole parameters each, so "
                        "use torch.optim.AdamW, or another optimizer that looks at one at a time"
                    )
            after_one = after_one or _copied(vars(together)) | {"options": options_of(together.param_groups[0])}
        changed = _changed(after_one, after_one["options"], together)
        if changed:
            raise TypeError(
                f"{self.name} is not parameterwise, as parameterwise=True says: its step() changes {', '.join(changed)} time and again, beyond the "
                "states of parameters, and each rank would count its own; use an optimizer that keeps all it needs in state[param]"
            )


class _Alone:
    """One parameter in the trial of ``rule``, updated as an optimizer of zk's does it."""

    def __init__(self, rule: OwnStep, group: Mapping[str, Any], value: Tensor) -> None:
        self.rule, self.options, self.value = rule, options_of(group), value.clone()
        whole = rule.kept(group, value.shape, value.stride())
        self.described = whole if rule.is_whole else dict.fromkeys(rule.state_names(group), Kept.of(value))
        self.kept = {name: torch.empty_strided(one.shape, one.strides, dtype=one.dtype).zero_() for name, one in self.described.items()}
        self.scalars: Scalars | None = None

    def update(self, grad: Tensor, step: int) -> Any:
        """Return the worker."""
        run = Run(slice(0, grad.numel()), self.options, step, self.scalars, kept=self.described)
        worker = self.rule.call_on(self.value, grad, run, self.kept)
        self.scalars = self.rule.scalars(self.options, self.scalars)
        return worker

    @property
    def known(self) -> Mapping[str, Any]:
        """The parameter and its state, by name."""
        return defaultdict(lambda: None, {"the parameter": self.value, **(self.scalars or {}), **self.kept})

    def differs_from(self, value: Tensor, state: Mapping[str, Any]) -> list[str]:
        """Names of what is not as in ``value`` and its ``state``, bit for bit."""
        differ = []
        for name, one in {"the parameter": value, **state}.items():
            mine = self.known[name]
            is_same = torch.equal(torch.as_tensor(one, dtype=mine.dtype), mine) if isinstance(mine, Tensor) else as_number(one) == mine
            differ += [] if is_same else [name if one is value else f"its state {name!r}"]
        return differ


def _smaller(shape: Sequence[int], most: int) -> tuple[int, ...]:
    """A shape of as many dimensions, and few elements; of vectors as many as of a square."""
    return tuple(min(size, most if len(shape) > 1 else most * most) for size in shape)


def _signature(group: Mapping[str, Any]) -> str:
    """The options of a group, as far as they decide what is kept: of a number it matters only if it is zero."""
    options = {name: bool(option) if isinstance(option, (int, float, Tensor)) else option for name, option in options_of(group).items()}
    return repr(sorted(options.items()))


def _copied(attributes: Mapping[str, Any]) -> dict[str, Any]:
    return {name: copy.copy(kept) if isinstance(kept, (list, dict, set)) else kept for name, kept in attributes.items()}


def _changed(before: Mapping[str, Any], options: Mapping[str, Any], worker: Any) -> list[str]:
    """Attributes of the worker, and options of its group, that are others than ``before``."""
    now = options_of(worker.param_groups[0])
    changed = [name for name, kept in vars(worker).items() if name not in ("param_groups", "state") and not _is(kept, before.get(name))]
    return changed + [f"param_groups[...][{name!r}]" for name in now if name not in _PLAIN and repr(now[name]) != repr(options.get(name))]


def _is(one: Any, other: Any) -> bool:
    return one is other or (type(one) is type(other) and isinstance(one, (int, float, str, list, dict, set, tuple)) and one == other)


def options_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """A group without its parameters."""
    return {name: option for name, option in group.items() if name != "params"}


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) or (isinstance(value, Tensor) and value.numel() == 1)


def as_number(value: Any) -> Any:
    """A number, or a tensor of one element, as Python has it; or some of them."""
    if isinstance(value, (tuple, list)):
        return tuple(map(as_number, value))
    return value.item() if isinstance(value, Tensor) else value


# what the update of one element needs, for optimizers people ask about
_WHOLE = {
    "Muon": "orthogonalizes whole momentum matrices",
    "Adafactor": "keeps row and column statistics of whole matrices",
    "Shampoo": "multiplies with factors of whole matrices",
    "SOAP": "rotates whole matrices",
    "LAMB": "scales by norms of whole parameters",
    "LARS": "scales by norms of whole parameters",
}
_NEVER = {
    "LBFGS": "takes inner products over all parameters and calls the closure many times",
    "SparseAdam": "needs sparse gradients, which cannot be flattened",
}
_KNOWN: dict[type[torch.optim.Optimizer], Callable[[Any], Rule]] = {
    torch.optim.AdamW: lambda _: AdamRule(decoupled=True),
    torch.optim.Adam: lambda _: AdamRule(decoupled=False),
    torch.optim.SGD: lambda _: SGDRule(),
    **dict.fromkeys(
        (
            torch.optim.RMSprop,
            torch.optim.NAdam,
            torch.optim.RAdam,
            torch.optim.Adagrad,
            torch.optim.Adadelta,
            torch.optim.Adamax,
            torch.optim.Rprop,
            torch.optim.ASGD,
        ),
        OwnStep,
    ),
    torch.optim.Muon: functools.partial(WholeStep, shapes=lambda shape: {"momentum_buffer": shape}),
    torch.optim.Adafactor: functools.partial(WholeStep, shapes=_of_adafactor),
}


def _unhooked(method: Any) -> Any:
    """A step() without what torch puts around it, in the class of the first optimizer that it makes."""
    return method.__wrapped__ if getattr(method, "hooked", False) else method


def _known(optimizer: torch.optim.Optimizer) -> tuple[Callable[[Any], Rule] | None, list[str]]:
    """The rule's constructor for an optimizer of torch's, and names of methods that a subclass, or the object, has of its own."""
    kind = type(optimizer)
    base = next((one for one in kind.__mro__ if one in _KNOWN), None)
    if base is None:
        return None, []
    names = [name for name in dir(base) if not name.startswith("__")]
    own = [name for name in names if _unhooked(inspect.getattr_static(kind, name)) is not _unhooked(inspect.getattr_static(base, name))]
    own += [name for name in names if callable(vars(optimizer).get(name)) and name != "step"]  # (schedulers count calls of that)
    return _KNOWN[base], own


def rule_for(optimizer: torch.optim.Optimizer, elementwise: bool = False, parameterwise: bool = False) -> Rule:
    """The rule of an optimizer of torch's, or of one that changes options only; of any other if it is said to be one of both, which is tried.

    TypeError, with the reason, for all else.
    """
    kind = type(optimizer)
    for group in optimizer.param_groups:
        if group.get("differentiable"):
            raise ValueError("differentiable=True is not supported: the update runs outside autograd; remove it")
    make, overridden = _known(optimizer)
    if make is not None and not overridden:
        return make(optimizer)
    names = [one.__name__ for one in kind.__mro__]
    never = next((_NEVER[name] for name in names if name in _NEVER), None)
    if never is not None:
        raise TypeError(f"{kind.__name__} cannot be partitioned: it {never}; use torch.optim.AdamW, Adam or SGD")
    whole = next((_WHOLE[name] for name in names if name in _WHOLE), None)
    if whole is not None and not parameterwise:
        raise TypeError(
            f"{kind.__name__} cannot be partitioned by elements: it {whole}; pass parameterwise=True, which gives each rank whole parameters and is "
            "tried on small ones, or use torch.optim.Muon, Adafactor or AdamW"
        )
    if elementwise or parameterwise:
        rule = WholeStep(optimizer) if parameterwise else OwnStep(optimizer)
        try:
            for group in optimizer.param_groups:
                rule.try_out(group)
        except Exception as error:
            error.add_note(f"(zk tried {kind.__name__} on small parameters in host memory, before anything of the model was changed)")
            raise
        return rule
    own = f", which has its own {', '.join(overridden)}" if overridden else ""
    raise TypeError(
        f"ZeroOptimizer knows the arithmetic of torch.optim's {', '.join(one.__name__ for one in _KNOWN)}; got "
        f"{kind.__module__}.{kind.__name__}{own}. Each rank updates slices of flat buffers, so an unknown step() cannot be trusted to give the same "
        "result: if what it makes of an element depends on no other element, pass elementwise=True; if what it makes of a parameter depends on no "
        "other parameter, parameterwise=True. Either is tried on small tensors"
    )


def rules_for(optimizers: Sequence[torch.optim.Optimizer], elementwise: bool, parameterwise: bool = False) -> list[Rule]:
    """The rule of each optimizer; alike ones are one."""
    rules: list[Rule] = []
    for optimizer in optimizers:
        rule = rule_for(optimizer, elementwise, parameterwise)
        rules.append(next((other for other in rules if other == rule), rule))
    if (elementwise or parameterwise) and all(make is not None and not own for make, own in map(_known, optimizers)):
        said = "elementwise" if elementwise else "parameterwise"
        raise ValueError(f"{said}=True has no effect, as zk knows {', '.join(type(one).__name__ for one in optimizers)}; remove it")
    return rules
