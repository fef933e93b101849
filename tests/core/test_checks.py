"""Mistakes are refused with rule, value and remedy, before anything is moved."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

import zk
from tests.core.test_ranks import error_of
from tests.models import GPT, adamw, batch, descend, gpt, loss_of
from tests.world import call, mesh_of, run_world


def layers(count: int = 2) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(4, 4) for _ in range(count)))


def train(model: nn.Module, optimizer: Any) -> None:
    descend(optimizer, model(torch.ones(2, 4)).float().square().mean())


def replaced(model: nn.Module) -> torch.optim.Optimizer:
    inner = adamw(model)
    inner.step = lambda closure=None: None  # type: ignore[method-assign, assignment]
    return inner


def ddp(model: nn.Module) -> nn.Module:
    """A module of the class, made without ranks."""
    wrapped = nn.parallel.DistributedDataParallel.__new__(nn.parallel.DistributedDataParallel)
    nn.Module.__init__(wrapped)
    wrapped.module = model
    return wrapped


ARGUMENTS: list[tuple[Callable[[], Any], type[Exception], str]] = [
    (lambda: zk.ZeroOptimizer([layers()], adamw(layers())), TypeError, r"model must be an nn\.Module; got list"),
    (lambda: zk.ZeroOptimizer(adamw(m := layers()), m), TypeError, r"swapped: ZeroOptimizer\(model, optimizer\)"),
    (lambda: zk.ZeroOptimizer(layers(), 0.1), TypeError, r"torch\.optim\.Optimizer, or several, or None for a frozen model; got float"),
    (lambda: zk.ZeroOptimizer(layers(), []), ValueError, "list of optimizers is empty"),
    (lambda: zk.ZeroOptimizer(layers(), torch.optim.AdamW([{"params": []}])), ValueError, "AdamW: this optimizer has no parameters"),
    (lambda: zk.ZeroOptimizer(m := layers(), replaced(m)), ValueError, r"the step\(\) of this optimizer was replaced"),
    (lambda: zk.ZeroOptimizer(m := layers(), adamw(m, differentiable=True)), ValueError, "differentiable=True, and no gradient"),
    (lambda: zk.ZeroOptimizer(nn.ReLU(), adamw(layers())), ValueError, "no parameters"),
    (lambda: zk.ZeroOptimizer(ddp(m := layers()), adamw(m)), ValueError, "wrapped in DistributedDataParallel.*pass model.module"),
    (lambda: zk.ZeroOptimizer(m := nn.DataParallel(layers()), adamw(m)), ValueError, "DataParallel.*torchrun"),
    (lambda: zk.ZeroOptimizer(m := torch.jit.script(layers()), adamw(m)), TypeError, "the model is a ScriptModule"),
    (lambda: zk.ZeroOptimizer(layers(), adamw(layers())), ValueError, r"shape \(4, 4\) is not one of model\.parameters"),
    (lambda: zk.ZeroOptimizer(m := layers(), [adamw(m), adamw(m)]), ValueError, "'0.weight' is in two of the optimizers"),
]  # fmt: skip


@pytest.mark.parametrize(("make", "error", "message"), ARGUMENTS)
def test_arguments_that_are_something_else_are_named(make: Callable[[], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make()


def of_kind(kind: str) -> nn.Module:
    """Two layers of which something cannot be taken."""
    model = layers()
    first, second = model
    match kind:
        case "fp64":
            model.double()
        case "lazy":
            model[1] = nn.LazyLinear(4)
        case "meta":
            model[1] = nn.Linear(4, 4, device="meta")
        case "parts of one":
            first.weight, second.weight = (nn.Parameter(part.view(4, 4)) for part in torch.randn(32).chunk(2))
        case "no parameter":
            del second._parameters["weight"]
            second.weight = first.weight.T
        case "itself":
            second.weight, second.seen, second.also = first.weight, first.bias, [first.bias]
        case "made anew":
            model[0] = nn.utils.spectral_norm(first)
        case "meta buffer" | "buffer":
            second.register_buffer("seen", torch.ones(2, device="meta") if "meta" in kind else first.bias.detach())
        case "attribute" | "list" | "dict" | "nested":
            nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
            kinds = {"attribute": first.weight.data, "list": [torch.ones(1), first.weight[1:]], "dict": {"rows": first.weight.view(-1)}}
            second.seen = kinds.get(kind, nested)
        case _:
            fp4 = torch.zeros(4, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
            kinds = {"transposed": first.weight.T, "inside": first.weight.detach()[1:].expand(3, 4), "expanded": torch.ones(1).expand(4), "fp4": fp4}
            kinds |= {"codes": second.weight.detach().to(torch.float8_e4m3fn), "tied": first.weight}
            second.weight = first.weight if kind == "tied" else nn.Parameter(kinds[kind], requires_grad=kind != "fp4")
    return model


KINDS = {
    "fp64": "'0.weight' is torch.float64; zk trains fp32, bf16 and fp16: freeze it",
    "lazy": "'1.weight' has no shape yet",
    "meta": "'1.weight' is on the meta device",
    "meta buffer": "'1.seen' is on the meta device",
    **dict.fromkeys(("transposed", "inside"), "parameters '[01].weight' and '[01].weight' share memory"),
    "expanded": r"'1.weight' is expanded, .*expanded\.clone\(\)",
    "codes": "'1.weight' is torch.float8_e4m3fn",
    "fp4": r"'1.weight' is torch.float4_e2m1fn_x2, which torch cannot copy; keep it as param.view\(torch.uint8\)",
    "no parameter": "'1.weight' shares memory with parameter '0.weight'",
    **dict.fromkeys(("attribute", "list", "dict"), "'1.seen' shares memory with parameter '0.weight'"),
    "buffer": "'1.seen' shares memory with parameter '0.bias'",
    **dict.fromkeys(("parts of one", "tied", "itself", "made anew", "nested"), ""),
}


@pytest.mark.parametrize(("kind", "message"), KINDS.items())
def test_parameters_that_cannot_be_taken_are_named_and_stay(kind: str, message: str) -> None:
    model = of_kind(kind)

    def found() -> list[Any]:
        return [(param.dtype, param.device, kind in ("lazy", "meta") or param.data_ptr()) for param in model.parameters()]

    before = found()
    for options in ({}, {"stage": 3, "device": "cpu"}) if message else ():
        with pytest.raises(ValueError, match=message):
            zk.ZeroOptimizer(model, adamw(model), **options)
        assert found() == before
    if not message:
        with zk.ZeroOptimizer(model, adamw(model)) as optimizer:
            train(model, optimizer)


def test_quick_a_refusal_leaves_the_model_as_it_was() -> None:
    model = GPT()
    before = [(param, param.data_ptr(), param.dtype) for param in model.parameters()]
    mistakes = {"blocks.7": {"units": ["blocks.7"]}, "Conv2d": {"units": [nn.Conv2d]}, "tabel": {"dtype": "bf16", "keep_dtype": "tabel"}}
    for name, options in mistakes.items():
        with pytest.raises(ValueError, match=f"the model has no module .*'{name}'"):
            zk.ZeroOptimizer(model, adamw(model), stage=3, **options)
        assert [(param, param.data_ptr(), param.dtype) for param in model.parameters()] == before
    loss_of(model, batch(0)).backward()  # no hook is left: gradients stay where torch has them
    assert all(type(param.grad) is torch.Tensor for param in model.parameters())
    zk.ZeroOptimizer(model, adamw(model), stage=3).close()


def test_quick_a_model_has_one_optimizer_until_that_is_closed() -> None:
    model = layers()
    optimizer = zk.ZeroOptimizer(model, adamw(model), stage=3)
    with pytest.raises(ValueError, match="a ZeroOptimizer already"):
        zk.ZeroOptimizer(model, optimizer)
    for other in (model, model[0]):
        with pytest.raises(ValueError, match="belongs to another ZeroOptimizer"):
            zk.ZeroOptimizer(other, adamw(other))
    optimizer.close()
    with pytest.raises(ValueError, match="no module 'x'"):
        zk.ZeroOptimizer(model, adamw(model), units=["x"])  # which is no owner
    again = zk.ZeroOptimizer(model, adamw(model))
    train(model, again)
    again.close()


@pytest.mark.parametrize(("stage", "move"), ((2, nn.Module.double), (3, lambda model: model.to(torch.bfloat16))))
def test_a_model_moved_after_wrapping_is_noticed(stage: int, move: Callable[[nn.Module], Any]) -> None:
    model = layers()
    optimizer = zk.ZeroOptimizer(model, adamw(model), stage=stage)
    train(model, optimizer)
    assert model.to("cpu") is model
    train(model, optimizer)
    move(model)
    with pytest.raises(RuntimeError, match=r"'0.weight' was moved or converted after"):
        train(model, optimizer)


def test_a_model_wrapped_in_ddp_afterwards_is_refused_at_its_first_forward() -> None:
    model = layers()
    zk.ZeroOptimizer(model, adamw(model))
    around = ddp(model)
    with around._inside_ddp_forward(), pytest.raises(RuntimeError, match="DistributedDataParallel after"):  # type: ignore[operator]
        model(torch.ones(2, 4))


FLAGS = [("AdamW", {"capturable": True, "foreach": True}), ("SGD", {"fused": True, "momentum": 0.9}), ("AdamW", {"amsgrad": True, "fused": True})]


@pytest.mark.usefixtures("torch_engine")
@pytest.mark.parametrize(("kind", "flags"), FLAGS, ids=str)
def test_flags_that_choose_how_to_compute_change_no_bit(kind: str, flags: dict[str, Any]) -> None:
    model, other = layers(), layers()
    plain = {name: value for name, value in flags.items() if name not in ("fused", "capturable", "foreach")}
    optimizer = zk.ZeroOptimizer(model, getattr(torch.optim, kind)(model.parameters(), lr=1e-2, **flags), optimizer_tier="host")
    theirs = getattr(torch.optim, kind)(other.parameters(), lr=1e-2, foreach=False, **plain)
    for _ in range(3):
        train(model, optimizer), train(other, theirs)
    assert all(map(torch.equal, model.parameters(), other.parameters()))
    optimizer.close()


def test_sparse_gradients_are_an_error_with_a_remedy() -> None:
    sparse = nn.Embedding(5, 3, sparse=True)
    zk.ZeroOptimizer(sparse, torch.optim.SGD(sparse.parameters(), lr=0.1))
    with pytest.raises(TypeError, match="sparse=False"):
        sparse(torch.tensor([1])).sum().backward()


# ---- ranks that would train by different rules, or different models ------------------------------------------------------------------------

# what differs by rank: an option, a group's number, or the model
DIFFERENCES: dict[str, tuple[str, Any]] = {
    "stage is 1 on rank 0 and 2 on rank 1": ("stage", lambda rank: 1 + rank),
    r"of torch.float32 on rank 0 and \(\d+, \d+\) of torch.float32, frozen on rank 1": ("model", lambda rank: rank == 0),
    r"'head.weight' is \((\d+, \d+)\) of torch.float32 on rank 0 and \(\1\) of torch.float32, strides \(1, \d+\) on rank 1": ("order", int),
    r"clip_grad_norm is 0\.5 on rank 0 and 1 on rank 1": ("clip_grad_norm", lambda rank: 0.5 + rank / 2),
    r"prefetch is 1 on rank 0 and 2 on rank 1": ("prefetch", lambda rank: 1 + rank),
    r"param_groups\[0\]\['betas'\] is \(0\.9, 0\.9\) on rank 0 and \(0\.8, 0\.9\) on rank 1": ("betas", lambda rank: [0.9 - rank / 10, 0.9]),
    r"param_groups\[0\]\['lr'\] is 0\.5 on rank 0 and 1\.5 on rank 1": ("lr", lambda rank: np.float32(0.5 + rank)),
}


def in_a_wrong_group(is_mesh: bool) -> None:
    model, group = layers(), mesh_of("cpu", (2,)) if is_mesh else dist.new_group([0])
    zk.ZeroOptimizer(model, adamw(model), process_group=group).close()


def differs(pattern: str) -> None:
    model, (what, of_rank) = GPT(), DIFFERENCES[pattern]
    value, inner = of_rank(dist.get_rank()), torch.optim.AdamW(model.parameters(), lr=1e-2)
    if what == "model":
        model.head.weight.requires_grad_(value)
    if what == "order" and value:
        model.head.weight.data = model.head.weight.data.t().contiguous().t()
    is_of_group = what in inner.param_groups[0]
    if is_of_group:
        inner.param_groups[0][what] = value
    options = {"optimizer_tier": "host", "stage": 3 if what == "prefetch" else 2}
    zk.ZeroOptimizer(model, inner, **options if is_of_group or what in ("model", "order") else {**options, what: value})


def differs_in_name_only(_: str) -> str:
    """Numbers of other types, options in another order, and names that only users read."""
    model, rank = gpt(), dist.get_rank()
    plain = torch.optim.AdamW(model.parameters(), lr=(1.0, 1)[rank])
    if rank:
        for name in list(plain.param_groups[0]):
            plain.param_groups[0][name] = plain.param_groups[0].pop(name)
    plain.param_groups[0]["name"] = f"of rank {rank}"
    optimizer = zk.ZeroOptimizer(model, plain, stage=2, clip_grad_norm=(1, 1.0)[rank], num_threads=1 + rank)
    descend(optimizer, loss_of(model, batch(0)))
    return ""


def test_ranks_of_different_rules_and_outside_of_their_group_are_refused_with_the_remedy_and_others_train() -> None:
    jobs = [*(functools.partial(differs, pattern) for pattern in DIFFERENCES), *(functools.partial(in_a_wrong_group, is_mesh) for is_mesh in (0, 1))]
    *table, groups, meshes, alike = run_world(2, call, [*((error_of, job) for job in jobs), (differs_in_name_only, "")], timeout=60)
    for pattern, row in zip(DIFFERENCES, table, strict=True):
        assert all(re.search(pattern, str(said)) for said in row), row
    assert alike == ["", ""]
    assert groups[0] == "nothing" and "process_group must be a ProcessGroup that this rank is a member of" in groups[1]
    assert all("mesh.get_group()" in said for said in meshes)
