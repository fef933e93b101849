"""Programs of test_user_programs.py with two ranks, each of which has half of a batch."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zk
from tests.test_user_programs import fault
from tests.user_programs import PROGRAMS, Case
from tests.world import run_world

# one or two for each thing that ranks do together: the others ask each rank for what these ask for
ON_RANKS = (
    # gradients come together, are written, and go to their owners
    *("scale_in_place", "replace", "set_one_to_none", "set_all_to_none", "add_noise", "list_unused_parameters", "keep_and_combine"),
    *("look_while_accumulating", "look_after_the_step", "look_at_what_is_partly_used", "look_in_inference_mode", "assign_what_was_asked_for"),
    *("hooks_of_a_parameter", "hooks_of_a_gradient", "hooks_of_a_module", "zero_every_second_step", "zeros_instead_of_none", "zero_a_part"),
    # norms of all ranks
    *("clip_each_layer", "clip_by_another_norm", "clip_in_two_halves", "clip_and_look", "clip_and_assign"),
    # graphs, which gather again
    *("sharpness_aware", "penalize_the_gradient_of_inputs", "backward_with_create_graph", "penalize_through_a_checkpoint"),
    *("backward_twice_through_one_graph", "functional_gradient"),
    # state, of which each has a part
    *("read_state", "write_state", "forget_state", "assign_state"),
    # parameters
    *("set_data_in_forward", "interpolate_in_forward", "assign_data", "change_data_taken_before", "write_data_of_what_is_gathered_to_be_read"),
    *("penalize_what_is_gathered", "transform_what_is_gathered_with_a_graph", "resize_what_is_gathered", "copy_the_model", "channels_last"),
)
TOGETHER = (*(Case(stage, 2) for stage in range(4)), Case(2, 2, "host", overlap_step=True), Case(3, 2, "nvme"), Case(2, 2, sgd=True))


def case_of(name: str) -> Case:
    """One of the cases, another for the next program; stage 3 where ranks change what it says."""
    verdict = PROGRAMS[name].verdict
    return Case(3, 2) if verdict(Case(3)) != verdict(Case(3, 2)) else TOGETHER[ON_RANKS.index(name) % len(TOGETHER)]


def of_a_rank(names_and_drive: tuple[list[str], str]) -> list[str]:
    names, drive = names_and_drive
    return [found for name in names if (found := fault(name, case_of(name), dist.get_rank(), drive))]


def test_two_ranks(tmp_path: Path) -> None:
    for faults in run_world(2, of_a_rank, [(list(ON_RANKS), str(tmp_path))])[0]:
        assert not faults, "\n".join(faults)


def of_one_rank_only(_: None) -> str:
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    optimizer = zk.ZeroOptimizer(model, torch.optim.AdamW(model.parameters()), stage=2)
    model(torch.ones(2, 4)).sum().backward()
    try:
        if dist.get_rank() == 0:
            assert model.weight.grad is not None
        else:
            optimizer.step()
            optimizer.save_checkpoint("never")
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def test_a_gradient_that_one_rank_only_reads_is_an_error_that_names_both() -> None:
    found = run_world(2, of_one_rank_only, [None])[0]
    assert all("rank" in message and "'" in message for message in found), found


class Partly(nn.Module):
    """A block that only some ranks use, and one that all do."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)) for _ in range(2))

    def forward(self, x: torch.Tensor, whole: bool) -> torch.Tensor:
        return self.blocks[1](x + self.blocks[0](x) if whole else x)  # type: ignore[no-any-return]


def _zero(model: Partly, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad(set_to_none=False)


def _zero_a_part(model: Partly, optimizer: torch.optim.Optimizer) -> None:
    model.blocks[1].zero_grad()


def _zeros_in_a_part(model: Partly, optimizer: torch.optim.Optimizer) -> None:
    model.blocks[0].zero_grad(set_to_none=False)


def _drop_one(model: Partly, optimizer: torch.optim.Optimizer) -> None:
    model.blocks[0][0].weight.grad = None


CHANGES = (_zero, _zero_a_part, _zeros_in_a_part, _drop_one)


def of_partly_used(stage_and_change: tuple[int, int]) -> list[str]:
    """Names of the parameters that are not those of plain torch."""
    stage, change = stage_and_change[0], CHANGES[stage_and_change[1]]
    plain, model, rank = Partly(), Partly(), dist.get_rank()
    beside = torch.optim.AdamW(plain.parameters(), lr=0.1, eps=1e-3)
    optimizer = zk.ZeroOptimizer(model, torch.optim.AdamW(model.parameters(), lr=0.1, eps=1e-3), stage=stage)

    def backward(seed: int, partly: bool) -> None:
        xs = [torch.randn(3, 4, generator=torch.Generator().manual_seed(10 * seed + number)) for number in range(2)]
        for number, x in enumerate(xs):
            (plain(x, number == 0 or not partly).square().mean() / 2).backward()
        model(xs[rank], rank == 0 or not partly).square().mean().backward()

    def same_norms() -> bool:
        return bool(abs(nn.utils.clip_grad_norm_(plain.parameters(), 0.1) - optimizer.clip_grad_norm_(0.1)) < 1e-4)

    wrong = []
    for seed, again in enumerate((None, True, False)):
        backward(4 * seed, False)
        wrong += [] if same_norms() else ["norm"]
        for one in (beside, optimizer):
            one.step()
            one.zero_grad()
        backward(4 * seed + 1, True)
        change(plain, beside)
        change(model, optimizer)
        if again is not None:
            backward(4 * seed + 2, again)
        wrong += [] if same_norms() else ["norm"]
        for one in (beside, optimizer):
            one.step()
            one.zero_grad()
    pairs = zip(plain.named_parameters(), model.parameters(), strict=True)
    wrong += [name for (name, want), got in pairs if not torch.allclose(want, got, rtol=1e-4, atol=1e-5)]
    optimizer.close()
    return wrong


@pytest.mark.parametrize("change", range(len(CHANGES)))
def test_what_only_some_ranks_have_a_gradient_of_is_dropped_or_zero_on_all(change: int) -> None:
    for found in run_world(2, of_partly_used, [(stage, change) for stage in (1, 2)]):
        assert found == [[], []], found


def of_new_gradients(stage: int) -> list[float]:
    """The gradient of a parameter that only the first rank has used since it was looked at, with its own first."""
    model, rank = Partly(), dist.get_rank()
    optimizer = zk.ZeroOptimizer(model, torch.optim.SGD(model.parameters(), lr=0.0), stage=stage)
    model(torch.ones(3, 4), True).sum().backward()
    optimizer.step()
    first = model.blocks[0][0].weight.grad.clone()
    model(torch.ones(3, 4), rank == 0).sum().backward()
    second = model.blocks[0][0].weight.grad
    assert second is not None
    optimizer.close()
    return [(second / first).mean().item(), float(torch.equal(second, first))]


def test_a_gradient_that_another_rank_has_added_to_since_it_was_looked_at_is_read_anew() -> None:
    for found in run_world(2, of_new_gradients, [1, 2]):
        assert all(abs(ratio - 1.5) < 1e-3 and not stale for ratio, stale in found), found
