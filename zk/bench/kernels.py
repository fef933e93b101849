"""In: a GPU. Out: each Triton kernel beside plain torch doing the same job, and the fraction of its floor: bytes at copy bandwidth, or flops.

On a CPU the rows named zk run the plain PyTorch references, and say nothing about the kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from zk import kernels
from zk.bench.clock import Report, Row, Work, copy_gbps, matmul_tflops, seconds_of
from zk.bench.link import the_gpu

# ---- cast with statistics ----------------------------------------------------------------------------------------------------------------


def cast_by_zk(x: Tensor, out: Tensor, stats: Tensor) -> None:
    """out = x / 2, with its sum of squares and the number of values that are not finite added to ``stats`` (2,)."""
    kernels.cast(x, out, scale=0.5, stats=stats)


def cast_by_torch(x: Tensor, out: Tensor, stats: Tensor) -> None:
    """The same."""
    scaled = x * 0.5
    out.copy_(scaled)
    stats += torch.stack([torch.linalg.vector_norm(scaled).double().square(), (~torch.isfinite(scaled)).sum().double()])


CASTS: dict[str, Callable[[Tensor, Tensor, Tensor], None]] = {"zk": cast_by_zk, "torch": cast_by_torch}

# ---- flatten -----------------------------------------------------------------------------------------------------------------------------


def _loop(tensors: list[Tensor], flat: Tensor, offsets: list[int]) -> None:
    for tensor, offset in zip(tensors, offsets, strict=True):
        flat[offset : offset + tensor.numel()].copy_(tensor.view(-1))


def _foreach(tensors: list[Tensor], flat: Tensor, offsets: list[int]) -> None:
    parts = [flat[offset : offset + tensor.numel()] for tensor, offset in zip(tensors, offsets, strict=True)]
    torch._foreach_copy_(parts, [tensor.view(-1) for tensor in tensors])


FLATTENS: dict[str, Callable[[list[Tensor], Tensor, list[int]], object]] = {
    "zk": lambda tensors, flat, offsets: kernels.flatten(tensors, flat, offsets),
    "torch_loop": _loop,
    "torch_foreach": _foreach,
    "torch_cat": lambda tensors, flat, offsets: torch.cat([tensor.view(-1) for tensor in tensors], out=flat),
}

# ---- adam --------------------------------------------------------------------------------------------------------------------------------

_LR, _BETA1, _BETA2, _EPS, _DECAY = 1e-3, 0.9, 0.95, 1e-8, 0.1


def adam_by_zk(param: Tensor, grad: Tensor, split: bool) -> Work:
    """Steps of the kernel, with a split or an fp32 master that starts from zeros or from ``param``."""
    exp_avg, exp_avg_sq = (torch.zeros(param.shape, device=param.device) for _ in range(2))
    master = torch.zeros(param.shape, dtype=torch.int16, device=param.device) if split else param.float()
    count = 0

    def step() -> None:
        nonlocal count
        count += 1
        kernels.adam(param, grad, master, exp_avg, exp_avg_sq, kernels.AdamStep(_LR, _BETA1, _BETA2, _EPS, _DECAY, True, count))

    return step


def adam_by_torch(param: Tensor, grad: Tensor, **how: bool) -> Work:
    """Steps of torch.optim.AdamW over an fp32 master, with the casts."""
    master = nn.Parameter(param.float())
    optimizer = torch.optim.AdamW([master], lr=_LR, betas=(_BETA1, _BETA2), eps=_EPS, weight_decay=_DECAY, **how)
    master.grad = torch.empty_like(master)

    def step() -> None:
        assert master.grad is not None
        master.grad.copy_(grad)
        optimizer.step()
        param.copy_(master.detach())

    return step


# bytes of one element, and what makes the step
ADAMS: dict[str, tuple[int, Callable[[Tensor, Tensor], Work]]] = {
    "zk_split_master": (26, lambda param, grad: adam_by_zk(param, grad, True)),
    "zk_fp32_master": (30, lambda param, grad: adam_by_zk(param, grad, False)),
    "torch_fused_with_casts": (28, lambda param, grad: adam_by_torch(param, grad, fused=True)),
    "torch_foreach_with_casts": (28, lambda param, grad: adam_by_torch(param, grad, foreach=True)),
}

# ---- matrix products ---------------------------------------------------------------------------------------------------------------------


def matmul(system: str, x: Tensor, weight: Tensor, total: Tensor, out: Tensor, bias: Tensor) -> None:
    """total (fp32) += x @ weight^T, then out = round(total + x @ weight^T + bias): two tiles of one output."""
    if system == "torch_fp32_sums":
        total += torch.mm(x, weight.t())
        out.copy_(total + torch.mm(x, weight.t()) + bias)
        return
    kernels.tiled_matmul(x, weight.t(), total, plus=total)
    kernels.tiled_matmul(x, weight.t(), out, plus=total, bias=bias)


# ---- all of them -------------------------------------------------------------------------------------------------------------------------


def _agree(what: str, right: bool) -> None:
    if not right:
        raise RuntimeError(f"{what} does not agree with plain torch, so it is not timed")


def measure(numel: int = 1 << 27, size: int = 4096, rounds: int = 15, device: torch.device | None = None) -> Report:
    """Every kernel, checked before it is timed, on ``numel`` elements, or matrices of ``size``.

    ``device``: None takes the GPU; ValueError where there is none.
    """
    device = the_gpu() if device is None else device
    copy, tflops = copy_gbps(device, 4 * numel, rounds), matmul_tflops(device, size, rounds=rounds)
    rows: list[Row] = []

    def add(name: str, work: Work, nbytes: int) -> None:
        rows.append(Row(name, seconds_of(work, rounds, device), nbytes / copy / 1e9, {"gbps": nbytes / 1e9}))

    x, stats = torch.randn(numel, device=device), torch.zeros(2, dtype=torch.float64, device=device)
    for name, cast in CASTS.items():
        out = torch.zeros(numel, dtype=torch.bfloat16, device=device)
        cast(x, out, stats.zero_())
        close = abs(stats[0].item() / (x * 0.5).double().square().sum().item() - 1) < 1e-2 and stats[1].item() == 0
        _agree(f"cast by {name}", torch.equal(out, (x * 0.5).bfloat16()) and close)
        add(f"cast with statistics: {name}", lambda c=cast, o=out: c(x, o, stats), 6 * numel)  # type: ignore[misc]
    tensors = [part.bfloat16() for part in x.chunk(64)]
    offsets = [sum(part.numel() for part in tensors[:index]) for index in range(len(tensors))]
    for name, flatten in FLATTENS.items():
        flat = torch.full((numel,), float("nan"), dtype=torch.bfloat16, device=device)
        flatten(tensors, flat, offsets)
        _agree(f"flatten by {name}", torch.equal(flat, x.bfloat16()))
        add(f"flatten {len(tensors)} tensors: {name}", lambda f=flatten, o=flat: f(tensors, o, offsets), 4 * numel)  # type: ignore[misc]
    for name, (per_element, make) in ADAMS.items():
        param, grad = torch.randn(10_007, device=device).bfloat16(), torch.randn(10_007, device=device).bfloat16()
        want = param.clone()
        update, reference = make(param, grad), adam_by_torch(want, grad)
        for _ in range(3):
            update(), reference()
        _agree(f"adam by {name}", (param != want).float().mean().item() < 1e-3)
        add(f"adam: {name}", make(x.bfloat16(), x.bfloat16()), per_element * numel)
    rows += _matmuls(size, rounds, device, tflops)
    settings: dict[str, Any] = {"numel": numel, "size": size, "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"}
    return Report("kernels", {"copy_gbps": copy, "matmul_tflops": tflops}, rows, settings)


def _matmuls(size: int, rounds: int, device: torch.device, tflops: float) -> list[Row]:
    rows = []
    x, weight = (torch.randn(size, size, device=device).bfloat16() for _ in range(2))
    bias, flops = torch.randn(size, device=device).bfloat16(), 4 * size**3
    want = 2 * (x.float() @ weight.float().t()) + bias
    for name in ("zk", "torch_fp32_sums"):
        total, out = torch.zeros(size, size, device=device), torch.empty(size, size, dtype=torch.bfloat16, device=device)
        matmul(name, x, weight, total, out, bias)
        _agree(f"tiled_matmul by {name}", ((out.float() - want).norm() / want.norm()).item() < 4e-3)
        seconds = seconds_of(lambda n=name, t=total, o=out: matmul(n, x, weight, t, o, bias), rounds, device)  # type: ignore[misc]
        rows.append(Row(f"tiled_matmul, 2 tiles: {name}", seconds, flops / tflops / 1e12, {"tflops": flops / 1e12}))
    return rows
