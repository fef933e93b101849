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
# optimizer, where they meet. Three steps show it: the third one uses every buffer again, and every order is known by then. Alone, a process
# does at stages 0 to 2 the same; beside others, what an update in the background meets at stage 0 is its own. Models that are part of another one
# (frozen of unfreezing, unused of sometimes, checkpointed of the other two) are for the host. What a model does is met at stage 3, and below it
# what lies elsewhere there: parameters that begin to be trained, that are tied, and experts that a rank has no gradient of.
MODELS = ("plain", "sometimes", "unfreezing", "elsewhere", "experts_checkpointed")
IN_STEP = {
    1: [
        dataclasses.replace(case, steps=3)
        for case in spread(DEVICE_CASES)
        if (case.model in ("plain", "elsewhere")) + (case.dtype == "bf16") + (case.accumulation == 1) >= 2
        and case.model in (*MODELS, "tied", "checkpointed_reentrant")
        and (case.stage > 1 or (case.model == "plain" and case.dtype == "bf16"))
        and (case.stage == 3 or (case.overlap and case.clip and not case.no_sync))  # what of a unit a process holds alone they do not change
        and (case.optimizer == "AdamW" or (case.optimizer == "SGD" and case.stage < 3))  # (the host updates)
        and (case.tier == "device" or case.model != "tied")
        and (case.stage == 3 or case.dtype == "bf16")
        and (case.accumulation == 1 or case.no_sync or case.adversary or case.model == "elsewhere" or case.stage < 3)
        and (case.prefetch == 0) == (case.model == "elsewhere" and case.accumulation == 1)
        and (case.dtype != "fp32" or case.prefetch != 1)
        and (case.stage == 3 or case.model in ("plain", "unfreezing", "tied"))
        and (case.stage > 1 or case.accumulation > 1 or case.optimizer != "AdamW")
    ],
    2: [
        dataclasses.replace(case, steps=3)
        for case in spread(DEVICE_CASES)
        if case.dtype == "bf16" and case.optimizer == "AdamW" and (case.accumulation == 1) == (case.model != "elsewhere")
        and case.model in MODELS
        and case.clip
        and (case.stage == 3 or case.model in ("plain", "experts_checkpointed"))
        and case.tier != ("auto" if case.stage == 3 else "nvme")
        and (case.params != "host" or case.prefetch == 0)
    ],
}
IN_THE_BACKGROUND = {
    world: [
        dataclasses.replace(case, steps=5 if case.model == "unfreezing" else 4)
        for case in spread(OVERLAPPED)
        if case.stage in stages and (case.overlap or (case.stage == 3) == (world == 1)) and (world == 1 or case.stage < 3 or case.tier != "auto")
    ]
    for world, stages in ((1, (0, 3)), (2, (1, 2, 3)))
}


@pytest.mark.parametrize(
    ("world", "cases"),
    ((1, IN_STEP[1]), (2, IN_STEP[2]), (1, IN_THE_BACKGROUND[1]), (2, IN_THE_BACKGROUND[2])),
    ids=("in_step-1", "in_step-2", "in_the_background-1", "in_the_background-2"),
)
def test_the_latest_copies_change_no_bit(world: int, cases: list[Case]) -> None:
    table = run_world(world, run_case, cases, timeout=120)
    assert {str(case): rows for case, rows in zip(cases, table, strict=True) if rows != [""] * world} == {}
