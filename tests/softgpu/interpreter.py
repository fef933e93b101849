"""Triton's interpreter on device memory itself: each load and store of a kernel is looked at, so what is not device memory is found."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tests.softgpu import native
from tests.softgpu.memory import block_of, current_queue, find, host_view, plainly, span
from tests.softgpu.ops import mapped, tensors_in
from tests.softgpu.streams import LOCK, Queue, launched, race

_running = threading.local()


def _touch(pointers: Any, mask: Any, itemsize: int, write: bool) -> None:
    """A kernel reads or writes elements at these addresses."""
    queue: Queue | None = getattr(_running, "queue", None)
    if queue is None:
        return  # a kernel on host tensors
    addresses = pointers[np.broadcast_to(mask, pointers.shape)] if mask is not None else pointers.reshape(-1)
    if not addresses.size:
        return
    first, last = int(addresses.min()), int(addresses.max()) + itemsize
    block = find(first, last - first)
    spans = [(block, first, last)] if block else [(find(at, itemsize), at, at + itemsize) for at in map(int, np.unique(addresses))]
    for found, begin, end in spans:
        if found is None:
            _illegal(f"a triton kernel {'writes' if write else 'reads'} {begin:#x}, which is not memory of the device")
        elif found.queue.device != queue.device:
            _illegal(f"a triton kernel that runs on cuda:{queue.device} uses memory of cuda:{found.queue.device}")
        else:
            found.use(queue, begin - found.start, end - found.start, write, "a triton kernel")


def _illegal(what: str) -> None:
    race(what)
    raise RuntimeError(f"Triton Error [CUDA]: an illegal memory access was encountered: {what}")


ALWAYS = False  # interpret every launch, as tests of kernels do


def _form(value: Any) -> Any:
    """What decides how a kernel runs on this argument, but for the numbers in it."""
    if isinstance(value, Tensor):
        return value.dtype, value.device, tuple(value.shape), value.data_ptr() % 16
    if isinstance(value, (list, tuple)):
        return tuple(map(_form, value))
    return tuple(map(bool, value.scalars())) if hasattr(value, "scalars") else value  # of an update


def _far(value: Any) -> Any:
    return host_view(value) if isinstance(value, Tensor) and value.is_cuda else value


def _first_of_its_form(module: Any, kernel: str, twin: Callable[..., object], written: tuple[int, ...]) -> None:
    """Interpret a launcher once for each form of its arguments; then ``twin``, of the same bits, runs as a kernel. ``written``: arguments."""
    launch, seen = module.launch, set[Any]()

    def either(*args: Any, **options: Any) -> None:  # how it is launched, which the twin need not know
        form = _form(args)
        if ALWAYS or form not in seen:
            launch(*args, **options)
            seen.add(form)
            return
        with LOCK, plainly(), torch.no_grad():
            queue = current_queue(args[1].get_device())
            queue.issue()
            launched[kernel] += 1
            for index, value in enumerate(args):
                for tensor in filter(Tensor.numel, tensors_in(value)):
                    block_of(tensor).use(queue, *span(tensor), index in written, "a triton kernel")
            twin(*mapped(args, host_view))

    module.launch = either


def install() -> None:
    """Change the interpreter that is installed."""
    from triton.runtime import interpreter

    from zk.kernels import adam_kernel, flatten_kernel, reduce_kernel, reference
    from zk.offload.cpu_adam import adam_

    executor, builder = interpreter.GridExecutor, interpreter.InterpreterBuilder
    call, to_host, to_device = executor.__call__, executor._init_args_hst, executor._restore_args_dev
    load, store = builder.create_masked_load, builder.create_masked_store

    def launch(self: Any, *args: Any, **kwargs: Any) -> None:
        places = {value.is_cuda for value in (*args, *kwargs.values()) if isinstance(value, Tensor)}
        if places == {True, False}:
            race("a host tensor is given to a triton kernel")
            raise ValueError("Pointer argument (at 0) cannot be accessed from Triton (cpu tensor?)")
        if places != {True}:
            call(self, *args, **kwargs)
            return
        with LOCK, plainly(), torch.no_grad():
            _running.queue = current_queue(native.current_device())
            try:
                _running.queue.issue()
                launched[self.fn.__name__] += 1
                call(self, *args, **kwargs)
            finally:
                _running.queue = None

    def init(self: Any, args: Any, kwargs: Any) -> Any:
        if getattr(_running, "queue", None) is None:
            return to_host(self, args, kwargs)
        return [_far(value) for value in args], {name: _far(value) for name, value in kwargs.items()}

    def restore(self: Any, *args: Any) -> None:
        if getattr(_running, "queue", None) is None:
            to_device(self, *args)

    def masked_load(self: Any, ptrs: Any, mask: Any, other: Any, cache_policy: Any, is_volatile: Any) -> Any:
        _touch(ptrs.data, mask.data, max(ptrs.get_element_ty().primitive_bitwidth // 8, 1), False)
        return load(self, ptrs, mask, other, cache_policy, is_volatile)

    def masked_store(self: Any, ptrs: Any, value: Any, mask: Any, cache_policy: Any) -> Any:
        _touch(ptrs.data, mask.data, max(ptrs.get_element_ty().primitive_bitwidth // 8, 1), True)
        return store(self, ptrs, value, mask, cache_policy)

    executor.__call__, executor._init_args_hst, executor._restore_args_dev = launch, init, restore
    builder.create_masked_load, builder.create_masked_store = masked_load, masked_store
    _first_of_its_form(flatten_kernel, "_move_kernel", reference.flatten, written=(1,))
    _first_of_its_form(reduce_kernel, "_reduce_kernel", reference.reduce, written=(1,))
    _first_of_its_form(adam_kernel, "_adam_kernel", functools.partial(adam_, engine="numba", num_threads=1), written=(0, 2, 3, 4))
