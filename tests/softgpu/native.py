"""The part of torch's C++ that must believe in a CUDA device: its device guard, and what its engine asks about accelerators.

torch has a guard for devices that are not there (it serves fake tensors): current device and current streams by thread. It is put into the
registry with a few methods replaced: how many devices there are, and what happens at events, so that the order which autograd keeps between
streams is seen. All of it through exported symbols of libc10 and libtorch_cpu and the order of virtual methods in torch's headers.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import platform
from collections.abc import Callable
from typing import Any

import torch

MADE_FOR = ("2.13",)  # versions of torch whose headers have been read
_kept: list[Any] = []  # libraries, callbacks and C++ objects that live as long as the process
_LIBRARIES = os.path.join(os.path.dirname(torch.__file__), "lib")
_CUDA = 1  # c10::DeviceType

# places in the table of virtual methods (c10/core/impl/DeviceGuardImplInterface.h)
_DESTROY_EVENT, _RECORD, _BLOCK, _DEVICE_COUNT, _SYNCHRONIZE_STREAM, _SYNCHRONIZE_DEVICE = 11, 12, 13, 15, 18, 21
_NUM_METHODS = 26
# ATen/detail/AcceleratorHooksInterface.h, CUDAHooksInterface.h: after two destructors
_IS_BUILT, _IS_AVAILABLE, _HAS_CONTEXT, _INIT, _HOOKS_DEVICE_COUNT, _IS_PINNED = 2, 3, 4, 5, 6, 11
_NUM_HOOKS = 60


def check_version() -> None:
    """Raise RuntimeError for a torch that this was not made for."""
    version = torch.__version__.split("+")[0]
    if not version.startswith(tuple(f"{known}." for known in MADE_FOR)) or torch.version.cuda or platform.machine() != "x86_64":
        raise RuntimeError(
            f"the software GPU was made for a CPU build of torch {' or '.join(MADE_FOR)} on x86_64; this is torch {torch.__version__}. Compare the "
            "headers that tests/softgpu/native.py names with its places of methods and extend MADE_FOR, or install what constraints.txt names"
        )


def _function(code: bytes) -> int:
    """The address of a function of machine code. It needs no GIL and no Python, unlike a callback."""
    memory = mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    memory.write(code)
    _kept.append(memory)
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def _constant(value: int) -> int:
    """The address of a function that returns ``value``."""
    return _function(b"\xb8" + value.to_bytes(4, "little") + b"\xc3")  # mov eax, value; ret


class Mailbox:
    """Pointers that a C function was called with. ``function`` is its address; torch may call it from any thread, with an exception pending."""

    SIZE = 1 << 18

    def __init__(self) -> None:
        self.count, self.slots, self.taken = ctypes.c_int64(), (ctypes.c_int64 * self.SIZE)(), 0
        self.function = _function(
            b"\x48\xb8" + ctypes.addressof(self.count).to_bytes(8, "little")  # mov rax, &count
            + b"\xb9\x01\0\0\0\xf0\x48\x0f\xc1\x08"  # mov ecx, 1; lock xadd [rax], rcx
            + b"\x81\xe1" + (self.SIZE - 1).to_bytes(4, "little")  # and ecx, SIZE - 1
            + b"\x48\xba" + ctypes.addressof(self.slots).to_bytes(8, "little")  # mov rdx, slots
            + b"\x48\x89\x3c\xca\xc3"  # mov [rdx + 8 * rcx], rdi; ret
        )  # fmt: skip
        _kept.append(self)

    def take(self) -> list[int]:
        """What has come since the last call, in order."""
        found = []
        while self.taken < self.count.value:
            index = self.taken % self.SIZE
            if not self.slots[index]:
                break  # counted, and about to be written by another thread
            found.append(self.slots[index])
            self.slots[index] = 0
            self.taken += 1
        return found


def _callback(kind: Any, function: Callable[..., Any]) -> int:
    made = kind(function)
    _kept.append(made)
    return ctypes.cast(made, ctypes.c_void_p).value or 0


def _table(old: Any, count: int, changes: dict[int, int]) -> int:
    table = (ctypes.c_void_p * count)(*[changes.get(index, old[index]) for index in range(count)])
    _kept.append(table)
    return ctypes.addressof(table)


class _Stream(ctypes.Structure):  # c10::Stream
    _fields_ = (("type", ctypes.c_int8), ("device", ctypes.c_int8), ("id", ctypes.c_int64))


def install_guard(num_devices: int, record: Callable[..., int], block: Callable[..., None], wait: Callable[..., None]) -> None:
    """Put torch's fake guard in place: (event or 0, device, stream) -> event; (event, device, stream); (device, stream, or None for all)."""
    c10 = ctypes.CDLL(os.path.join(_LIBRARIES, "libc10.so"))
    slots = (ctypes.c_void_p * 20).in_dll(c10, "_ZN3c104impl26device_guard_impl_registryE")
    # torch replaces a guard that counts no devices: that is what it finds first
    none = (ctypes.c_void_p * _NUM_METHODS)(*[_constant(0)] * _NUM_METHODS)
    empty = (ctypes.c_void_p * 1)(ctypes.addressof(none))
    slots[_CUDA] = ctypes.addressof(empty)
    torch._C._ensureCUDADeviceGuardSet()
    assert slots[_CUDA] != ctypes.addressof(empty), "this torch has a CUDA of its own"
    guard = ctypes.cast(slots[_CUDA], ctypes.POINTER(ctypes.c_void_p))
    methods = ctypes.cast(guard[0], ctypes.POINTER(ctypes.c_void_p))

    void, pointer, stream = None, ctypes.c_void_p, ctypes.POINTER(_Stream)

    def on_record(_: int, event: Any, at: Any, device: int, flag: int) -> None:
        event[0] = record(event[0] or 0, at[0].device, at[0].id)

    changes = {
        _RECORD: _callback(ctypes.CFUNCTYPE(void, pointer, ctypes.POINTER(ctypes.c_void_p), stream, ctypes.c_int8, ctypes.c_int), on_record),
        _BLOCK: _callback(ctypes.CFUNCTYPE(void, pointer, pointer, stream), lambda _, event, at: block(event, at[0].device, at[0].id)),
        _DESTROY_EVENT: _constant(0),
        _SYNCHRONIZE_STREAM: _callback(ctypes.CFUNCTYPE(void, pointer, stream), lambda _, at: wait(at[0].device, at[0].id)),
        _SYNCHRONIZE_DEVICE: _callback(ctypes.CFUNCTYPE(void, pointer, ctypes.c_int8), lambda _, device: wait(device, None)),
        _DEVICE_COUNT: _constant(num_devices),
    }
    guard[0] = _table(methods, _NUM_METHODS, changes)
    _kept.extend((c10, none, empty))


def install_hooks(num_devices: int, is_pinned: Callable[[int], bool]) -> None:
    """Make the engine's questions about CUDA say yes."""
    library = ctypes.CDLL(os.path.join(_LIBRARIES, "libtorch_cpu.so"))
    hooks_of = library["_ZN2at6detail12getCUDAHooksEv"]
    hooks_of.restype = ctypes.POINTER(ctypes.c_void_p)
    hooks = hooks_of()
    yes = _constant(1)
    changes = dict.fromkeys((_IS_BUILT, _IS_AVAILABLE, _HAS_CONTEXT, _INIT), yes)
    changes[_HOOKS_DEVICE_COUNT] = _constant(num_devices)
    changes[_IS_PINNED] = _callback(ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_void_p, ctypes.c_void_p), lambda _, at: is_pinned(at or 0))
    hooks[0] = _table(ctypes.cast(hooks[0], ctypes.POINTER(ctypes.c_void_p)), _NUM_HOOKS, changes)
    _kept.append(library)
    assert str(torch._C._accelerator_getAccelerator()) == "cuda", "AcceleratorHooksInterface has another order in this torch"
    with contextlib.suppress(RuntimeError):  # it has no such memory, and counts the device as initialized from here on
        torch.zeros(1).pin_memory()


def current_device() -> int:
    return int(torch._C._accelerator_getDeviceIndex())


def set_device(index: int) -> None:
    torch._C._accelerator_setDeviceIndex(index)


def current_stream_handle(device: int) -> int:
    """Of the calling thread."""
    return int(torch._C._accelerator_getStream(device).stream_id)


def set_stream(device: int, handle: int) -> None:
    """Make a stream the calling thread's current one of its device; the current device stays."""
    before = current_device()
    torch._C._accelerator_setStream(torch.Stream(stream_id=handle, device_index=device, device_type=_CUDA))
    if current_device() != before:
        set_device(before)
