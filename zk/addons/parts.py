"""Ranks that hold other parts of the same layers: one norm, one decision to skip, own checkpoints.

    model_parallel_group=   ranks with the other parts; process_group= has those with the same part
    replicated_params=      names, or ends of names, of parameters that all parts hold alike

Every optimizer has it; it acts where these are given, or parameters are DTensors over a mesh of one
dimension. These are trained as local tensors: those with Shard are parts, all other parameters
replicated. Modules still read DTensors; what autograd saves of these stays until backward.

The norm and the overflow of the loss scale are over all parts, and count replicated parameters once.
These begin alike, and get the same gradient on all parts, by the framework: step() compares norms.

Uses of the core: the seams ``check``, ``comm``, ``kind``, ``totals``, ``attach``, ``closed``; Comm,
UsedParameters, ``Layout.sharers``, ``squares_of`` gradients; it wraps what saves and loads.
"""

from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn

from zk.addon import Addon
from zk.config import PARSERS, ZeroConfig
from zk.logs import require
from zk.parallel.comm import Comm
from zk.parallel.gradient import squares_of
from zk.parallel.runtime import UsedParameters


def given(value: Any) -> Addon:
    """An add-on without a seam for either option, as Parts reads both in the config."""
    return Addon()


class Parts(Addon):
    def __init__(self) -> None:
        self.parts, self.replicated = Comm(alone=True), set[str]()

    def check(self, model: nn.Module, optimizers: Any, config: ZeroConfig) -> None:
        self.model, self.inners = model, optimizers
        self.options = config.clip_grad_norm, config.loss_scale
        self.group, ends = map(config.options.get, ("model_parallel_group", "replicated_params"))
        require(
            (self.group is None) == (ends is None),
            "model_parallel_group= and replicated_params= need each other ([] for none)",
        )
        if self.group is not None:
            PARSERS["process_group"](self.group, "model_parallel_group")
        names: Any = dict(model.named_parameters())
        for end in ends or ():
            found = {name for name in names if f".{name}".endswith(f".{end}")}
            require(found, f"replicated_params: no parameter's name is, or ends with, {end!r}")
            self.replicated |= found
        if whole := self.make_local(names):
            require(
                self.group is None,
                "DTensors say which ranks hold other parts: remove model_parallel_group=",
            )
            self.group, *more = {one.device_mesh.get_group() for one in whole.values()}
            require(not more, "all DTensors of a model must be over one mesh")
            cut = {name for name, one in whole.items() if one.placements[0].is_shard()}
            self.replicated = names.keys() - cut

    def comm(self, comm: Comm) -> Comm:
        """Compare groups, before anything is moved."""
        if self.group is not None:
            self.parts = Comm(self.group)
            ranks = dist.get_process_group_ranks(self.group)
            alike = comm.words("model_parallel_group", (self.parts.rank, *ranks))
            others = self.parts.words("process_group", (comm.rank, comm.size, self.options))
            members = {rank for _, *ranks in alike for rank in ranks}
            require(
                len(members) == comm.size * len(ranks)
                and len({part for part, *_ in alike}) == len(set(others)) == 1,
                "process_group must have the ranks with the same part, and model_parallel_group "
                "those with the same data and options. This process_group has (part, *group) "
                f"{alike}; this model_parallel_group (rank, ranks, clip and loss scale) {others}",
            )
        return comm

    def kind(self, name: str, param: nn.Parameter) -> bool:
        return name in self.replicated

    def attach(self, optimizer: Any) -> None:
        self.optimizer = optimizer
        self.exchange({})
        for name in ("save_checkpoint", "load_checkpoint") if self.parts.size > 1 else ():
            vars(optimizer)[name] = partial(self.in_part, getattr(optimizer, name))

    def totals(self, sums: list[float]) -> list[float]:
        """The squares of all parts, less those of replicated parameters beyond the first part's."""
        if self.parts.size == 1:
            return sums
        trained = self.optimizer._trained
        mine = squares_of(s.grad for s in trained if s.unit.names[0] in self.replicated)
        rows = self.optimizer._layout.sharers.rows("norm", [mine])
        own, alike = self.compare(*sums, sum(row[0] for row in rows))
        require(
            not max(alike) - min(alike) > 1e-3 * max(alike),
            f"parts have other gradients of replicated_params: squared norms are {alike}; reduce "
            "them as the framework does, clip by clip_grad_norm= or optimizer.clip_grad_norm_()",
            RuntimeError,
        )
        return [*own, -sum(alike[1:])]  # not finite, or NaN, where any of them is

    def compare(self, *mine: float) -> Any:
        """Numbers of each part. RuntimeError where a step, or a load, has failed in some alone."""
        rows = self.parts.rows("steps of parts", [self.optimizer.num_steps, *mine])
        steps, *values = zip(*rows, strict=True)
        said = [*map(int, steps)]
        require(
            len({*said}) == 1,
            f"parts have made {said} steps: load a checkpoint that all have (remove newer ones)",
            RuntimeError,
        )
        return values

    def in_part(self, run: Any, directory: Any, **kwargs: Any) -> Any:
        """Save or load this part's checkpoint."""
        if kwargs.get("keep") == 1:  # until all parts have the next one
            kwargs["keep"] = 2
        own = Path(directory, f"part-{self.parts.rank}-of-{self.parts.size}")
        with self.parts.together(run.__name__):
            found = run(own, **kwargs)
        self.compare()
        return found

    def closed(self) -> None:
        local = [p for p in self.model.parameters() if hasattr(p, "whole")]
        self.exchange({p: nn.Parameter(whole_of(p).detach(), p.requires_grad) for p in local})

    # ---- DTensors --------------------------------------------------------------------------------

    def make_local(self, names: dict[str, Any]) -> dict[str, Any]:
        """Put this rank's part in the place of each DTensor, its ``whole``; returns these by name."""
        found = {name: param for name, param in names.items() if hasattr(param, "placements")}
        for name, param in found.items():
            kinds = [type(placement).__name__ for placement in param.placements]
            is_new = param.grad is None and not any(param in inner.state for inner in self.inners)
            require(
                is_new and kinds in (["Shard"], ["Replicate"]),
                f"parameter {name!r} is a DTensor with {param.placements}: zk trains Shard and "
                "Replicate over one dimension, as parallelize_module makes them (leave fully_shard "
                "out), before they have a gradient, or states of an optimizer",
            )
        made: Any = {}
        for param in found.values():
            made[param] = local = nn.Parameter(param._local_tensor.detach(), param.requires_grad)
            if local.requires_grad:  # of a reduction that is in flight
                local.register_hook(lambda grad: getattr(grad, "wait", lambda: grad)())
            param._local_tensor, vars(local)["whole"] = local.new_empty(0), param
        self.exchange(made)
        return found

    def exchange(self, made: dict[Any, Any]) -> None:
        """Put parameters in the places of those they are made of; let modules read DTensors."""
        for module in self.model.modules():
            table: Any = module._parameters
            for name, param in table.items():
                table[name] = made.get(param, param)
            if any(hasattr(param, "whole") for param in table.values()):
                module._parameters = Whole(table, getattr(table, "on_read", lambda _: None))
        for inner in self.inners:
            for group in inner.param_groups:
                group["params"] = [made.get(param, param) for param in group["params"]]


def whole_of(local: Any) -> Any:
    """The DTensor of a local parameter, which gets its gradient."""
    whole = local.whole
    given = whole.device_mesh, whole.placements
    return type(whole).from_local(local, *given, shape=whole.shape, stride=whole.stride())


class Whole(UsedParameters):
    """A module's ``_parameters``, of which ``module.weight`` reads as the DTensor."""

    def __getitem__(self, name: str) -> Any:
        param = super().__getitem__(name)
        return whole_of(param) if hasattr(param, "whole") else param
