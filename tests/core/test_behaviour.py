"""What loops and people do around a ZeroOptimizer: each right, or refused by name."""

import copy
import functools
import gc
import math
import operator
import pickle
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_  # the function itself, before there is a ZeroOptimizer: as scripts do
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR, ReduceLROnPlateau
from torch.optim.optimizer import register_optimizer_step_post_hook

import zk
from tests.models import GPT, adamw, batch, descend, gpt, loss_of, step
from tests.parity import Lion, make_optimizer
from tests.world import call, run_world
from zk.offload.rules import StepRule

Trained = tuple[nn.Module, Any]


def pair(variant: str = "plain", layers: int = 2) -> tuple[nn.Module, nn.Module]:
    model = gpt(variant, layers)
    return model, copy.deepcopy(model)


def both(stage: int = 2, **options: Any) -> tuple[Trained, Trained]:
    """A model with its ZeroOptimizer, and the same model with AdamW."""
    model, plain = pair()
    return (model, zk.ZeroOptimizer(model, adamw(model), stage=stage, **options)), (plain, adamw(plain))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 3) -> list[float]:
    return [step(model, optimizer, seed) for seed in range(steps)]


def assert_near(model: nn.Module, plain: nn.Module) -> None:
    with zk.gather(model.parameters()):
        for got, want in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(got.detach(), want.detach(), rtol=1e-4, atol=1e-5)


def several(model: nn.Module) -> list[torch.optim.Optimizer]:
    matrices = [param for param in model.parameters() if param.ndim > 1]
    vectors = [param for param in model.parameters() if param.ndim < 2]
    groups = [{"params": vectors[:3]}, {"params": vectors[3:], "weight_decay": 0.0}]
    return [torch.optim.NAdam(matrices, lr=1e-2), torch.optim.SGD(groups, lr=1e-2, momentum=0.9)]


@pytest.mark.usefixtures("torch_engine")
def test_a_list_of_optimizers_trains_as_each_of_them() -> None:
    model, plain = pair()
    mine, theirs = several(model), several(plain)
    with zk.ZeroOptimizer(model, mine, stage=3) as optimizer:
        for seed in range(3):
            want = loss_of(plain, batch(seed))
            want.backward()
            for one in theirs:
                one.step()
                one.zero_grad()
            assert step(model, optimizer, seed) == want.item()
            mine[1].param_groups[0]["lr"] *= 0.5
            theirs[1].param_groups[0]["lr"] *= 0.5
        saved = optimizer.state_dict()
    other, _ = pair()
    with zk.ZeroOptimizer(other, several(other), stage=1) as again:
        again.load_state_dict(saved)
        assert [group["lr"] for group in again.param_groups] == [1e-2, 1.25e-3, 1e-2]


def test_gradients_that_have_left_are_read_and_clipped_by_any_norm_and_not_written_or_used_elsewhere() -> None:
    seen: list[Tensor] = []  # within backward
    for options in ({"foreach": True}, {"norm_type": float("inf")}, {"norm_type": 1.0}):
        (model, optimizer), (plain, _) = both(stage=3)
        model.head.register_full_backward_hook(lambda head, *_: seen.extend(zk.gather(head.weight, kind="grad").__enter__()))
        for one in (model, plain):
            loss_of(one, batch(0)).backward()
        torch.testing.assert_close(seen[-1], plain.head.weight.grad)
        torch.testing.assert_close(*(clip_grad_norm_(one.parameters(), 0.1, **options) for one in (model, plain)))
        torch.testing.assert_close(*(torch.cat([param.grad.view(-1) for param in one.parameters()]) for one in (model, plain)))
    grad, whole = model.head.weight.grad, plain.head.weight.grad
    assert type(grad.clone()) is torch.Tensor and float(grad.abs().max()) == float(grad.clone().abs().max())
    torch.testing.assert_close(grad.norm(p=2, dim=0), whole.norm(p=2, dim=0))
    for change in (lambda: grad[0].zero_(), lambda: grad.chunk(2)[1].mul_(2), lambda: torch.add(grad, 1, out=grad)):
        with pytest.raises(RuntimeError, match=r"zk.gather\(params, kind=.grad., write=True\)"):
            change()
    model.blocks[0].up.weight.grad = torch.full((37, 24), torch.inf)
    with pytest.raises(RuntimeError, match="error_if_nonfinite"):
        clip_grad_norm_(model.parameters(), 0.1, error_if_nonfinite=True)
    model.blocks[1].proj.weight.grad = model.blocks[0].proj.weight.grad
    with pytest.raises(RuntimeError, match="weight' is gone"):
        optimizer.step()


@pytest.mark.parametrize("stage", (1, 3))
def test_a_model_is_copied_and_pickled_as_a_plain_one_and_its_states_are_whole(stage: int) -> None:
    model, _ = pair("tied")
    want = copy.deepcopy(model.state_dict())
    with zk.ZeroOptimizer(model, adamw(model), stage=stage, dtype="bf16") as optimizer:
        assert all(torch.equal(value, want[name].bfloat16()) for name, value in model.state_dict().items())
        model.load_state_dict({name: value + 1 for name, value in want.items()})
        for group in optimizer.param_groups:
            group.update(lr=0.0, weight_decay=0.0)
        train(model, optimizer, 1)  # the masters followed
        with zk.gather(model.parameters()):
            copies, seen = (copy.deepcopy(model), pickle.loads(pickle.dumps(model))), model(batch(1))
        assert torch.equal(model.blocks[1].state_dict()["up.bias"], (want["blocks.1.up.bias"] + 1).bfloat16())
    for twin in copies:
        assert torch.equal(twin(batch(1)), seen)
        loss_of(twin, batch(1)).backward()
        assert type(twin.head.weight.grad) is Tensor and type(twin._parameters) is dict
    assert type(model._parameters) is dict and not model._forward_hooks


@pytest.mark.filterwarnings("ignore:Dynamo")
@pytest.mark.parametrize(("stage", "how"), ((2, "model"), (3, "blocks"), (3, "backward")))
def test_compiled_ones_are_compiled_once(stage: int, how: str) -> None:
    torch._dynamo.reset()
    model, plain = pair(layers=9 if how == "blocks" else 2)  # one more than there may be compilations of one function
    for block in model.blocks if how == "blocks" else ():
        block.compile(backend="eager")

    def down(one: nn.Module) -> Tensor:
        loss = loss_of(one, batch(0))
        loss.backward()
        return loss

    losses, frames, called = list[float](), list[int](), torch.compile(down, backend="eager") if how == "backward" else down
    with zk.ZeroOptimizer(model, adamw(model), stage=stage) as optimizer, torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        whole = torch.compile(model, backend="eager") if how == "model" else model
        for _ in range(2):
            losses.append(called(whole).item())
            optimizer.step()
            optimizer.zero_grad()
            frames.append(sum(torch._dynamo.utils.counters["frames"].values()))
    assert frames[0] == frames[1] or how == "backward"
    inner = adamw(plain)
    assert losses == pytest.approx(train(plain, inner, 1) + train(plain, inner, 1), rel=1e-5)


# ---- alone, and on two ranks -------------------------------------------------------------------------------------------------
def blown(_: Tensor) -> None:
    raise OSError("blown")


def failing(case: tuple[int, str]) -> None:
    """Evaluation and a failed forward change nothing. The next backward adds to what an interrupted one has made, begins anew, or a step uses it."""
    stage, then = case
    tiers = {"param_tier": "host", "optimizer_tier": "host"} if stage == 3 else {}
    (model, optimizer), (plain, inner) = both(stage, loss_scale=256.0, **tiers)
    with torch.inference_mode():
        loss_of(model, batch(7))
    for one, by in ((model, optimizer), (plain, inner)):
        descend = by.backward if by is optimizer else Tensor.backward
        handle = one.blocks[1].up.register_forward_pre_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            loss_of(one, batch(0))
        handle.remove()
        descend(loss_of(one, batch(1)))
        by.step()
        by.zero_grad()
        with torch.no_grad():
            loss_of(one.eval(), batch(7))
        one.train()
        handle = one.blocks[0].register_forward_hook(lambda _, args, output: output.register_hook(blown) and None)
        fails = loss_of(one, batch(2))
        handle.remove()
        later = loss_of(one, batch(3))
        with pytest.raises(OSError, match="blown"):
            descend(fails)
        if then == "anew":  # of a forward that came before
            by.zero_grad()
        if then != "used":
            descend(later if then == "anew" else loss_of(one, batch(3)))
        is_released = all(param.isnan().all() for param in one.blocks.parameters())
        assert is_released or then != "anew" or by is inner, "units are still gathered"
        by.step()
        by.zero_grad()
        descend(loss_of(one, batch(4)))
        by.step()
    assert_near(model, plain)
    optimizer.close()


def bad(case: tuple[int, str, float]) -> None:
    """A gradient of one rank is not finite in the second of three steps."""
    stage, dtype, value = case
    rank = dist.get_rank() if dist.is_initialized() else 0
    (model, optimizer), _ = both(stage, dtype=dtype, loss_scale=zk.DynamicLossScale(init=8.0, hysteresis=1))

    def states() -> list[Any]:
        optimizer.zero_grad()
        found = [value.clone() for value in optimizer.consolidated_state_dict("fp32", rank0_only=False).values()]
        return found + [value for state in optimizer.state_dict()["state"].values() for value in state.values()]

    for factor in (1.0, value if rank == 0 else 1.0, 1.0):
        before = states()
        optimizer.backward(loss_of(model, batch(0)) * factor)
        optimizer.step()
        has_changed = not all(map(torch.equal, before, states()))
        assert has_changed == math.isfinite(optimizer.norm) == math.isfinite(factor if rank == 0 else optimizer.norm)
    assert (optimizer.num_steps, optimizer.skipped_steps, optimizer.metrics()["loss_scale"]) == (2, 1, 4.0)
    optimizer.close()


def collected(case: tuple[int, bool]) -> None:
    stage, is_closed = case
    (model, optimizer), _ = both(stage, dtype="bf16")
    loss_of(model, batch(0)).backward()
    optimizer.step()  # gradients that have left are still referred to
    if is_closed:
        optimizer.close()
    dead = weakref.ref(model), weakref.ref(optimizer)
    del model, optimizer
    gc.collect()
    assert [reference() for reference in dead] == [None, None]


JOBS: list[tuple[Callable[[Any], None], Any]] = [
    *((failing, case) for case in ((0, "added"), (1, "used"), (2, "added"), (3, "used"), (3, "added"), (3, "anew"))),
    *((bad, case) for case in ((0, "fp32", math.nan), (1, "bf16", math.inf), (2, "fp16", math.inf), (3, "bf16", math.nan))),
    *((collected, case) for case in ((2, True), (3, False))),
]


@pytest.mark.parametrize(("function", "case"), JOBS, ids=lambda value: getattr(value, "__name__", str(value)))
def test_interrupted_backwards_lose_nothing_nan_reaches_no_state_and_models_are_collected(function: Callable[[Any], None], case: Any) -> None:
    function(case)


def test_two_ranks_too() -> None:
    assert run_world(2, call, JOBS) == [[None, None]] * len(JOBS)


def test_a_second_thread_is_refused_at_stage_3() -> None:
    (model, optimizer), _ = both(stage=3)
    inside, done, said = threading.Event(), threading.Event(), []

    def wait(*_: Any) -> None:
        inside.set()
        done.wait(30)

    handle = model.blocks[1].register_forward_pre_hook(wait)
    thread = threading.Thread(target=lambda: said.append(loss_of(model, batch(0)).item()))
    thread.start()
    inside.wait(30)
    with pytest.raises(RuntimeError, match="two threads call the model at once"):
        model(batch(0))
    done.set()
    thread.join()
    handle.remove()
    assert said == [step(model, optimizer)]


@pytest.mark.usefixtures("torch_engine")
@pytest.mark.parametrize("stage", (2, 3))
def test_two_optimizers_of_halves_of_a_model_take_turns_and_refuse_each_others_gradients(stage: int) -> None:
    """A generator, whose forward comes before the discriminator's step; and the discriminator."""
    found = []
    for wrap in (lambda model: adamw(model), lambda model: zk.ZeroOptimizer(model, adamw(model), stage=stage)):
        torch.manual_seed(0)
        maker, critic = (nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8)) for _ in range(2))
        first, second = wrap(critic), wrap(maker)
        for _ in range(3):
            fake = maker(torch.randn(6, 8))
            first.zero_grad()
            descend(first, (critic(fake.detach()) - critic(torch.randn(6, 8))).mean())
            found.append(descend(second, -critic(fake).square().mean()))  # of the new critic
    assert found[:3] == found[3:]
    first.step()
    with pytest.raises(RuntimeError, match=r"call zero_grad\(\) after step\(\) and before the next backward"):
        critic(fake.detach()).mean().backward()


# ---- what is refused ---------------------------------------------------------------------------------------------------------
class OtherDefaults(torch.optim.AdamW):
    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=1e-2, betas=(0.8, 0.9))


@pytest.mark.usefixtures("torch_engine")
def test_optimizers_of_unknown_arithmetic_are_refused_by_name_and_other_defaults_are_none() -> None:
    own = type("Unknown", (torch.optim.AdamW,), {"step": functools.wraps(torch.optim.AdamW.step)(lambda self: None)})
    unknown = ((own, "Unknown"), (Lion, "tests.parity.Lion"), (torch.optim.LBFGS, "lbfgs.LBFGS"), (torch.optim.Adafactor, "Adafactor"))
    model, plain = pair()
    for kind, name in unknown:
        with pytest.raises(TypeError, match=f"zk knows the arithmetic of .*{name}, of which it cannot tell what.*Addon.rules"):
            zk.ZeroOptimizer(model, kind(model.parameters()))
    with pytest.raises(ValueError, match="state_dtype"):
        zk.ZeroOptimizer(model, torch.optim.NAdam(model.parameters()), state_dtype="bf16")
    optimizer = zk.ZeroOptimizer(model, OtherDefaults(model.parameters()))
    assert train(model, optimizer) == train(plain, OtherDefaults(plain.parameters()))


def test_counters_of_old_steps_are_kept_for_some_from_which_others_follow() -> None:
    inner = torch.optim.NAdam([nn.Parameter(torch.ones(2))])
    (group,), early, late = inner.param_groups, StepRule(inner), StepRule(inner)
    want = early.numbers(group, 70)
    late.numbers(group, 150)
    assert late.numbers(group | {"params": [*group["params"]]}, 70) == want and len(late.known[id(group["params"][0])]) < 20
    early.names += ("another",)
    with pytest.raises(ValueError, match="options of a NAdam ask for other states than"):
        early.check()


def test_changed_groups_torchs_grad_scaler_and_a_step_between_forward_and_backward_are_refused() -> None:
    (model, optimizer), _ = both()
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(loss_of(model, batch(0))).backward()
    with pytest.raises(RuntimeError, match=r"leave torch.amp.GradScaler out: loss_scale=.* optimizer.backward\(loss\)"):
        scaler.step(optimizer)
    (group,) = optimizer.param_groups
    for wrong in ({"amsgrad": True}, {"eps": None}):
        group.update(wrong)
        with pytest.raises((ValueError, TypeError), match=r"asks for max_exp_avg_sq|number, not 'NoneType'"):
            optimizer.step()
        group.update(amsgrad=False, eps=1e-8)
    group["params"] = [*group["params"][:-1], nn.Parameter(torch.ones(2))]
    with pytest.raises(ValueError, match="param_groups have other parameters"):
        optimizer.step()
    group["params"] = list(model.parameters())
    optimizer.param_groups = [dict(group)]
    with pytest.raises(ValueError, match="or copies replaced them"):
        optimizer.step()
    optimizer.param_groups = [group]
    optimizer.step()
    with pytest.raises(RuntimeError, match=r"add_param_group\(\) on a ZeroOptimizer"):
        optimizer.add_param_group({"params": []})
    optimizer.zero_grad()
    early = loss_of(model, batch(0))
    step(model, optimizer, 1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        early.backward()


def test_states_that_do_not_fit_are_refused_before_anything_changes() -> None:
    (model, optimizer), (other, _) = both()
    train(model, optimizer, 1)
    good = optimizer.state_dict()
    bad = copy.deepcopy(good)
    bad["state"][3]["exp_avg"], bad["param_groups"][0]["lr"] = torch.zeros(5), 77.0
    with pytest.raises(ValueError, match=r"'exp_avg' of .* has shape \(5,\)"):
        optimizer.load_state_dict(bad)
    del good["state"][3]["exp_avg_sq"]
    with pytest.raises(ValueError, match="have no 'exp_avg_sq'"):
        optimizer.load_state_dict(good)
    assert optimizer.param_groups[0]["lr"] == 1e-2
    with zk.ZeroOptimizer(other, adamw(other.blocks)) as small, pytest.raises(ValueError, match="groups of"):
        small.load_state_dict(good)


def test_a_closed_optimizer_refuses_and_leaves_model_and_optimizer_usable(tmp_path: Path) -> None:
    model, _ = pair()
    drive: dict[str, Any] = {"param_tier": "nvme", "optimizer_tier": "nvme", "nvme_path": tmp_path}
    with zk.ZeroOptimizer(model, inner := adamw(model), stage=3, **drive) as optimizer:
        step(model, optimizer)
        loss = loss_of(model, batch(1))
        for refused in (inner.step, inner.state_dict):
            with pytest.raises(RuntimeError, match=r"this AdamW was given to a ZeroOptimizer"):
                refused()
        with pytest.raises(RuntimeError, match="more than one element of the written-to tensor"):
            loss_of(model, batch(0)).backward()
            torch.optim.SGD(model.parameters(), lr=0.1).step()
        with zk.gather(model.head.weight):
            optimizer.close(gather=True)
    for refused in (optimizer.step, optimizer.state_dict, optimizer.synchronize, loss.backward):
        with pytest.raises(RuntimeError, match="closed"):
            refused()
    optimizer.close()
    before = model.head.weight.clone()
    loss_of(model, batch(0)).backward()
    inner.step()
    assert before.isfinite().all() and not torch.equal(before, model.head.weight)


# ---- gather ------------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("stage", (1, 3))
def test_gather_shows_and_changes_what_was_assigned(stage: int) -> None:
    model = nn.Linear(4, 4)
    optimizer = zk.ZeroOptimizer(model, torch.optim.SGD(model.parameters(), lr=1.0), stage=stage)
    before = optimizer.consolidated_state_dict()["weight"]
    model(torch.ones(2, 4)).sum().backward()
    model.weight.grad = torch.ones(4, 4)
    with zk.gather(model.weight, kind="grad", write=True) as (grad,):
        assert grad.eq(1).all()
        grad.add_(1)
    assert model.weight.grad.eq(2).all()
    clip_grad_norm_(model.parameters(), 0.5)
    with zk.gather(model.weight, kind="grad", write=True) as (grad,):
        grad.fill_(4)  # and not what clipping has left to multiply by
    assert model.weight.grad.eq(4).all()
    model.weight.grad = torch.full((4, 4), 3.0)
    with zk.gather(model.weight, kind="grad") as (grad,):
        assert grad.eq(3).all()
    optimizer.step()
    assert torch.equal(optimizer.consolidated_state_dict()["weight"], before - 3)
    with zk.gather(model.weight, kind="master", write=True) as (master,):
        master.fill_(5)
    assert stage == 3 or model.weight.eq(5).all()  # at once
    with pytest.raises(ValueError, match="a parameter has no 'exp_avg': it has param, grad, master"), zk.gather(model.weight, kind="exp_avg"):
        pytest.fail("there are no moments")
    for wrong in (model, [model], "weight", model.weight.data, model.state_dict().values()):
        with pytest.raises(TypeError, match=r"takes parameters, .*; got (Linear|str|Tensor)"), zk.gather(wrong):
            pytest.fail("none is a parameter")


@pytest.mark.parametrize("stage", (2, 3))
def test_what_is_written_before_an_error_is_kept_and_its_masters_follow(stage: int) -> None:
    zk.ZeroOptimizer(model := nn.Linear(4, 4), torch.optim.SGD(model.parameters(), lr=1.0), stage=stage, dtype="bf16")
    with pytest.raises(KeyError), zk.gather(model.parameters(), write=stage == 3), torch.no_grad():
        model.weight.fill_(2)
        raise KeyError
    with zk.gather([model.weight] * 2, kind="master", write=True) as (master, same):
        assert same.eq(2).all() and master is same


def test_what_is_gathered_shows_what_is_written_and_a_step_that_is_made_inside(tmp_path: Path) -> None:
    (model, optimizer), _ = both(stage=3, param_tier="nvme", optimizer_tier="nvme", nvme_path=tmp_path, overlap_step=True)
    with zk.gather(model.parameters(), write=True) as values, torch.no_grad():
        for value in values:
            value.add_(1)
        written = [value.clone() for value in values]
        with zk.gather(model.parameters()) as again:
            assert all(map(torch.equal, again, written))
    with zk.gather(model.parameters()) as values:
        assert all(map(torch.equal, values, written))
        step(model, optimizer)
        inside = [value.clone() for value in values]
    with zk.gather(model.parameters()) as values:
        assert all(map(torch.equal, values, inside)) and not any(map(torch.equal, values, written))
    with pytest.raises(RuntimeError, match="was changed, and at stage 3"), zk.gather(model.head.weight), torch.no_grad():
        model.head.weight.add_(1)


# ---- the optimizer protocol --------------------------------------------------------------------------------------------------
SCHEDULES: dict[tuple[str, str], Callable[..., Any]] = {  # of the user's optimizer or zk's; numbers of the last two follow each step's rate
    ("zk", "AdamW"): lambda o: OneCycleLR(o, 0.1, total_steps=10),
    ("inner", "NAdam"): lambda o: LambdaLR(o, lambda t: 1 / (t + 1)),
    ("inner", "ASGD"): lambda o: ReduceLROnPlateau(o, patience=0),
}


@pytest.mark.usefixtures("torch_engine")
@pytest.mark.parametrize(("whose", "kind"), SCHEDULES)
def test_schedulers_and_hooks_of_all_optimizers_work(whose: str, kind: str, recwarn: pytest.WarningsRecorder, request: pytest.FixtureRequest) -> None:
    model, plain = pair()
    (inner, theirs), make = (make_optimizer(kind, list(one.parameters())) for one in (model, plain)), SCHEDULES[whose, kind]
    first, stepped = make(inner) if whose == "inner" else None, []
    request.addfinalizer(register_optimizer_step_post_hook(lambda one, *_: stepped.append(one)).remove)
    with zk.ZeroOptimizer(model, inner) as optimizer:
        assert isinstance(optimizer, torch.optim.Optimizer) and all(map(operator.is_, optimizer.param_groups, inner.param_groups))
        schedules = [first or make(optimizer), make(theirs)]
        for seed in range(4):
            assert step(model, optimizer, seed) == step(plain, theirs, seed)
            for schedule in schedules:
                schedule.step(*([1.0] if kind == "ASGD" else []))
    assert stepped == [optimizer, theirs] * 4
    assert all(map(torch.equal, model.parameters(), plain.parameters()))
    assert not [w for w in recwarn if "lr_scheduler" in str(w.message)]


@pytest.mark.usefixtures("torch_engine")
def test_hooks_and_closures_run_around_steps_and_states() -> None:
    model, plain = pair()
    inner, calls = adamw(model), []

    def register(on: torch.optim.Optimizer, name: str, value: Any) -> None:
        on.register_step_pre_hook(lambda *_: calls.append(f"before a step of {name}"))
        on.register_step_post_hook(lambda *_: calls.append(f"after a step of {name}"))
        on.register_state_dict_pre_hook(lambda *_: calls.append(f"before a state of {name}"))
        on.register_state_dict_post_hook(lambda _, state: {**state, name: value})
        on.register_load_state_dict_pre_hook(lambda _, state: calls.append(state[name]))
        on.register_load_state_dict_post_hook(lambda *_: calls.append(f"after a load of {name}"))

    def closure() -> Tensor:
        calls.append("closure")
        assert torch.is_grad_enabled()
        optimizer.zero_grad()
        loss = loss_of(model, batch(1))
        loss.backward()
        return loss

    register(inner, "mine", 1)
    with zk.ZeroOptimizer(model, inner) as optimizer:
        assert optimizer.step(closure).item() == step(plain, adamw(plain), 1)
        optimizer.load_state_dict(optimizer.state_dict())
        assert calls == ["before a step of mine", "closure", "after a step of mine", "before a state of mine", 1, "after a load of mine"]
        register(optimizer, "zk", 2)
        step(model, optimizer)
        optimizer.load_state_dict(optimizer.state_dict())
    assert {"before a step of zk", "after a step of zk", "before a state of zk", 2, "after a load of zk"} <= {*calls}


@pytest.mark.usefixtures("torch_engine")
@pytest.mark.parametrize("kind", ("Adam", "SGD", "NAdam"))  # Adam's is of amsgrad
def test_states_come_from_torch_in_mid_training_and_go_back_bit_for_bit(kind: str) -> None:
    model, other = pair()
    inner, theirs = (make_optimizer(kind, list(one.parameters())) for one in (model, other))
    assert train(model, inner) == train(other, theirs)  # begun by torch
    optimizer = zk.ZeroOptimizer(model, inner)
    assert train(model, optimizer) == train(other, theirs)
    state, weights = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(model.state_dict())
    want = train(model, optimizer)
    other.load_state_dict(weights)
    theirs.load_state_dict(state)
    given, (_, third) = copy.deepcopy(theirs.state_dict()), pair()
    assert train(other, theirs) == want
    again = zk.ZeroOptimizer(third, make_optimizer(kind, list(third.parameters())), stage=3, param_tier="host")
    again.param_groups[0]["lr"] = 5.0
    third.load_state_dict(weights)
    again.load_state_dict(given)
    for kept in given["state"].values():
        kept.get("step", torch.zeros(())).fill_(77)  # as the optimizer that it is of may count on
    assert again.param_groups[0]["lr"] == 1e-2 and train(third, again) == want


@pytest.mark.usefixtures("torch_engine")
@pytest.mark.parametrize("kind", ("AdamW", "RMSprop", "NAdam", "Adagrad"))
def test_states_of_a_parameter_without_dimensions_are_no_counters(kind: str) -> None:
    def trained(begun: Any = None) -> tuple[nn.Module, Any]:
        torch.manual_seed(0)
        model: Any = nn.Sequential(nn.Linear(4, 4))
        model.scale = nn.Parameter(torch.tensor(2.0))  # the first one
        model.register_forward_hook(lambda module, _, out: out * module.scale)
        inner = getattr(torch.optim, kind)(model.parameters(), lr=1e-2)
        if begun is None:
            return model, inner
        optimizer = zk.ZeroOptimizer(model, inner, stage=2)
        model.load_state_dict(begun[0])
        optimizer.load_state_dict(begun[1])
        return model, optimizer

    def losses(model: nn.Module, optimizer: Any) -> list[float]:
        return [descend(optimizer, model(torch.ones(2, 4)).square().mean()) for _ in range(3)]

    plain, theirs = trained()
    taken, inner = trained()
    losses(plain, theirs), losses(taken, inner)
    loaded = trained(copy.deepcopy((plain.state_dict(), theirs.state_dict())))
    assert losses(taken, zk.ZeroOptimizer(taken, inner)) == losses(*loaded) == losses(plain, theirs)


def test_a_frozen_model_needs_no_optimizer(tmp_path: Path) -> None:
    """A reference, a reward model, a teacher: forward alone, from any tier."""
    with pytest.raises(TypeError, match="or None for a frozen model; got NoneType"):
        zk.ZeroOptimizer(GPT(), None)
    model = GPT().requires_grad_(False)
    want = model(batch(0))
    for tiers in ({"param_tier": "host"}, {"param_tier": "nvme", "nvme_path": str(tmp_path)}):
        with zk.ZeroOptimizer(model, None, stage=3, optimizer_tier="host", **tiers) as optimizer:
            assert torch.equal(model(batch(0)), want)
            with pytest.raises(RuntimeError, match="found no gradient"):
                optimizer.step()
            optimizer.close(gather=True)


@pytest.mark.usefixtures("torch_engine")
@pytest.mark.parametrize("name", ("AdamW", "NAdam"))
def test_torchs_default_dtype_is_not_that_of_states_and_counts(name: str, request: pytest.FixtureRequest) -> None:
    """bf16 has no 257. A part of training is torch's own."""
    request.addfinalizer(lambda: torch.set_default_dtype(torch.float32))
    torch.set_default_dtype(torch.bfloat16)
    model = nn.Sequential(*(nn.Linear(8, 8, bias=False, dtype=torch.float32) for _ in range(2)))
    plain = copy.deepcopy(model)
    mine, theirs = (make_optimizer(name, list(one.parameters())) for one in (model, plain))
    for number in range(5):
        x = torch.randn(4, 8, dtype=torch.float32)
        for one, by in ((model, mine), (plain, theirs)):
            descend(by, one(x).square().mean())
            if number == 0 and name == "AdamW":
                state = by.state_dict()
                for values in state["state"].values():
                    values["step"].fill_(255.0)
                by.load_state_dict(state)
        if number == 0:
            mine = zk.ZeroOptimizer(model, mine)
        if number == 2:
            mine.load_state_dict(mine.state_dict())
    assert all(map(torch.equal, model.parameters(), plain.parameters())) and mine.state_dict()["state"][0]["step"] in (5, 259)


@pytest.mark.parametrize(("limits", "stage"), (([0.05], 1), ([0.5, 0.05, 1e9, math.inf], 3)))
def test_norms_are_torchs_and_of_several_clips_before_a_step_the_smallest_counts(limits: list[float], stage: int) -> None:
    (model, optimizer), (plain, inner) = both(stage)
    for seed in range(3):
        norms = []
        for one, by in ((model, optimizer), (plain, inner)):
            loss_of(one, batch(seed + 9)).backward()
            one.zero_grad()  # drops what has left
            loss_of(one, batch(seed)).backward()
            one.head.weight.grad.mul_(2)  # alone
            clip = optimizer.clip_grad_norm_ if by is optimizer and seed < 2 else lambda *given, one=one: clip_grad_norm_(one.parameters(), *given)
            norms.append([clip(limit).item() for limit in limits])
            by.step()
            by.zero_grad()
        assert norms[0] == pytest.approx(norms[1], rel=1e-4) and norms[0][0] > 0.05
    assert_near(model, plain)


def test_torchs_clip_takes_sums_in_fp32_at_every_stage() -> None:
    norms = set()
    for stage in (0, 1, 2, 3):
        (model, optimizer), _ = both(stage, dtype="bf16")
        for seed in range(3):
            optimizer.backward(loss_of(model, batch(seed)))
        norms.add(float(clip_grad_norm_(model.parameters(), 0.1)))
    assert len(norms) == 1
