"""``with optimizer.parked(path):`` gives the memory of a run back; after it, bits are the same.

Uses of the core: tensors of stores, gradients and chunks; ``UnitStore.updating``, for which all
access waits, ``point``, ``changed``, ``take_back``; ``Runtime.broken``, ``depth``;
``ZeroOptimizer._settle`` and ``close``, which are replaced meanwhile.
"""

import io
from tempfile import TemporaryFile
from typing import Any

import torch
from torch import Tensor
from xxhash import xxh3_64_intdigest as checksum

from zk.logs import require
from zk.memory import empty, trim
from zk.offload.tiers import CPU, link_to
from zk.optimizer import ZeroOptimizer
from zk.parallel.runtime import storage_of


class Parked:
    """Inside, memory of parameters, masters, moments and gradients is free. Enter it on all ranks.

    ``path``: a folder for all of it; None: what a device has goes to host memory. OSError without
    room there; RuntimeError if all of it does not come back, and ``synchronize()`` tries again.
    """

    def __init__(self, optimizer: ZeroOptimizer, path: Any = None):
        self.optimizer, self.path, self.is_inside = optimizer, path, False
        self.runtime, self.stores = optimizer._runtime, optimizer._runtime.stores

    def __enter__(self) -> None:
        self.optimizer.synchronize()
        with self.optimizer._layout.comm.together("parked()"):
            self.save(self.optimizer._layout.device)
        self.runtime.broken = "the optimizer is parked: leave 'with parked():' first"
        vars(self.optimizer).update(_settle=self.refuse, close=self.refuse)
        for place, name, *_ in self.tensors:
            place[name] = torch.empty(0)
        for store in self.stores:
            store.point(None)
            store.viewed, store.updating = store.released, self.refuse
        trim()
        torch.cuda.empty_cache()
        self.is_inside = True

    def save(self, device: torch.device) -> None:
        """Write storages to a file, and note the tensors in them."""
        is_all = self.path is not None
        require(is_all or device.type != "cpu", "parked() of host memory needs path=, a folder")
        require(not self.runtime.depth, "leave zk.gather and forward before parked()", RuntimeError)
        owners = [o for s in self.stores for o in (s, s.grad, s.param, *s.states, *s.grad.chunks)]
        for owner in (link := link_to(device), *owners):
            getattr(owner, "wait", bool)()  # until nothing moves
        places = [place for o in owners for place in (vars(o), getattr(o, "fields", {}))]
        found = [
            (place, name, t)
            for place in places
            for name, t in place.items()
            if isinstance(t, Tensor) and (is_all or t.device != CPU)
        ]
        self.tensors = [
            (place, name, storage_of(t), t.storage_offset() * t.itemsize, t.nbytes, t.dtype)
            for place, name, t in found
        ]
        self.file: Any = TemporaryFile(dir=self.path) if is_all else io.BytesIO()  # noqa: SIM115
        self.sizes: Any = {}
        for key, t in {storage_of(t): t for *_, t in found}.items():
            values = t.new_empty(0, dtype=torch.uint8).set_(t.untyped_storage())
            own = link if values.data_ptr() in getattr(link, "pinned", ()) else None
            self.file.write(copied := values.cpu().numpy().data)
            self.sizes[key] = len(values), t.device, own, checksum(copied)  # page-locked again
        self.file.flush()

    def refuse(self, *_: Any, **__: Any) -> None:
        """Refuse all inside; where memory has not come back, try again."""
        require(not self.is_inside, self.runtime.broken, RuntimeError)
        self.__exit__()

    @torch.inference_mode(False)
    def __exit__(self, *_: Any) -> None:
        self.is_inside, memory = False, dict[int, Tensor]()
        vars(self.optimizer).pop("close", None)
        try:
            self.file.seek(0)
            for key, (nbytes, device, link, digest) in self.sizes.items():
                values = empty(nbytes, torch.uint8, CPU, link)
                self.file.readinto(values.numpy())
                require(checksum(values.numpy().data) == digest, "it reads as other bytes", OSError)
                memory[key] = values.to(device)
        except Exception as error:
            memory.clear()
            self.runtime.broken = (
                f"what was parked in {self.path or 'memory'} has not come back: {error!r}; it is "
                "still there: free memory, and optimizer.synchronize() tries again"
            )
            raise RuntimeError(self.runtime.broken) from error
        for place, name, key, first, nbytes, dtype in self.tensors:
            place[name] = memory[key][first : first + nbytes].view(dtype)
        names = [store.unit.names[index] for store in self.stores for index in store.changed()]
        for store in self.stores:
            store.updating = None
            store.take_back()
        del vars(self.optimizer)["_settle"]
        self.runtime.broken = ""
        self.file.close()
        require(not names, f"change {names[:1]} after parked(): within, it is lost", RuntimeError)
