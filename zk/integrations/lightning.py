"""ZeRO as a strategy of Lightning's Trainer: ``Trainer(strategy="zk_stage_3_offload")``.

A checkpoint that is saved in ``fit`` is a folder:

    name.ckpt/lightning.ckpt     loops, callbacks, schedulers, hparams, and which step belongs to it
    name.ckpt/step-00000012/     what ZeroOptimizer.save_checkpoint writes, and ``latest``
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import shutil
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zk.checkpoint import files
from zk.checkpoint.contents import Checkpoint
from zk.checkpoint.export import entries_of, value_of
from zk.config import ZeroConfig
from zk.logs import log, require
from zk.memory import host_memory
from zk.nn.deferred import deferred_init
from zk.optimizer import NoGradient, ZeroOptimizer

NAMES: dict[str, dict[str, Any]] = {  # of a strategy: fields of ZeroConfig
    "zk": {},
    "zk_stage_1": {"stage": 1},
    "zk_stage_2": {"stage": 2},
    "zk_stage_3": {"stage": 3},
    "zk_stage_3_offload": {"stage": 3, "param_tier": "host", "optimizer_tier": "host"},
    "zk_stage_3_offload_nvme": {"stage": 3, "param_tier": "nvme", "optimizer_tier": "nvme"},
}
_DTYPES: dict[str, Any] = {  # Lightning's name: what parameters are cast to, and are afterwards
    "32-true": (None, None),
    "bf16-true": (torch.bfloat16, None),
    "16-true": (torch.float16, None),
    "bf16-mixed": (torch.bfloat16, "fp32"),
    "16-mixed": (torch.float16, "fp32"),
}
_WRITERS = {"StochasticWeightAveraging", "WeightAveraging", "ModelPruning"}
_OF_TRAINER = {"device": "accelerator", "dtype": "precision", "clip_grad_norm": "gradient_clip_val"}
_REST, _STEP = "lightning.ckpt", "zk_step"

# the package that the program imported: the two have classes of their own, which do not mix
_alone = "pytorch_lightning" in sys.modules and "lightning" not in sys.modules
pl: Any = importlib.import_module("pytorch_lightning" if _alone else "lightning.pytorch")
_Precision: Any = importlib.import_module(f"{pl.__name__}.plugins.precision").Precision


class ZeroPrecision(_Precision):  # type: ignore[misc]
    """Lightning's precision plugin, with weights and loss scale left to the ZeroOptimizer."""

    def __init__(self, inner: Any):
        super().__init__()
        rule = f"precision must be one of {[*_DTYPES]}; got {inner.precision!r}"
        require(inner.precision in _DTYPES, rule)
        self.precision = inner.precision
        self.dtype, self.master_dtype = _DTYPES[inner.precision]
        self.forward_context, self.convert_input = inner.forward_context, inner.convert_input
        self.convert_output = inner.convert_output

    def backward(self, tensor: Tensor, model: Any, _: Any, *args: Any, **kwargs: Any) -> None:
        zero = model.trainer.strategy.zero
        if zero._scaler.scale == 1.0:
            model.backward(tensor, *args, **kwargs)
        else:  # past ``backward`` of the module, which does not know of the scale
            zero.backward(tensor, *args, **kwargs)

    def clip_grad_by_norm(self, optimizer: Any, clip_val: float) -> None:
        optimizer.clip_grad_norm_(clip_val)

    def optimizer_step(self, *args: Any, **kwargs: Any) -> Any:
        with contextlib.suppress(NoGradient):  # training_step may return None
            return super().optimizer_step(*args, **kwargs)


class ZeroStrategy(pl.strategies.DDPStrategy):  # type: ignore[misc]
    """ZeRO for a Trainer. Afterwards the model is a whole, plain one, if host memory has room.

    Args:
        options: fields of ZeroConfig, and timeout and process_group_backend of DDPStrategy.
    """

    precision_plugin: Any
    optimizers: Any
    _lightning_module: Any

    def __init__(self, **options: Any):
        self.zero: Any = None  # the ZeroOptimizer, while the Trainer runs
        self._pending: Any = None  # arguments of load_model_state_dict, until there is one
        groups = ("timeout", "process_group_backend")
        theirs = {name: options.pop(name) for name in groups if name in options}
        for name in _OF_TRAINER.keys() & options.keys():
            raise TypeError(f"{name} is set by Trainer({_OF_TRAINER[name]}=...); leave it out")
        if "nvme" in options.values() and "ZK_NVME_PATH" in os.environ:
            options.setdefault("nvme_path", os.environ["ZK_NVME_PATH"].split(os.pathsep))
        self.config = ZeroConfig(**options)
        super().__init__(**theirs)

    @property
    def _is_alone(self) -> bool:
        """One process trains: it needs no launcher, no group and no sampler."""
        return bool(self.num_processes * self.num_nodes == 1)

    def _configure_launcher(self) -> None:
        if not self._is_alone:
            super()._configure_launcher()

    def setup_distributed(self) -> None:
        if self._is_alone:
            self.set_world_ranks()
        else:  # these ranks share the memory and the cores of this machine
            os.environ.setdefault("LOCAL_WORLD_SIZE", str(self.num_processes))
            super().setup_distributed()

    def connect(self, model: Any) -> None:
        if not isinstance(self.precision_plugin, ZeroPrecision):
            self.precision_plugin = ZeroPrecision(self.precision_plugin)
        super().connect(model)

    def model_sharded_context(self) -> Any:
        return deferred_init(self.root_device)

    def setup(self, trainer: Any) -> None:
        self.accelerator.setup(trainer)
        if self._is_alone:
            trainer._accelerator_connector.use_distributed_sampler = False
        self._fitting = trainer.state.fn.value == "fit"
        module, plugin = self.lightning_module, self.precision_plugin
        for part in module.modules():  # the ZeroOptimizer moves the model, but no metrics
            if hasattr(part, "_defaults"):
                part.to(self.root_device)
        config = replace(self.config, device=self.root_device, dtype=plugin.dtype)
        if self._fitting:
            rule = "automatic_optimization must be True; else write a plain loop"
            require(module.automatic_optimization, rule)
            kinds = {kind.__name__ for each in trainer.callbacks for kind in type(each).__mro__}
            for writer in kinds & _WRITERS:
                raise ValueError(f"{writer} writes parameters that zk holds; remove it")
            if self._layer_sync is not None:
                self.model = module = self._layer_sync.apply(module)
            self.setup_optimizers(trainer)
        else:  # nothing is updated
            config = replace(config, options={})
            self.optimizers = [torch.optim.SGD(module.parameters(), lr=0.0)]
        self.zero = ZeroOptimizer(module, self.optimizers, config)
        self.optimizers = [self.zero]
        if self._pending is not None:
            self.load_model_state_dict(*self._pending)
            self._pending = None

    def _step(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """A step of the module, called from its forward, where zk's hooks see it."""
        module = self.lightning_module

        def once() -> Any:
            del module.__dict__["forward"]
            return getattr(module, method)(*args, **kwargs)

        with self.precision_plugin.forward_context():
            module.__dict__["forward"] = once
            return module()

    training_step = functools.partialmethod(_step, "training_step")
    validation_step = functools.partialmethod(_step, "validation_step")
    test_step = functools.partialmethod(_step, "test_step")
    predict_step = functools.partialmethod(_step, "predict_step")

    def lightning_module_state_dict(self) -> dict[str, Tensor]:
        """Nothing while parameters are partitioned: ``save_checkpoint`` writes them."""
        return {} if self.zero else super().lightning_module_state_dict()

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        return {}

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, **options: Any) -> None:
        """A folder while training; one plain file for weights alone, and after training."""
        path = Path(self.broadcast(filepath))
        has_state = checkpoint.pop("optimizer_states", None) is not None
        if self.zero is None:
            super().save_checkpoint(checkpoint, path, **options)
            return
        rule = "on_save_checkpoint must leave state_dict alone; use a key of its own"
        require(not checkpoint["state_dict"], rule)
        if not has_state or not self._fitting:
            weights = self.zero.consolidated_state_dict(self.precision_plugin.master_dtype)
            super().save_checkpoint({**checkpoint, "state_dict": weights}, path, **options)
            return
        step = self.zero.save_checkpoint(path)
        if self.is_global_zero:  # last: a crash leaves what was there before
            rest = {**checkpoint, "optimizer_states": [], _STEP: step.name}
            self.checkpoint_io.save_checkpoint(rest, path / _REST)
            for old in {*path.glob("step-*")} - {step}:
                shutil.rmtree(old)

    def load_checkpoint(self, checkpoint_path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        path = Path(checkpoint_path)
        if not path.is_dir():
            return dict(super().load_checkpoint(path, *args, **kwargs))
        checkpoint = dict(super().load_checkpoint(path / _REST, *args, **kwargs))
        return {**checkpoint, _STEP: files.find(path / checkpoint[_STEP])}

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        is_meta = any(param.is_meta for param in self.lightning_module.parameters())
        folder = checkpoint.get(_STEP)
        if self.zero is None and (is_meta or folder):
            self._pending = checkpoint, strict
        elif folder and self._fitting:
            self.zero.load_checkpoint(folder)
        else:
            found = {"state_dict": _weights_of(folder)} if folder else checkpoint
            super().load_model_state_dict(found, strict)

    def teardown(self) -> None:
        zero, self.zero, self._pending = self.zero, None, None
        module, is_whole = self._lightning_module, True
        if zero is not None and zero._runtime.stores:
            is_whole = self._end(zero)
        self._lightning_module = module if is_whole else None  # Lightning moves it to the CPU
        try:
            super().teardown()
        finally:
            self._lightning_module = module

    def _end(self, zero: ZeroOptimizer) -> bool:
        """Close the optimizer; tell if its model is whole: half of free host memory must hold it."""
        values: dict[str, Tensor] = {}
        comm, model = zero._layout.comm, self.lightning_module
        model.__dict__.pop("forward", None)  # of a step that did not begin
        others_wait = comm.size > 1 and model.trainer.interrupted
        nbytes = 4 * sum(param.numel() for param in model.parameters())
        room = host_memory()[1] // 2 // int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        try:
            if not zero._torn and not others_wait:
                if any(comm.words("the end", nbytes > room)):
                    log.warning("the model does not fit in half of host memory; it stays sharded")
                else:
                    values = zero.consolidated_state_dict(self.precision_plugin.master_dtype)
        finally:
            is_whole = bool(values) or zero.config.stage != 3
            zero.close(gather=is_whole)
        for name, param in model.named_parameters() if values else ():
            param.grad, param.data = None, values[name]
        return is_whole


def _weights_of(folder: Path) -> dict[str, Tensor]:
    """Parameters and buffers of a checkpoint, to be evaluated."""
    with Checkpoint(folder) as saved:
        entries = entries_of(saved, torch.float32)
        found = {entry.key: value_of(saved, entry) for entry in entries}
        return found | {name: found[kept] for name, kept in saved.head["tied"].items()}


for _name, _fields in NAMES.items():
    pl.strategies.StrategyRegistry.register(_name, ZeroStrategy, f"zk: {_fields}", **_fields)
