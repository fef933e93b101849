"""Offload of activations: what autograd saves rests in host memory until backward; the same bits.

A storage moves once, however many views of it are saved. The newest ones stay where they are, as
backward wants them first; backward brings the others ahead of their use, the newest first.
Source: ZeRO-Infinity, arXiv 2104.07857, section 5.1.2.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from typing import Any

import torch
from torch import Tensor, nn

from zk.next.memory import empty
from zk.next.nn.deferred import default_device
from zk.next.offload.link import CudaLink, Event, link_to
from zk.next.options import parse_device, parse_nbytes
from zk.next.parallel.runtime import RUNTIMES
from zk.next.parallel.saved import Passed, kept, saving_hooks
from zk.next.promised import device_of

SPARSE = 4  # a view of less than a quarter of its storage does not make it move


def offload_activations(
    model: nn.Module | None = None, *, min_nbytes: int | str = "1MiB",
    keep_last: int | str = "256MiB", device: torch.device | str | None = None,
) -> ActivationOffload:  # fmt: skip
    """Context for forward: what autograd saves goes to host memory, and returns for backward.

    Backward may run inside or after it, and the context may be entered again. With
    ``torch.utils.checkpoint`` the saved tensors are the inputs of the checkpointed parts. Where device
    memory is host memory it does nothing.

    Args:
        model: its parameters and buffers, and all views of them, stay where they are. Without it that
            holds for parameters and their views, unless they were detached.
        min_nbytes: smaller storages stay.
        keep_last: bytes (or "1GiB") of the newest storages that stay, 0 for none. Up to twice as many
            are there at any time, with those on their way.
        device: that computes; by default the model's, or the current accelerator.
    """
    sizes = {"min_nbytes": min_nbytes, "keep_last": keep_last}
    numbers = [0 if value == 0 else parse_nbytes(value, name) for name, value in sizes.items()]
    tensors = [] if model is None else [*model.parameters(), *model.buffers()]
    where = device_of(tensors[0]) if tensors else default_device()
    where = where if device is None else parse_device(device, "device")
    return ActivationOffload(where, {storage_of(tensor) for tensor in tensors}, *numbers)


class Block:
    """A storage that was saved. It goes with the last tensor that autograd has of it."""

    def __init__(self, tensor: Tensor, number: int) -> None:
        storage = tensor.untyped_storage()
        self.number, self.nbytes, self.version = number, storage.nbytes(), tensor._version
        bare = torch.empty(0, dtype=torch.uint8, device=tensor.device)
        self.device: Tensor | None = bare.set_(storage, 0, (self.nbytes,), (1,))  # type: ignore[call-overload]
        self.host: Tensor | None = None
        self.event: Event | None = None  # of the last copy


class Saved:
    """A tensor that was saved, as autograd holds it."""

    def __init__(self, tensor: Tensor, block: Block) -> None:
        self.block, self.dtype, self.version = block, tensor.dtype, tensor._version
        self.layout = tensor.storage_offset(), tensor.shape, tensor.stride()
        self.witness = tensor.detach()  # shares the version counter
        self.witness.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)


class ActivationOffload:
    """What ``offload_activations`` returns: a context.

    Counts since it was made: ``num_offloaded`` storages, of ``offloaded_nbytes``, left the device;
    ``num_uploaded`` came back.
    """

    def __init__(
        self, device: torch.device, stays: set[int], min_nbytes: int, keep_last: int
    ) -> None:
        self.at, self.stays, self.min_nbytes, self.keep_last = device, stays, min_nbytes, keep_last
        self.link: CudaLink | None = link_to(device)
        self.num_offloaded = self.offloaded_nbytes = self.num_uploaded = 0
        self.lock = threading.RLock()  # autograd unpacks in threads of its own
        self.by_storage = weakref.WeakValueDictionary[int, Block]()  # of those on the device
        self.saved: list[weakref.ref[Block]] = []  # in the order of forward
        self.newest = deque[weakref.ref[Block]]()  # on the device only, the oldest first
        self.here = deque[weakref.ref[Block]]()  # have come back
        self.leaving = deque[tuple[Event, int]]()  # on their way to the host
        self.contexts: list[Any] = []

    def __enter__(self) -> ActivationOffload:
        if self.link is not None:
            pack, unpack = saving_hooks()
            hooks = torch.autograd.graph.saved_tensors_hooks(
                lambda tensor: self.pack(tensor) or Passed(unpack, pack(tensor)), self.unpack
            )
            hooks.__enter__()
            self.contexts.append(hooks)
        return self

    def __exit__(self, *_: object) -> None:
        if self.link is not None:
            self.contexts.pop().__exit__()

    def moves(self, tensor: Tensor) -> bool:
        """Tell if it is a tensor, large enough, that computes where this does, and no parameter."""
        if type(tensor) is not Tensor or tensor.layout is not torch.strided:
            return False
        base = tensor if tensor._base is None else tensor._base
        is_kept = isinstance(base, nn.Parameter) or (base.is_leaf and base.requires_grad)
        if is_kept or tensor.is_quantized or tensor.is_conj() or tensor.is_neg():
            return False
        storage, nbytes = storage_of(tensor), tensor.untyped_storage().nbytes()
        is_held = storage in self.stays or any(storage in held.by_storage for held in RUNTIMES)
        return tensor.device == self.at and nbytes >= max(self.min_nbytes, 1) and not is_held

    # ---- forward ---------------------------------------------------------------------------------

    def pack(self, tensor: Tensor) -> Saved | None:
        """Take a tensor; None for one that stays."""
        if not self.moves(tensor):
            return None
        with self.lock:
            block = self.by_storage.get(storage_of(tensor))
            nbytes = tensor.untyped_storage().nbytes()
            if block is None or (block.version, block.nbytes) != (tensor._version, nbytes):
                if tensor.nbytes * SPARSE < nbytes:
                    return None
                block = self.by_storage[storage_of(tensor)] = Block(tensor, len(self.saved))
                self.saved.append(weakref.ref(block))
                self.newest.append(weakref.ref(block))
                self.push_out()
            return Saved(tensor, block)

    def push_out(self) -> None:
        """Older blocks make room for the newest."""
        for block in beyond(self.newest, self.keep_last):
            assert block.device is not None and self.link is not None
            block.host = empty(block.nbytes, torch.uint8, torch.device("cpu"), self.link)
            block.event = self.link.offload(block.host, block.device)  # which keeps it meanwhile
            self.by_storage.pop(storage_of(block.device), None)
            block.device = None
            self.num_offloaded += 1
            self.offloaded_nbytes += block.nbytes
            self.leaving.append((block.event, block.nbytes))
            while len(self.leaving) > 1 and sum(n for _, n in self.leaving) > self.keep_last:
                self.link.follow(self.leaving.popleft()[0])  # its memory is compute's again

    # ---- backward --------------------------------------------------------------------------------

    def unpack(self, saved: Saved | Passed) -> Tensor:
        if isinstance(saved, Passed):
            return saved.unpack(saved.value)
        kept((saved.witness, saved.version))
        with self.lock:
            device = self.bring(saved.block)
            if saved.block.event is not None and self.link is not None:
                self.link.follow(saved.block.event)
            self.bring_ahead(saved.block.number)
        tensor = torch.empty(0, dtype=saved.dtype, device=self.at)
        return tensor.set_(device.untyped_storage(), *saved.layout)  # type: ignore[call-overload, no-any-return]

    def bring(self, block: Block) -> Tensor:
        """Start to copy a block back to the device, if it is not there."""
        if block.device is None:
            assert block.host is not None and block.event is not None and self.link is not None
            block.device = torch.empty(block.nbytes, dtype=torch.uint8, device=self.at)
            block.event = self.link.upload(block.device, block.host, [block.event])
            self.num_uploaded += 1
            self.here.append(weakref.ref(block))
            for oldest in beyond(self.here, 2 * self.keep_last + block.nbytes):
                oldest.device = None  # it is in host memory still
        return block.device

    def bring_ahead(self, number: int) -> None:
        """Start to bring what was saved before, if backward goes backwards."""
        nbytes = 0
        for earlier in reversed(self.saved[max(number - 64, 0) : number]):
            block = earlier()
            if block is not None:
                nbytes += block.nbytes
                if nbytes > self.keep_last:
                    return
                self.bring(block)
        if not any(block() for block in self.saved):
            self.saved.clear()


def storage_of(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def beyond(blocks: deque[weakref.ref[Block]], limit: int) -> list[Block]:
    """Remove the oldest blocks, as many as have more than ``limit`` bytes together."""
    alive = [block for block in (ref() for ref in blocks) if block is not None]
    nbytes, found = sum(block.nbytes for block in alive), list[Block]()
    while nbytes > limit:
        nbytes -= alive[len(found)].nbytes
        found.append(alive[len(found)])
    blocks.clear()
    blocks.extend(map(weakref.ref, alive[len(found) :]))
    return found
