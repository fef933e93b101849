"""Buffers that forward writes are the first rank's after each step: BatchNorm's, codebooks.

DDP gives them before each forward. Every optimizer has it. Uses of the core: the seams ``attach`` and
``around_update``, ``Comm.rows``, ``words`` and ``broadcast``.
"""

from typing import Any

import torch

from zk.addon import Addon


class Buffers(Addon):
    def attach(self, optimizer: Any) -> None:
        self.optimizer, self.written = optimizer, set[str]()  # modules
        # where buffers were, and their versions, in the first step
        self.before: Any = {}

    def around_update(self, run: Any) -> Any:
        """Ranks ask each other until something is written, and share it at each step from then on."""
        comm = self.optimizer._layout.comm
        here = dict(self.optimizer.model.named_buffers()) if comm.size > 1 else {}
        if here:
            now = {name: (b.data_ptr(), b.is_inference() or b._version) for name, b in here.items()}
            changed = {module_of(name) for name in now if now[name] != self.before.get(name)}
            if self.written or any(map(any, comm.rows("buffers", [bool(changed)]))):
                self.share(comm, here, changed)
            if not self.before:  # all of them were shared, as any may have been written
                self.before, self.written = now, set()
        return run

    @torch.inference_mode()  # in which an evaluation may have made some
    def share(self, comm: Any, here: Any, changed: set[str]) -> None:
        """Give all ranks the first one's buffers, but for those whose shape differs by rank."""
        shapes = {name: tuple(buffer.shape) for name, buffer in here.items()}
        said = comm.words("buffers", (changed, shapes))
        self.written.update(*(modules for modules, _ in said))
        for name in sorted(here):
            alike = all(others.get(name) == shapes[name] for _, others in said)
            if alike and module_of(name) in self.written:
                comm.broadcast(name, here[name].data)


def module_of(name: str) -> str:
    """The module that has a buffer; where it writes one that is all: BatchNorm hides the others."""
    return name.rpartition(".")[0]
