"""ZeroOptimizer: a model and its torch optimizer, partitioned and offloaded behind the same three calls."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import math
import os
import weakref
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.utils.hooks import RemovableHandle

from zk import kernels
from zk.accumulation.micro_batch import MicroBatch
from zk.accumulation.schedule import accumulate
from zk.checkpoint import load, save, state_dicts
from zk.checkpoint.folders import Claim
from zk.checkpoint.shown import Gone, Shown
from zk.config import ZeroConfig
from zk.core import holding
from zk.core.assemble import Assembly
from zk.core.checks import (
    check_aliases,
    check_arguments,
    check_groups,
    check_params,
    check_state_dtype,
    check_whole,
)
from zk.core.fit import refuse_what_cannot_fit
from zk.core.hooks import Calls, Hook, InputCasts, KeepCodes, calls_of, weakly
from zk.core.logs import log, rank_log
from zk.core.memory import ranks_here
from zk.core.options import parse_dtype, parse_nbytes
from zk.core.owners import held_params, is_dtensor, owner_of, tie_inner
from zk.core.parked import parked
from zk.core.precision import DynamicLossScale, GradFactors, LossScaler, norm_of, stored_dtypes, warn_of_slow_products
from zk.core.speculation import Speculation
from zk.core.store import UnitStore
from zk.core.timeline import Clock, phase
from zk.core.torch_calls import watch_pipelines, watch_torch
from zk.core.units import Unit
from zk.core.updates import Integrity, Updates, as_now, check_kernels, chosen, compile_updates, settled
from zk.nn.deferred import compute_device
from zk.offload.cpu_adam import default_threads
from zk.offload.rules import Rule, as_number, rules_for
from zk.offload.streams import link_to
from zk.offload.tiers import NVMeTier, Tier
from zk.offload.transfer import Transfer
from zk.offload.worker import Worker
from zk.parallel.comm import Group, connect, giving_up, telling, together
from zk.parallel.grads import Gradients, GradReducer
from zk.parallel.model_parallel import connect_parts, show
from zk.parallel.partitioned import Partition
from zk.parallel.released import own_grad
from zk.tools.metrics import Rates, metrics_of
from zk.tools.summary import Summary, configured, show_once, summary_of

# what torch's optimizers keep hooks in
_HOOKS = tuple(f"_optimizer_{of}_{when}_hooks" for of, when in itertools.product(("step", "state_dict", "load_state_dict"), ("pre", "post")))
# fields of ZeroConfig that may differ from rank to rank
_OF_A_RANK = ("device", "process_group", "model_parallel_group", "units", "num_threads", "nvme_path", "host_budget", "device_budget")


class ZeroOptimizer(torch.optim.Optimizer):
    """Wraps a model's optimizer so that training state is partitioned over ranks and kept on cheaper memory.

    The training loop stays as it is: ``loss.backward(); optimizer.step(); optimizer.zero_grad()``. Parameters become views of flat
    buffers; their gradients leave ``param.grad`` as soon as backward has made them, and come back where it is read (clipping all of them by
    their norm needs no such thing). The user's ``param_groups`` stay live: schedulers may be made for either optimizer.

    Args:
        model: any module, on the device where it computes, or in host memory with ``device`` saying where. With ``dtype`` set it is cast
            (``cast_buffers`` and ``keep_dtype`` say what else and what not), and so are floating point inputs of its forward; fp32
            values it holds now become the masters.
        optimizer: one of torch.optim's, or one that is said to be elementwise or parameterwise (``elementwise=True``), over parameters of
            ``model``, in any number of groups.
            State that it already has is taken over. Or a list of optimizers over parameters of their own: ``param_groups`` are those of all.
        config: a ZeroConfig; None takes the defaults.
        overrides: ZeroConfig fields, instead of or on top of ``config``.

    Raises:
        ValueError: for a model or options that do not fit together; the message says what to change.
        TypeError: for an optimizer whose arithmetic cannot be partitioned.
        MemoryError: on all ranks, before anything is changed, for what cannot fit in the memory that is free, with what would fit
            (``check_memory``; activations are not known, nor counted).

    All ranks construct it at the same point; the first rank's parameter values win. Source: ZeRO, arXiv 1910.02054, section 5;
    ZeRO-Offload, arXiv 2101.06840, section 4.
    """

    _step_supports_amp_scaling = True  # torch.amp.GradScaler then comes to step(), which can say what to do instead

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        config: ZeroConfig | None = None,
        **overrides: Any,
    ) -> None:
        config = ZeroConfig() if config is None else config
        if not isinstance(config, ZeroConfig):
            raise TypeError(f"config must be a zk.ZeroConfig, or options be given by name (stage=2); got {config!r}")
        self._built = False
        with giving_up(overrides.get("process_group", config.process_group)):
            self.config = dataclasses.replace(config, **overrides)
            self.inners: list[torch.optim.Optimizer] = [*optimizer] if isinstance(optimizer, (list, tuple)) else [optimizer]  # type: ignore[list-item]
            self.model, self.closed, self.forked, self.is_parked, self.clock = model, False, False, False, Clock()
            check_arguments(model, self.inners, ZeroOptimizer)
            self.rule_of_inner = rules_for(self.inners, self.config.elementwise, self.config.parameterwise)
            first = self.inners[0]
            super().__init__([group for inner in self.inners for group in inner.param_groups], {})
            self.defaults = {name: option for inner in self.inners for name, option in inner.defaults.items()}
            if len(self.inners) == 1:
                self.param_groups = first.param_groups  # the same list: what is added to one is added to both
            for hooks in _HOOKS:  # and the same hooks
                shared = getattr(first, hooks)
                for one in (*self.inners[1:], self):
                    shared.update(getattr(one, hooks))
                    setattr(one, hooks, shared)
            self.stored = self._checked()

            self.device = torch.device(self.config.device or compute_device(model))
            self.config = settled(self.config, self.device)
        self.comm = connect(self.config.process_group, self.config.overlap, self.device, self.config.exact_reduce)
        try:
            self.parts = connect_parts(self.comm, self.config.model_parallel_group, self.config.replicated_params, model)
        except BaseException as error:
            self.comm.fail(error)
            raise
        self.everyone = self.parts.everyone
        self.apart = self.everyone is not self.comm and self.comm.world > 1  # some wait in what this part does, others in what all do
        self.num_threads = self.config.num_threads or default_threads()
        self.held: list[UnitStore] = []
        self.handles: list[RemovableHandle] = []
        self.units: dict[nn.Parameter, tuple[UnitStore, int]] = {}
        self.frozen: list[nn.Parameter] = []  # of the groups; they may be trained later
        self.in_scaled_backward = False
        self.calls = Calls(set())  # of the model
        self.saved_nbytes = weakref.WeakKeyDictionary[nn.Module, int]()  # for backward, by a call of a block
        self.counters = {"steps": 0, "skipped_steps": 0}
        self.integrity = Integrity(self.comm, self.everyone, self.held)
        self.tiers: dict[str, Tier] = {}
        self.transfer = Transfer(link_to(self.device), None, self.config.overlap)
        self.worker = Worker("zk update")
        self.speculation: Speculation | None = None
        self.updates = Updates(self)
        self.claim: Claim = {}  # of the folders that it saves into
        self.saver = save.Saver(self.everyone)
        self.saved_to: Path | None = None  # the folder of the last checkpoint that was saved or loaded
        self.resume_from: Path | None = None  # what a framework resumes from, where that is another one
        try:
            self._build()
        except BaseException as error:
            self._fail(error)
            for held in self.held:  # another one may be made
                held.let_be()
            with _logged():
                if self.held:
                    self._finalizer()
                self._close_memory()
            raise
        watch_torch()
        watch_pipelines()
        for inner in self.inners:  # but not what Adagrad makes for parameters that had no memory
            states = inner.state.items()
            self.state.update({param: kept for param, kept in states if not any(getattr(value, "is_meta", False) for value in kept.values())})
        brought = super().state_dict() if self.state else None
        self.state: defaultdict[Any, Any] = Shown(weakref.proxy(self))
        self._built = True
        for inner in self.inners:
            inner.state = self.state
        if brought is not None:
            self.load_state_dict(brought)
        compile_updates(self)
        show_once(self)
        self.rates = Rates(self)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            "a ZeroOptimizer cannot be copied or pickled: its state, and its model's parameters, are in its memory, files and threads. Copy the "
            "model, which gives a plain one, and load optimizer.state_dict() into an optimizer of its own; to keep it, use "
            "optimizer.save_checkpoint(folder)"
        )

    # ---- construction --------------------------------------------------------------------------------------------------------

    def _build(self) -> None:
        """Units, tiers, flat buffers and hooks, for a model that nobody holds yet."""
        config, device, here = self.config, self.device, ranks_here(self.everyone.world)
        units = holding.find(self)
        scale = config.loss_scale
        if scale == "auto":  # for fp16, whose gradients underflow
            scale = DynamicLossScale() if any(unit.trained and unit.dtype == torch.float16 for unit in units) else None
        self.scaler = LossScaler(scale)  # type: ignore[arg-type]
        self.factors = GradFactors(self.scaler, config.clip_grad_norm)
        holding.agree(self, list(enumerate(units)))
        self._agree()
        if config.update_on == "auto":
            self.config = config = dataclasses.replace(config, update_on=chosen(self))
        for slow in {unit.computes for unit in units if unit.device.type == "cpu"} if self.comm.rank == 0 else ():
            warn_of_slow_products(slow)
        if config.check_memory:
            refuse_what_cannot_fit(self, units, here)
        placed_by = config, self.comm.shards, self.rules, self.param_groups, self.transfer.joined
        self.assembly = Assembly(*placed_by, self.comm, self.num_threads, device, self.transfer, self.worker, here)
        self.tiers = self.assembly.tiers
        check_whole(units, self.assembly.rule, self.parts.pieces_of(self.model))
        self.assembly.place(units)
        if config.overlap_step and config.stage in (1, 2) and isinstance(self.comm, Group):
            self.refuse_collectives_beside("model parallel ranks" if self.parts.count > 1 else "")
            self.updates.publisher = self.comm.twin()
        self.partition = Partition(self.model, config.prefetch, weakly(self._written), self.comm)
        # alone, gradients go on as they are produced only if the optimizer's memory is not the device's
        in_backward = self.assembly.updates_elsewhere if self.comm.world == 1 else config.stage != 1
        # the update publishes from its own thread: all of it comes before the next reduction, so every rank launches both in one order
        before = weakly(self.updates.wait) if isinstance(self.updates.publisher, Group) else lambda: None
        self.grads = GradReducer(self.comm, in_backward, config.stage == 0, weakly(self._check_arrival), self.transfer.follow, before)
        self.partition.experts_done = weakly(self.grads.reduce_together)
        self.assembly.place_buffers(self.model, self.stored)
        self.grads.loss_scale = functools.partial(getattr, self.scaler, "scale")
        self.grads.narrow = config.grad_accum_dtype != torch.float32
        self.grads.agrees = not config.keep_gradients and self.comm.world > 1
        if self.grads.agrees and config.stage == 1:
            raise ValueError(
                "keep_gradients=False has no effect at stage 1 over several ranks, where gradients are whole until step(); use stage=2, or remove it"
            )
        looks_at = functools.partial(weakly(self._check_kept), "reading or writing param.grad")
        self.gradients = Gradients(self.units, self.grads, weakly(self._settle), looks_at)
        if config.overlap_step == "backward":
            self.speculation = Speculation(self)
        # an optimizer that is dropped takes no gradients away any more
        self._finalizer = weakref.finalize(self, _remove, self.handles, self.grads.handles, self.partition.handles)
        self._finalizer.atexit = False
        for number, unit in enumerate(units):
            holding.hold(self, unit, number)
        model, computes, ends_save = self.model, weakly(self.gradients.computes), weakly(self.saver.finish)
        self.handles += (
            model.register_forward_pre_hook(Hook(functools.partial(_forward_begins, self.grads))),
            model.register_forward_pre_hook(Hook(functools.partial(computes, True))),
            model.register_forward_hook(Hook(functools.partial(computes, False)), always_call=True),
            model.register_load_state_dict_pre_hook(Hook(lambda *_: ends_save())),  # it writes what is being saved
            model.register_load_state_dict_pre_hook(Hook(weakly(self.integrity.weights_come))),
            model.register_load_state_dict_post_hook(Hook(weakly(self.integrity.weights_came))),
        )
        cut = (module for module in model.modules() if any(map(is_dtensor, module.parameters(recurse=False))))
        self.handles += (module.register_state_dict_post_hook(show) for module in cut)  # type: ignore[no-untyped-call]
        if config.computes is not None:
            self.casts = InputCasts(self.model, config.computes, self.calls)
            self.handles += self.casts.handles
        self.partition.attach()
        if len(units) == 1 and not units[0].members and self.partition.by_storage:
            log.warning(
                "all parameters of the model are in one unit, %r, and are gathered at once: stage 3 saves memory between steps only. Name "
                "smaller blocks, by class or path, with units=, or cut large layers with zk.tile_linears",
                units[0].name,
            )
        holding.complete(self)
        self.handles.append(KeepCodes(self.model))  # type: ignore[arg-type]
        self.handles.append(model.register_forward_pre_hook(Hook(weakly(self._before_forward)), prepend=True))  # before anything is gathered for it

    def _checked(self) -> dict[Tensor, torch.dtype]:
        """The dtype that each parameter and buffer of the model will have, after checking model and groups."""
        config, dtype, device = self.config, self.config.dtype, self.config.device
        assert not isinstance(dtype, str) and not isinstance(device, str)
        tie_inner(self.model)
        stored = stored_dtypes(self.model, dtype, config.keep_dtype or (), config.cast_buffers, config.computes)
        check_params(self.model, self.param_groups, stored, device)
        check_aliases(self.model)
        check_kernels(self)
        if config.state_dtype != torch.float32:
            check_state_dtype(config.state_dtype, self.rules, self.param_groups, stored)
        return stored

    def _before_forward(self, *_: Any) -> None:
        if self.is_parked:
            self._check_open()
        self.integrity.check("the model's forward")
        watch_pipelines()  # which may have been imported since
        in_backward = torch._C._current_graph_task_id() != -1
        if (self.partition.entered or self.calls.depth) and not in_backward and calls_of(self.model) == 1:  # the forward before was interrupted
            self.partition.abandon()
            self.calls.depth = 0
        if not in_backward and torch.is_grad_enabled():
            self._train_unfrozen()

    def _train_unfrozen(self) -> None:
        """Train what user code has unfrozen."""
        with torch._C.DisableTorchFunctionSubclass():  # which is slow for released parameters
            unfrozen = [param for param in self.frozen if param.requires_grad]
        if unfrozen:
            check_params(self.model, self.param_groups, self.stored, None)
            holding.unfreeze(self, unfrozen, ())

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters of the model that no group has yet: frozen ones, or new ones of an adapter. On all ranks, between steps."""
        if self._built:
            holding.add_group(self, functools.partial(super().add_param_group, param_group))
        else:
            super().add_param_group(param_group)

    @torch.no_grad()
    def unfreeze(self, params: Collection[nn.Parameter], new: Sequence[Unit] = ()) -> None:
        """Give frozen parameters what training needs, and hold ``new`` units too. On all ranks.

        The store of a frozen unit is given up for one of what stays frozen, and one of what is trained now.
        """
        holding.unfreeze(self, params, new)

    # ---- the training loop ---------------------------------------------------------------------------------------------------

    @_disable_dynamo  # in a function that is compiled, too
    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """``loss.backward()`` with the loss scale applied. Needed where a loss scale is on (fp16); the same as loss.backward() elsewhere.

        Args:
            loss: a scalar.
            kwargs: of ``Tensor.backward``, such as ``retain_graph``.

        Within ``loss_fn`` of ``accumulate`` it is noted, and done with all micro-batches.
        """
        if MicroBatch.defer(loss):
            return
        with self.scaled(loss) as scaled:
            scaled.backward(**kwargs)  # type: ignore[no-untyped-call]

    @contextlib.contextmanager
    def scaled(self, loss: Tensor) -> Iterator[Tensor]:
        """Context: ``loss`` times the loss scale, of which backward may be called inside; for those who call it themselves."""
        self._check_open()
        if not isinstance(loss, Tensor):
            raise TypeError(f"loss must be a tensor, which the model has made; got {loss!r}")
        self.in_scaled_backward = True
        try:
            yield loss.float() * self.scaler.scale if self.scaler.active else loss
        finally:
            self.in_scaled_backward = False

    def accumulate(
        self, batches: Iterable[Any], loss_fn: Callable[[nn.Module, Any], Any], *, keep_activations: int | str = 0
    ) -> list[Any]:
        """Forward and backward of all micro-batches of a step, block by block: their gradients are added up. On all ranks; then call step().

        It means ``for batch in batches: optimizer.backward(loss_fn(model, batch))``, with fewer bytes moved: at stage 3 each block is gathered
        twice in all, not for each micro-batch, and at every stage its gradient leaves once. Activations of a block are computed again in backward,
        so only what lies between blocks is kept (``with zk.offload_activations(model):`` around it moves that away). Random numbers: micro-batch
        ``m`` draws from ``torch.Generator().manual_seed(s)``, its ``s`` from ``torch.randint(2**62, ())`` as this is called, in order.

        Args:
            batches: what ``loss_fn`` is called with, once for each; at least one.
            loss_fn: of the model and one batch; returns a scalar, divided by the number of micro-batches if a mean is wanted. Or it calls
                ``optimizer.backward(loss)``, and returns anything. It runs in a thread of its own, stopped at each block while others run.
            keep_activations: bytes (or "4GiB") of what blocks save for backward that are kept instead of computed again, from the second call on.

        Returns:
            What ``loss_fn`` has returned, in order; tensors detached.

        Raises:
            RuntimeError: for a block whose gradients would be lost or wrong: one that writes into its inputs, or leaves tensors with a graph outside.

        Whatever is raised, all gradients are dropped, and training can go on; of several ranks, if all of them raise it.
        """
        self._check_open()
        self.integrity.check("accumulate()")
        with telling(self.everyone, "accumulate()", self._fail if self.apart else None):
            kept = 0 if keep_activations == 0 else parse_nbytes(keep_activations, "keep_activations")
            return accumulate(self, list(batches), loss_fn, kept)

    @_disable_dynamo
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Reduce what is left, clip, update, and make the updated parameters available. Returns the closure's loss, or None.

        A step whose gradients hold NaN or inf changes nothing, lowers a dynamic loss scale, and is counted in ``metrics()``.

        Args:
            closure: runs forward and backward, and returns the loss.

        Raises:
            RuntimeError: if there is no gradient, or if an earlier step ended half-way.
        """
        self._check_open()
        if getattr(self, "grad_scale", None) is not None:
            raise RuntimeError(
                "torch.amp.GradScaler does not see gradients that are partitioned; leave it out: dtype='fp16' turns a dynamic loss scale on, "
                "and optimizer.backward(loss) applies it"
            )
        with phase("step", "optimizer"), telling(self.everyone, "step()", self._fail if self.apart else None):
            self.integrity.check("step()")
            loss = None
            if closure is not None:
                with torch.enable_grad():
                    loss = closure()
            self.updates.wait()
            self._agree()
            if self.saver.begun:
                self.saver.check()
            self._reduce()
            if not any(held.used for held in self.held):
                self._without_gradient()
                return loss
            norm = self._global_norm()
            grad_scale, is_finite = self.factors.of(norm), math.isfinite(norm)
            if self.speculation is not None:
                self.speculation.know(grad_scale)
            if is_finite:
                self.updates.run(grad_scale)
                self.counters["steps"] += 1
            else:
                self.updates.apply_delayed()
                self._report_skip()
            if self.speculation is not None:
                self.speculation.ended(self._trained)
            for held in self._trained:
                if not held.used or not is_finite or not self.config.keep_gradients:
                    held.drop_gradient()
            self.scaler.update(overflow=not is_finite)
            self.grads.flushed = False
            self.factors.begin()
            self.partition.prefetcher.between_passes()
            for inner in self.inners:
                inner._opt_called = True  # type: ignore[attr-defined]  # what schedulers made for the user's optimizer look at
            return loss

    def refuse_collectives_beside(self, others: str) -> None:
        """Raise ValueError where updates are published beside compute over NCCL, and ``others`` use NCCL in forward."""
        if others and self.config.overlap_step and self.config.stage in (1, 2) and isinstance(self.comm, Group) and not self.comm.gloo:
            raise ValueError(
                f"overlap_step=True at stage {self.config.stage} gathers updated parameters in the background, over NCCL, while {others} use NCCL in "
                "forward: two communicators at once may wait for each other for good. Use stage=3, which gathers in forward, or overlap_step=False"
            )

    def _without_gradient(self) -> None:
        """step() was called, and no rank has a gradient."""
        raise RuntimeError(
            "step() found no gradient: no parameter of the optimizer took part in a backward since the last step; call "
            "loss.backward() first, and zero_grad() after step(), not before it"
        )

    @_disable_dynamo
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients, also those on their way; or make zeros of them, as torch does, on all ranks.

        Until then they are what they were in the last step, and the next backward adds to them.
        """
        self._check_open()
        if not set_to_none:
            self._check_kept("zero_grad(set_to_none=False), whose zeros the next backward adds to,")
            self.grads.finish(keep=True)  # what any rank has a gradient of gets zeros on all
        had = {
            held: {index for index in held.used if held.shown.get(index, held) is not None}
            for held in self._trained
            if not set_to_none
        }
        self._drop_gradients()
        for held in self._trained:
            held.kept.clear()
            for param in held.unit.users:
                grad = own_grad(param)
                if grad is not None and set_to_none:
                    param.grad = None
                elif grad is not None:
                    grad.detach_().zero_()
            if had.get(held):
                held.zero_gradient(had[held])

    def no_sync(self) -> AbstractContextManager[None]:
        """Context: gradients of backward passes inside stay on their rank until the next backward outside, or the step."""
        return self.grads.no_sync()

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Clip the gradients of the coming step to a global 2-norm of ``max_norm``; overrides the config's for that step. On all ranks.

        Args:
            max_norm: more than 0; infinity asks for the norm only. Of several calls before one step the smallest counts.

        Returns:
            The norm before this call, over all ranks and without the loss scale, as a scalar tensor.
        """
        self._check_open()
        if not max_norm > 0:
            raise ValueError(f"max_norm must be more than 0; got {max_norm!r}")
        if not math.isinf(max_norm):
            self._check_kept("clipping")
        self._reduce()
        self._global_norm()
        return torch.tensor(self.factors.clip(float(max_norm)))

    def scale_grads(self, by: float) -> None:
        """Reduce the gradients that are there, and multiply them by ``by``: a factor of the update, and of their norm. On all ranks."""
        self._check_kept("scale_grads()")
        self._reduce()
        self.factors.scaled_by *= by

    def synchronize(self) -> None:
        """Return when no work of zk is in flight: parameters are updated, reductions and saves done, gathered parameters released.

        A delayed update counts then.
        """
        self.updates.settle()
        self.saver.finish()
        while self.grads.queue:
            self.grads._complete()
        self.partition.reset()
        if self.assembly.stream is not None:
            self.assembly.stream.synchronize()

    # ---- the phases of a step ------------------------------------------------------------------------------------------------

    def _agree(self) -> None:
        """Compare the options that decide what a step does: ranks that differ would train by different rules."""
        if self.comm.world == 1:
            return
        if self._built:  # the rest has been compared, and cannot change
            rules = {**self.factors.rules(), "the factor of a pipeline's scale_grads": self.factors.scaled_by}
        else:
            rules = {field.name: getattr(self.config, field.name) for field in dataclasses.fields(self.config) if field.name not in _OF_A_RANK}
        for index, group in enumerate(map(as_now, self.param_groups)):
            options = {name: group[name] for name in self.defaults if name in group}
            rules |= {f"param_groups[{index}][{name!r}]": as_number(option) for name, option in options.items()}
        self.comm.agree(rules)

    @property
    def rules(self) -> list[Rule]:
        """The rule of each param_group."""
        return [rule for rule, inner in zip(self.rule_of_inner, self.inners, strict=True) for _ in inner.param_groups]

    @property
    def _trained(self) -> list[UnitStore]:
        return [held for held in self.held if held.shard is not None]

    def _reduce(self) -> None:
        """grads -> flatten -> reduce -> shard, for what backward has not reduced yet, and what user code has made of the rest."""
        check_groups(self)
        self._train_unfrozen()
        if self.speculation is not None:
            self.speculation.settle()
        self.grads.finish()
        self.gradients.looked.clear()
        for held in self._trained:
            held.renew()
        self.partition.reset()

    @torch.no_grad()
    def _settle(self, keep: bool) -> None:
        """Make all gradients what user code may look at: reduced, and clipped by what was asked for."""
        self._check_open()
        if not self.grads.settled or not keep:
            check_groups(self)
            self.grads.finish(keep)
        self._clip()

    @torch.no_grad()
    def _clip(self) -> None:
        """Clip and scale the gradients that are there, as they are about to be looked at or changed, by what was asked for."""
        by = self.factors.take()
        for held in self._trained if by != 1 else ():
            if held.used:
                held.spent = by / self.scaler.scale
                held.renew()

    def _global_norm(self) -> float:
        """Take the 2-norm of all gradients over all ranks, without the loss scale. Not finite if any gradient is not.

        Parts of the model compare before what has a gradient: a step of one part alone would be another model's.
        """
        if self.parts.count > 1:
            used = {held.unit.names[index] for held in self._trained for index in held.used}
            taken = {f"parameter {name!r}": "used" if name in used else "without a gradient" for name in self.parts.shared}
            self.everyone.agree({**self.factors.rules(), **taken}, "have parts of the model that differ")
        # what other ranks have too counts on one of them
        is_first = self.comm.replica == 0 if self.config.stage > 0 else self.comm.rank == 0 or self.parts.count == 1
        sums = [(part, is_first and held.unit.is_counted) for held in self._trained if held.shard for part in held.shard.squares()]
        on_device = [part for part, _ in sums if isinstance(part, Tensor)]
        values = iter(torch.stack(on_device).tolist() if on_device else ())  # one read of the device
        found = [(next(values) if isinstance(part, Tensor) else part, counts) for part, counts in sums]
        total = sum(part for part, counts in found if counts or not math.isfinite(part)) * self.factors.scaled_by**2
        if (self.config.stage > 0 and self.comm.world > 1) or self.parts.count > 1:
            everywhere = torch.tensor([total], dtype=torch.float64)
            self.everyone.all_reduce(everywhere)
            total = everywhere.item()
        self.factors.norm = norm_of(total, self.scaler.scale)
        return self.factors.norm

    def _fail(self, error: BaseException) -> None:
        """Tell ranks that wait, or come to wait, for this one why it will not come."""
        for comm in (self.comm, self.everyone):
            comm.fail(error, self.everyone.rank)

    def _written(self, store: UnitStore, indices: list[int]) -> None:
        self.saver.finish()
        store.keep_written(indices)

    def _drop_gradients(self) -> None:
        self.grads.forget()
        for held in self._trained:
            held.drop_gradient()
        if self.speculation is not None:
            self.speculation.begin()
        self.grads.flushed = False
        self.factors.begin()

    def _report_skip(self) -> None:
        self.counters["skipped_steps"] += 1
        count = self.counters["skipped_steps"]
        if count & (count - 1) == 0:  # the 1st, 2nd, 4th, 8th ...
            scale = f" at loss scale {self.scaler.scale:g}" if self.scaler.active else ""
            log.warning("step skipped: a gradient is not finite%s (%d skipped so far, %d taken)", scale, count, self.counters["steps"])

    # ---- checks --------------------------------------------------------------------------------------------------------------

    def _check_open(self) -> None:
        if self.forked:
            raise RuntimeError(
                "this process was forked from the one that trains, which alone has the values of what is trained, its gradients and its state; take "
                "copies before the fork (copy.deepcopy(model)), or start this process with the 'spawn' method and send it model.state_dict()"
            )
        if self.closed:
            raise RuntimeError("this ZeroOptimizer is closed; make a new one to go on training")
        if self.is_parked:
            raise RuntimeError("this ZeroOptimizer is parked, and its memory is given back; use it and its model after `with optimizer.parked():`")

    def _leave_to_parent(self) -> None:
        """In a forked process: refuse the parameters that were not copied for it, those that are trained or partitioned."""
        self.forked, self.saver.ticket = True, None
        _remove(self.partition.handles)  # which would gather
        for held in self.held:
            held.underway = None
            if held.unit.trained or held.is_partitioned:
                held.refuse(self._check_open)

    def _check_kept(self, what: str) -> None:
        self._check_open()
        if not self.config.keep_gradients:
            raise RuntimeError(
                f"{what} needs gradients between backward and step(), and with keep_gradients=False they go to the update as they come, and are "
                "gone; use keep_gradients=True"
            )

    def _check_arrival(self, param: nn.Parameter) -> None:
        self._check_open()
        if self.scaler.active and not self.in_scaled_backward and torch._C._current_graph_task_id() != -1:
            raise RuntimeError(
                f"a loss scale is on (now {self.scaler.scale:g}), and loss.backward() does not apply it; call optimizer.backward(loss), or set "
                "loss_scale=None to train without one"
            )

    # ---- state ---------------------------------------------------------------------------------------------------------------

    def _settle_state(self) -> None:
        self._check_open()
        self.updates.settle()
        self.saver.finish()

    def _keep_state(self) -> None:
        """Keep what user code has made of ``optimizer.state``: no update has begun since it was shown."""
        for held in self._trained:
            if held.shown_state:
                held.keep_state()

    def state_dict(self) -> dict[str, Any]:
        """torch's own format: ``step`` and the optimizer's states by parameter, in fp32, and ``master`` for 16-bit parameters.

        One process, or stages 0-2: whole tensors in the parameter's shape, which plain torch optimizers load (they ignore
        ``master``); with several ranks at stages 1 and 2 a collective, so call it on all ranks. Stage 3 with several ranks: this rank's
        own elements, flat. Before the first step there is no state, and nothing is collective.
        """
        return state_dicts.export(self)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over groups and state from ``state_dict()`` of this class or of the plain torch optimizer.

        Without a ``master`` the masters stay as they are.

        Raises:
            ValueError: before anything is changed, if groups or shapes differ.
        """
        state_dicts.load(self, state_dict)

    def save_checkpoint(
        self,
        directory: str | os.PathLike[str],
        *,
        scheduler: Any = None,
        extra: Any = None,
        keep: int | None = None,
        async_save: bool = False,
        on_save_error: str = "raise",
        frozen: bool = True,
    ) -> Path | None:
        """Write all that training goes on from into ``directory/step-NNNNNNNN``; returns that folder. On all ranks, between two steps.

        Each rank writes what it updates, chunk by chunk, as safetensors, with a manifest of names, shapes and checksums. The folder has its
        name only when it is whole and on the drive; ``directory/latest`` names it after that. Gradients are not part of it.

        Args:
            directory: on a file system that all ranks see; made if need be.
            scheduler: its state_dict() is kept too.
            extra: what else training needs (its position in the data, say), of what JSON can hold.
            keep: remove all but the newest so many checkpoints, afterwards.
            async_save: return at once, and write in the background. What is saved is the state as it is now: an update that comes to a part
                that is not written yet copies it, or waits. ``synchronize()``, ``close()`` and the next save wait for the end.
            on_save_error: what to do where the drive refuses or has no room: "raise", or "warn" to log it and go on; the result is None then.
            frozen: False leaves frozen parameters out. Such a checkpoint is loaded over the base that it was trained over, and no other: it has
                their SHA-256, for which they are read once (and again after they were written).

        Raises:
            OSError: if the drive refuses or has no room; what fails on one rank raises on all. With ``async_save`` it is the next step()
                after the failure that raises, before it changes anything. Earlier checkpoints stay whole in any case.
        """
        return save.start(self, Path(directory), scheduler, extra, keep, async_save, on_save_error, frozen)

    def load_checkpoint(self, directory: str | os.PathLike[str], *, scheduler: Any = None) -> Any:
        """Go on from a checkpoint: parameters, optimizer state, groups, loss scale, counters and random numbers. On all ranks.

        It may have been written at any other world size, stage, tier and dtype; each rank reads the elements that it holds.

        Args:
            directory: what ``save_checkpoint`` was given (the latest one is taken), or the folder of one step.
            scheduler: to be given if and only if it was when saving.

        Returns:
            ``extra`` as it was saved (tuples as lists).

        Raises:
            CheckpointError: a ValueError, naming the file, if something is missing, altered or does not belong to this model: then nothing
                has been changed.
        """
        self._check_open()
        with together(self.everyone, "load_checkpoint()"):
            self.saver.finish()
            self.updates.join()
        self.saved_to, self.resume_from = Path(directory), None
        with self.clock.stopped():
            extra = load.load(self, Path(directory), scheduler)
        for rates in list(self.clock.rates):
            rates.restart()
        return extra

    @torch.no_grad()
    def consolidated_state_dict(
        self, dtype: str | torch.dtype | None = None, *, rank0_only: bool = False, names: Collection[str] | None = None
    ) -> dict[str, Tensor]:
        """The whole model in host memory, by the names of ``model.state_dict()``: for models of which the host has room for. On all ranks.

        Args:
            dtype: of the parameters: "fp32" gives the masters, None what each is trained in. Integers, codes and buffers stay as they are.
            rank0_only: the other ranks take part and get an empty dict, so a machine holds the model once.
            names: of parameters that are wanted, as in ``model.state_dict()``; units without any of them are not gathered. None: all.

        What modules' own code adds to ``state_dict()``, such as the scales of bitsandbytes' weights, is there too. Tied parameters share
        memory. For large models, save a checkpoint and let ``zk export`` write it out.
        """
        self._check_open()
        self.integrity.check("consolidated_state_dict()")
        wanted = parse_dtype(dtype, "dtype") if dtype is not None else None
        self.updates.settle()
        self.partition.reset()
        return state_dicts.consolidated(self, wanted, rank0_only, names)

    def metrics(self) -> dict[str, float]:
        """Counts, the last gradient norm, the loss scale, this rank's bytes by tier and kind, and rates since the last call that found a step.

        The rates (``step_s``, ``wait_share``, ``wait_drive_share``, ``drive_gbps``, ...) are those of ``Rates``.

        ``pinned_nbytes`` is what of the host tier is page-locked, for copies to and from the device; ``save_stall_ms`` the time that
        training has waited for saves beside it; ``nvme_in_place_nbytes`` what lies in files of the user's, and has never been written.
        """
        return metrics_of(self)

    def summary(self) -> Summary:
        """Bytes of each kind of training state on each tier, of this rank, at the fullest point of a step."""
        return summary_of(self)

    def __repr__(self) -> str:
        return f"{self.summary()}\n{configured(self.config)}" if self._built and not self.closed else "ZeroOptimizer, closed"

    def resting(self, kind: str) -> str:
        """Names of the tiers on which "param" or "optimizer" state rests, such as "host" or "host+nvme"."""
        sections = (section for held in self.held if held.shard for section in held.shard.sections)
        return "+".join(sorted({held.param_tier for held in self.held} if kind == "param" else {section.tier for section in sections}))

    def parked(
        self, path: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | None = None
    ) -> AbstractContextManager[None]:
        """Context: the memory of training state is given back, and taken again at the end, with the same bits. On all ranks, between two steps.

        For what needs the memory meanwhile: another engine that generates, an evaluation. Neither the model nor the optimizer can be used inside.

        Args:
            path: folder on a drive (or several, to stripe over): host memory is given back too, and all of it goes to a private file there.
                None: device memory goes to host memory.

        Page-locked memory stays, unless the device updates what rests in it; so do buffers of an nvme tier, and what the optimizer keeps there.

        Raises:
            ValueError: if there is no device apart from the host, and no path.
            RuntimeError: if there are gradients, which only zero_grad() or step() may end.
            OSError: if the drive refuses or has no room; then nothing has been given back. One that comes while memory is taken again leaves
                parameters and state that are refused until load_checkpoint().
        """
        return parked(self, path)

    def close(self, *, gather: bool = False) -> None:
        """Remove all hooks, and the files of the NVMe tier.

        Parameters that are full stay usable. What stage 3 partitioned can be read no more, unless ``gather`` (on all ranks, and with
        memory for all of it) makes it full once more.
        """
        if self.closed:
            return
        try:
            if not self.integrity.interrupted:
                self.updates.settle()
            self.saver.finish()
            self.grads.forget()
            if gather:
                for held in self.partition.stores.values():
                    held.pin()
        finally:
            self._end()

    def _end(self) -> None:
        """Let go of everything, whatever is in progress."""
        self._finalizer()
        self.partition.abandon()
        self.partition.closed = self.closed = True
        for one in (self, *self.inners):
            one.state = Gone() if any(held.steps for held in self.held) else defaultdict(dict)
        self.updates.join()
        for held in self.held:
            held.let_be()
        self._close_memory()
        self.claim.clear()
        self.comm.close()
        self.everyone.close()
        self.updates.publisher.close()

    def _close_memory(self) -> None:
        """End the threads, remove files, and give page-locked memory back."""
        self.saver.close()
        self.worker.close()
        if "device" in self.tiers and self.assembly.stream is not None:
            self.assembly.stream.synchronize()
        if isinstance(nvme := self.tiers.get("nvme"), NVMeTier):
            nvme.close()
        self.transfer.close()
        kernels.free_tables()

    def __enter__(self) -> ZeroOptimizer:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            self.close()
            return
        self._fail(error)  # others may be waiting for this rank
        self.worker.close()  # the run is over: what is in progress is not worth waiting for, but a save
        self.integrity.tear(f"the run ended with {type(error).__name__}")
        with _logged():
            self.close()


@contextlib.contextmanager
def _logged() -> Iterator[None]:
    """Log what fails inside: the error that led there is the one to hear of."""
    try:
        yield
    except Exception as error:
        rank_log.error("while closing: %s: %s", type(error).__name__, error)


def _remove(*handles: list[RemovableHandle]) -> None:
    for handle in itertools.chain(*handles):
        handle.remove()


def _forward_begins(grads: GradReducer, model: nn.Module, *_: Any) -> None:
    around = nn.parallel.DistributedDataParallel._get_active_ddp_module()
    if around is not None and around.module is model:
        raise RuntimeError(
            "the model was wrapped in DistributedDataParallel after ZeroOptimizer was made, and would reduce gradients a second time; use the "
            "model itself (with accelerate: zk.integrations.accelerate.ZeroAccelerator, with the Trainer of transformers: ZeroTrainer)"
        )
    if torch._C._current_graph_task_id() == -1 and torch.is_grad_enabled():
        grads.begin()


def _forked() -> None:
    for owner in set(map(owner_of, held_params())):
        owner._leave_to_parent()


os.register_at_fork(after_in_child=_forked)
