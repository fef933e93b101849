"""Programs around an optimizer, with zk and beside plain torch: each gives the same, or is refused with the sentence that it must get."""

from __future__ import annotations

import contextlib
import copy
import functools
import re
import threading
from pathlib import Path

import pytest
import torch
import torch._dynamo
from torch import Tensor, nn

import zk
from benchmarks.throttled import ThrottledLink, pretend
from tests.user_programs import PROGRAMS, Case, Net, Program, Run, Writing

STEPS = 3
PARTITIONED = Case(3, tier="host", is_apart=True)  # parameters are gone between uses, in one process too
ALONE = (
    *(Case(stage) for stage in range(4)),
    Case(2, tier="host"),
    Case(2, tier="host", overlap_step=True),
    Case(2, tier="nvme"),
    Case(2, sgd=True),
    Case(3, tier="nvme", sgd=True),
    Case(2, tier="host", loss_scale=128.0, sgd=True),
    Case(2, tier="host", is_apart=True),
    Case(2, tier="host", dtype="bf16", is_apart=True),
    Case(1, dtype="bf16"),
    Case(2, tier="nvme", dtype="bf16", sgd=True),
)


def run_program(name: str, case: Case | None, rank: int = 0, drive: str = "", sgd: bool = False) -> tuple[dict[str, Tensor], list[float]]:
    """Parameters after a few steps, and what the program has seen; ``case``: None is plain torch."""
    with pretend(ThrottledLink(1e12)) if case is not None and case.is_apart else contextlib.nullcontext():
        return _run(PROGRAMS[name], case, rank, drive, sgd)


@functools.cache
def plain_run(name: str, sgd: bool) -> tuple[dict[str, Tensor], list[float]]:
    """What a program gives in plain torch, once for all cases of it."""
    return run_program(name, None, sgd=sgd)


def _run(program: Program, case: Case | None, rank: int, drive: str, sgd: bool) -> tuple[dict[str, Tensor], list[float]]:
    torch._dynamo.reset()  # what other tests have compiled: param.grad is None within forward then
    torch.manual_seed(0)
    model = program.model()
    trained = [param for param in model.parameters() if param.requires_grad]
    optimizer: torch.optim.Optimizer = torch.optim.SGD(trained, lr=0.02, momentum=0.9) if sgd else torch.optim.AdamW(trained, lr=1e-2)
    if case is not None:
        where = {"param_tier": case.tier} if case.stage == 3 else {}
        if case.dtype != "fp32":
            where["dtype"] = case.dtype
        optimizer = zk.ZeroOptimizer(
            model,
            optimizer,
            stage=case.stage,
            optimizer_tier=case.tier,
            overlap_step=case.overlap_step,
            loss_scale=case.loss_scale,
            nvme_path=drive if case.tier == "nvme" else None,
            units=[nn.Embedding, nn.Linear] if isinstance(model, Writing) else None,
            **where,
        )
    try:
        run = Run(model, optimizer, rank, case.world if case else 1, whole=program.whole)
        for run.step in range(STEPS):
            run.draws = 0
            program.run(run)
        if isinstance(optimizer, zk.ZeroOptimizer):
            return optimizer.consolidated_state_dict(), run.seen
        return {name: value.clone() for name, value in model.state_dict().items()}, run.seen
    finally:
        if isinstance(optimizer, zk.ZeroOptimizer):
            optimizer.close()


def fault(name: str, case: Case, rank: int, drive: str) -> str:
    """Say what is wrong with a program's verdict; nothing if it is as it must be."""
    if case.sgd and "state" in name:
        return ""  # these are about Adam's
    message = PROGRAMS[name].verdict(case)
    if message is not None:
        try:
            run_program(name, case, rank, drive, case.sgd)
        except Exception as error:
            return "" if re.search(message, str(error)) else f"{name}, {case}: refused with {type(error).__name__}: {error}"
        return f"{name}, {case}: not refused"
    want, want_seen = plain_run(name, case.sgd)
    try:
        got, got_seen = run_program(name, case, rank, drive, case.sgd)
    except Exception as error:
        return f"{name}, {case}: {type(error).__name__}: {error}"
    off = {key: (got[key] - want[key]).abs().max().item() for key in want}
    worst = max(off, key=lambda key: off[key])
    rough = case.dtype != "fp32"
    if off[worst] > (0.05 * max(1.0, want[worst].abs().max().item()) if rough else PROGRAMS[name].tolerance):
        return f"{name}, {case}: {worst} is off by {off[worst]:.1e}"
    if len(got_seen) != len(want_seen) or any(
        a != pytest.approx(b, rel=0.1 if rough else 1e-3, abs=0.01 if rough else 1e-5) for a, b in zip(got_seen, want_seen, strict=True)
    ):
        return f"{name}, {case}: saw {got_seen[:6]} instead of {want_seen[:6]}"
    return ""


@pytest.mark.parametrize("name", PROGRAMS)
def test_alone(name: str, tmp_path: Path) -> None:
    """With parameters that are gone between uses, and in a fifth of the other cases; the next program is in the next fifth."""
    cases = PARTITIONED, *ALONE[list(PROGRAMS).index(name) % 5 :: 5]
    faults = [found for case in cases if (found := fault(name, case, 0, str(tmp_path)))]
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize("stage", (0, 2, 3))
def test_parts_and_methods_of_a_model_cast_their_inputs_as_its_call_does(stage: int) -> None:
    torch.manual_seed(0)
    model, x = Net(), torch.randn(4, 8)
    with zk.ZeroOptimizer(model, torch.optim.AdamW(model.parameters()), stage=stage, dtype="bf16"):
        want = model(x)
        assert want.dtype == torch.bfloat16
        assert torch.equal(model.forward(x), want) and torch.equal(model.head(model.encode(x)), want)
        with zk.gather(model.parameters()):
            twin = copy.deepcopy(model)
        assert torch.equal(twin(x), want)


@pytest.mark.parametrize("stage", (0, 2, 3))
def test_two_threads_add_up_their_gradients_or_are_refused(stage: int) -> None:
    torch.manual_seed(0)
    model = Net()
    plain = copy.deepcopy(model)
    batches, refused = torch.randn(6, 4, 8), []
    inside, seen = threading.Barrier(2), threading.Event()

    class Meets(nn.Module):  # both threads are in forward at once
        def forward(self, x: Tensor) -> Tensor:
            if stage < 3:
                inside.wait(30)
            else:
                seen.wait(30)
            return x

    model.blocks.insert(0, Meets())
    with zk.ZeroOptimizer(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=stage):

        def work(some: Tensor) -> None:
            try:
                for x in some:
                    model(x).square().mean().backward()
            except RuntimeError as error:
                refused.append(str(error))
                seen.set()

        threads = [threading.Thread(target=work, args=(some,)) for some in batches.chunk(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if stage == 3:
            assert len(refused) == 1 and "two threads call the model at once" in refused[0]
            model.zero_grad()
            model(batches[0]).square().mean().backward()  # it goes on in one
            return
        assert not refused
        for x in batches:
            plain(x).square().mean().backward()
        for got, want in zip((p for p in model.parameters()), plain.parameters(), strict=True):
            torch.testing.assert_close(got.grad, want.grad, rtol=1e-4, atol=1e-5)


def test_a_thread_that_evaluates_does_not_disturb_one_that_trains(tmp_path: Path) -> None:
    """Forward without a graph begins in the middle of a block's backward."""
    torch.manual_seed(0)
    model = Net()
    plain, batches = copy.deepcopy(model), torch.randn(3, 4, 8)
    options = {"optimizer_tier": "nvme", "nvme_path": tmp_path, "overlap_step": "backward", "keep_gradients": False}

    def evaluate(_: object) -> None:
        if not torch.is_grad_enabled():
            thread = threading.Thread(target=torch.no_grad()(model), args=(batches[0],))
            thread.start()
            thread.join()

    with zk.ZeroOptimizer(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=2, **options) as optimizer:
        model.blocks[1].up.register_forward_hook(lambda module, given, hidden: hidden.requires_grad and hidden.register_hook(evaluate) and None)
        for x in batches:
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    inner = torch.optim.SGD(plain.parameters(), lr=0.1)
    for x in batches:
        plain(x).square().mean().backward()
        inner.step()
        inner.zero_grad()
    assert all(map(torch.equal, model.state_dict().values(), plain.state_dict().values()))


def test_torch_func_within_gather_is_told_what_to_do(tmp_path: Path) -> None:
    model = Net()
    tiers = {"param_tier": "nvme", "optimizer_tier": "nvme", "nvme_path": tmp_path}
    with zk.ZeroOptimizer(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=3, **tiers):
        with pytest.raises(RuntimeError, match="saved tensor hooks") as caught, zk.gather(model.parameters()):
            torch.func.grad(torch.sum)(model.head.bias)
        assert "needs torch.no_grad() around that" in caught.value.__notes__[0]


def test_names_are_no_parameters() -> None:
    for wrong in ("head.weight", ["head.weight"]):
        with pytest.raises(TypeError, match=r"takes parameters, such as model.parameters\(\)"), zk.gather(wrong):  # type: ignore[arg-type]
            pass


def test_an_optimizer_whose_state_is_gone_does_not_begin_without_it() -> None:
    model, x = Net(), torch.randn(4, 8)
    inner = torch.optim.AdamW(model.parameters())
    with zk.ZeroOptimizer(model, inner, stage=3) as optimizer:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        state = optimizer.state_dict()
        optimizer.close(gather=True)
    model(x).square().mean().backward()
    with pytest.raises(RuntimeError, match=r"load_state_dict\(\) what state_dict\(\) gave"):
        inner.step()
    inner.load_state_dict(state)
    inner.step()
    assert {kept["step"].item() for kept in inner.state.values()} == {2}


@pytest.mark.parametrize("stage", (2, 3))
@pytest.mark.parametrize("name", ("", "head"))
def test_compiled_scripts_are_refused_before_anything_is_changed(name: str, stage: int) -> None:
    model: nn.Module = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
    model = torch.jit.script(model) if not name else nn.ModuleDict({"body": nn.Linear(8, 8), name: torch.jit.script(model)})
    with pytest.raises(TypeError, match="module 'head' is a ScriptModule" if name else "the model is a ScriptModule"):
        zk.ZeroOptimizer(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=stage)
    assert all(type(param) is nn.Parameter for param in model.parameters())


def test_looking_at_gradients_takes_no_more_memory_with_every_step() -> None:
    model = Net()
    with zk.ZeroOptimizer(model, torch.optim.AdamW(model.parameters()), stage=2) as optimizer:
        taken = []
        for _ in range(6):
            for _ in range(2):
                model(torch.ones(2, 8)).square().mean().backward()
                for param in model.parameters():
                    assert param.grad is not None
                    param.grad.mul_(0.5)
            optimizer.step()
            optimizer.zero_grad()
            taken.append(optimizer.metrics()["device_grad_nbytes"])
    assert taken[1] == taken[-1]


def test_the_guide_names_every_program() -> None:
    text = (Path(__file__).parents[1] / "docs" / "guides" / "around_the_optimizer.md").read_text()
    assert sorted(re.findall(r"^\|.*\| `(\w+)` \|$", text, re.M)) == sorted(PROGRAMS)
