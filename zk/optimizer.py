"""ZeroOptimizer: partitioned over ranks, resting on tiers. ``step`` is the story."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from zk import addon
from zk.addon import Seams
from zk.config import ZeroConfig
from zk.logs import log, require
from zk.memory import trim
from zk.offload.cpu_adam import default_threads
from zk.offload.drive import Drive
from zk.offload.rules import RULES, Codec, Rule, rule_for
from zk.offload.tiers import Tier, memory_tiers
from zk.parallel.comm import Comm, connect
from zk.parallel.gradient import squares_of
from zk.parallel.reducer import LossScaler, Reducer
from zk.parallel.runtime import RUNTIMES, Runtime
from zk.placement import Place, Size, choose, on_drive, place_buffers
from zk.precision import dtypes_of
from zk.states import check_states, load_states, states_of, states_of_inners
from zk.store import Step, UnitStore
from zk.unit import Unit, blocks_of, chosen_blocks, find_units

Inners = Sequence[torch.optim.Optimizer]
Optimizers = torch.optim.Optimizer | Inners | None
AHEAD = 2  # chunks that are fetched while one is updated


class Layout:
    """Who shares what, where it rests, and which arithmetic updates it."""

    def __init__(
        self, model: nn.Module, inners: Inners, config: ZeroConfig, seams: Seams, comm: Comm
    ):
        self.config, self.seams, self.stage, self.comm = config, seams, config.stage, comm
        self.reducer = Reducer(self.comm, seams.reduced)
        self.reducer.syncs = config.stage != 1
        self.sharers = comm.sharers if config.stage else Comm(alone=True)
        self.num_threads = config.num_threads or default_threads()
        groups = [(inner, group) for inner in inners for group in inner.param_groups]
        self.owners = {param: pair for pair in groups for param in pair[1]["params"]}
        self.inner, self.rules = inners[0], seams.chain("rules", RULES)
        self.made: dict[Any, Rule] = {}  # (optimizer, kind of rule) -> rule
        self.device = torch.device(config.device or next(model.parameters()).device)
        self.places: dict[Unit, Place] = {}
        self.tiers = memory_tiers(self.device)

    def units(self, model: nn.Module, dtype_of: Any) -> list[Unit]:
        """The units of a model, in the dtype and on the device that they will have."""
        config, seams, device = self.config, self.seams, self.config.device
        chosen = blocks_of(model) if config.units is None else chosen_blocks(model, config.units)

        def kind_of(name: str, param: nn.Parameter) -> Any:
            own = [kind(name, param) for kind in seams.kind]
            owner = self.owners.get(param, (None,))[0]
            return dtype_of(param), device or param.device, id(owner), *own

        units = find_units(model, seams.chain("blocks", model, chosen), kind_of)
        for unit in units:
            unit.dtype, unit.device = dtype_of(unit.params[0]), torch.device(device or unit.device)
            unit.is_trained = unit.is_trained and unit.params[0] in self.owners
            unit.lay_out(self.comm.size, self.sharers.size)
        return units

    def place(self, units: list[Unit], model: nn.Module, freed: Iterable[Any]) -> None:
        """Choose the tiers of units. ``freed``: tensors whose memory is given back."""
        with self.comm.together("ZeroOptimizer()"):
            sizes = [Size.of(unit, self.codec_of(unit).fields, model) for unit in units]
        places = choose(self.config, sizes, self.comm, self.device, freed)
        self.places |= zip(units, places, strict=True)
        with self.comm.together("the folder nvme_path"):
            if on_drive(places):
                self.tiers["nvme"] = Drive(self.config.nvme_path, self.device)  # type: ignore[arg-type]

    def rule_of(self, unit: Unit) -> Rule:
        """The rule that updates a unit; a frozen one has none, and keeps nothing."""
        if not unit.is_trained:
            return Rule(self.inner)
        inner, _ = self.owners[unit.params[0]]
        kind = rule_for(self.rules, unit, inner)
        rule = self.made.get((inner, kind)) or self.made.setdefault((inner, kind), kind(inner))
        rule.num_threads = self.num_threads
        return rule

    def codec_of(self, unit: Unit) -> Codec:
        own = self.rule_of(unit).codec(unit.dtype) if unit.is_trained else Codec({})
        return self.seams.chain("codec", unit, own)  # type: ignore[no-any-return]

    def tier_of(self, unit: Unit, what: str) -> Tier:
        """The tier of a unit's "param" (at rest, or beside the update) or "state"."""
        name = getattr(self.places[unit], what)
        return self.seams.chain("tier", unit, what, self.tiers[name])  # type: ignore[no-any-return]


class NoGradient(RuntimeError):
    """No parameter has a gradient on any rank."""


class ZeroOptimizer(torch.optim.Optimizer):
    """ZeRO, ZeRO-Offload and ZeRO-Infinity around the user's own optimizer.

    Args:
        model: on its device. Its parameters become views of flat buffers.
        optimizer: over its parameters, or a list of several; their param_groups stay live. None: the
            model is frozen (a reference, a teacher), and only its forward runs.
        config: a ZeroConfig; or give its fields by name.

    Raises:
        ValueError, TypeError: for what cannot be right, with the remedy, before anything is moved.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizers,
        config: ZeroConfig | None = None,
        **options: Any,
    ):
        connect()
        group = options.get("process_group", getattr(config, "process_group", None))
        comm = Comm(ZeroConfig(process_group=group).process_group)
        with comm.together("ZeroOptimizer()"):
            inners = check_types(model, optimizer, config)
            config = dataclasses.replace(config or ZeroConfig(), **options)
            self._seams = seams = Seams([*config.addons, *addon.make(config.options)])
            device: Any = seams.chain("device", model, config.device)
            config = dataclasses.replace(config, device=device)
            for check in seams.check:
                check(model, inners, config)
            dtype_of = dtypes_of(model, config.dtype, config.keep_dtype)
            super().__init__([g for one in inners for g in one.param_groups], inners[0].defaults)
        comm = seams.chain("comm", comm)
        with comm.together("ZeroOptimizer()"):
            self._layout = layout = Layout(model, inners, config, seams, comm)
            units = layout.units(model, dtype_of)
        trained = {unit.dtype for unit in units if unit.is_trained}
        self.model, self.config, self._inners = model, config, inners
        self.norm, self.skipped_steps, self.num_steps = 0.0, 0, 0
        self._torn = ""  # why states are not of one step
        self._trained: list[UnitStore] = []
        self._runtime = Runtime(model, layout, weakref.ref(self))
        self._scaler = layout.reducer.scaler = LossScaler(config.loss_scale, trained)
        self._adopt(units)
        self._take_over()
        for attach in seams.attach:
            attach(self)
        place_buffers(model, layout.device, config.device is not None, comm)

    def _adopt(self, units: list[Unit]) -> None:
        """Take units into stores: their parameters move to their tiers, and get hooks."""
        layout, runtime = self._layout, self._runtime
        values = (value for unit in units for p in unit.params for value in (p, p.grad))
        states = (s.values() for inner in self._inners for s in inner.state.values())
        layout.place(units, self.model, itertools.chain(values, *states))
        try:
            for unit in units:
                runtime.attach(UnitStore(unit, layout))
                trim()  # of what the parameters were before
        except BaseException as error:  # such as a full drive, on all ranks: another may be made
            is_told = isinstance(error, (OSError, MemoryError))
            self.close(gather=is_told or layout.comm.size == 1)
            raise
        self._trained = [store for store in runtime.stores if store.unit.is_trained]
        for store in self._trained:
            store.grad.drop()
        runtime.attach_model(self.config.dtype)

    def _take_over(self) -> None:
        """Take the states of the user's optimizers."""
        begun = states_of_inners(self)
        for inner in self._inners:
            inner.state.clear()
            vars(inner)["_opt_called"] = True  # schedulers look there for a step before theirs
        for name, hooks in vars(self._inners[0]).items() if len(self._inners) == 1 else ():
            if name.startswith("_optimizer_") and name.endswith("_hooks"):
                vars(self)[name] = hooks  # those that come later too run around this one
        if begun["state"]:
            load_states(self, begun)
        self._groups = self._groups_now()

    def _groups_now(self) -> list[Any]:
        owners = (self, *self._inners)
        return [(id(g), {*map(id, g["params"])}) for owner in owners for g in owner.param_groups]

    # ---- the step --------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """reduce -> norm, clip -> fetch, update, evict -> publish.

        ZeRO, arXiv 1910.02054, section 5; ZeRO-Offload, arXiv 2101.06840, section 4.
        """
        with torch.enable_grad():
            loss = None if closure is None else closure()
        self.norm = self._reduce()
        overflow = not math.isfinite(self.norm)
        if overflow:  # nothing but the loss scale changes
            self.skipped_steps += 1
            if self.skipped_steps.bit_count() == 1:  # the 1st, 2nd, 4th, 8th, ...
                log.warning(
                    "skipped a step, as a gradient is not finite (%d so far)", self.skipped_steps
                )
            for store in self._trained:
                store.grad.drop()
        else:
            self._update(clip_factor(self.norm, self.config.clip_grad_norm))
        self._scaler.update(overflow)
        return loss

    def synchronize(self) -> None:
        """Wait for all in flight, and take in what users wrote; RuntimeError for torn states."""
        self._settle()
        for synchronized in self._seams.synchronized:
            synchronized()

    def _settle(self) -> None:
        """Wait for what states depend on; RuntimeError if they are not of one step."""
        if self._torn:
            raise RuntimeError(self._torn)
        for before_step in self._seams.before_step:
            before_step()
        self._runtime.kept = None
        self._runtime.release_all()
        for store in self._runtime.stores:
            store.absorb()
            store.publish()

    def _begin_anew(self) -> None:
        """Wait for an update in the background, or forget one that failed; drop gradients."""
        if not self._torn:
            self._settle()
        for store in self._runtime.stores:
            store.updating = None
        self.zero_grad()

    def _reduce(self) -> float:
        """Reduce what is still on this rank; all ranks learn which parameters have a gradient.

        Returns their 2-norm: not finite if one of them is not.
        """
        self._settle()
        self._runtime.forget_calls()
        self._layout.reducer.settle()
        if not any(store.grad.is_taken for store in self._trained):
            raise NoGradient("step() found no gradient: call backward() before, zero_grad() after")
        squares = squares_of(store.grad for store in self._trained)
        sums = [sum(row[0] for row in self._layout.sharers.rows("norm", [squares]))]
        return math.sqrt(sum(self._seams.chain("totals", sums)))

    def _update(self, scale: float) -> None:
        """Update all units that have a gradient."""
        require(
            self._groups_now() == self._groups,
            "param_groups have other parameters than when the ZeroOptimizer was made, or copies "
            "replaced them: give them back, or close() it and make another one",
        )
        for rule in self._layout.made.values():
            rule.check()
        run = self._seams.chain("around_update", self._seams.first("updater") or self._update_units)
        self.num_steps += 1
        used = [store for store in self._trained if store.grad.is_taken]
        step = Step(scale / self._scaler.scale, options_of(self.param_groups))
        # back and forth: buffers of the drive have what was last
        run(used if self.num_steps % 2 else used[::-1], step)

    def _update_units(self, stores: list[UnitStore], step: Step) -> None:
        """fetch ahead -> update -> evict, chunk by chunk; publish each unit."""
        jobs = [(store, number) for store in stores for number in range(len(store.bounds))]
        try:
            for position, (store, number) in enumerate(jobs):
                first = position + AHEAD if position else 0  # all that are ahead of the first job
                for other, following in jobs[first : position + AHEAD + 1]:
                    other.fetch(following)
                store.update(number, step)
                if number == len(store.bounds) - 1:
                    store.updated()
                    for updated in (self._runtime.on_updated, *self._seams.updated):
                        updated(store)
        except BaseException as error:  # states are not used before others are loaded
            self._torn = self._runtime.broken = (
                f"a step failed half-way ({type(error).__name__}: {error}), so states are of two "
                "steps: load a checkpoint, or load_state_dict() here and then, in fp32, of the model"
            )
            raise

    # ---- around the step -------------------------------------------------------------------------

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """``loss.backward()``, with the loss scale."""
        scale, reducer = self._scaler.scale, self._layout.reducer
        if scale == 1.0:
            loss.backward(**kwargs)
            return
        reducer.collect_rest()  # what is in param.grad has no loss scale
        reducer.loss_scale = scale
        try:
            (loss * scale).backward(**kwargs)
        finally:
            reducer.collect_rest()  # what an error has left there has
            reducer.loss_scale = 1.0

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients; ``set_to_none=False``: make zeros of those that are there."""
        self._runtime.descending = 0  # a backward pass that has failed is over
        for store in self._trained:
            if store.updating is None:  # an update in flight has taken it
                store.grad.drop()
            for param in store.unit.params:
                is_none = set_to_none or param.grad is None
                param.grad = None if is_none else torch.zeros_like(param)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes inside add gradients up on this rank, until one outside reduces them."""
        reducer = self._layout.reducer
        before, reducer.syncs = reducer.syncs, False
        try:
            yield
        finally:
            reducer.syncs = before

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Clip the gradients that have left to ``max_norm``; returns their norm, as torch does."""
        norm = self._reduce()
        for store in self._trained:
            factor = clip_factor(norm, max_norm)
            store.grad.factors = [factor * before for before in store.grad.factors]
        return torch.tensor(norm, dtype=torch.float32, device=self._layout.device)

    def state_dict(self) -> dict[str, Any]:
        """States in torch's own format, whole, with fp32 "master"s. Call it on all ranks.

        They are on the device only if they rest there.
        """
        for before in self._optimizer_state_dict_pre_hooks.values():
            before(self)
        self._settle()
        states = states_of(self)
        for after in self._optimizer_state_dict_post_hooks.values():
            states = after(self, states) or states
        return states

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take states of its own or of the user's optimizer.

        A step that failed half-way is forgotten. Parameters in fp32 are not among states: load the
        model's too, after it. ValueError for states of other parameters, before anything is changed.
        """
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = before(self, state_dict) or state_dict
        with self._layout.comm.together("load_state_dict()"):
            check_states(self, state_dict)
        self._begin_anew()
        load_states(self, state_dict)
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refused once it is made: parameters have their places then."""
        require(
            "_runtime" not in vars(self),
            "add_param_group() on a ZeroOptimizer: add the group to your own optimizer before, or "
            "close() this one and make another",
            RuntimeError,
        )
        super().add_param_group(param_group)

    def __getattr__(self, name: str) -> Any:
        """Methods of rooms that the core does not know, such as save_checkpoint."""
        return addon.method_of(self, name)

    def __repr__(self) -> str:
        return str(self._described())

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *addon.METHODS})

    def close(self, gather: bool = True) -> None:
        """Make the model plain torch's again, and its optimizer the user's; remove files.

        Args:
            gather: make parameters whole; False: at stage 3 they read as NaN from now on.
        """
        if self._runtime not in RUNTIMES:
            return
        with contextlib.ExitStack() as stack:
            for closed in (*self._seams.closed, *(t.close for t in self._layout.tiers.values())):
                stack.callback(closed)
            stack.callback(self._runtime.detach, None)
            for store in self._runtime.stores:
                stack.callback(self._runtime.detach, store)
                if gather:
                    stack.callback(store.give_back)
            self._trained = []
            if not self._torn:
                self.synchronize()
        self._torn = self._runtime.broken = "this ZeroOptimizer is closed: make another one"

    def __enter__(self) -> ZeroOptimizer:
        return self

    def __exit__(self, kind: Any, *_: Any) -> None:
        self.close(gather=kind is None)  # after an error other ranks may not be there

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            "a ZeroOptimizer cannot be copied or pickled, as its states rest on tiers of this process: "
            "use state_dict(), or save_checkpoint()"
        )


def check_types(model: Any, optimizer: Any, config: Any) -> list[torch.optim.Optimizer]:
    """The optimizers, after a check that all is what it is called."""
    require(
        config is None or isinstance(config, ZeroConfig),
        f"config must be a zk.ZeroConfig (zk.ZeroConfig.from_deepspeed makes one); got {config!r}",
        TypeError,
    )
    words = f"ZeroOptimizer(model, ...): model must be an nn.Module; got {type(model).__name__}"
    require(isinstance(model, nn.Module), words, TypeError)
    if optimizer is None and not any(param.requires_grad for param in model.parameters()):
        optimizer = torch.optim.SGD(model.parameters())  # a frozen model has no use for it
    optimizers = [*optimizer] if isinstance(optimizer, (list, tuple)) else [optimizer]
    require(optimizers, "the list of optimizers is empty; give at least one")
    for one in optimizers:
        require(
            isinstance(one, torch.optim.Optimizer),
            "optimizer must be a torch.optim.Optimizer, or several, or None for a frozen model; got "
            f"{type(one).__name__}",
            TypeError,
        )
    return optimizers


def options_of(groups: list[dict[str, Any]]) -> dict[int, Any]:
    """Options as they are, by groups' ids: schedulers change a rate that is a tensor in place."""
    return {
        id(group): {n: v.clone() if isinstance(v, Tensor) else v for n, v in group.items()}
        for group in groups
    }


def clip_factor(norm: float, max_norm: float | None) -> float:
    """The factor of torch's clip_grad_norm_; 1.0 for a norm that is not finite: step() sees it."""
    is_clipped = max_norm is not None and math.isfinite(norm)
    return min(1.0, max_norm / (norm + 1e-6)) if is_clipped else 1.0  # type: ignore[operator]
