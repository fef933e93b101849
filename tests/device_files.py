"""Test files for devices: those that the software GPU's plugin collects, and a run without a GPU leaves out."""

WHOLE = ("core/test_device.py", "softgpu/test_softgpu.py", *("test_checkpoint_device.py", "test_kernels.py", "test_launches.py"))
# the tests marked ``device`` or ``device_only``: those that execute lines for CUDA which no other does. The rest of these files takes minutes
IN_PART = (
    "addons/test_accumulation.py",
    "addons/test_backward.py",
    "addons/test_delayed.py",
    "addons/test_experts.py",
    "addons/test_growing.py",
    "addons/test_in_place.py",
    "addons/test_parked.py",
    "addons/test_update_on.py",
    "addons/test_whole.py",
    *("core/test_nn_activations.py", "core/test_nn_deferred.py", "core/test_nn_tiled_linear.py"),
    *("integrations/test_accelerate.py", "integrations/test_huggingface.py", "integrations/test_lightning.py"),
    "test_deepspeed.py",
    "test_train.py",
)
