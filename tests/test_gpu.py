"""What only a GPU can show. Skipped without one."""

from __future__ import annotations

import copy

import psutil
import pytest
import torch

import zk
from tests.models import GPT, batch, loss_of
from zk.tiled_linear import TiledLinear

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def losses(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: int = 5) -> list[float]:
    found = []
    for seed in range(steps):
        loss = loss_of(model, batch(seed).cuda())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(float(loss.detach()))
    return found


@pytest.mark.parametrize("stage", (0, 1, 2, 3))
@pytest.mark.parametrize("tier", ("device", "host", "nvme"))
def test_every_tier_trains_what_plain_torch_trains(stage: int, tier: str, tmp_path: object) -> None:
    if tier == "nvme" and stage != 3:
        pytest.skip("the same as host below stage 3")
    torch.manual_seed(0)
    model = GPT().cuda()
    plain = copy.deepcopy(model)
    want = losses(plain, torch.optim.AdamW(plain.parameters(), lr=1e-3))
    place = {"param_tier": tier if stage == 3 else "device", "optimizer_tier": tier, **({"nvme_path": tmp_path} if tier == "nvme" else {})}
    with zk.ZeroOptimizer(model, torch.optim.AdamW(model.parameters(), lr=1e-3), stage=stage, **place) as optimizer:
        got = losses(model, optimizer)
    assert got == pytest.approx(want, rel=1e-4)


def test_the_device_and_the_host_tier_give_the_same_bits_in_bf16() -> None:
    found = []
    for tier in ("device", "host"):
        torch.manual_seed(0)
        model = GPT().cuda()
        with zk.ZeroOptimizer(model, torch.optim.AdamW(model.parameters(), lr=1e-3), stage=2, dtype="bf16", optimizer_tier=tier) as optimizer:
            found.append(losses(model, optimizer))
    assert found[0] == found[1]


def test_a_layer_of_64k_features_trains_where_the_whole_layer_does_not_fit() -> None:
    """8 GiB of bf16 weight, its gradient, and no room for both: the cap is 12 GiB."""
    size, cap = 65536, 12 * 2**30
    total = torch.cuda.get_device_properties(0).total_memory
    if total < 16 * 2**30 or torch.cuda.mem_get_info()[0] < cap or psutil.virtual_memory().available < 64 * 2**30:
        pytest.skip("needs a GPU with 16 GiB and 64 GiB of host memory")
    torch.cuda.set_per_process_memory_fraction(cap / total)
    try:
        with pytest.raises(torch.cuda.OutOfMemoryError):
            whole = torch.nn.Linear(size, size, bias=False, device="cuda", dtype=torch.bfloat16)
            whole(torch.randn(16, size, device="cuda", dtype=torch.bfloat16)).sum().backward()
        del whole
        torch.cuda.empty_cache()
        with zk.deferred_init("cuda"):
            model = torch.nn.Sequential(TiledLinear(size, size, bias=False, out_splits=32, dtype=torch.bfloat16))
        place = {"stage": 3, "dtype": "bf16", "param_tier": "host", "optimizer_tier": "host", "prefetch": 0}
        with zk.ZeroOptimizer(model, torch.optim.SGD(model.parameters(), lr=1e-3), **place) as optimizer:
            for _ in range(2):
                model(torch.randn(16, size, device="cuda")).float().square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
