"""Jobs that are replayed from seeds go right, whatever comes first and whatever fails; the same seed is the same run; and defects are found."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import pytest

from tests.simulate.defects import DEFECTS, SEEDS, first_seed
from tests.simulate.job import Fault, Outcome, Plan, report, run
from tests.world import processes

COUNT = 24  # `make simulate` plays any number of others


@functools.cache
def played(seed: int) -> Outcome:
    return run(seed)


def digest_of(seed: int) -> str:
    return run(seed).digest


def test_jobs_end_as_plain_training_does() -> None:
    wrong = [report(outcome) for outcome in map(played, range(COUNT)) if outcome.problems]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("seed", [3061, 3558, 6442, 7463])
def test_seeds_that_found_something_stay_right(seed: int) -> None:
    """Memory freed under a collective, one error that two waits shared, and Ctrl-C while a process ends."""
    outcome = run(seed)
    assert not outcome.problems, report(outcome)


def test_a_seed_is_one_run() -> None:
    """Also in another process, which has other addresses and another order of sets."""
    seeds = (5, 23)
    with processes().Pool(1) as other:
        there = other.map(digest_of, seeds)
    assert there == [played(seed).digest for seed in seeds]


@pytest.mark.parametrize("name", SEEDS)
def test_a_planted_defect_is_found(name: str) -> None:
    """The seed that found it may be another one after a change of the code: then one of those that follow finds it."""
    found, problem = first_seed(name, [SEEDS[name], *range(1000)])
    assert found is not None, f"{name} is not found within 1000 seeds"
    assert problem


SETTING = {"stage": 2, "optimizer_tier": "nvme", "param_tier": "device", "overlap": True, "overlap_step": True, "prefetch": 1}


def plan_of(fault: Fault, **fields: Any) -> Plan:
    """Two ranks whose optimizer state is on a drive, and one fault."""
    fields = {"world": 2, "variant": "plain", "dtype": "bf16", "accumulation": 1, "retries": False, "returns": 0, **fields}
    return dataclasses.replace(Plan.of(0), settings=[SETTING] * 8, faults=[fault], save_every=1, async_save=False, **fields)


def test_bytes_that_are_read_in_other_pieces_than_they_were_written_are_checked() -> None:
    """One of these reads is of a part of what was written at once."""
    setting = {**SETTING, "stage": 3, "param_tier": "nvme", "overlap_step": False}
    plans = (dataclasses.replace(plan_of(Fault("corrupt", "pread tier", at)), settings=[setting] * 8) for at in (14, *range(2, 60)))
    with DEFECTS["checked_in_other_pieces"]():
        found = next((plan for plan in plans if run(14, plan).problems), None)
    assert found is not None
    assert run(14, found).problems == []


@pytest.mark.parametrize("at", range(8, 24, 5))
def test_an_update_beside_training_that_fails_is_heard_by_those_who_wait_for_its_part(at: int) -> None:
    outcome = run(at, plan_of(Fault("corrupt", "pread tier", at)))
    assert outcome.problems == [] and outcome.fired
    assert "ends with" not in "".join(outcome.trace) or "Timed out" not in "".join(outcome.trace)


@pytest.mark.parametrize("at", range(4, 40, 18))
def test_what_a_drive_changes_in_a_checkpoint_between_two_readings_is_found(at: int) -> None:
    plan = plan_of(Fault("corrupt", "pread saved", at), retries=True)
    plan.faults.append(Fault("raise", "choice", 900))
    assert run(at, plan).problems == []


def test_each_defect_has_a_seed() -> None:
    assert set(DEFECTS) - set(SEEDS) == {"checked_in_other_pieces"} and set(SEEDS) <= set(DEFECTS)
