"""The CPU update, bf16 gradient in and bf16 parameter out, by zk's engines and by torch's optimizers.

Every row does the whole job, casts included. The floor is the time that moving the fewest possible bytes takes at the copy bandwidth of
the same run; its fraction can pass 1, as a copy reads each line that it writes first, and an update in place has read it anyway.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from zk.kernels import codec
from zk.kernels.eight_bit import CODES
from zk.kernels.reference import AdamStep
from zk.offload.cpu_adam import adam_

from .clock import CPU, Case, Work

OPTIONS: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
Make = Callable[[Tensor, Tensor], Work]  # parameter and gradient, bf16 -> the update
# bytes that one parameter's update must move: gradient in; master, both moments in and out; parameter out
FP32_STATE, SPLIT, BF16_MOMENTS, EIGHT_BIT = 2 + 12 + 12 + 2, 2 + (2 + 2 + 8) * 2, 2 + (2 + 2 + 4) * 2, 2 + (2 + 1 + 2) * 2


def by_zk(param: Tensor, grad: Tensor, moments: torch.dtype = torch.float32, split: bool = True, **how: Any) -> Work:
    """Updates of one flat parameter by the CPU kernel."""
    kinds = codec.state_fields(param.dtype, ("exp_avg", "exp_avg_sq"), moments, split)
    fields = {name: torch.zeros_like(param, dtype=dtype) for name, dtype in kinds.items()}
    codec.start({**fields, "param": param}, param.clone())
    steps = (AdamStep.of(OPTIONS, True, count) for count in itertools.count(1))
    return lambda: adam_(param, grad, fields["master"], fields["exp_avg"], fields["exp_avg_sq"], next(steps), **how)


def with_casts(param: Tensor, grad: Tensor, make: Callable[[list[nn.Parameter]], torch.optim.Optimizer]) -> Work:
    """An fp32 optimizer over a master, as mixed precision uses it: cast the gradient, step, cast the parameter."""
    master = nn.Parameter(param.float())
    optimizer = make([master])
    wide = torch.empty_like(master)

    def update() -> None:
        master.grad = wide.copy_(grad)
        optimizer.step()
        param.copy_(master.detach())

    return update


def by_torch(param: Tensor, grad: Tensor, **how: Any) -> Work:
    """torch.optim.AdamW over a master."""
    return with_casts(param, grad, lambda masters: torch.optim.AdamW(masters, **OPTIONS, **how))


# bytes of one parameter, and what makes the update; zk's need numba but for its torch engine
SYSTEMS: dict[str, tuple[int, Make]] = {
    "zk_split_master": (SPLIT, by_zk),
    "zk_fp32_master": (FP32_STATE, functools.partial(by_zk, split=False)),
    "zk_split_bf16_moments": (BF16_MOMENTS, functools.partial(by_zk, moments=torch.bfloat16)),
    "zk_8bit_moments": (EIGHT_BIT, functools.partial(by_zk, moments=CODES)),
    "zk_torch_engine": (SPLIT, functools.partial(by_zk, engine="torch")),
    "torch_fused": (FP32_STATE, functools.partial(by_torch, fused=True)),
    "torch_foreach": (FP32_STATE, functools.partial(by_torch, foreach=True)),
}


def check(make: Make, loose: bool, device: torch.device = CPU) -> None:
    """Compare three updates of a small case with plain AdamW's; ``loose`` for moments in fewer bits than 32. RuntimeError if they differ."""
    generator = torch.Generator().manual_seed(0)
    param, grad = (torch.randn(10_007, generator=generator).bfloat16().to(device) for _ in range(2))
    reference = nn.Parameter(param.float())
    reference.grad = grad.float()
    optimizer = torch.optim.AdamW([reference], **OPTIONS)
    update = make(param, grad)
    for _ in range(3):
        update()
        optimizer.step()
    different = (param != reference.detach().bfloat16()).float().mean().item()
    if different >= (0.05 if loose else 1e-3):
        raise RuntimeError(f"{different:.2%} of the parameters differ from torch.optim.AdamW's after three updates")


def case(name: str, system: tuple[int, Make], numel: int, device: torch.device = CPU) -> Case:
    """The update of ``numel`` parameters by a system, which is checked first."""
    nbytes, make = system
    check(make, "_moments" in name, device)
    param, grad = (torch.randn(numel, device=device).bfloat16() for _ in range(2))
    return Case(name, make(param, grad), {"gbps": nbytes * numel / 1e9})
