"""Rules: the arithmetic of the user's torch optimizers, for any slice of any flat buffer or for whole matrices; or a refusal with the reason."""

from __future__ import annotations

import abc
import copy
import dataclasses
import inspect
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from zk.kernels.reference import update_chunks
from zk.kernels.step import AdamStep
from zk.offload.cpu_adam import adam_

Scalars = Mapping[str, float]  # the state of one parameter that is no tensor of elements, by name: ``step``, ``mu_product``


@dataclasses.dataclass(frozen=True, slots=True)
class Run:
    """Consecutive elements of a shard that are updated alike."""

    part: slice  # of the shard
    group: Mapping[str, Any]  # the options of their param_group
    step: int  # of this update, from 1
    scalars: Scalars | None = None  # before this update; None: the parameters have no state yet
    # of one whole parameter: views its elements (numel,) in its shape
    shaped: Callable[[Tensor], Tensor] | None = dataclasses.field(default=None, compare=False)


class Rule(abc.ABC):
    """Arithmetic of an optimizer."""

    splits_master = False  # a bf16 parameter may keep only the lower half of its master (needs a second moment: see split.py)
    is_whole = False  # updates whole parameters in their shape; else what one element becomes depends on no other element
    templates: Mapping[str, Any] | None = None  # the kind of each of ``Scalars``, where the optimizer's own step() keeps them; None: ``step`` alone

    @abc.abstractmethod
    def state_names(self, group: Mapping[str, Any]) -> tuple[str, ...]:
        """Names of the per-element state that parameters of ``group`` need, as torch's optimizer calls them."""

    @abc.abstractmethod
    def update(self, fields: Mapping[str, Tensor], grad: Tensor, run: Run, grad_scale: float, num_threads: int) -> None:
        """Update in place: ``fields`` has param, master if there is one, and the states, all (n,), of elements of the run."""

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
                self.rule.update({name: field[here] for name, field in fields.items()}, grad[here], run, self.grad_scale, num_threads)


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
    """Any optimizer, by its own step(): over each slice as if that was a parameter, or over whole parameters in their shape.

    For each call a worker is made, the user's optimizer with one parameter: the fp32 master, the gradient in fp32, and states where they lie.

    Args:
        optimizer: the user's; its attributes are read in every update.
        is_whole: as of Rule.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, is_whole: bool = False) -> None:
        self.optimizer, self.is_whole, self.name = optimizer, is_whole, type(optimizer).__name__
        self.step: Callable[[Any], Any] = _unhooked(type(optimizer).step)  # hooks are called once a step, and not for each slice
        self.templates: dict[str, Any] = {}
        self._names: dict[str, tuple[str, ...]] = {}  # by options
        self._after: dict[str, Scalars] = {}  # by options and scalars

    @torch.no_grad()
    def call(self, value: Tensor, grad: Tensor, group: Mapping[str, Any], state: dict[str, Any]) -> Any:
        """Update ``value`` (any shape) by ``grad``; return the worker, whose only parameter has its new state."""
        param = nn.Parameter(value)
        param.grad = grad
        worker, plain = object.__new__(type(self.optimizer)), {name: option for name, option in _PLAIN.items() if name in group}
        groups, states = [{**group, **plain, "params": [param]}], defaultdict(dict, {param: state} if state else {})
        vars(worker).update({name: kept for name, kept in vars(self.optimizer).items() if name != "step"}, param_groups=groups, state=states)
        self.step(worker)
        if param.data_ptr() != value.data_ptr():  # the optimizer has put another tensor there
            value.copy_(param)
        return worker

    def state_names(self, group: Mapping[str, Any]) -> tuple[str, ...]:
        # of a number it matters only if it is zero
        options = {name: bool(option) if isinstance(option, (int, float, Tensor)) else option for name, option in options_of(group).items()}
        key = repr(sorted(options.items()))
        if key not in self._names:
            value, found = self._example, list[str]()
            for name, kept in self._state(self.call(value, torch.ones_like(value), options_of(group), {})).items():
                if isinstance(kept, Tensor) and kept.shape == value.shape:
                    found.append(name)
                elif isinstance(kept, (int, float)) or (isinstance(kept, Tensor) and kept.numel() == 1):
                    self.templates[name] = kept
                elif kept is not None:
                    kind = f"a tensor of shape {tuple(kept.shape)}" if isinstance(kept, Tensor) else f"a {type(kept).__name__}"
                    raise TypeError(
                        f"{self.name} cannot be partitioned: its state {name!r} is {kind} for a parameter of shape {tuple(value.shape)}, and ranks "
                        "keep numbers, and tensors in the parameter's shape; use an optimizer that keeps no more"
                    )
            self._names[key] = tuple(found)
        return self._names[key]

    @property
    def _example(self) -> Tensor:
        return torch.ones((3, 4) if self.is_whole else (12,))

    def _state(self, worker: Any) -> dict[str, Any]:
        """The state of the worker's parameter."""
        return dict(worker.state.get(worker.param_groups[0]["params"][0], {}))

    def scalars(self, group: Mapping[str, Any], before: Scalars | None) -> Scalars:
        key = repr((sorted(options_of(group).items()), before))
        if key not in self._after:
            value, names = self._example, self.state_names(group)
            state = {} if before is None else self.stored(before) | {name: torch.ones_like(value) for name in names}
            after = self._state(self.call(value, torch.ones_like(value), options_of(group), state))
            if len(self._after) > 256:
                self._after.clear()
            self._after[key] = {name: as_number(after[name]) for name in self.templates if name in after}
        return self._after[key]

    def update(self, fields: Mapping[str, Tensor], grad: Tensor, run: Run, grad_scale: float, num_threads: int) -> None:
        names, shaped = self.state_names(run.group), run.shaped if self.is_whole and run.shaped is not None else lambda values: values

        def update(x: Tensor, g: Tensor, piece: slice) -> None:
            kept = {name: shaped(fields[name][piece]) for name in names}
            state = {} if run.scalars is None else self.stored(run.scalars) | kept
            after = self._state(self.call(shaped(x), shaped(g), run.group, state))
            new = [name for name, value in after.items() if value is not None and name not in kept and name not in self.templates]
            if new:
                raise RuntimeError(
                    f"{self.name} has begun to keep {', '.join(new)} in update {run.step}, for which no room was made: an optimizer must keep the "
                    "same states from its first step on"
                )
            for name, field in kept.items():
                if after[name].data_ptr() != field.data_ptr():
                    field.copy_(after[name])

        update_chunks(fields, grad, grad_scale, update, len(grad) if self.is_whole else _STEP_NUMEL)

    def try_elementwise(self, group: Mapping[str, Any]) -> None:
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
        options, names = options_of(group), self.state_names(group)
        made = {name: torch.zeros_like(start) for name in ("the parameter", *names)}
        for part in parts:
            x, scalars, state = start[part], None, dict[str, Any]()
            for grad in grads:
                before = {name: copy.copy(kept) if isinstance(kept, (list, dict, set)) else kept for name, kept in vars(self.optimizer).items()}
                worker = self.call(x, grad[part], options, state)
                state, scalars, now = self._state(worker), self.scalars(group, scalars), options_of(worker.param_groups[0])
                changed = [name for name, kept in vars(worker).items() if name not in ("param_groups", "state") and not _is(kept, before.get(name))]
                changed += [f"param_groups[...][{name!r}]" for name in now if name not in _PLAIN and repr(now[name]) != repr(options.get(name))]
                numbers = {name: as_number(kept) for name, kept in state.items() if name not in names and kept is not None}
                changed += [f"state[...][{name!r}]" for name, number in numbers.items() if scalars.get(name) != number]
                if changed:
                    raise TypeError(
                        f"{self.name} is not elementwise, as elementwise=True says: its step() changes {', '.join(changed)}, beyond the states of "
                        "elements and numbers that follow from options alone, so ranks that update slices would not agree; use torch.optim.AdamW"
                    )
            for name, value in made.items():
                value[part] = x if name == "the parameter" else state[name]
        return made


def _is(one: Any, other: Any) -> bool:
    return one is other or (type(one) is type(other) and isinstance(one, (int, float, str, list, dict, set, tuple)) and one == other)


def options_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """A group without its parameters."""
    return {name: option for name, option in group.items() if name != "params"}


def as_number(value: Any) -> float:
    """A number, or a tensor of one element, as Python has it."""
    return value.item() if isinstance(value, Tensor) else value  # type: ignore[no-any-return]


# what the update of one element needs, for optimizers people ask about
_WHOLE_MATRIX = {
    "Muon": "orthogonalizes whole momentum matrices (zk knows torch.optim.Muon)",
    "Adafactor": "keeps row and column statistics of whole matrices",
    "Shampoo": "multiplies with factors of whole matrices",
    "SOAP": "rotates whole matrices",
    "LBFGS": "takes inner products over all parameters and calls the closure many times",
    "LAMB": "scales by norms of whole parameters",
    "LARS": "scales by norms of whole parameters",
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
    torch.optim.Muon: lambda optimizer: OwnStep(optimizer, is_whole=True),
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


def rule_for(optimizer: torch.optim.Optimizer, elementwise: bool = False) -> Rule:
    """The rule of an optimizer of torch's, or of one that changes options only; of any other if it is ``elementwise``, which is tried.

    TypeError, with the reason, for all else.
    """
    kind = type(optimizer)
    for group in optimizer.param_groups:
        if group.get("differentiable"):
            raise ValueError("differentiable=True is not supported: the update runs outside autograd; remove it")
    make, overridden = _known(optimizer)
    if make is not None and not overridden:
        return make(optimizer)
    for one in kind.__mro__:
        if one.__name__ in _WHOLE_MATRIX:
            raise TypeError(
                f"{kind.__name__} cannot be partitioned: it {_WHOLE_MATRIX[one.__name__]}, and a rank holds only slices of them; "
                "use torch.optim.AdamW, Adam or SGD"
            )
    if elementwise:
        rule = OwnStep(optimizer)
        for group in optimizer.param_groups:
            rule.try_elementwise(group)
        return rule
    own = f", which has its own {', '.join(overridden)}" if overridden else ""
    raise TypeError(
        f"ZeroOptimizer knows the arithmetic of torch.optim's {', '.join(one.__name__ for one in _KNOWN)}; got "
        f"{kind.__module__}.{kind.__name__}{own}. Each rank updates slices of flat buffers, so an unknown step() cannot be trusted to give the same "
        "result: if what it makes of an element depends on no other element, pass elementwise=True, which is tried on a small tensor"
    )


def rules_for(optimizers: Sequence[torch.optim.Optimizer], elementwise: bool) -> list[Rule]:
    """The rule of each optimizer; alike ones are one."""
    rules: list[Rule] = []
    for optimizer in optimizers:
        rule = rule_for(optimizer, elementwise)
        rules.append(next((other for other in rules if other == rule), rule))
    if elementwise and all(make is not None and not own for make, own in map(_known, optimizers)):
        raise ValueError(f"elementwise=True has no effect, as zk knows {', '.join(type(one).__name__ for one in optimizers)}; remove it")
    return rules
