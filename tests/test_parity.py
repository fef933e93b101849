"""Every stage, dtype, accumulation, world size and model trains exactly what plain torch trains.

Arithmetic is in the same order on both sides (tests/plain.py), so the comparison is bitwise: losses of rank 0, parameters, and the
optimizer's state. The update runs on the torch engine, whose operations are torch.optim's; the numba engine, which differs from it only in
a correctly rounded square root, is compared with it in test_cpu_adam.py and, across stages and worlds, below.
"""

from __future__ import annotations

import dataclasses
import itertools

import pytest

from tests.parity import Case, run_case, run_numba_case, spread
from tests.world import run_world

pytestmark = pytest.mark.usefixtures("torch_engine")  # and no case leaves its own behind

MODELS = ("plain", "tied", "unused", "frozen", "checkpointed")
DTYPES = ("bf16", "fp32", "fp16")
# each dtype with one micro-batch and with three in the plain model; each model with one and three in bf16 and, from stage to stage, another dtype
GRID = [
    Case(stage=stage, dtype=dtype, accumulation=accumulation, model=model)
    for stage, accumulation, (number, model) in itertools.product((0, 1, 2, 3), (1, 3), enumerate(MODELS))
    for dtype in (DTYPES if model == "plain" else dict.fromkeys(("bf16", DTYPES[(stage + number + accumulation) % 3])))
]
EXTRA = [
    Case(stage=stage, dtype="bf16", model=model, **options)
    for stage, (model, options) in itertools.product(
        (0, 1, 2, 3),
        (
            ("checkpointed_reentrant", {}),
            ("sometimes", {}),
            ("unfreezing", {}),
            ("elsewhere", {"accumulation": 2}),
            ("experts", {"accumulation": 3}),
            ("experts_checkpointed", {}),
            ("plain", {"optimizer": "Adam"}),
            ("plain", {"optimizer": "SGD"}),
            ("plain", {"clip": None}),
            ("plain", {"accumulation": 3, "no_sync": True}),
            ("plain", {"overlap": False}),
            ("tied", {"tier": "device"}),
        ),
    )
] + [Case(stage=3, prefetch=prefetch, model=model) for prefetch in (0, 3) for model in ("plain", "checkpointed", "elsewhere")]
CASES = GRID + EXTRA
# steps: one process trains five. The third one uses every buffer again, and every order is known by then: that is enough of ranks, which take longer.
# What ranks add to one they add in one precision with each model, and in each precision with one model; micro-batches are added up in one model.
# What an optimizer is they do not look at.
# Models that are part of another one (frozen of unfreezing, unused of sometimes, checkpointed of experts_checkpointed) do not meet two of them.
# Three divide units unevenly: that meets every model and use of a unit once, and at stage 0, where nothing is divided, one mean.
# Ranks in any order and with any faults: test_simulate.py.
BY_WORLD = {
    1: [dataclasses.replace(case, steps=5) for case in CASES],
    2: [
        dataclasses.replace(case, steps=3)
        for case in spread(CASES)
        if (case.accumulation == 1 or (case.dtype == "bf16" and case.model in ("plain", "elsewhere")))
        and (case.dtype == "bf16" or case.model == "plain")
        and (case.optimizer == "AdamW" or (case.optimizer == "SGD" and case.stage == 3))
        and (case.clip or case.stage == 3)
        and case.model not in ("unused", "frozen", "checkpointed")
    ],
    3: [
        dataclasses.replace(case, steps=3)
        for case in spread(GRID + [case for case in EXTRA if case.model in ("sometimes", "elsewhere")])
        if case.dtype == "bf16" and (case.accumulation == 1) == (case.model != "elsewhere") and (case.stage or case.model == "plain")
    ],
}
NVME = [
    Case(stage=stage, dtype=dtype, accumulation=accumulation, tier="nvme")
    for stage, dtype, accumulation in itertools.product((0, 1, 2, 3), ("fp32", "bf16", "fp16"), (1, 3))
] + [
    Case(stage=stage, tier="nvme", adversary=True, model=model, **{"dtype": "bf16", **options})
    for stage, (model, options) in itertools.product(
        (0, 1, 2, 3),
        (
            ("plain", {"accumulation": 3}),
            ("tied", {}),
            ("frozen", {}),
            ("unfreezing", {}),
            ("checkpointed", {"prefetch": 3}),
            ("sometimes", {"dtype": "fp32"}),
            ("experts", {"prefetch": 3}),
            ("experts_checkpointed", {}),
            ("elsewhere", {"prefetch": 0}),
            ("plain", {"optimizer": "Adam"}),
            ("plain", {"optimizer": "SGD"}),
            ("plain", {"accumulation": 3, "no_sync": True}),
        ),
    )
]


@pytest.fixture(scope="module")
def results() -> dict[int, dict[Case, list[object]]]:
    """Worlds are spawned when their first case is asked for, and run all cases."""
    return {}


@pytest.mark.parametrize(("world", "case"), [(world, case) for world, cases in BY_WORLD.items() for case in cases], ids=str)
def test_trains_what_plain_torch_trains(world: int, case: Case, results: dict[int, dict[Case, list[object]]]) -> None:
    if world == 1:
        assert run_case(case) == ""
        return
    if world not in results:
        results[world] = dict(zip(BY_WORLD[world], run_world(world, run_case, BY_WORLD[world]), strict=True))
    assert results[world][case] == [""] * world


def test_gradients_that_ranks_have_added_up_differently_meet_in_one_precision() -> None:
    """Of several micro-batches some ranks send an expert's gradient in 16 bits, as it came once, and others in fp32.

    The mean of single ones is rounded to 16 bits, which plain training that adds up in fp32 does not do: hence the tolerance.
    """
    case = Case(stage=3, dtype="bf16", accumulation=3, no_sync=True, model="experts", steps=6, tolerance=0.02)
    assert run_world(2, run_case, [case]) == [["", ""]]


# micro-batches added up in 16 bits, as param.grad of plain torch has them
NARROW = [
    Case(stage=stage, dtype=dtype, accumulation=3, tier=tier, model=model, no_sync=no_sync, narrow=True, steps=3)
    for stage, dtype, tier, model, no_sync in (
        *((stage, "bf16", "host", "plain", False) for stage in (0, 1, 2, 3)),
        *((stage, "bf16", "nvme", "unfreezing", False) for stage in (2, 3)),
        *((stage, "fp16", "device", "plain", True) for stage in (1, 3)),
        (3, "bf16", "nvme", "plain", True),
    )
]


@pytest.mark.parametrize("world", (1, 2))
def test_micro_batches_are_added_up_in_16_bits_where_that_is_asked(world: int) -> None:
    table = run_world(world, run_case, NARROW)
    assert {str(case): rows for case, rows in zip(NARROW, table, strict=True) if rows != [""] * world} == {}


# the update in step() or in the background, collectives waited for at once or not
OVERLAPPED = [
    Case(stage=stage, dtype="bf16", accumulation=accumulation, model=model, tier=tier, overlap=overlap, overlap_step=True, steps=5)
    for stage, (accumulation, model, tier, overlap) in itertools.product(
        (0, 1, 2, 3),
        ((1, "plain", "host", True), (3, "checkpointed", "host", False), (1, "tied", "nvme", True), (1, "unfreezing", "nvme", True)),
    )
]


@pytest.mark.parametrize("world", (1, 2))
def test_an_update_in_the_background_changes_no_bit(world: int) -> None:
    few = [dataclasses.replace(case, steps=5 if case.model == "unfreezing" else 4) for case in spread(OVERLAPPED)]
    cases = OVERLAPPED if world == 1 else few
    table = run_world(world, run_case, cases, timeout=120)
    assert {str(case): rows for case, rows in zip(cases, table, strict=True) if rows != [""] * world} == {}


@pytest.mark.parametrize("world", (1, 2))
def test_the_drive_changes_no_bit(world: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The NVMe tier against plain torch, also on a drive that is late and out of order; in a spawned world, as threads stay behind."""
    cases = [
        dataclasses.replace(case, steps=5 if case.model == "unfreezing" else 3)
        for case in spread(NVME)
        if world == 1 or (case.adversary and case.optimizer == "AdamW" and case.stage != 1 and case.model not in ("frozen", "checkpointed"))
        if world == 1 or case.stage or case.model == "unfreezing"
    ]
    table = run_world(world, run_case, cases, timeout=120)
    assert {str(case): rows for case, rows in zip(cases, table, strict=True) if rows != [""] * world} == {}


NUMBA = [Case(stage=stage, dtype=dtype, accumulation=2) for stage in (0, 1, 2, 3) for dtype in ("fp32", "bf16", "fp16")]


@pytest.mark.parametrize("world", (1, 2))
def test_numba_engine_gives_the_same_bits_at_every_stage(world: int) -> None:
    """Against CPUAdam on whole parameters: flat buffers, slices and ranks change nothing."""
    cases = [dataclasses.replace(case, clip=None, steps=3) for case in (NUMBA if world == 1 else spread(NUMBA))]
    table = run_world(world, run_numba_case, cases)
    assert {str(case): rows for case, rows in zip(cases, table, strict=True) if rows != [""] * world} == {}
