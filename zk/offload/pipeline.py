"""The schedule of the update, over chunks: fetch -> update+cast -> evict -> upload -> publish.

The only scheduler. Chunks go through in order; while one is updated, the gradient of the next ones is still arriving from the device, or
is read from the drive together with their state, and the parameters of the last ones are on their way home. The norm has been known before, so
nothing is updated that is to be skipped. ``update`` runs where it is called: in step(), or in the background (overlap_step).
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Collection, Mapping, Sequence

from zk.core.events import COMPLETED, Awaited, Event, Ticket
from zk.core.timeline import phase
from zk.offload.rules import Change
from zk.offload.section import Attempt, Section
from zk.offload.snapshot import Unread
from zk.offload.state import OptimizerShard
from zk.offload.tiers import CHUNKS_IN_MEMORY, CHUNKS_KEPT, Grads
from zk.offload.worker import Cancelled


@dataclasses.dataclass(slots=True)
class Task:
    """One unit's part in a step."""

    name: str
    shard: OptimizerShard
    change: Change
    # brings the updated slice to the other ranks, after its last copy home and a mark, as for Transfer; returns what compute must follow
    publish: Callable[[Event, Event | None], Awaited]
    used: Collection[int]  # numbers of the parameters that have a gradient
    done: Ticket = dataclasses.field(default_factory=Ticket)  # all of it is updated, and published
    arriving: Awaited = COMPLETED  # set when done: what compute must follow before it uses the parameters
    keep: bool = True  # the gradient stays where it is when this is done, until zero_grad()
    # the gradient of each section, where the next one comes before this is done; else empty
    handed_over: Mapping[Section, Grads] = dataclasses.field(default_factory=dict)
    is_published: bool = False  # or is just being
    left: int = dataclasses.field(init=False)  # chunks to be updated
    unread: Unread | None = dataclasses.field(init=False)  # what a save that began before still has to read
    attempt: Attempt | None = dataclasses.field(init=False)  # to do it, which has begun before

    def __post_init__(self) -> None:
        self.left, self.unread, self.attempt = len(self.shard.chunks), self.shard.unread, self.shard.attempt

    def end(self, mark: Event | None) -> None:
        """All chunks are updated, by what compute had been asked to do at ``mark`` and by the host."""
        self.is_published = True
        self.arriving = self.publish(self.shard.arriving, mark)
        self.done.finish()


def update(
    tasks: Sequence[Task],
    num_threads: int,
    *,
    keep: bool = False,
    backwards: bool = False,
    mark: Event | None = None,
    beside: bool | None = None,
    stop: threading.Event | None = None,
    tell: Callable[[BaseException], None] = lambda error: None,
) -> None:
    """Update every unit, and publish one while the next is updated. Where this ends early, all tasks that are not done end with the same error.

    Args:
        keep: the last chunks stay in memory for the next step, which must then go the other way.
        backwards: from the last chunk of the last unit to the first; all ranks alike.
        mark: what compute must have done before parameters are overwritten; None: what it has been asked for so far.
        beside: only the chunks that host threads update (True), or only the others (False).
        stop: looked at between chunks.
        tell: called with an error while other ranks wait, or will, for what this one does not publish any more.
    """
    work = [(task, index) for task in tasks for index in range(len(task.shard.chunks)) if beside in (None, task.shard.places[index][0].beside)]
    if backwards:
        work.reverse()
    try:
        _run(work, num_threads, keep, mark, stop)
        for task in tasks:
            if not task.left and not task.done.done:  # this rank has nothing of it
                task.end(mark)
    except BaseException as error:
        is_waited_for = all(task.done.done for task in tasks if task.is_published) and not all(task.is_published for task in tasks)
        for task in tasks:
            task.done.finish(error)
        if is_waited_for and not isinstance(error, Cancelled):
            tell(error)
        raise


def _run(work: Sequence[tuple[Task, int]], num_threads: int, keep: bool, mark: Event | None, stop: threading.Event | None) -> None:
    asked = 0
    with contextlib.ExitStack() as behind:
        for position, (task, index) in enumerate(work):
            if stop is not None and stop.is_set():
                raise Cancelled(f"the run ended before the update of unit {task.name!r} did")
            asked = max(asked, position)
            while asked < min(len(work), position + CHUNKS_IN_MEMORY - 1) and work[asked][0].shard.fetch(work[asked][1], work[asked][0].handed_over):
                asked += 1
            stays = keep and position >= len(work) - CHUNKS_KEPT
            with phase("update", task.name):
                streams = task.shard.update(index, task.change, num_threads, stays, mark, task.unread, task.attempt, task.handed_over)
            behind.close()  # the chunk before this one, which has streamed meanwhile
            behind.callback(_end, task, streams, mark)
            if streams is None:
                behind.close()


def _end(task: Task, streams: contextlib.ExitStack | None, mark: Event | None) -> None:
    """A chunk is updated, once what it ``streams`` through has been put back."""
    if streams is not None:
        with phase("update", task.name):
            streams.close()
    task.left -= 1
    if not task.left:
        task.shard.discard()
        task.end(mark)
