"""DeepSpeed's monitors: ``steps_per_print``, ``wall_clock_breakdown``, ``flops_profiler``, ``tensorboard``, ``csv_monitor`` and ``wandb``,
from the first rank.

Labels are DeepSpeed's: ``Train/Samples/train_loss``, ``lr`` and ``loss_scale`` over the samples so far; beside them the rates of
``zk.monitor.rates``, as ``zk/step_s``.
"""

from __future__ import annotations

import contextlib
import csv
import importlib
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zk.integrations.deepspeed_config import Settings
from zk.integrations.deepspeed_flops import Flops
from zk.monitor.progress import rates_line
from zk.monitor.rates import Rates, loggable
from zk.monitor.start import say
from zk.optimizer import ZeroOptimizer

Event = tuple[str, Any, int]  # label, value, samples
_EVERY = 10  # steps between rates, where steps_per_print says nothing


class Monitor:
    """Counts an engine's steps, prints lines and writes events; ``write_events`` takes those of scripts.

    Raises ImportError, with the remedy, if a monitor is enabled whose package is not installed.
    """

    def __init__(self, settings: Settings, optimizer: ZeroOptimizer) -> None:
        self.optimizer, self.rates = optimizer, Rates(optimizer)
        self.prints = settings.count("steps_per_print") if settings.has("steps_per_print") else 0
        self.times: Counter[str] | None = Counter() if settings.flag("wall_clock_breakdown", False) else None
        self.loss: Tensor | None = None  # of the micro batches so far
        is_first = optimizer.everyone.rank == 0
        self.flops = Flops(settings, self._now) if is_first and settings.flag("flops_profiler.enabled", False) else None
        self.writers: list[Callable[[list[Event]], None]] = []
        for name, make in (("tensorboard", _tensorboard), ("csv_monitor", _csv), ("wandb", _wandb)):
            if settings.flag(f"{name}.enabled", False) and is_first:
                self.writers.append(make(settings))

    @property
    def enabled(self) -> bool:
        """True if events are written anywhere."""
        return bool(self.writers)

    def write_events(self, events: Iterable[Event]) -> None:
        """Write (label, value, samples) to all monitors that are enabled."""
        events = list(events)
        for write in self.writers:
            write(events)

    def counted(self, phase: str) -> contextlib.AbstractContextManager[None]:
        """Context: operations inside are counted, where flops_profiler asks for this step."""
        counters = self.optimizer.counters
        if self.flops is None or self.flops.step != counters["steps"] + counters["skipped_steps"]:
            return contextlib.nullcontext()
        return self.flops.counted(phase)

    @contextlib.contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        """Add the time inside to a phase, with the device's work in it, if it is wanted."""
        if self.times is None:
            yield
            return
        start = self._now()
        try:
            yield
        finally:
            self.times[phase] += round((self._now() - start) * 1e9)

    def _now(self) -> float:
        if self.optimizer.device.type == "cuda":
            torch.cuda.synchronize(self.optimizer.device)
        return time.perf_counter()

    def add_loss(self, loss: Tensor) -> None:
        """Add the loss of a micro batch, divided by their number, if anybody wants it: it is read at the end of the step."""
        if self.writers or self.prints:
            loss = loss.detach()
            self.loss = loss if self.loss is None else self.loss + loss

    def step(self, engine: Any) -> None:
        """A step has been taken, or skipped."""
        loss, self.loss = self.loss, None
        if self.flops is not None and self.flops.tell(engine.module):
            self.flops = None
        steps, samples = engine.global_steps, engine.global_samples
        if self.writers:
            events: list[Event] = [("Train/Samples/train_loss", loss.item(), samples)] if loss is not None else []
            events += [("Train/Samples/lr", rate, samples) for rate in engine.get_lr()[:1]]
            if self.optimizer.scaler.active:
                events.append(("Train/Samples/loss_scale", self.optimizer.scaler.scale, samples))
            if steps % (self.prints or _EVERY) == 0:
                events += [(label, value, samples) for label, value in loggable(self.optimizer, self.rates).items()]
            self.write_events(events)
        is_first = self.optimizer.everyone.rank == 0
        if is_first and self.prints and steps % self.prints == 0:
            shown = f" | loss {loss.item():.4g}" if loss is not None else ""
            counts = f"step={steps}, skipped={engine.skipped_steps}, lr={engine.get_lr()}, mom={engine.get_mom()}"
            say(f"zk: {counts}{shown} | {rates_line(self.rates.take())}")
        if self.times is not None and steps % (self.prints or _EVERY) == 0:
            if is_first:
                spent = " | ".join(f"{phase}: {ns / 1e6 / (self.prints or _EVERY):.2f}" for phase, ns in self.times.items())
                say(f"zk: ms of a step | {spent}")
            self.times.clear()


def _folder(settings: Settings, section: str) -> Path:
    """The folder of a monitor's files: DeepSpeed's, ``output_path/job_name``."""
    return Path(settings.get(f"{section}.output_path", None) or "") / (settings.get(f"{section}.job_name", None) or "DeepSpeedJobName")


def _needed(package: str, section: str) -> Any:
    try:
        return importlib.import_module(package)
    except ImportError as error:
        name = package.partition(".")[0]
        raise ImportError(f"'{section}' is enabled, and {name} cannot be imported: python -m pip install {section}, or disable it") from error


def _tensorboard(settings: Settings) -> Callable[[list[Event]], None]:
    writer = _needed("torch.utils.tensorboard", "tensorboard").SummaryWriter(str(_folder(settings, "tensorboard")))

    def write(events: list[Event]) -> None:
        for label, value, samples in events:
            writer.add_scalar(label, value, samples)
        writer.flush()

    return write


def _csv(settings: Settings) -> Callable[[list[Event]], None]:
    folder = _folder(settings, "csv_monitor")
    folder.mkdir(parents=True, exist_ok=True)

    def write(events: list[Event]) -> None:
        for label, value, samples in events:
            path = folder / f"{label.replace('/', '_')}.csv"
            is_new = not path.exists()
            with open(path, "a", newline="") as file:
                rows = csv.writer(file)
                if is_new:
                    rows.writerow(("step", path.stem))
                rows.writerow((samples, value))

    return write


def _wandb(settings: Settings) -> Callable[[list[Event]], None]:
    wandb = _needed("wandb", "wandb")
    group, team, project = (settings.get(f"wandb.{name}", None) for name in ("group", "team", "project"))
    wandb.init(project=project or "deepspeed", group=group, entity=team)

    def write(events: list[Event]) -> None:
        for label, value, samples in events:
            wandb.log({label: value}, step=samples)

    return write
