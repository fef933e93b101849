"""What tests of add-ons have in common: programs of users, and runs that are compared."""

import contextlib
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import zk
from tests.models import DEVICE, GPT, batch, loss_of
from tests.parity import Stepwise
from tests.world import run_world


def faults_of_ranks(world: int, function: Callable[[Any], Any], cases: Sequence[Any], timeout: float = 120.0) -> dict[str, list[Any]]:
    """What ranks say of the cases of which any rank says something."""
    table = run_world(world, function, cases, timeout)
    return {str(case): rows for case, rows in zip(cases, table, strict=True) if any(rows)}


def same(one: Sequence[Tensor], other: Sequence[Tensor]) -> bool:
    """Tensors of two runs are equal to the bit."""
    return len(one) == len(other) and all(map(torch.equal, one, other))


def told(value: Any) -> str:
    """An id that is the same in every process."""
    if isinstance(value, dict):
        return "-".join(f"{name}={told(one)}" for name, one in value.items()) or "plain"
    return getattr(value, "__name__", str(value))


HOW = {"waits": True}
FOLDER: list[Path] = []  # for checkpoints


def begun(optimizer: zk.ZeroOptimizer) -> None:
    """Wait for updates that have begun in backward: a busy machine may not have come to them."""
    for attempt in (attempt for one in optimizer._seams.addons for attempt in getattr(one, "attempts", {}).values()):
        attempt[-1].exception()


def backward(model: GPT, optimizer: zk.ZeroOptimizer, step: int, factor: float = 0.01, by: float = 0.0) -> None:
    """Of ``factor`` times the loss, plus ``by`` times the sum of the last parameters that backward reaches. What has begun is done then."""
    loss = loss_of(model, batch(step)) * factor
    if by:
        with zk.gather(model.tokens.weight) if optimizer.config.stage == 3 else contextlib.nullcontext():
            loss = loss + by * model.tokens.weight.float().sum()
    optimizer.backward(loss)
    if HOW["waits"]:
        begun(optimizer)


def gradients(what: str, model: GPT, optimizer: zk.ZeroOptimizer, step: int) -> None:
    is_fourth = step == 3
    if what == "decay":
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 / (1 + step)
            group.update({"momentum_decay": 0.1 * (1 + step)} if "momentum_decay" in group else {})  # NAdam's product depends on those before
    last = {"infinite": float("inf"), "late": 10.0}.get(what, 0.0) if is_fourth else 0.0
    is_large = what == "always" or (is_fourth and what in ("early", "decay"))
    backward(model, optimizer, step, 100.0 if is_large else 0.01, last)


def between(what: str, model: GPT, optimizer: zk.ZeroOptimizer, step: int) -> None:
    is_fourth, weight = step == 3, model.head.weight
    before = seen(model, optimizer) if what == "look" else None
    backward(model, optimizer, step)
    match what:
        case "change rate":
            optimizer.param_groups[step % 2]["lr"] = 1e-2 / (1 + step)
        case "read gradients":
            assert all(param.grad is not None and param.grad.float().isfinite().all() for param in model.parameters())
        case "scale gradients" if is_fourth:
            weight.grad.mul_(0.5)
        case "write gradients":  # values in another order, whose sum of squares is the same
            with zk.gather(model.blocks[0].up.weight, kind="grad", write=True) as grads:
                grads[0].copy_(grads[0].flip(0))
        case "assign gradients":
            weight.grad = torch.full(weight.shape, 1e-3, dtype=torch.bfloat16, device=DEVICE)
            model.norm.bias.grad = None
        case "add gradients":
            for micro in range(step // 2):
                backward(model, optimizer, 10 * step + micro)
        case "begin anew":
            optimizer.zero_grad()
            backward(model, optimizer, step + 100)
        case "never step":  # what has begun for gradients that are dropped leaves nothing
            for param in model.parameters():
                param.grad = None
            backward(model, optimizer, step + 50)
        case "write parameters":
            with torch.no_grad(), zk.gather(weight, write=True):
                weight.clamp_(-0.05, 0.05)
        case "change states" if is_fourth:
            with zk.gather(weight, kind="exp_avg", write=True) as averages:
                averages[0].zero_()
        case "load states" if is_fourth:
            optimizer.load_state_dict(optimizer.state_dict())
            backward(model, optimizer, step)
        case "look":  # between backward and step() states and parameters are what they were
            with torch.no_grad():
                loss_of(model, batch(step))
            assert same(seen(model, optimizer), before)
        case "clip by torch":
            nn.utils.clip_grad_norm_(model.parameters(), 0.001 if is_fourth else 10.0)
        case "clip first":
            optimizer.clip_grad_norm_(0.001 if is_fourth else 10.0)
        case "save":  # a checkpoint has the states before, also one that is written behind; and it is loaded between them
            folder = FOLDER[0] / "-".join(["of", *map(str, optimizer.config.options.values())])
            if step in (1, 2):
                optimizer.save_checkpoint(folder, async_save=step == 2)
            if step == 4:
                optimizer.load_checkpoint(folder)
                backward(model, optimizer, step)
                with optimizer.parked(FOLDER[0].parent):
                    pass


def seen(model: GPT, optimizer: zk.ZeroOptimizer) -> list[Tensor]:
    with zk.gather(model.parameters()):
        params = [param.detach().clone() for param in model.parameters()]
    return params + [value for state in optimizer.state_dict()["state"].values() for value in state.values()]


BETWEEN = (
    *("change rate", "read gradients", "scale gradients", "write gradients", "assign gradients", "add gradients", "begin anew"),
    *("write parameters", "change states", "load states", "look", "clip by torch", "clip first", "never step", "save"),
)
PROGRAMS: dict[str, Stepwise] = {name: partial(gradients, name) for name in ("plain", "early", "infinite", "late", "always", "decay")}
PROGRAMS |= {name: partial(between, name) for name in BETWEEN}
