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
from cases import adam, kernels
from cases.clock import Case
from conftest import DEVICE, SMALL, Floors, time_case
from torch import nn

from zk import TiledLinear
from zk.kernels.ops import policy

ON_GPU = DEVICE.type == "cuda"
NUMEL = 1 << 16 if SMALL else 1 << 28 if ON_GPU else 1 << 24
SIZE = 64 if SMALL else 4096 if ON_GPU else 512
ROUNDS = 20 if ON_GPU else 5
needs_compiler = pytest.mark.skipif(not ON_GPU and shutil.which("g++") is None, reason="torch.compile needs a C++ compiler on a CPU")
REDUCES = {**kernels.REDUCES, "torch_compile": torch.compile(kernels.reduce_by_torch)}


@pytest.fixture(autouse=True)
def note_device(benchmark: Any) -> None:
    """Tell the report where the kernels ran."""
    benchmark.extra_info["device"] = torch.cuda.get_device_name() if ON_GPU else "cpu"


@pytest.mark.parametrize("system", [pytest.param(name, marks=needs_compiler if "compile" in name else ()) for name in REDUCES])
@pytest.mark.parametrize("ranks", kernels.RANKS)
def test_reduce(system: str, ranks: int, benchmark: Any, floors: Floors) -> None:
    benchmark.group = f"mean of {ranks} bf16 rows"
    time_case(benchmark, kernels.reduce_case(system, REDUCES[system], ranks, NUMEL, DEVICE), floors, ROUNDS)


@pytest.mark.parametrize("system", kernels.FLATTENS)
@pytest.mark.parametrize(("count", "numel"), [(1000, 4096), (16, NUMEL // 16)], ids=["1000 small tensors", "16 large tensors"])
def test_flatten(system: str, count: int, numel: int, benchmark: Any, floors: Floors) -> None:
    benchmark.group = f"flatten {count} tensors of {numel} elements, bf16"
    time_case(benchmark, kernels.flatten_case(system, kernels.FLATTENS[system], count, count * numel, DEVICE), floors, ROUNDS)


@pytest.mark.parametrize("system", kernels.ADAMS)
@pytest.mark.benchmark(group="AdamW kernel, bf16 gradient in, bf16 parameter out")
def test_adam(system: str, benchmark: Any, floors: Floors) -> None:
    torch.manual_seed(0)
    time_case(benchmark, adam.case(system, kernels.ADAMS[system], NUMEL // 2, DEVICE), floors, ROUNDS)


@pytest.mark.parametrize("system", ("zk", "zk_triton", "torch_fp32_sums"))
@pytest.mark.benchmark(group=f"two tiles of {SIZE} into one bf16 output, sums in fp32")
def test_tiled_matmul(system: str, benchmark: Any, floors: Floors, monkeypatch: pytest.MonkeyPatch) -> None:
    if system == "zk_triton":
        if not ON_GPU:
            pytest.skip("kernels need a GPU")
        monkeypatch.setenv("ZK_MATMUL", "triton")
    torch.manual_seed(0)
    x, total = torch.ones(SIZE, SIZE, dtype=torch.bfloat16, device=DEVICE), torch.ones(SIZE, SIZE, device=DEVICE)
    benchmark.extra_info["by"] = policy(x, x.t(), total, total) if system.startswith("zk") else "torch"
    time_case(benchmark, kernels.matmul_case(system, SIZE, DEVICE), floors, ROUNDS)


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "zk_4_tiles": lambda: TiledLinear(SIZE, 4 * SIZE, out_splits=4, device=DEVICE, dtype=torch.bfloat16),
    "torch_linear": lambda: nn.Linear(SIZE, 4 * SIZE, device=DEVICE, dtype=torch.bfloat16),
}


@pytest.mark.parametrize("system", LAYERS)
@pytest.mark.benchmark(group=f"linear layer {SIZE} to {4 * SIZE}, forward and backward, bf16")
def test_tiled_linear(system: str, benchmark: Any, floors: Floors) -> None:
    layer, plain = LAYERS[system](), nn.Linear(SIZE, 4 * SIZE, device=DEVICE, dtype=torch.bfloat16)
    plain.load_state_dict(layer.state_dict())
    x = torch.randn(SIZE, SIZE, device=DEVICE).bfloat16().requires_grad_()
    upstream = torch.randn(SIZE, 4 * SIZE, device=DEVICE).bfloat16()
    torch.testing.assert_close(layer(x), plain(x), rtol=2e-2, atol=2e-2)
    case = Case(system, lambda: layer(x).backward(upstream), {"tflops": 6 * SIZE * SIZE * 4 * SIZE / 1e12})
    time_case(benchmark, case, floors, ROUNDS)
