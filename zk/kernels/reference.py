"""Each kernel in plain PyTorch: what it is tested against, and what runs in host memory.

``AdamStep`` has the scalars of one Adam update, which all of them take.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from zk.kernels import codec, eight_bit

# elements worked on at once: six fp32 arrays of it fit in a core's L2 cache
CHUNK = 1 << 16
Master = Tensor | None


@dataclasses.dataclass(frozen=True, slots=True)
class AdamStep:
    """The scalars of one update."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    decoupled: bool
    """True for AdamW, False for Adam."""
    step: int
    """Of this update, from 1."""
    grad_scale: float = 1.0
    """The factor of the gradient: clipping, and one over the loss scale."""
    maximize: bool = False

    def __post_init__(self) -> None:
        if self.step < 1:
            raise ValueError(f"step counts from 1; got {self.step}")

    @classmethod
    def of(
        cls, group: Mapping[str, Any], decoupled: bool, number: int, grad_scale: float = 1.0
    ) -> AdamStep:
        """The scalars of an update, by a param_group; ``decoupled`` where this does not say it."""
        given = group["lr"], *group["betas"], group["eps"], group["weight_decay"]
        lr, beta1, beta2, eps, decay = map(float, given)
        flags = (("decoupled_weight_decay", decoupled), ("maximize", False))
        decoupled, maximize = (bool(group.get(*option)) for option in flags)
        return cls(lr, beta1, beta2, eps, decay, decoupled, number, grad_scale, maximize)

    @property
    def bias_corrections(self) -> tuple[float, float]:
        return 1 - self.beta1**self.step, 1 - self.beta2**self.step

    @property
    def step_size(self) -> float:
        return (self.lr / self.bias_corrections[0]) * -1

    @property
    def signed_scale(self) -> float:
        return -self.grad_scale if self.maximize else self.grad_scale

    @functools.lru_cache(maxsize=64)  # noqa: B019
    def scalars(self) -> tuple[Any, ...]:
        """The scalars of the one-pass kernels, as fp32: scale, l2, decay, lerp, from_grad, beta2,
        one_minus_beta2, bc2_sqrt, eps, step_size; and what rounding to 8-bit codes mixes in.

        With a beta1 of at most 0.5, torch interpolates from the gradient's side:
        m = fma(-beta1, g - m, g).
        """
        weight = 1 - self.beta1
        numbers: tuple[Any, ...] = (
            self.signed_scale,
            self.weight_decay * (not self.decoupled),
            1 - self.lr * self.weight_decay * self.decoupled,
            np.float32(weight) - np.float32(weight >= 0.5),
            *(self.beta2, 1 - self.beta2, math.sqrt(self.bias_corrections[1])),
            *(self.eps, self.step_size),
        )
        scale, l2, decay, lerp, *others = map(np.float32, numbers)
        seed = np.uint32(self.step * eight_bit.GOLDEN & 0xFFFFFFFF)
        return scale, l2, decay, lerp, weight >= 0.5, *others, seed

    def check_coded(self) -> None:
        """Raise ValueError if moments in 8 bits cannot be held for these options."""
        if not self.eps >= 0.99e-8:
            raise ValueError(
                "8-bit moments need an eps of at least 1e-8, as smaller second moments are not "
                f"told apart; got {self.eps}"
            )
        carried = 1 - self.beta1**2 / max(self.beta2, 1e-300)
        most = self.beta1 * (1 - self.beta1) / math.sqrt(max((1 - self.beta2) * carried, 1e-300))
        if not most <= 15:
            raise ValueError(
                "8-bit first moments hold up to 15 times the root of the second one, and betas "
                f"({self.beta1}, {self.beta2}) may make it {most:.3g} times that; lower the second "
                "one, raise the first, or keep moments in fp32 or bf16"
            )


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
    parts: list[Tensor] = []
    for tensor, start, stop in zip(tensors, bounds[::2], bounds[1::2], strict=True):
        parts.append(tensor.reshape(-1))
        if gap := stop - start - tensor.numel():
            parts.append(tensor.new_zeros(gap))
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
