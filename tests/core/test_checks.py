"""Mistakes are refused with rule, value and remedy, before anything is moved."""

import copy
import dataclasses
import functools
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

import zk
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
    (lambda: zk.ZeroOptimizer(adamw(m := layers()), m), TypeError, r"ZeroOptimizer\(model, .*\): model must be an nn.Module; got AdamW"),
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
def test_parameters_that_cannot_be_taken_are_named_and_stay_and_views_are_warned_of(kind: str, message: str, caplog: Any) -> None:
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
        assert "outside of the model" not in caplog.text
        kept = model[0].bias[1:].detach()
        zk.ZeroOptimizer(model, adamw(model)).close()
        assert "has the memory of '0.bias'" in caplog.text and len(kept) == 3


def test_quick_a_model_has_one_optimizer_until_that_is_closed_and_a_refusal_leaves_the_model_as_it_was() -> None:
    model = layers()
    optimizer = zk.ZeroOptimizer(model, adamw(model), stage=3)
    with pytest.raises(ValueError, match="belongs to another ZeroOptimizer"):
        zk.ZeroOptimizer(model, optimizer)
    for other in (model, model[0]):
        with pytest.raises(ValueError, match="belongs to another ZeroOptimizer"):
            zk.ZeroOptimizer(other, adamw(other))
    optimizer.close()
    before = [(param, param.data_ptr(), param.dtype) for param in model.parameters()]
    mistakes = {"blocks.7": {"units": ["blocks.7"]}, "Conv2d": {"units": [nn.Conv2d]}, "tabel": {"dtype": "bf16", "keep_dtype": "tabel"}}
    for name, options in mistakes.items():
        with pytest.raises(ValueError, match=f"the model has no module .*'{name}'"):
            zk.ZeroOptimizer(model, adamw(model), stage=3, **options)  # which is no owner
        assert [(param, param.data_ptr(), param.dtype) for param in model.parameters()] == before
    model(torch.ones(2, 4)).sum().backward()  # no hook is left: gradients stay where torch has them
    assert all(type(param.grad) is torch.Tensor for param in model.parameters())
    with zk.ZeroOptimizer(model, adamw(model)) as again:
        train(model, again)


@pytest.mark.parametrize(("stage", "move"), ((2, nn.Module.double), (3, lambda model: model.to(torch.bfloat16))))
def test_a_model_moved_after_wrapping_is_noticed(stage: int, move: Callable[[nn.Module], Any]) -> None:
    model = layers()
    optimizer = zk.ZeroOptimizer(model, adamw(model), stage=stage)
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


# ---- ZeroConfig: what is read as meant, and what is refused ----------------------------------------------------------------------------------
def test_quick_values_are_read_as_users_write_them(tmp_path: Path) -> None:
    config = zk.ZeroConfig(
        dtype="torch.bfloat16", device_budget="1.5TiB", host_budget="500 MB", units=nn.Linear, keep_dtype="norm",
        param_tier="NVMe", stage=3, optimizer_tier="auto", nvme_path=tmp_path, device="cpu", loss_scale="dynamic",
    )  # fmt: skip
    assert config.dtype == torch.bfloat16 and config.device == torch.device("cpu") and config.param_tier == "nvme"
    assert (config.device_budget, config.host_budget) == (3 << 39, 500 * 10**6)
    assert (config.units, config.keep_dtype, config.nvme_path) == ((nn.Linear,), ("norm",), (str(tmp_path),))
    assert config.loss_scale == zk.DynamicLossScale()
    assert copy.deepcopy(config) == pickle.loads(pickle.dumps(config)) == config and hash(config)


VALUES: list[tuple[dict[str, Any], str]] = [
    ({"stage": 4}, "stage must be 0, 1, 2 or 3; got 4"),
    ({"stage": None}, "stage must be 0, 1, 2 or 3; got None"),
    ({"optimizer_tier": "disk"}, "optimizer_tier must be 'device', 'host', 'nvme' or 'auto' .*a disk 'nvme'.*; got 'disk'"),
    ({"param_tier": ["host"]}, r"param_tier must be .*; got \['host'\]$"),
    ({"optimizer_tier": "nvme"}, "nvme_path is not set"),
    ({"optimizer_tier": "nvme", "nvme_path": ["/tmp", "/tmp"]}, "each of them once"),
    ({"stage": 3, "param_tier": "nvme", "nvme_path": "/tmp"}, "updated in host memory"),
    ({"param_tier": "host"}, "param_tier='host' needs stage=3"),
    ({"nvme_path": "/tmp"}, "nvme_path has no effect"),
    ({"host_budget": "1GiB"}, "host_budget has no effect"),
    ({"host_budget": "24 potatoes"}, "host_budget must be a number of bytes above 0, or a string with a unit"),
    ({"host_budget": 0}, "above 0"),
    ({"clip_grad_norm": "1"}, "clip_grad_norm must be more than 0"),
    ({"clip_grad_norm": float("nan")}, "clip_grad_norm must be more than 0"),
    ({"dtype": "int8"}, "dtype must be one of"),
    ({"keep_dtype": "table"}, "keep_dtype has no effect without dtype="),
    ({"loss_scale": "sometimes"}, "loss_scale must be"),
    ({"loss_scale": float("inf")}, "finite number above 0"),
    ({"loss_scale": True}, "loss_scale must be"),
    ({"prefetch": -1}, "prefetch must be"),
    ({"num_threads": 0}, "num_threads must be"),
    ({"device": "meta"}, "'cuda' or 'cuda:N'; got 'meta'"),
    *([] if torch.cuda.is_available() else [({"device": "cuda"}, "torch sees 0 CUDA devices")]),
]
TYPES: list[tuple[dict[str, Any], str]] = [
    ({"host_budget": True}, "host_budget must be"),
    ({"dtype": "bf16", "keep_dtype": (int,)}, "keep_dtype must hold module names or nn.Module classes"),
    ({"units": [3]}, "units must hold"),
    ({"device": 0}, "got 0"),
    ({"nvme_path": 7}, "nvme_path must be a path"),
    ({"optimizer_tier": "nvme", "nvme_path": ""}, "nvme_path must be a path"),
    ({"process_group": "all"}, r"this rank is a member of .*mesh\.get_group"),
    ({"addons": [zk.Addon]}, "addons must be a list of zk.Addon objects"),
    ({"stages": 3}, "no option 'stages'; the closest one is 'stage'"),
    ({"overlap_stop": True}, "the closest one is 'overlap_step'"),
    ({"qqq": 1}, "there are stage, dtype"),
    ({"options": {"overlap_stop": 1}}, "no option 'overlap_stop'"),
]
REFUSED = [*((ValueError, *case) for case in VALUES), *((TypeError, *case) for case in TYPES)]


@pytest.mark.parametrize(("error", "options", "message"), REFUSED, ids=str)
def test_values_without_a_meaning_and_unknown_options_are_refused(error: type[Exception], options: dict[str, Any], message: str) -> None:
    model = nn.Linear(2, 2)
    for make in (
        lambda: zk.ZeroConfig(**options),
        lambda: dataclasses.replace(zk.ZeroConfig(), **options),
        lambda: zk.ZeroOptimizer(model, torch.optim.AdamW(model.parameters()), zk.ZeroConfig(), **options),
    ):
        with pytest.raises(error, match=message):
            make()


def test_options_win_over_the_config_they_are_given_with_and_add_ons_have_the_others() -> None:
    config = zk.ZeroConfig(overlap_step=True, stage=3)
    changed = dataclasses.replace(config, state_dtype="bf16", stage=1)
    assert changed.options == {"overlap_step": True, "state_dtype": "bf16"} and config.options == {"overlap_step": True}
    assert dataclasses.replace(changed, overlap_step=False).options["overlap_step"] is False
    model = nn.Linear(2, 2)
    optimizer = zk.ZeroOptimizer(model, torch.optim.SGD(model.parameters(), lr=0.1), zk.ZeroConfig(stage=1, prefetch=0), stage=0)
    assert (optimizer.config.stage, optimizer.config.prefetch) == (0, 0)
    optimizer.close()
    with pytest.raises(TypeError, match=r"config must be a zk\.ZeroConfig"):
        zk.ZeroOptimizer(model, torch.optim.SGD(model.parameters(), lr=0.1), {"stage": 1})  # type: ignore[arg-type]


# ---- ranks that would train by different rules, or different models ------------------------------------------------------------------------

# what differs by rank: an option, a group's number, the model, or states
DIFFERENCES: dict[str, tuple[str, Any]] = {
    "stage is 1 on rank 0 and 2 on rank 1": ("stage", lambda rank: 1 + rank),
    r"ValueError: stage must be 0, 1, 2 or 3; got 7": ("stage", lambda rank: (2, 7)[rank]),
    r"ValueError: the states are of groups of \[\] parameters": ("states", lambda rank: {} if rank else {"param_groups": []}),
    r"of torch.float32 on rank 0 and \(\d+, \d+\) of torch.float32, frozen on rank 1": ("model", lambda rank: rank == 0),
    r"'head.weight' is \((\d+, \d+)\) of torch.float32 on rank 0 and \(\1\) of torch.float32, strides \(1, \d+\) on rank 1": ("order", int),
    r"clip_grad_norm is 0\.5 on rank 0 and 1 on rank 1": ("clip_grad_norm", lambda rank: 0.5 + rank / 2),
    r"prefetch is 1 on rank 0 and 2 on rank 1": ("prefetch", lambda rank: 1 + rank),
    r"param_groups\[0\]\['betas'\] is \(0\.9, 0\.9\) on rank 0 and \(0\.8, 0\.9\) on rank 1": ("betas", lambda rank: [0.9 - rank / 10, 0.9]),
    r"param_groups\[0\]\['lr'\] is 0\.5 on rank 0 and 1\.5 on rank 1": ("lr", lambda rank: np.float32(0.5 + rank)),
}


def error_of(case: Any) -> str:
    try:
        case()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


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
    is_option = not is_of_group and what not in ("model", "order", "states")
    optimizer = zk.ZeroOptimizer(model, inner, **options | ({what: value} if is_option else {}))
    if what == "states":
        optimizer.load_state_dict(optimizer.state_dict() | value)


def differs_in_name_only(_: str) -> None:
    """Numbers of other types, options in another order, and names that only users read."""
    model, rank = gpt(), dist.get_rank()
    plain = torch.optim.AdamW(model.parameters(), lr=(1.0, 1)[rank])
    if rank:
        for name in list(plain.param_groups[0]):
            plain.param_groups[0][name] = plain.param_groups[0].pop(name)
    plain.param_groups[0]["name"] = f"of rank {rank}"
    optimizer = zk.ZeroOptimizer(model, plain, stage=2, clip_grad_norm=(1, 1.0)[rank], num_threads=1 + rank)
    descend(optimizer, loss_of(model, batch(0)))


def test_ranks_of_different_rules_or_states_and_outside_of_their_group_are_refused_on_all_and_others_train() -> None:
    jobs = [*(functools.partial(differs, pattern) for pattern in DIFFERENCES), *(functools.partial(in_a_wrong_group, is_mesh) for is_mesh in (0, 1))]
    *table, groups, meshes, alike = run_world(2, call, [*((error_of, job) for job in jobs), (differs_in_name_only, "")], timeout=60)
    for pattern, row in zip(DIFFERENCES, table, strict=True):
        assert all(re.search(pattern, str(said)) for said in row), row
    assert alike == [None, None]
    assert groups[0] == "nothing" and "process_group must be a ProcessGroup that this rank is a member of" in groups[1]
    assert all("mesh.get_group()" in said for said in meshes)
