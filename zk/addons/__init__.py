"""Registry of what hangs on the seams: a module is imported when it is first used.

A line, and its file, may be deleted: its option is an error then, which names the file.
"""

OPTIONS = {  # option -> "module:class"
    "overlap_step": "zk.addons.overlap:overlapped",
    "state_dtype": "zk.addons.state_dtype:StateDtype",
    "announce": "zk.addons.announced:Announced",
    "update_on": "zk.addons.update_on:UpdateOn",
    "experts": "zk.addons.experts:Experts",
    "model_parallel_group": "zk.addons.parts:given",
    "replicated_params": "zk.addons.parts:given",
    "shard_group": "zk.addons.hybrid:Hybrid",
    "delay_update": "zk.addons.backward:Delayed",
    "growing": "zk.addons.growing:Growing",
    "in_place": "zk.addons.in_place:InPlace",
    "elementwise": "zk.addons.whole:Elementwise",
    "parameterwise": "zk.addons.whole:Parameterwise",
}
ALWAYS = {  # "module:class" of add-ons that every optimizer has
    "parts": "zk.addons.parts:Parts",  # first: those that check after it see no DTensors
    "promised": "zk.addons.promised:Promised",
    "checked": "zk.addons.checked:Checked",
    "handed_over": "zk.addons.handed_over:HandedOver",
    "compared": "zk.addons.compared:Compared",
    "quantized": "zk.addons.quantized:Quantized",
    "buffers": "zk.addons.buffers:Buffers",
    "checksums": "zk.addons.checksums:Checksums",
    "shown": "zk.tools.summary:Shown",
    "whole": "zk.addons.whole:Whole",
}
METHODS = {  # name of a method of ZeroOptimizer -> "module:function"
    "from_deepspeed": "zk.integrations.deepspeed:from_deepspeed",  # of ZeroConfig
    "save_checkpoint": "zk.checkpoint.save:save_checkpoint",
    "load_checkpoint": "zk.checkpoint.load:load_checkpoint",
    "consolidated_state_dict": "zk.checkpoint.export:consolidated_state_dict",
    "accumulate": "zk.addons.accumulation:accumulate",
    "parked": "zk.addons.parked:Parked",
    "metrics": "zk.tools.metrics:metrics",
    "summary": "zk.tools.summary:summary",
    "_described": "zk.tools.summary:described",
}
