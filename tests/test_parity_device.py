"""What tests/test_parity.py shows, on devices with memory of their own: copies run as late as they may, and every missing wait shows.

Plain torch trains on the same device; the comparison is bitwise, and what raced is a difference too.
"""

from __future__ import annotations

import dataclasses
import itertools

import pytest

from tests.parity import Case, run_case, spread
from tests.test_parity import CASES
from tests.world import run_world

pytestmark = pytest.mark.usefixtures("torch_engine")

DEVICE_CASES = [dataclasses.replace(case, steps=4) for case in CASES] + [
    Case(stage=stage, dtype="bf16", tier=tier, steps=4, **options)
    for stage, (tier, options) in itertools.product(
        (0, 1, 2, 3),
        (
            ("nvme", {}),
            ("nvme", {"accumulation": 3, "adversary": True}),
            ("auto", {"budgets": (("device_budget", 60_000),)}),
        ),
    )
] + [
    Case(stage=3, dtype="bf16", tier="host", params="device", steps=4),
    *(Case(stage=3, dtype="bf16", tier="device", params="host", prefetch=prefetch, steps=4) for prefetch in (0, 1)),
]
OVERLAPPED = [
    Case(stage=stage, dtype="bf16", accumulation=accumulation, model=model, tier=tier, overlap=overlap, overlap_step=True, steps=5)
    for stage, (accumulation, model, tier, overlap) in itertools.product(
        (0, 1, 2, 3),
        ((1, "experts", "host", True), (2, "elsewhere", "host", True), (1, "plain", "host", False), (1, "unfreezing", "nvme", True)),
    )
] + [
    Case(
        stage=stage, dtype="bf16", tier="auto", params="host" * (stage == 3), overlap_step=True, budgets=(("device_budget", budget),), steps=5,
        update_on="device",
    )
    for stage, budget in ((1, 60_000), (2, 60_000), (3, 20_000))
]


# What a device adds it adds in one precision with each model, and in each precision with one model; two ranks in one precision, with one
# optimizer, where they meet. Each case with one process or with two: what a device adds to a case does not depend on how many there are. Three
# steps show it: the third one uses every buffer again, and every order is known by then. Models that are part of another one (frozen of
# unfreezing, unused of sometimes, checkpointed of the other two) are for the host. What a model does is met at stage 3, and below it what lies
# elsewhere there: parameters that begin to be trained, that are tied, and experts that a rank has no gradient of.
ALONE = [
    Case(stage=1, dtype="bf16", accumulation=3),
    Case(stage=2, dtype="bf16", model="unfreezing"),
    Case(stage=2, dtype="bf16", model="tied", tier="device"),
    Case(stage=3, dtype="bf16", model="checkpointed_reentrant"),
    Case(stage=3, dtype="bf16", clip=None),
    Case(stage=3, dtype="bf16", accumulation=3, no_sync=True),
    Case(stage=3, dtype="bf16", model="tied", tier="device"),
    Case(stage=3, model="elsewhere", prefetch=0),
    Case(stage=3, prefetch=3),
    *(Case(stage=stage, dtype="bf16", accumulation=3, tier="nvme", adversary=True) for stage in (1, 3)),
    Case(stage=3, dtype="bf16", tier="auto", budgets=(("device_budget", 60_000),)),
]
TWO = [
    Case(stage=0, dtype="bf16"),
    Case(stage=1, dtype="bf16", overlap=False),
    Case(stage=2, dtype="bf16", tier="auto", budgets=(("device_budget", 60_000),)),
    *(Case(stage=stage, dtype="bf16", model="experts_checkpointed") for stage in (2, 3)),
    *(Case(stage=3, dtype="bf16", model=model) for model in ("sometimes", "unfreezing")),
    Case(stage=3, dtype="bf16", model="elsewhere", accumulation=2),
    Case(stage=3, dtype="bf16", tier="nvme"),
    Case(stage=3, dtype="bf16", params="device"),
    Case(stage=3, dtype="bf16", tier="device", params="host", prefetch=0),
]
IN_STEP = {world: [dataclasses.replace(case, steps=3) for case in cases] for world, cases in ((1, ALONE), (2, TWO))}
# alone at stage 0, where an update meets what is its own, and what two ranks do not have; at stage 3 beside another rank
IN_THE_BACKGROUND = {
    world: [
        dataclasses.replace(case, steps=5 if case.model == "unfreezing" else 4)
        for case in spread(OVERLAPPED)
        if (case.stage == 0 or (case.stage == 3 and (case.tier == "auto" or not case.overlap)) if world == 1
            else case.stage > 0 and (case.stage < 3 or (case.tier != "auto" and case.overlap)))
    ]
    for world in (1, 2)
}  # fmt: skip


@pytest.mark.parametrize(
    ("world", "cases"),
    ((1, IN_STEP[1] + IN_THE_BACKGROUND[1]), (2, IN_STEP[2]), (2, IN_THE_BACKGROUND[2])),
    ids=("alone", "in_step-2", "in_the_background-2"),
)
def test_the_latest_copies_change_no_bit(world: int, cases: list[Case]) -> None:
    table = run_world(world, run_case, cases, timeout=120)
    assert {str(case): rows for case, rows in zip(cases, table, strict=True) if rows != [""] * world} == {}
