"""Adam in host memory, bitwise the same for any number of threads and any chunking.

Two engines under one function, ``adam_``: "numba", one pass over memory (cpu_adam_numba.py), and
"torch", torch ops over chunks that fit the cache, bitwise equal to torch.optim.Adam and AdamW. State
on a GPU goes to the kernel of zk.kernels.
Layouts of master and moments are told by their dtypes (zk/kernels/codec.py).
Source: Adam, arXiv 1412.6980; decoupled weight decay, arXiv 1711.05101; the CPU update of
ZeRO-Offload, arXiv 2101.06840, section 5.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import os
from typing import Any, Literal

import torch
from torch import Tensor

from zk.kernels import reference
from zk.kernels.ops import check_adam
from zk.kernels.reference import AdamStep

Engine = Literal["numba", "torch"]


@functools.cache
def default_engine() -> Engine:
    """ "numba" where it is installed, else "torch"; or what the variable ZK_CPU_ADAM names."""
    there: Engine = "numba" if importlib.util.find_spec("numba") else "torch"
    wanted: dict[str, Engine] = {"": there, "numba": "numba", "torch": "torch"}
    if (name := os.environ.get("ZK_CPU_ADAM", "")) not in wanted:
        raise ValueError(f"ZK_CPU_ADAM must be 'numba' or 'torch'; got {name!r}")
    return wanted[name]


@functools.cache
def numba_engine() -> Any:
    """The engine's module: importing numba takes a second."""
    return importlib.import_module("zk.offload.cpu_adam_numba")


def default_threads() -> int:
    """Cores this process may use, shared with the other ranks that torchrun started here.

    Where the launcher has bound each rank, its own are those of all ranks together. Without a
    launcher ``OMP_NUM_THREADS`` is obeyed.
    """
    mine, ranks = os.sched_getaffinity(0), os.environ.get("LOCAL_WORLD_SIZE")
    asked = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0]
    if asked.isdigit() and int(asked) and ranks is None:
        return min(int(asked), len(mine))
    shared = set(mine)
    with contextlib.suppress(OSError):  # the parent has ended
        shared |= os.sched_getaffinity(os.getppid())
    return max(1, min(len(mine), len(shared) // max(1, int(ranks or 1))))


def adam_(
    param: Tensor,
    grad: Tensor,
    master: Tensor | None,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    step: AdamStep,
    *,
    engine: Engine | None = None,
    num_threads: int | None = None,
) -> None:
    """One Adam or AdamW update, in place; tensors as ``zk.kernels.adam`` takes them.

    Args:
        engine: in host memory; None takes ``default_engine()``.
        num_threads: of the numba engine; None takes ``default_threads()``. "torch" uses torch's.
    """
    fields = param, grad, master, exp_avg, exp_avg_sq
    check_adam(*fields, step)
    unchecked(fields, step, engine or default_engine(), num_threads or default_threads())


def unchecked(
    fields: tuple[Tensor | None, ...], step: AdamStep, engine: Engine, num_threads: int
) -> None:
    """What ``adam_`` does, without checks: for those who have made the fields themselves."""
    param: Any = fields[0]
    if param.device.type != "cpu" or engine == "torch":
        reference.unchecked("adam", param.device)(*fields, step)
    elif param.numel():
        numba_engine().adam(fields, step, num_threads)


def sum_of_squares(grad: Tensor, num_threads: int | None = None) -> float | Tensor:
    """The sum of squares of ``grad`` (n,) in float64: not finite exactly if some element is not.
    The same for any number of threads.

    A scalar tensor on a GPU, where the host would have to wait for the value.
    """
    is_near = grad.device.type == "cpu"
    if is_near and default_engine() == "numba":
        total: float = numba_engine().sum_of_squares(grad, num_threads or default_threads())
        return total
    # (on a GPU vector_norm would copy all of the gradient to float64 first)
    squared: Tensor = torch._foreach_norm([grad], dtype=torch.float64)[0].square()
    return squared.item() if is_near else squared
