"""Programs of test_user_programs.py with two ranks, each of which has half of a batch."""

from __future__ import annotations

from pathlib import Path

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
    *("read_state", "write_state", "forget_state", "assign_state", "state_of_the_users_optimizer"),
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
