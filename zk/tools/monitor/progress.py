"""Progress of a loop of one's own: a line with steps, loss, rates and the time that is left, in terminals, notebooks and files."""

from __future__ import annotations

import contextlib
import importlib
import os
import shutil
import sys
import time
from collections.abc import Mapping
from numbers import Real
from typing import Any

import torch

from zk.core.memory import host_memory
from zk.core.options import is_count
from zk.tools.monitor.rates import Rates, reason_of, zero_of
from zk.tools.monitor.runfile import RunFile
from zk.tools.monitor.start import begun_line, is_quiet
from zk.tools.monitor.words import bar, duration, seconds

EVERY_S = 10.0  # between lines where there is no terminal
_TERMINAL_S = 0.25  # between two states of a terminal's line


def rates_line(rates: Mapping[str, float], ranks: int, host_nbytes: int | None = None) -> str:
    """Rates as one short line: ``1,940 tok/s | 4.20 s/step | 41% waiting: drive | drive 2.7 GB/s | host 51/64 GiB | floor 2.6 s``.

    ``ranks`` share this machine's memory; ``host_nbytes``: what each of them has of it, where that is known.
    """
    if not rates:
        return ""
    parts = [f"{rates['tokens_per_s']:,.0f} tok/s"] if "tokens_per_s" in rates else []
    parts.append(f"{seconds(rates['step_s'])}/step")
    if rates["wait_share"] >= 0.005:
        parts.append(f"{rates['wait_share']:.0%} waiting: {reason_of(rates)}")
    if rates["update_share"] >= 0.005:
        parts.append(f"{rates['update_share']:.0%} update")
    parts += [f"{name} {rates[f'{name}_gbps']:.2g} GB/s" for name in ("drive", "link") if f"{name}_gbps" in rates]
    if "peak_device_gib" in rates:
        parts.append(f"GPU {rates['peak_device_gib']:.1f} GiB")
    parts.append(f"host {rates['peak_host_gib']:.1f}/{(host_nbytes or host_memory()[0] // ranks) / 2**30:.0f} GiB")
    if "floor_s" in rates and rates["wait_share"] >= 0.005:
        parts.append(f"floor {seconds(rates['floor_s'])}")
    return " | ".join(parts)


def _in_notebook() -> bool:
    shell = sys.modules.get("IPython")
    return shell is not None and type(shell.get_ipython()).__name__ == "ZMQInteractiveShell"


class Progress(contextlib.AbstractContextManager["Progress"]):
    """Shows the progress of a loop: call ``step`` after each ``optimizer.step()``.

    In a terminal or a notebook one line is renewed; elsewhere (a file, a pipe) a line is printed every ten seconds, and at the end.
    The first rank alone shows anything. ``ZK_QUIET=1`` ends it.

    ```python
    with zk.Progress(optimizer, total=1000) as progress:
        for x, y in batches:
            ...
            optimizer.step()
            progress.step(loss, tokens=x.numel())
    ```

    Args:
        optimizer: the ZeroOptimizer that is stepped, or what has it inside: an engine of zk.initialize, accelerate's prepared one.
        total: steps of the whole run; None if that is not known, and then neither is the time that is left.
        done: steps that were taken before, of a run that is resumed.
        run: a folder for the file that ``zk watch`` and ``zk report`` read; None writes none.
        about: settings to show in the report.
        file: where lines go to; None is stderr.
    """

    def __init__(
        self,
        optimizer: Any,
        total: int | None = None,
        *,
        done: int = 0,
        file: Any = None,
        run: str | os.PathLike[str] | None = None,
        about: Mapping[str, Any] | None = None,
    ) -> None:
        if total is not None and not is_count(total):
            raise ValueError(f"total must be a number of steps, at least 1, or None; got {total!r}")
        self.total, self.done, self.first = total, done, done
        self.file = sys.stderr if file is None else file
        optimizer = zero_of(optimizer)
        self.rates, self.world = Rates(optimizer), optimizer.comm.world
        self.notebook: Any = None
        self.is_shown = optimizer.everyone.rank == 0 and not is_quiet() and self.file is not None
        self.is_terminal = bool(getattr(self.file, "isatty", bool)()) if self.is_shown and not getattr(self.file, "closed", False) else False
        self.run = None if run is None else RunFile(optimizer, run, total, done=done, about=about)
        self.loss: Any = None
        self.started = self.shown_at = self.warm = time.monotonic()
        self.width = 0  # of what is in the terminal's line

    def step(self, loss: Any = None, tokens: int = 0, **more: Any) -> None:
        """Count a step.

        Args:
            loss: of this step, a number or a scalar tensor; it is read only where a line is shown, as reading it waits for the device.
            tokens: that this rank has trained in the step.
            more: numbers to show beside it, by name.
        """
        if isinstance(loss, torch.Tensor) and loss.numel() != 1:
            raise TypeError(f"loss must be a number, or a tensor of one element; got one of shape {tuple(loss.shape)}")
        if not isinstance(loss, (Real, torch.Tensor, type(None))):
            raise TypeError(f"loss must be a number, or a tensor of one element; got {loss!r}")
        self.done += 1
        self.loss = loss.detach() if isinstance(loss, torch.Tensor) else loss
        self.rates.tokens += tokens * self.world
        if self.run is not None:
            self.run.step(self.loss, tokens * self.world)
        now = time.monotonic()
        if self.done == self.first + 1:
            self.warm = now
        since, every = now - self.shown_at, _TERMINAL_S if self.is_terminal or _in_notebook() else EVERY_S
        if self.is_shown and (since >= every or self.done == self.total or self.done == self.first + 1):
            self.shown_at = now
            self._show(self.line(more))

    def line(self, more: Mapping[str, Any] | None = None) -> str:
        """The line as it is now."""
        parts = [f"step {self.done}/{self.total}" if self.total else f"step {self.done}"]
        if self.loss is not None:
            parts.append(f"loss {float(self.loss):.4g}")
        parts += [f"{name} {float(value):.3g}" for name, value in (more or {}).items()]
        optimizer = self.rates.optimizer()
        if optimizer is not None and optimizer.counters["skipped_steps"]:
            parts.append(f"{optimizer.counters['skipped_steps']} skipped")
        now, timed = time.monotonic(), self.done - self.first
        parts.append(duration(now - self.started))
        if self.total and timed > 0 and self.done < self.total:
            per_step = (now - self.warm) / (timed - 1) if timed > 1 else now - self.started  # the first step is slow: caches, compilation
            parts.append(f"eta {duration(per_step * (self.total - self.done))}")
        return " | ".join(filter(None, [*parts, rates_line(self.rates.take(), self.rates.ranks)]))

    def _show(self, line: str) -> None:
        if _in_notebook():
            self.notebook = self.notebook or importlib.import_module("IPython.display").display(display_id=True)
            self.notebook.update({"text/plain": line}, raw=True)
            return
        with contextlib.suppress(OSError, ValueError):  # nobody reads it: a pipe that is closed
            if self.is_terminal:
                line, width = f"{bar(self.done / self.total)} {line}" if self.total else line, max(20, shutil.get_terminal_size().columns - 1)
                while len(line) > width and " | " in line:  # whole parts, the least important last
                    line = line.rpartition(" | ")[0]
                line = line[:width]
                self.file.write(f"\r{line.ljust(self.width)}")
                self.width = len(line)
                begun_line(self.file)
            else:
                self.file.write(f"zk: {line}\n")
            self.file.flush()

    def close(self, error: BaseException | None = None, *, results: Mapping[str, str] | None = None) -> None:
        """Show the last line, and end it; and the file of the run, with ``results`` to show in its report."""
        if self.run is not None:
            self.run.close(error, results or {})
        if self.is_shown and self.done > self.first:
            self.is_shown = False
            if self.shown_at < time.monotonic() and self.done != self.total:
                self._show(self.line())
            if self.is_terminal and not _in_notebook():
                with contextlib.suppress(OSError, ValueError):
                    self.file.write("\n")
                    self.file.flush()
                begun_line(None)

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        self.close(error)
