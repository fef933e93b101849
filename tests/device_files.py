"""Test files for devices: those that the software GPU's plugin collects, and a run without a GPU leaves out."""

WHOLE = ("core/test_device.py", "softgpu/test_softgpu.py", "test_checkpoint_device.py", "test_kernels.py", "test_launches.py")
# the tests marked ``device`` or ``device_only``: those that execute lines for CUDA which no other does. The rest of these files takes minutes
IN_PART = (
    *(f"addons/test_{name}.py" for name in ("accumulation", "backward", "delayed", "experts", "growing", "in_place", "parked", "update_on", "whole")),
    *(f"core/test_nn_{name}.py" for name in ("activations", "deferred", "tiled_linear")),
    *(f"integrations/test_{name}.py" for name in ("accelerate", "huggingface", "lightning")),
    *("test_deepspeed.py", "test_train.py"),
)
