"""The grid of tests/test_parity.py on the new core: bit for bit what plain torch trains, on 1, 2 and 3 ranks."""

from __future__ import annotations

import pytest

from tests.next.stand_in import run_case
from tests.parity import Case
from tests.test_parity import CASES, NVME, OVERLAPPED, THREE, TWO
from tests.world import run_world

pytestmark = pytest.mark.usefixtures("torch_engine")


def is_promised(case: Case) -> bool:
    """Tell what the core trains; add-ons bring unfreezing, sums in 16 bits, and experts on ranks that use different ones."""
    if case.overlap_step and case.stage < 3:
        return False
    return case.model != "unfreezing" and not case.narrow and case.computes is None


def on_ranks(cases: list[Case]) -> list[Case]:
    return [case for case in cases if is_promised(case) and not (case.stage == 3 and case.model.startswith("experts"))]


ALONE = [case for case in [*CASES, *NVME, *OVERLAPPED] if is_promised(case)]


@pytest.mark.parametrize("case", ALONE, ids=str)
def test_one_process_trains_as_plain_torch(case: Case) -> None:
    assert run_case(case) == ""


@pytest.mark.parametrize("world, cases", [(2, on_ranks(TWO)), (3, on_ranks(THREE))])
def test_ranks_train_as_plain_torch(world: int, cases: list[Case]) -> None:
    found = dict(zip(cases, run_world(world, run_case, cases), strict=True))
    assert {str(case): said for case, said in found.items() if any(said)} == {}
