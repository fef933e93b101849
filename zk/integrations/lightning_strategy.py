"""The strategy of a Trainer: the same training, with a ZeroOptimizer in between.

All that concerns processes (launching, groups, samplers, reduction of metrics) is Lightning's DDP strategy, which this is put in front of.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from zk.checkpoint import load
from zk.checkpoint.interrupted import stopped
from zk.core.logs import log, rank_log, say
from zk.core.memory import host_memory, ranks_here
from zk.integrations import lightning_checkpoint as checkpoints
from zk.integrations.lightning_common import LightningZeroOptimizer, Strategy, has_memory, through_forward, to_device
from zk.nn.deferred import deferred_init
from zk.offload.tiers import readable
from zk.optimizer import ZeroOptimizer
from zk.parallel.released import is_released, unmark

_REFUSED = {  # callback -> what to do instead
    "ModelPruning": "prune the plain model after fit",
    "StochasticWeightAveraging": "stages 0, 1 and 2 take it",
    "BaseFinetuning": "stages 0, 1 and 2 take it; at stage 3 give the optimizer all parameters, in groups, and set requires_grad of those to train",
    "WeightAveraging": "StochasticWeightAveraging works at stages 0-2",
}


class TrainerStrategy(Strategy):
    """ZeRO through zk, for a Trainer.

    Args:
        gather_at_end: after fit, validate, test and predict every rank has the whole model in host memory, as a plain one; None: if half of
            the free memory is enough for it. Otherwise what stage 3 has partitioned cannot be read any more.
        options: fields of ZeroConfig, and accelerator, parallel_devices, cluster_environment, checkpoint_io, precision_plugin,
            process_group_backend and timeout as Lightning's DDPStrategy has them.
    """

    strategy_name = "zk"
    optimizers: Any
    _lightning_module: Any

    def __init__(self, *, gather_at_end: bool | None = None, **options: Any) -> None:
        self.gather_at_end = gather_at_end
        self.zero: LightningZeroOptimizer | None = None
        self._weights: Mapping[str, Any] | None = None  # to load when there is memory for it
        self._folder: Path | None = None
        self._strict, self._failed, self._fitting = True, False, False
        self._saves_weights = False  # in the dict that the Trainer has made last
        self._connector: Any = None
        self._buffer_dtypes: dict[str, torch.dtype] = {}
        super().__init__(**options)

    # ---- processes and precision ---------------------------------------------------------------------------------------------

    def setup_distributed(self) -> None:
        if self.is_alone:
            self.set_world_ranks()
        else:
            super().setup_distributed()

    def block_backward_sync(self) -> Any:
        """Stages 0 and 1 have whole gradients anyway; 2 and 3 reduce those of each micro-batch, as they are not partitioned before."""
        assert self.zero is not None
        return self.zero.no_sync() if self.config.stage < 2 else contextlib.nullcontext()

    @property
    def precision_plugin(self) -> Any:
        return super().precision_plugin

    @precision_plugin.setter
    def precision_plugin(self, plugin: Any) -> None:
        self._precision_plugin = self.delegated(plugin)

    # ---- setup ---------------------------------------------------------------------------------------------------------------

    def model_sharded_context(self) -> Any:
        return deferred_init(self.root_device)

    def model_to_device(self) -> None:
        """At stage 3 parameters go to where they rest with the optimizer, unit by unit: all at once they may not fit on the device."""
        if self.config.stage != 3 or next(self.model.parameters(), None) is None:
            to_device(self.model, self.root_device)
            return
        for part in self.model.modules():  # those of Lightning say where they are
            if isinstance(getattr(part, "_device", None), torch.device):
                part._device = self.root_device

    def setup(self, trainer: Any) -> None:
        self.accelerator.setup(trainer)
        if self.is_alone:  # the order of the data is then that of a Trainer without a strategy, where DDP's sampler shuffles it
            trainer._accelerator_connector.use_distributed_sampler = False
        self._failed, self._fitting = False, trainer.state.fn.value == "fit"
        module: nn.Module = self.lightning_module
        if self._fitting:
            self._refuse(trainer)
            if self._layer_sync is not None:
                self.model = module = self._layer_sync.apply(module)
        self._watch_saves(trainer._checkpoint_connector)
        self.model_to_device()
        self._buffer_dtypes = {name: buffer.dtype for name, buffer in module.named_buffers()}
        config = dataclasses.replace(self.config_for(self.precision_plugin), device=self.root_device)
        if self._fitting:
            self.setup_optimizers(trainer)
            names = [type(optimizer).__name__ for optimizer in self.optimizers]
            if names == ["_MockOptimizer"]:
                raise ValueError("zk trains with one optimizer over the parameters of one model; configure_optimizers returned None. Return one")
            if len(names) != 1:
                raise ValueError(
                    f"zk trains with one optimizer over the parameters of one model; configure_optimizers gave {len(names)} ({', '.join(names)}). "
                    "Put what differs into param_groups of one"
                )
            self.zero = LightningZeroOptimizer(module, self.optimizers[0], config)
            self.optimizers = [self.zero]
        elif next(module.parameters(), None) is not None:  # the same partition, with nothing to update
            still = dataclasses.replace(config, state_dtype="fp32", overlap_step=False, keep_gradients=True)
            self.zero = LightningZeroOptimizer(module, torch.optim.SGD(module.parameters(), lr=0.0), still)
        self.precision_plugin.optimizer = self.zero
        self._load_pending()
        self.setup_precision_plugin()

    def _refuse(self, trainer: Any) -> None:
        """ValueError for what trains the same parameters in another way."""
        if trainer.gradient_clip_val and self.config.clip_grad_norm:
            raise ValueError(
                f"Trainer(gradient_clip_val={trainer.gradient_clip_val}) and clip_grad_norm={self.config.clip_grad_norm} of the strategy "
                "clip the same gradients; leave one out"
            )
        for callback in trainer.callbacks:
            for name in {kind.__name__ for kind in type(callback).__mro__} & _REFUSED.keys():
                if name in ("StochasticWeightAveraging", "BaseFinetuning") and self.config.stage < 3:
                    continue
                raise ValueError(
                    f"{type(callback).__name__} reads and writes whole parameters beside the optimizer that keeps them elsewhere, so zk "
                    f"refuses it; {_REFUSED[name]}"
                )

    # ---- steps ---------------------------------------------------------------------------------------------------------------

    def _step(self, method: str, *args: Any, **kwargs: Any) -> Any:
        with self.precision_plugin.forward_context():
            if self.zero is None:
                return getattr(self.lightning_module, method)(*args, **kwargs)
            return through_forward(self.lightning_module, method, args, kwargs)

    training_step = functools.partialmethod(_step, "training_step")
    validation_step = functools.partialmethod(_step, "validation_step")
    test_step = functools.partialmethod(_step, "test_step")
    predict_step = functools.partialmethod(_step, "predict_step")

    # ---- checkpoints ---------------------------------------------------------------------------------------------------------

    def _watch_saves(self, connector: Any) -> None:
        """Note if the Trainer saves weights alone. It asks for weights first, without saying so, and on_save_checkpoint must see them then."""
        dump = connector.dump_checkpoint

        def dump_checkpoint(weights_only: bool | None = None) -> Any:
            self._saves_weights = bool(weights_only) or not self._fitting
            return dump(weights_only)

        self._connector, connector.dump_checkpoint = connector, dump_checkpoint

    def lightning_module_state_dict(self) -> dict[str, Tensor]:
        """The weights for a plain file; nothing for a folder, while parameters are partitioned."""
        if self.zero is None:
            return super().lightning_module_state_dict()  # type: ignore[no-any-return]
        return self.zero.consolidated_state_dict(self.precision_plugin.master_dtype) if self._saves_weights else {}

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        return {}

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """A folder while training; one plain file, with the weights, if only these are wanted, or training is over."""
        filepath = self.broadcast(filepath)
        whole = "optimizer_states" in checkpoint
        if whole and self.zero is not None and self._fitting:
            if storage_options is not None:
                raise TypeError(f"storage_options has no effect on a checkpoint that is a folder; leave it out (got {storage_options!r})")
            if checkpoint.get("state_dict") and self.is_global_zero:
                log.warning(
                    "on_save_checkpoint has put values into checkpoint['state_dict'], which %s does not keep; use a key of your own", filepath
                )
            rest = {**checkpoint, "state_dict": {}, "optimizer_states": []}
            checkpoints.save(self.zero, filepath, rest, self.checkpoint_io.save_checkpoint)
            return
        if self.zero is not None:
            if not self._saves_weights:  # a dict that no Trainer made
                self._saves_weights = True
                checkpoint = {**checkpoint, "state_dict": self.lightning_module_state_dict()}
            self._saves_weights = False
        elif whole and checkpoint.pop("optimizer_states") and self.is_global_zero:
            log.warning("training is over: %s has the weights, and no optimizer state. ModelCheckpoint saves what fit() can go on from", filepath)
        if os.path.isdir(filepath):
            self.remove_checkpoint(filepath)
        super().save_checkpoint(checkpoint, filepath, storage_options)

    def load_checkpoint(self, checkpoint_path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        if not os.path.isdir(checkpoint_path):
            return super().load_checkpoint(checkpoint_path, *args, **kwargs)  # type: ignore[no-any-return]
        rest, self._folder = checkpoints.read(checkpoint_path, super().load_checkpoint, *args, **kwargs)
        return {**rest, "state_dict": checkpoints.Elsewhere(checkpoint_path)}

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        self._strict = strict
        if self._folder is None:
            self._weights = checkpoint["state_dict"]
        elif not isinstance(checkpoint.get("state_dict"), checkpoints.Elsewhere):
            checkpoints.Elsewhere(self._folder).refuse()  # a hook has put something else there
        if self.zero is not None or (self._weights is not None and has_memory(self.lightning_module)):
            self._load_pending()  # (of fp32 weights in a file nothing is rounded away, as long as the model is an fp32 one)

    def _load_pending(self) -> None:
        """Load the weights that were read before there was an optimizer, or memory, to take them."""
        folder, weights, self._folder, self._weights = self._folder, self._weights, None, None
        if folder is not None:
            assert self.zero is not None
            if not self._strict:
                checkpoints.check_names(self.zero, folder)
            if self._fitting:
                self.zero.load_checkpoint(folder)
            else:
                load.load_model(self.zero, folder)
        if weights is not None:
            self.lightning_module.load_state_dict(weights, strict=self._strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        if checkpoint["optimizer_states"]:  # a plain Trainer's; of a folder it is loaded with the weights
            super().load_optimizer_state_dict(checkpoint)

    def remove_checkpoint(self, filepath: Any) -> None:
        if not os.path.islink(filepath):
            super().remove_checkpoint(filepath)
        elif self.is_global_zero:
            os.unlink(filepath)

    # ---- the end -------------------------------------------------------------------------------------------------------------

    def on_exception(self, exception: BaseException) -> None:
        if isinstance(exception, KeyboardInterrupt) and self.zero is not None and self.is_global_zero:
            say(stopped(self.zero), always=True)
        self._failed = True  # other ranks may be elsewhere: nothing collective from here on

    def teardown(self) -> None:
        zero, self.zero, self._folder, self._weights = self.zero, None, None, None
        module, plugin = self._lightning_module, self.precision_plugin
        plugin.optimizer = None
        if self._connector is not None:
            vars(self._connector).pop("dump_checkpoint", None)
            self._connector = None
        if zero is not None and not zero.closed:
            try:
                if not zero.integrity.interrupted and not (self._failed and zero.comm.world > 1):
                    self._make_whole(zero, plugin.master_dtype)
            except Exception as error:
                if not self._failed:
                    raise
                # the error that ended the run is the one to hear of
                rank_log.error("after the error that ended the run the model could not be made whole: %s: %s", type(error).__name__, error)
            finally:
                zero.close()
            if any(is_released(param) for param in zero.model.parameters()):
                self._lightning_module = None  # Lightning would move it to the CPU, and there is nothing to move
        try:
            super().teardown()
        finally:
            self._lightning_module = module

    def _make_whole(self, zero: ZeroOptimizer, dtype: str | None) -> None:
        """Close an optimizer and leave its model plain, in host memory, on every rank, if there is room for it or that is asked for."""
        params = list(zero.model.parameters())
        nbytes = sum(param.numel() * (4 if dtype == "fp32" else param.element_size()) for param in params) * ranks_here(zero.comm.world)
        free = host_memory()[1]
        (without_room,) = zero.comm.ranks_with([self.gather_at_end is None and nbytes > free // 2])
        if self.gather_at_end is False or without_room:
            zero.close()
            if self.gather_at_end is None:
                log.warning(
                    "parameters %s: the whole model would take %s of host memory, of which %s are free. Checkpoints saved while training have "
                    "it (python -m zk export); gather_at_end=True tries all the same, and False says nothing",
                    "stay partitioned and can be read no more" if any(map(is_released, params)) else "stay as they were trained",
                    readable(nbytes),
                    readable(free),
                )
            return
        values = zero.consolidated_state_dict(dtype)
        zero.close()
        for name, param in zero.model.named_parameters():
            unmark(param)
            param.grad = None
            param.data = values[name]
        for name, buffer in zero.model.named_buffers():
            buffer.data = buffer.data.to(self._buffer_dtypes.get(name, buffer.dtype))
