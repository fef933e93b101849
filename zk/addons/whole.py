"""torch.optim.Muon, and other optimizers of whole parameters: the bits of their own step().

All ranks gather gradient, master and states of one parameter at a time. Those whose shards have some
of it run step() on all of it, where the model computes, and keep their part. Every optimizer has
this add-on: Muon needs no option. Uses of the core: the seams ``check``, ``rules``, ``attach``;
``StepRule``; ``UnitStore.whole``, ``parts``, ``open``, and ``update``, for which it stands in.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from zk.addon import Addon
from zk.logs import require
from zk.offload.rules import Codec, Group, Rules, StepRule, steps_as
from zk.optimizer import ZeroOptimizer
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

    def attach(self, optimizer: ZeroOptimizer) -> None:
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
