"""In: a model and the user's torch optimizer. Out: ZeroOptimizer, which keeps both partitioned and offloaded behind the same three calls."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import logging
import math
import os
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakIdKeyDictionary

from zk.config import ZeroConfig
from zk.hooks import CastInputs, Hook
from zk.materialize import can_make, compute_device, give_memory, values_of
from zk.offload import pipeline
from zk.offload.cpu_adam import default_threads
from zk.offload.pipeline import Run, Task
from zk.offload.rules import rule_for
from zk.offload.spill import FileGrads, FileHome, FileStore
from zk.offload.state import OptimizerShard, state_fields
from zk.offload.tiers import MemoryHome, MemoryStore, MemoryTier, Needs, NVMeTier, Tier, place
from zk.parallel.comm import Group, connect
from zk.parallel.grads import GradReducer, UnitGrads
from zk.parallel.layout import Layout
from zk.parallel.partitioned import Partition, PartitionedParams
from zk.parallel.replicated import ReplicatedParams, flatten_params
from zk.precision import LossScaler, clip_coefficient, default_loss_scale, norm_of
from zk.units import Unit, find_units

log = logging.getLogger("zk")
# every parameter that some ZeroOptimizer holds -> a weak reference to that optimizer
_OWNERS: WeakIdKeyDictionary = WeakIdKeyDictionary()


def owner_of(param: Tensor) -> ZeroOptimizer | None:
    """The ZeroOptimizer that holds ``param``."""
    reference = _OWNERS.get(param)
    return reference() if reference is not None else None


@dataclasses.dataclass(slots=True)
class Room:
    """Room on the drive for one unit's state, reserved before the state exists."""

    home: FileHome | None = None
    state: FileStore | None = None
    grads: FileGrads | None = None


@dataclasses.dataclass(slots=True)
class Held:
    """One unit and everything zk keeps for it. Frozen units have parameters only."""

    unit: Unit
    layout: Layout
    params: ReplicatedParams | PartitionedParams
    param_tier: Tier
    tier: Tier | None = None  # of gradients, masters and moments
    shard: OptimizerShard | None = None
    grads: UnitGrads | None = None


class ZeroOptimizer(torch.optim.Optimizer):
    """Wraps a model's optimizer so that training state is partitioned over ranks and kept on cheaper memory.

    The training loop stays as it is: ``loss.backward(); optimizer.step(); optimizer.zero_grad()``. Parameters become views of flat
    buffers; their gradients leave ``param.grad`` as soon as backward has made them (so clip with ``clip_grad_norm`` or
    ``clip_grad_norm_``). The user's ``param_groups`` stay live: schedulers may be made for either optimizer.

    Args:
        model: any module, on the device where it computes. With ``dtype`` set it is cast (floating point buffers too), and so are
            floating point inputs of its forward; fp32 values it holds now become the initial masters.
        optimizer: torch.optim.AdamW, Adam or SGD over parameters of ``model``, in any number of groups. State that it already
            has is taken over.
        config: a ZeroConfig; None takes the defaults.
        overrides: ZeroConfig fields, instead of or on top of ``config``.

    All ranks construct it at the same point; the first rank's parameter values win. Source: ZeRO, arXiv 1910.02054, section 5;
    ZeRO-Offload, arXiv 2101.06840, section 4.
    """

    _built = False
    _step_supports_amp_scaling = True  # torch.amp.GradScaler then comes to step(), which can say what to do instead

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, config: ZeroConfig | None = None, **overrides: Any) -> None:
        if config is not None and not isinstance(config, ZeroConfig):
            raise TypeError(f"config must be a zk.ZeroConfig, or options be given by name (stage=2); got {config!r}")
        self.config = dataclasses.replace(config, **overrides) if config is not None else ZeroConfig(**overrides)
        self.model, self.inner, self.closed = model, optimizer, False
        _check_arguments(model, optimizer)
        self.rule = rule_for(optimizer)
        super().__init__(optimizer.param_groups, optimizer.defaults)
        self.param_groups = optimizer.param_groups  # the same list: what is added to one is added to both
        _check_params(model, self.param_groups, self.config.dtype is not None)
        if self.config.state_dtype != torch.float32 and not any(self.rule.state_names(group) for group in self.param_groups):
            raise ValueError(f"state_dtype={self.config.state_dtype} has no effect: {type(optimizer).__name__} with these options keeps no state")

        device = compute_device(model)
        self.comm = connect(self.config.process_group, self.config.overlap, device)
        self.num_threads = self.config.num_threads or default_threads()
        self.steps: dict[nn.Parameter, int] = {}
        self.versions: dict[nn.Parameter, int] = {}
        self.used: list[set[int]] = []
        self.held: list[Held] = []
        self.units: dict[nn.Parameter, tuple[Held, int]] = {}
        self.max_norm = self.config.clip_grad_norm
        self.in_scaled_backward = False
        self.counters = {"steps": 0, "skipped_steps": 0}
        self.last_norm = math.nan
        self.tiers: dict[str, Tier] = {}
        try:
            self._build(device)
        except BaseException:
            self._close_files()
            raise
        scale = self.config.loss_scale
        if scale == "auto":
            scale = default_loss_scale({held.unit.dtype for held in self.held if held.shard})
        self.scaler = LossScaler(scale)  # type: ignore[arg-type]
        self._built = True
        if optimizer.state:
            self.load_state_dict(optimizer.state_dict())
            optimizer.state.clear()

    # ---- construction --------------------------------------------------------------------------------------------------------

    def _build(self, device: torch.device) -> None:
        """Units, tiers, flat buffers and hooks, for a model that nobody holds yet."""
        config, dtype = self.config, self.config.dtype
        assert dtype is None or isinstance(dtype, torch.dtype)
        units = find_units(self.model, self._groups(), dtype, config.units, device)
        layouts = [Layout.of([param.numel() for param in unit.params], self.comm.world) for unit in units]
        self.comm.name_units([unit.name for unit in units], repr([(unit.names, [p.shape for p in unit.params], unit.dtype) for unit in units]))
        self._place(units, layouts, device)
        self.partition = Partition(self.model, config.prefetch, _weakly(self._written))
        # alone, gradients go on as they are produced only if the optimizer's memory is not the device's
        alone, elsewhere = self.comm.world == 1, any(tier.name == "nvme" or tier.device != device for _, tier, _ in self.rooms.values())
        self.grads = GradReducer(self.comm, elsewhere if alone else config.stage != 1, config.stage == 0, _weakly(self._check_arrival))
        for name, buffer in self.model.named_buffers():
            if buffer.is_meta:
                give_memory(buffer, values_of(buffer, name).to(device))
        if dtype is not None:
            for buffer in self.model.buffers():
                if buffer.is_floating_point():
                    buffer.data = buffer.data.to(dtype)
        self.handles = [self.model.register_forward_pre_hook(Hook(functools.partial(_forward_begins, self.grads)))]
        if dtype is not None:
            self.handles.append(self.model.register_forward_pre_hook(CastInputs(dtype), with_kwargs=True))
        for index, (unit, layout) in enumerate(zip(units, layouts, strict=True)):
            self._hold(unit, layout, *self.rooms.pop(index))
        if self.partition.params:
            self.partition.attach()
            if len(units) == 1:
                log.warning(
                    "the model has no ModuleList or Sequential, so all of it is one unit and is gathered at once: stage 3 saves memory between "
                    "steps only. Name the blocks, by class or path, with units="
                )
        self.handles += [*self.grads.handles, *self.partition.handles]
        self.handles.append(self.inner.register_step_pre_hook(_inner_step))
        self._finalizer = weakref.finalize(self, _remove, self.handles)  # an optimizer that is dropped takes no gradients away any more
        self._finalizer.atexit = False
        if isinstance(self.comm, Group):
            for buffer in self.model.buffers():
                self.comm.broadcast(-1, buffer.data)

    def _groups(self) -> dict[nn.Parameter, int]:
        return {param: index for index, group in enumerate(self.param_groups) for param in group["params"]}

    # what one unit's state is, before it exists

    def _state_fields(self, unit: Unit) -> tuple[list[str], dict[str, torch.dtype]]:
        """Names of the moments that the unit's groups need, and the dtype of all that is kept for each element."""
        groups = [group for group in self.param_groups if any(param in self._members(group) for param in unit.params)]
        names = list(dict.fromkeys(name for group in groups for name in self.rule.state_names(group)))
        assert isinstance(self.config.state_dtype, torch.dtype)
        return names, state_fields(unit.dtype, self.rule, names, self.config.state_dtype)

    def _needs(self, unit: Unit, layout: Layout) -> Needs:
        """Bytes of one unit on this rank between uses."""
        world, stage = self.comm.world, self.config.stage
        per_element = sum(dtype.itemsize for dtype in self._state_fields(unit)[1].values()) + unit.dtype.itemsize  # the last is the gradient
        return Needs(
            layout.numel // (world if stage == 3 else 1) * unit.dtype.itemsize,
            layout.numel // (world if stage >= 1 else 1) * per_element if unit.trained else 0,
        )

    def _place(self, units: Sequence[Unit], layouts: Sequence[Layout], device: torch.device) -> None:
        """Choose every unit's tiers, and take all room on the drive before anything is moved."""
        config, world = self.config, self.comm.world
        needs = [self._needs(unit, layout) for unit, layout in zip(units, layouts, strict=True)]
        budgets = config.device_budget, config.host_budget
        paths = [os.fspath(path) for path in config.nvme_path or ()]  # type: ignore[union-attr, arg-type]
        self.tiers = {"device": MemoryTier("device", device), "host": MemoryTier("host", torch.device("cpu"))}
        placed = place(config.param_tier, config.optimizer_tier, needs, config.stage, device, *budgets, bool(paths))  # type: ignore[arg-type]
        nvme: NVMeTier | None = None
        if any("nvme" in names for names in placed):
            nvme = self.tiers["nvme"] = NVMeTier(paths, self.comm.rank, 2 * config.prefetch + 3, config.nvme_checksum)
        self.rooms: dict[int, tuple[Tier, Tier, Room]] = {}
        for index, (unit, layout, names) in enumerate(zip(units, layouts, placed, strict=True)):
            param_tier, optimizer_tier = (self.tiers[name if layout.numel else "host"] for name in names)
            numel = layout.numel // (world if config.stage > 0 else 1)
            room = Room()
            if isinstance(param_tier, NVMeTier):
                if optimizer_tier.device != param_tier.device:
                    raise ValueError("param_tier='nvme' needs optimizer_tier='host' or 'nvme', as parameters are updated in host memory")
                room.home = param_tier.home(numel, unit.dtype)
            if isinstance(optimizer_tier, NVMeTier) and unit.trained:
                room.state = optimizer_tier.store(optimizer_tier.chunks(numel), self._state_fields(unit)[1])
                room.grads = optimizer_tier.grads(optimizer_tier.chunks(numel), self.num_threads)
            self.rooms[index] = param_tier, optimizer_tier, room
        if nvme is not None:
            nvme.create()

    def _hold(self, unit: Unit, layout: Layout, param_tier: Tier, optimizer_tier: Tier, room: Room) -> None:
        """Move one unit's parameters into its flat buffer and set up what it trains with."""
        index = len(self.held)
        initial = flatten_params(unit, layout, values_of if self.comm.rank == 0 else None)
        self.comm.broadcast(index, initial)
        for param in unit.params:
            if param.is_meta:
                give_memory(param, torch.empty(1, dtype=unit.dtype, device=unit.device).expand(param.shape))
        numel = layout.numel // (self.comm.world if self.config.stage > 0 else 1)
        if self.config.stage == 3 and (self.comm.world > 1 or param_tier.device != unit.device or room.home is not None):
            home = room.home or param_tier.home(numel, unit.dtype)
            params: ReplicatedParams | PartitionedParams = PartitionedParams(unit, index, layout, self.comm, home, self.partition.on_use)
            self.partition.add(params)  # type: ignore[arg-type]
        else:
            params = ReplicatedParams(unit, index, layout, self.comm, initial, partitioned=self.config.stage > 0)
            home = MemoryHome(params.shard, [slice(0, numel)])
        held = Held(unit, layout, params, param_tier)
        if unit.trained:
            names, fields = self._state_fields(unit)
            chunks = next((store.chunks for store in (room.state, home.store) if store is not None and not store.resident), [slice(0, numel)])
            store = home.store
            if store.resident:
                on_device = home.open()
                shard = on_device if home.device == optimizer_tier.device else torch.empty_like(on_device, device=optimizer_tier.device)
                store = MemoryStore(chunks, {"param": shard})
            held.tier = optimizer_tier
            held.shard = OptimizerShard(
                self.rule,
                store,
                room.state or optimizer_tier.store(chunks, fields),
                room.grads or optimizer_tier.grads(chunks, self.num_threads),
                names,
                None if home.device == optimizer_tier.device else home.open(),
            )
            held.shard.start(initial[params.held])
            held.grads = UnitGrads(unit, index, layout, params.held, held.shard.grads.add)
            self.grads.add(held.grads)
            self.used.append(set())
        elif isinstance(params, PartitionedParams):
            home.write(initial[params.held])
        self.held.append(held)
        for position, param in enumerate(unit.params):
            self.units[param] = (held, position)
            self.versions[param] = param._version
            _OWNERS[param] = weakref.ref(self)

    @staticmethod
    def _members(group: dict[str, Any]) -> set[nn.Parameter]:
        return set(group["params"])

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters of the model that no group has yet. Only before the first step."""
        if not self._built:
            super().add_param_group(param_group)
            return
        if self.counters["steps"] or any(self.used):
            raise RuntimeError("add_param_group comes after the first step or backward: flat buffers are laid out by then; add groups before")
        super().add_param_group(param_group)
        try:
            _check_params(self.model, self.param_groups, self.config.dtype is not None)
        except ValueError:
            self.param_groups.pop()
            raise
        self._rebuild()

    def _rebuild(self) -> None:
        """Lay everything out again for the groups as they are now, keeping masters."""
        masters = {}
        for held in self.held:
            held.params.hold()
            for index, param in enumerate(held.unit.params):
                where = held.layout.whole(index)
                exact = self._full(held, held.shard.get_master) if held.shard else held.params.full
                masters[param] = exact[where].view(param.shape).clone()
        self._finalizer()
        self._close_files()
        for param, master in masters.items():
            param.data = master
        self.held, self.units, self.used = [], {}, []
        self._build(next(iter(masters.values())).device)

    # ---- the training loop ---------------------------------------------------------------------------------------------------

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """``loss.backward()`` with the loss scale applied. Needed where a loss scale is on (fp16); the same as loss.backward() elsewhere."""
        self._check_open()
        self.in_scaled_backward = True
        try:
            (loss.float() * self.scaler.scale if self.scaler.active else loss).backward(**kwargs)  # type: ignore[no-untyped-call]
        finally:
            self.in_scaled_backward = False

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Reduce what is left, clip, update, and make the updated parameters available. Returns the closure's loss, or None.

        A step whose gradients hold NaN or inf changes nothing, lowers a dynamic loss scale, and is counted in ``metrics()``.
        """
        self._check_open()
        if getattr(self, "grad_scale", None) is not None:
            raise RuntimeError(
                "torch.amp.GradScaler does not see gradients that are partitioned; leave it out: dtype='fp16' turns a dynamic loss scale on, "
                "and optimizer.backward(loss) applies it"
            )
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._reduce()
        if not any(self.used):
            raise RuntimeError(
                "step() found no gradient: no parameter of the optimizer took part in a backward since the last step; call "
                "loss.backward() first, and zero_grad() after step(), not before it"
            )
        self.last_norm = self._global_norm()
        if math.isfinite(self.last_norm):
            self._update(clip_coefficient(self.last_norm, self.max_norm) / self.scaler.scale)
            self.counters["steps"] += 1
        else:
            self._report_skip()
        self.scaler.update(overflow=not math.isfinite(self.last_norm))
        self._clear()
        self.partition.prefetcher.between_passes()
        self.inner._opt_called = True  # type: ignore[attr-defined]  # what schedulers made for the user's optimizer look at
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients, also those on their way. After ``step()`` there are none, so calling it there is free."""
        self._check_open()
        self.grads.forget()
        self._clear()
        super().zero_grad(set_to_none)

    def no_sync(self) -> AbstractContextManager[None]:
        """Context: gradients of backward passes inside stay on their rank until the next backward outside, or the step."""
        return self.grads.no_sync()

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Clip the gradients of the coming step to a global 2-norm of ``max_norm``; overrides the config's for that step.

        Returns the norm before clipping, over all ranks and without the loss scale, as a scalar tensor.
        """
        self._check_open()
        if not max_norm > 0:
            raise ValueError(f"max_norm must be more than 0; got {max_norm!r}")
        self._reduce()
        self.max_norm = float(max_norm)
        self.last_norm = self._global_norm()
        return torch.tensor(self.last_norm)

    def synchronize(self) -> None:
        """Return when no work of zk is under way: reductions are done and gathered parameters released."""
        while self.grads.queue:
            self.grads._complete()
        self.partition.reset()

    # ---- the phases of a step ------------------------------------------------------------------------------------------------

    def _reduce(self) -> None:
        """grads -> flatten -> reduce -> shard, for what backward has not reduced yet."""
        self._check_groups()
        for used, new in zip(self.used, self.grads.finish(), strict=True):
            used |= new
        self.partition.reset()

    def _global_norm(self) -> float:
        """The 2-norm of all gradients over all ranks, without the loss scale. Not finite if any gradient is not."""
        total = sum(held.shard.grads.sum_of_squares() for held in self.held if held.shard)
        if self.config.stage > 0 and self.comm.world > 1:
            everywhere = torch.tensor([total], dtype=torch.float64)
            self.comm.all_reduce(everywhere)
            total = everywhere.item()
        return norm_of(total, self.scaler.scale)

    def _update(self, grad_scale: float) -> None:
        """update -> cast -> upload -> gather, unit by unit."""
        group_of = {param: group for group in self.param_groups for param in group["params"]}
        tasks, trained = [], [held for held in self.held if held.shard]
        for held, used in zip(trained, self.used, strict=True):
            assert held.shard is not None
            self._adopt_writes(held)
            for index in used:
                param = held.unit.params[index]
                self.steps[param] = self.steps.get(param, 0) + 1
            if used:
                tasks.append(Task(held.unit.name, held.shard, list(self._runs(held, used, group_of)), held.params.publish))
        pipeline.update(tasks, grad_scale, self.num_threads, backwards=self.counters["steps"] % 2 == 1)
        changed = [held.unit.params[index] for held, used in zip(trained, self.used, strict=True) for index in used]
        torch.autograd.graph.increment_version(changed)
        self.versions.update((param, param._version) for param in changed)

    def _runs(self, held: Held, used: set[int], group_of: dict[nn.Parameter, dict[str, Any]]) -> Iterator[Run]:
        """Neighbours of one group and step count, merged; parameters without a gradient are left out, as torch leaves them alone."""
        run: Run | None = None
        for index, param in enumerate(held.unit.params):
            part = held.layout.part(index, held.params.held)[0]
            if index in used and part.stop > part.start:
                group, step = group_of[param], self.steps[param]
                if run is not None and run[1] is group and run[2] == step:
                    run = slice(run[0].start, part.stop), group, step
                    continue
                if run is not None:
                    yield run
                run = part, group, step
            elif run is not None and index not in used:
                yield run
                run = None
        if run is not None:
            yield run

    def _adopt_writes(self, held: Held) -> None:
        """Parameters that the user wrote since the last update (load_state_dict on the model, say) go into the master."""
        if isinstance(held.params, PartitionedParams):
            return
        assert held.shard is not None
        for index, param in enumerate(held.unit.params):
            place = held.params.full[held.layout.whole(index)]
            if param.data_ptr() != place.data_ptr() or param.dtype != place.dtype:
                raise RuntimeError(
                    f"parameter {held.unit.names[index]!r} was moved or converted after ZeroOptimizer took it (model.to(), .half() or a new "
                    ".data); move the model first, then wrap it, and use dtype= to convert"
                )
            if param._version != self.versions[param]:
                held.shard.adopt(held.layout.part(index, held.params.held)[0])
                self.versions[param] = param._version

    def _written(self, params: PartitionedParams, indices: list[int]) -> None:
        """Parameters of a held unit were overwritten on every rank: the first rank's values stay, and masters follow."""
        self.keep_written(self.held[params.index], indices)

    def keep_written(self, held: Held, indices: Sequence[int]) -> None:
        """As ``_written``, for a unit at any stage."""
        self.comm.broadcast(held.params.index, held.params.full)
        if isinstance(held.params, PartitionedParams):
            held.params.home.write(held.params.full[held.params.held])
        if held.shard is not None:
            for index in indices:
                held.shard.adopt(held.layout.part(index, held.params.held)[0])

    def _clear(self) -> None:
        for held in self.held:
            if held.shard is not None and held.grads is not None:
                self.grads.recycle(held.grads, held.shard.grads.clear())
        for used in self.used:
            used.clear()
        self.max_norm = self.config.clip_grad_norm

    def _report_skip(self) -> None:
        self.counters["skipped_steps"] += 1
        count = self.counters["skipped_steps"]
        if count & (count - 1) == 0:  # the 1st, 2nd, 4th, 8th ...
            scale = f" at loss scale {self.scaler.scale:g}" if self.scaler.active else ""
            log.warning("step skipped: a gradient is not finite%s (%d skipped so far, %d taken)", scale, count, self.counters["steps"])

    # ---- checks --------------------------------------------------------------------------------------------------------------

    def _check_open(self) -> None:
        if self.closed:
            raise RuntimeError("this ZeroOptimizer is closed; make a new one to go on training")

    def _check_arrival(self, param: nn.Parameter) -> None:
        self._check_open()
        if self.scaler.active and not self.in_scaled_backward and torch._C._current_graph_task_id() != -1:
            raise RuntimeError(
                f"a loss scale is on (now {self.scaler.scale:g}), and loss.backward() does not apply it; call optimizer.backward(loss), or set "
                "loss_scale=None to train without one"
            )

    def _check_groups(self) -> None:
        """What the user did to param_groups and parameters since the start; the same on all ranks, before any collective."""
        grouped = {param for group in self.param_groups for param in group["params"]}
        for held in self.held:
            for name, param in zip(held.unit.names, held.unit.params, strict=True):
                if held.shard is not None and param not in grouped:
                    raise ValueError(f"parameter {name!r} is in no param_group any more; to stop training it set requires_grad=False")
                if held.shard is None and param in grouped and param.grad is not None:
                    raise RuntimeError(
                        f"parameter {name!r} was frozen when ZeroOptimizer was made and has a gradient now; unfreeze before, "
                        "or close(gather=True) this optimizer and make a new one"
                    )
        for group in self.param_groups:
            self._check_group(group)

    def _check_group(self, group: dict[str, Any]) -> None:
        """That there is room for the state that the group's options ask for."""
        for param in group["params"]:
            if param not in self.units:
                raise ValueError(f"a parameter of shape {tuple(param.shape)} was put into param_groups; use add_param_group, before a step")
            shard = self.units[param][0].shard
            missing = set(self.rule.state_names(group)) - set(shard.names) if shard is not None else None
            if missing:
                raise ValueError(
                    f"the options of a param_group ask for {', '.join(sorted(missing))}, which the optimizer had not when ZeroOptimizer was made; "
                    "set amsgrad or momentum before"
                )

    # ---- state ---------------------------------------------------------------------------------------------------------------

    def _full(self, held: Held, read: Callable[[slice], Tensor]) -> Tensor:
        """The whole flat buffer (layout.numel,) of something that each rank holds a slice of; a collective where there are several ranks."""
        mine = read(slice(0, held.params.held.stop - held.params.held.start))
        if mine.numel() == held.layout.numel:
            return mine
        full = torch.empty(held.layout.numel, dtype=mine.dtype, device=mine.device)
        self.comm.all_gather(held.params.index, full, mine.contiguous()).wait()
        return full

    def state_dict(self) -> dict[str, Any]:
        """torch's own format: ``step`` and the optimizer's states by parameter, in fp32, and ``master`` for 16-bit parameters.

        One process, or stages 0-2: whole tensors in the parameter's shape, which plain torch optimizers load (they ignore
        ``master``); with several ranks at stages 1 and 2 a collective, so call it on all ranks. Stage 3 with several ranks: this rank's
        own slices, flat. Before the first step there is no state, and nothing is collective.
        """
        self._check_open()
        self.state.clear()
        try:
            if self.steps:
                for held in self.held:
                    self._export(held)
            plain = super().state_dict()
        finally:
            self.state.clear()
        plain["zk"] = {"loss_scale": self.scaler.state_dict(), "counters": dict(self.counters)}
        return plain

    def _export(self, held: Held) -> None:
        shard = held.shard
        if shard is None:
            return
        readers: dict[str, Callable[[slice], Tensor]] = {name: functools.partial(shard.get_state, name) for name in shard.names}
        if shard.has_master:
            readers["master"] = shard.get_master
        own_part = self.config.stage == 3 and self.comm.world > 1
        for name, read in readers.items():
            full = None if own_part else self._full(held, read)
            for index, param in enumerate(held.unit.params):
                if param not in self.steps:
                    continue
                entry = self.state.setdefault(param, {"step": torch.tensor(float(self.steps[param]))})
                if full is not None:
                    entry[name] = full[held.layout.whole(index)].view(param.shape)
                else:
                    entry[name] = read(held.layout.part(index, held.params.held)[0])

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over groups and state from ``state_dict()`` of this class or of the plain torch optimizer.

        Without a ``master`` the masters stay as they are. Raises ValueError, before anything is changed, if groups or shapes differ.
        """
        self._check_open()
        for hook in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = hook(self, state_dict) or state_dict
        if not {"state", "param_groups"} <= set(state_dict):
            raise ValueError(f"a state_dict of an optimizer has 'state' and 'param_groups'; got {sorted(map(str, state_dict))}")
        saved_groups = state_dict["param_groups"]
        if [len(group["params"]) for group in saved_groups] != [len(group["params"]) for group in self.param_groups]:
            raise ValueError(
                f"the state has groups of {[len(g['params']) for g in saved_groups]} parameters, this optimizer of "
                f"{[len(g['params']) for g in self.param_groups]}; build the same groups in the same order first"
            )
        for group, saved in zip(self.param_groups, saved_groups, strict=True):
            self._check_group({**group, **saved, "params": group["params"]})
        params = dict(zip((i for g in saved_groups for i in g["params"]), (p for g in self.param_groups for p in g["params"]), strict=True))
        plan = [entry for key, saved in state_dict["state"].items() for entry in self._import_plan(params[key], saved)]
        absent = [param for key, param in params.items() if key not in state_dict["state"] and param in self.steps]
        for group, saved in zip(self.param_groups, saved_groups, strict=True):
            group.update({key: value for key, value in saved.items() if key != "params"})
        for param in absent:  # as before its first step
            held, index = self.units[param]
            mine = held.layout.part(index, held.params.held)[0]
            del self.steps[param]
            for name in held.shard.names if held.shard is not None else ():
                assert held.shard is not None
                held.shard.set_state(name, mine, torch.zeros(mine.stop - mine.start))
        for write in plan:
            write()
        if "zk" in state_dict:
            self.scaler.load_state_dict(state_dict["zk"]["loss_scale"])
            self.counters.update(state_dict["zk"]["counters"])
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    def _import_plan(self, param: nn.Parameter, saved: dict[str, Any]) -> list[Callable[[], None]]:
        """What loading one parameter's state will write, after checking that it fits."""
        held, index = self.units[param]
        shard, name = held.shard, held.unit.names[index]
        if shard is None:
            raise ValueError(f"the state holds entries for {name!r}, which is frozen here")
        mine, piece = held.layout.part(index, held.params.held)
        writes: list[Callable[[], None]] = [lambda: self.steps.__setitem__(param, int(saved.get("step", 1)))]
        for key in [*shard.names, "master"]:
            value = saved.get(key)
            if key == "master":
                if value is None or not shard.has_master:
                    continue
            elif value is None:
                if key == "momentum_buffer":
                    continue  # torch keeps None there before the first step
                raise ValueError(f"the state of {name!r} has no {key!r}; it has {sorted(saved)}")
            if tuple(value.shape) == tuple(param.shape):
                value = value.detach().reshape(-1)[piece]
            elif tuple(value.shape) != (mine.stop - mine.start,):
                raise ValueError(
                    f"{key!r} of {name!r} has shape {tuple(value.shape)}; this parameter is {tuple(param.shape)} and this rank holds "
                    f"{mine.stop - mine.start} elements of it"
                )
            if key == "master":
                writes.append(lambda value=value: shard.set_master(mine, value))  # type: ignore[misc]
            else:
                writes.append(lambda key=key, value=value: shard.set_state(key, mine, value))  # type: ignore[misc]
        return writes

    def overwrite(self, held: Held, values: dict[int, Callable[[], Tensor]]) -> None:
        """Replace parameters of a unit, and their masters: number in the unit -> what makes its values. On all ranks, with equal values."""
        self._check_open()
        params = held.params
        if held.shard is None:
            params.hold()
            for index, make in values.items():
                params.full[held.layout.whole(index)] = make().reshape(-1)
            if isinstance(params, PartitionedParams):
                params.home.write(params.full[params.held])
            params.let_go()
            return
        self._adopt_writes(held)
        for index, make in values.items():
            mine, piece = held.layout.part(index, params.held)
            held.shard.set_master(mine, make().reshape(-1)[piece])
        pending = params.publish()
        if pending is not None:
            pending.wait()

    def metrics(self) -> dict[str, float]:
        """Counts, the last gradient norm, the loss scale, and this rank's bytes by tier and kind."""
        sizes: dict[str, float] = {}

        def add(tier: str, kind: str, nbytes: int) -> None:
            sizes[f"{tier}_{kind}_nbytes"] = sizes.get(f"{tier}_{kind}_nbytes", 0) + nbytes

        for held in self.held:
            add(held.param_tier.name, "param", held.params.nbytes["param"])
            add("device", "gathered", held.params.nbytes["gathered"])
            if held.shard is not None and held.tier is not None:
                for kind, nbytes in held.shard.nbytes.items():
                    add(held.tier.name, kind, nbytes)
        on_cpu = self.held[0].unit.device.type == "cpu"
        add("host" if on_cpu and self.config.optimizer_tier != "device" else "device", "grad", self.grads.nbytes)
        prefetcher, nvme = self.partition.prefetcher, self.tiers.get("nvme")
        moved: dict[str, float] = {}
        if isinstance(nvme, NVMeTier):
            add("host", "buffer", nvme.spill.buffer_nbytes)
            moved = nvme.metrics()
        return {
            **self.counters,
            "grad_norm": self.last_norm,
            "loss_scale": self.scaler.scale,
            "gathers": prefetcher.uses,
            "prefetch_hits": prefetcher.hits,
            **moved,
            **sizes,
        }

    def resting(self, kind: str) -> str:
        """Names of the tiers on which "param" or "optimizer" state rests, such as "host" or "host+nvme"."""
        tiers = [held.param_tier if kind == "param" else held.tier for held in self.held]
        return "+".join(sorted({tier.name for tier in tiers if tier is not None}))

    def close(self, *, gather: bool = False) -> None:
        """Remove all hooks, and the files of the NVMe tier.

        Parameters that are full stay usable. What stage 3 partitioned can be read no more, unless ``gather`` (on all ranks, and with
        memory for all of it) makes it full once more.
        """
        if not self.closed:
            self.grads.forget()
            if gather:
                self.partition.gather_all()
            self._finalizer()
            self.partition.closed = self.closed = True
            for param in self.units:
                _OWNERS.pop(param, None)
            self._close_files()
            self.comm.close()

    def _close_files(self) -> None:
        nvme = self.tiers.get("nvme")
        if isinstance(nvme, NVMeTier):
            nvme.close()

    def __enter__(self) -> ZeroOptimizer:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _inner_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    raise RuntimeError(f"this {type(optimizer).__name__} was given to a ZeroOptimizer, which has its gradients; call step() of that one")


def _weakly(method: Callable[..., None]) -> Callable[..., None]:
    """Calls ``method`` as long as its object lives, and does not keep it alive: the model's hooks would."""
    reference = weakref.WeakMethod(method)

    def call(*args: Any) -> None:
        alive = reference()
        if alive is not None:
            alive(*args)

    return call


def _remove(handles: list[RemovableHandle]) -> None:
    for handle in handles:
        handle.remove()


def _forward_begins(grads: GradReducer, *_: Any) -> None:
    if torch._C._current_graph_task_id() == -1:
        grads.begin()


def _check_arguments(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be an nn.Module; got {type(model).__name__}")
    if isinstance(optimizer, ZeroOptimizer):
        raise ValueError("the optimizer is a ZeroOptimizer already; wrap the torch optimizer once")
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"optimizer must be a torch.optim.Optimizer; got {type(optimizer).__name__}")
    if isinstance(model, nn.parallel.DistributedDataParallel):
        raise ValueError("model is wrapped in DistributedDataParallel, which would reduce gradients a second time; pass model.module")
    if next(model.parameters(), None) is None:
        raise ValueError("model has no parameters")
    for name, param in model.named_parameters():
        if owner_of(param) is not None:
            raise ValueError(
                f"parameter {name!r} belongs to another ZeroOptimizer; close() that one first (with gather=True, if it partitions parameters)"
            )
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.is_meta and not can_make(tensor):
            raise ValueError(
                f"{name!r} is on the meta device and nothing says what its values are; build the model within zk.deferred_init(), or call "
                "zk.load_pretrained(model, path) first"
            )


def _check_params(model: nn.Module, groups: Sequence[dict[str, Any]], converted: bool) -> None:
    """Every trained parameter is the model's, floating point (of a dtype we train, if not ``converted``), and shares memory with no other."""
    names = {param: name for name, param in model.named_parameters()}
    for index, group in enumerate(groups):
        for param in group["params"]:
            if param not in names:
                raise ValueError(
                    f"a parameter of shape {tuple(param.shape)} in group {index} is not one of model.parameters(); make the optimizer from "
                    "the model that is passed (after any .to() that replaces parameters)"
                )
            known = param.is_floating_point() if converted else param.dtype in (torch.float32, torch.bfloat16, torch.float16)
            if param.requires_grad and not known:
                raise ValueError(f"parameter {names[param]!r} is {param.dtype}; zk trains fp32, bf16 and fp16: pass dtype= or convert it")
    spans = sorted(
        (param.data_ptr(), param.data_ptr() + param.numel() * param.element_size(), name)
        for param, name in names.items()
        if param.is_contiguous() and param.numel() and not param.is_meta
    )
    for (_, stop, name), (start, _, other) in itertools.pairwise(spans):
        if start < stop and owner_of(model.get_parameter(name)) is None:
            raise ValueError(
                f"parameters {name!r} and {other!r} share memory but are two Parameter objects, so they would drift apart; tie them by "
                f"assigning one object to both modules"
            )
