"""Offload of activations: what autograd saves rests in host memory until backward; the same bits.

A storage moves once, however many views of it are saved. The newest ones stay where they are, as
backward wants them first; backward brings the others ahead of their use, the newest first.
Source: ZeRO-Infinity, arXiv 2104.07857, section 5.1.2.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from zk.config import parse_device, parse_nbytes
from zk.memory import empty
from zk.nn.deferred import default_device
from zk.offload.tiers import Event, link_to
from zk.parallel.runtime import RUNTIMES, Passed, kept, saving_hooks, storage_of

SPARSE = 4  # a view of less than a quarter of its storage does not make it move


class Block:
    """A storage that was saved. It goes with the last tensor that autograd has of it."""

    def __init__(self, tensor: Tensor, number: int):
        storage = tensor.untyped_storage()
        self.number, self.nbytes = number, storage.nbytes()
        self.device: Any = torch.empty(0, dtype=torch.uint8, device=tensor.device)
        self.device.set_(storage, 0, (self.nbytes,), (1,))
        self.name = StorageWeakRef(storage)  # no other storage has its address meanwhile
        self.host: Any = None
        self.event: Event | None = None  # of the last copy


class offload_activations:
    """Context for forward: what autograd saves goes to host memory, and returns for backward.

    Backward may run inside or after it, and the context may be entered again. With
    ``torch.utils.checkpoint`` the saved tensors are the inputs of the checkpointed parts. Where
    device memory is host memory it does nothing.

    Args:
        model: its parameters and buffers, and all views of them, stay where they are. Without it
            that holds for parameters and their views, unless they were detached.
        min_nbytes: smaller storages stay.
        keep_last: bytes (or "1GiB") of the newest storages that stay, 0 for none. As many come
            ahead of their use in backward, and up to 1 GiB is on its way to the host in forward.
        device: that computes; by default the model's, or the current accelerator.

    Since it was made ``num_offloaded`` storages left the device, and ``num_uploaded`` came back.
    """

    def __init__(
        self, model: nn.Module | None = None, *, min_nbytes: int | str = "1MiB",
        keep_last: int | str = "256MiB", device: torch.device | str | None = None,
    ):  # fmt: skip
        tensors = [] if model is None else [*model.parameters(), *model.buffers()]
        where = next((tensor.device for tensor in tensors), default_device())
        self.at = where if device is None else parse_device(device, "device")
        self.stays = set(map(storage_of, tensors))
        self.min_nbytes = min_nbytes != 0 and parse_nbytes(min_nbytes, "min_nbytes")
        self.keep_last = keep_last != 0 and parse_nbytes(keep_last, "keep_last")
        self.link: Any = link_to(self.at)
        self.num_offloaded = self.num_uploaded = 0
        self.lock = threading.RLock()  # autograd unpacks in threads of its own
        self.blocks = weakref.WeakValueDictionary[Any, Block]()  # by storage, version and size
        self.saved: list[weakref.ref[Block]] = []  # in the order of forward
        self.num_left = 0  # of these; the others have not left the device
        self.contexts: list[Any] = []

    def __enter__(self) -> offload_activations:
        with self.lock:
            if not any(ref() for ref in self.saved):
                self.saved, self.num_left = [], 0
        pack, unpack = saving_hooks()
        hooks = torch.autograd.graph.saved_tensors_hooks(
            lambda tensor: self.pack(tensor) or Passed(unpack, pack(tensor)),
            lambda passed: passed.unpack(passed.value),
        )
        self.contexts.append(contextlib.nullcontext() if self.link is None else hooks)
        self.contexts[-1].__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self.contexts.pop().__exit__()

    # ---- forward ---------------------------------------------------------------------------------

    def moves(self, tensor: Tensor) -> bool:
        """Tell if it is a tensor, large enough, that computes where this does, and no parameter."""
        base = tensor if tensor._base is None else tensor._base
        gathered = (runtime.by_storage for runtime in RUNTIMES)
        return not (
            (type(tensor) is not Tensor or tensor.layout is not torch.strided)
            or (isinstance(base, nn.Parameter) or (base.is_leaf and base.requires_grad))
            or (tensor.is_quantized or tensor.is_conj() or tensor.is_neg())
            or tensor.device != self.at
            or tensor.untyped_storage().nbytes() < max(self.min_nbytes, 1)
            or any(storage_of(tensor) in those for those in (self.stays, *gathered))
        )

    def pack(self, tensor: Tensor) -> Passed | None:
        """Take a tensor; None for one that stays."""
        with self.lock:
            if not self.moves(tensor):
                return None
            nbytes = tensor.untyped_storage().nbytes()
            key = storage_of(tensor), tensor._version, nbytes
            block = self.blocks.get(key)
            if block is None:
                if tensor.nbytes * SPARSE < nbytes:
                    return None
                block = self.blocks[key] = Block(tensor, len(self.saved))
                self.saved.append(weakref.ref(block))
                self.push_out()
            witness = tensor.detach()  # shares the version counter
            witness.data = torch.empty(0, dtype=tensor.dtype, device=self.at)
            layout = tensor.storage_offset(), tensor.shape, tensor.stride()
            unpack = functools.partial(self.unpack, block, layout)
            return Passed(unpack, (witness, tensor._version))

    def push_out(self) -> None:
        """Older blocks make room for the newest."""
        here = [block for ref in self.saved[self.num_left :] if (block := ref()) is not None]
        nbytes = sum(block.nbytes for block in here)
        for block in here:
            if nbytes <= self.keep_last:
                return
            nbytes -= block.nbytes
            block.host = empty(block.nbytes, torch.uint8, torch.device("cpu"), self.link)
            block.event = self.link.offload(block.host, block.device)  # which keeps it meanwhile
            block.device, self.num_left = None, block.number + 1
            self.num_offloaded += 1

    # ---- backward --------------------------------------------------------------------------------

    def unpack(self, block: Block, layout: Any, saved: tuple[Tensor, int]) -> Tensor:
        found: Any = torch.empty_like(kept(saved))
        with self.lock:
            self.bring(block)
            if block.event is not None:
                self.link.follow(block.event)
            found.set_(block.device.untyped_storage(), *layout)
            self.bring_ahead(block.number)
        return found  # type: ignore[no-any-return]

    def bring(self, block: Block) -> None:
        """Start to copy a block back to the device, if it is not there."""
        if block.device is None:
            block.device = torch.empty(block.nbytes, dtype=torch.uint8, device=self.at)
            block.event = self.link.upload(block.device, block.host, [block.event])
            self.num_uploaded += 1

    def bring_ahead(self, number: int) -> None:
        """Start to bring what was saved before, as backward goes backwards; others may go again."""
        nbytes = 0
        for block in filter(None, (ref() for ref in reversed(self.saved[: self.num_left]))):
            nbytes += block.nbytes * (block.number < number)
            if block.number < number and nbytes <= self.keep_last:
                self.bring(block)
            elif block.number != number:
                block.device = None  # it is in host memory still
