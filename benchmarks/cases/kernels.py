"""Each Triton kernel beside plain torch doing the same job, on a GPU.

On a CPU the rows named zk run the plain PyTorch references, and say nothing about the kernels.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from zk import kernels

from . import adam
from .clock import Case, Report, Work, copy_gbps, matmul_tflops, the_gpu

Kernel = Callable[..., object]


def reduce_by_torch(rows: Tensor, out: Tensor) -> None:
    """out = the mean of ``rows``."""
    out.copy_(rows.mean(0, dtype=torch.float32))


# of (rows, out)
REDUCES: dict[str, Kernel] = {"zk": kernels.reduce, "torch": reduce_by_torch}
RANKS = (1, 4)  # rows: of one rank it is a cast


def _parts(tensors: Sequence[Tensor], flat: Tensor, offsets: Sequence[int]) -> list[Tensor]:
    return [flat[offset : offset + tensor.numel()] for tensor, offset in zip(tensors, offsets, strict=True)]


# of (tensors, flat, offsets)
FLATTENS: dict[str, Kernel] = {
    "zk": lambda tensors, flat, offsets: kernels.flatten(list(tensors), flat, list(offsets)),
    "torch_loop": lambda tensors, *place: [part.copy_(tensor.view(-1)) for part, tensor in zip(_parts(tensors, *place), tensors, strict=True)],
    "torch_foreach": lambda tensors, *place: torch._foreach_copy_(_parts(tensors, *place), [tensor.view(-1) for tensor in tensors]),
    "torch_cat": lambda tensors, flat, offsets: torch.cat([tensor.view(-1) for tensor in tensors], out=flat),
    "fsdp2_chunk_cat": lambda tensors, flat, offsets: torch._chunk_cat([tensor.view(-1) for tensor in tensors], 0, 1, out=flat.view(1, -1)),
}


def adam_by_zk(param: Tensor, grad: Tensor, split: bool) -> Work:
    """Steps of the kernel, with a split or an fp32 master that starts from zeros or from ``param``."""
    exp_avg, exp_avg_sq = (torch.zeros(param.shape, device=param.device) for _ in range(2))
    master = torch.zeros(param.shape, dtype=torch.int16, device=param.device) if split else param.float()
    lr, (beta1, beta2), eps, decay = adam.OPTIONS.values()
    steps = (kernels.AdamStep(lr, beta1, beta2, eps, decay, True, count) for count in itertools.count(1))
    return lambda: kernels.adam(param, grad, master, exp_avg, exp_avg_sq, next(steps))


ADAMS: dict[str, tuple[int, adam.Make]] = {
    "zk_split_master": (26, functools.partial(adam_by_zk, split=True)),
    "zk_fp32_master": (30, functools.partial(adam_by_zk, split=False)),
    "torch_fused_with_casts": (28, functools.partial(adam.by_torch, fused=True)),
    "torch_foreach_with_casts": (28, functools.partial(adam.by_torch, foreach=True)),
}
MATMULS = ("zk", "torch_fp32_sums")


def matmul(system: str, x: Tensor, weight: Tensor, total: Tensor, out: Tensor, bias: Tensor) -> None:
    """total (fp32) += x @ weight^T, then out = round(total + x @ weight^T + bias): two tiles of one output."""
    if system == "torch_fp32_sums":
        total += torch.mm(x, weight.t())
        out.copy_(total + torch.mm(x, weight.t()) + bias)
        return
    kernels.tiled_matmul(x, weight.t(), total, plus=total)
    kernels.tiled_matmul(x, weight.t(), out, plus=total, bias=bias)


def reduce_case(name: str, reduce: Kernel, ranks: int, numel: int, device: torch.device) -> Case:
    """Gradients of ``ranks`` ranks in bf16 to their mean."""
    rows = torch.randn(ranks, numel, device=device).bfloat16()
    out = torch.zeros(numel, dtype=torch.bfloat16, device=device)
    reduce(rows, out)
    work = functools.partial(reduce, rows, out)
    is_right = torch.allclose(out.double(), rows.double().mean(0), rtol=2**-8, atol=1e-6)
    return Case.checked(f"reduce {ranks} rows: {name}", is_right, work, gbps=2 * (ranks + 1) * numel / 1e9)


def flatten_case(name: str, flatten: Kernel, count: int, numel: int, device: torch.device) -> Case:
    """``numel`` elements, in ``count`` bf16 tensors, into one."""
    x = torch.randn(numel, device=device).bfloat16()
    tensors = [part.clone() for part in x.chunk(count)]
    offsets = [index * len(tensors[0]) for index in range(len(tensors))]
    flat = torch.full_like(x, float("nan"))
    flatten(tensors, flat, offsets)
    work = functools.partial(flatten, tensors, flat, offsets)
    return Case.checked(f"flatten {len(tensors)} tensors: {name}", torch.equal(flat, x), work, gbps=2 * flat.nbytes / 1e9)


def matmul_case(name: str, size: int, device: torch.device) -> Case:
    """Two tiles of one output."""
    x, weight = (torch.randn(size, size, device=device).bfloat16() for _ in range(2))
    bias = torch.randn(size, device=device).bfloat16()
    total, out = torch.zeros(size, size, device=device), torch.empty_like(x)
    matmul(name, x, weight, total, out, bias)
    want = 2 * (x.float() @ weight.float().t()) + bias
    is_right = ((out.float() - want).norm() / want.norm()).item() < 4e-3
    work = functools.partial(matmul, name, x, weight, total, out, bias)
    return Case.checked(f"tiled_matmul, 2 tiles: {name}", is_right, work, tflops=4 * size**3 / 1e12)


def _cases(numel: int, size: int, device: torch.device) -> Iterator[Case]:
    for ranks, (name, reduce) in itertools.product(RANKS, REDUCES.items()):
        yield reduce_case(name, reduce, ranks, numel, device)
    for name, flatten in FLATTENS.items():
        yield flatten_case(name, flatten, 64, numel, device)
    for name, system in ADAMS.items():
        yield adam.case(f"adam: {name}", system, numel, device)
    for name in MATMULS:
        yield matmul_case(name, size, device)


def measure(numel: int = 1 << 27, size: int = 4096, rounds: int = 15, device: torch.device | None = None) -> Report:
    """Every kernel, checked before it is timed, on ``numel`` elements, or matrices of ``size``.

    ``device``: None takes the GPU; ValueError where there is none.
    """
    device = the_gpu() if device is None else device
    floors = {"copy_gbps": copy_gbps(device, 4 * numel, rounds), "matmul_tflops": matmul_tflops(device, size, rounds=rounds)}
    found = Report.of("kernels", _cases(numel, size, device), floors, rounds, device)
    found.settings.update(numel=numel, size=size, device=torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu")
    return found
