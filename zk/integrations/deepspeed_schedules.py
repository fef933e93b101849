"""In: an optimizer and the parameters of a DeepSpeed scheduler. Out: a torch scheduler with the same learning rate at every step.

DeepSpeed counts from -1: the first step of training has the value of iteration -1, the next one that of 0. So does ``at`` here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from zk.logs import log


class Schedule(LRScheduler):
    """What all of them share: counting, and the state that DeepSpeed keeps."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        super().__init__(optimizer)

    def at(self, iteration: int) -> list[float]:
        """Learning rates of all groups; ``iteration`` counts from -1."""
        raise NotImplementedError

    def get_lr(self) -> list[Any]:
        return self.at(self.last_epoch - 1)

    def state_dict(self) -> dict[str, Any]:
        return {"last_batch_iteration": self.last_epoch - 1}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.last_epoch = int(state_dict["last_batch_iteration"]) + 1
        self._step_count = self.last_epoch + 1
        self._last_lr = [*self.at(self.last_epoch - 1)]


class WarmupLR(Schedule):
    """From ``warmup_min_lr`` to ``warmup_max_lr`` (None: that of the group) within ``warmup_num_steps``, then constant."""

    def __init__(
        self,
        optimizer: Optimizer,
        warmup_min_lr: float | Sequence[float] = 0.0,
        warmup_max_lr: float | Sequence[float] | None = None,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
    ) -> None:
        _check_warmup(warmup_num_steps, warmup_type)
        self.lowest = _per_group(optimizer, warmup_min_lr, "warmup_min_lr")
        given = [float(group["lr"]) for group in optimizer.param_groups]
        self.highest = _per_group(optimizer, warmup_max_lr, "warmup_max_lr") if warmup_max_lr is not None else given
        self.num_steps, self.kind = max(2, warmup_num_steps), warmup_type
        super().__init__(optimizer)

    def at(self, iteration: int) -> list[float]:
        part = 0.0 if iteration < 0 else self.after(iteration) if iteration >= self.num_steps else _warm(iteration, self.num_steps, self.kind)
        return [low + (high - low) * part for low, high in zip(self.lowest, self.highest, strict=True)]

    def after(self, iteration: int) -> float:
        """The part of the way from lowest to highest when warmup is over."""
        return 1.0


class WarmupDecayLR(WarmupLR):
    """As WarmupLR, then linearly down to ``warmup_min_lr`` at ``total_num_steps``."""

    def __init__(
        self,
        optimizer: Optimizer,
        total_num_steps: int,
        warmup_min_lr: float | Sequence[float] = 0.0,
        warmup_max_lr: float | Sequence[float] | None = 0.001,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
    ) -> None:
        self.total = _count(total_num_steps, "total_num_steps")
        super().__init__(optimizer, warmup_min_lr, warmup_max_lr, warmup_num_steps, warmup_type)

    def after(self, iteration: int) -> float:
        return max(0.0, (self.total - iteration) / max(1.0, self.total - self.num_steps))


class WarmupCosineLR(Schedule):
    """Up to the learning rate of the group, from ``warmup_min_ratio`` of it, then along a cosine to ``cos_min_ratio`` of it."""

    def __init__(
        self,
        optimizer: Optimizer,
        total_num_steps: int,
        warmup_min_ratio: float = 0.0,
        warmup_num_steps: int = 1000,
        cos_min_ratio: float = 0.0001,
        warmup_type: str = "log",
    ) -> None:
        _check_warmup(warmup_num_steps, warmup_type)
        self.total, self.num_steps, self.kind = _count(total_num_steps, "total_num_steps"), max(2, warmup_num_steps), warmup_type
        self.first, self.last = warmup_min_ratio, cos_min_ratio
        self.given = [float(group["lr"]) for group in optimizer.param_groups]
        super().__init__(optimizer)

    def at(self, iteration: int) -> list[float]:
        if iteration < 0:
            ratio = 0.0
        elif iteration < self.num_steps:
            ratio = self.first + (1 - self.first) * _warm(iteration, self.num_steps, self.kind)
        else:
            way = min(1.0, (iteration - self.num_steps + 1) / max(1, self.total - self.num_steps))
            ratio = max(0.0, self.last + (1 - self.last) * (1 + math.cos(math.pi * way)) / 2)
        return [lr * ratio for lr in self.given]


class LRRangeTest(Schedule):
    """Up from ``lr_range_test_min_lr``, by ``step_rate`` times it every ``step_size`` steps. Source: arXiv 1803.09820."""

    def __init__(
        self,
        optimizer: Optimizer,
        lr_range_test_min_lr: float | Sequence[float] = 1e-3,
        lr_range_test_step_size: int = 2000,
        lr_range_test_step_rate: float = 1.0,
        lr_range_test_staircase: bool = False,
    ) -> None:
        self.lowest = _per_group(optimizer, lr_range_test_min_lr, "lr_range_test_min_lr")
        self.size, self.rate = _count(lr_range_test_step_size, "lr_range_test_step_size"), lr_range_test_step_rate
        self.staircase = lr_range_test_staircase
        super().__init__(optimizer)

    def at(self, iteration: int) -> list[float]:
        intervals = (iteration + 1) / self.size
        return [low * (1 + self.rate * (math.floor(intervals) if self.staircase else intervals)) for low in self.lowest]


class OneCycle(Schedule):
    """Up and down once between two learning rates, with beta1 the other way round, then decay. Source: arXiv 1803.09820."""

    def __init__(
        self,
        optimizer: Optimizer,
        cycle_min_lr: float | Sequence[float],
        cycle_max_lr: float | Sequence[float],
        decay_lr_rate: float = 0.0,
        cycle_first_step_size: int = 2000,
        cycle_second_step_size: int | None = None,
        cycle_first_stair_count: int = 0,
        cycle_second_stair_count: int | None = None,
        decay_step_size: int = 0,
        cycle_momentum: bool = True,
        cycle_min_mom: float = 0.8,
        cycle_max_mom: float = 0.9,
        decay_mom_rate: float = 0.0,
    ) -> None:
        self.lowest = _per_group(optimizer, cycle_min_lr, "cycle_min_lr")
        self.highest = _per_group(optimizer, cycle_max_lr, "cycle_max_lr")
        self.up = _count(cycle_first_step_size, "cycle_first_step_size")
        self.down = self.up if cycle_second_step_size is None else cycle_second_step_size
        if self.down < 0:
            raise ValueError(f"cycle_second_step_size must be a number of steps, 0 or more; got {self.down!r}")
        self.stairs = (cycle_first_stair_count, cycle_first_stair_count if cycle_second_stair_count is None else cycle_second_stair_count)
        self.decay_size, self.decay_rates = decay_step_size, (decay_lr_rate, decay_mom_rate)
        self.betas = (cycle_min_mom, cycle_max_mom) if cycle_momentum and "betas" in optimizer.defaults else None
        if cycle_momentum and self.betas is None:
            log.warning("OneCycle leaves momentum as it is: %s has no betas", type(optimizer).__name__)
        super().__init__(optimizer)

    def height(self, iteration: int) -> float:
        """The part of the way from lowest to highest, within the cycle."""
        place = (iteration + 1) % (self.up + self.down)
        rising = place <= self.up
        height = place / self.up if rising else (self.up + self.down - place) / self.down
        stairs = self.stairs[0 if rising else 1]
        return math.floor(height * stairs + 1e-9) / stairs if stairs > 0 else height

    def decayed(self, iteration: int, rate: float) -> float:
        """What the values after the cycle are divided (learning rate) or multiplied (beta1) by."""
        return 1 + rate * (iteration - self.up - self.down + 1) / self.decay_size if self.decay_size else 1.0

    def at(self, iteration: int) -> list[float]:
        if iteration >= self.up + self.down:
            return [low / self.decayed(iteration, self.decay_rates[0]) for low in self.lowest]
        height = self.height(iteration)
        return [low + (high - low) * height for low, high in zip(self.lowest, self.highest, strict=True)]

    def beta1_at(self, iteration: int, lowest: float, highest: float) -> float:
        if iteration < 0:
            return lowest
        if iteration >= self.up + self.down:
            return highest * self.decayed(iteration, self.decay_rates[1])
        return highest - (highest - lowest) * self.height(iteration)

    def step(self, epoch: int | None = None) -> None:
        super().step(epoch)
        if self.betas is not None:
            for group in self.optimizer.param_groups:
                group["betas"] = (self.beta1_at(self.last_epoch - 1, *self.betas), 0.99)


SCHEDULES: dict[str, type[Schedule]] = {kind.__name__: kind for kind in (WarmupLR, WarmupDecayLR, WarmupCosineLR, LRRangeTest, OneCycle)}


def _warm(iteration: int, num_steps: int, kind: str) -> float:
    """The part of warmup that is done."""
    return math.log(iteration + 1) / math.log(num_steps) if kind == "log" else iteration / num_steps


def _check_warmup(num_steps: int, kind: str) -> None:
    _count(num_steps, "warmup_num_steps")
    if kind not in ("log", "linear"):
        raise ValueError(f"warmup_type must be 'log' or 'linear'; got {kind!r}")


def _count(value: Any, name: str) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value != int(value) or value < 1:
        raise ValueError(f"{name} must be a number of steps, 1 or more; got {value!r}")
    return int(value)


def _per_group(optimizer: Optimizer, value: float | Sequence[float], name: str) -> list[float]:
    """One value for each param group."""
    values = list(value) if isinstance(value, Sequence) else [value] * len(optimizer.param_groups)
    if len(values) != len(optimizer.param_groups):
        raise ValueError(f"{name} must be a number, or one for each of the {len(optimizer.param_groups)} param groups; got {value!r}")
    return [float(item) for item in values]
