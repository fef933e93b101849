"""``elementwise=True``, ``parameterwise=True``: optimizers that zk does not know are tried first.

The first says that what step() makes of an element depends on no other, so that ranks update slices;
the second that it depends on its parameter alone (zk/addons/whole.py). Small random parameters are
updated by the optimizer itself, all at once, and by zk. Every bit must be the same.
Uses of the core: the seam ``rules``; ``StepRule``.
"""

from collections import defaultdict
from copy import copy
from typing import Any

import torch

from zk.addon import Addon, found
from zk.logs import require
from zk.offload.rules import Codec, Rules


class Elementwise(Addon):
    option, file = "elementwise", "zk.offload.rules:StepRule"
    instead = "parameterwise=True or torch.optim.AdamW"
    cut = staticmethod(lambda value: value.view(-1).chunk(7))

    def __init__(self, value: bool) -> None:
        require(value is True, f"{self.option} must be True or False; got {value!r}")
        self.kind_of_rule = found(self.option, {self.option: self.file}, TypeError)

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
        params: Any = [torch.randn(shape, dtype=torch.float32) for shape in [*shapes] * 2]
        kept = [{n: p * (n == "param") for n in ("param", *rule.names)} for p in params]
        worker = copy(rule.inner)
        worker.param_groups, worker.state = [group | {"params": params}], defaultdict(dict)
        for count in range(1, 5):
            for param in params:
                param.grad = torch.randn_like(param)
            worker.step()
            for param, fields in zip(params, kept, strict=True):
                for *parts, grad in zip(
                    *map(self.cut, (*fields.values(), param.grad)), strict=True
                ):
                    own = dict(zip(fields, parts, strict=True))
                    rule.update(Codec({}), own, grad, group, count, 1.0)
                ours, state = fields | rule.numbers(group, count), worker.state[param]
                torch.testing.assert_close(ours, {"param": param, **state}, rtol=0, atol=0)


class Parameterwise(Elementwise):
    option, file = "parameterwise", "zk.addons.whole:WholeStep"
    instead = "torch.optim.Muon or AdamW"
    cut = staticmethod(lambda value: [value])
