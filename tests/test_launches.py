"""The kernels of zk are in the path of a step on a device: how often a step launches each."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zk
from tests import softgpu
from tests.models import GPT, batch, loss_of
from tests.world import run_world

if not softgpu.installed():
    pytest.skip("counts what the software GPU launches (pytest -p tests.softgpu.plugin)", allow_module_level=True)
from tests.softgpu.streams import launched

HOST = {"optimizer_tier": "host"}
Case = tuple[int, dict[str, Any]]  # micro-batches, options


def launches(case: Case) -> tuple[dict[str, int], int, float]:
    """Launches of each kernel in the second step of training, the number of trained units, the norm."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    device = torch.device("cuda", rank)
    torch.manual_seed(0)
    model, (micro_batches, options) = GPT().to(device), case
    with zk.ZeroOptimizer(model, torch.optim.AdamW(model.parameters(), lr=1e-2), clip_grad_norm=0.1, **{"dtype": "bf16", **options}) as optimizer:
        for step in range(2):
            optimizer.synchronize()
            launched.clear()
            for part in range(micro_batches):
                loss_of(model, batch(8 * step + 2 * part + rank).to(device)).backward()
            optimizer.step()
            optimizer.zero_grad()
        return dict(launched), len(optimizer._trained), float(optimizer.norm)


def test_a_step_flattens_each_unit_in_one_launch_for_each_backward() -> None:
    overlapped = {"stage": 3, "param_tier": "host", **HOST, "overlap_step": True, "dtype": "fp32"}
    for case, adam in (((1, overlapped), 0), ((1, {"stage": 2, "optimizer_tier": "device"}), 1), ((2, {"stage": 2, **HOST}), 0)):
        counts, units, norm = launches(case)
        assert counts == {"_move_kernel": case[0] * units, **({"_adam_kernel": units} if adam else {})}, (case, counts)
        assert norm > 0.1, case


def test_a_step_over_ranks_reduces_each_unit_in_one_launch() -> None:
    cases = [(1, {"stage": stage, **HOST, **({"param_tier": "host"} if stage == 3 else {})}) for stage in (1, 2, 3)]
    for case, ranks in zip(cases, run_world(2, launches, cases, backend="nccl"), strict=True):
        (counts, units, norm), (_, _, other) = ranks
        assert ranks[1][0] == counts == {"_move_kernel": units, "_reduce_kernel": units}, f"{case}: {counts}"
        assert norm == other > 0.1


def test_tiles_multiply_by_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZK_MATMUL", "triton")
    model = nn.Sequential(zk.TiledLinear(64, 64, out_splits=4, device="cuda", dtype=torch.bfloat16))
    with zk.ZeroOptimizer(model, torch.optim.AdamW(model.parameters()), stage=2, **HOST) as optimizer:
        launched.clear()
        model(torch.ones(4, 64, device="cuda", dtype=torch.bfloat16)).float().sum().backward()
        optimizer.step()
        assert launched["_matmul_kernel"] >= 4 and launched["_move_kernel"] == len(optimizer._trained), launched
