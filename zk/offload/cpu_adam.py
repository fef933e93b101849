"""Adam in host memory, bitwise the same for any number of threads and any chunking.

Two engines under one function, ``adam_``: "numba", one pass over memory (cpu_adam_numba.py), and "torch", foreach-style torch ops over
chunks that fit the cache, which runs wherever torch does (any device) and is bitwise equal to torch.optim.Adam and AdamW. State on a GPU
goes to the kernel in zk.kernels.adam.
Layouts of master and moments are told by their dtypes (zk/kernels/codec.py).
Source: Adam, arXiv 1412.6980; decoupled weight decay, arXiv 1711.05101; the CPU update of ZeRO-Offload, arXiv 2101.06840, section 5.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from zk import kernels
from zk.kernels import codec, reference
from zk.kernels.eight_bit import CODES
from zk.kernels.launch import FLOATS
from zk.kernels.step import AdamStep, check_adam
from zk.options import is_count

Engine = Literal["numba", "torch", "triton"]
_MOMENTS = ("exp_avg", "exp_avg_sq")
_compiled: set[Any] = set()  # dtypes of updates, and their number of threads


@functools.cache
def default_engine() -> Engine:
    """ "numba" where it can be imported, else "torch"; the environment variable ZK_CPU_ADAM names one of them instead."""
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
    """Cores this process may use, shared with the other ranks that torchrun started on this machine.

    Where the launcher has bound each rank, its own are those of all ranks together. Without a launcher ``OMP_NUM_THREADS`` is obeyed.
    """
    asked = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0]
    if asked.isdigit() and int(asked) and "LOCAL_WORLD_SIZE" not in os.environ:
        return min(int(asked), len(os.sched_getaffinity(0)))
    mine, ranks = os.sched_getaffinity(0), max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    try:
        shared = mine | os.sched_getaffinity(os.getppid())
    except OSError:  # it has ended
        shared = mine
    return max(1, min(len(mine), len(shared) // ranks))


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
        master: None, (n,) fp32, or with a bf16 parameter (n,) int16 (split master) or uint8 (24 bits).
        exp_avg: (n,) fp32 or bf16, or uint8 codes.
        exp_avg_sq: (n,), as exp_avg. With a split master its sign carries a bit.
        step: the scalars.
        max_exp_avg_sq: (n,) fp32, for amsgrad; it runs on the torch engine.
        engine: None takes ``default_engine()`` for host memory, "triton" on a GPU.
        num_threads: of the numba engine; None takes ``default_threads()``. The torch engine uses torch's.

    Raises:
        ValueError: for sizes, devices or dtypes that do not fit together.
    """
    check_adam(param, grad, master, exp_avg, exp_avg_sq)
    if exp_avg.dtype == torch.uint8:
        step.check_coded()
    if param.numel() == 0:
        return
    if engine is None:
        engine = default_engine() if param.device.type == "cpu" else "triton" if param.device.type == "cuda" else "torch"
    if engine == "torch" or step.amsgrad:
        reference.adam(param, grad, master, exp_avg, exp_avg_sq, step, max_exp_avg_sq)
        return
    if engine == "triton":
        kernels.adam(param, grad, master, exp_avg, exp_avg_sq, step)
        return
    from zk.offload import cpu_adam_numba

    cpu_adam_numba.adam(param, grad, master, exp_avg, exp_avg_sq, step, num_threads or default_threads())


def compile_ahead(updates: Iterable[tuple[torch.dtype, Mapping[str, torch.dtype]]], num_threads: int, say: Callable[[], None]) -> None:
    """Compile the numba engine, if it is the default, for gradients of the parameters' own dtype, and in fp32 as they are added up.

    Args:
        updates: dtype of parameters, and of each field of their state: "master" if there is one, and moments by torch's names.
        num_threads: 1 leaves out what runs on several threads.
        say: called once if this takes seconds, since the cache has none of it.
    """
    # (None for amsgrad, which another engine updates)
    wanted = {(param, fields.get("master"), None if "max_exp_avg_sq" in fields else fields.get("exp_avg"), num_threads) for param, fields in updates}
    wanted -= _compiled
    if wanted and default_engine() == "numba":
        from zk.offload import cpu_adam_numba

        cpu_adam_numba.compile_ahead(sorted(wanted, key=str), functools.cache(say))
        _compiled.update(wanted)


def sum_of_squares(grad: Tensor, num_threads: int | None = None) -> float | Tensor:
    """The sum of squares of ``grad`` (n,) in float64: not finite exactly if some element is not. The same for any number of threads.

    A scalar tensor on a GPU, where the host would have to wait for the value.
    """
    is_near = grad.device.type == "cpu"
    if is_near and default_engine() == "numba":
        from zk.offload import cpu_adam_numba

        return cpu_adam_numba.sum_of_squares(grad, num_threads or default_threads())
    total: Tensor = torch.linalg.vector_norm(grad, dtype=torch.float64).square()
    return total.item() if is_near else total


class CPUAdam(torch.optim.Optimizer):
    """Adam or AdamW for parameters in host memory, on its own: 16-bit parameters get an fp32 master, everything is one pass.

    Args:
        params: fp32, bf16 or fp16 parameters in host memory, contiguous; or param groups.
        lr: learning rate, 0 or more.
        betas: of the running means of gradient and squared gradient, at least 0 and less than 1.
        eps: what is added to the square root of the second moment.
        weight_decay: as for torch.optim.AdamW; with ``decoupled=False`` as for Adam.
        maximize: climb instead of descending.
        decoupled: True for AdamW, False for Adam.
        split_master: bf16 parameters keep the lower half of their master only: 2 bytes per parameter less, bitwise the same results.
        state_dtype: torch.float32; torch.bfloat16 to halve the moments, or "8bit" for 8-bit moments and 24-bit masters, which change results.
        engine: "numba" or "torch"; None takes the faster one that is there.
        num_threads: None takes the cores of this process.

    Raises:
        ValueError: for a setting out of its range, or a parameter that is not contiguous, not in host memory, or of another precision.

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
        state_dtype: torch.dtype | str = torch.float32,
        engine: Engine | None = None,
        num_threads: int | None = None,
    ) -> None:
        state_dtype = CODES if state_dtype == "8bit" else state_dtype
        if not isinstance(state_dtype, torch.dtype) or state_dtype not in (torch.float32, torch.bfloat16, CODES):
            raise ValueError(f"state_dtype must be torch.float32, torch.bfloat16 or '8bit'; got {state_dtype!r}")
        if state_dtype == CODES and not split_master:
            raise ValueError("split_master=False does not go with state_dtype='8bit', whose masters are split; remove one of them")
        if engine not in (None, "numba", "torch"):
            raise ValueError(f"engine must be 'numba', 'torch' or None; got {engine!r}")
        for name, value in (("lr", lr), ("eps", eps), ("weight_decay", weight_decay)):
            if not isinstance(value, (int, float, Tensor)) or not value >= 0:
                raise ValueError(f"{name} must be 0 or more; got {value!r}")
        if not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"betas must be at least 0 and less than 1; got {betas!r}")
        self.decoupled, self.split_master, self.state_dtype = decoupled, split_master, state_dtype
        self.engine, self.num_threads = engine, num_threads
        if num_threads is not None and not is_count(num_threads):
            raise ValueError(f"num_threads must be at least 1, or None for all cores; got {num_threads!r}")
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "maximize": maximize})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; ValueError for parameters that are not as ``params`` must be."""
        super().add_param_group(param_group)
        for param in self.param_groups[-1]["params"]:
            if self.state_dtype == CODES and param.dtype == torch.float16:
                self.param_groups.pop()
                raise ValueError("state_dtype='8bit' is for parameters in bf16 and fp32; got one in fp16, which has no 24-bit master")
            if param.device.type != "cpu" or not param.is_contiguous() or param.dtype not in FLOATS:
                self.param_groups.pop()
                raise ValueError(
                    f"CPUAdam takes contiguous fp32, bf16 or fp16 parameters in host memory; got {param.dtype} of shape "
                    f"{tuple(param.shape)} on {param.device}, contiguous={param.is_contiguous()}"
                )

    def _start(self, param: Tensor) -> dict[str, Any]:
        fields = codec.state_fields(param.dtype, _MOMENTS, self.state_dtype, self.split_master)
        state = {name: torch.empty_like(param, dtype=dtype) for name, dtype in fields.items()}
        codec.start({**state, "param": param.detach()}, param.detach())
        return {"step": torch.tensor(0.0, dtype=torch.float32), **state}

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Update every parameter that has a gradient; returns the closure's loss, or None.

        Raises:
            TypeError: for a sparse gradient.
        """
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
                state = self.state[param]
                if not state:
                    state.update(self._start(param))
                state["step"] += 1
                # by its own arguments, whatever else a group that was loaded says
                options = {**group, "decoupled_weight_decay": self.decoupled, "amsgrad": False}
                flat = {name: kept.view(-1) for name, kept in state.items()}
                given = (param.detach().view(-1), param.grad.contiguous().view(-1), flat.get("master"), flat["exp_avg"], flat["exp_avg_sq"])
                adam_(*given, AdamStep.of(options, self.decoupled, int(state["step"])), engine=self.engine, num_threads=self.num_threads)
                torch.autograd.graph.increment_version(param)
        return loss

    def state_dict(self) -> dict[str, Any]:
        """As torch.optim.AdamW's, with the master of 16-bit parameters beside the moments, all in fp32."""
        plain = super().state_dict()
        params = [param for group in self.param_groups for param in group["params"]]
        for index, state in plain["state"].items():
            fields = {**state, "param": params[index].detach()}
            plain["state"][index] = {name: kept if name == "step" else codec.read(fields, name).float() for name, kept in state.items()}
        return plain

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Accepts its own and torch.optim.AdamW's. Without a ``master`` the parameter's own value is widened."""
        super().load_state_dict({"state": {}, "param_groups": state_dict["param_groups"]})
        params = [param for group in self.param_groups for param in group["params"]]
        for index, saved in state_dict["state"].items():
            param = params[index]
            state = self._start(param)
            state["step"] += float(saved["step"])
            given = {name: saved[name] for name in state.keys() - {"step"} if name != "master" or name in saved}
            codec.write({**state, "param": param.detach()}, given)
            self.state[param] = state
