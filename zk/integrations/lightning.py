"""ZeRO as a strategy of Lightning's Trainer: ``Trainer(strategy="zk_stage_3_offload")``.

Lightning's DDP strategy does all that concerns processes; here the ZeroOptimizer takes the place
of its DDP module. While training a checkpoint is a folder:

    name.ckpt/lightning.ckpt     loops, callbacks, schedulers, hparams, and which step belongs to it
    name.ckpt/step-00000012/     what ZeroOptimizer.save_checkpoint writes, and ``latest``
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import importlib.util
import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zk.checkpoint import load
from zk.checkpoint.files import CheckpointError
from zk.checkpoint.interrupted import stopped
from zk.config import ZeroConfig
from zk.core.logs import log, say
from zk.core.memory import host_memory, ranks_here
from zk.nn.deferred import deferred_init
from zk.optimizer import ZeroOptimizer
from zk.parallel.released import is_released, unmark

NAMES: dict[str, dict[str, Any]] = {  # of a strategy: fields of ZeroConfig
    "zk": {},
    "zk_stage_1": {"stage": 1},
    "zk_stage_2": {"stage": 2},
    "zk_stage_3": {"stage": 3},
    "zk_stage_2_offload": {"stage": 2, "optimizer_tier": "host"},
    "zk_stage_3_offload": {"stage": 3, "param_tier": "host", "optimizer_tier": "host"},
    "zk_stage_3_offload_nvme": {"stage": 3, "param_tier": "nvme", "optimizer_tier": "nvme"},
}
# Lightning's name -> what parameters are cast to; None: they keep their own
_DTYPES = {"32-true": None, "bf16-true": torch.bfloat16, "16-true": torch.float16}
_DTYPES |= {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}
_REFUSED = {  # callback -> the highest stage that takes it, as it needs whole parameters
    "StochasticWeightAveraging": 2, "BaseFinetuning": 2, "WeightAveraging": -1, "ModelPruning": -1,
}  # fmt: skip
_OF_DDP = ["accelerator", "parallel_devices", "cluster_environment", "checkpoint_io", "timeout"]
_OF_DDP += ["precision_plugin", "process_group_backend"]
_REST, _STEP = "lightning.ckpt", "zk_step"

# the package that the program uses: the two have classes of their own, which do not mix
_installed = [name for name in ("lightning", "pytorch_lightning") if importlib.util.find_spec(name)]
if not _installed:
    raise ImportError("zk.integrations.lightning needs Lightning: pip install 'lightning>=2.6'")
_package = next((name for name in _installed if name in sys.modules), _installed[0])
pl: Any = importlib.import_module({"lightning": "lightning.pytorch"}.get(_package, _package))
_Precision: Any = importlib.import_module(f"{pl.__name__}.plugins.precision").Precision


class ZeroPrecision(_Precision):  # type: ignore[misc]
    """Lightning's precision plugin, with weights and loss scale left to the ZeroOptimizer."""

    optimizer: ZeroOptimizer | None = None

    def __init__(self, inner: Any) -> None:
        super().__init__()
        known = ("Precision", "HalfPrecision", "MixedPrecision")
        if type(inner).__name__ not in known or inner.precision not in _DTYPES:
            raise ValueError(f"precision must be one of {[*_DTYPES]}; got {inner.precision!r}")
        self.precision, self.dtype = inner.precision, _DTYPES[inner.precision]
        # of the model outside of training; None: as it is trained
        self.master_dtype = "fp32" if self.precision.endswith("mixed") else None
        self.forward_context, self.convert_input = inner.forward_context, inner.convert_input
        self.convert_output = inner.convert_output

    def backward(self, tensor: Tensor, model: Any, _: Any, *args: Any, **kwargs: Any) -> None:
        zero = self.optimizer
        with contextlib.nullcontext(tensor) if zero is None else zero.scaled(tensor) as loss:
            model.backward(loss, *args, **kwargs)


class _Optimizer(ZeroOptimizer):
    """A ZeroOptimizer as Lightning handles optimizers.

    Lightning wraps it in objects that look up in it what they do not have: what methods called on
    these set must reach the optimizer. A step for which no rank has a gradient changes nothing.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        inner = self.__dict__.get("_optimizer")
        if inner is not None and name not in self.__dict__:
            setattr(inner, name, value)
        else:
            super().__setattr__(name, value)

    def _without_gradient(self) -> None:
        return


class ZeroStrategy(pl.strategies.DDPStrategy):  # type: ignore[misc]
    """ZeRO for a Trainer. Afterwards the model is a whole, plain one, if host memory has room.

    Args:
        options: fields of ZeroConfig, and accelerator, parallel_devices, cluster_environment,
            checkpoint_io, precision_plugin, process_group_backend and timeout of DDPStrategy.
    """

    strategy_name = "zk"
    optimizers: Any
    _lightning_module: Any

    def __init__(self, **options: Any) -> None:
        self.zero: _Optimizer | None = None
        self._weights: Mapping[str, Any] | None = None  # of a file, until there is memory for them
        self._folder: Path | None = None  # of a checkpoint, until there is an optimizer
        self._failed, self._fitting, self._strict = False, False, True
        theirs = {name: options.pop(name) for name in _OF_DDP if name in options}
        if "device" in options:
            raise TypeError(f"device={options['device']!r} is for Trainer(accelerator=, devices=)")
        if "nvme" in options.values() and "nvme_path" not in options:
            if "ZK_NVME_PATH" not in os.environ:
                raise ValueError("a tier is 'nvme': set ZK_NVME_PATH to a folder on the drive")
            options["nvme_path"] = os.environ["ZK_NVME_PATH"].split(os.pathsep)
        self.config = ZeroConfig(**options)
        super().__init__(**theirs)

    @property
    def _is_alone(self) -> bool:
        """True for one process: it needs no launcher, no group and no sampler."""
        return bool(self.num_processes * self.num_nodes == 1)

    def _configure_launcher(self) -> None:
        if not self._is_alone:
            super()._configure_launcher()

    def setup_environment(self) -> None:
        if not self._is_alone:  # the ranks that share this machine's memory and cores
            os.environ.setdefault("LOCAL_WORLD_SIZE", str(self.num_processes))
        super().setup_environment()

    def setup_distributed(self) -> None:
        if self._is_alone:
            self.set_world_ranks()
        else:
            super().setup_distributed()

    def block_backward_sync(self) -> Any:
        """Stages 0 and 1 reduce once a step; 2 and 3 keep shards, so they reduce each time."""
        assert self.zero is not None
        return self.zero.no_sync() if self.config.stage < 2 else contextlib.nullcontext()

    @property
    def precision_plugin(self) -> Any:
        return super().precision_plugin

    @precision_plugin.setter
    def precision_plugin(self, plugin: Any) -> None:
        if plugin is not None and not isinstance(plugin, ZeroPrecision):
            plugin = ZeroPrecision(plugin)
            if self.config.dtype not in (None, plugin.dtype) and plugin.precision != "32-true":
                raise ValueError(
                    f"precision={plugin.precision!r} and dtype={self.config.dtype} of the strategy "
                    "contradict each other; leave one out"
                )
        self._precision_plugin = plugin

    def model_sharded_context(self) -> Any:
        return deferred_init(self.root_device)

    def setup(self, trainer: Any) -> None:
        self.accelerator.setup(trainer)
        if self._is_alone:  # the data then comes in the order of a Trainer without a strategy
            trainer._accelerator_connector.use_distributed_sampler = False
        self._failed, self._fitting = False, trainer.state.fn.value == "fit"
        module, plugin = self.lightning_module, self.precision_plugin
        for part in module.modules():  # the ZeroOptimizer moves the model; these say where it is
            if isinstance(getattr(part, "_device", None), torch.device):
                part._device = self.root_device
        self._dtypes = {name: buffer.dtype for name, buffer in module.named_buffers()}
        dtype = self.config.dtype or plugin.dtype
        config = dataclasses.replace(self.config, device=self.root_device, dtype=dtype)
        if self._fitting:
            self._refuse(trainer)
            if self._layer_sync is not None:
                self.model = module = self._layer_sync.apply(module)
            self.setup_optimizers(trainer)
            names = [type(optimizer).__name__ for optimizer in self.optimizers]
            if len(names) != 1 or names == ["_MockOptimizer"]:
                raise ValueError(
                    f"configure_optimizers must return one optimizer; got {', '.join(names)}: put "
                    "what differs into its param_groups"
                )
            self.zero = _Optimizer(module, self.optimizers[0], config)
            self.optimizers = [self.zero]
        elif next(module.parameters(), None) is not None:  # nothing is updated
            config = dataclasses.replace(
                config, state_dtype="fp32", overlap_step=False, keep_gradients=True
            )
            self.zero = _Optimizer(module, torch.optim.SGD(module.parameters(), lr=0.0), config)
        plugin.optimizer = self.zero
        self._load_pending(True)
        self.setup_precision_plugin()

    def _refuse(self, trainer: Any) -> None:
        """ValueError for what clips twice, or writes parameters that zk keeps elsewhere."""
        if trainer.gradient_clip_val and self.config.clip_grad_norm:
            raise ValueError("gradient_clip_val and clip_grad_norm both clip; leave one out")
        for callback in trainer.callbacks:
            most = min(_REFUSED.get(kind.__name__, 3) for kind in type(callback).__mro__)
            if self.config.stage > most:
                raise ValueError(
                    f"{type(callback).__name__} writes whole parameters, and zk has none at stage "
                    f"{self.config.stage}; {'remove it' if most < 0 else f'use stage {most}'}"
                )

    def _step(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """A step of the module, called from its forward, where zk's hooks see it."""
        module = self.lightning_module

        def once() -> Any:
            del module.__dict__["forward"]
            return getattr(module, method)(*args, **kwargs)

        with self.precision_plugin.forward_context():
            module.__dict__["forward"] = once
            try:
                return module()
            finally:
                module.__dict__.pop("forward", None)

    training_step = functools.partialmethod(_step, "training_step")
    validation_step = functools.partialmethod(_step, "validation_step")
    test_step = functools.partialmethod(_step, "test_step")
    predict_step = functools.partialmethod(_step, "predict_step")

    # ---- checkpoints -------------------------------------------------------------------------

    def lightning_module_state_dict(self) -> dict[str, Tensor]:
        """Nothing while parameters are partitioned: ``save_checkpoint`` writes them."""
        return {} if self.zero else super().lightning_module_state_dict()

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        return {}

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, **options: Any) -> None:
        """A folder while training; one plain file for weights alone, and after training."""
        path = Path(self.broadcast(filepath))
        has_state = checkpoint.pop("optimizer_states", None) is not None
        if self.zero is not None and checkpoint["state_dict"]:
            raise ValueError("on_save_checkpoint must leave state_dict alone; use a key of its own")
        if self.zero is None or not has_state or not self._fitting:
            if self.zero is not None:
                weights = self.zero.consolidated_state_dict(self.precision_plugin.master_dtype)
                checkpoint = {**checkpoint, "state_dict": weights}
            if path.is_dir():
                self.remove_checkpoint(path)
            super().save_checkpoint(checkpoint, path, **options)
            return
        if self.is_global_zero and path.is_file():
            path.unlink()
        step = self.zero.save_checkpoint(path)
        assert step is not None
        if self.is_global_zero:  # last: a crash leaves what was there before
            rest = {**checkpoint, "optimizer_states": [], _STEP: step.name}
            self.checkpoint_io.save_checkpoint(rest, path / _REST)
            for old in path.glob("step-*"):
                if old != step:
                    shutil.rmtree(old)

    def load_checkpoint(self, checkpoint_path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        path = Path(checkpoint_path)
        if not path.is_dir():
            plain: dict[str, Any] = super().load_checkpoint(path, *args, **kwargs)
            return plain
        if not (path / _REST).is_file():
            raise CheckpointError(f"{path} has no {_REST}: it is no whole checkpoint of a Trainer")
        rest: dict[str, Any] = super().load_checkpoint(path / _REST, *args, **kwargs)
        self._folder = load.find(path / rest.pop(_STEP))
        return rest

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        self._weights, self._strict = checkpoint["state_dict"], strict
        if self._folder is not None and self._weights:
            raise CheckpointError("on_load_checkpoint must not fill state_dict of a folder")
        self._load_pending(self.zero is not None)

    def _load_pending(self, has_optimizer: bool) -> None:
        """Load what was read before there was an optimizer, or memory, to take it."""
        module = self.lightning_module
        if has_optimizer and self._folder is not None:
            assert self.zero is not None
            folder, self._folder, self._weights = self._folder, None, None
            if self._fitting:
                self.zero.load_checkpoint(folder)
            else:
                load.load_model(self.zero, folder)
        is_meta = any(param.is_meta for param in module.parameters())
        if self._weights and (has_optimizer or not is_meta):
            module.load_state_dict(self._weights, strict=self._strict)
            self._weights = None

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        if checkpoint["optimizer_states"]:  # a plain Trainer's; a folder's came with the weights
            super().load_optimizer_state_dict(checkpoint)

    def remove_checkpoint(self, filepath: Any) -> None:
        if not os.path.islink(filepath):
            super().remove_checkpoint(filepath)
        elif self.is_global_zero:
            os.unlink(filepath)

    def on_exception(self, exception: BaseException) -> None:
        if isinstance(exception, KeyboardInterrupt) and self.zero and self.is_global_zero:
            say(stopped(self.zero), always=True)
        self._failed = True  # other ranks may be elsewhere: nothing collective from here on

    def teardown(self) -> None:
        zero, self.zero, self._folder, self._weights = self.zero, None, None, None
        module, self.precision_plugin.optimizer = self._lightning_module, None
        if zero is not None and not zero.closed:
            values: dict[str, Tensor] = {}
            is_whole = not zero.integrity.interrupted and not (self._failed and zero.comm.world > 1)
            try:
                if is_whole and self._has_room(zero):
                    values = zero.consolidated_state_dict(self.precision_plugin.master_dtype)
            finally:
                zero.close()
            for name, param in zero.model.named_parameters() if values else ():
                unmark(param)
                param.grad, param.data = None, values[name]
            for name, buffer in zero.model.named_buffers():
                buffer.data = buffer.data.to(self._dtypes.get(name, buffer.dtype))
            if any(is_released(param) for param in zero.model.parameters()):
                self._lightning_module = None  # Lightning would move it to the CPU
        try:
            super().teardown()
        finally:
            self._lightning_module = module

    def _has_room(self, zero: ZeroOptimizer) -> bool:
        """Whether half of the free host memory holds the whole model once for each rank."""
        size = 4 if self.precision_plugin.master_dtype else 0
        params = zero.model.parameters()
        nbytes = sum(param.numel() * (size or param.element_size()) for param in params)
        free = host_memory()[1]
        (lacking,) = zero.comm.ranks_with([nbytes * ranks_here(zero.comm.world) > free // 2])
        if lacking:
            log.warning("the whole model does not fit in half of host memory; it stays sharded")
        return not lacking


for _name, _fields in NAMES.items():
    pl.strategies.StrategyRegistry.register(_name, ZeroStrategy, f"zk: {_fields}", **_fields)
