"""Kernels against their references, on a GPU, or interpreted on the memory of the software GPU. Outputs are poisoned first."""

import functools
import itertools
import os
import subprocess
import sys

import pytest
import torch
from torch import Tensor

from tests import softgpu
from tests.models import DEVICE
from zk import kernels
from zk.kernels import flatten_kernel, reference
from zk.kernels.adam_kernel import launch as launch_adam
from zk.kernels.codec import split_
from zk.kernels.numerics import BLOCK
from zk.kernels.reduce_kernel import launch as launch_reduce
from zk.kernels.reference import AdamStep
from zk.kernels.tiled_matmul_kernel import launch as launch_matmul
from zk.offload.cpu_adam import adam_

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
CASTS = (BF16, BF16), (F16, F16), (F32, F32), (BF16, F32), (F32, BF16)


@pytest.fixture(autouse=True)
def every_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels run here, not their references."""
    if softgpu.installed():
        monkeypatch.setattr("tests.softgpu.interpreter.ALWAYS", True)


def values(numel: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Over many orders of magnitude, with zeros, ties of rounding to bf16, subnormals, and both infinities and NaN where there is room."""
    draws = torch.Generator().manual_seed(seed + numel)
    x = torch.randn(numel, generator=draws) * 10 ** torch.empty(numel).uniform_(-4, 4, generator=draws)
    special = torch.tensor([0.0, -0.0, 1.00390625, 1.01171875, -1.00390625, 1e-40, float("inf"), float("-inf"), float("nan"), 65520.0, 3.4e38])
    x[: min(numel, len(special))] = special[:numel]
    return x.to(dtype).to(DEVICE)


def poisoned(*shape: int, dtype: torch.dtype = F32) -> Tensor:
    return torch.full(shape, float("nan"), dtype=dtype, device=DEVICE)


def same(a: Tensor, b: Tensor) -> bool:
    """The same bits, any NaN being any other."""
    numbers = ~b.isnan()
    return torch.equal(a.isnan(), ~numbers) and torch.equal(a[numbers], b[numbers]) and torch.equal(a[numbers].signbit(), b[numbers].signbit())


# ---- reduce --------------------------------------------------------------------------------------

SIZES = (0, 1, BLOCK - 1, BLOCK, BLOCK + 17)
REDUCED = [(1, BLOCK + 17, *both) for both in itertools.product((F32, BF16, F16), repeat=2)] + [(1, numel, F32, BF16) for numel in SIZES[:4]]
REDUCED += [(*rows, *CASTS[number]) for number, rows in enumerate(((2, 1), (3, 2 * BLOCK), (3, BLOCK + 17), (8, 31), (8, BLOCK + 1)))]


@pytest.mark.parametrize(("rows", "numel", "source_dtype", "out_dtype"), REDUCED)
def test_reduce_adds_rows_in_their_order_in_fp32_and_rounds_their_mean_once_as_torch_does(rows, numel, source_dtype, out_dtype):
    given = torch.stack([values(numel, source_dtype, seed) for seed in range(rows)])
    out, want = poisoned(numel, dtype=out_dtype), poisoned(numel, dtype=out_dtype)
    launch_reduce(given, out)
    reference.reduce(given, want)
    total = functools.reduce(torch.add, given.float())
    assert same(out, want) and same(want, (total / rows).to(out_dtype))


def test_reduce_through_the_public_door_of_memory_that_starts_anywhere():
    for offset in (1, 8):
        source, whole = values(BLOCK + 40, F32)[offset : BLOCK + 20], poisoned(BLOCK + 60, dtype=BF16)
        stop = offset + 1 + source.numel()
        kernels.reduce(source[None], whole[offset + 1 : stop])
        assert same(whole[offset + 1 : stop], source.bfloat16()) and whole[: offset + 1].isnan().all() and whole[stop:].isnan().all()


# ---- flatten -----------------------------------------------------------------------------------------------------------------
def layout(numels: list[int], align: int) -> tuple[list[int], list[int], int]:
    """The first element of each tensor, first and last of their regions, and the size of it all."""
    offsets, end = [], 0
    for numel in numels:
        offsets.append(end)
        end = -(-(end + numel) // align) * align
    size = end + 2 * align
    return offsets, [bound for region in zip(offsets, [*offsets[1:], size], strict=True) for bound in region], size


@pytest.mark.parametrize(("dtypes", "align"), [*((cast, 32) for cast in CASTS), ((F16, BF16), 1), ((BF16, BF16), 1)])
def test_flatten_casts_each_tensor_into_its_region(dtypes, align):
    numels = [1, 0, 31, BLOCK - 1, BLOCK, 7, BLOCK + 17, 64]
    offsets, bounds, numel = layout(numels, align)
    tensors = [values(n, dtypes[0], seed) for seed, n in enumerate(numels)]
    flat, want = poisoned(numel, dtype=dtypes[1]), poisoned(numel, dtype=dtypes[1])
    flatten_kernel.launch(tensors, flat, bounds)
    reference.flatten(tensors, want, bounds)
    assert same(flat, want)
    for tensor, start in zip(tensors, offsets, strict=True):
        assert same(flat[start : start + tensor.numel()], tensor.to(dtypes[1]))


def test_flatten_of_very_many_tensors_in_one_launch(monkeypatch):
    launches, grid = [], flatten_kernel.grid
    monkeypatch.setattr(flatten_kernel, "grid", lambda *given, **options: launches.append(given) or grid(*given, **options))
    tensors = [torch.full((index % 5 + 1,), float(index), device=DEVICE) for index in range(300)]  # more than a launch has room for as arguments
    _, bounds, numel = layout([t.numel() for t in tensors], 1)
    flat = poisoned(numel)
    flatten_kernel.launch(tensors, flat, bounds)
    assert len(launches) == 1 and torch.equal(flat[:-2], torch.cat(tensors)) and not flat[-2:].any()


def test_flatten_through_the_public_door_writes_zeros_where_no_tensor_is_and_keeps_its_table_on_the_device():
    tensors = [torch.ones(2, 3, device=DEVICE), torch.full((4,), 2.0, device=DEVICE), torch.ones(4, 2, device=DEVICE).t()]
    flat, want = poisoned(40, dtype=BF16), torch.zeros(40, device=DEVICE)
    kernels.flatten(tensors, flat, [2, 16, 24])
    want[2:8], want[16:20], want[24:32] = 1, 2, 1
    assert torch.equal(flat.float(), want)
    kernels.flatten([], flat.fill_(1), [])
    assert not flat.any()
    whole, before = poisoned(3 * BLOCK), flatten_kernel.table.cache_info().hits
    for values in (tensors[0].view(-1), tensors[1]):  # of more regions than tensors
        flatten_kernel.launch([values], whole, [BLOCK, BLOCK + 40, 0, BLOCK, BLOCK + 40, 3 * BLOCK])
        assert whole.nonzero().flatten().tolist() == [*range(BLOCK, BLOCK + len(values))] and not whole.isnan().any()
    assert flatten_kernel.table.cache_info().hits > before


# ---- adam --------------------------------------------------------------------------------------------------------------------

CODES = torch.uint8
LAYOUTS = {"fp32": (F32, None), "bf16, fp32 master": (BF16, F32), "bf16, split master": (BF16, torch.int16), "fp16, fp32 master": (F16, F32)}
LAYOUTS["bf16, 24-bit master"] = BF16, CODES


def adam_state(layout: str, numel: int, state_dtype: torch.dtype) -> list[Tensor | None]:
    """param, master, exp_avg, exp_avg_sq: in host memory"""
    param_dtype, master_dtype = LAYOUTS[layout]
    x = torch.randn(numel, generator=torch.Generator().manual_seed(numel))
    x[::5], x[1::5] = torch.tensor(1.00390625), torch.tensor(1.01171875)  # ties, on both sides
    m, v = torch.zeros(numel, dtype=state_dtype), torch.zeros(numel, dtype=state_dtype)
    param = x.to(param_dtype)
    master: Tensor | None = None
    if state_dtype == CODES:
        param[:4] = torch.tensor([0.0, -0.0, 1e-38, 3e38])
        low, m, v = (torch.randint(0, 256, (numel,), generator=torch.Generator().manual_seed(seed), dtype=CODES) for seed in range(3))
        return [param, low if master_dtype else None, m, v]
    if master_dtype == F32:
        master = x.clone()
        param[2::9] = 0.5  # written from outside
    elif master_dtype is not None:
        master = torch.zeros(numel, dtype=torch.int16)
        split_(x, param, master, v)
        param[2::9], param[3::18] = 0, -0.0  # written from outside
    return [param, master, m, v]


def gradient(numel: int, dtype: torch.dtype, seed: int, low: float, high: float) -> Tensor:
    """Over many orders of magnitude, with zeros."""
    draws = torch.Generator().manual_seed(seed)
    grad = torch.randn(numel, generator=draws) * 10 ** torch.empty(numel).uniform_(low, high, generator=draws)
    grad[::11] = 0
    return grad.to(dtype)


GRADS = [
    (F32, {"weight_decay": 0.1, "decoupled": True}),
    (BF16, {"weight_decay": 0.1, "decoupled": False, "maximize": True}),
    (F16, {"weight_decay": 0.0, "decoupled": True, "beta1": 0.3, "grad_scale": 0.37}),
]


UPDATES = [(name, kind % 3, (F32, BF16)[(n + kind) % 2]) for n, name in enumerate([*LAYOUTS][:4]) for kind in (n, n + 2)]
UPDATES += [("fp32", 0, CODES), ("bf16, 24-bit master", 0, CODES), ("bf16, 24-bit master", 1, CODES)]


@pytest.mark.parametrize(("layout", "kind", "state_dtype"), UPDATES)
def test_adam_gives_the_bits_of_the_cpu_kernel(layout, kind, state_dtype):
    """Each layout with two kinds of gradient, and with moments of either precision in turns, or in 8 bits."""
    numel, (grad_dtype, scalars), powers = BLOCK + 37, GRADS[kind], (-9, 7) if state_dtype == CODES else (-5, 1)
    settings = {"lr": 1e-2, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, **scalars}
    there = adam_state(layout, numel, state_dtype)
    here = [None if t is None else t.to(DEVICE, copy=True) for t in there]
    for number in (1, 2, 70_000):
        grad, step = gradient(numel, grad_dtype, number, *powers), AdamStep(step=number, **settings)
        kernels.adam(here[0], grad.to(DEVICE), *here[1:], step)
        adam_(there[0], grad, *there[1:], step, engine="numba")
        for name, a, b in zip(("param", "master", "exp_avg", "exp_avg_sq"), here, there, strict=True):
            assert a is None or torch.equal(a.cpu().view(CODES), b.view(CODES)), f"{name} differs after step {number}"


@pytest.mark.parametrize("numel", SIZES)
def test_adam_of_any_size_touches_nothing_else(numel):
    whole = [poisoned(numel + 8) for _ in range(3)]
    param, m, v = (t[4 : 4 + numel] for t in whole)
    param.copy_(torch.linspace(-1, 1, numel)), m.zero_(), v.zero_()
    want = param.clone()
    grad = torch.linspace(1, -1, numel, device=DEVICE)
    step = AdamStep(1e-2, 0.9, 0.999, 1e-8, 0.0, True, 1)
    launch_adam(param, grad, None, m, v, step)
    reference.adam(want, grad, None, torch.zeros_like(want), torch.zeros_like(want), step)
    torch.testing.assert_close(param, want, rtol=1e-5, atol=1e-6)
    for t in whole:
        assert t[:4].isnan().all() and t[4 + numel :].isnan().all()


# ---- tiled_matmul ------------------------------------------------------------------------------------------------------------
def exact(m: int, k: int, n: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """a, b, and their product in fp64."""
    draws = torch.Generator().manual_seed(m * k + n)
    a, b = torch.randn(m, k, generator=draws).to(dtype), torch.randn(k, n, generator=draws).to(dtype)
    return a.to(DEVICE), b.to(DEVICE), (a.double() @ b.double()).to(DEVICE)


def norm_error(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want).norm() / want.norm().clamp(min=1e-30))


SHAPES = (1, 1, 1), (16, 16, 32), (17, 33, 31), (5, 40, 70), (40, 16, 1), (3, 0, 4), (0, 4, 4)
PRODUCTS = [(shape, (F32, BF16, F16)[number % 3]) for number, shape in enumerate(SHAPES)]


@pytest.mark.parametrize(("shape", "dtype"), PRODUCTS)
def test_tiled_matmul_sums_in_fp32(shape, dtype):
    a, b, want = exact(*shape, dtype)
    out = poisoned(shape[0], shape[2])
    launch_matmul(a, b, out, None, None)
    assert norm_error(out, want) < 1e-6
    plus = torch.randn(shape[0], shape[2], device=DEVICE)
    launch_matmul(a, b, out, plus, None)
    assert norm_error(out, want + plus) < 1e-6
    again = plus.clone()
    launch_matmul(a, b, again, again, None)  # adds to itself
    assert torch.equal(again, out)


def test_tiled_matmul_rounds_once_behind_the_bias():
    a, b, product = exact(17, 33, 31, BF16)
    plus, bias = torch.randn(17, 31, device=DEVICE), torch.randn(31, device=DEVICE).bfloat16()
    out, want, full = poisoned(17, 31, dtype=BF16), poisoned(17, 31, dtype=BF16), product + plus + bias
    launch_matmul(a, b, out, plus, bias)
    reference.tiled_matmul(a, b, want, plus, bias)
    assert norm_error(out, full) < 2**-8 and norm_error(want, full) < 2**-8
    # sums in another order: a rounding may fall the other way
    assert ((out.double() - want.double()).abs() <= 2**-7 * full.abs() + 1e-5).all()


def test_tiled_matmul_through_the_public_door_reads_and_writes_slices_and_transposes_of_larger_matrices():
    a, b, want = exact(17, 33, 31, BF16)
    wide, whole_a, whole_b = poisoned(20, 50), poisoned(60, 40, dtype=BF16), poisoned(80, 50, dtype=BF16)
    out, a_slice, b_slice = wide[2:19, 7:38], whole_a[3:36, 5:22].t(), whole_b[4:70:2, 1:32]
    a_slice.copy_(a), b_slice.copy_(b)
    for multiply in (lambda: launch_matmul(a_slice, b_slice, out, None, None), lambda: kernels.tiled_matmul(a_slice, b_slice, out)):
        multiply()
        assert norm_error(out, want) < 1e-6
        out.fill_(float("nan"))
        assert wide.isnan().all()  # nothing beside the slice was written


# ---- ops -----------------------------------------------------------------------------------------
# One program imports torch once, for a process without triton and for itself.
FAKE = """
import os, sys, torch

if not (child := os.fork()):
    sys.modules["triton"] = None
    import zk
    from tests.models import descend
    flat, model = torch.ones(4), torch.nn.Sequential(zk.TiledLinear(8, 8, out_splits=4), torch.nn.Linear(8, 1))
    zk.kernels.flatten([torch.ones(3)], flat, [0])
    assert flat.tolist() == [1, 1, 1, 0]
    adamw = torch.optim.AdamW(model.parameters(), lr=0.01)
    optimizer = zk.ZeroOptimizer(model, adamw, stage=3, dtype="bf16", param_tier="host", optimizer_tier="host", device="cpu")
    losses = [descend(optimizer, (model(torch.ones(4, 8)) - 1).square().mean()) for _ in range(3)]
    assert losses[2] < losses[0], losses
    print("fine without triton", flush=True)
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
from torch._subclasses.fake_tensor import FakeTensorMode
from zk import kernels

def function(x):
    y, flat, total, out = torch.empty(300, dtype=torch.bfloat16), torch.empty(310), torch.zeros(30, 30), torch.empty(30, 30, dtype=torch.bfloat16)
    kernels.reduce(x.view(1, -1) * 2, y)
    kernels.flatten([x[:300]], flat, [4])
    a, b = x.view(30, 10), x.view(10, 30)
    kernels.tiled_matmul(a, b, total)
    kernels.tiled_matmul(a, b, total, plus=total)
    kernels.tiled_matmul(a, b, out, plus=total, bias=torch.ones(30))
    return y + 1, flat * 2, out, total

x = torch.randn(300)
for a, b in zip(torch.compile(function, fullgraph=True, backend="aot_eager")(x), function(x), strict=True):
    assert torch.equal(a, b)
with FakeTensorMode():
    function(torch.empty(300))
print("fine")
"""


def test_host_memory_needs_no_triton_and_fake_tensors_and_the_compiler_see_through_ops():
    environment = {**os.environ, "TRITON_INTERPRET": "0", "ZK_SOFTGPU": "0"}
    done = subprocess.run([sys.executable, "-c", FAKE], env=environment, capture_output=True, text=True)
    assert done.stdout == "fine without triton\nfine\n", done.stderr[-3000:]


def by_tiled_matmul(**changed: Tensor) -> None:
    given = {"a": torch.ones(2, 3), "b": torch.ones(3, 4), "out": torch.ones(2, 4), **changed}
    kernels.tiled_matmul(given.pop("a"), given.pop("b"), given.pop("out"), **given)


ONES, HALVES = torch.ones(4, 4), torch.zeros(3, dtype=BF16)
STATE = [torch.zeros(3) for _ in range(3)]
FIRST = AdamStep(1e-2, 0.9, 0.999, 1e-8, 0.0, True, 1)
REFUSED = [
    (lambda: kernels.reduce(torch.ones(2, 4, dtype=torch.int32), torch.ones(4)), TypeError, "rows must be fp32"),
    (lambda: kernels.reduce(torch.ones(4), torch.ones(4)), ValueError, "needs rows"),
    (lambda: kernels.reduce(torch.ones(0, 4), torch.ones(4)), ValueError, "needs rows"),
    (lambda: kernels.reduce(torch.ones(2, 4), torch.ones(5)), ValueError, "needs rows"),
    (lambda: kernels.reduce(torch.ones(4, 2).t(), torch.ones(4)), ValueError, "contiguous"),
    (lambda: kernels.reduce(ONES, ONES[1]), ValueError, "share no memory"),
    (lambda: kernels.flatten([torch.ones(4), torch.ones(4).bfloat16()], torch.empty(10), [0, 4]), ValueError, "must have one precision"),
    (lambda: kernels.flatten([torch.ones(4)], torch.empty(5, 2), [0]), ValueError, "flat and contiguous"),
    (lambda: kernels.flatten([torch.ones(4), torch.ones(4)], torch.empty(10), [0]), ValueError, "every tensor needs an offset"),
    (lambda: kernels.flatten([torch.ones(4), torch.ones(4)], torch.empty(10), [0, 3]), ValueError, "tensor 0 has 4 elements"),
    (lambda: kernels.flatten([torch.ones(4)], torch.empty(10), [7]), ValueError, "leave room"),
    (lambda: kernels.flatten([torch.ones(4)], torch.empty(10), [-1]), ValueError, "ascend"),
    (lambda: by_tiled_matmul(b=torch.ones(5, 4)), ValueError, "goes into out"),
    (lambda: by_tiled_matmul(b=torch.ones(3, 4, dtype=BF16)), ValueError, "one precision"),
    (lambda: by_tiled_matmul(plus=torch.ones(2, 4, dtype=BF16)), ValueError, "plus must be fp32"),
    (lambda: by_tiled_matmul(bias=torch.ones(3)), ValueError, "bias must be"),
    (lambda: by_tiled_matmul(a=torch.ones(2, 3, dtype=torch.float64)), TypeError, "a must be fp32"),
    (lambda: by_tiled_matmul(bias=torch.ones(4, dtype=torch.int64)), TypeError, "bias must be fp32"),
    (lambda: by_tiled_matmul(plus=torch.ones(2, 4, device="meta")), ValueError, "'meta': 'plus'"),
    (lambda: by_tiled_matmul(a=ONES, b=torch.ones(4, 4), out=ONES), ValueError, "a shares memory with out"),
    (lambda: by_tiled_matmul(a=torch.ones(4, 4), b=torch.ones(4, 4), out=ONES, plus=ONES.t()), ValueError, "plus shares memory with out"),
    (lambda: by_tiled_matmul(a=torch.ones(4, 4), b=torch.ones(4, 4), out=ONES, plus=ONES[:1].expand(4, 4)), ValueError, "plus shares memory"),
    (lambda: kernels.adam(torch.zeros(6)[::2], STATE[0], None, *STATE[1:], FIRST), ValueError, "param must be flat and contiguous"),
    (lambda: kernels.adam(STATE[0], torch.zeros(5), None, *STATE[1:], FIRST), ValueError, "grad must be flat"),
    (lambda: adam_(HALVES, STATE[0], None, *STATE[1:], FIRST), ValueError, "an fp32 parameter has no master"),
    (lambda: adam_(*STATE, STATE[0], STATE[1], FIRST), ValueError, "an fp32 parameter has no master"),
    (lambda: adam_(HALVES.half(), STATE[0], HALVES.view(torch.int16), *STATE[1:], FIRST), ValueError, "a bf16 one may have it split"),
    (lambda: adam_(*STATE[:2], None, STATE[2], HALVES, FIRST), ValueError, "moments have one dtype"),
    (lambda: AdamStep(1e-2, 0.9, 0.999, 1e-8, 0.0, True, 0), ValueError, "step counts from 1"),
]


@pytest.mark.parametrize(("call", "error", "says"), REFUSED)
def test_what_kernels_cannot_do_is_refused_by_name(call, error, says):
    with pytest.raises(error, match=says):
        call()
