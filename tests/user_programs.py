"""Programs around an optimizer, as functions of a Run: the same one runs with plain torch and with zk.

tests/core/test_programs.py has what each of ``PROGRAMS`` is refused with.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, clip_grads_with_norm_, get_total_norm
from torch.utils.checkpoint import checkpoint

import zk


class Block(nn.Module):
    """Two layers and a residual, smooth everywhere."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.nn.functional.softplus(self.up(x)))


class Net(nn.Module):
    """Blocks and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList(Block() for _ in range(2)), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encode(x))

    def encode(self, x: Tensor) -> Tensor:
        """All but the head."""
        for block in self.blocks:
            x = block(x)
        return x


class Writing(nn.Module):
    """A model that writes parameters in its forward, in the way that ``how`` names."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.query, self.key, self.frozen = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.rows, self.codes = nn.Embedding(20, 8, max_norm=0.5), nn.Parameter(torch.randn(6, 8))
        self.key.requires_grad_(False)
        self.frozen.requires_grad_(False)

    @torch.no_grad()
    def write(self, x: Tensor) -> None:
        """The momentum encoder, and the codes."""
        for query, key in zip(self.query.parameters(), self.key.parameters(), strict=True):
            if self.how == "data":
                key.data = key.data * 0.9 + query.data * 0.1
            elif self.how == "data in place":
                key.data.mul_(0.9).add_(query.data, alpha=0.1)
            elif self.how == "lerp":
                key.lerp_(query, 0.1)
            else:
                key.copy_(query)
        self.codes.mul_(0.99)
        self.codes[0] = 0.5
        self.frozen.weight.add_(0.01)

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        self.write(x)
        hidden = self.query(x) + self.rows(ids).sum(1) + self.codes.mean(0)
        return (hidden - self.key(x)).square().mean() + self.frozen(hidden).mean()


class Convolving(nn.Module):
    """Convolutions in channels_last, and a weight that is a transpose."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(2, 6, 3), nn.Softplus(), nn.Conv2d(6, 4, 1)).to(memory_format=torch.channels_last)
        self.turned = nn.Parameter(torch.randn(5, 4).t())

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).mean((2, 3)) @ self.turned


@dataclasses.dataclass
class Run:
    """One run of a program: the model, its optimizer, torch's or zk's, and this rank's part of each batch."""

    model: Any
    optimizer: Any
    rank: int = 0
    world: int = 1
    step: int = 0
    seen: list[float] = dataclasses.field(default_factory=list)  # what the program looked at
    draws: int = 0
    whole: bool = False  # every rank has all of the batch
    kept: list[Tensor] = dataclasses.field(default_factory=list)  # by the program, from step to step

    def batch(self, *shape: int) -> Tensor:
        """(8 / world, *shape) numbers, a part of what one process draws."""
        self.draws += 1
        numbers = torch.randn(8, *shape, generator=torch.Generator().manual_seed(1000 * self.step + self.draws))
        return numbers if self.whole else numbers.chunk(self.world)[self.rank]

    def loss(self) -> Tensor:
        """Of a new batch."""
        return (self.model(self.batch(8)) - self.batch(4)).square().mean()

    def backward(self) -> None:
        """Of a new batch's loss."""
        self.descend(self.loss())

    def descend(self, loss: Tensor, **kwargs: Any) -> None:
        """loss.backward(), with the loss scale."""
        if isinstance(self.optimizer, zk.ZeroOptimizer):
            self.optimizer.backward(loss, **kwargs)
        else:
            loss.backward(**kwargs)

    def finish(self) -> None:
        """step() and zero_grad()."""
        self.optimizer.step()
        self.optimizer.zero_grad()

    def see(self, value: Any) -> None:
        """Note a value that must be the same."""
        self.seen.append(float(value))

    @property
    def params(self) -> list[nn.Parameter]:
        return list(self.model.parameters())


@dataclasses.dataclass(frozen=True)
class Case:
    """Configuration of zk, for one run."""

    stage: int
    world: int = 1
    tier: str = "device"
    overlap_step: bool = False
    loss_scale: float | None = None
    sgd: bool = False  # with momentum; else AdamW, which hides what is off by a factor
    dtype: str = "fp32"


@dataclasses.dataclass(frozen=True)
class Program:
    """A program, and what it needs."""

    run: Callable[[Run], None]
    model: Callable[[], nn.Module]
    tolerance: float  # of parameters, absolutely
    whole: bool  # as of Run


PROGRAMS: dict[str, Program] = {}


def program(
    model: Callable[[], nn.Module] = Net, tolerance: float = 2e-5, whole: bool = False
) -> Callable[[Callable[[Run], None]], Callable[[Run], None]]:
    """Add a program. ``whole``: what it computes of a batch is not the mean over parts of it."""

    def add(run: Callable[[Run], None]) -> Callable[[Run], None]:
        PROGRAMS[run.__name__] = Program(run, model, tolerance, whole)
        return run

    return add


# ---- gradients between backward and step ---------------------------------------------------------------------------------------


@program()
def scale_in_place(run: Run) -> None:
    run.backward()
    for param in run.params:
        if param.grad is not None:
            param.grad.mul_(0.5)
    run.finish()


@program()
def scale_through_data(run: Run) -> None:
    run.backward()
    for param in run.params:
        param.grad.data.clamp_(-1e-2, 1e-2)
    run.finish()


@program()
def replace(run: Run) -> None:
    run.backward()
    for param in run.params:
        param.grad = torch.sign(param.grad) * 0.1
    run.finish()


@program()
def set_one_to_none(run: Run) -> None:
    run.backward()
    if run.step % 2:
        run.model.head.weight.grad = None
    run.finish()


@program()
def set_all_to_none(run: Run) -> None:
    run.backward()
    for param in run.params:
        param.grad = None
    run.backward()
    run.optimizer.step()
    for param in run.params:
        param.grad = None


@program()
def delete(run: Run) -> None:
    run.backward()
    del run.model.head.bias.grad
    run.finish()


@program()
def add_noise(run: Run) -> None:
    run.backward()
    for number, param in enumerate(run.params):
        param.grad += 0.01 * torch.randn(param.shape, generator=torch.Generator().manual_seed(number + run.step))
    run.finish()


@program()
def list_unused_parameters(run: Run) -> None:
    run.descend(run.model.encode(run.batch(8)).square().mean())
    for param in run.params:
        run.see(param.grad is None)
    run.finish()


@program()
def clip_each_layer(run: Run) -> None:
    run.backward()
    for layer in (*run.model.blocks, run.model.head):
        run.see(clip_grad_norm_(layer.parameters(), 1e-2))
    run.finish()


@program()
def clip_by_value(run: Run) -> None:
    run.backward()
    clip_grad_value_(run.model.parameters(), 1e-2)
    run.finish()


@program()
def clip_by_another_norm(run: Run) -> None:
    run.backward()
    run.see(clip_grad_norm_(run.model.parameters(), 1e-2, norm_type=float("inf")))
    run.finish()


@program()
def clip_in_two_halves(run: Run) -> None:
    run.backward()
    norm = get_total_norm([param.grad for param in run.params if param.grad is not None])
    clip_grads_with_norm_(run.model.parameters(), 1e-2, norm)
    run.see(norm)
    run.finish()


@program()
def clip_and_look(run: Run) -> None:
    run.backward()
    run.see(clip_grad_norm_(run.model.parameters(), 1e-2))
    for param in run.params:
        run.see(param.grad.norm())
    run.model.head.weight.grad.mul_(2)
    run.finish()


@program()
def look_while_accumulating(run: Run) -> None:
    for _ in range(2):
        run.backward()
        for param in run.params:
            run.see(param.grad.sum())
    for param in run.params:
        param.grad.clamp_(-1e-2, 1e-2)
    run.backward()
    run.finish()


@program()
def look_after_the_step(run: Run) -> None:
    run.backward()
    clip_grad_norm_(run.model.parameters(), 1e-2)
    run.optimizer.step()
    for param in run.params:
        run.see(param.grad.norm())
    run.optimizer.zero_grad()


@program()
def keep_and_combine(run: Run) -> None:
    kept = []
    for _ in range(2):
        run.backward()
        kept.append([param.grad for param in run.params])
        run.optimizer.zero_grad()
    for param, first, second in zip(run.params, *kept, strict=True):
        param.grad = first - 0.3 * second
    run.finish()


def _halve(param: nn.Parameter) -> None:
    param.grad.mul_(0.5)


@program()
def hooks_of_a_parameter(run: Run) -> None:
    if run.step == 0:
        for param in run.params:
            param.register_post_accumulate_grad_hook(_halve)
    run.backward()
    run.backward()
    run.finish()


@program()
def hooks_of_a_gradient(run: Run) -> None:
    handles = [param.register_hook(lambda grad: grad * 0.5) for param in run.params]
    run.backward()
    for handle in handles:
        handle.remove()
    run.finish()


@program()
def hooks_of_a_module(run: Run) -> None:
    if run.step == 0:
        run.model.head.register_full_backward_hook(lambda module, *_: run.see(module.weight.grad is not None))
    run.backward()
    run.finish()


@program()
def sharpness_aware(run: Run) -> None:
    run.backward()
    with zk.gather(run.params, write=True), torch.no_grad():
        before = [param.detach().clone() for param in run.params]
        for param in run.params:
            param.add_(param.grad, alpha=0.1)
    run.optimizer.zero_grad()
    run.backward()
    with zk.gather(run.params, write=True), torch.no_grad():
        for param, values in zip(run.params, before, strict=True):
            param.copy_(values)
    run.finish()


@program()
def sharpness_aware_through_data(run: Run) -> None:
    run.backward()
    with zk.gather(run.params, write=True):
        before = [param.data.clone() for param in run.params]
        for param in run.params:
            param.data = param.data + 0.1 * param.grad
    run.optimizer.zero_grad()
    run.backward()
    with zk.gather(run.params, write=True):
        for param, values in zip(run.params, before, strict=True):
            param.data = values
    run.finish()


@program()
def a_gradient_of_another_shape(run: Run) -> None:
    run.backward()
    if isinstance(run.optimizer, zk.ZeroOptimizer):  # (torch's own error is not of this program)
        run.model.head.weight.grad = torch.zeros(3)
    run.finish()


@program()
def clip_each_micro_batch(run: Run) -> None:
    for _ in range(2):
        run.backward()
        run.see(clip_grad_norm_(run.model.parameters(), 0.1))
    run.backward()
    run.finish()


@program()
def clip_and_drop(run: Run) -> None:
    run.backward()
    clip_grad_norm_(run.model.parameters(), 0.1)
    run.model.head.bias.grad = None
    run.finish()


@program()
def clip_and_assign(run: Run) -> None:
    run.descend(run.model.encode(run.batch(8)).square().mean())
    clip_grad_norm_(run.model.parameters(), 0.1)
    run.model.head.bias.grad = torch.ones_like(run.model.head.bias, requires_grad=False)
    run.finish()


@program()
def look_at_what_is_partly_used(run: Run) -> None:
    x = run.batch(8)
    y = run.model.encode(x)
    run.descend((run.model.head(y) if run.step % 2 or run.rank == 0 else y).square().mean() if run.world > 1 else _both(run, x, y))
    for param in run.params:
        if param.grad is not None:
            param.grad.mul_(0.5)
    run.finish()


def _both(run: Run, x: Tensor, y: Tensor) -> Tensor:
    """Mean of the losses of two ranks, of which the second leaves the head out every second step."""
    first, second = y.chunk(2)
    return (run.model.head(first).square().mean() + (run.model.head(second) if run.step % 2 else second).square().mean()) / 2


@program()
def assign_what_was_asked_for(run: Run) -> None:
    for param, grad in zip(run.params, torch.autograd.grad(run.loss(), run.params), strict=True):
        param.grad = grad
    run.finish()


@program()
def hook_after_a_look(run: Run) -> None:
    if not isinstance(run.optimizer, zk.ZeroOptimizer):
        return
    run.backward()
    run.see(run.model.head.weight.grad.norm())
    run.model.head.weight.register_post_accumulate_grad_hook(_halve)
    run.backward()


@program()
def look_within_forward(run: Run) -> None:
    if run.step == 0:
        run.model.register_forward_pre_hook(lambda model, _: model.head.zero_grad())
    run.backward()
    run.backward()
    run.finish()


@program()
def look_in_inference_mode(run: Run) -> None:
    run.backward()
    with torch.inference_mode():
        run.see(run.model.head.weight.grad.norm())
    run.backward()
    run.model.head.weight.grad.mul_(0.5)
    run.finish()


# ---- zero_grad -----------------------------------------------------------------------------------------------------------------


@program()
def zero_every_second_step(run: Run) -> None:
    run.backward()
    run.optimizer.step()
    if run.step % 2:
        run.optimizer.zero_grad()


@program()
def never_zero(run: Run) -> None:
    run.backward()
    clip_grad_norm_(run.model.parameters(), 0.05)
    run.optimizer.step()


@program()
def zeros_instead_of_none(run: Run) -> None:
    run.optimizer.zero_grad(set_to_none=False)
    if run.step != 2:
        run.backward()
    run.optimizer.step()


@program()
def zero_the_users_optimizer(run: Run) -> None:
    users = getattr(run.optimizer, "inner", run.optimizer)
    run.backward()
    users.zero_grad()
    run.backward()
    run.optimizer.step()
    users.zero_grad()


@program()
def zero_a_part(run: Run) -> None:
    run.backward()
    run.model.blocks[0].zero_grad()
    run.finish()


@program()
def step_twice(run: Run) -> None:
    run.backward()
    run.optimizer.step()
    run.finish()


# ---- graphs --------------------------------------------------------------------------------------------------------------------


@program()
def penalize_the_gradient_of_inputs(run: Run) -> None:
    x = run.batch(8).requires_grad_()
    (grad,) = torch.autograd.grad(run.model(x).sum(), x, create_graph=True)
    run.descend((grad.norm(dim=1) - 1).square().mean())
    run.finish()


@program(whole=True)
def penalize_the_gradient_of_parameters(run: Run) -> None:
    grads = torch.autograd.grad(run.loss(), run.params, create_graph=True)
    run.descend(torch.stack([grad.square().sum() for grad in grads]).sum())
    run.finish()


@program(whole=True)
def backward_with_create_graph(run: Run) -> None:
    run.descend(run.loss(), create_graph=True)
    run.descend(torch.stack([param.grad.square().sum() for param in run.params]).sum())
    run.finish()


@program(whole=True)
def hessian_vector_product(run: Run) -> None:
    grads = torch.autograd.grad(run.loss(), run.params, create_graph=True)
    product = torch.autograd.grad(torch.stack([grad.sum() for grad in grads]).sum(), run.params, allow_unused=True)
    for param, grad in zip(run.params, product, strict=True):
        param.grad = grad
    run.finish()


@program()
def penalize_through_a_checkpoint(run: Run) -> None:
    x = run.batch(8).requires_grad_()
    y = run.model.head(checkpoint(run.model.blocks[0], x, use_reentrant=False))
    (grad,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    run.descend(grad.square().sum(1).mean())
    run.finish()


@program()
def checkpoint_the_whole_model(run: Run) -> None:
    x = run.batch(8).requires_grad_()
    run.descend(checkpoint(run.model, x, use_reentrant=False).square().mean())
    run.finish()


@program()
def backward_twice_through_one_graph(run: Run) -> None:
    loss = run.loss()
    run.descend(loss, retain_graph=True)
    run.descend(loss)
    run.finish()


@program()
def two_losses_of_one_output(run: Run) -> None:
    y = run.model(run.batch(8))
    run.descend(y.mean(), retain_graph=True)
    run.descend(y.square().mean())
    run.finish()


@program()
def map_over_examples(run: Run) -> None:
    run.descend(torch.func.vmap(run.model)(run.batch(8)).square().mean())
    run.finish()


@program(whole=True)
def functional_gradient(run: Run) -> None:
    x, params = run.batch(8), dict(run.model.named_parameters())
    grads = torch.func.grad(lambda params: torch.func.functional_call(run.model, params, (x,)).square().mean())(params)
    for name, param in params.items():
        param.grad = grads[name]
    run.finish()


# ---- the optimizer's state -----------------------------------------------------------------------------------------------------


@program()
def read_state(run: Run) -> None:
    run.backward()
    run.finish()
    state = run.optimizer.state
    run.see(len(state))
    run.see(state[run.model.head.weight]["exp_avg"].norm())
    run.see(state[run.model.head.weight]["step"])
    run.see(sum(value.numel() for values in state.values() for value in values.values()))


@program(tolerance=1e-3)
def write_state(run: Run) -> None:
    run.backward()
    run.finish()
    run.optimizer.state[run.model.head.weight]["exp_avg"].mul_(0.5)
    for param in run.params:
        run.optimizer.state[param]["exp_avg_sq"] = run.optimizer.state[param]["exp_avg_sq"] * 0.9


@program()
def restart_steps_in_state(run: Run) -> None:
    run.backward()
    run.finish()
    for state in run.optimizer.state.values():
        state["step"].zero_()


@program()
def forget_state(run: Run) -> None:
    run.backward()
    run.finish()
    if run.step == 1:
        run.optimizer.state.clear()
    if run.step == 2:
        run.optimizer.state.pop(run.model.head.weight)
    run.see(len(run.optimizer.state))


@program()
def assign_state(run: Run) -> None:
    run.backward()
    run.finish()
    param = run.model.head.bias
    run.optimizer.state[param] = {"step": torch.tensor(3.0), "exp_avg": torch.ones(4), "exp_avg_sq": torch.ones(4)}


@program()
def move_state(run: Run) -> None:
    run.backward()
    run.finish()
    for state in run.optimizer.state.values():
        for name, value in state.items():
            state[name] = value.to(run.params[0].device)


@program()
def state_of_the_users_optimizer(run: Run) -> None:
    run.backward()
    run.finish()
    users = getattr(run.optimizer, "inner", run.optimizer)
    state = copy.deepcopy(users.state_dict())
    run.see(state["state"][0]["exp_avg"].norm())
    if run.step == 1:
        state["state"][0]["exp_avg"] *= 2
        users.load_state_dict(state)


@program()
def state_of_another_name(run: Run) -> None:
    run.backward()
    run.finish()
    run.optimizer.state[run.model.head.weight]["mine"] = torch.zeros(4, 8)


@program()
def state_with_another_name(run: Run) -> None:
    run.backward()
    run.finish()
    weight = run.model.head.weight
    run.optimizer.state[weight] = {**run.optimizer.state[weight], "mine": torch.zeros(4, 8)}


@program()
def state_by_name(run: Run) -> None:
    run.optimizer.state["mine"] = {"seen": 1}


@program()
def copy_the_optimizer(run: Run) -> None:
    copy.deepcopy(run.optimizer)
    run.backward()
    run.finish()


# ---- parameters ----------------------------------------------------------------------------------------------------------------


def _write(run: Run) -> None:
    run.descend(run.model(run.batch(8), (run.batch(3).abs() * 7).long().clamp(max=19)))
    run.finish()


@program(model=lambda: Writing("data"), whole=True)
def set_data_in_forward(run: Run) -> None:
    _write(run)


@program(model=lambda: Writing("data in place"), whole=True)
def change_data_in_forward(run: Run) -> None:
    _write(run)


@program(model=lambda: Writing("lerp"), whole=True)
def interpolate_in_forward(run: Run) -> None:
    _write(run)


@program(model=lambda: Writing("copy"), whole=True)
def copy_in_forward(run: Run) -> None:
    _write(run)


@program()
def read_between_steps(run: Run) -> None:
    run.see(run.model.head.weight.sum())
    run.backward()
    run.finish()


@program()
def read_gathered(run: Run) -> None:
    with zk.gather(run.params):
        run.see(run.model.head.weight.sum())
    run.backward()
    run.finish()


@program()
def write_what_is_gathered_to_be_read(run: Run) -> None:
    with zk.gather(run.params), torch.no_grad():
        run.model.head.bias.zero_()
    run.backward()
    run.finish()


@program()
def assign_data(run: Run) -> None:
    run.model.head.weight.data = run.model.head.weight.data * 0.9
    run.backward()
    run.finish()


@program()
def clamp_data(run: Run) -> None:
    run.backward()
    run.finish()
    for param in run.params:
        param.data.clamp_(-0.1, 0.1)


@program()
def prune_data(run: Run) -> None:
    run.backward()
    run.finish()
    for param in run.params:
        param.data.view(-1)[::3] = 0


@program()
def change_data_taken_before(run: Run) -> None:
    if run.step == 0:
        run.kept = [param.data.detach() if number % 2 else param.data.view(-1) for number, param in enumerate(run.params)]
    for data in run.kept:
        data.clamp_(-0.1, 0.1)
    run.backward()
    run.finish()


@program()
def look_at_data(run: Run) -> None:
    run.see(sum(param.data.abs().sum() for param in run.params))
    run.backward()
    run.finish()


@program()
def clamp_in_place(run: Run) -> None:
    run.backward()
    run.finish()
    with torch.no_grad():
        for param in run.params:
            param.clamp_(-0.1, 0.1)


@program(model=lambda: nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4)))
def turn_data(run: Run) -> None:
    run.model[0].weight.data = run.model[0].weight.data.t()
    run.backward()
    run.finish()


@program()
def write_data_of_what_is_gathered_to_be_read(run: Run) -> None:
    with zk.gather(run.params):
        run.model.head.weight.data.mul_(0.5)
    run.backward()
    run.finish()


@program()
def penalize_what_is_gathered(run: Run) -> None:
    weight = run.model.blocks[0].up.weight
    with zk.gather(run.params):
        penalty = (weight @ weight.T - torch.eye(16)).square().mean() + sum(param.square().sum() for param in run.params)
    run.descend(run.loss() + penalty)
    run.finish()


def _norm(weight: Tensor) -> Tensor:
    return weight.square().sum()


@program()
def transform_what_is_gathered(run: Run) -> None:
    with torch.no_grad(), zk.gather(run.params):
        run.see(torch.func.grad(_norm)(run.model.head.weight).sum())
    run.backward()
    run.finish()


@program()
def transform_what_is_gathered_with_a_graph(run: Run) -> None:
    with zk.gather(run.params):
        run.see(torch.func.grad(_norm)(run.model.head.weight).sum())
    run.backward()
    run.finish()


@program()
def resize_what_is_gathered(run: Run) -> None:
    run.backward()
    with zk.gather(run.params, write=True):
        run.model.head.bias.data = torch.zeros(7)
    run.finish()


@program()
def copy_the_model(run: Run) -> None:
    run.backward()
    with zk.gather(run.params):
        twin = copy.deepcopy(run.model)
    run.see(twin.head.weight.sum())
    run.see(type(twin.head.weight) is nn.Parameter and twin.head.weight.grad is None)
    run.finish()


@program()
def parts_one_by_one(run: Run) -> None:
    run.descend((run.model.head(run.model.encode(run.batch(8))) - run.batch(4)).square().mean())
    run.finish()


@program(model=Convolving)
def channels_last(run: Run) -> None:
    images = run.batch(2, 6, 6).to(memory_format=torch.channels_last)
    run.descend((run.model(images) - run.batch(5)).square().mean())
    for param in run.params:
        run.see(param.is_contiguous(memory_format=torch.channels_last) if param.ndim == 4 else param.is_contiguous())
        run.see(param.grad.stride() == param.stride())
    run.finish()


@program(model=Convolving)
def channels_last_after_the_wrap(run: Run) -> None:
    run.model.to(memory_format=torch.contiguous_format)
    run.descend((run.model(run.batch(2, 6, 6)) - run.batch(5)).square().mean())
    run.finish()
