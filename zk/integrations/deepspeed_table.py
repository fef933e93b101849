"""The table of DeepSpeed's JSON: for every key, what becomes of it here and why. ``make docs`` writes it as docs/deepspeed_config.md.

Keys and defaults are those of DeepSpeed 0.19.8, and older ones that are still found in configs.
"""

from __future__ import annotations

import dataclasses
import enum
import json
from collections.abc import Iterator, Mapping
from typing import Any


class Kind(enum.Enum):
    """The four things that can happen to a key."""

    HONOURED = "means the same here"
    TRANSLATED = "becomes another setting"
    ACCEPTED = "has no counterpart and changes no result: named in one warning"
    REFUSED = "would change results, or is not there: an error with a remedy"


# [section], then rows: the kind's first letter, keys, what they become (refused: the remedy; accepted: left out), and why.
# key=value, value: what asks for nothing. Without it that is false. A section of which this has no rows (autotuning) is a key.
ROWS = """
H train_batch_size | checked: micro batch x accumulation x ranks | the third of the three is computed
H train_micro_batch_size_per_gpu | `engine.train_micro_batch_size_per_gpu()`, batch size of the loader |
H gradient_accumulation_steps | `engine.backward` divides by it, `engine.step` steps at every so many-th call |
R managed_gradient_accumulation=true | use zk.ZeroOptimizer, where each step() is the boundary | `engine.step` counts calls itself
H gradient_clipping | `clip_grad_norm` | absent: 1.0, as in DeepSpeed 0.19; 0: none
H dataloader_drop_last | `drop_last` of the loader |
[bf16]
T enabled | `dtype="bf16"` | masters stay fp32; `"auto"`: whether the model is bf16
A check_grad_overflow=true | a step with NaN or inf is always skipped
A immediate_grad_update | gradients leave for their tier as backward makes them
R bf16_master_weights_and_grads | remove it: a split fp32 master costs only 2 bytes more | masters in bf16 lose small updates
R bf16_optimizer_states | remove it, and pass state_dtype="bf16" to zk.initialize | moments in bf16 change results
[fp16]
T enabled | `dtype="fp16"` | with a loss scale; `"auto"`: whether the model is fp16
A auto_cast | floating point inputs of the model are always cast
T loss_scale | `loss_scale` | 0 is dynamic
T initial_scale_power | `zk.DynamicLossScale.init`, 2 to this power |
T loss_scale_window | `zk.DynamicLossScale.window` | DeepSpeed doubles one step later, first and after an overflow
T hysteresis | `zk.DynamicLossScale.hysteresis` |
T min_loss_scale | `zk.DynamicLossScale.minimum` | at the minimum zk skips steps, DeepSpeed ends the run
R consecutive_hysteresis | remove it | overflows are counted until the scale grows, as DeepSpeed does by default
R fp16_master_weights_and_grads | remove it | masters in fp16 lose small updates
[]
R torch_autocast | use "bf16": {"enabled": true} | zk computes in one dtype with fp32 masters; autocast is not here
R amp | use "bf16" or "fp16" | Apex is not supported
T communication_data_type | must be the dtype of training | gradients travel in it, and are summed in fp32
A seq_parallel_communication_data_type | there is no sequence parallelism
R fp32_allreduce | remove it | gradients travel in the dtype of training, and are summed in fp32
[data_types]
T grad_accum_dtype | `grad_accum_dtype` | absent: fp32
R param_dtype | remove it | "bf16" and "fp16" set the dtype
T buffer_dtype | the dtype of training: `cast_buffers=True` | buffers keep their own by default
T keep_in_fp32_modules | `keep_dtype` |
[]
A prescale_gradients | the mean over ranks is summed in fp32, which does not overflow
A gradient_predivide_factor=1 | as prescale_gradients
R gradient_allreduce_op="mean" | write "mean", and multiply the loss by the number of ranks | gradients are averaged over ranks
R sparse_gradients | remove it, and sparse=True of embeddings | gradients are flattened, and so dense
A disable_allgather | a unit (a block of the model) is what is reduced, gathered and moved at once; `units=` sets it
[zero_optimization]
H stage | `stage` | absent: 0
T overlap_comm=true | `overlap` | absent: true, as it changes no result; false waits for every copy too
T stage3_prefetch_bucket_size | 0: `prefetch=0`; more: `prefetch=1`, one unit | counted in units; `prefetch=` of zk.initialize sets another number
R load_from_fp32_weights=true | remove it | masters begin as the model's fp32 values
R zenflow | remove it; overlap_step= hides the update and changes no bit, delay_update= is one step late | it updates with stale gradients
R zero_quantized_weights zero_quantized_nontrainable_weights zero_quantized_gradients zeropp_loco_param \
    | remove it | quantized communication changes results
R save_muon_momentum_buffer_in_memory | use Adam, AdamW or SGD | Muon needs whole matrices, and a rank holds slices
A contiguous_gradients=true reduce_scatter=true allgather_partitions=true use_multi_rank_bucket_allreduce=true reduce_bucket_size \
    allgather_bucket_size | a unit (a block of the model) is what is reduced, gathered and moved at once; `units=` sets it
A sub_group_size | state is updated in pieces of 2M elements
A stage3_param_persistence_threshold stage3_model_persistence_threshold stage3_max_live_parameters stage3_max_reuse_distance \
    stage3_module_granularity_threshold | a unit is gathered, used and released; small parameters travel with their block
A stage3_use_all_reduce_for_fetch_params stage3_allgather_sequential leaf_module \
    | a unit (a block of the model) is what is reduced, gathered and moved at once; `units=` sets it
A stage3_gather_16bit_weights_on_model_save stage3_gather_fp16_weights_on_model_save \
    | `engine.optimizer.consolidated_state_dict()`, or `python -m zk export --dtype bf16` after `save_checkpoint`
A compute_grad_norm=true | the norm is taken as gradients pass, for free
A elastic_checkpoint | checkpoints load at any number of ranks
A ignore_unused_parameters=true | parameters without gradient are left as they are
A legacy_stage1 round_robin_gradients parameter_alignment pipeline_loading_checkpoint log_trace_cache_warnings enable_sanity_checks \
    memory_efficient_linear=true override_module_apply=true | about how DeepSpeed works inside
A zero_hpz_partition_size=0,1 mics_shard_size=-1 mics_hierarchical_params_gather \
    | results are the same; process_group= a mesh of two dimensions partitions within machines
[zero_optimization.offload_optimizer]
T device | `optimizer_tier`: none, cpu, nvme become device, host, nvme |
T nvme_path | `nvme_path` | only where the device is nvme; two different paths are striped over
A ratio=1 | all of the state is offloaded; optimizer_tier="auto" with `device_budget=` keeps a part on the device
A buffer_count buffer_size max_in_cpu | buffers are sized by zk; `host_budget=` says how much host memory may be used
A pin_memory=true | copies go through page-locked memory where there is a device to copy to
A pipeline_read=true pipeline_write=true pipeline=true | reading, updating and writing always overlap
A fast_init | about how DeepSpeed works inside
A super_offload | `overlap_step=True` hides the update behind compute
A cpuadam_cores_perc | `num_threads=` sets the threads of the update
[zero_optimization.offload_param]
T device | `param_tier`: none, cpu, nvme become device, host, nvme | needs stage 3
T nvme_path | `nvme_path` | only where the device is nvme; two different paths are striped over
A buffer_count buffer_size max_in_cpu | buffers are sized by zk; `host_budget=` says how much host memory may be used
A pin_memory=true | copies go through page-locked memory where there is a device to copy to
[zero_optimization]
T cpu_offload | `optimizer_tier="host"` | the old name of offload_optimizer
T cpu_offload_param | `param_tier="host"` | the old name of offload_param
A cpu_offload_use_pin_memory=true | copies go through page-locked memory where there is a device to copy to
[aio]
A block_size queue_depth thread_count intra_op_parallelism single_submit overlap_events use_gds \
    | `zk.offload.nvme` reads and writes with its own threads and block sizes
[optimizer]
T type | `torch.optim.AdamW` (Adam too, unless adam_w_mode is false), `Adam`, `SGD` | others are refused: a rank holds slices
[optimizer.params]
H lr | `lr` |
H betas | `betas` |
H eps | `eps` |
H weight_decay | `weight_decay` | absent: 0, as in DeepSpeed; 0.01 for AdamW with torch_adam
T adam_w_mode=true | false: `torch.optim.Adam` |
H amsgrad | `amsgrad` |
H momentum dampening nesterov | the same of `torch.optim.SGD` |
T torch_adam | sets the default of weight_decay | the update is zk's in any case
A foreach fused capturable set_grad_none | the update is zk's in any case
R fp32_optimizer_states=true | remove it, and pass state_dtype="bf16" to zk.initialize | moments in bf16 change results
R bias_correction=true | remove it | Adam's update always has it
R max_grad_norm=0 | use "gradient_clipping" | no option of an optimizer, in DeepSpeed neither
R freeze_step cuda_aware comm_backend_name coeff_beta factor_max factor_min factor_threshold max_coeff min_coeff var_freeze_step \
    var_update_scaler local_step_scaler local_step_clipper ns_method muon_lr adam_lr \
    | use Adam, AdamW or SGD | an option of 1-bit Adam, LAMB, Muon or Lion
[optimizer]
A legacy_fusion | the update is zk's in any case
[scheduler]
H type | the same name in `zk.integrations.deepspeed_schedules` | a torch scheduler
[scheduler.params]
H warmup_min_lr warmup_max_lr warmup_num_steps warmup_type total_num_steps warmup_min_ratio cos_min_ratio \
    lr_range_test_min_lr lr_range_test_step_size lr_range_test_step_rate lr_range_test_staircase \
    cycle_min_lr cycle_max_lr decay_lr_rate cycle_first_step_size cycle_second_step_size cycle_first_stair_count cycle_second_stair_count \
    decay_step_size cycle_momentum cycle_min_mom cycle_max_mom decay_mom_rate | the same value at every step |
R last_batch_iteration=-1 | use engine.load_checkpoint | where a run is comes from its checkpoint
[]
A zero_allow_untested_optimizer | optimizers that cannot be partitioned are refused by name
A zero_force_ds_cpu_optimizer | any torch Adam, AdamW or SGD is updated by zk's CPU update
[activation_checkpointing]
A partition_activations contiguous_memory_optimization synchronize_checkpoint_boundary profile cpu_checkpointing number_checkpoints \
    | it sets up `deepspeed.checkpointing`, which is not here: use `torch.utils.checkpoint`, and `zk.offload_activations()`
[checkpoint]
A tag_validation | all ranks are checked to save the same
A load_universal | checkpoints load at any number of ranks, stage and tier
R use_node_local_storage | save where all ranks see it | each rank reads what others wrote, to load at any number of ranks
A parallel_write | each rank writes what it holds
A checkpoint_serialization=true | safetensors, written as they come
A writer | safetensors, written as they come; `optimizer.save_checkpoint(async_save=True)` writes in the background
[]
A datastates_ckpt nebula | `optimizer.save_checkpoint(async_save=True)` writes in the background
H wall_clock_breakdown | ms of forward, backward and step, printed | on average, at every `steps_per_print`-th step, or every tenth
A memory_breakdown | `engine.optimizer.metrics()` has the bytes on each tier
H steps_per_print | a line at every so many-th step, with the rates since the last one | absent: none
A log_level dump_state | zk prints warnings only, through the logger named zk
A disable_python_gc graph_harvesting | about how DeepSpeed works inside
A vocabulary_size | DeepSpeed only warns of odd sizes
[flops_profiler]
H enabled profile_step module_depth top_modules detailed output_file | operations of forward, backward and modules | `torch.utils.flop_counter` counts
A recompute_fwd_factor | forward that is computed again in backward is counted there
[tensorboard]
H enabled output_path job_name | events in `output_path/job_name`, with DeepSpeed's labels | zk's rates are beside them
[wandb]
H enabled group team project | the same to wandb | with `team` as its entity
[csv_monitor]
H enabled output_path job_name | the same in `output_path/job_name`, a file for each label |
[comet]
A enabled samples_log_interval project workspace api_key experiment_name experiment_key online mode \
    | log `engine.optimizer.metrics()` where you like
[comms_logger]
A enabled verbose prof_all debug prof_ops | `zk.core.timeline.Recorder()` shows what a step spends its time on
[timers]
A throughput | `zk.core.timeline.Recorder()` shows what a step spends its time on
[]
R autotuning | remove it | zk does not search for settings
R compression_training | remove it | it quantizes and prunes the model
R quantize_training weight_quantization | remove it | it quantizes the model
R eigenvalue | remove it | it steers quantization
R sparse_attention | use torch's flex_attention in the model | it replaces the model's attention
R data_efficiency curriculum_learning | choose the data in your own loader | it changes what is trained on
R progressive_layer_drop | drop layers in the model | it changes what is computed
R elasticity | write the batch sizes | the number of ranks is given when a run starts; a checkpoint loads at any
R hybrid_engine | generate with a plain copy of the model, made within zk.gather | there is no inference engine
R pipeline | remove it; make stages by torch.distributed.pipelining, each with a ZeroOptimizer | no model is cut into stages for you
R tensor_parallel | remove it; bring tensor parallel layers, and pass model_parallel_group= to zk.initialize | no layer is cut for you
R expert_parallel use_data_before_expert_parallelism | remove it | there is no expert parallelism
R sequence_parallel_size=1 | remove it; bring attention over several ranks | no attention is replaced for you
R data_parallel_size | remove it, and pass process_group= to zk.initialize | all ranks of the group are data parallel
R compile | remove it, and call torch.compile on the model's blocks | DeepCompile rewrites the graph around DeepSpeed's engine
"""

PAGE = """# DeepSpeed's JSON in zk

What `zk.initialize` and `zk.ZeroConfig.from_deepspeed` make of each key. Written by `make docs` from the table in the code;
a test checks that it is current. Keys and defaults are those of DeepSpeed 0.19.8, and older ones still found.

{kinds}

A key that is not here is an error that names the closest one. Values that ask for nothing (false, null, a section with
`"enabled": false`) are neither warned of nor refused. `"auto"` is taken from `auto={{"optimizer.params.lr": 3e-4}}`, from the other
settings (batch sizes, the learning rate that warmup ends at) or from the model (its dtype); where there is nothing to take it from, it
is an error.

| key | | becomes, or what to do instead | why |
|---|---|---|---|
{rows}

Other spellings: {spellings}."""


@dataclasses.dataclass(frozen=True, slots=True)
class Key:
    """One key of DeepSpeed's JSON."""

    name: str
    kind: Kind
    becomes: str  # refused: what to do instead
    why: str
    off: tuple[Any, ...]  # values that ask for nothing: neither warned of nor refused

    def is_off(self, value: Any) -> bool:
        if isinstance(value, Mapping):
            return not value or value.get("enabled") is False
        return any(value == known and isinstance(value, bool) == isinstance(known, bool) for known in self.off)


def _read() -> Iterator[Key]:
    """The keys of the table."""
    kinds, section = {kind.name[0]: kind for kind in Kind}, ""
    for line in ROWS.strip().split("\n"):
        if line.startswith("["):
            section = line.strip("[]") + "." * (line != "[]")
            continue
        names, *becomes, why = (part.strip() for part in line[1:].split("|"))
        for name, _, off in (item.partition("=") for item in names.split()):
            yield Key(section + name, kinds[line[0]], "".join(becomes), why, (None, *json.loads(f"[{off or 'false'}]")))


KEYS: dict[str, Key] = {key.name: key for key in _read()}
# other spellings, of keys and of sections
_SHORT = """prefetch_bucket_size param_persistence_threshold model_persistence_threshold max_live_parameters max_reuse_distance
    gather_16bit_weights_on_model_save module_granularity_threshold use_all_reduce_for_fetch_params allgather_sequential"""
ALIASES: dict[str, str] = {
    "bfloat16": "bf16",
    "zero_optimization.cpu_offload_params": "zero_optimization.cpu_offload_param",
    **{f"zero_optimization.{name}": f"zero_optimization.stage3_{name}" for name in _SHORT.split()},
}
# names that have keys below them
SECTIONS: set[str] = {name.rsplit(".", depth)[0] for name in KEYS for depth in range(1, name.count(".") + 1)}


def markdown() -> str:
    """The table as a page."""
    return PAGE.format(
        kinds="\n".join(f"- **{kind.name.lower()}**: {kind.value}." for kind in Kind),
        rows="\n".join(f"| `{key.name}` | {key.kind.name.lower()} | {key.becomes} | {key.why} |" for key in KEYS.values()),
        spellings=", ".join(f"`{old}` is `{new}`" for old, new in ALIASES.items()),
    )
