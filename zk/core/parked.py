"""Parking: an optimizer gives its memory back while something else needs it, such as an engine that generates, and takes it again."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import itertools
import mmap
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from zk.core.memory import staging, trim
from zk.core.options import parse_paths
from zk.offload.nvme import File, round_up
from zk.offload.scratch import Scratch
from zk.offload.tiers import ResidentFields
from zk.parallel.comm import together
from zk.parallel.released import Released, stand_in, unmark

_DONTNEED = 4  # MADV_DONTNEED
_PIECE_NBYTES = 64 << 20  # of device memory on its way to the drive


@contextlib.contextmanager
def parked(optimizer: Any, path: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | None) -> Iterator[None]:
    """See ``ZeroOptimizer.parked``."""
    optimizer._check_open()
    optimizer.integrity.check("parked()")
    if path is None and optimizer.transfer.joined:
        raise ValueError("parked() moves device memory to the host, and here both are the same; give path=, a folder on a drive")
    if any(held.used or held.unreduced or held.present for held in optimizer.held):
        raise RuntimeError("parked() found gradients, which it would have to keep; call it between zero_grad() and the next backward")
    optimizer.synchronize()
    with torch.no_grad(), contextlib.ExitStack() as again:
        again.enter_context(optimizer.clock.stopped())
        device = optimizer.device
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # updated parameters have arrived
        optimizer.grads.pool.clear()
        if path is not None and optimizer.assembly.stream is not None:  # most of the host memory is page-locked then
            again.enter_context(optimizer.transfer.arena.unlocked())
        with together(optimizer.everyone, "parked()"):  # where one rank cannot, none does
            if path is None:
                _give_to_host(again, optimizer)
            else:
                _give_to_drive(again, optimizer, parse_paths(path, "path"))
        try:
            for held in optimizer.held:
                again.callback(_usable, held, held.on_use)
                held.refuse(optimizer._check_open)
            optimizer.is_parked = True
            if device.type == "cuda":
                torch.cuda.empty_cache()
            trim()
            yield
        finally:
            optimizer.is_parked = False


def _give_to_host(again: contextlib.ExitStack, optimizer: Any) -> None:
    """Save device memory, then free it; ``again`` restores what was freed, last first."""
    storages = _device_storages(optimizer)
    copies = [staging(storage.nbytes()).copy_(_bytes_of(storage)) for storage in storages]
    for storage, copy in zip(storages, copies, strict=True):
        again.callback(_take, optimizer, _take_from_host, storage, copy)
        storage.resize_(0)


def _take(optimizer: Any, take: Callable[..., None], *given: Any) -> None:
    """Take values again. What does not come back, also as Ctrl-C has ended it, is refused from now on."""
    try:
        take(*given)
    except BaseException as error:
        optimizer.integrity.tear(f"what was parked has not come back ({type(error).__name__}: {error})")
        raise


def _take_from_host(storage: Any, copy: Tensor) -> None:
    storage.resize_(copy.nbytes)
    _bytes_of(storage).copy_(copy)


def _give_to_drive(again: contextlib.ExitStack, optimizer: Any, paths: Sequence[str]) -> None:
    """The same for host memory too, in a private file, which is gone at the end."""
    for path in paths:
        if not os.path.isdir(path):
            raise NotADirectoryError(errno.ENOTDIR, "parked(path=) must be an existing folder; create it on the drive to use", path)
    scratch = Scratch(paths, optimizer.everyone.rank)
    again.callback(scratch.close)
    spans, storages = list(_host_spans(optimizer, _tensors(optimizer))), _device_storages(optimizer)
    views = [torch.frombuffer((ctypes.c_uint8 * (stop - start)).from_address(start), dtype=torch.uint8) for start, stop in spans]
    sizes = [*(view.nbytes for view in views), *(storage.nbytes() for storage in storages)]
    *offsets, end = itertools.accumulate(map(round_up, sizes), initial=0)
    file = again.enter_context(File(scratch.paths("parked"), end, checksum=True))
    of_views = list(zip(views, offsets[: len(views)], strict=True))
    of_storages = list(zip(storages, offsets[len(views) :], strict=True))
    for view, offset in of_views:
        file.write_async(view, offset)
    for storage, offset in of_storages:
        for start, piece, passing in _pieces(storage):
            file.write(passing.copy_(piece), offset + start)
    file.wait()
    again.callback(_take, optimizer, _read, file, of_views)
    for storage, offset in of_storages:
        again.callback(_take, optimizer, _take_from_drive, file, storage, storage.nbytes(), offset)
        storage.resize_(0)
    spans += _host_spans(optimizer, _shadows(optimizer))  # the next update, or gradient, writes these before it reads them
    if optimizer.assembly.stream is not None:
        spans += optimizer.transfer.arena.spans(free=True)
    for span in spans:
        _free_pages(*span)


def _take_from_drive(file: File, storage: Any, nbytes: int, offset: int) -> None:
    storage.resize_(nbytes)
    for start, piece, passing in _pieces(storage):
        file.read(passing, offset + start)
        piece.copy_(passing)


def _pieces(storage: Any) -> Iterator[tuple[int, Tensor, Tensor]]:
    """The bytes of a storage in pieces: where each begins, itself, and host memory that it passes through."""
    passing = staging(min(_PIECE_NBYTES, storage.nbytes()))
    for start in range(0, storage.nbytes(), len(passing)):
        piece = _bytes_of(storage)[start : start + len(passing)]
        yield start, piece, passing[: len(piece)]


def _read(file: File, views: Sequence[tuple[Tensor, int]]) -> None:
    for view, offset in views:
        file.read_async(view, offset)
    file.wait()


def _usable(held: Any, on_use: Any) -> None:
    """Undo what refuses the parameters."""
    vars(held).pop("prefetch", None)
    held.on_use = on_use
    for param in held.unit.objects:
        if held.is_partitioned:
            stand_in([param], Released)
        else:
            unmark(param)


def _bytes_of(storage: Any) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)  # type: ignore[call-overload, no-any-return]


def _tensors(optimizer: Any) -> Iterator[Tensor]:
    """All that lasts between steps: parameters where they rest, copies of them, master and moments; not what is on the drive."""
    for held in optimizer.held:
        if held.lease is None:
            yield held.full
        sections = held.shard.sections if held.shard is not None else ()
        yield from _resident(held.home, *(section.param for section in sections), *(section.state for section in sections))


def _shadows(optimizer: Any) -> Iterator[Tensor]:
    """Room for what the next update makes of states, before that counts, or on its way: nothing in it is needed between steps."""
    stream = optimizer.assembly.stream
    yield from (buffer.memory for buffer in (stream.buffers if stream is not None else ()))
    for held in optimizer._trained:
        for shadow in filter(None, (section.shadow for section in held.shard.sections)):
            if shadow.near is not None:
                yield shadow.near
            yield from _resident(shadow.state, shadow.param)


def _resident(*places: Any) -> Iterator[Tensor]:
    """The memory of those of these fields that are in memory."""
    for fields in places:
        if isinstance(fields, ResidentFields):
            yield from fields.fields.values()


def _device_storages(optimizer: Any) -> list[Any]:
    """Storages in the device's memory, each once."""
    tensors = [tensor for tensor in (*_tensors(optimizer), *_shadows(optimizer)) if tensor.device.type != "cpu"]
    return list({tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in tensors}.values())


def _host_spans(optimizer: Any, tensors: Iterable[Tensor]) -> Iterator[tuple[int, int]]:
    """Addresses of tensors in host memory, in order and apart. What is page-locked stays: a device may copy from it at any time."""
    locked = optimizer.transfer.arena.spans(free=False) if optimizer.transfer.arena is not None else []
    spans = sorted((tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes) for tensor in tensors if tensor.device.type == "cpu")
    before = 0
    for start, stop in spans:
        if start < stop and stop > before and not any(start < end and begin < stop for begin, end in locked):
            yield max(start, before), stop
            before = stop


def _free_pages(start: int, stop: int) -> None:
    """Give back the whole pages from one address to another; they are zeros from then on."""
    start, stop = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE, stop // mmap.PAGESIZE * mmap.PAGESIZE
    if start < stop and ctypes.CDLL(None, use_errno=True).madvise(ctypes.c_void_p(start), ctypes.c_size_t(stop - start), _DONTNEED):
        code = ctypes.get_errno()
        raise OSError(code, f"host memory cannot be given back: {os.strerror(code)}")
