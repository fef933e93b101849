"""DeepSpeed's monitors: ``steps_per_print``, ``wall_clock_breakdown``, ``flops_profiler``, ``tensorboard``, ``csv_monitor`` and ``wandb``,
from the first rank. Operations are those of one micro batch, of forward and backward and by module, as torch counts them.

Labels are DeepSpeed's: ``Train/Samples/train_loss``, ``lr`` and ``loss_scale`` over the samples so far; beside them the rates of
``zk.tools.monitor.rates``, as ``zk/step_s``.
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
from torch import Tensor, nn

from zk.integrations.deepspeed_config import Settings
from zk.optimizer import ZeroOptimizer
from zk.tools.monitor.progress import rates_line
from zk.tools.monitor.rates import Rates, loggable
from zk.tools.monitor.start import say
from zk.tools.monitor.words import count, seconds

Event = tuple[str, Any, int]  # label, value, samples
_PHASES = ("forward", "backward")
_EVERY = 10  # steps between rates, where steps_per_print says nothing


class Flops:
    """Counts the first micro batch of step ``profile_step``, as ``torch.utils.flop_counter`` does: products of matrices, convolutions, attention.

    Forward that is computed again in backward is counted there.
    """

    def __init__(self, settings: Settings, now: Callable[[], float]) -> None:
        self.step = settings.count("flops_profiler.profile_step", 1, least=0)
        self.depth = int(settings.number("flops_profiler.module_depth", -1, least=-1))
        self.top = settings.count("flops_profiler.top_modules", 1)
        self.detailed, self.file = settings.flag("flops_profiler.detailed", True), settings.get("flops_profiler.output_file", None)
        self.now, self.found = now, dict[str, tuple[int, float]]()
        self.modules: dict[str, int] = {}

    @contextlib.contextmanager
    def counted(self, phase: str) -> Iterator[None]:
        """Count what is inside, unless that has been done."""
        if phase in self.found:
            yield
            return
        from torch.utils.flop_counter import FlopCounterMode  # which imports triton

        counter, start = FlopCounterMode(display=False), self.now()
        with counter:
            yield
        self.found[phase] = counter.get_total_flops(), self.now() - start
        if phase == "forward":
            self.modules = {str(name): sum(counts.values()) for name, counts in counter.get_flop_counts().items() if name != "Global"}

    def lines(self, model: nn.Module) -> Iterator[str]:
        """The profile as text."""
        yield f"flops of the first micro batch of step {self.step}, {count(sum(param.numel() for param in model.parameters()))} parameters"
        total = max(1, self.found["forward"][0])
        for phase in _PHASES:
            flops, taken = self.found[phase]
            yield f"{phase:9} {_flops(flops)} in {seconds(taken)}, {_flops(flops / taken)}/s with the counting"
        depths = sorted({name.count(".") for name in self.modules})
        for depth in depths if self.depth < 0 else [depth for depth in depths if depth <= self.depth]:
            most = sorted((name for name in self.modules if name.count(".") == depth), key=lambda name: -self.modules[name])
            for name in most if self.detailed else most[: self.top]:
                yield f"{'  ' * depth}{name} {_flops(self.modules[name])}, {self.modules[name] / total:.0%} of forward"

    def tell(self, model: nn.Module) -> bool:
        """Print the profile, or write it to ``output_file``, once forward and backward have been counted; True if so."""
        if not self.found.keys() >= set(_PHASES):
            return False
        if self.file:
            Path(self.file).write_text("\n".join(self.lines(model)) + "\n")
        else:
            say("\n".join(f"zk: {line}" for line in self.lines(model)))
        return True


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
            say(f"zk: {counts}{shown} | {rates_line(self.rates.take(), self.rates.ranks)}")
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


def _flops(value: float) -> str:
    unit, scale = next(((unit, scale) for unit, scale in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)) if value >= scale), ("", 1.0))
    return f"{value / scale:.3g} {unit}FLOP"
