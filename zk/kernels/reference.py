"""In and out: as the kernel of the same name. Plain PyTorch: what kernels are tested against, and what ops run in host memory."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from zk.kernels import codec, eight_bit
from zk.kernels.step import AdamStep

# elements worked on at once: six fp32 arrays of it fit in a core's L2 cache
CHUNK = 1 << 16


def unchecked(name: str, device: torch.device) -> Callable[..., None]:
    """The launcher of a kernel, for arguments that need no check; the reference in host memory, for which Triton is not imported."""
    near = device.type == "cpu"
    return globals()[name] if near else importlib.import_module(f"zk.kernels.{name}").launch  # type: ignore[no-any-return]


def reduce(rows: Tensor, out: Tensor, stats: Tensor | None = None, scale: float = 1.0) -> None:
    """``scale`` times the mean of ``rows`` (n, numel), summed in fp32 in their order, into ``out`` (numel,)."""
    if len(rows) == 1 and scale == 1.0 and stats is None:
        out.copy_(rows[0])
        return
    for start in range(0, out.numel(), CHUNK):
        piece = slice(start, start + CHUNK)
        wide = rows[0, piece].to(torch.float32, copy=True)
        for row in rows[1:]:
            wide += row[piece]
        if len(rows) > 1:
            wide /= len(rows)
        if scale != 1.0:
            wide *= scale
        out[piece] = wide
        if stats is not None:
            stats[0] += out[piece].double().square().sum()
            stats[1] += (~torch.isfinite(out[piece])).sum()


def flatten(tensors: Sequence[Tensor], flat: Tensor, bounds: Sequence[int], stats: Tensor | None = None, scale: float = 1.0) -> None:
    """Each tensor into its region of ``flat``, from one of ``bounds`` to the next; all else in regions is zeroed."""
    if stats is None and scale == 1.0 and list(bounds[1:-1:2]) == list(bounds[2::2]):  # no gaps between regions
        torch.cat(_padded(tensors, bounds, flat), out=flat[bounds[0] : bounds[-1]])
        return
    for index, (start, stop) in enumerate(zip(bounds[::2], bounds[1::2], strict=True)):
        end = start
        if index < len(tensors):
            end += tensors[index].numel()
            reduce(tensors[index].reshape(1, -1), flat[start:end], stats, scale)
        if end < stop:
            flat[end:stop].zero_()


def _padded(tensors: Sequence[Tensor], bounds: Sequence[int], flat: Tensor) -> list[Tensor]:
    """Tensors one after the other, each with the zeros that fill its region."""
    zero, parts = flat.new_zeros(1), list[Tensor]()
    for index, (start, stop) in enumerate(zip(bounds[::2], bounds[1::2], strict=True)):
        room = stop - start
        if index < len(tensors) and tensors[index].numel():
            parts.append(tensors[index].reshape(-1))
            room -= tensors[index].numel()
        if room:
            parts.append(zero.expand(room))
    return parts


def unflatten(flat: Tensor, tensors: Sequence[Tensor], bounds: Sequence[int], stats: Tensor | None = None, scale: float = 1.0) -> None:
    """Each region of ``flat``, from one of ``bounds`` to the next, into its tensor, as much as that holds."""
    for tensor, start in zip(tensors, bounds[::2], strict=True):
        reduce(flat[None, start : start + tensor.numel()], tensor.view(-1), stats, scale)


def update_chunks(
    fields: Mapping[str, Tensor],
    grad: Tensor,
    scale: float,
    update: Callable[[Tensor, Tensor, slice], Tensor | None],
    chunk: int = CHUNK,
) -> None:
    """Call ``update(x, g, piece)`` for each piece of ``chunk`` elements: x the fp32 master, changed in place, g the scaled fp32 gradient.

    Reads the master of ``fields`` in any layout (codec.py), and writes master and parameter back with one rounding. What is returned are bits
    for the rounding of a 24-bit one. Where a parameter is not its master rounded, somebody wrote it, and the master follows.
    """
    master = fields.get("master")
    chunk = chunk if grad.device.type == "cpu" else chunk << 8  # an accelerator wants few, long launches
    for start in range(0, len(grad), chunk):
        piece = slice(start, start + chunk)
        g = grad[piece].to(torch.float32, copy=True)
        if scale != 1.0:
            g.mul_(scale)
        here = {name: field[piece] for name, field in fields.items()}
        x, param = codec.read(here, "master"), here["param"]
        if master is not None and master.dtype == torch.float32:
            written = x.to(param.dtype) != param  # from outside, since the last update
            x.copy_(torch.where(written, param.float(), x))
        elif master is not None and master.dtype == torch.int16:
            here["exp_avg_sq"].abs_()
        codec.write(here, {"master": x}, update(x, g, piece))


def adam(
    param: Tensor, grad: Tensor, master: Tensor | None, exp_avg: Tensor, exp_avg_sq: Tensor, step: AdamStep, max_exp_avg_sq: Tensor | None = None
) -> None:
    """torch.optim.Adam and AdamW, operation for operation; ``max_exp_avg_sq`` (n,) fp32 goes with amsgrad, which only this one has."""
    bc2_sqrt = step.bias_corrections[1] ** 0.5
    coded = exp_avg.dtype == eight_bit.CODES

    def update(x: Tensor, g: Tensor, piece: slice) -> Tensor | None:
        mix = eight_bit.mixed(g, x, step.step) if coded else None
        if step.weight_decay != 0 and step.decoupled:
            x.mul_(1 - step.lr * step.weight_decay)
        elif step.weight_decay != 0:
            g = g.add(x, alpha=step.weight_decay)
        moments = {"exp_avg": exp_avg[piece], "exp_avg_sq": exp_avg_sq[piece]}
        m, v = (codec.read(moments, name).float() for name in moments)
        m.lerp_(g, 1 - step.beta1)
        v.mul_(step.beta2).addcmul_(g, g, value=1 - step.beta2)
        largest = v
        if step.amsgrad:
            assert max_exp_avg_sq is not None
            largest = max_exp_avg_sq[piece]
            torch.maximum(largest, v, out=largest)
        x.addcdiv_(m, (largest.sqrt() / bc2_sqrt).add_(step.eps), value=step.step_size)
        codec.write(moments, {"exp_avg": m, "exp_avg_sq": v}, mix)
        return mix

    fields = {"param": param, "exp_avg_sq": exp_avg_sq} | ({} if master is None else {"master": master})
    update_chunks(fields, grad, step.signed_scale, update)


def tiled_matmul(a: Tensor, b: Tensor, out: Tensor, plus: Tensor | None, bias: Tensor | None, activation: str, accumulate: bool = False) -> None:
    """``out = activation(plus + a @ b + bias)``: products and sums in fp32, one rounding at the end. ``accumulate``: plus is out."""
    plus = out if accumulate else plus
    if bias is None and not activation and plus is None and out.dtype in (a.dtype, torch.float32):
        torch.mm(a.to(out.dtype), b.to(out.dtype), out=out)  # the library's own kernel rounds once too
        return
    if bias is None and not activation and plus is out:
        out.addmm_(a.float(), b.float())
        return
    result = torch.mm(a.float(), b.float())
    if plus is not None:
        result += plus
    if bias is not None:
        result += bias
    if activation:
        result = ACTIVATIONS[activation](result)
    out.copy_(result)


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": torch.relu,
    "silu": torch.nn.functional.silu,
    "gelu": torch.nn.functional.gelu,
}
