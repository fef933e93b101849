"""torch.profiler on the pretended devices: traces have their kernels and copies, as CUPTI would tell of them.

A copy begins when it is asked for, and ends when somebody must find it done.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from tests.softgpu.streams import Queue, profiles

_plain = torch.profiler.profile
_CUDA = torch.profiler.ProfilerActivity.CUDA


class Profile(_plain):
    """torch.profiler.profile."""

    def __init__(self, *, activities: Any = None, **options: Any) -> None:
        wanted = {torch.profiler.ProfilerActivity.CPU, _CUDA} if activities is None else set(activities)
        super().__init__(activities=wanted - {_CUDA}, **options)
        self.looks_on = _CUDA in wanted
        self.told: list[tuple[str, str, Queue, int, int]] = []

    def start(self) -> None:
        super().start()
        if self.looks_on:
            profiles.append(self.told)

    def stop(self) -> None:
        if self.looks_on:
            profiles[:] = [told for told in profiles if told is not self.told]
        super().stop()

    def export_chrome_trace(self, path: str) -> Any:
        super().export_chrome_trace(path)
        trace = json.loads(Path(path).read_text())
        base = trace.get("baseTimeNanoseconds", 0)
        for category, name, queue, begin, end in self.told:
            where = {"device": queue.device, "stream": queue.serial}
            times = {"ts": (begin - base) / 1e3, "dur": (end - begin) / 1e3}
            trace["traceEvents"].append({"ph": "X", "cat": category, "name": name, "pid": queue.device, "tid": queue.serial, **times, "args": where})
        Path(path).write_text(json.dumps(trace))


def install() -> None:
    """Make torch's profiler see the devices."""
    torch.profiler.profile = Profile  # type: ignore[misc,assignment]
