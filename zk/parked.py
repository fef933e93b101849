"""Parking: an optimizer gives its memory back while something else needs it, such as an engine that generates, and takes it again."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import mmap
import os
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from zk.memory import staging, trim
from zk.offload.nvme import File, round_up
from zk.offload.scratch import Scratch
from zk.offload.tiers import ResidentFields
from zk.options import parse_paths
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
        arena = optimizer.transfer.arena
        if path is not None and optimizer.assembly.stream is not None:  # most of the host memory is page-locked then
            again.enter_context(arena.unlocked())
        spans, storages = list(_host_spans(optimizer, _tensors(optimizer))) if path is not None else [], _device_storages(optimizer)
        with together(optimizer.everyone, "parked()"):  # where one rank cannot, none does
            file = _room(again, parse_paths(path, "path"), optimizer.everyone.rank, spans, storages) if path is not None else None
            again.push(functools.partial(_note_loss, optimizer))
            _give_back(again, file, spans, storages)
        unused = [*_host_spans(optimizer, _shadows(optimizer)), *(arena.spans(free=True) if optimizer.assembly.stream is not None else ())]
        for start, stop in unused if path is not None else ():
            _free_pages(start, stop - start)  # the next update, or gradient, writes them before it reads them
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


def _room(again: contextlib.ExitStack, paths: Sequence[str], rank: int, spans: Sequence[tuple[int, int]], storages: Sequence[Any]) -> File:
    """A private file for all of it, which is gone at the end."""
    for path in paths:
        if not os.path.isdir(path):
            raise NotADirectoryError(errno.ENOTDIR, "parked(path=) must be an existing folder; create it on the drive to use", path)
    scratch = Scratch(paths, rank)
    again.callback(scratch.close)
    nbytes = sum(round_up(stop - start) for start, stop in spans) + sum(round_up(storage.nbytes()) for storage in storages)
    return again.enter_context(File(scratch.paths("parked"), nbytes, checksum=True))


def _note_loss(optimizer: Any, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
    """Values that were not taken again are refused from now on."""
    if isinstance(error, _NotThere):
        optimizer.integrity.tear(error)


class _NotThere(OSError):
    """The drive does not give back what was parked there."""


def _give_back(again: contextlib.ExitStack, file: File | None, spans: Sequence[tuple[int, int]], storages: Sequence[Any]) -> None:
    """Save all of it, then free it; ``again`` restores what was freed, last first."""
    offset = 0
    views = [torch.frombuffer((ctypes.c_uint8 * (stop - start)).from_address(start), dtype=torch.uint8) for start, stop in spans]
    places = []
    for view in views:
        assert file is not None
        file.write_async(view, offset)
        places.append(offset)
        offset += round_up(view.nbytes)
    copies: list[Tensor | int] = []
    for storage in storages:
        if file is None:
            copies.append(staging(storage.nbytes()).copy_(_bytes_of(storage)))
            continue
        passing = staging(min(_PIECE_NBYTES, storage.nbytes()))
        for start in range(0, storage.nbytes(), len(passing)):
            piece = _bytes_of(storage)[start : start + len(passing)]
            file.write(passing[: len(piece)].copy_(piece), offset + start)
        copies.append(offset)
        offset += round_up(storage.nbytes())
    if file is not None:
        file.wait()
    if views:
        again.callback(_read_again, file, list(zip(views, places, strict=True)))
        for view in views:
            _free_pages(view.data_ptr(), view.nbytes)
    for storage, copy in zip(storages, copies, strict=True):
        again.callback(_fill, storage, storage.nbytes(), copy, file)
        storage.resize_(0)


def _read_again(file: File | None, views: Sequence[tuple[Tensor, int]]) -> None:
    assert file is not None
    try:
        for view, offset in views:
            file.read_async(view, offset)
        file.wait()
    except OSError as error:
        raise _NotThere(error.errno or errno.EIO, f"what was parked cannot be read again: {error}") from error


def _fill(storage: Any, nbytes: int, copy: Tensor | int, file: File | None) -> None:
    storage.resize_(nbytes)
    if isinstance(copy, Tensor):
        _bytes_of(storage).copy_(copy)
        return
    passing = staging(min(_PIECE_NBYTES, nbytes))
    for start in range(0, nbytes, len(passing)):
        target = _bytes_of(storage)[start : start + len(passing)]
        _read_again(file, [(passing[: len(target)], copy + start)])
        target.copy_(passing[: len(target)])


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
        for one in (held.home, *(section.param for section in sections), *(section.state for section in sections)):
            if isinstance(one, ResidentFields):
                yield from one.fields.values()


def _shadows(optimizer: Any) -> Iterator[Tensor]:
    """Room for what the next update makes of states, before that counts, or on its way: nothing in it is needed between steps."""
    stream = optimizer.assembly.stream
    yield from (buffer.memory for buffer in (stream.buffers if stream is not None else ()))
    for held in optimizer.held:
        for section in held.shard.sections if held.shard is not None else ():
            if section.shadow is not None:
                if section.shadow.near is not None:
                    yield section.shadow.near
                for one in (section.shadow.state, section.shadow.param):
                    if isinstance(one, ResidentFields):
                        yield from one.fields.values()


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


def _free_pages(address: int, nbytes: int) -> None:
    """Give back the whole pages among these bytes; they are zeros from then on."""
    start, stop = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE, (address + nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    if start < stop and ctypes.CDLL(None, use_errno=True).madvise(ctypes.c_void_p(start), ctypes.c_size_t(stop - start), _DONTNEED):
        code = ctypes.get_errno()
        raise OSError(code, f"host memory cannot be given back: {os.strerror(code)}")
