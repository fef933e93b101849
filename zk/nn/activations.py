"""Offload of activations: tensors that autograd saves rest in host memory or a file until backward, and come back bit for bit.

The unit of movement is a storage: however many views of it are saved, and by whomever, it moves once, and its views come back as views.
The newest storages stay where they are, as backward wants them first; each new one pushes the oldest of them out. Backward finds
tensors by their number: with number ``n`` come those before it, as many bytes ahead. Any other order is right as well, and waits more.
A storage is forgotten when the last tensor that autograd saved of it is gone: used by backward, or dropped with its graph.
"""

from __future__ import annotations

import bisect
import contextlib
import functools
import os
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from zk.core.events import COMPLETED, Awaited, Event
from zk.core.memory import aligned
from zk.core.options import parse_device, parse_nbytes, parse_paths
from zk.core.owners import held_params
from zk.nn.deferred import compute_device, default_device
from zk.offload.stash import POOLS, Files, HostBuffer, HostPool, Slot
from zk.offload.streams import Link, link_to

Hooks = tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]  # pack, unpack
_SPARSE = 4  # a view of less than 1/4 of its storage does not make it move
_PATIENCE = 16  # unpacked tensors after which what came ahead of use, and is not next any more, goes again


def offload_activations(
    model: nn.Module | None = None,
    *,
    min_nbytes: int | str = "1MiB",
    keep_last: int | str = "256MiB",
    nvme_path: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | None = None,
    device: torch.device | str | None = None,
) -> ActivationOffload:
    """Context for the forward pass: what autograd saves inside goes to host memory, and comes back ahead of its use in backward.

    Backward may run inside or after it. Results are those without it, bit for bit. With ``torch.utils.checkpoint`` (reentrant or not)
    the saved tensors are the inputs of the checkpointed parts. The context may be entered again, in turn or nested:

    ```python
    offload = zk.offload_activations(model)
    for x, y in batches:
        with offload:
            loss = model(x, y)
        loss.backward()
    ```

    Args:
        model: its parameters and buffers, and all views of them, stay where they are. Without it that holds for parameters (also those
            of a ZeroOptimizer, at every stage) and their views, unless they were detached.
        min_nbytes: smaller storages stay.
        keep_last: bytes (or "1GiB") of the newest storages that stay on the device, 0 for none. As many bytes, and at least one
            storage, may be on their way in each direction: device memory for saved tensors is at most about twice this.
        nvme_path: a folder, or several on different drives: saved tensors go on to private files there, and host memory holds no more
            than about eight times ``keep_last`` at once. On a machine whose device memory is host memory they go there directly;
            without ``nvme_path`` there is nowhere to go, and the context does nothing. Files are removed with the context object:
            make one, and enter it in every step.
        device: the device that computes; by default the model's, otherwise the current accelerator, if there is one.

    Writing to a saved tensor before backward has read it is an error in backward, as it is without the context.

    Raises:
        OSError: in forward or backward, if a drive refuses.

    Source: ZeRO-Infinity, arXiv 2104.07857, section 5.1.2.
    """
    if model is not None and not isinstance(model, nn.Module):
        raise TypeError(f"model must be an nn.Module, or be left out; got {model!r}")
    smallest = 0 if min_nbytes == 0 else parse_nbytes(min_nbytes, "min_nbytes")
    kept = 0 if keep_last == 0 else parse_nbytes(keep_last, "keep_last")
    paths = parse_paths(nvme_path, "nvme_path") if nvme_path is not None else ()
    where = parse_device(device) if device is not None else compute_device(model) if model is not None else default_device()
    tensors = [] if model is None else [*model.parameters(), *model.buffers()]
    return ActivationOffload(link_to(where), {tensor.untyped_storage()._cdata for tensor in tensors}, smallest, kept, paths)


# ---- what is saved -----------------------------------------------------------------------------------------------------------


class _Block:
    """A storage that was saved, and where its bytes are: ``device``, ``host`` or ``slot``, or several of them."""

    def __init__(self, storage: torch.UntypedStorage, device: torch.device, version: int) -> None:
        self.storage = StorageWeakRef(storage)  # its address is not another's as long as this is there
        self.nbytes, self.version = storage.nbytes(), version
        self.device: Tensor | None = torch.empty(0, dtype=torch.uint8, device=device).set_(storage, 0, (self.nbytes,), (1,))
        self.event: Event = COMPLETED  # the last copy that has ``device`` at one end
        self.host: HostBuffer | None = None
        self.read: Event | None = None  # in flight from ``slot`` to ``host``
        self.slot: Slot | None = None
        self.users = 0  # tensors that autograd has of it
        self.used = False  # unpacked since it came back
        self.wanted = 0  # when it was last among the next to come


class _Saved:
    """A tensor that was saved, as autograd holds it."""

    def __init__(self, owner: ActivationOffload, number: int, tensor: Tensor) -> None:
        self.owner, self.number = owner, number
        self.dtype, self.shape, self.stride, self.offset = tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset()
        self.version = tensor._version
        self.witness = tensor.detach()  # shares the version counter
        self.witness.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)  # and no memory

    def __del__(self) -> None:
        self.owner._forget(self.number)


@contextlib.contextmanager
def no_hooks() -> Iterator[list[Any]]:
    """Context: without hooks on saved tensors, which are yielded, innermost first."""
    hooks = []
    while (top := torch._C._autograd._top_saved_tensors_default_hooks(True)) is not None:  # type: ignore[operator]
        hooks.append(top)
        torch._C._autograd._pop_saved_tensors_default_hooks()
    try:
        yield hooks
    finally:
        for pack, unpack in reversed(hooks):
            torch._C._autograd._push_saved_tensors_default_hooks(pack, unpack)


def _check_version(witness: Tensor, version: int, shape: torch.Size) -> None:
    """torch's own check, which hooks on saved tensors switch off."""
    if witness._version != version:
        raise RuntimeError(
            f"a tensor of shape {tuple(shape)} that backward needs was modified by an inplace operation after forward saved it "
            f"(version {version}, now {witness._version}); write to a copy of it instead"
        )


def _keep(tensor: Tensor) -> tuple[Tensor, int]:
    return tensor if tensor.is_leaf else tensor.detach(), tensor._version  # with its graph it would keep itself alive


def _kept(packed: tuple[Tensor, int]) -> Tensor:
    tensor, version = packed
    _check_version(tensor, version, tensor.shape)
    return tensor


@contextlib.contextmanager
def saved_nbytes() -> Iterator[dict[int, int]]:
    """Context: what autograd saves inside, but for parameters and views of them, is noted in the dictionary: storage -> bytes."""
    found: dict[int, int] = {}

    def pack(tensor: Tensor) -> tuple[Tensor, int]:
        if not isinstance(tensor if tensor._base is None else tensor._base, nn.Parameter):
            found[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
        return _keep(tensor)

    with torch.autograd.graph.saved_tensors_hooks(pack, _kept):
        yield found


class _Queue(OrderedDict[_Block, None]):
    """Blocks, oldest first, and their bytes."""

    nbytes = 0

    def push(self, block: _Block) -> None:
        self.drop(block)
        self.nbytes += block.nbytes
        self[block] = None

    def drop(self, block: _Block) -> None:
        if block in self:
            self.nbytes -= block.nbytes
            del self[block]

    @property
    def oldest(self) -> _Block:
        return next(iter(self))


class ActivationOffload:
    """The context that ``offload_activations`` returns, and its ``with`` yields.

    Counts since it was made: ``num_offloaded`` storages, of ``offloaded_nbytes``, left the device; ``num_uploaded`` came back;
    ``num_ahead`` of these were on their way before they were asked for, and ``num_late`` were not. Bytes now: ``kept_nbytes`` of saved
    storages on the device, ``host_nbytes`` in host buffers, ``file_nbytes`` in files.
    """

    def __init__(self, link: Link, stays: set[int], min_nbytes: int, keep_last: int, paths: Sequence[str]) -> None:
        self.link, self.own, self.min_nbytes, self.keep_last = link, stays, min_nbytes, keep_last
        self.stays = stays  # storages of parameters and buffers
        self.files = Files(paths, link.device.index or 0) if paths else None
        self.moves = self.files is not None or not link.joined
        self.num_offloaded = self.offloaded_nbytes = self.num_uploaded = self.num_ahead = self.num_late = 0
        self.host_nbytes, self.host_limit = 0, 8 * keep_last
        self.pool = POOLS.setdefault(link, HostPool())
        self.lock = threading.Lock()
        self.dead: deque[int] = deque()  # numbers of saved tensors that are gone
        self.count = self.clock = 0  # tensors packed, unpacked
        self.blocks: dict[int, _Block] = {}  # number of a saved tensor -> its storage
        self.numbers: list[int] = []  # of saved tensors, ascending; also some that are gone
        self.by_storage: dict[int, _Block] = {}
        self.newest = _Queue()  # on the device only
        self.leaving = _Queue()  # on their way; the device's memory is held until they have arrived
        self.landed = _Queue()  # in host memory, to be written to a file
        self.here = _Queue()  # copies that have come back, or are coming

    # ---- context -------------------------------------------------------------------------------------------------------------

    def __enter__(self) -> ActivationOffload:
        if self.moves:
            self.pool.age(self.link)
            with torch._C.DisableTorchFunctionSubclass():  # parameters that stage 3 has released
                self.stays = self.own | {param.untyped_storage()._cdata for param in held_params()}
            # torch asks the innermost hooks only: what these leave alone goes on to those around
            below: Hooks | None = torch._C._autograd._top_saved_tensors_default_hooks(True)
            torch._C._autograd._push_saved_tensors_default_hooks(functools.partial(self._pack, below), self._unpack)
        return self

    def __exit__(self, *exc: object) -> None:
        if self.moves:
            torch._C._autograd._pop_saved_tensors_default_hooks()

    @property
    def kept_nbytes(self) -> int:
        with self._alone():
            return self.newest.nbytes + self.leaving.nbytes

    @property
    def file_nbytes(self) -> int:
        with self._alone():
            return sum(block.slot.nbytes for block in set(self.blocks.values()) if block.slot is not None)

    # ---- forward -------------------------------------------------------------------------------------------------------------

    def _may_move(self, tensor: Tensor) -> bool:
        """Tell if it is a tensor, large enough, that computes where this does, and no parameter."""
        if type(tensor) is not Tensor or tensor.layout is not torch.strided or tensor.device != self.link.device:
            return False
        if tensor.is_quantized or tensor.is_nested or tensor.is_conj() or tensor.is_neg():
            return False
        base = tensor if tensor._base is None else tensor._base
        if isinstance(base, nn.Parameter) or (base.is_leaf and base.requires_grad):
            return False
        storage = tensor.untyped_storage()
        return storage.nbytes() >= max(self.min_nbytes, 1) and storage._cdata not in self.stays

    def _pack(self, below: Hooks | None, tensor: Tensor) -> Any:
        saved = None
        if self._may_move(tensor):
            with self._alone():
                block = self._block(tensor)
                if block is not None:
                    saved = _Saved(self, self.count, tensor)
                    self.blocks[self.count] = block
                    self.numbers.append(self.count)
                    self.count += 1
                    block.users += 1
                    self._push_out()
        if saved is not None:
            return saved
        return (below[1], below[0](tensor)) if below is not None else (_kept, _keep(tensor))

    def _block(self, tensor: Tensor) -> _Block | None:
        """The block of the tensor's storage, a new one if it is not saved as it is now. None: it is to stay where it is.

        A write that no version counter sees (through ``.data``) is not seen here either; it spoils the earlier of the two tensors anyway.
        """
        storage = tensor.untyped_storage()
        block = self.by_storage.get(storage._cdata)
        if block is None or block.version != tensor._version or block.nbytes != storage.nbytes():
            if tensor.nbytes * _SPARSE < storage.nbytes():
                return None
            block = self.by_storage[storage._cdata] = _Block(storage, tensor.device, tensor._version)
            self.newest.push(block)
        elif block in self.newest:
            self.newest.push(block)  # needed earlier in backward than it was
        return block

    def _push_out(self) -> None:
        """Older blocks make room for what was packed last, with no more on the way than is kept."""
        while self.newest.nbytes > self.keep_last:
            block = self.newest.oldest
            self._offload(block)
            self.newest.drop(block)
            self.leaving.push(block)
            self.num_offloaded += 1
            self.offloaded_nbytes += block.nbytes
        while self.leaving and (self.leaving.oldest.event.done or (self.leaving.nbytes > self.keep_last and len(self.leaving) > 1)):
            block = self.leaving.oldest
            self.link.follow(block.event)  # memory that compute gets for something else is not read any more
            if self.link.joined and block.slot is not None:
                block.event = block.slot.request = COMPLETED  # requests of all blocks would stay until backward
            block.device = None
            self.leaving.drop(block)
        self._write_behind()

    def _offload(self, block: _Block) -> None:
        assert block.device is not None
        if self.link.joined:
            assert self.files is not None
            block.slot = self.files.take(block.nbytes)
            block.event = block.slot.write(block.device)
            return
        block.host = self._host(block.nbytes)
        block.event = self.link.offload(block.host.memory[: block.nbytes], block.device, after=[self.link.mark()])
        if self.files is not None:
            self.landed.push(block)

    # ---- host memory and files -----------------------------------------------------------------------------------------------

    def _host(self, nbytes: int) -> HostBuffer:
        if self.files is not None:
            self._write_behind(nbytes)
            self.pool.trim(self.link, max(self.host_limit - self.host_nbytes, 0))
        host = self.pool.take(self.link, nbytes)
        self.host_nbytes += host.memory.nbytes
        return host

    def _give_host(self, block: _Block, *busy: Awaited) -> None:
        if block.host is not None:
            self.host_nbytes -= block.host.memory.nbytes
            self.pool.give(block.host, block.event, *busy)
            block.host = None

    def _write_behind(self, room: int = 0) -> None:
        """host -> file, for what has arrived in host memory; waits only if there would be too much of it with ``room`` more."""
        for block in list(self.landed):
            assert self.files is not None and block.host is not None
            must = self.host_nbytes + room > self.host_limit
            if block.slot is None:
                if not (must or block.event.done):
                    break
                block.event.wait()
                block.slot = self.files.take(block.nbytes)
                block.slot.write(block.host.memory[: block.nbytes])
            if must or block.slot.request.done:
                block.slot.request.wait()
                self.landed.drop(block)
                self._give_host(block)

    # ---- backward ------------------------------------------------------------------------------------------------------------

    def _unpack(self, packed: Any) -> Tensor:
        if not isinstance(packed, _Saved):
            unpack, what = packed
            return unpack(what)  # type: ignore[no-any-return]
        _check_version(packed.witness, packed.version, packed.shape)
        with self._alone():
            self.clock += 1
            try:
                return self._bring_back(packed)
            except OSError:
                self._forget_reads()
                raise

    def _bring_back(self, saved: _Saved) -> Tensor:
        """The tensor as it was; those saved before it are on their way."""
        block = self.blocks[saved.number]
        if block.device is None:
            self._bring(block, needed=True)
            self.num_late += 1
        elif block in self.here and not block.used:
            self.num_ahead += 1
        if block in self.here:
            self.link.follow(block.event)
            block.used = True
        assert block.device is not None
        storage = block.device.untyped_storage()
        tensor = torch.empty(0, dtype=saved.dtype, device=self.link.device).set_(storage, saved.offset, saved.shape, saved.stride)
        self._bring_ahead(saved.number, block)
        return tensor

    def _forget_reads(self) -> None:
        """A drive has refused: what is needed again, is read again."""
        for block in list(self.here):
            self._let_go(block)
        for block in set(self.blocks.values()):
            if block.read is not None:
                self._give_host(block, block.read)
                block.read = None

    def _earlier(self, number: int) -> Iterator[_Block]:
        """The blocks of tensors saved before ``number``, the last of them first, that are not on the device for other reasons."""
        for position in range(bisect.bisect_left(self.numbers, number) - 1, -1, -1):
            block = self.blocks.get(self.numbers[position])
            if block is not None and (block.device is None or block in self.here):
                yield block

    def _bring_ahead(self, number: int, current: _Block) -> None:
        """Start to bring what backward wants next, if it goes backwards."""
        wanted, left = _Queue(), _Queue()  # to come to the device; to come nearer
        for block in self._earlier(number):
            queue = left if left or (wanted and block not in wanted and wanted.nbytes + block.nbytes > self.keep_last) else wanted
            if queue is left and (self.files is None or self.link.joined or left.nbytes + block.nbytes > self.keep_last):
                break
            if block is not current and block not in wanted:
                queue.push(block)
        for block in list(self.here):
            if block in wanted:
                block.wanted = self.clock
            elif block is not current and (block.used or self.clock - block.wanted > _PATIENCE):
                self._let_go(block)
        for block in wanted:
            ahead = self.here.nbytes - (current.nbytes if current in self.here else 0)
            if block.device is None and ((ahead and ahead + block.nbytes > self.keep_last) or not self._bring(block)):
                break
        for block in left:
            if block.host is None and self.host_nbytes + block.nbytes <= self.host_limit:
                self._fetch(block)

    def _bring(self, block: _Block, needed: bool = False) -> bool:
        """host or file -> device. False if it is not in host memory yet, and is not ``needed`` now."""
        if self.link.joined:
            assert block.slot is not None
            target = aligned(block.nbytes)
            block.event = block.slot.read(target)
        else:
            if block.host is None:
                self._fetch(block)
            if block.read is not None:
                if not (needed or block.read.done):
                    return False
                block.read.wait()
                block.read = None
            assert block.host is not None
            target = torch.empty(block.nbytes, dtype=torch.uint8, device=self.link.device)
            block.event = self.link.upload(target, block.host.memory[: block.nbytes], after=[self.link.mark(), block.event])
            if block.slot is not None and block not in self.landed:
                self._give_host(block)
        block.device, block.used, block.wanted = target, False, self.clock
        self.here.push(block)
        self.num_uploaded += 1
        return True

    def _fetch(self, block: _Block) -> None:
        """file -> host, in flight."""
        assert block.slot is not None
        block.host = self._host(block.nbytes)
        block.read = block.slot.read(block.host.memory[: block.nbytes])

    def _let_go(self, block: _Block) -> None:
        """The device's memory is not needed any more. What still copies it, or moves it to a file, holds it."""
        self.here.drop(block)
        block.device = None

    # ---- the end of a block --------------------------------------------------------------------------------------------------

    def _forget(self, number: int) -> None:
        """A saved tensor is gone. Called wherever Python drops objects, also inside of our own methods: so it never waits for the lock."""
        self.dead.append(number)
        self._bury_later()

    def _bury_later(self) -> None:
        while self.dead and self.lock.acquire(blocking=False):
            try:
                self._bury()
            finally:
                self.lock.release()

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        try:
            with self.lock:  # autograd unpacks on threads of its own
                self._bury()
                yield
        finally:
            self._bury_later()

    def _bury(self) -> None:
        while self.dead:
            block = self.blocks.pop(self.dead.popleft(), None)
            if block is None:
                continue
            block.users -= 1
            if not block.users:
                self._free(block)
        if len(self.numbers) > 2 * len(self.blocks) + 64:
            self.numbers = list(self.blocks)

    def _free(self, block: _Block) -> None:
        for queue in (self.newest, self.leaving, self.landed):
            queue.drop(block)
        self._let_go(block)
        self._give_host(block, block.read or COMPLETED)
        if block.slot is not None:
            assert self.files is not None
            self.files.give(block.slot)
        if self.by_storage.get(block.storage.cdata) is block:
            del self.by_storage[block.storage.cdata]
