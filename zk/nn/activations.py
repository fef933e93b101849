"""Offload of activations: what autograd saves rests in host memory until backward; the same bits.

A storage moves once, however many views of it are saved. The newest ones stay where they are, as
backward wants them first; backward brings the others ahead of their use, the newest first.
Source: ZeRO-Infinity, arXiv 2104.07857, section 5.1.2.
"""

from __future__ import annotations

import threading
import weakref
from typing import Any

import torch
from torch import Tensor, nn

from zk.memory import empty
from zk.nn.deferred import default_device
from zk.offload.link import Event, link_to
from zk.options import parse_device, parse_nbytes
from zk.parallel.runtime import RUNTIMES, storage_of
from zk.parallel.saved import Passed, kept, saving_hooks

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
        keep_last: bytes (or "1GiB") of the newest storages that stay, 0 for none. As many come ahead
            of their use in backward, and up to 1 GiB is on its way to the host in forward.
        device: that computes; by default the model's, or the current accelerator.
    """
    smallest = 0 if min_nbytes == 0 else parse_nbytes(min_nbytes, "min_nbytes")
    newest = 0 if keep_last == 0 else parse_nbytes(keep_last, "keep_last")
    tensors = [] if model is None else [*model.parameters(), *model.buffers()]
    where = tensors[0].device if tensors else default_device()
    where = where if device is None else parse_device(device, "device")
    return ActivationOffload(where, {storage_of(tensor) for tensor in tensors}, smallest, newest)


class Block:
    """A storage that was saved. It goes with the last tensor that autograd has of it."""

    def __init__(self, tensor: Tensor, number: int) -> None:
        storage = tensor.untyped_storage()
        self.number, self.version, self.nbytes = number, tensor._version, storage.nbytes()
        self.device: Any = torch.empty(0, dtype=torch.uint8, device=tensor.device)  # its bytes there
        self.device.set_(storage, 0, (self.nbytes,), (1,))
        self.host: Any = None
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

    def __init__(self, device: torch.device, stays: set[int], smallest: int, newest: int) -> None:
        self.at, self.stays, self.min_nbytes, self.keep_last = device, stays, smallest, newest
        self.link: Any = link_to(device)
        self.num_offloaded = self.offloaded_nbytes = self.num_uploaded = 0
        self.lock = threading.RLock()  # autograd unpacks in threads of its own
        self.by_storage = weakref.WeakValueDictionary[int, Block]()  # of those that have not left
        self.saved: list[weakref.ref[Block]] = []  # in the order of forward
        self.num_left = 0  # of these; the others are on the device
        self.contexts: list[Any] = []

    def __enter__(self) -> ActivationOffload:
        if self.link is not None:
            with self.lock:
                if not any(ref() for ref in self.saved):
                    self.saved, self.num_left = [], 0
            unpack, pack = saving_hooks()[::-1]
            hooks = torch.autograd.graph.saved_tensors_hooks(
                lambda tensor: self.pack(tensor) or Passed(unpack, pack(tensor)), self.unpack
            )
            hooks.__enter__()
            self.contexts.append(hooks)
        return self

    def __exit__(self, *_: object) -> None:
        if self.link is not None:
            self.contexts.pop().__exit__()

    # ---- forward ---------------------------------------------------------------------------------

    def moves(self, tensor: Tensor) -> bool:
        """Tell if it is a tensor, large enough, that computes where this does, and no parameter."""
        if type(tensor) is not Tensor or tensor.layout is not torch.strided:
            return False
        base = tensor if tensor._base is None else tensor._base
        stays = isinstance(base, nn.Parameter) or (base.is_leaf and base.requires_grad)
        stays = stays or tensor.is_quantized or tensor.is_conj() or tensor.is_neg()
        gathered = (runtime.by_storage for runtime in RUNTIMES)
        stays = stays or any(storage_of(tensor) in those for those in (self.stays, *gathered))
        nbytes = tensor.untyped_storage().nbytes()
        return not stays and tensor.device == self.at and nbytes >= max(self.min_nbytes, 1)

    def pack(self, tensor: Tensor) -> Saved | None:
        """Take a tensor; None for one that stays."""
        with self.lock:
            if not self.moves(tensor):
                return None
            block = self.by_storage.get(storage_of(tensor))
            nbytes = tensor.untyped_storage().nbytes()
            if block is None or (block.version, block.nbytes) != (tensor._version, nbytes):
                if tensor.nbytes * SPARSE < nbytes:
                    return None
                block = self.by_storage[storage_of(tensor)] = Block(tensor, len(self.saved))
                self.saved.append(weakref.ref(block))
                self.push_out()
            return Saved(tensor, block)

    def push_out(self) -> None:
        """Older blocks make room for the newest."""
        here = [block for ref in self.saved[self.num_left :] if (block := ref()) is not None]
        nbytes = sum(block.nbytes for block in here)
        for block in here:
            if nbytes <= self.keep_last:
                return
            nbytes -= block.nbytes
            self.by_storage.pop(storage_of(block.device), None)
            block.host = empty(block.nbytes, torch.uint8, torch.device("cpu"), self.link)
            block.event = self.link.offload(block.host, block.device)  # which keeps it meanwhile
            block.device, self.num_left = None, block.number + 1
            self.num_offloaded += 1
            self.offloaded_nbytes += block.nbytes

    # ---- backward --------------------------------------------------------------------------------

    def unpack(self, saved: Saved | Passed) -> Tensor:
        if isinstance(saved, Passed):
            return saved.unpack(saved.value)
        kept((saved.witness, saved.version))
        with self.lock:
            block = saved.block
            self.bring(block)
            if block.event is not None:
                self.link.follow(block.event)
            found = torch.empty(0, dtype=saved.dtype, device=self.at)
            found.set_(block.device.untyped_storage(), *saved.layout)
            self.bring_ahead(block.number)
        return found

    def bring(self, block: Block) -> None:
        """Start to copy a block back to the device, if it is not there."""
        if block.device is None:
            block.device = torch.empty(block.nbytes, dtype=torch.uint8, device=self.at)
            block.event = self.link.upload(block.device, block.host, [block.event])
            self.num_uploaded += 1

    def bring_ahead(self, number: int) -> None:
        """Start to bring what was saved before, as backward goes backwards; others may go again."""
        nbytes = 0
        for other in reversed(self.saved[: self.num_left]):
            block = other()
            if block is not None and block.number < number and nbytes <= self.keep_last:
                nbytes += block.nbytes
                if nbytes <= self.keep_last:
                    self.bring(block)
            elif block is not None and block.number != number:
                block.device = None  # it is in host memory still
