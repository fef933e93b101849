"""Work in flight: copies, collectives, file transfers, jobs of a thread."""

from __future__ import annotations

import threading
from typing import Protocol


class Awaited(Protocol):
    """Work that can be waited for."""

    def wait(self) -> None:
        """Order the calling thread's current stream after the work; in host memory, return when it has ended. Raises what went wrong in it.

        A call orders one stream: whoever reads the result on another one calls again.
        """


class Event(Awaited, Protocol):
    """A point in the work of a stream."""

    @property
    def done(self) -> bool:
        """Check that all work up to it has ended."""


class Ticket:
    """One job, or a part of one that is waited for by itself."""

    def __init__(self) -> None:
        self.event = threading.Event()
        self.error: BaseException | None = None

    @property
    def done(self) -> bool:
        """Check that ``wait()`` would return, or raise, at once."""
        return self.event.is_set()

    def finish(self, error: BaseException | None = None) -> None:
        """Record its end; the first call counts."""
        if not self.event.is_set():
            self.error = error
            self.event.set()

    def wait(self) -> None:
        """Return when the job has ended. Raises its error, with the traceback of the thread that did it."""
        self.join()
        if self.error is not None:
            raise self.error

    def join(self) -> None:
        """Return when the job has ended, well or not."""
        if not self.done:  # what is over for all takes no lock, which a fork could leave locked
            self.event.wait()


COMPLETED = Ticket()
COMPLETED.finish()
