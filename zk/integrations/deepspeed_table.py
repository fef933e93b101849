"""In: nothing. Out: for every key of DeepSpeed's JSON, what zk makes of it and why; the same as a page, ``docs/deepspeed_config.md``.

Keys and defaults are those of DeepSpeed 0.19.8, and older ones that are still found in configs.
``make docs`` writes the page.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping
from typing import Any


class Kind(enum.Enum):
    """What happens to a key."""

    HONOURED = "means the same here"
    TRANSLATED = "becomes another setting"
    ACCEPTED = "has no counterpart and changes no result: named in one warning"
    REFUSED = "would change results, or is not there: an error with a remedy"


@dataclasses.dataclass(frozen=True, slots=True)
class Key:
    """One key. A section without rows of its own (``autotuning``) is a key too; it is on unless it says ``"enabled": false``."""

    name: str
    kind: Kind
    becomes: str  # refused: what to do instead
    why: str
    off: tuple[Any, ...] = (False, None)  # values that ask for nothing: neither warned of nor refused
    example: Any = True  # a value that asks for something

    def is_off(self, value: Any) -> bool:
        if isinstance(value, Mapping):
            return not value or value.get("enabled") is False
        return any(value is known or (value == known and type(value) is type(known)) for known in self.off)


def _same(section: str, kind: Kind, becomes: str, why: str, names: str, *, off: tuple[Any, ...] = (None,), example: Any = 1) -> list[Key]:
    """Keys of one section that share a row's text."""
    return [Key(f"{section}.{name}" if section else name, kind, becomes, why, off, example) for name in names.split()]


_H, _T, _A, _R = Kind.HONOURED, Kind.TRANSLATED, Kind.ACCEPTED, Kind.REFUSED
_ON = (True, None)  # off values of what zk always does
_ZERO, _PARAM, _STATE = "zero_optimization", "zero_optimization.offload_param", "zero_optimization.offload_optimizer"
_BLOCKS = "a unit (a block of the model) is what is reduced, gathered and moved at once; `units=` sets it"
_IO = "`zk.offload.nvme` reads and writes with its own threads and block sizes"
_OWN_BUFFERS = "buffers are sized by zk; `host_budget=` says how much host memory may be used"
_DS_API = "it sets up `deepspeed.checkpointing`, which is not here: use `torch.utils.checkpoint`, and `zk.offload_activations()`"
_MONITOR = "log `engine.optimizer.metrics()` where you like"
_PROFILE = "`zk.timeline.Recorder()` shows what a step spends its time on"
_ONEBIT = "an option of 1-bit Adam, LAMB, Muon or Lion"
_ADAM_SGD = "use Adam, AdamW or SGD"
_NOT_HERE = "remove it"

_ROWS: list[Key] = [
    # batch sizes
    Key("train_batch_size", _H, "checked: micro batch x accumulation x ranks", "the third of the three is computed", (None,), 8),
    Key("train_micro_batch_size_per_gpu", _H, "`engine.train_micro_batch_size_per_gpu()`, batch size of the loader", "", (None,), 4),
    Key("gradient_accumulation_steps", _H, "`engine.backward` divides by it, `engine.step` steps at every so many-th call", "", (None,), 2),
    Key(
        "managed_gradient_accumulation",
        _R,
        "use zk.ZeroOptimizer, where each step() is the boundary",
        "`engine.step` counts calls itself",
        _ON,
        False,
    ),
    Key("gradient_clipping", _H, "`clip_grad_norm`", "absent: 1.0, as in DeepSpeed 0.19; 0: none", (None,), 0.5),
    Key("dataloader_drop_last", _H, "`drop_last` of the loader", ""),
    # precision
    Key("bf16.enabled", _T, '`dtype="bf16"`', 'masters stay fp32; `"auto"`: whether the model is bf16'),
    Key("bf16.check_grad_overflow", _A, "", "a step with NaN or inf is always skipped", _ON, False),
    Key("bf16.immediate_grad_update", _A, "", "gradients leave for their tier as backward makes them"),
    Key("bf16.bf16_master_weights_and_grads", _R, "remove it: a split fp32 master costs only 2 bytes more", "masters in bf16 lose small updates"),
    Key("bf16.bf16_optimizer_states", _R, 'remove it, and pass state_dtype="bf16" to zk.initialize', "moments in bf16 change results"),
    Key("fp16.enabled", _T, '`dtype="fp16"`', 'with a loss scale; `"auto"`: whether the model is fp16'),
    Key("fp16.auto_cast", _A, "", "floating point inputs of the model are always cast"),
    Key("fp16.loss_scale", _T, "`loss_scale`", "0 is dynamic", (None,), 128),
    Key("fp16.initial_scale_power", _T, "`zk.DynamicLossScale.init`, 2 to this power", "", (None,), 8),
    Key("fp16.loss_scale_window", _T, "`zk.DynamicLossScale.window`", "DeepSpeed doubles one step later, first and after an overflow", (None,), 50),
    Key("fp16.hysteresis", _T, "`zk.DynamicLossScale.hysteresis`", "", (None,), 1),
    Key("fp16.min_loss_scale", _T, "`zk.DynamicLossScale.minimum`", "at the minimum zk skips steps, DeepSpeed ends the run", (None,), 2),
    Key("fp16.consecutive_hysteresis", _R, "remove it", "overflows are counted until the scale grows, as DeepSpeed does by default"),
    Key("fp16.fp16_master_weights_and_grads", _R, "remove it", "masters in fp16 lose small updates"),
    Key(
        "torch_autocast",
        _R,
        'use "bf16": {"enabled": true}',
        "zk computes in one dtype with fp32 masters; autocast is not here",
        example={"enabled": True},
    ),
    Key("amp", _R, 'use "bf16" or "fp16"', "Apex is not supported", example={"enabled": True}),
    Key("communication_data_type", _T, "must be the dtype of training", "gradients travel in it, and are summed in fp32", (None,), "fp32"),
    Key("seq_parallel_communication_data_type", _A, "", "there is no sequence parallelism", (None,), "fp32"),
    Key("fp32_allreduce", _R, _NOT_HERE, "gradients travel in the dtype of training, and are summed in fp32"),
    Key(
        "data_types.grad_accum_dtype", _R, 'write "fp32", or remove it', "gradients are always accumulated in fp32", (None, "fp32", "float32"), "bf16"
    ),
    Key("data_types.param_dtype", _R, _NOT_HERE, '"bf16" and "fp16" set the dtype', (None,), "bf16"),
    Key("data_types.buffer_dtype", _T, "the dtype of training: `cast_buffers=True`", "buffers keep their own by default", (None,), "bf16"),
    Key("data_types.keep_in_fp32_modules", _T, "`keep_dtype`", "", (None,), ["rotary"]),
    # gradients over ranks
    Key("prescale_gradients", _A, "", "the mean over ranks is summed in fp32, which does not overflow"),
    Key("gradient_predivide_factor", _A, "", "as prescale_gradients", (None, 1, 1.0), 2.0),
    Key(
        "gradient_allreduce_op",
        _R,
        'write "mean", and multiply the loss by the number of ranks',
        "gradients are averaged over ranks",
        (None, "mean"),
        "sum",
    ),
    Key("sparse_gradients", _R, "remove it, and sparse=True of embeddings", "gradients are flattened, and so dense"),
    Key("disable_allgather", _A, "", _BLOCKS),
    # ZeRO
    Key(f"{_ZERO}.stage", _H, "`stage`", "absent: 0", (None,), 2),
    Key(f"{_ZERO}.overlap_comm", _T, "`overlap`", "absent: true, as it changes no result; false waits for every copy too", (None,), False),
    Key(
        f"{_ZERO}.stage3_prefetch_bucket_size",
        _T,
        "0: `prefetch=0`; more: `prefetch=1`, one unit",
        "counted in units; `prefetch=` of zk.initialize sets another number",
        (None,),
        0,
    ),
    Key(f"{_ZERO}.load_from_fp32_weights", _R, _NOT_HERE, "masters begin as the model's fp32 values", _ON, False),
    Key(
        f"{_ZERO}.zenflow",
        _R,
        "remove it; overlap_step=True hides the update and changes no bit",
        "it updates with stale gradients",
        example={"topk_ratio": 0.1},
    ),
    *_same(
        _ZERO,
        _R,
        _NOT_HERE,
        "quantized communication changes results",
        "zero_quantized_weights zero_quantized_nontrainable_weights zero_quantized_gradients",
        off=(False, None),
        example=True,
    ),
    Key(f"{_ZERO}.zeropp_loco_param", _R, _NOT_HERE, "quantized communication changes results", (None,), {"err_beta": 0.8}),
    Key(f"{_ZERO}.save_muon_momentum_buffer_in_memory", _R, _ADAM_SGD, "Muon needs whole matrices, and a rank holds slices"),
    *_same(
        _ZERO, _A, "", _BLOCKS, "contiguous_gradients reduce_scatter allgather_partitions use_multi_rank_bucket_allreduce", off=_ON, example=False
    ),
    *_same(_ZERO, _A, "", _BLOCKS, "reduce_bucket_size allgather_bucket_size", example=500_000_000),
    *_same(_ZERO, _A, "", "state is updated in pieces of 2M elements", "sub_group_size", example=1e9),
    *_same(
        _ZERO,
        _A,
        "",
        "a unit is gathered, used and released; small parameters travel with their block",
        "stage3_param_persistence_threshold stage3_model_persistence_threshold stage3_max_live_parameters stage3_max_reuse_distance "
        "stage3_module_granularity_threshold",
        example=100_000,
    ),
    *_same(_ZERO, _A, "", _BLOCKS, "stage3_use_all_reduce_for_fetch_params stage3_allgather_sequential leaf_module", off=(False, None), example=True),
    *_same(
        _ZERO,
        _A,
        "",
        "`engine.optimizer.consolidated_state_dict()`, or `python -m zk export --dtype bf16` after `save_checkpoint`",
        "stage3_gather_16bit_weights_on_model_save stage3_gather_fp16_weights_on_model_save",
        off=(False, None),
        example=True,
    ),
    Key(f"{_ZERO}.compute_grad_norm", _A, "", "the norm is taken as gradients pass, for free", _ON, False),
    Key(f"{_ZERO}.elastic_checkpoint", _A, "", "checkpoints load at any number of ranks"),
    Key(f"{_ZERO}.ignore_unused_parameters", _A, "", "parameters without gradient are left as they are", _ON, False),
    *_same(
        _ZERO,
        _A,
        "",
        "about how DeepSpeed works inside",
        "legacy_stage1 round_robin_gradients parameter_alignment pipeline_loading_checkpoint log_trace_cache_warnings enable_sanity_checks",
        off=(False, None),
        example=True,
    ),
    *_same(_ZERO, _A, "", "about how DeepSpeed works inside", "memory_efficient_linear override_module_apply", off=_ON, example=False),
    Key(f"{_ZERO}.zero_hpz_partition_size", _A, "", "parameters are partitioned over all ranks, in one group", (None, 0, 1), 8),
    Key(f"{_ZERO}.mics_shard_size", _A, "", "parameters are partitioned over all ranks, in one group", (None, -1), 8),
    Key(f"{_ZERO}.mics_hierarchical_params_gather", _A, "", "parameters are partitioned over all ranks, in one group"),
    # offload
    Key(f"{_STATE}.device", _T, "`optimizer_tier`: none, cpu, nvme become device, host, nvme", "", (None,), "cpu"),
    Key(f"{_STATE}.nvme_path", _T, "`nvme_path`", "only where the device is nvme; two different paths are striped over", (None,), "/scratch"),
    Key(
        f"{_STATE}.ratio",
        _A,
        "",
        'all of the state is offloaded; optimizer_tier="auto" with `device_budget=` keeps a part on the device',
        (None, 1, 1.0),
        0.5,
    ),
    *_same(_STATE, _A, "", _OWN_BUFFERS, "buffer_count buffer_size max_in_cpu", example=4),
    *_same(_STATE, _A, "", "copies go through page-locked memory where there is a device to copy to", "pin_memory", off=_ON, example=False),
    *_same(_STATE, _A, "", "reading, updating and writing always overlap", "pipeline_read pipeline_write pipeline", off=_ON, example=False),
    *_same(_STATE, _A, "", "about how DeepSpeed works inside", "fast_init", off=(False, None), example=True),
    *_same(_STATE, _A, "", "`overlap_step=True` hides the update behind compute", "super_offload", off=(False, None), example=True),
    *_same(_STATE, _A, "", "`num_threads=` sets the threads of the update", "cpuadam_cores_perc", example=0.8),
    Key(f"{_PARAM}.device", _T, "`param_tier`: none, cpu, nvme become device, host, nvme", "needs stage 3", (None,), "cpu"),
    Key(f"{_PARAM}.nvme_path", _T, "`nvme_path`", "only where the device is nvme; two different paths are striped over", (None,), "/scratch"),
    *_same(_PARAM, _A, "", _OWN_BUFFERS, "buffer_count buffer_size max_in_cpu", example=5),
    *_same(_PARAM, _A, "", "copies go through page-locked memory where there is a device to copy to", "pin_memory", off=_ON, example=False),
    Key(f"{_ZERO}.cpu_offload", _T, '`optimizer_tier="host"`', "the old name of offload_optimizer"),
    Key(f"{_ZERO}.cpu_offload_param", _T, '`param_tier="host"`', "the old name of offload_param"),
    Key(f"{_ZERO}.cpu_offload_use_pin_memory", _A, "", "copies go through page-locked memory where there is a device to copy to", _ON, False),
    *_same("aio", _A, "", _IO, "block_size queue_depth thread_count intra_op_parallelism", example=8),
    *_same("aio", _A, "", _IO, "single_submit overlap_events use_gds", off=(False, None), example=True),
    # optimizer, scheduler
    Key(
        "optimizer.type",
        _T,
        "`torch.optim.AdamW` (Adam too, unless adam_w_mode is false), `Adam`, `SGD`",
        "others are refused: a rank holds slices",
        (None,),
        "Adam",
    ),
    Key("optimizer.params.lr", _H, "`lr`", "", (None,), 0.01),
    Key("optimizer.params.betas", _H, "`betas`", "", (None,), [0.8, 0.9]),
    Key("optimizer.params.eps", _H, "`eps`", "", (None,), 1e-6),
    Key("optimizer.params.weight_decay", _H, "`weight_decay`", "absent: 0, as in DeepSpeed; 0.01 for AdamW with torch_adam", (None,), 0.1),
    Key("optimizer.params.adam_w_mode", _T, "false: `torch.optim.Adam`", "", _ON, False),
    Key("optimizer.params.amsgrad", _H, "`amsgrad`", ""),
    *_same("optimizer.params", _H, "the same of `torch.optim.SGD`", "", "momentum dampening", example=0.5),
    *_same("optimizer.params", _H, "the same of `torch.optim.SGD`", "", "nesterov", off=(False, None), example=True),
    Key("optimizer.params.torch_adam", _T, "sets the default of weight_decay", "the update is zk's in any case"),
    *_same("optimizer.params", _A, "", "the update is zk's in any case", "foreach fused capturable set_grad_none", off=(False, None), example=True),
    Key(
        "optimizer.params.fp32_optimizer_states",
        _R,
        'remove it, and pass state_dtype="bf16" to zk.initialize',
        "moments in bf16 change results",
        _ON,
        False,
    ),
    Key("optimizer.params.bias_correction", _R, _NOT_HERE, "Adam's update always has it", _ON, False),
    Key("optimizer.params.max_grad_norm", _R, 'use "gradient_clipping"', "no option of an optimizer, in DeepSpeed neither", (None, 0, 0.0), 1.0),
    *_same(
        "optimizer.params",
        _R,
        _ADAM_SGD,
        _ONEBIT,
        "freeze_step cuda_aware comm_backend_name coeff_beta factor_max factor_min factor_threshold max_coeff min_coeff var_freeze_step "
        "var_update_scaler local_step_scaler local_step_clipper ns_method muon_lr adam_lr",
    ),
    Key("optimizer.legacy_fusion", _A, "", "the update is zk's in any case"),
    Key("scheduler.type", _H, "the same name in `zk.integrations.deepspeed_schedules`", "a torch scheduler", (None,), "WarmupLR"),
    *_same(
        "scheduler.params",
        _H,
        "the same value at every step",
        "",
        "warmup_min_lr warmup_max_lr warmup_num_steps warmup_type total_num_steps warmup_min_ratio cos_min_ratio lr_range_test_min_lr "
        "lr_range_test_step_size lr_range_test_step_rate lr_range_test_staircase cycle_min_lr cycle_max_lr decay_lr_rate cycle_first_step_size "
        "cycle_second_step_size cycle_first_stair_count cycle_second_stair_count decay_step_size cycle_momentum cycle_min_mom cycle_max_mom "
        "decay_mom_rate",
    ),
    Key("scheduler.params.last_batch_iteration", _R, "use engine.load_checkpoint", "where a run is comes from its checkpoint", (None, -1), 10),
    Key("zero_allow_untested_optimizer", _A, "", "optimizers that cannot be partitioned are refused by name"),
    Key("zero_force_ds_cpu_optimizer", _A, "", "any torch Adam, AdamW or SGD is updated by zk's CPU update"),
    # activations
    *_same(
        "activation_checkpointing",
        _A,
        "",
        _DS_API,
        "partition_activations contiguous_memory_optimization synchronize_checkpoint_boundary profile cpu_checkpointing number_checkpoints",
        off=(False, None),
        example=True,
    ),
    # checkpoints
    Key("checkpoint.tag_validation", _A, "", "all ranks are checked to save the same", (None,), "Warn"),
    Key("checkpoint.load_universal", _A, "", "checkpoints load at any number of ranks, stage and tier"),
    Key("checkpoint.use_node_local_storage", _R, "save where all ranks see it", "each rank reads what others wrote, to load at any number of ranks"),
    Key("checkpoint.parallel_write", _A, "", "each rank writes what it holds", example={"pipeline_stage": True}),
    Key("checkpoint.checkpoint_serialization", _A, "", "safetensors, written as they come", _ON, False),
    Key(
        "checkpoint.writer",
        _A,
        "",
        "safetensors, written as they come; `optimizer.save_checkpoint(async_save=True)` writes beside training",
        (None,),
        {"type": "fast"},
    ),
    Key("datastates_ckpt", _A, "", "`optimizer.save_checkpoint(async_save=True)` writes beside training", example={"host_cache_size": 16}),
    Key("nebula", _A, "", "`optimizer.save_checkpoint(async_save=True)` writes beside training", example={"enabled": True}),
    # what is printed, measured and logged
    *_same("", _A, "", _PROFILE, "wall_clock_breakdown", off=(False, None), example=True),
    *_same("", _A, "", "`engine.optimizer.metrics()` has the bytes on each tier", "memory_breakdown", off=(False, None), example=True),
    *_same("", _A, "", "zk prints warnings only, through the logger named zk", "steps_per_print log_level", example=10),
    *_same("", _A, "", "zk prints warnings only, through the logger named zk", "dump_state", off=(False, None), example=True),
    *_same("", _A, "", "about how DeepSpeed works inside", "disable_python_gc graph_harvesting", off=(False, None), example=True),
    *_same("", _A, "", "DeepSpeed only warns of odd sizes", "vocabulary_size", example=50257),
    *_same("flops_profiler", _A, "", _PROFILE, "enabled", off=(False, None), example=True),
    *_same("flops_profiler", _A, "", _PROFILE, "recompute_fwd_factor profile_step module_depth top_modules detailed output_file"),
    *_same("tensorboard", _A, "", _MONITOR, "enabled", off=(False, None), example=True),
    *_same("tensorboard", _A, "", _MONITOR, "output_path job_name", example="runs"),
    *_same("wandb", _A, "", _MONITOR, "enabled", off=(False, None), example=True),
    *_same("wandb", _A, "", _MONITOR, "group team project", example="name"),
    *_same("csv_monitor", _A, "", _MONITOR, "enabled", off=(False, None), example=True),
    *_same("csv_monitor", _A, "", _MONITOR, "output_path job_name", example="runs"),
    *_same("comet", _A, "", _MONITOR, "enabled", off=(False, None), example=True),
    *_same("comet", _A, "", _MONITOR, "samples_log_interval project workspace api_key experiment_name experiment_key online mode", example="name"),
    *_same("comms_logger", _A, "", _PROFILE, "enabled", off=(False, None), example=True),
    *_same("comms_logger", _A, "", _PROFILE, "verbose prof_all debug prof_ops", example=True),
    *_same("timers", _A, "", _PROFILE, "throughput", off=(None,), example={"enabled": True}),
    # what zk is not
    Key("autotuning", _R, _NOT_HERE, "zk does not search for settings", example={"enabled": True}),
    Key("compression_training", _R, _NOT_HERE, "it quantizes and prunes the model", example={"weight_quantization": {}}),
    Key("quantize_training", _R, _NOT_HERE, "it quantizes the model", example={"enabled": True}),
    Key("weight_quantization", _R, _NOT_HERE, "it quantizes the model", example={"quantized_initialization": {}}),
    Key("eigenvalue", _R, _NOT_HERE, "it steers quantization", example={"enabled": True}),
    Key("sparse_attention", _R, "use torch's flex_attention in the model", "it replaces the model's attention", example={"mode": "fixed"}),
    Key("data_efficiency", _R, "choose the data in your own loader", "it changes what is trained on", example={"enabled": True}),
    Key("curriculum_learning", _R, "choose the data in your own loader", "it changes what is trained on", example={"enabled": True}),
    Key("progressive_layer_drop", _R, "drop layers in the model", "it changes what is computed", example={"enabled": True}),
    Key(
        "elasticity",
        _R,
        "write the batch sizes",
        "the number of ranks is given when a run starts; a checkpoint loads at any",
        example={"enabled": True},
    ),
    Key(
        "hybrid_engine",
        _R,
        "generate with a plain copy of the model, made within zk.gather",
        "there is no inference engine",
        example={"enabled": True},
    ),
    Key("pipeline", _R, _NOT_HERE, "there is no pipeline parallelism", example={"stages": 2}),
    Key("tensor_parallel", _R, "remove it; zk.tile_linears cuts large layers", "there is no tensor parallelism", example={"autotp_size": 2}),
    Key("expert_parallel", _R, _NOT_HERE, "there is no expert parallelism", example={"enabled": True}),
    Key("use_data_before_expert_parallelism", _R, _NOT_HERE, "there is no expert parallelism"),
    Key("sequence_parallel_size", _R, _NOT_HERE, "there is no sequence parallelism", (None, 1), 2),
    Key("data_parallel_size", _R, "remove it, and pass process_group= to zk.initialize", "all ranks of the group are data parallel", (None,), 2),
    Key(
        "compile",
        _R,
        "remove it, and call torch.compile on the model's blocks",
        "DeepCompile rewrites the graph around DeepSpeed's engine",
        example={"deepcompile": True},
    ),
]

KEYS: dict[str, Key] = {key.name: key for key in _ROWS}

# other spellings, of keys and of sections
ALIASES: dict[str, str] = {
    "bfloat16": "bf16",
    f"{_ZERO}.cpu_offload_params": f"{_ZERO}.cpu_offload_param",
    **{
        f"{_ZERO}.{name}": f"{_ZERO}.stage3_{name}"
        for name in (
            "prefetch_bucket_size",
            "param_persistence_threshold",
            "model_persistence_threshold",
            "max_live_parameters",
            "max_reuse_distance",
            "gather_16bit_weights_on_model_save",
            "module_granularity_threshold",
            "use_all_reduce_for_fetch_params",
            "allgather_sequential",
        )
    },
}

# names that have keys below them
SECTIONS: set[str] = {name.rsplit(".", depth)[0] for name in KEYS for depth in range(1, name.count(".") + 1)}


def markdown() -> str:
    """The table as a page."""
    lines = [
        "# DeepSpeed's JSON in zk",
        "",
        "What `zk.initialize` and `zk.ZeroConfig.from_deepspeed` make of each key. Written by `make docs` from the table in the code;",
        "a test checks that it is current. Keys and defaults are those of DeepSpeed 0.19.8, and older ones still found.",
        "",
        *(f"- **{kind.name.lower()}**: {kind.value}." for kind in Kind),
        "",
        "A key that is not here is an error that names the closest one. Values that ask for nothing (false, null, a section with",
        '`"enabled": false`) are neither warned of nor refused. `"auto"` is taken from `auto={"optimizer.params.lr": 3e-4}`, from the other',
        "settings (batch sizes, the learning rate that warmup ends at) or from the model (its dtype); where there is nothing to take it from, it",
        "is an error.",
        "",
        "| key | | becomes, or what to do instead | why |",
        "|---|---|---|---|",
        *(f"| `{key.name}` | {key.kind.name.lower()} | {key.becomes} | {key.why} |" for key in KEYS.values()),
        "",
        "Other spellings: " + ", ".join(f"`{old}` is `{new}`" for old, new in ALIASES.items()) + ".",
    ]
    return "\n".join(lines)
