"""In: gradients, parameters and Adam's state in host memory. Out: all updated, bitwise the same for any number of threads and any chunking.

Two engines under one function, ``adam_``: "numba", one pass over memory (cpu_adam_numba.py), and "torch", foreach-style torch ops over
chunks that fit the cache, which runs wherever torch does (any device) and is bitwise equal to torch.optim.Adam and AdamW.
Layouts of the fp32 master, told apart by what is passed as ``master``: None (the parameter is fp32 and is the master), fp32
(a separate master), int16 (a split master: see split.py). Moments are fp32, or bf16 by choice.
Source: Adam, arXiv 1412.6980; decoupled weight decay, arXiv 1711.05101; the CPU update of ZeRO-Offload, arXiv 2101.06840, section 5.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import os
from collections.abc import Callable, Iterable
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from zk.offload.split import join, split_

Engine = Literal["numba", "torch"]
# elements of one chunk of the torch engine: six fp32 arrays of it fit in a core's L2 cache
CHUNK = 1 << 16


@functools.cache
def default_engine() -> Engine:
    """"numba" where it can be imported, else "torch"; the environment variable ZK_CPU_ADAM names one of them instead."""
    wanted = os.environ.get("ZK_CPU_ADAM", "")
    if wanted not in ("", "numba", "torch"):
        raise ValueError(f"the environment variable ZK_CPU_ADAM must be 'numba' or 'torch'; got {wanted!r}")
    if wanted == "torch":
        return "torch"
    try:
        import numba  # noqa: F401
    except ImportError:
        if wanted == "numba":
            raise
        return "torch"
    return "numba"


def default_threads() -> int:
    """Cores this process may use, shared with the other ranks that torchrun started on this machine."""
    return max(1, len(os.sched_getaffinity(0)) // max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))


@dataclasses.dataclass(frozen=True, slots=True)
class AdamStep:
    """The scalars of one update. ``step`` counts from 1; ``grad_scale`` multiplies the gradient (clipping, loss scale)."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    decoupled: bool  # AdamW rather than Adam
    step: int
    grad_scale: float = 1.0
    maximize: bool = False
    amsgrad: bool = False

    @property
    def bias_corrections(self) -> tuple[float, float]:
        return 1 - self.beta1**self.step, 1 - self.beta2**self.step

    @property
    def step_size(self) -> float:
        return (self.lr / self.bias_corrections[0]) * -1

    @property
    def signed_scale(self) -> float:
        return -self.grad_scale if self.maximize else self.grad_scale


def adam_(
    param: Tensor,
    grad: Tensor,
    master: Tensor | None,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    step: AdamStep,
    *,
    max_exp_avg_sq: Tensor | None = None,
    engine: Engine | None = None,
    num_threads: int | None = None,
) -> None:
    """One Adam or AdamW update, in place.

    Args:
        param: (n,) fp32, bf16 or fp16, contiguous. fp32 if and only if ``master`` is None.
        grad: (n,) fp32, bf16 or fp16.
        master: None, (n,) fp32, or (n,) int16 (split master, with a bf16 parameter).
        exp_avg, exp_avg_sq: (n,) fp32 or bf16, both alike. With a split master the sign of exp_avg_sq carries a bit.
        step: the scalars.
        max_exp_avg_sq: (n,) fp32, for amsgrad; it runs on the torch engine.
        engine: None takes ``default_engine()`` for host memory, "torch" elsewhere.
        num_threads: of the numba engine; None takes ``default_threads()``. The torch engine uses torch's.

    Raises ValueError on sizes or dtypes that do not fit together.
    """
    _check(param, grad, master, exp_avg, exp_avg_sq)
    if param.numel() == 0:
        return
    if engine is None:
        engine = default_engine() if param.device.type == "cpu" else "torch"
    if engine == "torch" or step.amsgrad:
        _adam_torch(param, grad, master, exp_avg, exp_avg_sq, max_exp_avg_sq, step)
        return
    from zk.offload import cpu_adam_numba

    weight = 1 - step.beta1
    scalars = (
        np.float32(step.signed_scale),
        np.float32(0 if step.decoupled else step.weight_decay),
        np.float32(1 - step.lr * step.weight_decay if step.decoupled else 1),
        np.float32(weight) if weight < 0.5 else np.float32(weight) - np.float32(1),
        weight >= 0.5,
        np.float32(step.beta2),
        np.float32(1 - step.beta2),
        np.float32(math.sqrt(step.bias_corrections[1])),
        np.float32(step.eps),
        np.float32(step.step_size),
    )
    arrays = [as_numpy(tensor) if tensor is not None else None for tensor in (param, grad, master, exp_avg, exp_avg_sq)]
    cpu_adam_numba.adam(*arrays, scalars, num_threads or default_threads())  # type: ignore[call-arg, arg-type]


def _check(param: Tensor, grad: Tensor, master: Tensor | None, exp_avg: Tensor, exp_avg_sq: Tensor) -> None:
    for name, tensor in (("grad", grad), ("master", master), ("exp_avg", exp_avg), ("exp_avg_sq", exp_avg_sq)):
        if tensor is not None and (tensor.shape != param.shape or tensor.ndim != 1 or not tensor.is_contiguous()):
            raise ValueError(f"{name} must be flat, contiguous and as long as param {tuple(param.shape)}; got {tuple(tensor.shape)}")
    for name, tensor in (("param", param), ("grad", grad)):
        if tensor.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise ValueError(f"{name} must be fp32, bf16 or fp16; got {tensor.dtype}")
    if master is not None and master.dtype not in (torch.float32, torch.int16):
        raise ValueError(f"master must be fp32, or int16 (split); got {master.dtype}")
    if (master is None) != (param.dtype == torch.float32):
        raise ValueError(f"a master goes with a 16-bit parameter, and only with one; got param {param.dtype}, master {master is not None}")
    if master is not None and master.dtype == torch.int16 and param.dtype != torch.bfloat16:
        raise ValueError(f"a split master needs a bf16 parameter; got {param.dtype}")
    if exp_avg.dtype != exp_avg_sq.dtype or exp_avg.dtype not in (torch.float32, torch.bfloat16):
        raise ValueError(f"moments must both be fp32 or both bf16; got {exp_avg.dtype} and {exp_avg_sq.dtype}")


def as_numpy(tensor: Tensor) -> np.ndarray:
    """The same memory as numpy: fp32 as float32, the bits of bf16 (and of a split master) as uint16, of fp16 as int16."""
    if tensor.dtype == torch.float32:
        return tensor.numpy()
    bits: np.ndarray = tensor.view(torch.int16).numpy()
    return bits if tensor.dtype == torch.float16 else bits.view(np.uint16)


def update_chunks(
    param: Tensor, grad: Tensor, master: Tensor | None, exp_avg_sq: Tensor | None, scale: float, update: Callable[[Tensor, Tensor, slice], None]
) -> None:
    """Call ``update(x, g, piece)`` for each cache-sized piece: x the fp32 master, changed in place, g the scaled fp32 gradient.

    Reads the master in any layout and writes master and parameter back with one rounding. ``exp_avg_sq`` goes with a split master.
    Where a parameter is not its master rounded, somebody wrote it, and the master follows.
    """
    chunk = CHUNK if param.device.type == "cpu" else CHUNK << 8  # an accelerator wants few, long launches
    for start in range(0, param.numel(), chunk):
        piece = slice(start, start + chunk)
        g = grad[piece].to(torch.float32, copy=True)
        if scale != 1.0:
            g.mul_(scale)
        if master is None:
            update(param[piece], g, piece)
        elif master.dtype == torch.float32:
            x = master[piece]
            written = x.to(param.dtype) != param[piece]  # from outside, since the last update
            x.copy_(torch.where(written, param[piece].float(), x))
            update(x, g, piece)
            param[piece] = x
        else:
            assert exp_avg_sq is not None
            x = join(param[piece], master[piece], exp_avg_sq[piece])
            exp_avg_sq[piece].abs_()
            update(x, g, piece)
            split_(x, param[piece], master[piece], exp_avg_sq[piece])


def _adam_torch(
    param: Tensor, grad: Tensor, master: Tensor | None, exp_avg: Tensor, exp_avg_sq: Tensor, max_exp_avg_sq: Tensor | None, step: AdamStep
) -> None:
    bc2_sqrt = step.bias_corrections[1] ** 0.5

    def update(x: Tensor, g: Tensor, piece: slice) -> None:
        if step.weight_decay != 0 and step.decoupled:
            x.mul_(1 - step.lr * step.weight_decay)
        elif step.weight_decay != 0:
            g = g.add(x, alpha=step.weight_decay)
        m, v = exp_avg[piece].float(), exp_avg_sq[piece].float()
        m.lerp_(g, 1 - step.beta1)
        v.mul_(step.beta2).addcmul_(g, g, value=1 - step.beta2)
        largest = v
        if step.amsgrad:
            assert max_exp_avg_sq is not None
            largest = max_exp_avg_sq[piece]
            torch.maximum(largest, v, out=largest)
        x.addcdiv_(m, (largest.sqrt() / bc2_sqrt).add_(step.eps), value=step.step_size)
        if exp_avg.dtype != torch.float32:
            exp_avg[piece], exp_avg_sq[piece] = m, v

    update_chunks(param, grad, master, exp_avg_sq, step.signed_scale, update)


def sum_of_squares(grad: Tensor, num_threads: int | None = None) -> float:
    """The sum of squares of ``grad`` (n,) in float64: not finite exactly if some element is not. The same for any number of threads."""
    if grad.numel() == 0:
        return 0.0
    if grad.device.type == "cpu" and default_engine() == "numba":
        from zk.offload import cpu_adam_numba

        return cpu_adam_numba.sum_of_squares(as_numpy(grad), num_threads or default_threads())
    total = torch.zeros((), dtype=torch.float64, device=grad.device)
    for piece in grad.split(CHUNK):
        wide = piece.double()
        total += torch.dot(wide, wide)
    return float(total)


class CPUAdam(torch.optim.Optimizer):
    """Adam or AdamW for parameters in host memory, on its own: 16-bit parameters get an fp32 master, everything is one pass.

    Args:
        params: fp32, bf16 or fp16 parameters in host memory, contiguous; or param groups.
        lr, betas, eps, weight_decay, maximize: as for torch.optim.AdamW.
        decoupled: True for AdamW, False for Adam.
        split_master: bf16 parameters keep the lower half of their master only: 2 bytes per parameter less, bitwise the same results.
        state_dtype: torch.float32, or torch.bfloat16 to halve the moments, which changes results.
        engine: "numba" or "torch"; None takes the faster one that is there.
        num_threads: None takes the cores of this process.

    ``state_dict()`` holds plain ``step``, ``exp_avg``, ``exp_avg_sq`` in fp32, and ``master`` for 16-bit parameters.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        maximize: bool = False,
        decoupled: bool = True,
        split_master: bool = True,
        state_dtype: torch.dtype = torch.float32,
        engine: Engine | None = None,
        num_threads: int | None = None,
    ) -> None:
        if state_dtype not in (torch.float32, torch.bfloat16):
            raise ValueError(f"state_dtype must be torch.float32 or torch.bfloat16; got {state_dtype!r}")
        if engine not in (None, "numba", "torch"):
            raise ValueError(f"engine must be 'numba', 'torch' or None; got {engine!r}")
        for name, value in (("lr", lr), ("eps", eps), ("weight_decay", weight_decay)):
            if not isinstance(value, (int, float, Tensor)) or not value >= 0:
                raise ValueError(f"{name} must be 0 or more; got {value!r}")
        if not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"betas must be at least 0 and less than 1; got {betas!r}")
        self.decoupled, self.split_master, self.state_dtype = decoupled, split_master, state_dtype
        self.engine, self.num_threads = engine, num_threads
        if num_threads is not None and (isinstance(num_threads, bool) or not isinstance(num_threads, int) or num_threads < 1):
            raise ValueError(f"num_threads must be at least 1, or None for all cores; got {num_threads!r}")
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "maximize": maximize})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; ValueError for parameters that are not as ``params`` must be."""
        super().add_param_group(param_group)
        for param in self.param_groups[-1]["params"]:
            if param.device.type != "cpu" or not param.is_contiguous() or param.dtype not in (torch.float32, torch.bfloat16, torch.float16):
                self.param_groups.pop()
                raise ValueError(
                    f"CPUAdam takes contiguous fp32, bf16 or fp16 parameters in host memory; got {param.dtype} of shape "
                    f"{tuple(param.shape)} on {param.device}, contiguous={param.is_contiguous()}"
                )

    def _start(self, param: Tensor) -> dict[str, Any]:
        state: dict[str, Any] = {"step": torch.tensor(0.0)}
        for name in ("exp_avg", "exp_avg_sq"):
            state[name] = torch.zeros_like(param, dtype=self.state_dtype)
        if param.dtype == torch.bfloat16 and self.split_master:
            state["low"] = torch.zeros_like(param, dtype=torch.int16)
        elif param.dtype != torch.float32:
            state["master"] = param.detach().float()
        return state

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Update every parameter that has a gradient; returns the closure's loss, or None."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                if param.grad.layout is not torch.strided:
                    raise TypeError(f"CPUAdam takes dense gradients; got {param.grad.layout} for a parameter of shape {tuple(param.shape)}")
                state = self.state[param] or self.state.setdefault(param, {})
                if not state:
                    state.update(self._start(param))
                state["step"] += 1
                scalars = AdamStep(
                    lr=float(group["lr"]),
                    beta1=group["betas"][0],
                    beta2=group["betas"][1],
                    eps=group["eps"],
                    weight_decay=group["weight_decay"],
                    decoupled=self.decoupled,
                    step=int(state["step"]),
                    maximize=group["maximize"],
                )
                master = state.get("low", state.get("master"))
                adam_(
                    param.detach().view(-1),
                    param.grad.contiguous().view(-1),
                    None if master is None else master.view(-1),
                    state["exp_avg"].view(-1),
                    state["exp_avg_sq"].view(-1),
                    scalars,
                    engine=self.engine,
                    num_threads=self.num_threads,
                )
                torch.autograd.graph.increment_version(param)
        return loss

    def state_dict(self) -> dict[str, Any]:
        """As torch.optim.AdamW's, with the master of 16-bit parameters beside the moments, all in fp32."""
        plain = super().state_dict()
        params = [param for group in self.param_groups for param in group["params"]]
        for index, state in plain["state"].items():
            plain["state"][index] = entry = dict(state)
            if "low" in entry:
                flat = join(params[index].detach().view(-1), entry.pop("low").view(-1), entry["exp_avg_sq"].view(-1))
                entry["master"] = flat.view_as(params[index])
                entry["exp_avg_sq"] = entry["exp_avg_sq"].abs()
            for name in ("exp_avg", "exp_avg_sq"):
                entry[name] = entry[name].float()
        return plain

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Accepts its own and torch.optim.AdamW's. Without a ``master`` the parameter's own value is widened."""
        super().load_state_dict({"state": {}, "param_groups": state_dict["param_groups"]})
        params = [param for group in self.param_groups for param in group["params"]]
        for index, saved in state_dict["state"].items():
            param = params[index]
            state = self._start(param)
            state["step"] += float(saved["step"])
            for name in ("exp_avg", "exp_avg_sq"):
                state[name].copy_(saved[name])
            master = saved.get("master", param.detach().float())
            if "low" in state:
                split_(master.reshape(-1), param.detach().view(-1), state["low"].view(-1), state["exp_avg_sq"].view(-1))
            elif "master" in state:
                state["master"].copy_(master)
                param.detach().copy_(master)
            self.state[param] = state
