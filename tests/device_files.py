"""Test files for devices: those that the software GPU's plugin collects, and a run without a GPU leaves out."""

WHOLE = (
    "softgpu/test_softgpu.py",
    "test_gpu.py",
    "test_activations_device.py",
    "test_checkpoint_device.py",
    "test_gpu_order.py",
    "test_gpu_placement.py",
    "test_kernels.py",
    "test_launches.py",
    "test_overlap_device.py",
    "test_parity_device.py",
    "test_pinned.py",
    "test_streams.py",
    "test_waits.py",
)
# the tests marked ``device`` or ``device_only``: those that execute lines for CUDA which no other does. The rest of these files takes minutes
IN_PART = (
    "integrations/test_accelerate.py",
    "integrations/test_huggingface.py",
    "integrations/test_lightning.py",
    "test_accumulation.py",
    "test_benchmarks_gpu.py",
    "test_delay.py",
    "test_deepspeed.py",
    "test_doctor.py",
    "test_model_parallel.py",
    "test_model_parallel_dtensor.py",
    "test_optimizers.py",
    "test_parked.py",
    "test_pipelines.py",
    "test_precision.py",
    "test_pretrained.py",
    "test_speculation.py",
    "test_tiled_linear.py",
    "test_train.py",
    "test_update_on.py",
)
