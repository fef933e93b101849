"""torch.distributed.pipelining with one ZeroOptimizer for each stage of the pipeline, beside plain torch with the whole model in one process."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import os
import re
import shutil
import sys
import tempfile
import types
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_

import zk
from tests.models import DEVICE, GPT, VOCAB, batch, loss_of
from tests.parity import compare
from tests.plain import train_plain
from tests.programs import Program
from tests.world import call, free_port, run_world
from zk.checkpoint.export import export
from zk.core import torch_calls
from zk.core.store import UnitStore
from zk.parallel.comm import Group
from zk.parallel.grads import GradReducer

pytestmark = pytest.mark.usefixtures("torch_engine")

ROOT = Path(__file__).parent.parent
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
PIPELINING = "torch.distributed.pipelining.stage"


class Stage(nn.Module):
    """Some of a GPT's blocks, under their names: with the embedding before the first of them, and the head after the last."""

    def __init__(self, model: GPT, number: int, of: int) -> None:
        super().__init__()
        per_stage = len(model.blocks) // of
        self.tokens = model.tokens if number == 0 else None
        self.blocks = nn.ModuleDict({str(place): model.blocks[place] for place in range(number * per_stage, (number + 1) * per_stage)})
        self.norm, self.head = (model.norm, model.head) if number == of - 1 else (None, None)

    def forward(self, x: Tensor) -> Tensor:
        x = self.tokens(x) if self.tokens is not None else x
        for block in self.blocks.values():
            x = block(x)
        return self.head(self.norm(x)) if self.head is not None and self.norm is not None else x


def loss_fn(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.float().reshape(-1, VOCAB), target.reshape(-1))


@dataclasses.dataclass(frozen=True)
class Case:
    schedule: str = "1F1B"
    pp: int = 2  # ranks of a pipeline; the others are data parallel
    stage: int = 2
    tier: str = "host"
    dtype: str = "fp32"
    optimizer: str = "AdamW"
    overlap_step: bool = False
    micro_batches: int = 4
    scale_grads: bool = True
    clip: float | None = None
    gather: bool = False  # the parameters around each step of the schedule
    is_one: bool = False  # one ZeroOptimizer for all stages of a rank
    is_together: bool = False  # norm and overflow over the stages
    saves: bool = False  # after a step, while the next one is trained; other optimizers go on from there
    tolerance: float = 0.0  # 0: bitwise
    steps: int = 2

    def __str__(self) -> str:
        default = Case()
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return "-".join(f"{name}={value}" for name, value in values.items() if value != getattr(default, name)) or "default"

    @property
    def is_v(self) -> bool:
        """The first rank has the first stage and the last one."""
        return self.schedule in ("ZBVZeroBubble", "DualPipeV")

    @property
    def per_rank(self) -> int:
        return 1 if self.schedule in ("GPipe", "1F1B") else 2

    @property
    def layers(self) -> int:
        """A block for each stage, and two for one that is alone."""
        return max(2, self.pp * self.per_rank)


CASES = [
    Case("GPipe", stage=0, optimizer="SGD", micro_batches=2),
    Case(dtype="bf16", scale_grads=False, tier="device"),
    Case("GPipe", pp=1, stage=3, clip=0.05, tier="nvme", micro_batches=2),
    Case(stage=3, clip=0.05, is_together=True, tolerance=5e-6),  # squares are added in another order
    Case("InterleavedZeroBubble", dtype="bf16", stage=3, gather=True),
    Case("ZBVZeroBubble", stage=1, overlap_step=True, steps=3),
    Case("DualPipeV"),
    Case("Interleaved1F1B", stage=3, overlap_step=True, saves=True, steps=3),
    Case(pp=4, stage=1, clip=0.05, is_together=True, saves=True, tolerance=5e-6),
    Case(micro_batches=3, optimizer="SGD", tolerance=5e-6),  # a third is no fp32 number: torch divides, zk multiplies
    Case("Interleaved1F1B", optimizer="SGD", is_one=True, tolerance=5e-6),  # gradients of one stage are read before those of the other have come
]


def make_optimizer(name: str, params: list[nn.Parameter]) -> torch.optim.Optimizer:
    if name == "AdamW":
        return torch.optim.AdamW(params, lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1)
    return torch.optim.SGD(params, lr=0.1, momentum=0.9, nesterov=True)


@functools.cache
def plain_training(
    layers: int, dtype: str, optimizer: str, dp: int, micro_batches: int, scaled: bool, clip: float | None, steps: int
) -> Any:
    torch.manual_seed(0)
    losses, model, *_ = train_plain(
        GPT(layers=layers),
        functools.partial(make_optimizer, optimizer),
        dtype=DTYPES[dtype],
        world=dp,
        accumulation=micro_batches,
        local=True,
        clip=clip,
        steps=steps,
        forward=lambda model, ids, step: loss_of(model, ids) / (micro_batches if scaled else 1),
    )
    return losses, dict(model.named_parameters())


@contextlib.contextmanager
def counted() -> Iterator[Counter[str]]:
    """Count reductions, gradients that are brought back, and parameters that are gathered, by unit."""
    counts: Counter[str] = Counter()

    def count(kind: type, name: str) -> Any:
        method: Callable[..., Any] = getattr(kind, name)

        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            counts[name] += 1
            return method(self, *args, **kwargs)

        return mock.patch.object(kind, name, call)

    with count(GradReducer, "_reduce"), count(UnitStore, "bring_back"), count(Group, "all_gather"):
        yield counts


@functools.cache
def groups_of(pp: int, dp: int) -> tuple[list[Any], list[Any]]:
    """The ranks of each pipeline, and the replicas of each of its stages."""
    pipelines = [dist.new_group([stage * dp + replica for stage in range(pp)]) for replica in range(dp)]
    return pipelines, [dist.new_group([stage * dp + replica for replica in range(dp)]) for stage in range(pp)]


class Pipeline:
    """This rank's stages of a pipeline, and what trains them."""

    def __init__(self, case: Case, folder: str, is_wrapped: bool = True, root: str = "") -> None:
        from torch.distributed import pipelining

        self.case, self.dp, self.folder, self.root = case, dist.get_world_size() // case.pp, folder, root
        rank, self.replica = divmod(dist.get_rank(), self.dp)
        pipelines, replicas = groups_of(case.pp, self.dp)
        of = case.pp * case.per_rank
        self.numbers = numbers = [rank] if case.per_rank == 1 else [rank, of - 1 - rank if case.is_v else rank + case.pp]
        torch.manual_seed(0)
        model = GPT(layers=case.layers)
        self.modules = [Stage(model, number, of) for number in numbers]
        self.wrapped: list[nn.Module] = [nn.ModuleList(self.modules)] if case.is_one else list(self.modules)
        options = {
            "stage": case.stage,
            "dtype": case.dtype,
            "optimizer_tier": case.tier,
            "param_tier": case.tier if case.stage == 3 else "device",
            "overlap_step": case.overlap_step,
            "clip_grad_norm": case.clip,
            "process_group": replicas[rank],
            **({"nvme_path": folder} if case.tier == "nvme" else {}),
            **({"model_parallel_group": pipelines[self.replica], "replicated_params": []} if case.is_together else {}),
        }
        self.optimizers = [
            zk.ZeroOptimizer(module, make_optimizer(case.optimizer, list(module.parameters())), **options) if is_wrapped
            else make_optimizer(case.optimizer, list(module.parameters()))
            for module in self.wrapped
        ]  # fmt: skip
        self.stages = [
            pipelining.PipelineStage(module, number, of, DEVICE, group=pipelines[self.replica])
            for module, number in zip(self.modules, numbers, strict=True)
        ]
        make = getattr(pipelining, f"Schedule{case.schedule}")
        self.schedule = make(self.stages if case.per_rank > 1 else self.stages[0], case.micro_batches, loss_fn=loss_fn, scale_grads=case.scale_grads)

    def backward(self, step: int) -> list[Tensor]:
        """Run the schedule once; returns the losses of the micro-batches, where the last stage is."""
        ids = torch.cat([batch(1000 * step + 10 * micro + self.replica) for micro in range(self.case.micro_batches)])
        losses: list[Tensor] = []
        given = (ids[:, :-1],) if any(stage.is_first for stage in self.stages) else ()
        last = {"target": ids[:, 1:], "losses": losses} if any(stage.is_last for stage in self.stages) else {}
        params = [param for module in self.modules for param in module.parameters()]
        with zk.gather(params) if self.case.gather else contextlib.nullcontext():
            self.schedule.step(*given, **last)
        return losses

    def compared(self, trained: dict[str, Tensor]) -> list[str]:
        found = []
        for module in self.modules:
            with zk.gather(module.parameters()):
                for name, param in module.named_parameters():
                    found.append(compare(name, param.detach(), trained[name].detach(), self.case.tolerance))
        return [line for line in found if line]

    def step(self) -> list[float]:
        """Returns the norm of each stage."""
        norms = []
        for optimizer in self.optimizers:
            optimizer.step()
            norms.append(optimizer.metrics()["grad_norm"])
            optimizer.zero_grad()
        return norms

    def folder_of(self, number: int) -> Path:
        """One of each stage's own, or one of all that know of each other."""
        return Path(self.root, "whole" if self.case.is_together else f"stage {number}")

    def save(self) -> None:
        for optimizer, number in zip(self.optimizers, self.numbers, strict=True):
            optimizer.save_checkpoint(self.folder_of(number), async_save=True)

    def begin_again(self) -> None:
        """New models and optimizers, from what was saved."""
        self.close()
        self.__init__(self.case, self.folder, root=self.root)  # type: ignore[misc]
        for optimizer, number in zip(self.optimizers, self.numbers, strict=True):
            optimizer.load_checkpoint(self.folder_of(number))
        if self.case.is_together and dist.get_rank() == 0:
            (file,) = export(self.folder_of(0), Path(self.root, "weights")).files
            whole = GPT(layers=self.case.layers)
            assert {name: value.shape for name, value in load_file(file).items()} == {n: p.shape for n, p in whole.named_parameters()}

    def close(self) -> None:
        for optimizer in self.optimizers:
            optimizer.close()


@contextlib.contextmanager
def pipeline(case: Case) -> Iterator[Pipeline]:
    root = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]  # one for all ranks
    dist.broadcast_object_list(root)
    with tempfile.TemporaryDirectory() as folder:
        made = Pipeline(case, folder, root=root[0])
        yield made
        made.close()
    if dist.get_rank() == 0:
        shutil.rmtree(root[0], ignore_errors=True)


def trains_as_one_process(case: Case) -> str:
    """Losses, parameters and norms; each unit reduced once a step, and no gradient brought back."""
    with pipeline(case) as own, counted() as counts:
        losses, norms = [], []
        for step in range(case.steps):
            if case.saves and step == 1:
                own.save()
                own.backward(2)  # of what is thrown away
                own.step()
                own.begin_again()
                counts["_reduce"] //= 2
            losses += [loss.item() / (case.micro_batches if case.scale_grads else 1) for loss in own.backward(step)]
            gathered = counts["all_gather"]
            norms += own.step()
            counts["all_gather"] = 0
        num_units = sum(len(optimizer.held) for optimizer in own.optimizers)
        found = []
        is_passed_on = own.dp == 1 and own.optimizers[0].grads.in_backward  # to its tier, with each micro-batch
        if counts["_reduce"] != num_units * case.steps and not is_passed_on and not case.is_one:
            found.append(f"{counts['_reduce']} reductions of {num_units} units in {case.steps} steps")
        if counts["bring_back"] and not case.is_one:
            found.append(f"{counts['bring_back']} units' gradients were brought back")
        if case.stage == 3 and case.gather and gathered != num_units * (own.dp > 1):
            found.append(f"{gathered} gathers of {num_units} units in one step of the schedule")
        of_case = case.layers, case.dtype, case.optimizer, own.dp, case.micro_batches, case.scale_grads, case.clip, case.steps
        want, trained = plain_training(*of_case)
        if own.replica == 0 and losses and case.tolerance == 0 and losses != want:
            found.append(f"losses {losses} instead of {want}")
        if case.clip is not None and not all(norm > 2 * case.clip for norm in norms):
            found.append(f"nothing was clipped: {norms}")
        return "\n".join(found + own.compared(trained))


# ---- what user code sees -----------------------------------------------------------------------------------------------------------


def imported_after_the_optimizer(_: object) -> str:
    """Without the import zk has nothing to do with pipelines; with it, the next forward finds them."""
    if PIPELINING in sys.modules:
        return "torch.distributed.pipelining was imported before"
    model = nn.Linear(4, 4, device=DEVICE)
    optimizer = zk.ZeroOptimizer(model, torch.optim.SGD(model.parameters(), lr=0.5))
    if PIPELINING in sys.modules:
        return "zk imports torch.distributed.pipelining"
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    plain = copy.deepcopy(model)
    stage = PipelineStage(model, 0, 1, DEVICE, group=alone)
    x = torch.ones(4, 4, device=DEVICE)
    with counted() as counts:
        ScheduleGPipe(stage, 2, loss_fn=lambda y, _: y.square().mean()).step(x, target=x)
    if counts["bring_back"] or counts["_reduce"] > len(optimizer.held):
        return f"the stage was not watched: {counts}"
    (plain(x).square().mean()).backward()
    torch.testing.assert_close(model.weight.grad, plain.weight.grad)
    optimizer.close()
    return ""


def the_norm_is_that_of_divided_gradients(case: Case) -> str:
    """clip_grad_norm_ and the norm it returns, a look before and after, several schedules in one step, against torch's own pipeline."""
    with pipeline(case) as own:
        plain = Pipeline(case, "", is_wrapped=False)
        for step in (1, 2):
            norms, looks = [], []
            for one in (own, plain):
                model, optimizer = one.modules[0], one.optimizers[0]
                seen = []
                for part in range(2):  # the second one divides what the first has left once more
                    one.backward(10 * step + part)
                    if step == 1:
                        seen.append(mean_of(one, model.head.weight.grad))
                if one is plain:
                    for param in model.parameters():
                        param.grad = mean_of(plain, param.grad)
                norms.append([clip_grad_norm_(model.parameters(), limit).item() for limit in (float("inf"), 0.05)])
                if step == 2:
                    seen.append(model.head.weight.grad.clone())
                optimizer.step()
                looks.append(seen)
                optimizer.zero_grad()
            assert norms[0] == pytest.approx(norms[1], rel=1e-5)
            assert len(looks[0]) == len(looks[1]) == {1: 2, 2: 1}[step]
            for got, want in zip(*looks, strict=True):
                torch.testing.assert_close(got, want)
        with zk.gather(own.modules[0].parameters()):
            for got, want in zip(own.modules[0].parameters(), plain.modules[0].parameters(), strict=True):
                torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    return ""


def a_gradient_that_overflows_skips_a_step_of_all_stages(case: Case) -> str:
    with pipeline(case) as own:
        own.backward(0)
        own.step()
        with zk.gather(own.modules[0].parameters()):
            before = [param.detach().clone() for param in own.modules[0].parameters()]
        own.backward(1)
        if own.stages[0].is_last:
            own.modules[0].head.weight.grad.mul_(float("inf"))  # type: ignore[union-attr]
        own.step()
        with zk.gather(own.modules[0].parameters()):
            assert all(torch.equal(param, value) for param, value in zip(own.modules[0].parameters(), before, strict=True))
        own.backward(2)
        own.step()
        with zk.gather(own.modules[0].parameters()):
            assert not any(torch.equal(param, value) for param, value in zip(own.modules[0].parameters(), before, strict=True))
        assert [optimizer.metrics()["skipped_steps"] for optimizer in own.optimizers] == [1]
    return ""


def mean_of(one: Pipeline, grad: Tensor) -> Tensor:
    """The mean over ranks of what plain torch has, which zk shows by itself."""
    grad = grad.clone()
    if not isinstance(one.optimizers[0], zk.ZeroOptimizer):
        dist.all_reduce(grad)
        grad /= dist.get_world_size()
    return grad


def zero_bubbles_at_stage_3_are_refused(case: Case) -> str:
    with pipeline(case) as own, contextlib.suppress(OSError):
        try:
            own.backward(0)
        except RuntimeError as error:
            said = str(error)
        else:
            said = "no error"
    return said


LOOKS = [Case("GPipe", pp=1, stage=stage, micro_batches=2) for stage in (1, 3)]


WORK: list[tuple[Callable[[Any], str], Any]] = [
    (imported_after_the_optimizer, None),
    *((trains_as_one_process, case) for case in CASES),
    *((the_norm_is_that_of_divided_gradients, case) for case in LOOKS),
    (a_gradient_that_overflows_skips_a_step_of_all_stages, Case(is_together=True)),
]


@functools.cache
def results() -> list[list[Any]]:
    """All work in one world of four ranks."""
    return run_world(4, call, WORK, timeout=60)


@pytest.mark.device_only
def test_stages_are_as_one_process_where_the_link_is_late() -> None:
    cases = [Case("Interleaved1F1B", stage=3, overlap_step=True, steps=3), Case(overlap_step=True)]
    trained, refused = run_world(4, trains_as_one_process, cases, timeout=60)
    assert trained == [""] * 4
    said = "".join(map(str, refused))  # the others hear that one has gone
    assert "overlap_step=True at stage 2" in said and "while stages of a pipeline use NCCL in forward" in said


@pytest.mark.parametrize("number", range(len(WORK)), ids=[f"{function.__name__}-{case}" for function, case in WORK])
def test_stages_are_as_one_process(number: int) -> None:
    assert results()[number] == [""] * 4


def test_a_zero_bubble_schedule_over_released_parameters_is_refused_by_name() -> None:
    first, last = run_world(2, zero_bubbles_at_stage_3_are_refused, [Case("InterleavedZeroBubble", stage=3, gather=False)], timeout=60)[0]
    assert "zk.gather(module.parameters())" in str(last) and "zero-bubble" in str(last), last
    assert "no error" not in str(first)


def test_the_program_of_the_guide_prints_what_the_page_says() -> None:
    page = (ROOT / "docs" / "guides" / "parallelism.md").read_text()
    ((program, output),) = re.findall(r"tests/test_pipelines.py -->\n```python\n(.*?)```.*?```text\n(.*?)```", page, re.DOTALL)
    ranks_of = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1"}
    ranks_of |= {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4"}
    ranks = [Program("-c", program, env={**ranks_of, "RANK": str(rank), "LOCAL_RANK": str(rank)}) for rank in range(4)]
    try:
        said = [rank.communicate() for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0] * 4, said
    printed = "".join(out for out, _ in said)
    number = r"\d+\.\d+"
    assert re.sub(number, "#", printed) == re.sub(number, "#", output)
    assert list(map(float, re.findall(number, printed))) == pytest.approx(list(map(float, re.findall(number, output))), rel=0.01)


def test_a_torch_whose_stages_are_built_otherwise_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, PIPELINING, types.SimpleNamespace(_PipelineStageBase=type("Stage", (), {})))
    with pytest.raises(RuntimeError, match=r"no scale_grads of a pipeline's stage.*torch 2.11 to 2.13"):
        torch_calls._watch_stages.__wrapped__()
