"""Programs around an optimizer: each one runs with plain torch and with zk, and is right, refused by name, or listed as silently other.

``PROGRAMS`` has all of them by name, ``Program.kind(stage)`` is 'right', 'refused' or 'listed'; docs/guides/programs.md has the same table.
"""

# ruff: noqa: F401  (programs find what is imported)
import copy
import dataclasses
import functools
import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, clip_grads_with_norm_, get_total_norm
from torch.utils.checkpoint import checkpoint

import zk


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.nn.functional.softplus(self.up(x)))  # smooth everywhere


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList(Block() for _ in range(2)), nn.Linear(8, 4)

    def encode(self, x: Tensor) -> Tensor:
        return self.blocks[1](self.blocks[0](x))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encode(x))


WRITES: dict[str, Callable[[Any, Any], Any]] = {
    "set_data_in_forward": lambda query, key: setattr(key, "data", key.data * 0.9 + query.data * 0.1),
    "change_data_in_forward": lambda query, key: key.data.mul_(0.9).add_(query.data, alpha=0.1),
    "interpolate_in_forward": lambda query, key: key.lerp_(query, 0.1),
    "copy_in_forward": lambda query, key: key.copy_(query),
}


class Writing(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.query, self.key, self.frozen = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.rows, self.codes = nn.Embedding(20, 8, max_norm=0.5), nn.Parameter(torch.randn(6, 8))
        self.key.requires_grad_(False)
        self.frozen.requires_grad_(False)

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        with torch.no_grad():  # the momentum encoder, and the codes
            for query, key in zip(self.query.parameters(), self.key.parameters(), strict=True):
                WRITES[self.how](query, key)
            self.codes.mul_(0.99)
            self.codes[0] = 0.5
            self.frozen.weight.add_(0.01)
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
    whole: bool = False  # every rank has all of the batch
    kept: list[Tensor] = dataclasses.field(default_factory=list)  # by the program, from step to step
    step: int = 0
    seen: list[float] = dataclasses.field(default_factory=list)  # what the program looked at
    draws: int = 0

    def batch(self, *shape: int) -> Tensor:
        """(8 / world, *shape) numbers, a part of what one process draws."""
        self.draws += 1
        numbers = torch.randn(8, *shape, generator=torch.Generator().manual_seed(1000 * self.step + self.draws))
        return numbers if self.whole else numbers.chunk(self.world)[self.rank]

    def ids(self) -> Tensor:
        return (self.batch(3).abs() * 7).long().clamp(max=19)

    def loss(self) -> Tensor:
        return (self.model(self.batch(8)) - self.batch(4)).square().mean()

    def backward(self) -> None:
        self.descend(self.loss())

    def descend(self, loss: Tensor, **kwargs: Any) -> None:
        backward = self.optimizer.backward if isinstance(self.optimizer, zk.ZeroOptimizer) else Tensor.backward
        backward(loss, **kwargs)

    def finish(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def see(self, value: Any) -> None:
        self.seen.append(float(value))


def halve(param: nn.Parameter) -> None:
    param.grad.mul_(0.5)


def both(run: Run, x: Tensor) -> Tensor:
    """Mean of the losses of two ranks, of which the second leaves the head out every second step."""
    first, second = run.model.encode(x).chunk(2)
    return (run.model.head(first).square().mean() + (run.model.head(second) if run.step % 2 else second).square().mean()) / 2


# sentences of refusals, or what is other than in torch and documented
SAYS = {
    "IN_PLACE": "has left param.grad, and .* in place would be lost",
    "GONE": "is gone, as step\\(\\) has used it",
    "ALONE": "sees its new gradient alone",
    "ELSEWHERE": "states of a ZeroOptimizer rest on its tiers",
    "RELEASED": "lost: change it within|more than one element of the written-to tensor",  # (the second is torch's)
    "NAN": "WRONG: saw \\[nan",
    "OTHER": "WRONG",  # silently
    "STALE": "WRONG|lost: change it within",
    "LOST": "WRONG|right",  # .data: right where nothing is copied
}

# "# name | what is said | what is said at stage 3, if other", and what each step does between the two lines that its section names
SOURCE = """
== run.backward() == run.finish()
# scale_in_place
for param in params:
    if param.grad is not None: param.grad.mul_(0.5)
# scale_through_data | IN_PLACE
for param in params: param.grad.data.clamp_(-1e-2, 1e-2)
# replace
for param in params: param.grad = torch.sign(param.grad) * 0.1
# set_one_to_none
if run.step % 2: head.weight.grad = None
# set_all_to_none
for param in params: param.grad = None
run.backward(); run.optimizer.step()
for param in params: param.grad = None
run.backward()
# delete
del head.bias.grad
# add_noise | IN_PLACE
for number, param in enumerate(params):
    param.grad += 0.01 * torch.randn(param.shape, generator=torch.Generator().manual_seed(number + run.step))
# clip_each_layer
for layer in (*run.model.blocks, head): run.see(clip_grad_norm_(layer.parameters(), 1e-2))
# clip_by_value | IN_PLACE
clip_grad_value_(params, 1e-2)
# clip_by_another_norm
run.see(clip_grad_norm_(params, 1e-2, norm_type=float("inf")))
# clip_in_two_halves
norm = get_total_norm([param.grad for param in params if param.grad is not None])
clip_grads_with_norm_(params, 1e-2, norm); run.see(norm)
# clip_by_hand_over_ranks
total = torch.stack([param.grad.square().sum() for param in params]).sum()
if run.world > 1: dist.all_reduce(total)
run.see(norm := (total / run.world).sqrt())
for param in params: param.grad.mul_(0.05 / norm)
# clip_and_look
run.see(clip_grad_norm_(params, 1e-2))
for param in params: run.see(param.grad.norm())
head.weight.grad.mul_(2)
# look_while_accumulating | IN_PLACE
run.backward()
for param in params: run.see(param.grad.sum())
for param in params: param.grad.clamp_(-1e-2, 1e-2)
run.backward()
# look_after_the_step | GONE
clip_grad_norm_(params, 1e-2); run.optimizer.step()
for param in params: run.see(param.grad.norm())
run.optimizer.zero_grad(); run.backward()
# keep_and_combine | GONE
first = [param.grad for param in params]; run.optimizer.zero_grad(); run.backward()
for param, grad in zip(params, first, strict=True): param.grad = grad - 0.3 * param.grad
# sharpness_aware
with zk.gather(params, write=True), torch.no_grad():
    before = [param.detach().clone() for param in params]
    for param in params: param.add_(param.grad, alpha=0.1)
run.optimizer.zero_grad(); run.backward()
with zk.gather(params, write=True), torch.no_grad():
    for param, values in zip(params, before, strict=True): param.copy_(values)
# sharpness_aware_through_data
with zk.gather(params, write=True):
    before = [param.data.clone() for param in params]
    for param in params: param.data = param.data + 0.1 * param.grad
run.optimizer.zero_grad(); run.backward()
with zk.gather(params, write=True):
    for param, values in zip(params, before, strict=True): param.data = values
# a_gradient_of_another_shape | attempting to assign a gradient of size
head.weight.grad = torch.zeros(3) if is_zk else head.weight.grad
# clip_each_micro_batch
run.see(clip_grad_norm_(params, 0.1)); run.backward()
run.see(clip_grad_norm_(params, 0.1)); run.backward()
# clip_and_drop
clip_grad_norm_(params, 0.1); head.bias.grad = None
# hook_after_a_look | ALONE
run.see(head.weight.grad.norm())
if is_zk: head.weight.register_post_accumulate_grad_hook(halve); run.backward()
# look_in_inference_mode
with torch.inference_mode(): run.see(head.weight.grad.norm())
run.backward(); head.weight.grad.mul_(0.5)
# step_twice | GONE
run.optimizer.step()
# zero_the_users_optimizer
users.zero_grad(); run.backward()
# zero_a_part
run.model.blocks[0].zero_grad(set_to_none=run.step == 1)
# fail_and_drop
handle = run.model.blocks[1].up.register_forward_hook(lambda module, given, output: output.register_hook(lambda grad: 1 / 0) and None)
fails = run.loss()
try: run.descend(fails)
except ZeroDivisionError: handle.remove()
run.model.zero_grad(); run.backward()
# add_within_backward | IN_PLACE
run.model.blocks[0].register_full_backward_hook(lambda *_: head.weight.grad.add_(0.1)); run.backward()
# descend_while_frozen
run.optimizer.step()
run.descend(run.model.requires_grad_(False)(x := run.batch(8).requires_grad_()).square().sum())
run.model.requires_grad_(True); run.see(x.grad is not None)
run.optimizer.zero_grad(); run.backward()
# copy_the_model
with zk.gather(params): twin = copy.deepcopy(run.model)
run.see(twin.head.weight.sum()); run.see(type(twin.head.weight) is nn.Parameter and twin.head.weight.grad is None)
# resize_what_is_gathered | was moved or converted
with zk.gather(params, write=True): head.bias.data = torch.zeros(7)
== pass == run.optimizer.step()
# zero_every_second_step | GONE
if run.step % 2 == 0: run.optimizer.zero_grad(); run.backward()
# never_zero | GONE
run.backward(); clip_grad_norm_(params, 0.05)
# zeros_instead_of_none
run.optimizer.zero_grad(set_to_none=False)
if run.step != 2: run.backward()
== pass == run.finish()
# list_unused_parameters
if run.step == 1: run.model.blocks[1].down.register_forward_pre_hook(lambda _, given: (given[0].detach(),))  # half of a block
run.descend(run.model.encode(run.batch(8)).square().mean())
for param in params: run.see(param.grad is None)
# hooks_of_a_parameter | ALONE
if run.step == 0:
    for param in params: param.register_post_accumulate_grad_hook(halve)
run.backward(); run.backward()
# hooks_of_a_gradient
handles = [param.register_hook(lambda grad: grad * 0.5) for param in params]
run.backward()
for handle in handles: handle.remove()
# hooks_of_a_module
if run.step == 0: head.register_full_backward_hook(lambda module, *_: run.see(module.weight.grad is not None))
run.backward()
# look_within_forward
if run.step == 0: run.model.register_forward_pre_hook(lambda model, _: model.head.zero_grad())
run.backward(); run.backward()
# penalize_within_forward
def penalize(_, given):
  with zk.gather(params): return (given[0] + 1e-2 * sum(param.abs().sum() for param in params),)
if run.step == 0: run.model.head.register_forward_pre_hook(penalize)
run.backward()
# clip_and_assign
run.descend(run.model.encode(run.batch(8)).square().mean())
clip_grad_norm_(params, 0.1)
head.bias.grad = torch.ones_like(head.bias, requires_grad=False)
# look_at_what_is_partly_used
x = run.batch(8)
y = run.model.encode(x) if run.world > 1 else x
run.descend((head(y) if run.step % 2 or run.rank == 0 else y).square().mean() if run.world > 1 else both(run, x))
for param in params:
    if param.grad is not None: param.grad.mul_(0.5)
# assign_what_was_asked_for
for param, grad in zip(params, torch.autograd.grad(run.loss(), params), strict=True): param.grad = grad
# penalize_the_gradient_of_inputs
x = run.batch(8).requires_grad_()
(grad,) = torch.autograd.grad(run.model(x).sum(), x, create_graph=True)
run.descend((grad.norm(dim=1) - 1).square().mean())
# penalize_the_gradient_of_parameters
grads = torch.autograd.grad(run.loss(), params, create_graph=True)
run.descend(torch.stack([grad.square().sum() for grad in grads]).sum())
# backward_with_create_graph | | create_graph=True
run.descend(run.loss(), create_graph=True)
run.descend(torch.stack([param.grad.square().sum() for param in params]).sum())
# hessian_vector_product
grads = torch.autograd.grad(run.loss(), params, create_graph=True)
product = torch.autograd.grad(torch.stack([grad.sum() for grad in grads]).sum(), params, allow_unused=True)
for param, grad in zip(params, product, strict=True): param.grad = grad
# penalize_through_a_checkpoint
x = run.batch(8).requires_grad_(); y = head(checkpoint(run.model.blocks[0], x, use_reentrant=False))
(grad,) = torch.autograd.grad(y.sum(), x, create_graph=True)
run.descend(grad.square().sum(1).mean())
# checkpoint_the_whole_model
run.descend(checkpoint(run.model, run.batch(8).requires_grad_(), use_reentrant=False).square().mean())
# backward_twice_through_one_graph
run.descend(loss := run.loss(), retain_graph=True); run.descend(loss)
# two_losses_of_one_output
y = run.model(run.batch(8))
run.descend(y.mean(), retain_graph=True); run.descend(y.square().mean())
# map_over_examples
run.descend(torch.func.vmap(run.model)(run.batch(8)).square().mean())
# functional_gradient | | torch.func.grad, jvp and hessian at stage 3
x, named = run.batch(8), dict(run.model.named_parameters())
grads = torch.func.grad(lambda values: torch.func.functional_call(run.model, values, (x,)).square().mean())(named)
for name, param in named.items(): param.grad = grads[name]
# penalize_what_is_gathered
weight = run.model.blocks[0].up.weight
with zk.gather(params):
    penalty = (weight @ weight.T - torch.eye(16)).square().mean() + sum(param.square().sum() for param in params)
run.descend(run.loss() + penalty)
# parts_one_by_one
run.descend((head(run.model.encode(run.batch(8))) - run.batch(4)).square().mean())
# channels_last | | WRONG: saw \\[0.0, 0.0
images = run.batch(2, 6, 6).to(memory_format=torch.channels_last)
run.descend((run.model(images) - run.batch(5)).square().mean())
for param in params:
    run.see(param.is_contiguous(memory_format=torch.channels_last) if param.ndim == 4 else param.is_contiguous())
    run.see(param.grad.stride() == param.stride())
# channels_last_after_the_wrap
run.model.to(memory_format=torch.contiguous_format); run.descend((run.model(run.batch(2, 6, 6)) - run.batch(5)).square().mean())
# set_data_in_forward, change_data_in_forward, interpolate_in_forward, copy_in_forward | | RELEASED
run.descend(run.model(run.batch(8), run.ids()))
# renormalize_rows_in_forward | | RELEASED
run.descend(run.model(run.ids()).square().mean())
== run.backward(); run.finish() == pass
# read_state | ELSEWHERE
run.see(len(state)); run.see(state[head.weight]["exp_avg"].norm()); run.see(state[head.weight]["step"])
run.see(sum(value.numel() for values in state.values() for value in values.values()))
# write_state | ELSEWHERE
state[head.weight]["exp_avg"].mul_(0.5)
for param in params: state[param]["exp_avg_sq"] = state[param]["exp_avg_sq"] * 0.9
# restart_steps_in_state | OTHER
for values in state.values(): values["step"].zero_()
# forget_state | ELSEWHERE
if run.step: state.clear() if run.step == 1 else state.pop(head.weight)
run.see(len(state))
# replace_state | ELSEWHERE
if run.step == 1: run.optimizer.state = defaultdict(dict)
# assign_state | ELSEWHERE
state[head.bias] = {"step": torch.tensor(3.0), "exp_avg": torch.ones(4), "exp_avg_sq": torch.ones(4)}
# move_state
for values in state.values():
    for name, value in values.items(): values[name] = value.to(params[0].device)
# state_of_the_users_optimizer | was given to a ZeroOptimizer, which has its states
saved = copy.deepcopy(users.state_dict()); run.see(saved["state"][0]["exp_avg"].norm())
if run.step == 1: saved["state"][0]["exp_avg"] *= 2; users.load_state_dict(saved)
# state_of_another_name | ELSEWHERE
state[head.weight]["mine"] = torch.zeros(4, 8)
# state_with_another_name | ELSEWHERE
state[head.weight] = {**state[head.weight], "mine": torch.zeros(4, 8)}
# clamp_data | | RELEASED
for param in params: param.data.clamp_(-0.1, 0.1)
# prune_data | | RELEASED
for param in params: param.data.view(-1)[::3] = 0
# clamp_in_place | | RELEASED
with torch.no_grad():
    for param in params: param.clamp_(-0.1, 0.1)
# write_through_a_view_taken_before_the_wrap | OTHER | STALE
run.kept[-2].view(-1).mul_(0.5)
# read_what_was_detached_before_the_wrap | OTHER
run.see(run.kept[-2].sum())
# read_a_state_dict_kept_from_before_training | | OTHER
if run.step == 0: run.kept = list(run.model.state_dict().values())
run.see(sum(value.abs().sum() for value in run.kept))
# load_parts_into_the_models_own_state_dict
values = run.model.state_dict()
values.update({name: value * 0.5 for name, value in values.items() if "head" in name})
run.model.load_state_dict(values); run.model.load_state_dict({"blocks.0.up.bias": torch.ones(16)}, strict=False)
# copy_into_the_models_own_state_dict | | OTHER
run.model.state_dict()["head.weight"].copy_(torch.ones(4, 8))
# groups_of_a_tiled_layer_by_name | OTHER
== pass == run.backward(); run.finish()
# state_by_name | ELSEWHERE
state["mine"] = {"seen": 1}
# copy_the_optimizer | cannot be copied or pickled
copy.deepcopy(run.optimizer)
# read_between_steps | | NAN
run.see(head.weight.sum())
# read_gathered
with zk.gather(params): run.see(head.weight.sum())
# write_what_is_gathered_to_be_read | | RELEASED
with zk.gather(params), torch.no_grad(): head.bias.zero_()
# assign_data | | RELEASED
head.weight.data = head.weight.data * 0.9
# change_data_taken_before | | RELEASED
if run.step == 0:
    run.kept = [param.data.detach() if number % 2 else param.data.view(-1) for number, param in enumerate(params)]
for data in run.kept: data.clamp_(-0.1, 0.1)
# look_at_data | | NAN
run.see(sum(param.data.abs().sum() for param in params))
# turn_data | | OTHER
run.model[0].weight.data = run.model[0].weight.data.t()
# write_data_of_what_is_gathered_to_be_read | | LOST
with zk.gather(params): head.weight.data.mul_(0.5)
# transform_what_is_gathered
with torch.no_grad(), zk.gather(params):
    run.see(torch.func.grad(lambda weight: weight.square().sum())(head.weight).sum())
# transform_what_is_gathered_with_a_graph | | saved tensor hooks
with zk.gather(params): run.see(torch.func.grad(lambda weight: weight.square().sum())(head.weight).sum())
"""
MODELS: dict[str, Callable[[], nn.Module]] = {
    **{how: functools.partial(Writing, how) for how in WRITES},
    "renormalize_rows_in_forward": lambda: nn.Sequential(nn.Embedding(20, 8, max_norm=0.5), nn.Linear(8, 4)),
    "channels_last": Convolving,
    "channels_last_after_the_wrap": Convolving,
    "turn_data": lambda: nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4)),
}
# what they compute of a batch is not the mean over parts of it
WHOLE = {"penalize_the_gradient_of_parameters", "backward_with_create_graph", "hessian_vector_product", "functional_gradient"}
WHOLE |= {name for name in MODELS if name.endswith("in_forward")}


@dataclasses.dataclass(frozen=True)
class Program:
    """What each step does, the model, and what is said of it."""

    code: Any  # Python
    model: Callable[[], nn.Module]
    whole: bool  # as of Run
    verdicts: tuple[str, str]  # at stages 0-2 and at stage 3: "right", or a pattern

    def kind(self, stage: int) -> str:
        """'right', 'refused' or 'listed': other than in torch without a word."""
        verdict = self.verdicts[stage == 3]
        return "right" if verdict == "right" else "listed" if verdict.startswith("WRONG") else "refused"

    def run(self, run: Run) -> None:
        """Take one step. ``users``: the optimizer that the user has made."""
        names = {"run": run, "params": [*run.model.parameters()], "head": getattr(run.model, "head", None), "state": run.optimizer.state}
        names |= {"is_zk": isinstance(run.optimizer, zk.ZeroOptimizer), "users": getattr(run.optimizer, "inner", run.optimizer)}
        exec(self.code, globals() | names)


def read(source: str) -> Iterator[tuple[str, Program]]:
    """All programs; those of one body have their names in one line."""
    for section in re.split(r"^== ", source, flags=re.M)[1:]:
        around, *written = re.split(r"^# ", section, flags=re.M)
        before, after = around.strip().split(" == ")
        for text in written:
            header, *lines = text.strip().split("\n")
            names, *said = (part.strip() for part in header.split("|"))
            verdicts = [SAYS.get(word, word) or "right" for word in said] or ["right"]
            for name in names.split(", "):
                code = compile("\n".join([before, *lines, after]), f"<program {name}>", "exec")
                yield name, Program(code, MODELS.get(name, Net), name in WHOLE, (verdicts[0], verdicts[-1]))


PROGRAMS = dict(read(SOURCE))
