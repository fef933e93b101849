"""DeepSpeed's schedulers as torch schedulers with the same learning rate at every step.

DeepSpeed counts from -1: the first step of training has the value of iteration -1, the next one that of 0. So do these.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from zk.core.logs import log

Rates = Any  # a number, or one for each param group; always the latter once a schedule is made
_RATES = ("warmup_min_lr", "warmup_max_lr", "lr_range_test_min_lr", "cycle_min_lr", "cycle_max_lr")
_COUNTS = ("warmup_num_steps", "total_num_steps", "lr_range_test_step_size", "cycle_first_step_size")


@dataclasses.dataclass(eq=False, repr=False)
class Schedule(LRScheduler):
    """A learning rate for each iteration. Fields are DeepSpeed's parameters; the state is what DeepSpeed keeps."""

    optimizer: Optimizer

    def __post_init__(self) -> None:
        given = vars(self)
        self.own = [float(group["lr"]) for group in self.optimizer.param_groups]
        for name in _COUNTS:
            value = given.get(name, 1)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or value != int(value) or value < 1:
                raise ValueError(f"{name} must be a number of steps, 1 or more; got {value!r}")
        for name in filter(given.__contains__, _RATES):
            value = self.own if given[name] is None else given[name]
            values = value if isinstance(value, Sequence) else [value] * len(self.own)
            if len(values) != len(self.own):
                raise ValueError(f"{name} must be a number, or one for each of the {len(self.own)} param groups; got {value!r}")
            given[name] = [float(item) for item in values]
        super().__init__(self.optimizer)

    def rate(self, iteration: int, group: int) -> float:
        """The learning rate of a param group."""
        raise NotImplementedError

    def get_lr(self) -> list[Any]:
        return [self.rate(self.last_epoch - 1, group) for group in range(len(self.own))]

    def state_dict(self) -> dict[str, Any]:
        return {"last_batch_iteration": self.last_epoch - 1}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.last_epoch = int(state_dict["last_batch_iteration"]) + 1
        self._step_count = self.last_epoch + 1
        self._last_lr = self.get_lr()


class Warmup(Schedule):
    """From ``warmup_min_lr`` to ``warmup_max_lr`` (None: that of the group) within ``warmup_num_steps``, then as ``after`` says."""

    warmup_min_lr: Rates
    warmup_max_lr: Rates
    warmup_num_steps: int
    warmup_type: str

    def __post_init__(self) -> None:
        if self.warmup_type not in ("log", "linear"):
            raise ValueError(f"warmup_type must be 'log' or 'linear'; got {self.warmup_type!r}")
        super().__post_init__()

    @property
    def num_steps(self) -> int:
        return max(2, self.warmup_num_steps)

    def warmed(self, iteration: int) -> float:
        """The part of warmup that is done."""
        return math.log(iteration + 1) / math.log(self.num_steps) if self.warmup_type == "log" else iteration / self.num_steps

    def after(self, iteration: int) -> float:
        """The part of the way from lowest to highest when warmup is over."""
        return 1.0

    def rate(self, iteration: int, group: int) -> float:
        lowest, highest = self.warmup_min_lr[group], self.warmup_max_lr[group]
        part = 0.0 if iteration < 0 else self.warmed(iteration) if iteration < self.num_steps else self.after(iteration)
        return float(lowest + (highest - lowest) * part)


@dataclasses.dataclass(eq=False, repr=False)
class WarmupLR(Warmup):
    """Warmup, then constant."""

    warmup_min_lr: Rates = 0.0
    warmup_max_lr: Rates = None
    warmup_num_steps: int = 1000
    warmup_type: str = "log"


@dataclasses.dataclass(eq=False, repr=False)
class WarmupDecayLR(Warmup):
    """Warmup, then linearly down to ``warmup_min_lr`` at ``total_num_steps``."""

    total_num_steps: int
    warmup_min_lr: Rates = 0.0
    warmup_max_lr: Rates = 0.001
    warmup_num_steps: int = 1000
    warmup_type: str = "log"

    def after(self, iteration: int) -> float:
        return max(0.0, (self.total_num_steps - iteration) / max(1.0, self.total_num_steps - self.num_steps))


@dataclasses.dataclass(eq=False, repr=False)
class WarmupCosineLR(Warmup):
    """Up to the learning rate of the group, from ``warmup_min_ratio`` of it, then along a cosine to ``cos_min_ratio`` of it."""

    total_num_steps: int
    warmup_min_ratio: float = 0.0
    warmup_num_steps: int = 1000
    cos_min_ratio: float = 0.0001
    warmup_type: str = "log"

    def rate(self, iteration: int, group: int) -> float:
        if iteration < 0:
            return 0.0
        if iteration < self.num_steps:
            ratio = self.warmup_min_ratio + (1 - self.warmup_min_ratio) * self.warmed(iteration)
        else:
            way = min(1.0, (iteration - self.num_steps + 1) / max(1, self.total_num_steps - self.num_steps))
            ratio = max(0.0, self.cos_min_ratio + (1 - self.cos_min_ratio) * (1 + math.cos(math.pi * way)) / 2)
        return self.own[group] * ratio


@dataclasses.dataclass(eq=False, repr=False)
class LRRangeTest(Schedule):
    """Up from ``lr_range_test_min_lr``, by ``step_rate`` times it every ``step_size`` steps. Source: arXiv 1803.09820."""

    lr_range_test_min_lr: Rates = 1e-3
    lr_range_test_step_size: int = 2000
    lr_range_test_step_rate: float = 1.0
    lr_range_test_staircase: bool = False

    def rate(self, iteration: int, group: int) -> float:
        intervals = (iteration + 1) / self.lr_range_test_step_size
        steps = math.floor(intervals) if self.lr_range_test_staircase else intervals
        return float(self.lr_range_test_min_lr[group] * (1 + self.lr_range_test_step_rate * steps))


@dataclasses.dataclass(eq=False, repr=False)
class OneCycle(Schedule):
    """Up and down once between two learning rates, with beta1 the other way round, then decay. Source: arXiv 1803.09820."""

    cycle_min_lr: Rates
    cycle_max_lr: Rates
    decay_lr_rate: float = 0.0
    cycle_first_step_size: int = 2000
    cycle_second_step_size: int | None = None
    cycle_first_stair_count: int = 0
    cycle_second_stair_count: int | None = None
    decay_step_size: int = 0
    cycle_momentum: bool = True
    cycle_min_mom: float = 0.8
    cycle_max_mom: float = 0.9
    decay_mom_rate: float = 0.0

    def __post_init__(self) -> None:
        up, stairs = self.cycle_first_step_size, self.cycle_first_stair_count
        self.down = up if self.cycle_second_step_size is None else self.cycle_second_step_size
        self.stairs = (stairs, stairs if self.cycle_second_stair_count is None else self.cycle_second_stair_count)
        if self.down < 0:
            raise ValueError(f"cycle_second_step_size must be a number of steps, 0 or more; got {self.down!r}")
        if self.cycle_momentum and "betas" not in self.optimizer.defaults:
            log.warning("OneCycle leaves momentum as it is: %s has no betas", type(self.optimizer).__name__)
            self.cycle_momentum = False
        super().__post_init__()

    def height(self, iteration: int) -> float:
        """The part of the way from lowest to highest, within the cycle."""
        up, total = self.cycle_first_step_size, self.cycle_first_step_size + self.down
        place = (iteration + 1) % total
        height, stairs = (place / up, self.stairs[0]) if place <= up else ((total - place) / self.down, self.stairs[1])
        return math.floor(height * stairs + 1e-9) / stairs if stairs > 0 else height

    def decay(self, iteration: int, rate: float) -> float | None:
        """The divisor of the learning rate, and factor of beta1, after the cycle; None within it."""
        past = iteration - self.cycle_first_step_size - self.down
        return None if past < 0 else 1 + rate * (past + 1) / self.decay_step_size if self.decay_step_size else 1.0

    def rate(self, iteration: int, group: int) -> float:
        lowest, highest = self.cycle_min_lr[group], self.cycle_max_lr[group]
        decay = self.decay(iteration, self.decay_lr_rate)
        return float(lowest / decay if decay is not None else lowest + (highest - lowest) * self.height(iteration))

    def step(self, epoch: int | None = None) -> None:
        super().step(epoch)
        if not self.cycle_momentum:
            return
        iteration, lowest, highest = self.last_epoch - 1, self.cycle_min_mom, self.cycle_max_mom
        decay = self.decay(iteration, self.decay_mom_rate)
        beta1 = highest * decay if decay is not None else highest - (highest - lowest) * self.height(iteration)
        for group in self.optimizer.param_groups:
            group["betas"] = (lowest if iteration < 0 else beta1, 0.99)


SCHEDULES: dict[str, type[Schedule]] = {kind.__name__: kind for kind in (WarmupLR, WarmupDecayLR, WarmupCosineLR, LRRangeTest, OneCycle)}
