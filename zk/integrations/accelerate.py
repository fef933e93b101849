"""ZeroAccelerator: accelerate's Accelerator over ZeroOptimizer, for a loop that stays as it is."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from torch import Tensor, nn

from zk.config import ZeroConfig
from zk.integrations.deepspeed import is_deepspeed
from zk.logs import require
from zk.optimizer import ZeroOptimizer
from zk.parallel.runtime import RUNTIMES

KINDS = "NO", "MULTI_GPU", "MULTI_CPU"  # of accelerate, that zk may be in
DTYPES = {"no": None, "bf16": torch.bfloat16, "fp16": torch.float16}  # by mixed_precision
FOLDER = "zk"  # of our checkpoint, in a folder of accelerate's or the Trainer's


def zero_of(model: nn.Module) -> ZeroOptimizer | None:
    """The ZeroOptimizer that a model's parameters belong to."""
    params = {*model.parameters()}
    return next((r.owner() for r in RUNTIMES if not params.isdisjoint(r.store_of)), None)


def unwrapped(optimizer: Any) -> Any:
    """The optimizer inside of accelerate's wrappers."""
    while isinstance(optimizer, AcceleratedOptimizer):
        optimizer = optimizer.optimizer
    return optimizer


class _Prepared(AcceleratedOptimizer):
    """accelerate's wrapper around a ZeroOptimizer, which skips steps by itself."""

    def step(self, closure: Any = None) -> None:
        before = self.optimizer.skipped_steps
        super().step(closure)
        self._is_overflow = self.optimizer.skipped_steps > before


class ZeroAccelerator(Accelerator):
    """accelerate's Accelerator over ZeroOptimizer, for a loop that stays as it is.

    Args:
        zero: a ZeroConfig, its fields as a dict, or DeepSpeed's JSON as a path or a dict, by which
            ``prepare`` wraps a torch optimizer; it takes a ZeroOptimizer of yours as it is. None:
            all defaults.
        kwargs: accelerate's. ``mixed_precision="bf16"`` means bf16 parameters with fp32 masters;
            with ``zero={"dtype": "fp32"}`` it means accelerate's autocast over fp32 parameters.

    ``get_state_dict`` returns full weights on the first rank, and an empty dict on the others.
    """

    _models: Any
    _optimizers: Any

    def __init__(self, *args: Any, zero: Any = None, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.adopt(zero)

    def adopt(self, zero: Any, **overrides: Any) -> None:
        """Take precision over from accelerate, by ``zero`` as ``ZeroAccelerator`` takes it.

        ``overrides`` win over DeepSpeed's JSON. ValueError where accelerate's settings contradict.
        """
        kind, precision = str(self.distributed_type).rpartition(".")[2], self.mixed_precision
        if is_deepspeed(zero):
            auto = {f"{name}.enabled": name == precision for name in DTYPES}
            auto["gradient_clipping"] = False
            config = ZeroConfig.from_deepspeed(zero, auto=auto, **overrides)
        else:
            config = zero if isinstance(zero, ZeroConfig) else ZeroConfig(**(zero or {}))
        backend, asked = self.state.dynamo_plugin.backend.value, DTYPES.get(precision)
        dtype = config.dtype or asked
        is_autocast = (dtype, asked) == (torch.float32, torch.bfloat16)
        for holds, rule in (
            (kind in KINDS, f"zk does what distributed_type {kind} does; leave that out"),
            (backend in (None, "NO"), "dynamo_backend compiles all; compile its blocks instead"),
            (precision in DTYPES, f"mixed_precision must be one of {[*DTYPES]}; got {precision!r}"),
            (
                asked in (None, dtype) or is_autocast,
                f"mixed precision is {precision!r} and ZeroConfig.dtype {dtype}; leave dtype out, "
                "or give the same",
            ),
        ):
            require(holds, rule)
        if not is_autocast:
            self.native_amp, self.scaler = False, None
        device = config.device or self.device  # to which a model never moves as a whole
        self.zero = dataclasses.replace(config, dtype=dtype, device=device)

    def prepare(self, *args: Any, **kwargs: Any) -> Any:
        return super().prepare(*(self._wrapped(one, args) for one in args), **kwargs)

    def _wrapped(self, one: Any, among: tuple[Any, ...]) -> Any:
        """A torch optimizer becomes a ZeroOptimizer over the model whose parameters it has."""
        done = (ZeroOptimizer, AcceleratedOptimizer)
        if not isinstance(one, torch.optim.Optimizer) or isinstance(one, done):
            return one
        params = {param for group in one.param_groups for param in group["params"]}
        models = [model for model in among if isinstance(model, nn.Module)]
        models = [model for model in models if params.issubset(model.parameters())]
        rule = "prepare() needs the model of an optimizer's parameters: pass both in one call"
        require(models, rule)
        return ZeroOptimizer(models[0], one, self.zero)

    def prepare_model(self, model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if zero_of(model) is not None:  # without DDP, and where it is
            args, kwargs = (), {"device_placement": False, "evaluation_mode": True}
        return super().prepare_model(model, *args, **kwargs)

    def prepare_optimizer(self, optimizer: Any, device_placement: bool | None = None) -> Any:
        if not isinstance(optimizer, ZeroOptimizer):
            return super().prepare_optimizer(optimizer, device_placement)
        require(not self._optimizers, "prepare() takes one optimizer; use a loop without accelerate")
        self._optimizers.append(_Prepared(optimizer, device_placement=False))
        return self._optimizers[0]

    def _optimizer(self) -> ZeroOptimizer:
        require(self._optimizers, "there is no optimizer: give it to prepare(), with its model")
        optimizer: ZeroOptimizer = unwrapped(self._optimizers[0])
        return optimizer

    def backward(self, loss: Tensor, **kwargs: Any) -> Any:
        return self._optimizer().backward(loss / self.gradient_accumulation_steps, **kwargs)

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> Any:
        """accelerate's; of all that is trained, in one exchange over ranks."""
        params, zero = [*parameters], self._optimizer()
        is_all = {p for p in params if p.requires_grad} == zero._layout.owners.keys()
        if is_all and norm_type == 2:
            return zero.clip_grad_norm_(max_norm)
        return super().clip_grad_norm_(params, max_norm, norm_type)

    def no_sync(self, model: nn.Module) -> Any:
        """At stages 0 and 1 gradients stay on their rank; at 2 and 3 each backward reduces them."""
        zero = zero_of(model)
        if zero is None or zero.config.stage > 1:
            return super().no_sync(model)
        return zero.no_sync()

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> Any:
        zero = zero_of(model)
        if zero is None or zero.model is not self.unwrap_model(model):
            return super().get_state_dict(model, unwrap)
        return zero.consolidated_state_dict(rank0_only=True)

    def save_state(self, *args: Any, **kwargs: Any) -> str:
        rule = "save_state() hooks would get no model of zk; write your files after save_state()"
        require(not self._save_model_state_pre_hook, rule)
        with self._without_zero():
            folder: str = super().save_state(*args, **kwargs)
        self._optimizer().save_checkpoint(Path(folder, FOLDER), keep=1)
        return folder

    def load_state(self, *args: Any, **kwargs: Any) -> None:
        zero = self._optimizer()

        def load(_: Any, folder: str) -> None:  # before accelerate's random numbers, which count
            zero.load_checkpoint(Path(folder, FOLDER))

        with self.register_load_state_pre_hook(load), self._without_zero():
            super().load_state(*args, **kwargs)

    @contextlib.contextmanager
    def _without_zero(self) -> Iterator[None]:
        """Hide our model and optimizer from accelerate."""
        hidden = {"_models": self._models, "_optimizers": self._optimizers}
        self._models, self._optimizers = [m for m in self._models if zero_of(m) is None], []
        try:
            yield
        finally:
            vars(self).update(hidden)
