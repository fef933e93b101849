"""One case of the parity grid, run on every rank: zk against plain torch. Returns what differs, or an empty string."""

import contextlib
import dataclasses
import functools
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

import zk
from tests import softgpu
from tests.adversary import adversarial_drive
from tests.cpu_adam import CPUAdam
from tests.models import GPT, batch, loss_of, small_chunks, unlike_the_first
from tests.plain import train_plain
from zk.offload.cpu_adam import default_engine

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclasses.dataclass(frozen=True)
class Case:
    stage: int = 2
    dtype: str = "fp32"
    accumulation: int = 1
    model: str = "plain"
    optimizer: str = "AdamW"  # "CPUAdam": AdamW of zk's own engine
    tier: str = "host"
    clip: float | None = 0.5
    no_sync: bool = False
    steps: int = 3  # the third one uses every buffer again, and every order is known by then
    prefetch: int = 1
    adversary: bool = False  # tier "nvme": transfers come late, in any order, into memory that holds NaN
    overlap_step: bool | str = False
    params: str = ""  # their tier at stage 3, if not ``tier``
    budgets: tuple[tuple[str, int], ...] = ()

    def __str__(self) -> str:
        return "-".join(f"{name}={value}" for name, value in vars(self).items() if value != getattr(Case, name)) or "default"


class Lion(torch.optim.Optimizer):
    """An optimizer that zk does not know, as people write them: no foreach, state on first sight, a step count that is Python's."""

    def __init__(self, params: Any, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.99), weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if not state:
                    state["exp_avg"], state["updates"] = torch.zeros_like(param), 0
                state["updates"] += 1
                average, (beta1, beta2) = state["exp_avg"], group["betas"]
                param.mul_(1 - group["lr"] * group["weight_decay"])
                param.add_((average * beta1 + param.grad * (1 - beta1)).sign(), alpha=-group["lr"])
                average.mul_(beta2).add_(param.grad, alpha=1 - beta2)


# options that change the arithmetic, or what is kept
OPTIONS: dict[str, dict[str, Any]] = {
    "AdamW": {"betas": (0.9, 0.95)},
    "CPUAdam": {"betas": (0.9, 0.95)},
    "Adam": {"amsgrad": True},
    "SGD": {"momentum": 0.9, "nesterov": True},
    "RMSprop": {"momentum": 0.9, "centered": True},
    "NAdam": {"decoupled_weight_decay": True, "momentum_decay": 0.1},
    "RAdam": {"decoupled_weight_decay": False},
    "Adagrad": {"initial_accumulator_value": 0.1, "lr_decay": 0.01},
    "Adamax": {"maximize": True},
    "ASGD": {"t0": 1.0, "lambd": 1e-2},
    "Rprop": {"etas": (0.4, 1.3)},
}


def make_optimizer(name: str, params: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Two groups with different decay and rate, and the options that change the arithmetic."""
    groups = [{"params": [p for p in params if p.ndim >= 2], "weight_decay": 0.1}]
    groups += [{"params": [p for p in params if p.ndim < 2], "weight_decay": 0.0, "lr": 3e-3}]
    kind: Any = {"Lion": Lion, "CPUAdam": torch.optim.AdamW}.get(name) or getattr(torch.optim, name)
    return kind(groups, lr=1e-2, **OPTIONS.get(name, {}))  # type: ignore[no-any-return]


def plain_optimizer(name: str, params: list[nn.Parameter]) -> torch.optim.Optimizer:
    """What trains in plain torch: the same, or CPUAdam over whole parameters."""
    inner = make_optimizer(name, params)
    return CPUAdam(inner.param_groups, lr=1e-2, betas=inner.defaults["betas"], engine="numba") if name == "CPUAdam" else inner


def forward(model: nn.Module, ids: Tensor, step: int) -> Tensor:
    return loss_of(model, ids, branch=step % 3 == 1) if getattr(model, "variant", "") == "sometimes" else loss_of(model, ids)


def run_case_with(case: Case, make: Any, plain: Any = None, **options: Any) -> str:
    """``run_case`` with what ``make`` makes of a name and parameters, in plain training ``plain``; and with more options."""
    original = zk.ZeroOptimizer
    with (
        mock.patch(f"{__name__}.make_optimizer", make),
        mock.patch(f"{__name__}.plain_optimizer", plain or make),
        mock.patch.object(zk, "ZeroOptimizer", lambda *given, **own: original(*given, **own, **options)),
    ):
        return run_case(case)


@functools.cache
def plain_training(
    model: str, optimizer: str, loss_scale: float, dtype: torch.dtype, world: int, accumulation: int, local: bool, steps: int, clip: float | None
) -> tuple[list[float], list[Tensor], dict[int, dict[str, Any]]]:
    """Losses of rank 0, parameters and states of plain torch, computed once for all stages and tiers; of several ranks, by the first one."""
    found: list[Any] = [None]
    if not dist.is_initialized() or dist.get_rank() == 0:
        torch.manual_seed(0)
        how: dict[str, Any] = {"world": world, "accumulation": accumulation, "local": local, "steps": steps, "clip": clip, "loss_scale": loss_scale}
        losses, trained, _, plain = train_plain(GPT(model), functools.partial(plain_optimizer, optimizer), dtype=dtype, forward=forward, **how)
        found = [(losses, [param.detach().cpu() for param in trained.parameters()], state_of(plain))]
    if dist.is_initialized():
        dist.broadcast_object_list(found, 0)
    return found[0]  # type: ignore[no-any-return]


def state_of(optimizer: Any) -> dict[int, dict[str, Tensor]]:
    states = optimizer.state_dict()["state"].items()
    return {key: {name: torch.as_tensor(value).cpu() for name, value in values.items()} for key, values in states}


@contextlib.contextmanager
def drive(case: Case) -> Iterator[dict[str, object]]:
    """What ZeroOptimizer needs for the case's tier: a folder, and chunks so small that these models have several."""
    if case.tier != "nvme":
        yield {}
        return
    with tempfile.TemporaryDirectory() as folder, adversarial_drive() if case.adversary else contextlib.nullcontext():
        yield {"nvme_path": folder}
        assert os.listdir(folder) == [], "the scratch folder is still there"


def run_case(case: Case) -> str:
    """zk on the torch engine against plain torch training with torch's own optimizer; "CPUAdam" on the numba engine against that."""
    engine = "numba" if case.optimizer == "CPUAdam" else "torch"
    copies, pinned = softgpu.stats["copies"], softgpu.pinned_nbytes() if softgpu.installed() else 0
    with drive(case) as options, small_chunks(), mock.patch.dict(os.environ, {"ZK_CPU_ADAM": engine}):
        default_engine.cache_clear()
        lines = differing(case, options)
    default_engine.cache_clear()
    if softgpu.installed():
        lines += ["no copies between device and host"] * (case.tier == "host" and softgpu.stats["copies"] == copies)
        lines += softgpu.found() + [f"{nbytes} bytes are still page-locked" for nbytes in [softgpu.pinned_nbytes() - pinned] if nbytes > 0]
    return "\n".join(lines)


def differing(case: Case, options: dict[str, object]) -> list[str]:
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    scale = 1024.0 if case.dtype == "fp16" else 1.0
    local = case.accumulation > 1 and (world == 1 or case.stage == 1 or case.no_sync)  # of one micro-batch both ways are the same
    arithmetic = (DTYPES[case.dtype], world, case.accumulation, local, case.steps, case.clip)
    losses, trained, want_state = plain_training(case.model, case.optimizer, scale, *arithmetic)
    torch.manual_seed(0)
    model = GPT(case.model)
    if rank:
        unlike_the_first(model, rank)
    optimizer = zk.ZeroOptimizer(
        model,
        make_optimizer(case.optimizer, list(model.parameters())),
        stage=case.stage,
        dtype=case.dtype,
        optimizer_tier=case.tier,
        param_tier=(case.params or case.tier) if case.stage == 3 else "device",
        clip_grad_norm=case.clip,
        loss_scale=scale if scale != 1 else None,
        overlap_step=case.overlap_step,
        prefetch=case.prefetch,
        **options,
        **dict(case.budgets),
    )
    mine = []
    for step in range(case.steps):
        for micro in range(case.accumulation):
            loss = forward(model, batch(1000 * step + 10 * micro + rank), step)
            mine.append(loss.item())
            with optimizer.no_sync() if case.no_sync and micro < case.accumulation - 1 else contextlib.nullcontext():
                optimizer.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    optimizer.synchronize()
    found = [f"losses {mine} instead of {losses}"] * (rank == 0 and mine != losses)
    with zk.gather(model.parameters()):
        pairs = [(name, got.detach().cpu(), want) for (name, got), want in zip(model.named_parameters(), trained, strict=True)]
    if case.stage < 3 or world == 1:
        state = state_of(optimizer)
        found += [f"state of parameters {sorted(state)} instead of {sorted(want_state)}"] * (state.keys() != want_state.keys())
        common = [(key, name, value) for key in state.keys() & want_state.keys() for name, value in want_state[key].items()]
        pairs += [(f"state {key} {name}", state[key][name], value) for key, name, value in common]
    optimizer.close()
    for what, got, want in pairs:
        if got.shape != want.shape or got.dtype != want.dtype:
            found.append(f"{what}: {got.dtype} {tuple(got.shape)} instead of {want.dtype} {tuple(want.shape)}")
        elif not torch.equal(got, want):
            found.append(f"{what}: differs by {(got.float() - want.float()).abs().max().item():.3g}")
    return found


# ---- a user's program, with an add-on and without -------------------------------------------------------------------------

Stepwise = Callable[[GPT, zk.ZeroOptimizer, int], None]  # what comes before step(), of a step
PLACE = "stage", "optimizer_tier", "param_tier", "nvme_path", "host_budget"  # options that change no bit


def place(name: str, path: Path) -> dict[str, Any]:
    """Of "3 nvme", or "3 nvme device" where parameters are elsewhere."""
    stage, tier, *params = name.split()
    given = {"param_tier": params[0]} if params else {}
    return {"stage": int(stage), "optimizer_tier": tier, "nvme_path": path if tier == "nvme" else None, **given}


def halved(**options: Any) -> tuple[GPT, zk.ZeroOptimizer]:
    """A model, and an optimizer with two groups of its parameters."""
    torch.manual_seed(0)
    model, kind = GPT(options.pop("model", "plain")), options.pop("kind", torch.optim.AdamW)
    halves = [{"params": half} for half in ([p for p in model.parameters() if p.ndim > 1], [p for p in model.parameters() if p.ndim == 1])]
    inner = kind(halves, lr=1e-2, weight_decay=0.1, **({"momentum": 0.9} if kind is torch.optim.SGD else {}))
    settings = {"stage": 2, "dtype": "bf16", "optimizer_tier": "host", "clip_grad_norm": 1.0, **options}
    if settings["stage"] == 3:
        settings = {"param_tier": settings["optimizer_tier"], **settings}
    return model, zk.ZeroOptimizer(model, inner, **settings)


def states_of(optimizer: zk.ZeroOptimizer) -> list[Tensor]:
    """Masters, states and counts; closes."""
    found: list[Any] = [value.clone() for value in optimizer.consolidated_state_dict("fp32", rank0_only=False).values()]
    found += [value for state in optimizer.state_dict()["state"].values() for value in state.values()]
    found += [optimizer.norm, optimizer.skipped_steps]
    optimizer.close()
    return [torch.as_tensor(value).cpu() for value in found]


def trained(program: Stepwise, steps: int, **options: Any) -> list[Tensor]:
    """A loss, masters and states after a few steps of a program."""
    model, optimizer = halved(**options)
    for step in range(steps):
        program(model, optimizer, step)
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        loss = loss_of(model, batch(99)).cpu()
    return [loss, *states_of(optimizer)]


@functools.cache
def trained_at_stage_2(program: Stepwise, steps: int, options: frozenset[tuple[str, Any]]) -> list[Tensor]:
    return trained(program, steps, **dict(options))


def unlike(program: Stepwise, steps: int, addon: dict[str, Any], **options: Any) -> list[int]:
    """What an add-on trains otherwise than stage 2 trains without it in host memory, by number."""
    want = trained_at_stage_2(program, steps, frozenset((name, value) for name, value in options.items() if name not in PLACE))
    got = trained(program, steps, **options, **addon)
    return [number for number, (a, b) in enumerate(zip(want, got, strict=True)) if not torch.equal(a, b)]
