"""``update_on="device"``, a share or ``"auto"``: the device updates states that rest elsewhere.

States on the host or a drive pass through the device in blocks, where its kernel updates them: each
field is copied up once and down once. A share (0 to 1) of all chunks does so while CPU threads
update the others; "auto" chooses it by the first chunks that go each way. The bits are those of
numba's CPU update, which the kernel has too (tests/test_kernels.py), so no choice changes them.

The update has a stream of its own: forward does not wait for it (``overlap_step=True``). Whoever
opens or loads a chunk waits for the copies of it that are noted there. Before a block takes memory,
the stream follows the copies of the last block but one: at most two blocks are on the device.
Uses of the core: the seam ``check``; ``UnitStore.update`` (replaced), ``open``, ``apply``, ``runs``;
``HostChunk.fields`` and ``note``; ``CudaLink.upload``, ``copy``, ``mark``, ``follow``, ``wait``.
"""

from copy import copy
from functools import partial
from time import perf_counter
from typing import Any

import torch

from zk.addon import Addon
from zk.logs import require
from zk.memory import empty
from zk.offload.cpu_adam import default_engine
from zk.offload.rules import AdamRule, is_plain_adam
from zk.offload.tiers import CPU, TO_HOST, Chunk, Fields, HostChunk, link_to
from zk.store import Step, UnitStore


class UpdateOn(Addon):
    """``value``: "device" for all chunks, a share of them, or "auto".

    A rank's share is its own: ranks may choose different ones. Units whose rule is not AdamRule, by
    another add-on's ``rules``, stay with the CPU. A block has up to 32 Mi elements, so two of them
    take up to 1.2 GB of the device.
    """

    def __init__(self, value: Any):
        is_share = isinstance(value, float) and 0 < value < 1
        said = f"update_on must be 'device', 'auto' or a share between 0 and 1; got {value!r}"
        require(is_share or value in ("device", "auto"), said)
        self.value, self.share = value, {"device": 1.0, "auto": 0.5}.get(value, value)
        self.due = 0.0  # chunks that the device should have had, less those that it had
        # "auto", until the share is chosen: seconds for an element, by the host and by the device
        self.times: Any = value == "auto" and ([], [])
        self.behind: Any = (), ()  # the copies down of the last block but one, and of the last

    def check(self, model: Any, optimizers: Any, config: Any) -> None:
        device = config.device or next(model.parameters()).device
        others = [type(one).__name__ for one in optimizers if not is_plain_adam(model, one)]
        faults = {
            "needs a GPU, as a CPU updates what it has anyway: remove it": device.type != "cuda",
            "has no effect with optimizer_tier='device': use 'host', or remove it": (
                config.optimizer_tier == "device"
            ),
            f"needs Adam or AdamW without amsgrad, as other kernels have other bits; got {others}: "
            "remove it": others,
            "and overlap_step='backward', where CPU threads update: use overlap_step=True, or remove "
            "one": config.options.get("overlap_step") == "backward",
            "needs numba, whose CPU update has the bits of the kernel: install it and unset "
            "ZK_CPU_ADAM, or remove it": default_engine() != "numba",
        }
        for why, is_so in faults.items():
            require(not is_so, f"update_on={self.value!r} {why}")

    def attach(self, optimizer: Any) -> None:
        link: Any = link_to(optimizer._layout.device)
        self.link, self.stream = link, torch.cuda.Stream(link.device)
        for store in optimizer._trained:
            if isinstance(store.rule, AdamRule) and isinstance(store.states[0], HostChunk):
                store.update = partial(self.update, store)
            for chunk in store.states if type(store.states[0]) is HostChunk else ():
                for name, field in chunk.fields.items():  # page-locked, so that no copy holds up
                    chunk.fields[name] = empty(len(field), field.dtype, CPU, link).copy_(field)

    def update(self, store: UnitStore, number: int, step: Step) -> None:
        """Update chunk ``number`` by CPU threads, or begin to by way of the device, and return."""
        self.due += self.share
        is_near = self.due >= 1
        self.due -= is_near
        with store.open(number) as fields:
            began = perf_counter()
            (self.send if is_near else UnitStore.apply)(store, number, fields, step)
            if self.times:
                self.link.wait()
                self.times[is_near].append((perf_counter() - began) / len(fields["param"]))
                if min(map(len, self.times)) == 3:  # the first one of each compiles
                    far, near = map(min, self.times)
                    # while one block comes down, another one goes up
                    self.share, self.times = far / (far + near / 2), ()

    def send(self, store: UnitStore, number: int, fields: Fields, step: Step) -> None:
        """Start to copy a block up, update it, and copy it down; its chunks note when that ends.

        The gradient may be dropped meanwhile: the link keeps both ends of its copy.
        """
        link, grad, near = self.link, store.grad.chunks[number], Chunk({}, 0, self.link.device)
        store.runs(number)  # found once: the twin has them too
        twin: Any = copy(store)
        twin.grad = copy(store.grad)
        twin.grad.chunks = {number: near}
        with torch.cuda.stream(self.stream):
            for event in self.behind[0]:
                link.follow(event)
            for name, field in (fields | grad.open()).items():
                near.fields[name] = torch.empty_like(field, device=link.device)
                link.follow(link.upload(near.fields[name], field))
            twin.apply(number, near.fields, step)
            events = [
                link.copy(TO_HOST, field, near.fields[name], [link.mark()])
                for name, field in fields.items()
            ]
        self.behind = self.behind[1], events
        store.states[number].note(events[-1])  # type: ignore[attr-defined]
        store.param.note(events[-1], store.bounds[number])  # type: ignore[attr-defined]
        grad.close(False)
