"""ZeroAccelerator: accelerate's Accelerator over ZeroOptimizer, for a loop that stays as it is."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping
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
from zk.tools.metrics import Rates, loggable

KINDS = "NO", "MULTI_GPU", "MULTI_CPU"  # of accelerate, that zk may be in
DTYPES = {"no": None, "bf16": torch.bfloat16, "fp16": torch.float16}  # by mixed_precision
FOLDER = "zk"  # of our checkpoint, in a folder of accelerate's or the Trainer's
HOOKS = ("_save_model_state_pre_hook", "_load_model_state_pre_hook")


def zero_of(model: Any) -> ZeroOptimizer | None:
    """The ZeroOptimizer that a model's parameters belong to."""
    params = list(model.parameters()) if isinstance(model, nn.Module) else []
    owners = (r.owner() for r in RUNTIMES if any(param in r.store_of for param in params))
    return next(owners, None)


def config_of(zero: Any, auto: Mapping[str, Any], **overrides: Any) -> ZeroConfig:
    """What ``zero=`` means: a config, its fields, DeepSpeed's JSON, or None for all defaults."""
    if is_deepspeed(zero):
        return ZeroConfig.from_deepspeed(zero, auto=auto, **overrides)
    return zero if isinstance(zero, ZeroConfig) else ZeroConfig(**(zero or {}))


def unwrapped(optimizer: Any) -> Any:
    """The optimizer inside of accelerate's wrappers."""
    while isinstance(optimizer, AcceleratedOptimizer):
        optimizer = optimizer.optimizer
    return optimizer


def _given(hook: Callable[..., Any], models: list[nn.Module]) -> Callable[..., Any]:
    return lambda _, *rest: hook(models, *rest)


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
            ``prepare`` wraps a torch optimizer. None: ``prepare`` takes a ZeroOptimizer of yours.
        kwargs: accelerate's. ``mixed_precision="bf16"`` means bf16 parameters with fp32 masters;
            with ``zero={"dtype": "fp32"}`` it means accelerate's autocast over fp32 parameters.

    ``get_state_dict`` returns full weights on the first rank, and an empty dict on the others.
    """

    _models: Any
    _optimizers: Any

    def __init__(self, *args: Any, zero: Any = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        auto = {f"{name}.enabled": self.mixed_precision == name for name in ("bf16", "fp16")}
        auto["gradient_clipping"] = False
        self.adopt(None if zero is None else config_of(zero, auto))

    def adopt(self, config: ZeroConfig | None) -> None:
        """Take precision over from accelerate. ValueError where its settings contradict zk's."""
        kind, precision = str(self.distributed_type).rpartition(".")[2], self.mixed_precision
        backend, asked = self.state.dynamo_plugin.backend.value, DTYPES.get(precision)
        dtype = getattr(config, "dtype", None) or asked
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
        self.zero = config and dataclasses.replace(config, dtype=dtype)
        if config is not None and not is_autocast:
            self.native_amp, self.scaler = False, None

    def zero_here(self) -> ZeroConfig:
        """The config, with the device of this process, to which a model never moves as a whole."""
        assert self.zero is not None
        is_free = self.zero.device is None and self.device_placement
        return dataclasses.replace(self.zero, device=self.device) if is_free else self.zero

    def prepare(self, *args: Any, **kwargs: Any) -> Any:
        return super().prepare(*(self._wrapped(one, args) for one in args), **kwargs)

    def _wrapped(self, one: Any, among: tuple[Any, ...]) -> Any:
        """A torch optimizer becomes a ZeroOptimizer over the model whose parameters it has."""
        done = (ZeroOptimizer, AcceleratedOptimizer)
        if self.zero is None or not isinstance(one, torch.optim.Optimizer) or isinstance(one, done):
            return one
        params = {param for group in one.param_groups for param in group["params"]}
        models = [model for model in among if isinstance(model, nn.Module)]
        models = [model for model in models if not params.isdisjoint(model.parameters())]
        require(models, "prepare() got an optimizer without its model; pass both in one call")
        is_one = params.issubset(models[0].parameters())
        require(is_one, "an optimizer has two models' parameters; make one optimizer for each")
        return ZeroOptimizer(models[0], one, self.zero_here())

    def prepare_model(self, model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if zero_of(model) is not None:  # without DDP, and where it is
            args, kwargs = (), {"device_placement": False, "evaluation_mode": True}
        return super().prepare_model(model, *args, **kwargs)

    def prepare_optimizer(self, optimizer: Any, device_placement: bool | None = None) -> Any:
        if not isinstance(optimizer, ZeroOptimizer):
            return super().prepare_optimizer(optimizer, device_placement)
        rule = "mixed_precision='fp16' has torch's scaler; give zero=ZeroConfig()"
        require(self.scaler is None, rule)
        self._rates = Rates(optimizer)
        self._optimizers.append(_Prepared(optimizer, device_placement=False))
        return self._optimizers[-1]

    def _zeros(self) -> list[ZeroOptimizer]:
        found = map(unwrapped, self._optimizers)
        return [optimizer for optimizer in found if isinstance(optimizer, ZeroOptimizer)]

    def backward(self, loss: Tensor, **kwargs: Any) -> Any:
        if len(zeros := self._zeros()) != 1:
            return super().backward(loss, **kwargs)
        return zeros[0].backward(loss / self.gradient_accumulation_steps, **kwargs)

    def no_sync(self, model: nn.Module) -> Any:
        """At stages 0 and 1 gradients stay on their rank; at 2 and 3 each backward reduces them."""
        zero = zero_of(model)
        if zero is None or zero.config.stage > 1:
            return super().no_sync(model)
        return zero.no_sync()

    def log(self, values: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        """accelerate's, with the rates since the last call (``zk/step_s``, ...)."""
        zeros = self._zeros()
        rates = loggable(zeros[0], self._rates) if len(zeros) == 1 else {}
        super().log({**values, **rates}, *args, **kwargs)

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> Any:
        zero = zero_of(model)
        if zero is None or zero.model is not self.unwrap_model(model):
            return super().get_state_dict(model, unwrap)
        return zero.consolidated_state_dict(rank0_only=True)

    def save_state(self, output_dir: str | None = None, *args: Any, **kwargs: Any) -> str:
        with self._without_zeros():
            folder: str = super().save_state(output_dir, *args, **kwargs)
        for place, zero in self._places(folder):
            zero.save_checkpoint(place, keep=1)
        return folder

    def load_state(self, input_dir: str | None = None, *args: Any, **kwargs: Any) -> None:
        if input_dir is None and self.project_configuration.automatic_checkpoint_naming:
            folders = Path(self.project_dir, "checkpoints").iterdir()  # the latest is meant
            input_dir = str(max(folders, key=lambda path: int(path.name.rpartition("_")[2])))
        for place, zero in () if input_dir is None else self._places(input_dir):
            require(place.is_dir(), f"{place} is not there: give what its own save_state wrote")
            zero.load_checkpoint(place)
        with self._without_zeros():
            super().load_state(input_dir, *args, **kwargs)  # last, as its random numbers count

    def _places(self, folder: str) -> Iterator[tuple[Path, ZeroOptimizer]]:
        """The folder of each optimizer's checkpoint."""
        for number, zero in enumerate(self._zeros()):
            yield Path(folder, f"{FOLDER}_{number}" if number else FOLDER).expanduser(), zero

    @contextlib.contextmanager
    def _without_zeros(self) -> Iterator[None]:
        """Hide our models and optimizers from accelerate. Users' hooks get all models."""
        names = ("_models", "_optimizers", *HOOKS)
        hidden, zeros = {name: getattr(self, name) for name in names}, self._zeros()
        for name in HOOKS:
            hooks = hidden[name].items()
            setattr(self, name, {key: _given(hook, list(self._models)) for key, hook in hooks})
        self._models = [model for model in self._models if zero_of(model) not in zeros]
        self._optimizers = [one for one in self._optimizers if unwrapped(one) not in zeros]
        try:
            yield
        finally:
            self.__dict__.update(hidden)
