"""What people do to optimizers and models besides training: errors half-way, copies, late changes. All right, or refused with a remedy."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

import zk
from tests.models import GPT, batch, loss_of, step
from tests.programs import Program, rank_of
from tests.world import free_port, run_world

ROOT = Path(__file__).parent.parent


def wrap(model: nn.Module, stage: int = 3, **options: object) -> zk.ZeroOptimizer:
    tier = {"param_tier": "host"} if stage == 3 else {}
    return zk.ZeroOptimizer(model, torch.optim.AdamW(model.parameters(), lr=1e-2), **{"stage": stage, "optimizer_tier": "host", **tier, **options})


def weights(model: nn.Module) -> list[Tensor]:
    with zk.gather(model.parameters()):
        return [param.detach().clone() for param in model.parameters()]


def pair() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    model = GPT(layers=3)
    return model, copy.deepcopy(model)


class Fuse(torch.autograd.Function):
    """The identity, whose backward fails when it is lit."""

    lit = False

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> Tensor:
        if Fuse.lit:
            raise RuntimeError("out of memory")
        return grad


def fail_in_backward(model: nn.Module, seed: int) -> None:
    handle = model.blocks[1].register_forward_hook(lambda _module, _args, output: Fuse.apply(output))
    loss = loss_of(model, batch(seed))
    Fuse.lit = True
    try:
        with pytest.raises(RuntimeError, match="out of memory"):
            loss.backward()
    finally:
        Fuse.lit = False
        handle.remove()


# ---- cases for any number of ranks -------------------------------------------------------------------------------------------------


def errors_in_backward_lose_nothing() -> None:
    """torch keeps the gradients that an interrupted backward has made; the next backward adds to them, or a step uses them."""
    for stage, again in ((0, True), (1, False), (2, True), (2, False), (3, True), (3, False)):
        model, other = pair()
        with wrap(model, stage) as optimizer:
            plain = torch.optim.AdamW(other.parameters(), lr=1e-2)
            for trained, update in ((model, optimizer), (other, plain)):
                step(trained, update, 1)
                fail_in_backward(trained, 2)
                if again:
                    loss_of(trained, batch(3)).backward()
                update.step()
                update.zero_grad()
                step(trained, update, 4)
            for got, want in zip(weights(model), weights(other), strict=True):
                torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def state_from_before_the_first_step_starts_anew() -> None:
    for stage in (0, 1, 2, 3):
        model, other = pair()
        with wrap(model, stage) as optimizer:
            plain = torch.optim.AdamW(other.parameters(), lr=1e-2)
            for trained, update in ((model, optimizer), (other, plain)):
                saved = copy.deepcopy(update.state_dict())
                step(trained, update, 1)
                step(trained, update, 2)
                update.load_state_dict(saved)
                step(trained, update, 3)
            for got, want in zip(weights(model), weights(other), strict=True):
                torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def closing_with_gather_gives_the_model_back() -> None:
    model, _ = pair()
    optimizer = wrap(model, 3)
    step(model, optimizer)
    want = weights(model)
    optimizer.close(gather=True)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), want, strict=True))
    with wrap(model, 3) as again:
        step(model, again)


def gradients_of_inputs_and_parameters_can_be_asked_for() -> None:
    model, other = pair()
    with wrap(model, 3):
        x, y = (torch.ones(2, 4, 24, requires_grad=True) for _ in range(2))
        (got,) = torch.autograd.grad(model.blocks[0](x).sum(), x)
        (want,) = torch.autograd.grad(other.blocks[0](y).sum(), y)
        assert torch.equal(got, want)
        grads = torch.autograd.grad(loss_of(model, batch(0)), list(model.parameters()))
        wanted = torch.autograd.grad(loss_of(other, batch(0)), list(other.parameters()))
        assert all(torch.allclose(a, b, rtol=1e-4, atol=1e-6) for a, b in zip(grads, wanted, strict=True))


def a_model_loads_and_stays_where_it_is() -> None:
    model, other = pair()
    with torch.no_grad():
        for param in other.parameters():
            param.add_(1)
    with wrap(model, 3, dtype="bf16") as optimizer:
        step(model, optimizer)
        assert model.load_state_dict(other.state_dict()).missing_keys == []
        assert all(torch.equal(a, b.bfloat16()) for a, b in zip(weights(model), other.parameters(), strict=True))
        before = weights(model)
        step(model, optimizer, 1)
        assert any(not torch.equal(a, b) for a, b in zip(weights(model), before, strict=True))
        assert model.to("cpu") is model


def changed_groups_are_refused_on_every_rank() -> None:
    model, _ = pair()
    with wrap(model, 2) as optimizer:
        step(model, optimizer)
        loss_of(model, batch(1)).backward()
        params = optimizer.param_groups[0]["params"]
        optimizer.param_groups[0]["params"] = params[:-1]
        with pytest.raises(ValueError, match="param_groups have other parameters than"):
            optimizer.step()
        optimizer.param_groups[0]["params"] = params
        optimizer.param_groups[0]["amsgrad"] = True
        with pytest.raises(ValueError, match="asks for max_exp_avg_sq"):
            optimizer.step()
        optimizer.param_groups[0]["amsgrad"] = False
        optimizer.step()


CASES = (
    errors_in_backward_lose_nothing,
    state_from_before_the_first_step_starts_anew,
    closing_with_gather_gives_the_model_back,
    gradients_of_inputs_and_parameters_can_be_asked_for,
    a_model_loads_and_stays_where_it_is,
    changed_groups_are_refused_on_every_rank,
)


def call(case: Callable[[], None]) -> str:
    case()
    return ""


@pytest.mark.parametrize("world", (1, 2))
def test_any_number_of_ranks(world: int) -> None:
    assert dict(zip([case.__name__ for case in CASES], run_world(world, call, CASES), strict=True)) == {case.__name__: [""] * world for case in CASES}


def nothing_stays_behind(_: object) -> str:
    """Models and optimizers are collected, closed or not, at every stage."""
    for stage in (2, 3):
        for close in (True, False):
            model = GPT()
            optimizer = wrap(model, stage, dtype="bf16")
            loss_of(model, batch(0)).backward()
            optimizer.step()
            if close:
                optimizer.close()
            dead = weakref.ref(model), weakref.ref(optimizer)
            del model, optimizer
            gc.collect()
            if any(reference() is not None for reference in dead):
                return f"stage {stage}, close={close}: {dead} on rank {dist.get_rank() if dist.is_initialized() else 0}"
    return ""


@pytest.mark.parametrize("world", (1, 2))
def test_models_are_collected(world: int) -> None:
    assert run_world(world, nothing_stays_behind, [None]) == [[""] * world]


# ---- copies ------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", (None, "bf16"))
def test_averaged_and_pickled_copies_are_plain_models(dtype: str | None, tmp_path: Path) -> None:
    model, _ = pair()
    optimizer = wrap(model, 2, dtype=dtype)
    average = AveragedModel(model)
    step(model, optimizer)
    average.update_parameters(model)
    ids = batch(0)
    torch.testing.assert_close(average(ids), model(ids))
    torch.save(model, tmp_path / "model.pt")
    again = torch.load(tmp_path / "model.pt", weights_only=False)
    assert torch.equal(again(ids), model(ids))
    loss_of(again, ids).backward()
    assert again.head.weight.grad is not None and pickle.dumps(again)
    optimizer.step if dtype else step(model, optimizer)


def test_the_wrapped_optimizer_says_who_steps() -> None:
    model, _ = pair()
    inner = torch.optim.AdamW(model.parameters())
    with zk.ZeroOptimizer(model, inner), pytest.raises(RuntimeError, match="call step\\(\\) of that one"):
        inner.step()
    inner.step()


# ---- processes ---------------------------------------------------------------------------------------------------------------------


def test_ranks_end_well_without_any_farewell() -> None:
    """No close(), no destroy_process_group(): three times, as what went wrong went wrong in one of three; once as torchrun starts them.

    There the store is not a rank's but that of the agent, which outlives them.
    """
    program = (ROOT / "README.md").read_text().split("```python\n")[1].split("```")[0].replace('stage=3, dtype="bf16", param_tier="host"', "stage=2")
    # the interpreter's own end; what was imported before is not looked through for garbage
    program += "\nimport ctypes, gc\ngc.freeze()\nctypes.pythonapi.Py_Exit(0)\n"
    for is_agents in (False, True, False):
        port = free_port()
        store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False) if is_agents else None
        agent = {"TORCHELASTIC_USE_AGENT_STORE": str(store is not None), "TORCHELASTIC_RESTART_COUNT": "0"}
        ranks = [Program("-c", program, env={**rank_of(2, rank, port), **agent}) for rank in range(2)]
        said = [rank.communicate() for rank in ranks]
        assert [rank.returncode for rank in ranks] == [0, 0], said


def test_a_lazy_module_without_a_shape_is_named() -> None:
    model = nn.Sequential(nn.LazyLinear(4))
    with pytest.raises(ValueError, match=r"'0.weight' has no shape yet"):
        zk.ZeroOptimizer(model, torch.optim.SGD(model.parameters(), lr=0.1))


def test_backward_after_close_says_that_the_optimizer_is_closed(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    place = {"param_tier": "nvme", "optimizer_tier": "nvme", "nvme_path": tmp_path}
    optimizer = zk.ZeroOptimizer(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=3, **place)
    loss = model(torch.randn(2, 4, requires_grad=True)).sum()
    optimizer.close()
    with pytest.raises(RuntimeError, match="closed"):
        loss.backward()


def test_what_is_gathered_to_be_written_can_be_gathered_to_be_read(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    drive = {"param_tier": "nvme", "optimizer_tier": "nvme", "nvme_path": tmp_path}
    with zk.ZeroOptimizer(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=3, **drive):

        def total() -> float:
            with zk.gather(model.parameters()):
                return sum(param.sum().item() for param in model.parameters())

        with zk.gather(model.parameters(), write=True), torch.no_grad():
            for param in model.parameters():
                param.fill_(1)
            assert total() == 40
        assert total() == 40
        with pytest.raises(RuntimeError, match="was changed, and at stage 3 that is lost"), zk.gather(model.parameters()), torch.no_grad():
            model[0].weight.fill_(2)
            assert total() == 56
        assert total() == 40
