"""ZeroOptimizer: a torch optimizer whose states are partitioned over ranks and rest on tiers.

``step`` is the story.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections import ChainMap
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from zk.next import addon
from zk.next.addon import Seams
from zk.next.checks import check_arguments, check_params
from zk.next.config import ZeroConfig
from zk.next.offload.drive import Drive
from zk.next.offload.rules import RULES, Codec, Rule
from zk.next.offload.tiers import Host, Memory, Tier
from zk.next.parallel.comm import Comm
from zk.next.parallel.runtime import RUNTIMES, Runtime
from zk.next.placement import Place, Size, choose, on_drive, place_buffers
from zk.next.precision import (
    LossScaler,
    clip_factor,
    dtypes_of,
    floats_of,
    loss_scale_of,
    refuse_grad_scaler,
    warn_of_slow_products,
)
from zk.next.promised import device_of, fill_buffers
from zk.next.states import load_states, states_of
from zk.next.store import Step, UnitStore
from zk.next.unit import Unit, blocks_of, find_units
from zk.offload.cpu_adam import default_threads

Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer]
AHEAD = 2  # chunks that are fetched while one is updated


class Layout:
    """Who shares what, where it rests, and which arithmetic updates it."""

    def __init__(
        self,
        model: nn.Module,
        inners: list[torch.optim.Optimizer],
        config: ZeroConfig,
        seams: Seams,
    ) -> None:
        self.config, self.seams, self.stage = config, seams, config.stage
        self.comm: Comm = seams.chain("comm", Comm(config.process_group))
        self.sharers = self.comm if config.stage else Comm(alone=True)
        self.num_threads = config.num_threads or default_threads()
        self.groups = {
            p: group for inner in inners for group in inner.param_groups for p in group["params"]
        }
        self.inner_of = {
            p: inner for inner in inners for g in inner.param_groups for p in g["params"]
        }
        self.rules = seams.chain("rules", RULES)
        self.made: dict[Any, Rule] = {}  # (optimizer, kind of rule) -> rule
        self.device = torch.device(config.device or device_of(next(model.parameters())))
        self.places: dict[Unit, Place] = {}
        self.tiers: dict[str, Tier] = {
            "device": Memory(self.device),
            "host": Host(self.device),
            "mirrored": Host(self.device, mirrored=True),
        }

    def place(self, units: list[Unit], model: nn.Module, freed: Iterable[Any]) -> None:
        """Choose the tiers of units; an error for what cannot fit, on all ranks.

        ``freed``: tensors whose memory is given back.
        """
        sizes = [Size.of(unit, self.codec_of(unit).fields, model) for unit in units]
        places, cache = choose(self.config, sizes, self.comm, self.device, freed)
        self.places |= zip(units, places, strict=True)
        if on_drive(places) and "nvme" not in self.tiers:
            self.tiers["nvme"] = Drive(self.config.nvme_path, cache, self.device)

    def rule_of(self, unit: Unit) -> Rule | None:
        """The rule that updates a unit; None for a frozen one."""
        if not unit.is_trained:
            return None
        inner = self.inner_of[unit.params[0]]
        kind = next(rule for is_for, rule in self.rules if is_for(unit, inner))
        return self.made.setdefault((inner, kind), self.made.get((inner, kind)) or kind(inner))

    def codec_of(self, unit: Unit) -> Codec:
        rule = self.rule_of(unit)
        return self.seams.chain("codec", unit, rule.codec(unit.dtype) if rule else Codec({}))

    def tier_of(self, unit: Unit, what: str) -> Tier:
        """The tier of a unit's "param" (at rest, or beside the update) or "state"."""
        name = getattr(self.places[unit], what)
        return self.seams.chain("tier", unit, what, self.tiers[name])

    def close(self) -> None:
        for tier in self.tiers.values():
            tier.close()


class ZeroOptimizer(torch.optim.Optimizer):
    """ZeRO, ZeRO-Offload and ZeRO-Infinity around the user's own optimizer.

    Args:
        model: on its device. Its parameters become views of flat buffers.
        optimizer: over its parameters, or a list of several; their param_groups stay live.
        config: a ZeroConfig; or give its fields by name.

    Raises:
        ValueError, TypeError: for what cannot be right, with the remedy, before anything is moved.
    """

    _step_supports_amp_scaling = True  # GradScaler then comes to where it is refused by name
    grad_scale = property(None, refuse_grad_scaler)

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizers,
        config: ZeroConfig | None = None,
        **options: Any,
    ) -> None:
        inners = check_arguments(model, optimizer, config, ZeroOptimizer)
        self.config = config = dataclasses.replace(config or ZeroConfig(), **options)
        held = ChainMap(*(runtime.store_of for runtime in RUNTIMES))
        dtype_of = dtypes_of(model, config.dtype, config.keep_dtype)
        check_params(model, inners, config.device, dtype_of, held)
        self.model, self.inners = model, inners
        groups = [group for inner in inners for group in inner.param_groups]
        super().__init__(groups, inners[0].defaults)
        self.param_groups = groups  # the user's own, so that both see changes
        self._seams = Seams([*config.addons, *addon.make(config.options)])
        self._layout = Layout(model, inners, config, self._seams)
        self._is_scaled, self._torn = False, ""  # why states are not of one step
        self.norm, self.skipped_steps, self.num_steps = 0.0, 0, 0
        self._runtime = Runtime(model, self._layout.comm, config.prefetch, self._seams)
        self._runtime.reducer.syncs = self._reduces_in_backward = config.stage != 1
        units = self._find_units()
        trained = {unit.dtype for unit in units if unit.is_trained}
        self._scaler = LossScaler(loss_scale_of(config.loss_scale, trained))
        on_cpu = {unit.dtype for unit in units if unit.device.type == "cpu"}
        for dtype in on_cpu if self._layout.comm.rank == 0 else ():
            warn_of_slow_products(dtype)
        self._adopt(units)
        fill_buffers(model)
        place_buffers(model, self._layout.device, config.device is not None, self._layout.comm)
        for inner in inners:
            if inner.state:
                self.load_state_dict(inner.state_dict())
                inner.state.clear()
        for attach in self._seams.attach:
            attach(self)

    def _find_units(self) -> list[Unit]:
        """Units of the parameters that no store has, cast to their dtype."""
        config, layout = self.config, self._layout
        blocks = self._seams.chain("blocks", self.model, chosen_blocks(self.model, config.units))
        dtype_of = dtypes_of(self.model, config.dtype, config.keep_dtype)

        def kind_of(name: str, param: nn.Parameter) -> Any:
            own = [kind(name, param) for kind in self._seams.kind]
            return dtype_of(param), id(layout.inner_of.get(param)), *own

        units = find_units(self.model, blocks, kind_of, self._runtime.store_of)
        for unit in units:
            unit.dtype = dtype_of(unit.params[0])
            unit.device = config.device or device_of(unit.params[0])
            unit.is_trained = unit.is_trained and unit.params[0] in layout.groups
        return units

    def _adopt(self, units: list[Unit]) -> None:
        """Take units into stores: their parameters move to their tiers, and get hooks."""
        layout = self._layout
        for unit in units:
            unit.lay_out(layout.comm.size, layout.sharers.size)
        freed = [value for unit in units for p in unit.params for value in (p, p.grad)]
        for states in (states for inner in self.inners for states in inner.state.values()):
            freed += states.values()
        layout.place(units, self.model, freed)
        for unit in units:
            self._runtime.attach(UnitStore(unit, layout))
        self._runtime.attach_model(self.config.dtype)

    def _abandon(self, stores: list[UnitStore]) -> None:
        """Give up units: their parameters are whole, and plain torch's."""
        self.synchronize()
        for store in stores:
            store.gather()
            store.point([view.clone() for view in store.views])
            self._runtime.detach(store)

    @property
    def _trained(self) -> list[UnitStore]:
        return [store for store in self._runtime.stores if store.unit.is_trained]

    # ---- the step --------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """reduce -> norm, clip -> fetch, update, evict -> publish.

        ZeRO, arXiv 1910.02054, section 5; ZeRO-Offload, arXiv 2101.06840, section 4.
        """
        loss = self._evaluate(closure)
        self._settle()
        self._reduce_rest()
        self.norm = self._norm_of_gradients()
        overflow = not math.isfinite(self.norm)
        if overflow:
            self._skip()
        else:
            self._update(clip_factor(self.norm, self.config.clip_grad_norm) / self._scaler.scale)
        self._scaler.update(overflow)
        self._is_scaled = False
        return loss

    def _evaluate(self, closure: Callable[[], Any] | None) -> Any:
        if closure is None:
            return None
        with torch.enable_grad():
            return closure()

    def synchronize(self) -> None:
        """Wait for all that is in flight; RuntimeError if states are not of one step."""
        self._settle()
        for synchronized in self._seams.synchronized:
            synchronized()

    def _settle(self) -> None:
        """Wait for what states depend on."""
        if self._torn:
            raise RuntimeError(self._torn)
        for before_step in self._seams.before_step:
            before_step()
        for store in self._runtime.stores:
            store.wait()

    def _reduce_rest(self) -> None:
        """Reduce what is still on this rank; all ranks learn which parameters have a gradient."""
        for store in self._trained:
            store.drop_removed()
            store.absorb()
            store.publish()
        self._runtime.reducer.settle()
        if not any(store.grad.is_taken for store in self._trained):
            raise RuntimeError(
                "step() without a gradient: call backward() before it, and zero_grad() after it"
            )
        if self._scaler.scale != 1.0 and not self._is_scaled:
            raise RuntimeError(
                "the loss was not scaled: call optimizer.backward(loss) instead of loss.backward()"
            )

    def _norm_of_gradients(self) -> float:
        """The 2-norm of all gradients, without the loss scale; not finite if one of them is not."""
        squares = floats_of([store.grad.sum_of_squares() for store in self._trained])
        sums = self._layout.sharers.total("norm", [sum(squares)])
        total = sum(self._seams.chain("totals", sums))
        return math.sqrt(total) / self._scaler.scale if math.isfinite(total) else math.inf

    def _skip(self) -> None:
        """Change nothing but the loss scale."""
        self.skipped_steps += 1
        for store in self._trained:
            store.drop_grad()

    def _update(self, scale: float) -> None:
        """Update all units that have a gradient."""
        run = self._seams.first("updater") or self._update_now
        run = self._seams.chain("around_update", run)
        self.num_steps += 1
        used = [store for store in self._trained if store.grad.is_taken]
        step = Step(scale, {id(group): {**group} for group in self.param_groups})
        # back and forth: the cache of the drive has what was last
        run(used if self.num_steps % 2 else used[::-1], step)

    def _update_now(self, stores: list[UnitStore], step: Step) -> None:
        self._update_units(stores, step)
        for store in stores:
            store.publish()

    def _update_units(self, stores: list[UnitStore], step: Step) -> None:
        """fetch ahead -> update -> evict, chunk by chunk."""
        jobs = [(store, number) for store in stores for number in range(len(store.bounds))]
        with self._tearing():
            for position, (store, number) in enumerate(jobs):
                for other, following in jobs[position : position + AHEAD + 1]:
                    other.fetch(following)
                store.update(number, step)
                if number == len(store.bounds) - 1:
                    self._count(store)

    def _count(self, store: UnitStore) -> None:
        store.updated()
        for updated in self._seams.updated:
            updated(store)

    @contextlib.contextmanager
    def _tearing(self) -> Iterator[None]:
        """An error inside leaves states of two steps: they are not used before others are loaded."""
        try:
            yield
        except BaseException as error:
            self._torn = self._runtime.broken = (
                f"a step failed half-way ({type(error).__name__}: {error}), so states are of two "
                "steps: load a checkpoint, or load_state_dict(), before training on"
            )
            raise

    # ---- around the step -------------------------------------------------------------------------

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """``loss.backward()``, with the loss scale."""
        self._is_scaled = True
        scale = self._scaler.scale
        (loss * scale if scale != 1.0 else loss).backward(**kwargs)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients."""
        for store in self._trained:
            if store.updating is None:  # an update in flight has taken it
                store.drop_grad()
            for param, left in zip(store.unit.params, store.left, strict=True):
                left.is_added = False
                param.grad = None

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes inside add gradients up on this rank, until one outside reduces them."""
        self._runtime.reducer.syncs = False
        try:
            yield
        finally:
            self._runtime.reducer.syncs = self._reduces_in_backward

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Clip the gradients that have left to ``max_norm``; returns their norm, as torch does."""
        self._settle()
        self._reduce_rest()
        norm = self._norm_of_gradients()
        for store in self._trained:
            factor = clip_factor(norm, max_norm) if math.isfinite(norm) else 1.0
            store.grad.factors = [factor * before for before in store.grad.factors]
            store.num_grads += 1
        return torch.tensor(norm, device=self._layout.tiers["device"].device)

    def state_dict(self) -> dict[str, Any]:
        """States in torch's own format, whole, with fp32 "master"s. Call it on all ranks."""
        self._settle()
        return states_of(self)

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take states of its own or of the user's optimizer.

        A step that failed half-way is forgotten once masters are loaded.
        """
        for store in self._trained:
            store.drop_grad()
        load_states(self, state_dict)

    def __getattr__(self, name: str) -> Any:
        """Methods of rooms that the core does not know, such as save_checkpoint."""
        return addon.method_of(self, name)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *addon.METHODS})

    def close(self) -> None:
        """Make the model plain torch's again, with full parameters; remove files."""
        self._abandon(list(self._runtime.stores))
        self._runtime.detach(None)
        self._layout.close()


def chosen_blocks(model: nn.Module, units: Sequence[Any] | None) -> dict[str, nn.Module]:
    """The modules that travel as one, by name; ValueError for an entry that names none."""
    if units is None:
        return blocks_of(model)
    modules, found = dict(model.named_modules()), {}
    for entry in units:
        chosen = {
            name: module
            for name, module in modules.items()
            if (name == entry if isinstance(entry, str) else isinstance(module, entry))
        }
        if not chosen:
            raise ValueError(f"units: the model has no module {entry!r}; see model.named_modules()")
        found |= chosen
    return {name: module for name, module in modules.items() if name in found and name}
