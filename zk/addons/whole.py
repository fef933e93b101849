"""Optimizers by their own step(): of whole parameters, as torch.optim.Muon; and others, once tried.

    elementwise=True     what step() makes of an element depends on no other: ranks update slices
    parameterwise=True   it depends on its parameter alone

Of whole parameters all ranks gather gradient, master and states of one at a time. Those whose shards
have some of it run step() on all of it, where the model computes, and keep their part. Muon needs no
option. Uses of the core: the seams ``check``, ``rules``, ``attach``; ``StepRule``;
``UnitStore.whole``, ``parts``, ``open``, and ``update``, for which it stands in.
"""

from collections import defaultdict
from copy import copy
from functools import partial
from typing import Any

import torch
from torch import Tensor

from zk.addon import Addon
from zk.logs import require
from zk.offload.rules import Codec, Group, Rules, StepRule, steps_as
from zk.store import Step, UnitStore

MUON = (torch.optim.Muon,)


class WholeStep(StepRule):
    """A step() over whole parameters; what it keeps of one has its shape."""

    def step_of_ones(self, group: Group, numbers: dict[str, Tensor]) -> dict[str, Any]:
        ones: Any = torch.ones([2] * group["params"][0].ndim, dtype=torch.float32)
        ones.grad = ones.clone()
        fields = dict.fromkeys(self.names, ones.clone())
        return self.run(group, ones, fields | numbers if numbers else {})


class Whole(Addon):
    """Units that such a rule updates do so in one go, with their last chunk."""

    def check(self, model: object, optimizers: Any, config: Any) -> None:
        options = config.options
        is_whole = options.get("parameterwise") or any(steps_as(one, MUON) for one in optimizers)
        require(
            not is_whole or options.get("overlap_step") is not True,
            "overlap_step=True updates beside other work, and ranks gather whole parameters for Muon "
            "and parameterwise=True within step(): use overlap_step='backward', or remove it",
        )

    def rules(self, rules: Rules) -> Rules:
        return [*rules, (lambda unit, inner: steps_as(inner, MUON), WholeStep)]

    def attach(self, optimizer: Any) -> None:
        for store in optimizer._trained:
            if isinstance(store.rule, WholeStep):
                vars(store)["update"] = partial(update, store)


def update(store: UnitStore, number: int, step: Step) -> None:
    """With the last chunk, update all parameters of a unit."""
    is_last, rule = number == len(store.bounds) - 1, store.rule
    for index in [i for i, here in enumerate(store.grad.present) if here and is_last]:
        grad = store.whole("grad", index)
        values = {kind: store.whole(kind, index) for kind in ("master", *rule.names)}
        group, count = step.options[id(store.groups[index])], store.steps[index] + 1
        parts = [*store.parts(index)]
        if parts:
            fields, factor = {**values, "param": values["master"]}, store.grad.factors[index]
            rule.update(Codec({}), fields, grad, group, count, step.scale * factor)
        rule.numbers(group, count)  # on all ranks
        for chunk, here, there in parts:
            with store.open(chunk) as kept:
                part = {name: field[here] for name, field in kept.items()}
                new = {kind: store.unit.flat(index, v)[there] for kind, v in values.items()}
                store.codec.write(part, new)


# ---- optimizers that zk does not know ------------------------------------------------------------


class Elementwise(Addon):
    """``elementwise=True``: what step() makes of an element depends on no other element.

    It is tried before it is believed. Small random parameters of all shapes that there are, each
    twice, are updated four times: by the optimizer itself, all at once, and by zk, in parts. Every
    bit of parameters and states must be the same.
    """

    option, kind_of_rule = "elementwise", StepRule
    instead = "parameterwise=True or torch.optim.AdamW"
    cut = staticmethod(lambda value: value.view(-1).chunk(7))

    def __init__(self, value: bool):
        require(value is True, f"{self.option} must be True or False; got {value!r}")

    def rules(self, rules: Rules) -> Rules:
        return [*rules, (lambda unit, inner: True, self.tried)]

    def tried(self, inner: Any) -> Any:
        """The rule of an optimizer that passes the trial; TypeError, with what differs, for others."""
        try:
            with torch.random.fork_rng([]):
                for group in inner.param_groups:
                    self.compare(self.made(inner), group)
        except Exception as error:
            raise TypeError(
                f"{type(inner).__name__} is not {self.option}, as zk found with small parameters: "
                f"{error}; use {self.instead}"
            ) from error
        return self.made(inner)

    def made(self, inner: Any) -> Any:
        """A rule, whose optimizer has no hooks, nor what a scheduler has put in place of step()."""

        def own(one: Any) -> Any:
            return {k: v for k, v in vars(one).items() if k != "step" and k[-6:] != "_hooks"}

        kind = type(inner)
        stand: Any = object.__new__(type(kind.__name__, (kind,), {"__getstate__": own}))
        stand.__dict__ = inner.__dict__
        return self.kind_of_rule(stand)

    def compare(self, rule: Any, group: Any) -> None:
        """Raise if anything is not the same where zk updates parts."""
        shapes = {tuple(min(n, 96) for n in param.shape) for param in group["params"]}
        params = [torch.randn(shape, dtype=torch.float32) for shape in [*shapes] * 2]
        kept = [{n: p * (n == "param") for n in ("param", *rule.names)} for p in params]
        worker = copy(rule.inner)
        worker.param_groups, worker.state = [group | {"params": params}], defaultdict(dict)
        for count in range(1, 5):
            for param, fields in zip(params, kept, strict=True):
                param.grad = torch.randn_like(param)
                for *parts, grad in zip(
                    *map(self.cut, (*fields.values(), param.grad)), strict=True
                ):
                    own = dict(zip(fields, parts, strict=True))
                    rule.update(Codec({}), own, grad, group, count, 1.0)
            worker.step()  # which may change gradients
            for param, fields in zip(params, kept, strict=True):
                want = {"param": param, **worker.state[param]}
                torch.testing.assert_close(fields | rule.numbers(group, count), want, rtol=0, atol=0)


class Parameterwise(Elementwise):
    """``parameterwise=True``: the same trial of whole parameters, each apart from the others."""

    option, kind_of_rule = "parameterwise", WholeStep
    instead = "torch.optim.Muon or AdamW"
    cut = staticmethod(lambda value: [value])
