"""Buffers that forward writes are the first rank's after each step: BatchNorm's, codebooks.

DDP gives them before each forward. Every optimizer has it. Uses of the core: the seams ``attach`` and
``around_update``, ``Comm.words``, ``Comm.broadcast``.
"""

from typing import Any

from zk.addon import Addon


class Buffers(Addon):
    def attach(self, optimizer: Any) -> None:
        self.optimizer, self.written = optimizer, set[str]()  # modules
        # where buffers were, and their versions, in the first step
        self.before: Any = None

    def around_update(self, run: Any) -> Any:
        """Ranks ask each other ever more rarely, and at each step once something is written."""
        comm, steps = self.optimizer._layout.comm, self.optimizer.num_steps
        is_due = self.written or self.before is None or steps & (steps - 1) == 0
        if comm.size > 1 and is_due:
            self.share(comm, dict(self.optimizer.model.named_buffers()))
        return run

    def share(self, comm: Any, here: Any) -> None:
        """Give all ranks the first one's buffers, but for those whose shape differs by rank."""
        now = {name: (buffer.data_ptr(), buffer._version) for name, buffer in here.items()}
        before = self.before or {}
        changed = {module_of(name) for name in now if now[name] != before.get(name)}
        shapes = {name: tuple(buffer.shape) for name, buffer in here.items()}
        said = comm.words("buffers", (changed, shapes)) if here else []
        self.written.update(*(modules for modules, _ in said))
        for name in sorted(here):
            alike = all(others.get(name) == shapes[name] for _, others in said)
            if alike and module_of(name) in self.written:
                comm.broadcast(name, here[name].data)
        if self.before is None:  # all of them were shared, as any may have been written
            self.before, self.written = now, set()


def module_of(name: str) -> str:
    """The module that has a buffer; where it writes one that is all: BatchNorm hides the others."""
    return name.rpartition(".")[0]
