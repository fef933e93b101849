"""User programs on the new core: each right, or refused with the sentence that docs/guides/programs.md shows."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.core.programs import fault
from tests.user_programs import PROGRAMS, Case
from tests.world import run_world

IN_PLACE = "has left param.grad, and .* in place would be lost"
GONE = "is gone, as step\\(\\) has used it"
ALONE = "sees its new gradient alone"
ELSEWHERE = "states of a ZeroOptimizer rest on its tiers"
RELEASED = "lost: change it within|more than one element of the written-to tensor"  # (the second is torch's)
# what is refused at every stage
REFUSED = {
    **dict.fromkeys(("scale_through_data", "add_noise", "clip_by_value", "look_while_accumulating"), IN_PLACE),
    **dict.fromkeys(("look_after_the_step", "keep_and_combine", "zero_every_second_step", "never_zero", "step_twice"), GONE),
    **dict.fromkeys(("hooks_of_a_parameter", "hook_after_a_look"), ALONE),
    **dict.fromkeys(("read_state", "write_state", "forget_state", "assign_state"), ELSEWHERE),
    **dict.fromkeys(("state_of_another_name", "state_with_another_name", "state_by_name"), ELSEWHERE),
    "a_gradient_of_another_shape": "attempting to assign a gradient of size",
    "state_of_the_users_optimizer": "was given to a ZeroOptimizer, which has its states",
    "copy_the_optimizer": "cannot be copied or pickled",
    "resize_what_is_gathered": "was moved or converted",
    "restart_steps_in_state": "WRONG",  # there is nothing in it to be changed: the table lists it
}
# and at stage 3
PARTITIONED = {
    **dict.fromkeys(("set_data_in_forward", "change_data_in_forward", "interpolate_in_forward", "copy_in_forward"), RELEASED),
    **dict.fromkeys(("write_what_is_gathered_to_be_read", "assign_data", "clamp_data", "prune_data"), RELEASED),
    **dict.fromkeys(("change_data_taken_before", "clamp_in_place"), RELEASED),
    **dict.fromkeys(("read_between_steps", "look_at_data"), r"saw \[nan"),
    "backward_with_create_graph": "create_graph=True\\) at stage 3",
    "functional_gradient": "torch.func.grad, jvp and hessian of a model at stage 3",
    "transform_what_is_gathered_with_a_graph": "saved tensor hooks",
    "channels_last": r"saw \[0.0, 0.0",  # strides of what is released
    "turn_data": "WRONG",  # what is turned is NaN
    "write_data_of_what_is_gathered_to_be_read": "WRONG|right",  # .data: right where nothing is copied
}
CASES = (
    Case(0),
    Case(1),
    Case(2),
    Case(2, tier="host"),
    Case(2, tier="nvme"),
    Case(2, sgd=True),
    Case(2, tier="host", loss_scale=128.0, sgd=True),
)
STAGE_3 = Case(3, tier="host"), Case(3, tier="nvme", sgd=True), Case(3, tier="host", overlap_step=True)
SCALED = {"backward_with_create_graph": "create_graph=True"}


def verdicts(case: Case) -> dict[str, str]:
    return REFUSED | (PARTITIONED if case.stage == 3 else {}) | (SCALED if case.loss_scale else {})


def faults(name: str, cases: list[Case], drive: str, rank: int = 0) -> list[str]:
    chosen = [case for case in cases if not (case.sgd and "state" in name)]
    return [found for case in chosen if (found := fault(name, case, verdicts(case), rank, drive))]


@pytest.mark.parametrize("name", PROGRAMS)
def test_alone(name: str, tmp_path: Path) -> None:
    """At stage 3, and in a part of the other cases; the next program in the next part."""
    number = list(PROGRAMS).index(name)
    cases = [STAGE_3[number % 3], *CASES[number % 3 :: 3]]
    assert faults(name, cases, str(tmp_path)) == []


def test_the_table_names_every_program() -> None:
    text = (Path(__file__).parents[2] / "docs" / "guides" / "programs.md").read_text()
    assert sorted(re.findall(r"^\| `(\w+)` \|", text, re.M)) == sorted(PROGRAMS)


def on_rank(job: tuple[str, Case, str]) -> list[str]:
    name, case, drive = job
    return faults(name, [case], drive, dist.get_rank())


def test_two_ranks_see_what_one_process_sees(tmp_path: Path) -> None:
    """Each program that is not refused everywhere at one stage; at stage 3 all ranks use the same blocks."""
    cases = Case(1, world=2), Case(3, world=2, tier="host"), Case(2, world=2, tier="nvme")
    jobs = [(name, cases[number % 3], str(tmp_path)) for number, name in enumerate(name for name in PROGRAMS if name not in REFUSED)]
    jobs = [job for job in jobs if job[0] != "look_at_what_is_partly_used" or job[1].stage < 3]
    assert [rank for ranks in run_world(2, on_rank, jobs) for rank in ranks if rank] == []
