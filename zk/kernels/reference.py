"""Each kernel in plain PyTorch: what it is tested against, and what runs in host memory."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from zk.kernels import codec, eight_bit
from zk.kernels.step import AdamStep

# elements worked on at once: six fp32 arrays of it fit in a core's L2 cache
CHUNK = 1 << 16
Master = Tensor | None


def unchecked(name: str, device: torch.device) -> Callable[..., Any]:
    """What runs a kernel without checks: in host memory its reference, without Triton."""
    if device.type == "cpu":
        return globals()[name]  # type: ignore[no-any-return]
    launch: Callable[..., Any] = importlib.import_module(f"zk.kernels.{name}_kernel").launch
    return launch


def reduce(rows: Tensor, out: Tensor) -> None:
    """The mean of ``rows`` (n, numel), summed in fp32 in their order, into ``out`` (numel,)."""
    for start in range(0, out.numel(), CHUNK):
        piece = slice(start, start + CHUNK)
        wide = rows[0, piece].to(torch.float32, copy=True)
        for row in rows[1:]:
            wide += row[piece]
        out[piece] = wide.div_(len(rows))


def flatten(tensors: Sequence[Tensor], flat: Tensor, bounds: Sequence[int]) -> None:
    """Each tensor, and zeros, into its region of ``flat``: from one of ``bounds`` to the next."""
    parts, zero = list[Tensor](), flat.new_zeros(1, dtype=tensors[0].dtype)
    for tensor, start, stop in zip(tensors, bounds[::2], bounds[1::2], strict=True):
        parts += [tensor.reshape(-1), zero.expand(stop - start - tensor.numel())]
    torch.cat(parts, out=flat[bounds[0] : bounds[-1]])


def adam(
    param: Tensor, grad: Tensor, master: Master, exp_avg: Tensor, exp_avg_sq: Tensor, step: AdamStep
) -> None:
    """torch.optim.Adam and AdamW, operation for operation, for any layout of the master (codec.py).

    Where a parameter is not its master rounded, somebody wrote it, and the master follows.
    """
    bc2_sqrt = step.bias_corrections[1] ** 0.5
    fields = {"param": param, "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}
    fields |= {} if master is None else {"master": master}
    for start in range(0, len(grad), CHUNK):
        here = {name: field[start : start + CHUNK] for name, field in fields.items()}
        g = grad[start : start + CHUNK].to(torch.float32, copy=True)
        if step.signed_scale != 1.0:
            g.mul_(step.signed_scale)
        m, v = (codec.read(here, name).float() for name in ("exp_avg", "exp_avg_sq"))
        x, p = codec.read(here, "master"), here["param"]
        if master is not None and master.dtype == torch.float32:
            x.copy_(torch.where(x.to(p.dtype) == p, x, p.float()))
        mix = eight_bit.mixed(g, x, step.step) if exp_avg.dtype == eight_bit.CODES else None
        if step.decoupled:
            x.mul_(1 - step.lr * step.weight_decay)
        elif step.weight_decay != 0:
            g = g.add(x, alpha=step.weight_decay)
        m.lerp_(g, 1 - step.beta1)
        v.mul_(step.beta2).addcmul_(g, g, value=1 - step.beta2)
        x.addcdiv_(m, (v.sqrt() / bc2_sqrt).add_(step.eps), value=step.step_size)
        codec.write(here, {"master": x, "exp_avg": m, "exp_avg_sq": v}, mix)


def tiled_matmul(
    a: Tensor, b: Tensor, out: Tensor, plus: Tensor | None, bias: Tensor | None
) -> None:
    """``out = plus + a @ b + bias``: products and sums in fp32, one rounding at the end."""
    if bias is None and plus is None and out.dtype in (a.dtype, torch.float32):
        torch.mm(a.to(out.dtype), b.to(out.dtype), out=out)  # the library's own rounds once too
        return
    if bias is None and plus is out:
        out.addmm_(a.float(), b.float())
        return
    result = torch.mm(a.float(), b.float())
    for added in (plus, bias):
        if added is not None:
            result += added
    out.copy_(result)
