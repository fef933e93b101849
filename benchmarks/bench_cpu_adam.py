"""The CPU update of 50M parameters, bf16 gradient in and bf16 parameter out, against what else is there. `make bench`.

Every row does the whole job: it starts from bf16 gradients and ends with bf16 parameters, casts included. ``fraction_of_copy`` is the
time that moving the fewest possible bytes would take at the copy bandwidth of the same run, over the time taken; it can pass 1, as a copy
writes memory that it has not read. DeepSpeed's row appears where DeepSpeed is installed (`make bench-peers` installs it).
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from zk.offload.cpu_adam import CPUAdam

NUMEL = 50_000_000
OPTIONS: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
Update = Callable[[], None]
# bytes that one parameter's update must move: gradient in; master, both moments in and out; parameter out
FP32_STATE, SPLIT, BF16_MOMENTS = 2 + 12 + 12 + 2, 2 + (2 + 2 + 8) * 2, 2 + (2 + 2 + 4) * 2


def zk(param: Tensor, grad: Tensor, **options: Any) -> Update:
    weight = nn.Parameter(param)
    weight.grad = grad
    optimizer = CPUAdam([weight], **OPTIONS, **options)
    return optimizer.step


def with_casts(param: Tensor, grad: Tensor, make: Callable[[list[Tensor]], torch.optim.Optimizer]) -> Update:
    """An fp32 optimizer over a master, as mixed precision uses it: cast the gradient, step, cast the parameter."""
    master = nn.Parameter(param.float())
    optimizer = make([master])
    wide = torch.empty_like(master)

    def update() -> None:
        master.grad = wide.copy_(grad)
        optimizer.step()
        param.copy_(master.detach())

    return update


def deepspeed(param: Tensor, grad: Tensor) -> Update:
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    return with_casts(param, grad, lambda masters: DeepSpeedCPUAdam(masters, adamw_mode=True, fp32_optimizer_states=True, **OPTIONS))


SYSTEMS: dict[str, tuple[int, Callable[[Tensor, Tensor], Update]]] = {
    "zk_split_master": (SPLIT, zk),
    "zk_fp32_master": (FP32_STATE, lambda p, g: zk(p, g, split_master=False)),
    "zk_split_bf16_moments": (BF16_MOMENTS, lambda p, g: zk(p, g, state_dtype=torch.bfloat16)),
    "zk_torch_engine": (SPLIT, lambda p, g: zk(p, g, engine="torch")),
    "deepspeed_cpu_adam": (FP32_STATE, deepspeed),
    "torch_fused": (FP32_STATE, lambda p, g: with_casts(p, g, lambda masters: torch.optim.AdamW(masters, fused=True, **OPTIONS))),
    "torch_foreach": (FP32_STATE, lambda p, g: with_casts(p, g, lambda masters: torch.optim.AdamW(masters, foreach=True, **OPTIONS))),
}


def check(make: Callable[[Tensor, Tensor], Update], loose: bool) -> None:
    """Three updates of a small case against plain AdamW, before anything is timed."""
    torch.manual_seed(0)
    param, grad = torch.randn(10_007).bfloat16(), torch.randn(10_007).bfloat16()
    reference = nn.Parameter(param.float())
    reference.grad = grad.float()
    optimizer = torch.optim.AdamW([reference], **OPTIONS)
    update = make(param, grad)
    for _ in range(3):
        update()
        optimizer.step()
    different = (param != reference.detach().bfloat16()).float().mean().item()
    assert different < (0.05 if loose else 1e-3), f"{different:.2%} of the parameters differ"


@pytest.mark.parametrize("system", SYSTEMS)
def test_cpu_adam(system: str, benchmark: Any, copy_gbps: float) -> None:
    nbytes, make = SYSTEMS[system]
    if system.startswith("deepspeed") and importlib.util.find_spec("deepspeed") is None:
        pytest.skip("DeepSpeed is not installed")
    check(make, loose="bf16_moments" in system)
    torch.manual_seed(0)
    update = make(torch.randn(NUMEL).bfloat16(), torch.randn(NUMEL).bfloat16())
    benchmark.pedantic(update, rounds=3 if system in ("torch_foreach", "zk_torch_engine") else 15, warmup_rounds=2)
    seconds = benchmark.stats.stats.median
    benchmark.extra_info.update(
        ns_per_parameter=round(seconds / NUMEL * 1e9, 3),
        gbps=round(nbytes * NUMEL / seconds / 1e9, 1),
        fraction_of_copy=round(nbytes * NUMEL / (copy_gbps * 1e9) / seconds, 2),
        copy_gbps=round(copy_gbps, 1),
        threads=torch.get_num_threads(),
    )
