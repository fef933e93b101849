"""Each kernel against what else does the same job, on a GPU or, by the references, on a CPU. `make bench`, `make gpu`.

``fraction_of_floor`` is the time that moving the fewest possible bytes would take at the copy bandwidth of the same run (for matrix
products: the flops at the library's rate), over the time taken. Results are checked before anything is timed. On a CPU the rows named zk
run the plain PyTorch references, and say nothing about the kernels.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import DEVICE, finished
from torch import nn

from zk import TiledLinear
from zk.bench import kernels as own
from zk.bench.clock import Work
from zk.bench.kernels import ADAMS, FLATTENS, matmul
from zk.kernels.tiled_matmul import policy

ON_GPU = DEVICE.type == "cuda"
NUMEL = 1 << 28 if ON_GPU else 1 << 24
needs_compiler = pytest.mark.skipif(not ON_GPU and shutil.which("g++") is None, reason="torch.compile needs a C++ compiler on a CPU")


def run(benchmark: Any, work: Work, floor_seconds: float, rounds: int = 20, **info: float) -> None:
    """Time it, and say what it is in terms of the floor."""
    benchmark.pedantic(finished(work), rounds=rounds if ON_GPU else max(3, rounds // 4), warmup_rounds=3)
    seconds = benchmark.stats.stats.median
    benchmark.extra_info.update({name: round(value / seconds, 2) for name, value in info.items()})
    benchmark.extra_info.update(fraction_of_floor=round(floor_seconds / seconds, 3), device=torch.cuda.get_device_name() if ON_GPU else "cpu")


# ---- cast with statistics ----------------------------------------------------------------------------------------------------


CASTS = {**own.CASTS, "torch_compile": torch.compile(own.cast_by_torch)}


@pytest.mark.parametrize("system", [pytest.param(name, marks=needs_compiler if "compile" in name else ()) for name in CASTS])
@pytest.mark.benchmark(group="cast fp32 to bf16 with sum of squares and count")
def test_cast(system: str, benchmark: Any, device_copy_gbps: float) -> None:
    x = torch.randn(NUMEL, device=DEVICE)
    out, stats = torch.empty(NUMEL, dtype=torch.bfloat16, device=DEVICE), torch.zeros(2, dtype=torch.float64, device=DEVICE)
    CASTS[system](x, out, stats)
    assert torch.equal(out, (x * 0.5).bfloat16())
    assert abs(stats[0] / (x * 0.5).double().square().sum() - 1) < 1e-2 and stats[1] == 0  # torch sums in fp32
    nbytes = 6 * NUMEL
    run(benchmark, lambda: CASTS[system](x, out, stats), nbytes / device_copy_gbps / 1e9, gbps=nbytes / 1e9)


# ---- flatten -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("system", FLATTENS)
@pytest.mark.parametrize(("count", "numel"), [(1000, 4096), (16, NUMEL // 16)], ids=["1000 small tensors", "16 large tensors"])
def test_flatten(system: str, count: int, numel: int, benchmark: Any, device_copy_gbps: float) -> None:
    benchmark.group = f"flatten {count} tensors of {numel} elements, bf16"
    tensors = [torch.randn(numel, device=DEVICE).bfloat16() for _ in range(count)]
    flat = torch.full((count * numel,), float("nan"), dtype=torch.bfloat16, device=DEVICE)
    offsets = [index * numel for index in range(count)]
    FLATTENS[system](tensors, flat, offsets)
    assert torch.equal(flat, torch.cat(tensors))
    nbytes = 2 * flat.nbytes
    run(benchmark, lambda: FLATTENS[system](tensors, flat, offsets), nbytes / device_copy_gbps / 1e9, gbps=nbytes / 1e9)


# ---- adam --------------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("system", ADAMS)
@pytest.mark.benchmark(group="adam, bf16 gradient in, bf16 parameter out")
def test_adam(system: str, benchmark: Any, device_copy_gbps: float) -> None:
    per_element, make = ADAMS[system]
    torch.manual_seed(0)
    param, grad = torch.randn(10_007, device=DEVICE).bfloat16(), torch.randn(10_007, device=DEVICE).bfloat16()
    want = param.clone()
    update, reference = make(param, grad), own.adam_by_torch(want, grad)
    for _ in range(3):
        update()
        reference()
    assert (param != want).float().mean() < 1e-3
    numel = NUMEL // 2
    param, grad = torch.randn(numel, device=DEVICE).bfloat16(), torch.randn(numel, device=DEVICE).bfloat16()
    run(benchmark, make(param, grad), per_element * numel / device_copy_gbps / 1e9, gbps=per_element * numel / 1e9)


# ---- matrix products ---------------------------------------------------------------------------------------------------------

SIZE = 4096 if ON_GPU else 512


@pytest.mark.parametrize("system", ("zk", "zk_triton", "torch_fp32_sums"))
@pytest.mark.benchmark(group=f"two tiles of {SIZE} into one bf16 output, sums in fp32")
def test_tiled_matmul(system: str, benchmark: Any, matmul_tflops: float, monkeypatch: pytest.MonkeyPatch) -> None:
    if system == "zk_triton":
        if not ON_GPU:
            pytest.skip("kernels need a GPU")
        monkeypatch.setenv("ZK_MATMUL", "triton")
    torch.manual_seed(0)
    x, weight = (torch.randn(SIZE, SIZE, device=DEVICE).bfloat16() for _ in range(2))
    total, out = torch.zeros(SIZE, SIZE, device=DEVICE), torch.empty(SIZE, SIZE, dtype=torch.bfloat16, device=DEVICE)
    bias = torch.randn(SIZE, device=DEVICE).bfloat16()
    matmul(system, x, weight, total, out, bias)
    want = 2 * (x.float() @ weight.float().t()) + bias
    assert (out.float() - want).norm() / want.norm() < 4e-3
    benchmark.extra_info["by"] = policy(x, weight.t(), total, total) if system.startswith("zk") else "torch"
    flops = 4 * SIZE**3
    run(benchmark, lambda: matmul(system, x, weight, total, out, bias), flops / matmul_tflops / 1e12, tflops=flops / 1e12)


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "zk_4_tiles": lambda: TiledLinear(SIZE, 4 * SIZE, out_splits=4, device=DEVICE, dtype=torch.bfloat16),
    "zk_2x2_tiles": lambda: TiledLinear(SIZE, 4 * SIZE, in_splits=2, out_splits=2, device=DEVICE, dtype=torch.bfloat16),
    "torch_linear": lambda: nn.Linear(SIZE, 4 * SIZE, device=DEVICE, dtype=torch.bfloat16),
}


@pytest.mark.parametrize("system", LAYERS)
@pytest.mark.benchmark(group=f"linear layer {SIZE} to {4 * SIZE}, forward and backward, bf16")
def test_tiled_linear(system: str, benchmark: Any, matmul_tflops: float) -> None:
    layer, plain = LAYERS[system](), nn.Linear(SIZE, 4 * SIZE, device=DEVICE, dtype=torch.bfloat16)
    plain.load_state_dict(layer.state_dict())
    x = torch.randn(SIZE, SIZE, device=DEVICE).bfloat16().requires_grad_()
    upstream = torch.randn(SIZE, 4 * SIZE, device=DEVICE).bfloat16()
    torch.testing.assert_close(layer(x), plain(x), rtol=2e-2, atol=2e-2)

    def both() -> None:
        layer(x).backward(upstream)

    flops = 6 * SIZE * SIZE * 4 * SIZE
    run(benchmark, both, flops / matmul_tflops / 1e12, tflops=flops / 1e12)
