"""What lies where on GPUs, and for how long: devices that are named, current or missing, buffers in host memory, memory that copies hold.

Tests of the current device use the second GPU while the first one is current, as a script does that never calls ``torch.cuda.set_device``.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zk
from tests.models import GPT, batch, loss_of
from tests.world import run_world
from zk import kernels
from zk.offload.streams import link_to
from zk.parallel.comm import Group
from zk.tools.gpt import GPTConfig
from zk.tools.train import Training

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
needs_two = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
OTHER = torch.device("cuda", 1)


@pytest.fixture(autouse=True)
def first_is_current() -> Iterator[None]:
    """The second GPU is never the current one by chance, before or after a test."""
    torch.cuda.set_device(0)
    yield
    torch.cuda.set_device(0)


def adamw(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def losses(model: nn.Module, optimizer: zk.ZeroOptimizer, device: torch.device, steps: int = 3) -> list[float]:
    found = []
    for step in range(steps):
        loss = loss_of(model, batch(step).to(device))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(float(loss.detach()))
    return found


# ---- memory --------------------------------------------------------------------------------------------------------------------


def allocated() -> int:
    """Bytes of the current device that something still uses.

    What one round of the collector frees may have hidden a cycle from it: it sees a tensor's hooks only while nothing in C++ has the tensor.
    A link lets go of what its copies used when it next looks after they are over.
    """
    torch.cuda.synchronize()
    link_to(torch.device("cuda")).mark()
    for _ in range(3):
        gc.collect()
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated()


def test_nothing_of_a_model_stays_on_the_device_after_its_optimizer() -> None:
    """The last copy of each direction is a view of a whole flat buffer."""
    before = allocated()
    model = nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 256)).cuda()
    with zk.ZeroOptimizer(model, adamw(model), stage=2, optimizer_tier="host", dtype="bf16") as optimizer:
        for _ in range(2):
            model(torch.ones(4, 256, device="cuda")).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    del model, optimizer
    assert allocated() <= before


# ---- devices that are named ------------------------------------------------------------------------------------------------------


def test_cuda_without_an_index_is_the_current_device_everywhere() -> None:
    with zk.deferred_init("cuda"):
        deferred = nn.Linear(3, 5)
    model = nn.ModuleDict({"deferred": deferred, "real": nn.Linear(5, 3).cuda()})
    with zk.ZeroOptimizer(model, adamw(model), stage=2) as optimizer:
        assert [held.unit.name for held in optimizer.held] == ["rest"], "one device is one unit"
        assert {param.device for param in model.parameters()} == {torch.device("cuda", 0)}


def test_a_gpu_that_is_not_there_is_refused_with_those_that_are() -> None:
    count = torch.cuda.device_count()
    for ask in (lambda name: zk.ZeroConfig(device=name), lambda name: zk.offload_activations(device=name), deferred_on):
        with pytest.raises(ValueError, match=rf"'cuda:{count}', and torch sees {count} CUDA device.*name 'cuda:0'"):
            ask(f"cuda:{count}")


def deferred_on(name: str) -> None:
    with zk.deferred_init(name):
        nn.Linear(3, 3)


def test_parameters_on_two_devices_are_refused_by_name() -> None:
    model = GPT().cuda()
    model.tokens.cpu()
    with pytest.raises(ValueError, match=r"'tokens.weight' is on cpu and 'blocks.0.norm.weight' on cuda:0: .*device="):
        zk.ZeroOptimizer(model, adamw(model), stage=2, optimizer_tier="host")
    with zk.ZeroOptimizer(model, adamw(model), stage=2, optimizer_tier="host", device="cuda") as optimizer:
        assert all(map(torch.isfinite, map(torch.tensor, losses(model, optimizer, torch.device("cuda")))))


class DrawnAnywhere(nn.Module):
    """Parameters that the GPU draws, and that the CPU draws, in turn; views, copies and moves between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 7, device="cuda")
        self.second = nn.Linear(7, 5)
        self.third = nn.Linear(5, 7, device="cuda:0", dtype=torch.bfloat16)
        with torch.device("cuda"):
            self.fourth = nn.Embedding(11, 5)
        self.moved = nn.Parameter(torch.randn(6).to("cuda") * 2)
        nn.init.orthogonal_(self.first.weight)
        with torch.no_grad():
            self.second.weight[1:3].copy_(self.first.weight[:3].T.flatten()[:14].view(2, 7))
            self.fourth.weight[2].uniform_(-1, 1)
            self.first.bias += torch.rand_like(self.first.bias)
        self.register_buffer("noise", torch.randn(3, device="cuda"))


def test_a_deferred_model_has_the_bits_of_plain_construction_also_where_a_gpu_draws_them() -> None:
    def drawn(deferred: bool) -> tuple[dict[str, Tensor], Tensor, Tensor]:
        torch.manual_seed(3)
        with zk.deferred_init() if deferred else contextlib.nullcontext():
            model = DrawnAnywhere()
        cpu, cuda = torch.randn(4), torch.randn(4, device="cuda")
        if deferred:
            zk.ZeroOptimizer(model, adamw(model), stage=2, optimizer_tier="host").close()
            assert {param.device for param in model.parameters()} == {torch.device("cuda", 0)}
        return {name: value.detach().cpu() for name, value in model.state_dict().items()}, cpu, cuda.cpu()

    (want, *rest), (found, *others) = drawn(False), drawn(True)
    assert want.keys() == found.keys() and all(torch.equal(found[name], want[name]) for name in want)
    assert all(map(torch.equal, rest, others)), "what is drawn afterwards is the same too"


# ---- groups that are added -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("stage", "tier"), ((0, "device"), (2, "host"), (3, "host"), (3, "nvme")))
def test_a_group_that_is_added_is_trained_on_the_device_of_the_others(stage: int, tier: str, tmp_path: Path) -> None:
    where: dict[str, Any] = {"stage": stage, "optimizer_tier": tier, "dtype": "bf16", "nvme_path": tmp_path if tier == "nvme" else None}
    where |= {"param_tier": tier} if stage == 3 else {}
    found = []
    for added in (False, True):
        torch.manual_seed(0)
        model = GPT().bfloat16().float().cuda()  # what is frozen at first is rounded
        params = list(model.parameters())
        inner = torch.optim.AdamW(params[:-1] if added else [{"params": params[:-1]}, {"params": params[-1:]}], lr=1e-2)
        with zk.ZeroOptimizer(model, inner, **where) as optimizer:
            if added:
                optimizer.add_param_group({"params": params[-1:]})
            found.append(losses(model, optimizer, torch.device("cuda")))
            assert {param.device for param in params} == {torch.device("cuda", 0)}
    assert found[0] == found[1]


# ---- buffers in host memory ------------------------------------------------------------------------------------------------------


class WithTables(nn.Module):
    """A layer with a buffer on the device and one in host memory, which a rank fills with its number."""

    def __init__(self, number: float) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4).to(rank_device())
        self.register_buffer("near", torch.full((3,), number, device=rank_device()))
        self.register_buffer("table", torch.full((5,), number))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


def rank_device() -> torch.device:
    """The GPU of this rank."""
    return torch.device("cuda", dist.get_rank() % torch.cuda.device_count())


def buffers_of_the_first_rank(_: None) -> list[float]:
    torch.manual_seed(dist.get_rank())
    model = WithTables(1.0 + dist.get_rank())
    with zk.ZeroOptimizer(model, adamw(model), stage=2) as optimizer:
        model(torch.ones(2, 4, device=rank_device())).sum().backward()
        optimizer.step()
        assert model.table.device.type == "cpu" and model.near.device == rank_device()
        return [*model.table.tolist(), *model.near.tolist()]


def test_buffers_in_host_memory_get_the_first_ranks_values_too() -> None:
    (ranks,) = run_world(2, buffers_of_the_first_rank, [None], backend="nccl")
    assert ranks == [[1.0] * 8] * 2


def a_failure_of_nobody(_: None) -> str:
    device = rank_device()
    model = nn.Linear(4, 4).to(device)
    with zk.ZeroOptimizer(model, adamw(model), stage=2) as optimizer:
        wrong = torch.zeros(4, 4, device=device).t()[:, ::2]  # which no backend takes
        assert isinstance(optimizer.comm, Group)
        with pytest.raises((RuntimeError, ValueError)) as caught, optimizer.comm.guard("a test"):
            raise RuntimeError(f"a tensor of strides {wrong.stride()} is refused")
        dist.barrier()  # neither leaves while the other looks who lives
        return str(caught.value)


def test_no_rank_is_blamed_for_what_failed_while_all_of_them_live() -> None:
    (ranks,) = run_world(2, a_failure_of_nobody, [None], backend="nccl")
    for rank, message in enumerate(ranks):
        assert message.startswith(f"rank {rank} of 2 failed in collective ") and message.endswith("(a test): a tensor of strides (1, 8) is refused")


# ---- the second GPU while the first is current -----------------------------------------------------------------------------------


@needs_two
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_kernels_run_where_their_tensors_are(dtype: torch.dtype) -> None:
    values = torch.linspace(-2, 2, 5000)
    near = values.to(OTHER)
    stats = torch.zeros(2, dtype=torch.float64, device=OTHER)
    out = kernels.cast(near, dtype=dtype, scale=0.5, stats=stats)
    assert out.device == OTHER and torch.equal(out.cpu(), (values * 0.5).to(dtype)) and stats[1].item() == 0
    parts = [near[:7].to(dtype), near[7:3000].to(dtype)]
    flat = torch.full((6000,), float("nan"), dtype=dtype, device=OTHER)
    kernels.flatten(parts, flat, [0, 2048])
    back = [torch.empty_like(part) for part in parts]
    kernels.unflatten(flat, back, [0, 2048])
    assert all(map(torch.equal, map(Tensor.cpu, back), map(Tensor.cpu, parts)))
    param, grad, moments = near.clone(), near.to(dtype), [torch.zeros_like(near) for _ in range(2)]
    kernels.adam(param, grad, None, *moments, kernels.AdamStep(1e-3, 0.9, 0.999, 1e-8, 0.0, True, 1))
    assert bool((param != near).any()) and bool(param.isfinite().all())
    a, b = near[:600].view(20, 30).to(dtype), near[600:1800].view(30, 40).to(dtype)
    total = torch.ones(20, 40, device=OTHER)
    product = torch.empty(20, 40, dtype=dtype, device=OTHER)
    kernels.tiled_matmul(a, b, product, plus=total, bias=near[:40].clone())
    want = 1 + a.cpu().float() @ b.cpu().float() + values[:40]
    torch.testing.assert_close(product.cpu().float(), want, rtol=2e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-4)
    assert torch.cuda.current_device() == 0


@needs_two
@pytest.mark.parametrize(
    ("stage", "tier", "beside"),
    (
        (1, "device", False), (2, "host", False), (0, "host", True), (2, "nvme", True), (1, "auto", True),
        (3, "device", False), (3, "host", True), (3, "nvme", False), (3, "auto", False),
    ),
)  # fmt: skip
def test_training_on_the_second_gpu_is_that_on_the_first(stage: int, tier: str, beside: bool, tmp_path: Path) -> None:
    where: dict[str, Any] = {"stage": stage, "optimizer_tier": tier, "dtype": "bf16", "clip_grad_norm": 0.5, "overlap_step": beside}
    where |= {"nvme_path": tmp_path} if tier == "nvme" else {"device_budget": 60_000} if tier == "auto" else {}
    where |= {"param_tier": tier} if stage == 3 else {}
    found = []
    for device in (torch.device("cuda", 0), OTHER):
        torch.manual_seed(0)
        model = GPT().to(device)
        with zk.ZeroOptimizer(model, adamw(model), **where) as optimizer:
            found.append(losses(model, optimizer, device))
            assert {param.device for param in model.parameters()} == {device}
    assert found[0] == found[1] and torch.cuda.current_device() == 0


class Noisy(nn.Module):
    """What it computes depends on the GPU's random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(self.layer(x), 0.5).square().mean()


@needs_two
def test_random_numbers_of_the_models_own_gpu_go_on_after_a_resume(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Noisy().to(OTHER)
    with zk.ZeroOptimizer(model, adamw(model), stage=2, optimizer_tier="host") as optimizer:
        optimizer.save_checkpoint(tmp_path)
        want, other = [noisy_steps(model, optimizer) for _ in range(2)]
        torch.randn(3, device="cuda:0")
        current = torch.cuda.get_rng_state(0)
        optimizer.load_checkpoint(tmp_path)
        assert noisy_steps(model, optimizer) == want and want != other
        assert torch.equal(torch.cuda.get_rng_state(0), current), "another device's generator is not the model's"


def noisy_steps(model: nn.Module, optimizer: zk.ZeroOptimizer) -> list[float]:
    found = []
    for _ in range(3):
        loss = model(torch.ones(4, 8, device=OTHER))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(float(loss.detach()))
    return found


@needs_two
def test_each_rank_of_zk_train_makes_its_gpu_the_current_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    text = tmp_path / "text.txt"
    text.write_text("all work and no play " * 200)
    zero = zk.ZeroConfig(stage=2, optimizer_tier="host", dtype="fp32")
    sizes = GPTConfig(layers=1, width=16, heads=2, context=16)
    job = partial(Training, sizes, zero, data=[text], out=tmp_path / "out", steps=2, batch=2, sample=4)
    job().train()
    assert torch.cuda.current_device() == 1
    monkeypatch.setenv("LOCAL_RANK", str(torch.cuda.device_count()))
    with pytest.raises(ValueError, match="start no more ranks than that"):
        job()


@needs_two
@pytest.mark.parametrize("deferred", (False, True))
def test_deepspeeds_initialize_takes_the_gpu_of_its_rank(deferred: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    with zk.deferred_init() if deferred else contextlib.nullcontext():
        model = nn.Linear(6, 6)
    config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}, "zero_optimization": {"stage": 2}}
    engine, optimizer, _, _ = zk.initialize(model=model, config=config)
    with optimizer:
        assert {param.device for param in model.parameters()} == {OTHER} == {engine.device}
        assert torch.cuda.current_device() == 1
        engine.backward(engine(torch.ones(2, 6, device=engine.device)).sum())
        engine.step()
