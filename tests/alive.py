"""Bytes that are in memory at once, as operations make them and their owners let them go, at fixed points."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from zk.offload.nvme import File, Request


class Alive(TorchDispatchMode):
    """Context, in several threads too: ``most`` bytes at once of tensors that operations have made inside, of those that ``counts`` says."""

    def __init__(self, counts: Callable[[Tensor], bool]) -> None:
        super().__init__()
        self.counts = counts
        self.nbytes = self.most = 0
        self.known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {leaf.untyped_storage()._cdata for leaf in tree_leaves((args, kwargs)) if type(leaf) in (Tensor, nn.Parameter)}
        out = func(*args, **(kwargs or {}))
        for storage in [leaf.untyped_storage() for leaf in tree_leaves(out) if type(leaf) is Tensor and self.counts(leaf)]:
            if storage._cdata not in self.known | given:
                self.known.add(storage._cdata)
                self.nbytes += storage.nbytes()
                weakref.finalize(storage, self.end, storage._cdata, storage.nbytes())
        self.most = max(self.most, self.nbytes)
        return out

    def end(self, number: int, nbytes: int) -> None:
        self.known.discard(number)
        self.nbytes -= nbytes


@contextlib.contextmanager
def drive_without_delay() -> Iterator[None]:
    """Let every transfer end before training goes on: what is still in memory, and what is read again, does not depend on speed."""
    start = File._start

    def whole(self: File, *args: Any, **kwargs: Any) -> Request:
        request = start(self, *args, **kwargs)
        request.join()  # an error is for whoever waits
        return request

    with mock.patch.object(File, "_start", whole):
        yield
