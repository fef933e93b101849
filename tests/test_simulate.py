"""Jobs that are replayed from seeds go right, whatever comes first and whatever fails; the same seed is the same run; and defects are found."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.simulate.defects import DEFECTS, SEEDS, first_seed
from tests.simulate.job import report, run

COUNT, PART = 300, 25


@pytest.mark.parametrize("start", range(0, COUNT, PART))
def test_jobs_end_as_plain_training_does(start: int) -> None:
    wrong = [report(outcome) for outcome in map(run, range(start, start + PART)) if outcome.problems]
    assert not wrong, "\n".join(wrong)


def test_a_seed_is_one_run() -> None:
    """Also in another process, which has other addresses and another order of sets."""
    seeds = (5, 23)
    here = [run(seed).digest for seed in seeds]
    program = f"from tests.simulate.job import run; print(*(run(seed).digest for seed in {seeds}))"
    there = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()
    assert here == there


@pytest.mark.parametrize("name", SEEDS)
def test_a_planted_defect_is_found(name: str) -> None:
    """The seed that found it may be another one after a change of the code: then one of those that follow finds it."""
    found, problem = first_seed(name, [SEEDS[name], *range(1000)])
    assert found is not None, f"{name} is not found within 1000 seeds"
    assert problem


def test_each_defect_has_a_seed() -> None:
    assert set(SEEDS) == set(DEFECTS)
