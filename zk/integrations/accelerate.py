"""ZeroAccelerator: accelerate's Accelerator over ZeroOptimizer, for a loop that stays as it is."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from torch import Tensor, nn

from zk.config import ZeroConfig
from zk.core.owners import owner_of
from zk.integrations.deepspeed import is_deepspeed
from zk.optimizer import ZeroOptimizer
from zk.tools.metrics import loggable

# accelerate's word for precision -> what parameters are then stored in
DTYPES = {"no": None, "bf16": torch.bfloat16, "fp16": torch.float16}
FOLDER = "zk"  # of our checkpoint, in a folder of accelerate's or the Trainer's


def zero_of(model: nn.Module | None) -> ZeroOptimizer | None:
    """The ZeroOptimizer that a model's parameters belong to."""
    if not isinstance(model, nn.Module):
        return None
    return next((owner for param in model.parameters() if (owner := owner_of(param)) is not None), None)


def unwrapped(optimizer: Any) -> Any:
    """The optimizer inside of accelerate's wrappers."""
    while isinstance(optimizer, AcceleratedOptimizer):
        optimizer = optimizer.optimizer
    return optimizer


def with_precision(config: ZeroConfig, mixed_precision: str) -> tuple[ZeroConfig, bool]:
    """The config with the dtype that "bf16" and "fp16" mean for zk, and True if accelerate's autocast is still to be used.

    Mixed precision is parameters of that dtype with fp32 masters, without autocast. ``dtype="fp32"`` beside "bf16" asks for accelerate's
    own: fp32 parameters under autocast. Raises ValueError where the two contradict each other.
    """
    if mixed_precision not in DTYPES:
        raise ValueError(f"zk trains with mixed_precision 'no', 'bf16' or 'fp16'; got {mixed_precision!r}")
    asked = DTYPES[mixed_precision]
    is_autocast = config.dtype == torch.float32 and asked == torch.bfloat16
    if config.dtype is None:
        return dataclasses.replace(config, dtype=asked), False
    if asked not in (None, config.dtype) and not is_autocast:
        raise ValueError(
            f"mixed precision is {mixed_precision!r} and ZeroConfig.dtype {config.dtype}; leave dtype out, or give the same (fp16 over fp32 "
            "parameters would need torch's loss scaler, which does not see gradients that zk has taken)"
        )
    return config, is_autocast


class _Prepared(AcceleratedOptimizer):  # type: ignore[misc]
    """accelerate's wrapper around a ZeroOptimizer, whose state is where it belongs, and which skips steps by itself."""

    def step(self, closure: Any = None) -> None:
        before = self.optimizer.counters["skipped_steps"]
        super().step(closure)
        if self.gradient_state.sync_gradients:
            self._is_overflow = self.optimizer.counters["skipped_steps"] > before


class ZeroAccelerator(Accelerator):  # type: ignore[misc]
    """accelerate's Accelerator over ZeroOptimizer: ``prepare``, ``backward``, ``accumulate``, ``clip_grad_norm_``, ``save_state`` as ever.

    Args:
        zero: a ZeroConfig, its fields as a dict, or DeepSpeed's JSON, as a path or a dict: ``prepare(model, optimizer, ...)`` wraps the torch
            optimizer accordingly. None: only a ZeroOptimizer that you made yourself is treated as one.
        kwargs: accelerate's own. ``mixed_precision="bf16"`` means bf16 parameters with fp32 masters, without autocast; with
            ``zero={"dtype": "fp32"}`` it is accelerate's autocast over fp32 parameters.

    ``save_state`` writes a zk checkpoint into the folder (whole, for any number of ranks), and ``load_state`` goes on from it.
    ``get_state_dict`` has the full weights on the first rank, and is empty on the others, as with FSDP. Tested with accelerate 1.15.
    """

    zero: ZeroConfig | None = None
    _models: list[nn.Module]
    _optimizers: list[AcceleratedOptimizer]
    _save_model_state_pre_hook: Any
    _load_model_state_pre_hook: Any

    def __init__(self, *args: Any, zero: ZeroConfig | Mapping[str, Any] | str | os.PathLike[str] | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if is_deepspeed(zero):
            auto = {f"{name}.enabled": self.mixed_precision == name for name in ("bf16", "fp16")}
            zero = ZeroConfig.from_deepspeed(zero, auto={"gradient_clipping": 0, **auto})  # type: ignore[arg-type]
        self.adopt(zero)  # type: ignore[arg-type]

    def adopt(self, zero: ZeroConfig | Mapping[str, Any] | None) -> None:
        """Take precision over from accelerate."""
        if str(self.distributed_type).rpartition(".")[2] not in ("NO", "MULTI_GPU", "MULTI_CPU"):
            raise ValueError(f"ZeroAccelerator does what DeepSpeed and FSDP do; leave them out of accelerate's config; got {self.distributed_type}")
        if self.state.dynamo_plugin.backend.value not in (None, "NO"):
            raise ValueError("compiling the whole model delays gradients to the end of backward; compile its blocks (block.compile()) instead")
        config = zero if isinstance(zero, ZeroConfig) else ZeroConfig(**(zero or {}))
        config, autocast = with_precision(config, self.mixed_precision)
        self.zero = config if zero is not None else None
        if zero is not None and not autocast:
            self.native_amp, self.scaler = False, None

    def zero_here(self) -> ZeroConfig:
        """The config, with the device of this process: a model comes from host memory to where it rests, and never whole to the device."""
        assert self.zero is not None
        if self.zero.device is not None or not self.device_placement:
            return self.zero
        return dataclasses.replace(self.zero, device=self.device)

    # ---- preparing -----------------------------------------------------------------------------------------------------------

    def prepare(self, *args: Any, device_placement: list[bool] | None = None) -> Any:
        if self.zero is not None:
            args = tuple(self._wrapped(one, args) for one in args)
        return super().prepare(*args, device_placement=device_placement)

    def _wrapped(self, one: Any, among: tuple[Any, ...]) -> Any:
        """A torch optimizer becomes a ZeroOptimizer over that of the models whose parameters it has."""
        if not isinstance(one, torch.optim.Optimizer) or isinstance(one, (ZeroOptimizer, AcceleratedOptimizer)):
            return one
        params = {param for group in one.param_groups for param in group["params"]}
        models = [model for model in among if isinstance(model, nn.Module) and not params.isdisjoint(model.parameters())]
        if not models:
            raise ValueError("prepare() got an optimizer without its model; pass both in one call: prepare(model, optimizer, ...)")
        if not params.issubset(models[0].parameters()):
            raise ValueError("a ZeroOptimizer is for the parameters of one model; make one optimizer for each, or put both into one nn.ModuleList")
        assert self.zero is not None
        return ZeroOptimizer(models[0], one, self.zero_here())

    def prepare_model(self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False) -> Any:
        if zero_of(model) is None:
            return super().prepare_model(model, device_placement, evaluation_mode)
        return super().prepare_model(model, device_placement=False, evaluation_mode=True)  # autocast, if it is on, and no DDP

    def prepare_optimizer(self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None) -> AcceleratedOptimizer:
        if not isinstance(optimizer, ZeroOptimizer):
            return super().prepare_optimizer(optimizer, device_placement)
        if self.scaler is not None:
            raise ValueError("mixed_precision='fp16' brings a loss scaler that ZeroOptimizer cannot use; give ZeroAccelerator a zero=ZeroConfig()")
        prepared = _Prepared(optimizer, device_placement=False)
        self._optimizers.append(prepared)
        return prepared

    def _zeros(self) -> list[ZeroOptimizer]:
        return [optimizer for one in self._optimizers if isinstance(optimizer := unwrapped(one), ZeroOptimizer)]

    # ---- training ------------------------------------------------------------------------------------------------------------

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        zeros = self._zeros()
        if len(zeros) == 1:
            zeros[0].backward(loss / self.gradient_accumulation_steps, **kwargs)
        else:
            super().backward(loss, **kwargs)

    def no_sync(self, model: nn.Module) -> Any:
        """At stages 0 and 1 gradients stay on their rank; at 2 and 3 only shards of them are kept, so they are reduced each time."""
        zero = zero_of(model)
        if zero is None:
            return super().no_sync(model)
        return zero.no_sync() if zero.config.stage < 2 else contextlib.nullcontext()

    def log(self, values: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        """accelerate's, and with it the rates since the last call (``zk/step_s``, ``zk/wait_share``, ...)."""
        zeros = self._zeros()
        if len(zeros) == 1:
            values = {**values, **loggable(zeros[0], zeros[0].rates)}
        super().log(values, *args, **kwargs)

    # ---- state ---------------------------------------------------------------------------------------------------------------

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> Any:
        zero = zero_of(model)
        if zero is None or zero.model is not self.unwrap_model(model):
            return super().get_state_dict(model, unwrap)
        return zero.consolidated_state_dict(rank0_only=True)

    def save_state(self, output_dir: str | None = None, *args: Any, **kwargs: Any) -> str:
        zeros = self._zeros()
        with self._without(zeros):
            folder: str = super().save_state(output_dir, *args, **kwargs)
        for place, zero in _places(folder, zeros):
            zero.save_checkpoint(place, keep=1)
            zero.resume_from = place.parent
        return folder

    def load_state(self, input_dir: str | None = None, *args: Any, **kwargs: Any) -> None:
        zeros = self._zeros()
        if input_dir is None and self.project_configuration.automatic_checkpoint_naming:  # then accelerate takes the latest
            folder = Path(self.project_dir, "checkpoints")
            input_dir = str(max(folder.iterdir(), key=lambda path: int(path.name.rpartition("_")[2])))
        for place, zero in _places(input_dir, zeros) if input_dir is not None else ():  # without, accelerate says what is missing
            if not place.is_dir():
                raise ValueError(f"{input_dir} has no {place.name}/: ZeroAccelerator goes on from what its own save_state wrote")
            zero.load_checkpoint(place)
            zero.resume_from = place.parent
        with self._without(zeros):
            super().load_state(input_dir, *args, **kwargs)  # last, as its random numbers are to be the ones that count

    @contextlib.contextmanager
    def _without(self, zeros: list[ZeroOptimizer]) -> Iterator[None]:
        """Hide these optimizers and their models from accelerate. Hooks of its users get all models, and no weights of ours, as under FSDP."""
        hidden = {name: getattr(self, name) for name in ("_models", "_optimizers", "_save_model_state_pre_hook", "_load_model_state_pre_hook")}
        models = list(self._models)

        def with_all(hooks: Mapping[Any, Callable[..., Any]]) -> OrderedDict[Any, Callable[..., Any]]:
            return OrderedDict((key, lambda _, *rest, hook=hook: hook(list(models), *rest)) for key, hook in hooks.items())

        self._save_model_state_pre_hook = with_all(self._save_model_state_pre_hook)
        self._load_model_state_pre_hook = with_all(self._load_model_state_pre_hook)
        self._models = [model for model in models if zero_of(model) not in zeros]
        self._optimizers = [optimizer for optimizer in self._optimizers if unwrapped(optimizer) not in zeros]
        try:
            yield
        finally:
            self.__dict__.update(hidden)


def _places(folder: str, zeros: list[ZeroOptimizer]) -> Iterator[tuple[Path, ZeroOptimizer]]:
    """The folder of each optimizer's checkpoint."""
    for number, zero in enumerate(zeros):
        yield Path(folder, FOLDER if number == 0 else f"{FOLDER}_{number}").expanduser(), zero
