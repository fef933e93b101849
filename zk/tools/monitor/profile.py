"""Profiles of a few steps: a Chrome trace with counters of bytes by tier and of the drive's rate, for https://ui.perfetto.dev."""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import re
import weakref
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from torch.utils.hooks import RemovableHandle

from zk.core.cache import folder_for, replace_text
from zk.core.logs import rank_log
from zk.core.options import is_count
from zk.core.timeline import Recorder, Span, Timeline, chrome_trace, note, now_ns
from zk.tools.monitor.rates import zero_of
from zk.tools.monitor.start import say
from zk.tools.monitor.summary import nbytes_of, rows_of

_BIN_NS = 10_000_000  # of the drive's rate
_LEAST_NS = 2_000_000  # between two readings of the bytes on each tier
_SHARE = 200  # and so many times what the last one took
Reading = tuple[int, dict[str, int]]  # time, tier -> bytes


class profile(contextlib.AbstractContextManager["profile"]):  # a verb, as contextlib's are
    """Record the next steps of a ZeroOptimizer and write a trace. Also a context, which ends the recording if the steps have not come.

    ```python
    zk.profile(optimizer, "trace.json", steps=3)  # anywhere before the steps; it ends by itself
    ```

    Args:
        optimizer: the ZeroOptimizer whose steps count.
        path: of the file; with several ranks each writes one of its own, ``trace-rank1.json``.
        steps: to record.
        skip: steps before that, in which caches fill and kernels are compiled.

    Raises:
        ValueError: for a number of steps that is none.
        OSError: if the folder cannot be made or written. A file that is refused when the steps have come is a warning.

    If the program ends before these steps, what there is of them is written.
    """

    def __init__(self, optimizer: Any, path: str | os.PathLike[str] = "trace.json", *, steps: int = 3, skip: int = 1) -> None:
        for name, value, least in (("steps", steps, 1), ("skip", skip, 0)):
            if not is_count(value, least):
                raise ValueError(f"{name} must be a number of steps, at least {least}; got {value!r}")
        self.optimizer, self.left, self.skip = zero_of(optimizer), steps, skip
        self.rank = rank = self.optimizer.everyone.rank
        self.path = Path(path) if rank == 0 else Path(path).with_stem(f"{Path(path).stem}-rank{rank}")
        folder_for(self.path)
        _OPEN.add(self)
        self.recorder: Recorder | None = None
        self.readings: list[Reading] = []
        self.next_ns = 0
        self.entered: dict[str, int] = {}  # unit -> when its forward began
        self.handles: list[RemovableHandle] = []
        self.steps = _Steps(self)
        self.optimizer.register_step_post_hook(self.steps)
        if skip == 0:
            self._start()

    def _start(self) -> None:
        self.recorder = Recorder(self.optimizer.device)
        for held in self.optimizer.held:
            for module in held.unit.anchors:
                self.handles.append(module.register_forward_pre_hook(functools.partial(self._enter, held.unit.name)))
                self.handles.append(module.register_forward_hook(functools.partial(self._leave, held.unit.name)))
        self.handles.append(self.optimizer.register_step_pre_hook(self._read))
        self.recorder.__enter__()
        self._read()

    def _read(self, *_: Any) -> None:
        """Note the bytes on each tier, unless that was done a moment ago."""
        now = now_ns()
        if now >= self.next_ns:
            self.readings.append((now, bytes_by_tier(self.optimizer)))
            self.next_ns = now + max(_LEAST_NS, _SHARE * (now_ns() - now))

    def _enter(self, unit: str, *_: Any) -> None:
        self.entered[unit] = now_ns()
        self._read()

    def _leave(self, unit: str, *_: Any) -> None:
        note("forward", unit, self.entered.pop(unit, now_ns()), now_ns(), holds=True)
        self._read()

    def _after_step(self) -> None:
        if self.recorder is None:
            self.skip -= 1
            if self.skip <= 0:
                self._start()
            return
        self.next_ns = 0
        self._read()
        self.left -= 1
        if self.left == 0:
            self.close()

    def close(self) -> None:
        """End the recording, and write what there is of it; once."""
        _OPEN.discard(self)
        for handle in self.handles:
            handle.remove()
        recorder, self.recorder, is_open = self.recorder, None, self.steps.of is not None
        self.handles.clear()
        self.steps.of = None
        if recorder is None or self.optimizer.forked:
            if is_open and self.rank == 0:
                say(f"zk: no trace in {self.path}: there was no step after those to skip")
            return
        recorder.__exit__()
        trace = chrome_trace(recorder.timeline, self.rank)
        trace["traceEvents"] += list(counters(recorder.timeline, self.readings, self.rank, trace["baseTimeNanoseconds"]))
        try:
            replace_text(self.path, json.dumps(trace))
        except OSError as error:  # training goes on
            rank_log.warning("no trace: %s", error)
            return
        if self.rank == 0:
            missing = f", without {self.left} of its steps, which have not come" if self.left else ""
            say(f"zk: wrote {self.path}{missing}: open it in https://ui.perfetto.dev")

    def __exit__(self, *_: object) -> None:
        self.close()


class _Steps:
    """Hook after each step, for a profile until that has ended. It stays, as it ends while torch goes through these hooks."""

    def __init__(self, of: profile) -> None:
        self.of: profile | None = of

    def __call__(self, *_: Any) -> None:
        if self.of is not None:
            self.of._after_step()


_OPEN: weakref.WeakSet[profile] = weakref.WeakSet()  # whose steps have not all come


@atexit.register
def _close_all() -> None:
    for one in list(_OPEN):
        one.close()


def bytes_by_tier(optimizer: Any) -> dict[str, int]:
    """Bytes of this rank's training state on each tier now: "device", "host" and "nvme"; where device and host are one memory, "host"."""
    found = Counter({"host": 0} if optimizer.transfer.joined else {"device": 0, "host": 0})
    for row in rows_of(optimizer, nbytes_of(optimizer)).values():
        found.update(row)
    return dict(found)


def counters(timeline: Timeline, readings: Sequence[Reading], rank: int, base_ns: int) -> Iterator[dict[str, Any]]:
    """Counter events: MiB on each tier, and GB/s of the drive, in bins of ten milliseconds."""
    for at, nbytes in readings:
        for tier, value in nbytes.items():
            yield {"ph": "C", "name": f"MiB on {tier}", "pid": rank, "ts": (at - base_ns) / 1e3, "args": {"MiB": value / 2**20}}
    for verb in ("read", "write"):
        bins: defaultdict[int, float] = defaultdict(float)  # bytes by bin
        for span in timeline.spans:
            moved = _moved(span) if span.resource == verb else 0
            first, last = ((at - timeline.start_ns) // _BIN_NS for at in (span.start_ns, span.stop_ns))
            for number in range(first, last + 1) if moved else ():
                shared = min(span.stop_ns, timeline.start_ns + (number + 1) * _BIN_NS) - max(span.start_ns, timeline.start_ns + number * _BIN_NS)
                bins[number] += moved * shared / max(1, span.stop_ns - span.start_ns)
        for number in range((timeline.stop_ns - timeline.start_ns) // _BIN_NS + 1) if bins else ():
            ts = (timeline.start_ns + number * _BIN_NS - base_ns) / 1e3
            yield {"ph": "C", "name": f"GB/s drive {verb}s", "pid": rank, "ts": ts, "args": {"GB/s": bins[number] / _BIN_NS}}


def _moved(span: Span) -> int:
    """Bytes of a transfer, from its name."""
    found = re.match(r"(\d+) KiB at ", span.name)
    return int(found[1]) << 10 if found else 0
