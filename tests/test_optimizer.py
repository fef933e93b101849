"""ZeroOptimizer as a torch optimizer: what schedulers, loops and people expect of one. One process; ranks are in test_partitioned.py."""

from __future__ import annotations

import copy
import io
import math
import operator
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, OneCycleLR, ReduceLROnPlateau
from torch.utils._pytree import tree_leaves

import zk
from tests.models import GPT, batch, loss_of, step
from tests.world import run_world

pytestmark = pytest.mark.usefixtures("torch_engine")


def adamw(params: list[nn.Parameter] | object) -> torch.optim.AdamW:
    return torch.optim.AdamW(params, lr=1e-2)


def wrap(model: nn.Module, optimizer: torch.optim.Optimizer | None = None, **options: object) -> zk.ZeroOptimizer:
    return zk.ZeroOptimizer(model, optimizer or adamw(model.parameters()), **{"optimizer_tier": "host", **options})


def pair(variant: str = "plain") -> tuple[GPT, GPT]:
    torch.manual_seed(0)
    model = GPT(variant)
    return model, copy.deepcopy(model)


def assert_same(a: nn.Module, b: nn.Module) -> None:
    for (name, got), want in zip(a.named_parameters(), b.parameters(), strict=True):
        assert torch.equal(got, want), name


# ---- the optimizer protocol ----------------------------------------------------------------------------------------------------------


def test_it_is_an_optimizer_and_its_groups_are_the_users() -> None:
    model, _ = pair()
    inner = torch.optim.AdamW([{"params": [model.head.weight], "lr": 1.0, "name": "head"}, {"params": list(model.blocks.parameters())}], lr=1e-2)
    groups = inner.param_groups
    optimizer = wrap(model, inner)
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert all(map(operator.is_, optimizer.param_groups, groups)) and optimizer.param_groups[0]["params"][0] is model.head.weight
    before = model.head.weight.detach().clone()
    groups[0]["lr"], groups[0]["weight_decay"] = 0.0, 0.0
    step(model, optimizer)
    assert torch.equal(model.head.weight, before)
    groups[0]["lr"] = torch.tensor(0.5)
    step(model, optimizer)
    assert not torch.equal(model.head.weight, before)


@pytest.mark.parametrize(
    ("make", "on"),
    (
        (lambda o: LambdaLR(o, lambda t: 1 / (t + 1)), "inner"),
        (lambda o: CosineAnnealingLR(o, 5), "zk"),
        (lambda o: OneCycleLR(o, 0.1, total_steps=10), "zk"),
        (lambda o: ReduceLROnPlateau(o, patience=0), "inner"),
    ),
    ids=("lambda", "cosine", "onecycle", "plateau"),
)
def test_schedulers_drive_it_from_either_optimizer(make: Callable[..., object], on: str, recwarn: pytest.WarningsRecorder) -> None:
    model, other = pair()
    inner, plain = adamw(model.parameters()), adamw(other.parameters())
    if on == "inner":
        scheduler = make(inner)
        optimizer = wrap(model, inner)
    else:
        optimizer = wrap(model, inner)
        scheduler = make(optimizer)
    reference = make(plain)
    for seed in range(5):
        mine, theirs = step(model, optimizer, seed), step(other, plain, seed)
        arguments = (1.0,) if isinstance(scheduler, ReduceLROnPlateau) else ()
        scheduler.step(*arguments)  # type: ignore[attr-defined]
        reference.step(*arguments)  # type: ignore[attr-defined]
        assert mine == theirs
    assert_same(model, other)
    assert not [w for w in recwarn if "lr_scheduler" in str(w.message)]


def test_closures_and_step_hooks_run() -> None:
    model, other = pair()
    optimizer, plain = wrap(model), adamw(other.parameters())
    calls: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))

    def closure() -> Tensor:
        calls.append("closure")
        assert torch.is_grad_enabled()
        optimizer.zero_grad()
        loss = loss_of(model, batch(1))
        loss.backward()
        return loss

    loss = optimizer.step(closure)
    assert loss.item() == step(other, plain, 1)
    assert calls == ["before", "closure", "after"]
    assert_same(model, other)


def test_zero_grad_before_step_drops_what_was_accumulated() -> None:
    model, other = pair()
    optimizer, plain = wrap(model), adamw(other.parameters())
    loss_of(model, batch(7)).backward()
    optimizer.zero_grad()
    assert step(model, optimizer, 1) == step(other, plain, 1)
    assert_same(model, other)


def test_clip_grad_norm_returns_torchs_norm_and_clips() -> None:
    model, other = pair()
    optimizer, plain = wrap(model), adamw(other.parameters())
    for seed in range(3):
        loss_of(model, batch(seed)).backward()
        loss_of(other, batch(seed)).backward()
        mine, theirs = optimizer.clip_grad_norm_(0.1), nn.utils.clip_grad_norm_(other.parameters(), 0.1)
        assert mine.item() == pytest.approx(theirs.item(), rel=1e-5)
        optimizer.step()
        optimizer.zero_grad()
        plain.step()
        plain.zero_grad()
    for got, want in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", ("fp32", "bf16"))
@pytest.mark.parametrize("kind", (torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD))
def test_state_dict_resumes_bit_for_bit(dtype: str, kind: type[torch.optim.Optimizer]) -> None:
    options = {"lr": 1e-2, "momentum": 0.9} if kind is torch.optim.SGD else {"lr": 1e-2, "amsgrad": kind is torch.optim.Adam}
    model, other = pair()
    optimizer = wrap(model, kind(model.parameters(), **options), dtype=dtype)  # type: ignore[arg-type]
    for seed in range(3):
        step(model, optimizer, seed)
    state, weights = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(model.state_dict())
    again = wrap(other, kind(other.parameters(), **{**options, "lr": 5.0}), dtype=dtype)  # type: ignore[arg-type]
    other.load_state_dict(weights)
    again.load_state_dict(state)
    assert again.param_groups[0]["lr"] == 1e-2
    for seed in range(3, 6):
        assert step(model, optimizer, seed) == step(other, again, seed)
    assert_same(model, other)


def test_wrapping_in_mid_training_takes_the_state_over() -> None:
    model, other = pair()
    inner, plain = adamw(model.parameters()), adamw(other.parameters())
    for seed in range(3):
        step(model, inner, seed)
        step(other, plain, seed)
    optimizer = wrap(model, inner)
    for seed in range(3, 6):
        assert step(model, optimizer, seed) == step(other, plain, seed)


def test_parameters_written_by_the_user_are_kept() -> None:
    for dtype in ("fp32", "bf16", "fp16"):
        model, other = pair()
        optimizer = wrap(model, dtype=dtype, loss_scale=None)
        step(model, optimizer)
        for group in optimizer.param_groups:
            group.update(lr=0.0)
        model.load_state_dict(other.state_dict())
        step(model, optimizer, 1)
        for got, want in zip(model.parameters(), other.parameters(), strict=True):
            assert torch.equal(got, want.to(got.dtype))


def test_gradients_assigned_by_hand_count() -> None:
    model, other = pair()
    optimizer, plain = wrap(model), adamw(other.parameters())
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        one.grad = torch.ones_like(one)
        two.grad = torch.ones_like(two)
    optimizer.step()
    plain.step()
    assert_same(model, other)


def test_stepping_between_forward_and_backward_is_caught_as_torch_does() -> None:
    model, _ = pair()
    optimizer = wrap(model)
    early = loss_of(model, batch(0))
    step(model, optimizer, 1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        early.backward()


def test_a_model_too_small_for_units_and_one_parameter_work() -> None:
    for model in (nn.Linear(1, 1), nn.Linear(3, 1, bias=False), nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))):
        optimizer = wrap(model, stage=3)
        model(torch.ones(1, next(model.parameters()).shape[1])).sum().backward()
        optimizer.step()
        assert optimizer.metrics()["steps"] == 1


def test_compiled_blocks_train_the_same() -> None:
    model, other = pair()
    for index, block in enumerate(model.blocks):
        model.blocks[index] = torch.compile(block, backend="eager")
    optimizer, plain = wrap(model), adamw(other.parameters())
    for seed in range(3):
        assert step(model, optimizer, seed) == pytest.approx(step(other, plain, seed), rel=1e-5)


def test_a_compiled_model_of_many_units_trains_and_hooks_are_not_compiled_one_by_one() -> None:
    torch.manual_seed(0)
    model = GPT(layers=9)  # more than there may be versions of one function
    other, optimizer = copy.deepcopy(model), wrap(model, stage=3, param_tier="host")
    compiled, plain = torch.compile(model, backend="eager"), adamw(other.parameters())
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        for seed in range(2):
            assert step(compiled, optimizer, seed) == pytest.approx(step(other, plain, seed), rel=1e-5)


# ---- precision -----------------------------------------------------------------------------------------------------------------------


def poison(model: nn.Module, value: float | None) -> Tensor:
    loss = loss_of(model, batch(0))
    return loss if value is None else loss * value


def overflow_sequence(values: list[float | None], **rule: float) -> tuple[list[float], zk.ZeroOptimizer]:
    torch.manual_seed(0)
    model = GPT()
    optimizer = wrap(model, dtype="fp16", loss_scale=zk.DynamicLossScale(**rule))  # type: ignore[arg-type]
    scales = []
    for value in values:
        optimizer.backward(poison(model, value))
        optimizer.step()
        optimizer.zero_grad()
        scales.append(optimizer.metrics()["loss_scale"])
    return scales, optimizer


def test_eight_overflows_from_256_end_at_1() -> None:
    inf, nan = float("inf"), float("nan")
    scales, optimizer = overflow_sequence([inf, -inf, *[nan] * 6], init=2**8, window=2, hysteresis=1)
    assert scales == [2.0**power for power in range(7, -1, -1)]
    assert optimizer.metrics()["skipped_steps"] == 8 and optimizer.metrics()["steps"] == 0
    scales, _ = overflow_sequence([nan] * 3, init=2, window=2, hysteresis=1)
    assert scales == [1, 1, 1]  # never below the minimum


def test_without_overflow_the_scale_doubles_every_window() -> None:
    scales, optimizer = overflow_sequence([None] * 6, init=2**8, window=2, hysteresis=1)
    assert scales == [2.0**8, 2.0**9, 2.0**9, 2.0**10, 2.0**10, 2.0**11]
    assert optimizer.metrics()["steps"] == 6


def test_hysteresis_waits_and_is_restored_when_the_scale_grows() -> None:
    nan = float("nan")
    scales, _ = overflow_sequence([nan, nan, nan, None, None, nan, nan], init=2**8, window=2, hysteresis=2)
    assert scales == [2.0**8, 2.0**7, 2.0**6, 2.0**6, 2.0**7, 2.0**7, 2.0**6]


def test_a_window_counts_from_the_last_overflow() -> None:
    scales, _ = overflow_sequence([None, float("nan"), None, None, None, None], init=2**8, window=2, hysteresis=1)
    assert scales == [2.0**8, 2.0**7, 2.0**7, 2.0**8, 2.0**8, 2.0**9]


def bad_gradients_change_nothing(case: tuple[int, str, float]) -> str:
    """Run on every rank; only one rank's gradient is bad."""
    stage, dtype, value = case
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    torch.manual_seed(0)
    model = GPT()
    optimizer = wrap(model, stage=stage, dtype=dtype, loss_scale=8.0, param_tier="host" if stage == 3 else "device")
    optimizer.backward(poison(model, None))
    optimizer.step()
    optimizer.zero_grad()
    before = copy.deepcopy((model.state_dict(), optimizer.state_dict()["state"]))
    optimizer.backward(poison(model, value if rank == 0 else None))
    optimizer.step()
    optimizer.zero_grad()
    after = (model.state_dict(), optimizer.state_dict()["state"])
    metrics = optimizer.metrics()
    flat = [tree_leaves(side) for side in (before, after)]
    same = all(torch.equal(a, b) for a, b in zip(*flat, strict=True) if isinstance(a, Tensor))
    optimizer.backward(poison(model, None))
    optimizer.step()
    optimizer.zero_grad()
    taken = optimizer.metrics()["steps"]
    optimizer.close()
    if not same or metrics["skipped_steps"] != 1 or metrics["steps"] != 1 or taken != 2 or math.isfinite(metrics["grad_norm"]):
        return f"stage {stage} {dtype} {value}: unchanged={same}, {metrics}"
    return ""


INF, NAN = math.inf, math.nan
BAD = {
    1: [(0, "fp32", NAN), (2, "fp16", INF), (3, "bf16", NAN), (3, "fp16", INF)],
    2: [(0, "fp16", NAN), (1, "bf16", INF), (2, "fp32", NAN), (2, "fp16", INF), (3, "fp32", INF), (3, "fp16", NAN)],
}


@pytest.mark.parametrize("world", BAD)
def test_nan_and_inf_never_reach_the_optimizer(world: int) -> None:
    assert [line for row in run_world(world, bad_gradients_change_nothing, BAD[world]) for line in row if line] == []


def test_loss_backward_with_a_loss_scale_is_an_error_that_says_what_to_call() -> None:
    model, _ = pair()
    optimizer = wrap(model, dtype="fp16")
    with pytest.raises(RuntimeError, match=r"optimizer.backward\(loss\)"):
        loss_of(model, batch(0)).backward()
    optimizer.zero_grad()
    optimizer.backward(loss_of(model, batch(0)))
    optimizer.step()
    assert optimizer.metrics()["loss_scale"] == 2**16


# ---- bad input -----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "match"),
    (
        ({"optimizer_tier": "nvme"}, "nvme_path is not set"),
        ({"optimizer_tier": "nvme", "nvme_path": []}, "nvme_path is not set"),
        ({"optimizer_tier": "nvme", "nvme_path": ["/tmp", "/tmp"]}, "each of them once"),
        ({"stage": 3, "param_tier": "nvme", "optimizer_tier": "device", "nvme_path": "/tmp"}, "updated in host memory"),
        ({"stage": 2, "param_tier": "nvme", "nvme_path": "/tmp"}, "needs stage=3"),
        ({"nvme_path": "/tmp"}, "no effect"),
        ({"stage": 2, "param_tier": "host"}, "param_tier='host' needs stage=3"),
        ({"host_budget": "10B"}, "needs 114432 bytes on the host tier, and host_budget is 10 bytes"),
        ({"optimizer_tier": "device", "host_budget": "1GiB"}, "host_budget has no effect"),
        ({"optimizer_tier": "device", "device_budget": 100}, "needs .* bytes on the device tier"),
        ({"clip_grad_norm": 0}, "clip_grad_norm must be more than 0"),
        ({"state_dtype": "fp16"}, "state_dtype must be .* or '8bit'; got 'fp16'"),
        ({"state_dtype": "4bit"}, "state_dtype must be .* '8bit'.*; got '4bit'"),
        ({"units": ["blocks.7"]}, "no module 'blocks.7'"),
        ({"units": [nn.Conv2d]}, "no module 'Conv2d'"),
    ),
    ids=str,
)
def test_bad_options_are_refused_with_rule_value_and_remedy(options: dict[str, object], match: str) -> None:
    model, _ = pair()
    before = [p.data_ptr() for p in model.parameters()]
    with pytest.raises(ValueError, match=match):
        wrap(model, **options)
    if "units" not in options:
        assert [p.data_ptr() for p in model.parameters()] == before  # nothing was touched
    wrap(model)  # and the model can still be wrapped


def _aliased(kind: str) -> nn.Module:
    """Two layers, the second of which keeps something of the first one."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    first, second = model
    flat = torch.randn(32)
    match kind:
        case "transposed":
            second.weight = nn.Parameter(first.weight.T)
        case "no parameter":
            del second._parameters["weight"]
            second.weight = first.weight.T
        case "attribute":
            second._seen = first.weight.data
        case "list":
            second.seen = [torch.ones(1), first.weight[1:]]
        case "dict":
            second.seen = {"rows": first.weight.view(-1)}
        case "buffer":
            second.register_buffer("seen", first.bias.detach())
        case "itself":
            second.weight, second.seen, second.also = first.weight, first.bias, [first.bias]
        case "made anew":
            model[0] = nn.utils.spectral_norm(first)
        case "nested":
            second.seen = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
        case "parts of one":
            first.weight, second.weight = (nn.Parameter(part.view(4, 4)) for part in flat.chunk(2))
    return model


@pytest.mark.parametrize("device", (None, "cpu"))
@pytest.mark.parametrize(
    ("kind", "names"),
    (
        ("transposed", "parameters '[01].weight' and '[01].weight' share memory"),
        ("no parameter", "'1.weight' shares memory with parameter '0.weight'"),
        ("attribute", "'1._seen' shares memory with parameter '0.weight'"),
        ("list", "'1.seen' shares memory with parameter '0.weight'"),
        ("dict", "'1.seen' shares memory with parameter '0.weight'"),
        ("buffer", "'1.seen' shares memory with parameter '0.bias'"),
        ("itself", ""),
        ("made anew", ""),
        ("nested", ""),
        ("parts of one", ""),
    ),
)
def test_what_shares_memory_with_a_parameter_is_refused_with_both_names(kind: str, names: str, device: str | None) -> None:
    model = _aliased(kind)
    before = [param.data_ptr() for param in model.parameters()]
    if names:
        with pytest.raises(ValueError, match=names):
            wrap(model, device=device)
        assert [param.data_ptr() for param in model.parameters()] == before
        return
    with wrap(model, device=device) as optimizer:
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()


@pytest.mark.parametrize("when", ("before", "after"))
def test_hooks_of_the_users_optimizer_run_around_steps_and_states(when: str) -> None:
    model, _ = pair()
    inner, calls = adamw(model.parameters()), []

    def register() -> None:
        inner.register_step_pre_hook(lambda *_: calls.append("before a step"))
        inner.register_step_post_hook(lambda *_: calls.append("after a step"))
        inner.register_state_dict_pre_hook(lambda *_: calls.append("before a state"))
        inner.register_state_dict_post_hook(lambda optimizer, state: {**state, "mine": 1})
        inner.register_load_state_dict_pre_hook(lambda optimizer, state: calls.append(state["mine"]))
        inner.register_load_state_dict_post_hook(lambda *_: calls.append("after a load"))

    if when == "before":
        register()
    optimizer = wrap(model, inner)
    if when == "after":
        register()
    step(model, optimizer)
    optimizer.load_state_dict(optimizer.state_dict())
    assert calls == ["before a step", "after a step", "before a state", 1, "after a load"]


def test_a_step_that_the_user_replaced_is_refused_and_one_that_a_scheduler_counts_is_not() -> None:
    model, other = pair()
    inner = adamw(model.parameters())
    inner.step = lambda *_: None  # type: ignore[method-assign]
    with pytest.raises(ValueError, match=r"the step\(\) of this optimizer was replaced"):
        wrap(model, inner)
    inner = adamw(other.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(inner, 1, 0.5)
    optimizer = wrap(other, inner)
    step(other, optimizer)
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 5e-3


@pytest.mark.parametrize(
    ("call", "message"),
    (
        (copy.deepcopy, "cannot be copied"),
        (copy.copy, "copied or pickled"),
        (pickle.dumps, "pickled"),
        (lambda o: torch.save(o, io.BytesIO()), "pickled"),
    ),
)
def test_an_optimizer_is_not_copied_or_pickled(call: Any, message: str) -> None:
    model, _ = pair()
    optimizer = wrap(model)
    with pytest.raises(TypeError, match=message):
        call(optimizer)
    step(model, optimizer)


def test_wrong_types_are_refused() -> None:
    model, _ = pair()
    with pytest.raises(TypeError, match="no option 'stages'"):
        wrap(model, stages=3)
    with pytest.raises(TypeError, match="host_budget must be"):
        wrap(model, host_budget=True)
    with pytest.raises(TypeError, match=r"nn\.Module"):
        zk.ZeroOptimizer([model], adamw(model.parameters()))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"torch.optim.Optimizer"):
        zk.ZeroOptimizer(model, 0.1)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="units must hold"):
        wrap(model, units=[3])



def test_parameters_that_do_not_fit_are_refused() -> None:
    model, other = pair()
    with pytest.raises(ValueError, match=r"not one of model\.parameters"):
        wrap(model, adamw(other.parameters()))
    with pytest.raises(ValueError, match=r"is torch\.float64; zk trains fp32, bf16 and fp16"):
        wrap(GPT().double())
    with pytest.raises(ValueError, match="no parameters"):
        zk.ZeroOptimizer(nn.ReLU(), adamw(model.parameters()))
    with torch.device("meta"):
        meta = GPT()
    with pytest.raises(ValueError, match="meta device"):
        wrap(meta)
    sharing = GPT()
    sharing.head.weight = nn.Parameter(sharing.tokens.weight.data)
    with pytest.raises(ValueError, match=r"'tokens.weight' and 'head.weight' share memory|'head.weight' and 'tokens.weight' share memory"):
        wrap(sharing)


def test_wrapping_twice_is_refused_until_the_first_is_closed() -> None:
    model, _ = pair()
    optimizer = wrap(model)
    with pytest.raises(ValueError, match="already"):
        zk.ZeroOptimizer(model, optimizer)
    with pytest.raises(ValueError, match="belongs to another ZeroOptimizer"):
        wrap(model)
    optimizer.close()
    with wrap(model) as again:
        step(model, again)


@pytest.mark.parametrize("tier", ("host", "nvme"))
def test_a_frozen_model_needs_no_optimizer(tier: str, tmp_path: Path) -> None:
    """A reference, a reward model, a teacher: forward alone, from any tier."""
    with pytest.raises(TypeError, match="or None for a frozen model; got NoneType"):
        zk.ZeroOptimizer(GPT(), None)
    model = GPT().requires_grad_(False)
    want = model(batch(0))
    options: dict[str, Any] = {"stage": 3, "param_tier": tier, "optimizer_tier": "host", "nvme_path": str(tmp_path) if tier == "nvme" else None}
    optimizer = zk.ZeroOptimizer(model, None, **options)
    assert torch.equal(model(batch(0)), want)
    with pytest.raises(RuntimeError, match="found no gradient"):
        optimizer.step()
    optimizer.close()
    json = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}}
    engine, *_ = zk.initialize(model=model, config=json)
    assert torch.equal(engine(batch(0)), want)


def test_step_without_backward_is_an_error() -> None:
    model, _ = pair()
    optimizer = wrap(model)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="found no gradient"):
            optimizer.step()
        step(model, optimizer)


def test_a_closed_optimizer_refuses_and_leaves_the_model_usable() -> None:
    model, _ = pair()
    with wrap(model) as optimizer:
        step(model, optimizer)
    for call in (optimizer.step, optimizer.state_dict, optimizer.synchronize):
        with pytest.raises(RuntimeError, match="closed"):
            call()
    optimizer.close()
    loss_of(model, batch(0)).backward()
    assert model.head.weight.grad is not None


def test_a_model_moved_after_wrapping_is_noticed() -> None:
    model, _ = pair()
    optimizer = wrap(model)
    model.double()
    with pytest.raises(RuntimeError, match=r"moved or converted after"):
        step(model, optimizer)


def test_sparse_gradients_are_an_error_with_a_remedy() -> None:
    sparse = nn.Embedding(5, 3, sparse=True)
    with zk.ZeroOptimizer(sparse, torch.optim.SGD(sparse.parameters(), lr=0.1)), pytest.raises(TypeError, match="sparse=False"):
        sparse(torch.tensor([1])).sum().backward()


def test_state_that_does_not_fit_is_refused_before_anything_changes() -> None:
    model, other = pair()
    optimizer = wrap(model)
    step(model, optimizer)
    good = copy.deepcopy(optimizer.state_dict())
    small = wrap(other, adamw(other.blocks.parameters()))
    with pytest.raises(ValueError, match="groups of"):
        small.load_state_dict(good)
    bad = copy.deepcopy(good)
    bad["state"][3]["exp_avg"] = torch.zeros(5)
    bad["param_groups"][0]["lr"] = 77.0
    with pytest.raises(ValueError, match=r"'exp_avg' of .* has shape \(5,\)"):
        optimizer.load_state_dict(bad)
    assert optimizer.param_groups[0]["lr"] == 1e-2
    del good["state"][3]["exp_avg_sq"]
    with pytest.raises(ValueError, match="have no 'exp_avg_sq'"):
        optimizer.load_state_dict(good)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_the_device_is_named_and_must_be_there() -> None:
    model, other = pair()
    optimizer, plain = wrap(model, device="cpu"), adamw(other.parameters())
    assert step(model, optimizer) == step(other, plain)
    assert_same(model, other)
    with pytest.raises(ValueError, match="torch sees 0 CUDA devices"):
        zk.ZeroConfig(device="cuda")
    with pytest.raises(ValueError, match="'cuda' or 'cuda:N'; got 'meta'"):
        zk.ZeroConfig(device="meta")
    with pytest.raises(TypeError, match="got 0"):
        zk.ZeroConfig(device=0)  # type: ignore[arg-type]
