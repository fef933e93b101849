"""DeepSpeed's ``flops_profiler``: operations of one micro batch, of forward and backward and by module, as torch counts them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

from torch import nn

from zk.integrations.deepspeed_config import Settings
from zk.monitor.start import say
from zk.monitor.words import count, seconds

_PHASES = ("forward", "backward")


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


def _flops(value: float) -> str:
    unit, scale = next(((unit, scale) for unit, scale in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)) if value >= scale), ("", 1.0))
    return f"{value / scale:.3g} {unit}FLOP"
