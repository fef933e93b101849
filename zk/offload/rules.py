"""Rules: the optimizer's arithmetic on flat slices of fp32 masters. Codecs: what is kept of them.

    AdamRule    torch.optim.Adam and AdamW in one pass over memory (zk.offload.cpu_adam, a kernel
                on a GPU)
    StepRule    any other elementwise optimizer, by its own step() over a parameter that is the slice

A field is (n,), named by what it holds: "param", "master" (or the bits that the parameter lacks of
it), and the optimizer's own ("exp_avg", "momentum_buffer", ...). A group is one of param_groups.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from zk.kernels.codec import Codec as Codec
from zk.kernels.codec import state_fields
from zk.kernels.reference import AdamStep
from zk.logs import require
from zk.offload import cpu_adam
from zk.unit import Unit

Group = dict[str, Any]
KEPT = 64  # steps from one whose numbers are kept to the next
PLAIN = {"foreach": False, "fused": None, "capturable": False}  # other ways to compute the same
Fields = dict[str, Tensor]


class Rule:
    """Updates slices of one optimizer's parameters."""

    names: tuple[str, ...] = ()
    """What is kept for each element, by torch's names."""
    splits_masters = False
    """The arithmetic takes a bf16 parameter and its lower half for the master."""
    num_threads: int | None = None
    """Of the CPU update."""

    def __init__(self, inner: torch.optim.Optimizer):
        self.inner = inner

    def codec(self, dtype: torch.dtype) -> Codec:
        """How ``dtype`` parameters and their states are kept."""
        return Codec(state_fields(dtype, self.names, torch.float32, self.splits_masters))

    def update(
        self, codec: Codec, fields: Fields, grad: Tensor, group: Group, step: int, scale: float
    ) -> None:
        """Update number ``step`` (from 1) of fields (n,) by ``scale`` times ``grad`` (n,)."""
        raise NotImplementedError

    def check(self) -> None:
        """ValueError for options that this rule cannot follow any more."""

    def numbers(self, group: Group, step: int) -> dict[str, Tensor]:
        """What torch keeps of a parameter beside its fields after ``step`` updates."""
        return {"step": torch.tensor(float(step), dtype=torch.float32)}

    def know(self, group: Group, step: int, numbers: dict[str, Tensor]) -> None:
        """Take ``numbers`` that were loaded; here they follow from the count."""


class AdamRule(Rule):
    """Adam and AdamW without amsgrad, in one pass."""

    names = "exp_avg", "exp_avg_sq"
    splits_masters = True

    def __init__(self, inner: torch.optim.Optimizer):
        super().__init__(inner)
        self.decoupled = isinstance(inner, torch.optim.AdamW)  # where groups do not say it

    def check(self) -> None:
        for group in self.inner.param_groups:
            AdamStep.of(group, self.decoupled, 1)  # raises for what cannot be an option
            require(
                not group.get("amsgrad"),
                "a group has amsgrad=True now, which asks for max_exp_avg_sq: give it to the optimizer "
                "before the ZeroOptimizer is made",
            )

    def update(
        self, codec: Codec, fields: Fields, grad: Tensor, group: Group, step: int, scale: float
    ) -> None:
        scalars = AdamStep.of(group, self.decoupled, step, scale)
        moments = fields["exp_avg"], fields["exp_avg_sq"]
        given = fields["param"], grad, fields.get("master"), *moments
        threads = self.num_threads or cpu_adam.default_threads()
        cpu_adam.unchecked(given, scalars, cpu_adam.default_engine(), threads)


class StepRule(Rule):
    """Any elementwise optimizer: what its step() makes of an element depends on no other.

    What it keeps is learned from one step of a parameter of ones.
    """

    def __init__(self, inner: torch.optim.Optimizer):
        super().__init__(inner)
        group = inner.param_groups[0]
        # states may have been begun by the optimizer's own __init__, or by training; those of a
        # parameter without dimensions do not tell fields from numbers
        wide = (inner.state.get(param, {}) for param in group["params"] if param.ndim)
        begun: Any = next(wide, {})
        self.first = numbers_of(begun) if begun.get("step", 1) == 0 else {}  # Adagrad's
        # by a group's first parameter, and by count
        self.known = defaultdict[int, Any](lambda: {0: self.first})
        state = begun or self.step_of_ones(group, {})
        self.names = tuple(name for name, value in state.items() if is_field(value))

    def check(self) -> None:
        for group in [group for group in self.inner.param_groups if group["params"]]:
            state = self.step_of_ones(group, self.first)
            require(
                state.keys() - numbers_of(state) == {*self.names},
                f"options of a {type(self.inner).__name__} ask for other states than {self.names}: keep "
                "those that zk has seen, and give groups that differ in this to optimizers of their own",
            )

    def update(
        self, codec: Codec, fields: Fields, grad: Tensor, group: Group, step: int, scale: float
    ) -> None:
        master = codec.read(fields, "master")
        param = nn.Parameter(master)
        param.grad = grad.float() * scale  # a copy, as step() may change it
        state: dict[str, Any] = {}
        if step > 1 or self.first:
            state = {name: fields[name] for name in self.names} | self.numbers(group, step - 1)
        after = self.run(group, param, state)
        for name in self.names:
            if after[name].data_ptr() != fields[name].data_ptr():
                fields[name].copy_(after[name])
        codec.write(fields, {"master": master})
        self.numbers(group, step)  # with this step's options

    def run(self, group: Group, param: nn.Parameter, state: dict[str, Any]) -> dict[str, Any]:
        """Take the user's step() for one parameter; returns its state."""
        worker = copy.copy(self.inner)
        plain = {name: value for name, value in PLAIN.items() if name in group}
        worker.param_groups = [{**group, **plain, "params": [param]}]
        state = {n: v if is_field(v) else copy.deepcopy(v) for n, v in state.items()}
        worker.state = defaultdict(dict, {param: state} if state else {})
        type(worker).step.__wrapped__(worker)  # type: ignore[attr-defined]  # without torch's hooks
        return dict(worker.state[param])

    def numbers(self, group: Group, step: int) -> dict[str, Tensor]:
        """Counters such as "step". They follow from options and counts: the same on all ranks."""
        known = self.known[id(group["params"][0])]
        last = next(count for count in range(step, -1, -1) if count in known)
        for count in range(last, step):
            known[count + 1] = numbers_of(self.step_of_ones(group, known[count]))
            if (count - 2) % KEPT:  # some stay, from which those of parameters that are behind follow
                known.pop(count - 2, None)
        return known[step]  # type: ignore[no-any-return]

    def know(self, group: Group, step: int, numbers: dict[str, Tensor]) -> None:
        self.known[id(group["params"][0])][step] = copy.deepcopy(numbers) or self.first

    def step_of_ones(self, group: Group, numbers: dict[str, Tensor]) -> dict[str, Any]:
        param = nn.Parameter(torch.ones(2, dtype=torch.float32))
        param.grad = torch.ones_like(param)
        fields = {name: torch.ones_like(param.grad) for name in self.names}
        return self.run(group, param, fields | numbers if numbers else {})


def is_field(value: Any) -> bool:
    """Tell what is kept for each element from what is kept once for a parameter."""
    return isinstance(value, Tensor) and value.ndim > 0


def numbers_of(state: dict[str, Any]) -> dict[str, Any]:
    """What a state keeps once for a parameter."""
    return {name: value for name, value in state.items() if not is_field(value)}


TORCHS = "torch.optim.optimizer"  # what it has put around a step() keeps that, and nothing else
unwrapped = functools.partial(inspect.unwrap, stop=lambda f: f.__globals__["__name__"] != TORCHS)


def steps_as(inner: torch.optim.Optimizer, kinds: tuple[type[torch.optim.Optimizer], ...]) -> bool:
    """Tell if ``inner`` is one of ``kinds``, or a subclass that keeps its step()."""
    return any(
        isinstance(inner, kind) and unwrapped(type(inner).step) is unwrapped(kind.step)
        for kind in kinds
    )


ADAM = torch.optim.Adam, torch.optim.AdamW
# torch's own step() makes of each element what depends on no other
OTHERS = "SGD", "RMSprop", "NAdam", "RAdam", "Adagrad", "Adadelta", "Adamax", "Rprop", "ASGD"
ELEMENTWISE = *ADAM, *(getattr(torch.optim, name) for name in OTHERS)


def is_plain_adam(unit: Unit, inner: torch.optim.Optimizer) -> bool:
    return steps_as(inner, ADAM) and not any(g.get("amsgrad") for g in inner.param_groups)


Rules = list[tuple[Callable[[Unit, torch.optim.Optimizer], bool], Callable[..., Rule]]]
RULES: Rules = [
    (is_plain_adam, AdamRule),
    (lambda unit, inner: steps_as(inner, ELEMENTWISE), StepRule),
]


def rule_for(rules: Rules, unit: Unit, inner: torch.optim.Optimizer) -> Callable[..., Rule]:
    """The first rule whose predicate holds; TypeError if there is none."""
    for is_for, rule in rules:
        if is_for(unit, inner):
            return rule
    kind = type(inner)
    raise TypeError(
        f"zk knows the arithmetic of {', '.join(known.__name__ for known in ELEMENTWISE)}, and of "
        f"subclasses that keep their step(); got {kind.__module__}.{kind.__qualname__}, of which it "
        "cannot tell what it looks at. Say so: elementwise=True, parameterwise=True or Addon.rules"
    )
