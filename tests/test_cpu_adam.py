"""The CPU update: against torch.optim, and against itself in other layouts, chunks, threads and engines."""

import os
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import zk
from tests.cpu_adam import CPUAdam
from zk.kernels import reference
from zk.kernels.codec import join, split_
from zk.kernels.reference import AdamStep
from zk.offload import cpu_adam_numba
from zk.offload.cpu_adam import adam_, default_engine, default_threads, sum_of_squares
from zk.offload.cpu_adam_numba import BLOCK

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LAYOUTS = [
    *((dtype, None if dtype == torch.float32 else torch.float32, torch.float32) for dtype in DTYPES),
    (torch.bfloat16, torch.int16, torch.bfloat16),
    (torch.float32, None, torch.uint8),
    (torch.bfloat16, torch.uint8, torch.uint8),
]


def gradients(steps: int, numel: int, dtype: torch.dtype) -> list[Tensor]:
    """Over seven orders of magnitude, zeros among them."""
    draws = torch.Generator().manual_seed(numel)
    scales = [10 ** torch.empty(numel).uniform_(-6, 1, generator=draws) for _ in range(steps)]
    grads = [(torch.randn(numel, generator=draws) * scale).to(dtype) for scale in scales]
    for grad in grads:
        grad[::7] = 0
    return grads


def run(dtype: torch.dtype, numel: int, steps: int = 10, kind: Any = CPUAdam, **options: object) -> tuple[Tensor, dict[str, Tensor]]:
    """The parameter, and master and moments. Optimizers of torch train the master itself."""
    start = torch.randn(numel, generator=torch.Generator().manual_seed(1)).to(dtype)
    param = nn.Parameter(start if kind is CPUAdam else start.float())
    optimizer = kind([param], lr=1e-2, weight_decay=1e-2, **options)
    for grad in gradients(steps, numel, dtype):
        param.grad = grad.to(param.dtype)
        optimizer.step()
    state = optimizer.state_dict()["state"][0]
    return param.detach(), {"master": state.get("master", param.detach()), "exp_avg": state["exp_avg"], "exp_avg_sq": state["exp_avg_sq"]}


@pytest.mark.parametrize(("decoupled", "maximize"), ((True, False), (False, True)))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_torch_engine_is_bitwise_torch_optim_and_numba_agrees_to_a_rounding_of_the_square_root(
    dtype: torch.dtype, decoupled: bool, maximize: bool
) -> None:
    _, want = run(dtype, 1009, kind=torch.optim.AdamW if decoupled else torch.optim.Adam, maximize=maximize)
    for split in (True, False):
        param, got = run(dtype, 1009, engine="torch", split_master=split, decoupled=decoupled, maximize=maximize)
        assert torch.equal(param, want["master"].to(dtype)) and all(torch.equal(got[name], value) for name, value in want.items())
    _, got = run(dtype, 1009, engine="numba", decoupled=decoupled, maximize=maximize)
    torch.testing.assert_close(got["master"], want["master"], rtol=1e-5, atol=1e-6)
    for name in ("exp_avg", "exp_avg_sq") if decoupled else ():  # else a gradient has some of the master
        assert torch.equal(got[name], want[name])


@pytest.mark.parametrize("numel", (1, 33, BLOCK - 1, BLOCK, BLOCK + 1))
def test_split_master_has_the_bits_of_the_separate_master(numel: int) -> None:
    (param, got), (other, want) = (run(torch.bfloat16, numel, 5, engine="numba", split_master=split) for split in (True, False))
    assert torch.equal(param, other) and all(torch.equal(got[name], value) for name, value in want.items())


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_bits_depend_on_neither_threads_nor_chunks_nor_slices(layout: tuple[Any, Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    numel, (dtype, master, moments) = 3 * BLOCK + 11, layout
    draws = torch.Generator().manual_seed(3)
    fields: list[Any] = [torch.randn(numel, generator=draws).to(dtype), master and torch.zeros(numel, dtype=master)]
    fields += [torch.zeros(numel, dtype=moments) for _ in range(2)]
    if master == torch.float32:
        fields[1].copy_(fields[0])
    made = {how: [None if one is None else one.clone() for one in fields] for how in ("numba", "numba in parts", "torch", "torch in parts")}
    cuts = [slice(0, 1), slice(1, 1000), slice(1000, BLOCK + 3), slice(BLOCK + 3, numel)]
    for number in (1, 2, 3):
        grad = (torch.randn(numel, generator=draws) * 10 ** torch.empty(numel).uniform_(-8, 1, generator=draws)).to(dtype)
        step = AdamStep(lr=1e-2, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.1, decoupled=True, step=number, grad_scale=0.3)
        for how, mine in made.items():
            monkeypatch.setattr(reference, "CHUNK", 1000 if "parts" in how else 1 << 16)
            for part in cuts if "parts" in how else [slice(0, numel)]:
                given: list[Any] = [None if one is None else one[part] for one in (mine[0], grad, *mine[1:])]
                adam_(*given, step, engine=how.split()[0], num_threads=1 + ("parts" in how))  # type: ignore[arg-type]
    for engine in ("numba", "torch"):
        for one, other in zip(made[engine], made[f"{engine} in parts"], strict=True):
            assert one is other or torch.equal(one, other), engine
    for one, other in zip(made["numba"], made["torch"], strict=True):
        if one is not None:  # torch's square root is not rounded correctly
            near = other.double().abs() * 1e-6 + (1e-6 if one.is_floating_point() else 1.0)  # of an int16: its last bit
            assert ((one.double() - other.double()).abs() > near).double().mean() <= 0.01


def test_numba_engine_is_bitwise_the_formula_in_its_docstring() -> None:
    """Against numpy, every operation rounded once; fma through float64, where a product of two floats is exact."""
    n = 4096
    draws = np.random.default_rng(0)
    x, g, m, v = (draws.standard_normal(n).astype(np.float32) for _ in range(4))
    v = np.abs(v)
    step = AdamStep(lr=1e-2, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, decoupled=True, step=7, grad_scale=0.25)
    f = np.float32

    def fma(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
        return (np.longdouble(a) * np.longdouble(b) + np.longdouble(c)).astype(f)

    gs = g * f(0.25)
    m2 = fma(np.full(n, f(1 - 0.9)), gs - m, m)
    v2 = fma(f(1 - 0.95) * gs, gs, v * f(0.95))
    x2 = x * f(1 - 1e-2 * 0.1) + (f(step.step_size) * m2) / (np.sqrt(v2) / f(step.bias_corrections[1] ** 0.5) + f(1e-8))
    tensors = [torch.from_numpy(a.copy()) for a in (x, g, m, v)]
    adam_(tensors[0], tensors[1], None, tensors[2], tensors[3], step, engine="numba")
    for got, want in zip((tensors[0], tensors[2], tensors[3]), (x2, m2, v2), strict=True):
        assert np.array_equal(got.numpy(), want)


@pytest.mark.parametrize("moments", (torch.float32, torch.bfloat16), ids=str)
def test_split_and_join_lose_nothing(moments: torch.dtype) -> None:
    """Ties in both directions, the largest and smallest values, zeros of both signs, subnormals."""
    upper = torch.arange(0, 0x7F80, 13, dtype=torch.int32) << 16
    bits = torch.cat([upper | low for low in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF)])
    master = torch.cat([bits.view(torch.float32), -bits.view(torch.float32)])
    assert master.isfinite().all()
    param, low = torch.empty_like(master, dtype=torch.bfloat16), torch.empty_like(master, dtype=torch.int16)
    second = torch.rand(master.numel()).to(moments)
    second[::3] = 0
    magnitude = second.clone()
    split_(master, param, low, second)
    assert torch.equal(param, master.bfloat16())
    assert torch.equal(join(param, low, second).view(torch.int32), master.view(torch.int32))
    assert torch.equal(second.abs(), magnitude)
    assert torch.signbit(second).any()  # ties that went down are among them


def test_a_zero_that_is_written_over_any_parameter_is_a_zero() -> None:
    low = torch.arange(-(1 << 15), 1 << 15).to(torch.int16)
    for zero in (0.0, -0.0):
        for second in (torch.ones(1 << 16), -torch.ones(1 << 16)):
            param = torch.full((1 << 16,), zero, dtype=torch.bfloat16)
            master = join(param, low, second)
            assert master.abs().max() < 1e-40 and torch.equal(torch.signbit(master), torch.signbit(param))
            if second[0] > 0:
                assert torch.equal(master.bfloat16(), param)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sum_of_squares_is_exact_and_sees_every_bad_value(dtype: torch.dtype) -> None:
    for numel in (0, 1, 7, 8, 9, BLOCK + 3, 12 * BLOCK + 5):
        grad = torch.randn(numel).to(dtype)
        want = grad.double().square().sum().item()
        assert sum_of_squares(grad, 1) == sum_of_squares(grad, 2)
        assert sum_of_squares(grad) == pytest.approx(want, rel=1e-12)
    for bad in (float("inf"), -float("inf"), float("nan")):
        for place in (0, BLOCK - 1, BLOCK, 2 * BLOCK + 2):
            grad = torch.zeros(2 * BLOCK + 3, dtype=dtype)
            grad[place] = bad
            assert not np.isfinite(sum_of_squares(grad))
    assert np.isfinite(sum_of_squares(torch.full((100,), torch.finfo(torch.float32).max)))


FIRST = AdamStep(lr=1e-2, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.0, decoupled=True, step=1)


def test_nan_stays_nan_when_cast() -> None:
    for layout in (torch.float32, torch.int16):
        param, grad = torch.zeros(4, dtype=torch.bfloat16), torch.tensor([1.0, float("nan"), float("inf"), 0.0]).bfloat16()
        adam_(param, grad, torch.zeros(4, dtype=layout), torch.zeros(4), torch.zeros(4), FIRST, engine="numba")
        assert param.isnan().tolist() == [False, True, True, False]


def test_the_environment_names_the_engine_and_the_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    cores = len(os.sched_getaffinity(0))
    for name, engine in (("", "numba"), ("numba", "numba"), ("torch", "torch")):
        monkeypatch.setenv("ZK_CPU_ADAM", name)
        assert default_engine.__wrapped__() == engine
    monkeypatch.setenv("ZK_CPU_ADAM", "triton")
    with pytest.raises(ValueError, match="ZK_CPU_ADAM must be"):
        default_engine.__wrapped__()
    monkeypatch.setenv("OMP_NUM_THREADS", "1,2")
    assert default_threads() == 1
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(cores))
    assert default_threads() == 1
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    assert default_threads() == cores


def test_the_option_num_threads_is_that_of_the_update(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZK_CPU_ADAM", "numba")
    default_engine.cache_clear()
    seen, update = [], cpu_adam_numba.adam
    monkeypatch.setattr(cpu_adam_numba, "adam", lambda fields, step, threads: seen.append(threads) or update(fields, step, threads))
    for num_threads in (1, 2):
        model = nn.Linear(4, 1, bias=False)
        with zk.ZeroOptimizer(model, torch.optim.AdamW(model.parameters()), num_threads=num_threads) as optimizer:
            model(torch.ones(1, 4)).sum().backward()
            optimizer.step()
    assert seen == [1, 2]
