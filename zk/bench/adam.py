"""In: a number of parameters. Out: the CPU update of so many, bf16 gradient in and bf16 parameter out, by zk's engines and by torch's optimizers.

Every row does the whole job, casts included. The floor is the time that moving the fewest possible bytes takes at the copy bandwidth of
the same run; its fraction can pass 1, as a copy reads each line that it writes first, and an update in place has read it anyway.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from zk.bench.clock import Report, Row, Work, copy_gbps, seconds_of
from zk.offload.cpu_adam import CPUAdam

OPTIONS: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
Make = Callable[[Tensor, Tensor], Work]
# bytes that one parameter's update must move: gradient in; master, both moments in and out; parameter out
FP32_STATE, SPLIT, BF16_MOMENTS = 2 + 12 + 12 + 2, 2 + (2 + 2 + 8) * 2, 2 + (2 + 2 + 4) * 2


def by_zk(param: Tensor, grad: Tensor, **options: Any) -> Work:
    """CPUAdam over one flat parameter."""
    weight = nn.Parameter(param)
    weight.grad = grad
    optimizer = CPUAdam([weight], **OPTIONS, **options)
    return optimizer.step


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


# bytes of one parameter, and what makes the update; the first four need numba
SYSTEMS: dict[str, tuple[int, Make]] = {
    "zk_split_master": (SPLIT, by_zk),
    "zk_fp32_master": (FP32_STATE, lambda param, grad: by_zk(param, grad, split_master=False)),
    "zk_split_bf16_moments": (BF16_MOMENTS, lambda param, grad: by_zk(param, grad, state_dtype=torch.bfloat16)),
    "zk_torch_engine": (SPLIT, lambda param, grad: by_zk(param, grad, engine="torch")),
    "torch_fused": (FP32_STATE, lambda param, grad: by_torch(param, grad, fused=True)),
    "torch_foreach": (FP32_STATE, lambda param, grad: by_torch(param, grad, foreach=True)),
}


def check(make: Make, loose: bool) -> None:
    """Three updates of a small case against plain AdamW, before anything is timed; ``loose`` for moments in 16 bits."""
    generator = torch.Generator().manual_seed(0)
    param, grad = (torch.randn(10_007, generator=generator).bfloat16() for _ in range(2))
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


def measure(numel: int = 10_000_000, rounds: int = 9) -> Report:
    """All systems, each checked before it is timed; zk's default engine is left out where numba is not installed."""
    copy = copy_gbps(torch.device("cpu"), rounds=rounds, nbytes=min(1 << 29, 16 * numel))
    rows = []
    for name, (nbytes, make) in SYSTEMS.items():
        if name.startswith("zk") and "torch" not in name and importlib.util.find_spec("numba") is None:
            continue
        check(make, loose="bf16_moments" in name)
        update = make(torch.randn(numel).bfloat16(), torch.randn(numel).bfloat16())
        seconds = seconds_of(update, rounds)
        row = Row(name, seconds, nbytes * numel / copy / 1e9, {"gbps": nbytes * numel / 1e9})
        row.notes["ns_per_parameter"] = row.median_s / numel * 1e9
        rows.append(row)
    return Report("adam", {"copy_gbps": copy}, rows, {"numel": numel, "threads": torch.get_num_threads()})
