"""``zk.profile``: torch.profiler with zk's phases as named ranges."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zk.logs import say
from zk.offload.file import File
from zk.parallel.gradient import Gradient
from zk.parallel.runtime import Hook, Runtime
from zk.store import UnitStore
from zk.tools.phases import WAITS, wrap


def _named(words: str) -> Any:
    return torch.profiler.record_function(f"zk: {words}")


_PHASES: tuple[tuple[type, str, Any], ...] = (  # methods of the core, and the range of each
    (UnitStore, "begin_gather", lambda store: _named(f"{store.unit.name} gather")),
    (UnitStore, "update", lambda store, *_: _named(f"{store.unit.name} update")),
    (Gradient, "reduce", lambda grad, *_: _named(f"{grad.unit.name} reduce")),
    (File, "move", lambda file, verb, data, *_: _named(f"{verb} {len(data) >> 10} KiB")),
    *((owner, name, lambda *_, why=why: _named(f"wait {why}")) for why, owner, name in WAITS),
)


class profile(contextlib.ExitStack):  # a verb, as contextlib's are
    """Record steps into ``trace.json``, for https://ui.perfetto.dev.

    ``with zk.profile(optimizer, "profile"):`` records all steps inside, ``steps=3`` the next three.

    Args:
        optimizer: a ZeroOptimizer, or what has one as ``.optimizer``.
        folder: is made if missing. Rank 1 writes ``trace-rank1.json``.
        steps: to record, at least 1; None records until the context ends.
        skip: steps to let pass first, in which caches fill and kernels are compiled.
    """

    def __init__(
        self, optimizer: Any, folder: str | Path, *, steps: int | None = None, skip: int = 0
    ):
        if (steps is not None and steps < 1) or skip < 0:
            raise ValueError(
                "steps must be at least 1, or None, and skip at least 0; got "
                f"steps={steps!r}, skip={skip!r}"
            )
        super().__init__()
        while not isinstance(getattr(optimizer, "_runtime", None), Runtime):
            if not hasattr(optimizer, "optimizer"):
                given = type(optimizer).__name__
                raise TypeError(f"zk.profile needs a ZeroOptimizer; got {given}")
            optimizer = optimizer.optimizer
        self.folder, self.optimizer = Path(folder), optimizer
        self.folder.mkdir(parents=True, exist_ok=True)
        self.taken, self.first, self.last = -1, skip, skip + steps if steps else None
        alive = [self]  # the hook stays, as torch iterates over them when a profile ends
        self.callback(alive.clear)
        optimizer.register_step_post_hook(lambda *_: list(map(profile._advance, alive)))
        self._advance()

    def _advance(self) -> None:
        self.taken += 1
        if self.taken == self.first:
            self._begin()
        elif self.taken == self.last:
            self.close()

    def _begin(self) -> None:
        if torch.autograd.profiler._is_profiler_enabled:
            raise RuntimeError("there can be one profile at a time: close the first, or torch's")
        stores = self.optimizer._runtime.stores
        names = {self.optimizer.model: "model"} | {s.unit.module: s.unit.name for s in stores}
        for module, name in names.items():
            self._name_forward(module, f"{name} forward")
        self.callback(self._write)
        threads = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
        self.torch = self.enter_context(torch.profiler.profile(experimental_config=threads))
        for owner, method, around in _PHASES:
            self.callback(wrap(owner, method, around))

    def _name_forward(self, module: nn.Module, name: str) -> None:
        """Make each forward of a module a range; a hook may be missing where one has raised."""
        ranges: list[Any] = []
        begin = Hook(lambda *_: ranges.append(_named(name).__enter__()))
        end = Hook(lambda *_: ranges and ranges.pop().__exit__(None, None, None))
        self.callback(module.register_forward_pre_hook(begin).remove)
        self.callback(module.register_forward_hook(end, always_call=True).remove)

    def _write(self) -> None:
        rank = self.optimizer._layout.comm.rank
        trace = self.folder / ("trace.json" if rank == 0 else f"trace-rank{rank}.json")
        self.torch.export_chrome_trace(str(trace))
        if rank == 0:
            say(f"zk: wrote {trace}, for https://ui.perfetto.dev")
