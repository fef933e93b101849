"""What loops and people do around a ZeroOptimizer: each right, or refused by name."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

import zk
from tests.models import GPT, batch, loss_of, step

STAGES = (0, 1, 2, 3)


def pair(variant: str = "plain", layers: int = 2) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    model = GPT(variant, layers=layers)
    return model, copy.deepcopy(model)


def adamw(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 3) -> list[float]:
    return [step(model, optimizer, seed) for seed in range(steps)]


def several(model: nn.Module) -> list[torch.optim.Optimizer]:
    matrices = [param for param in model.parameters() if param.ndim > 1]
    vectors = [param for param in model.parameters() if param.ndim < 2]
    groups = [{"params": vectors[:3]}, {"params": vectors[3:], "weight_decay": 0.0}]
    return [torch.optim.NAdam(matrices, lr=1e-2), torch.optim.SGD(groups, lr=1e-2, momentum=0.9)]


@pytest.mark.usefixtures("torch_engine")
@pytest.mark.parametrize("stage", (1, 3))
def test_a_list_of_optimizers_with_a_schedule_of_one(stage: int, recwarn: pytest.WarningsRecorder) -> None:
    model, plain = pair()
    mine, theirs = several(model), several(plain)
    with zk.ZeroOptimizer(model, mine, stage=stage) as optimizer:
        schedules = [torch.optim.lr_scheduler.ExponentialLR(one, 0.5) for one in (mine[1], theirs[1])]
        for seed in range(3):
            got = step(model, optimizer, seed)
            want = loss_of(plain, batch(seed))
            want.backward()
            for one in theirs:
                one.step()
                one.zero_grad()
            for schedule in schedules:
                schedule.step()
            assert got == want.item()
        saved = optimizer.state_dict()
        assert [group["lr"] for group in optimizer.param_groups] == [1e-2, 1.25e-3, 1.25e-3]
        with pytest.raises(RuntimeError, match="was given to a ZeroOptimizer"):
            mine[0].step()
    model, _ = pair()
    with zk.ZeroOptimizer(model, several(model), stage=3) as other:
        other.load_state_dict(saved)
        assert other.param_groups[1]["lr"] == 1.25e-3
    assert not [warning for warning in recwarn if "lr_scheduler" in str(warning.message)]


def test_torchs_grad_scaler_is_refused_with_what_does_the_same() -> None:
    model, _ = pair()
    with zk.ZeroOptimizer(model, adamw(model)) as optimizer:
        scaler = torch.amp.GradScaler("cpu")
        scaler.scale(loss_of(model, batch(0))).backward()
        with pytest.raises(RuntimeError, match=r"leave torch.amp.GradScaler out: loss_scale=.* optimizer.backward\(loss\)"):
            scaler.step(optimizer)


@pytest.mark.parametrize("options", ({"foreach": True}, {"norm_type": float("inf")}, {"norm_type": 1.0}))
def test_torchs_clip_by_any_norm(options: dict[str, Any]) -> None:
    model, plain = pair()
    with zk.ZeroOptimizer(model, adamw(model), stage=3):
        for one in (model, plain):
            loss_of(one, batch(0)).backward()
        got, want = (clip_grad_norm_(one.parameters(), 0.1, **options) for one in (model, plain))
        torch.testing.assert_close(got, want)
        for param, other in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(param.grad.clone(), other.grad)
        model.blocks[0].up.weight.grad = torch.full((37, 24), torch.inf)
        with pytest.raises(RuntimeError, match="error_if_nonfinite"):
            clip_grad_norm_(model.parameters(), 0.1, error_if_nonfinite=True)


def test_a_view_of_a_gradient_is_read_and_not_written() -> None:
    model, plain = pair()
    with zk.ZeroOptimizer(model, adamw(model)):
        for one in (model, plain):
            loss_of(one, batch(0)).backward()
        got, want = (torch.cat([param.grad.view(-1) for param in one.parameters()]) for one in (model, plain))
        torch.testing.assert_close(got, want)
        grad = model.head.weight.grad
        for change in (lambda: grad[0].zero_(), lambda: grad.chunk(2)[1].mul_(2), lambda: torch.add(grad, 1, out=grad)):
            with pytest.raises(RuntimeError, match=r"zk.gather\(params, kind=.grad., write=True\)"):
                change()


def test_what_stands_for_a_gradient_is_not_one_elsewhere_or_later() -> None:
    model, _ = pair()
    with zk.ZeroOptimizer(model, adamw(model)) as optimizer:
        up, down = (block.up.weight for block in model.blocks)
        for is_later in (False, True):
            loss_of(model, batch(0)).backward()
            kept = up.grad
            if is_later:
                optimizer.zero_grad()
            (up if is_later else down).grad = kept
            with pytest.raises(RuntimeError, match="weight' is gone"):
                optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("stage", STAGES)
def test_a_model_is_copied_and_pickled_as_a_plain_one(stage: int) -> None:
    model, plain = pair()
    with zk.ZeroOptimizer(model, adamw(model), stage=stage) as optimizer:
        train(model, optimizer, 1)
        with zk.gather(model.parameters()):
            copies = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
            want = model(batch(1))
        for twin in copies:
            assert torch.equal(twin(batch(1)), want)
            loss_of(twin, batch(1)).backward()
            assert type(twin.head.weight.grad) is Tensor and type(twin._parameters) is dict
        losses = train(model, optimizer, 2)
    train(plain, inner := adamw(plain), 1)
    assert losses == pytest.approx(train(plain, inner, 2), rel=1e-5)
    assert type(model._parameters) is dict and not model._forward_hooks


@pytest.mark.parametrize("stage", STAGES)
def test_states_of_the_model_are_whole(stage: int) -> None:
    model, _ = pair("tied")
    want = copy.deepcopy(model.state_dict())
    with zk.ZeroOptimizer(model, adamw(model), stage=stage, dtype="bf16") as optimizer:
        assert all(torch.equal(value, want[name].bfloat16()) for name, value in model.state_dict().items())
        model.load_state_dict({name: value + 1 for name, value in want.items()})
        for group in optimizer.param_groups:
            group.update(lr=0.0, weight_decay=0.0)
        train(model, optimizer, 1)  # the masters followed
        got = model.blocks[1].state_dict()["up.bias"]
    assert torch.equal(got, (want["blocks.1.up.bias"] + 1).bfloat16())


@pytest.mark.parametrize("how", ("blocks", "model"))
@pytest.mark.parametrize("stage", (2, 3))
def test_compiled_ones_are_compiled_once(stage: int, how: str) -> None:
    torch._dynamo.reset()
    model, plain = pair(layers=9)
    if how == "blocks":
        for block in model.blocks:
            block.compile(backend="eager")
    with zk.ZeroOptimizer(model, adamw(model), stage=stage) as optimizer:
        called = torch.compile(model, backend="eager") if how == "model" else model
        with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
            losses = train(called, optimizer, 1)
            before = sum(torch._dynamo.utils.counters["frames"].values())
            losses += train(called, optimizer, 1)
        assert sum(torch._dynamo.utils.counters["frames"].values()) == before
    inner = adamw(plain)
    assert losses == pytest.approx(train(plain, inner, 1) + train(plain, inner, 1), rel=1e-5)


@pytest.mark.filterwarnings("ignore:Dynamo")
@pytest.mark.parametrize("stage", (2, 3))
def test_backward_may_be_within_what_is_compiled(stage: int) -> None:
    torch._dynamo.reset()
    model, plain = pair()

    @torch.compile(backend="eager")
    def descend(one: nn.Module, seed: int) -> Tensor:
        loss = loss_of(one, batch(seed))
        loss.backward()
        return loss

    with zk.ZeroOptimizer(model, adamw(model), stage=stage) as optimizer:
        losses = []
        for seed in range(2):
            losses.append(descend(model, seed).item())
            optimizer.step()
            optimizer.zero_grad()
    assert losses == pytest.approx(train(plain, adamw(plain), 2), rel=1e-5)


@pytest.mark.parametrize("stage", (2, 3))
def test_evaluation_and_errors_between_steps_change_nothing(stage: int) -> None:
    model, plain = pair()
    with zk.ZeroOptimizer(model, adamw(model), stage=stage) as optimizer:
        with torch.inference_mode():
            loss_of(model, batch(7))
        handle = model.blocks[1].up.register_forward_pre_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            loss_of(model, batch(0))
        handle.remove()
        first = step(model, optimizer)
        with torch.no_grad():
            loss_of(model.eval(), batch(7))
        model.train()
        assert [first, *train(model, optimizer, 2)] == pytest.approx([step(plain, inner := adamw(plain)), *train(plain, inner, 2)], rel=1e-5)


def test_a_failed_step_is_not_trained_on_until_states_are_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = pair()
    with zk.ZeroOptimizer(model, adamw(model), stage=3) as optimizer:
        train(model, optimizer, 1)
        saved, weights = optimizer.state_dict(), model.state_dict()
        store = optimizer._runtime.stores[-1]
        loss_of(model, batch(1)).backward()
        with monkeypatch.context() as patch, pytest.raises(OSError, match="no space"):
            patch.setattr(store, "update", lambda *_: (_ for _ in ()).throw(OSError("no space")))
            optimizer.step()
        for call in (lambda: model(batch(0)), optimizer.step, optimizer.state_dict):
            with pytest.raises(RuntimeError, match="a step failed half-way"):
                call()
        optimizer.load_state_dict(saved)
        model.load_state_dict(weights)
        train(model, optimizer, 1)


@pytest.mark.parametrize("stage", STAGES)
def test_a_backward_that_fails_loses_no_gradient(stage: int) -> None:
    class Fuse(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
            raise OSError("blown")

    model, plain = pair()
    with zk.ZeroOptimizer(model, adamw(model), stage=stage, loss_scale=256.0) as optimizer:
        inner = adamw(plain)
        for one, by in ((model, optimizer), (plain, inner)):
            descend = by.backward if by is optimizer else Tensor.backward
            handle = one.blocks[0].register_forward_hook(lambda _, args, output: Fuse.apply(output))
            with pytest.raises(OSError, match="blown"):
                descend(loss_of(one, batch(2)))
            handle.remove()
            descend(loss_of(one, batch(3)))
            by.step()
            by.zero_grad()
    for got, want in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def test_a_second_thread_is_refused_at_stage_3() -> None:
    model, _ = pair()
    inside, done, said = threading.Event(), threading.Event(), []

    def wait(*_: Any) -> None:
        inside.set()
        done.wait(30)

    with zk.ZeroOptimizer(model, adamw(model), stage=3) as optimizer:
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


class Unknown(torch.optim.AdamW):
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        return super().step(closure)


class OtherDefaults(torch.optim.AdamW):
    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=1e-2, betas=(0.8, 0.9))


@pytest.mark.parametrize(("kind", "name"), [(Unknown, "Unknown"), (torch.optim.LBFGS, "lbfgs.LBFGS")])
def test_optimizers_of_unknown_arithmetic_are_refused_by_name(kind: Callable[..., Any], name: str) -> None:
    model = nn.Linear(4, 4, bias=False)
    with pytest.raises(TypeError, match=f"zk knows the arithmetic of .*{name}, of which it cannot tell what.*Addon.rules"):
        zk.ZeroOptimizer(model, kind(model.parameters()))


@pytest.mark.usefixtures("torch_engine")
def test_a_subclass_with_other_defaults_is_its_base() -> None:
    model, plain = pair()
    with zk.ZeroOptimizer(model, OtherDefaults(model.parameters())) as optimizer:
        assert train(model, optimizer) == train(plain, OtherDefaults(plain.parameters()))


def test_changed_groups_are_refused() -> None:
    model, _ = pair()
    with zk.ZeroOptimizer(model, adamw(model)) as optimizer:
        loss_of(model, batch(0)).backward()
        (group,) = optimizer.param_groups
        group["amsgrad"] = True
        with pytest.raises(ValueError, match="asks for max_exp_avg_sq"):
            optimizer.step()
        group.update(amsgrad=False, params=group["params"][:-1])
        with pytest.raises(ValueError, match="param_groups have other parameters"):
            optimizer.step()
        group["params"] = list(model.parameters())
        optimizer.step()
        with pytest.raises(RuntimeError, match=r"add_param_group\(\) on a ZeroOptimizer"):
            optimizer.add_param_group({"params": []})


def test_hooks_of_the_users_optimizer_run_and_schedules_may_have_either() -> None:
    model, _ = pair()
    inner, calls = adamw(model), []
    with zk.ZeroOptimizer(model, inner) as optimizer:
        inner.register_step_pre_hook(lambda *_: calls.append("before"))
        optimizer.register_state_dict_post_hook(lambda _, state: {**state, "mine": 1})
        optimizer.register_load_state_dict_pre_hook(lambda _, state: calls.append(state["mine"]))
        torch.optim.lr_scheduler.StepLR(optimizer, 1)
        train(model, optimizer, 1)
        optimizer.load_state_dict(optimizer.state_dict())
    assert calls == ["before", 1]


@pytest.mark.parametrize("close", (False, True))
@pytest.mark.parametrize("stage", (2, 3))
def test_models_are_collected(stage: int, close: bool) -> None:
    model, _ = pair()
    optimizer = zk.ZeroOptimizer(model, adamw(model), stage=stage)
    loss_of(model, batch(0)).backward()
    optimizer.step()  # gradients that have left are still referred to
    if close:
        optimizer.close()
    dead = weakref.ref(model), weakref.ref(optimizer)
    del model, optimizer
    gc.collect()
    assert [reference() for reference in dead] == [None, None]


def test_states_that_do_not_fit_are_refused_before_anything_changes() -> None:
    model, other = pair()
    with zk.ZeroOptimizer(model, adamw(model)) as optimizer:
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
        with (
            zk.ZeroOptimizer(other, adamw(other.blocks)) as small,
            pytest.raises(ValueError, match="groups of"),
        ):
            small.load_state_dict(good)


def test_a_field_of_an_add_on_is_gathered_by_its_name() -> None:
    class Average(zk.Addon):
        def codec(self, unit: Any, codec: Any) -> Any:
            return type(codec)({**codec.fields, "average": torch.float32}) if unit.is_trained else codec

        def updated(self, store: Any) -> None:
            for number in range(len(store.bounds)):
                with store.open(number) as fields:
                    fields["average"].lerp_(store.codec.read(fields, "master"), 0.5)

    model, _ = pair()
    with zk.ZeroOptimizer(model, adamw(model), stage=3, addons=[Average()]) as optimizer:
        train(model, optimizer, 1)
        with zk.gather(model.parameters(), kind="average") as averages, zk.gather(model.parameters()):
            for average, param in zip(averages, model.parameters(), strict=True):
                torch.testing.assert_close(average, param / 2)


def test_states_are_written_after_an_update_in_flight() -> None:
    model = GPT()
    store = zk.ZeroOptimizer(model, adamw(model), stage=2)._runtime.stores[0]
    order: list[str] = []
    store.updating = lambda: order.append("updated")
    store.write("exp_avg", 0, torch.ones(()))
    assert order == ["updated"] and store.read("exp_avg", 0).eq(1).all()


@pytest.mark.parametrize("stage", (0, 1, 2, 3))
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
    model.weight.grad = torch.full((4, 4), 3.0)
    with zk.gather(model.weight, kind="grad") as (grad,):
        assert grad.eq(3).all()
    optimizer.step()
    assert torch.equal(optimizer.consolidated_state_dict()["weight"], before - 3)


def test_torchs_clip_takes_sums_in_fp32_at_every_stage() -> None:
    def norm(stage: int) -> float:
        torch.manual_seed(0)
        model = GPT()
        optimizer = zk.ZeroOptimizer(model, adamw(model), stage=stage, dtype="bf16")
        for seed in range(3):
            optimizer.backward(loss_of(model, batch(seed)))
        return float(clip_grad_norm_(model.parameters(), 0.1))

    assert len({norm(stage) for stage in (0, 1, 2, 3)}) == 1


@pytest.mark.parametrize("how", ("a graph", "an error"))
def test_what_backward_has_left_is_collected(how: str) -> None:
    def trained(is_wrapped: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = zk.ZeroOptimizer(model, inner, stage=2, units=[nn.Linear]) if is_wrapped else inner
        loss = model(torch.ones(2, 4)).square().sum()
        if how == "a graph":
            loss.backward(create_graph=True)
        else:
            failing = model[0].weight.register_hook(lambda grad: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                loss.backward()
            failing.remove()
            for param in model.parameters():
                param.grad = torch.ones_like(param)
        optimizer.step()
        return [param.detach().clone() for param in model.parameters()]

    assert all(map(torch.allclose, trained(True), trained(False)))
