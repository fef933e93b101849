"""A background thread that does jobs one after the other; what went wrong in one is raised where it is waited for."""

from __future__ import annotations

import atexit
import contextlib
import os
import queue
import threading
import weakref
from collections.abc import Callable

import torch

from zk.core.events import Ticket
from zk.core.timeline import in_background


class Cancelled(RuntimeError):
    """The job was not done, or not to its end, because the run is over."""


class Worker:
    """One thread. It starts with the first job and ends with ``close``, or with the program.

    Args:
        name: of the thread.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.jobs: queue.SimpleQueue[tuple[Callable[[], None], Ticket] | None] = queue.SimpleQueue()
        self.stop = threading.Event()
        self.thread: threading.Thread | None = None

    def submit(self, job: Callable[[], None]) -> Ticket:
        """Do ``job`` after all that was submitted before."""
        if self.stop.is_set():
            raise Cancelled(f"the thread {self.name!r} has ended")
        if self.thread is None:
            self.thread = threading.Thread(target=_run, args=(self.jobs,), name=self.name, daemon=True)
            self.thread.start()
            _WORKERS.add(self)
            weakref.finalize(self, self.jobs.put, None).atexit = False  # the thread does not outlive who made it
        ticket = Ticket()
        self.jobs.put((job, ticket))
        return ticket

    def close(self) -> None:
        """No job comes any more, and those in flight are asked to end (they look at ``stop``); returns when the thread has ended."""
        self.stop.set()
        if self.thread is not None and self.thread is not threading.current_thread():
            self.jobs.put(None)
            self.thread.join()
            self.thread = None


def _run(jobs: queue.SimpleQueue[tuple[Callable[[], None], Ticket] | None]) -> None:
    in_background()
    with torch.no_grad():  # gradients are switched on thread by thread
        while (entry := jobs.get()) is not None:
            job, ticket = entry
            try:
                job()
            except BaseException as error:
                ticket.finish(error)
            else:
                ticket.finish()
            del entry, job, ticket  # a waiting thread holds nothing


_WORKERS: weakref.WeakSet[Worker] = weakref.WeakSet()
os.register_at_fork(after_in_child=_WORKERS.clear)  # a forked process has none of these threads


@atexit.register
def _end_all() -> None:
    """A thread that comes back into a finalized interpreter ends the process with SIGABRT."""
    for worker in list(_WORKERS):
        with contextlib.suppress(RuntimeError):
            worker.close()
