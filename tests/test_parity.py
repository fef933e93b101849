"""Every stage, dtype, accumulation, world size and model trains exactly what plain torch trains.

Arithmetic is in the same order on both sides (tests/plain.py), so the comparison is bitwise: losses of rank 0, parameters, and the
optimizer's state. The update runs on the torch engine, whose operations are torch.optim's; the numba engine, which differs from it only in
a correctly rounded square root, is compared with it in test_cpu_adam.py and, across stages and worlds, below.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import Any

import pytest

from tests.parity import Case, run_case, run_numba_case, spread
from tests.world import call, run_world

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
            ("elsewhere", {"accumulation": 2}),
            ("experts", {"accumulation": 3}),
            ("experts_checkpointed", {}),
            ("plain", {"optimizer": "Adam"}),
            ("plain", {"optimizer": "SGD"}),
            ("plain", {"clip": None}),
            ("plain", {"accumulation": 3, "no_sync": True}),
            ("tied", {"tier": "device"}),
        ),
    )
] + [Case(stage=3, prefetch=prefetch, model=model) for prefetch in (0, 3) for model in ("plain", "checkpointed", "elsewhere")]
CASES = GRID + EXTRA
# the update in the background
OVERLAPPED = [
    Case(stage=stage, dtype="bf16", accumulation=accumulation, model=model, tier=tier, overlap_step=True)
    for stage, (accumulation, model, tier) in itertools.product(
        (3,), ((1, "plain", "host"), (3, "checkpointed", "host"), (1, "tied", "nvme"))
    )
]
# precisions on a drive; and a drive that is late and out of order
NVME = [
    *(Case(stage=stage, dtype=dtype, tier="nvme") for stage, dtype in ((0, "fp16"), (1, "fp32"), (2, "bf16"), (3, "fp32"), (3, "bf16"))),
    Case(stage=3, dtype="fp16", accumulation=3, tier="nvme"),
    *(
        Case(stage=stage, tier="nvme", adversary=True, model=model, **{"dtype": "bf16", **options})
        for stage, model, options in (
            (1, "tied", {}),
            (2, "plain", {"accumulation": 3}),
            (2, "sometimes", {"dtype": "fp32"}),
            (3, "plain", {"accumulation": 3, "no_sync": True}),
            (3, "plain", {"optimizer": "Adam"}),
            (3, "plain", {"optimizer": "SGD"}),
            (3, "tied", {}),
            (3, "sometimes", {"dtype": "fp32"}),
            (3, "experts_checkpointed", {"prefetch": 3}),
            (3, "elsewhere", {"prefetch": 0}),
        )
    ),
]
# beyond Adam: parameters of one unit with other step counts each; masters, gradients that are clipped; slices that begin anywhere
OPTIMIZERS = [
    *(
        Case(stage=index % 4, dtype=("bf16", "fp32")[index % 2], model="sometimes", optimizer=name)
        for index, name in enumerate(("RMSprop", "NAdam", "RAdam", "Adagrad", "Adadelta", "Adamax", "Rprop", "ASGD"))
    ),
    Case(stage=3, dtype="bf16", optimizer="RMSprop", tier="nvme", adversary=True),
    Case(stage=2, dtype="fp16", optimizer="NAdam", tier="nvme", accumulation=2),
    Case(stage=3, dtype="bf16", optimizer="Adagrad", overlap_step=True, clip=None),
]
# by the numba engine, against CPUAdam on whole parameters: flat buffers, slices and ranks change nothing
NUMBA = [
    Case(stage=stage, dtype=dtype, accumulation=2, clip=None)
    for stage, dtype in ((0, "bf16"), (1, "fp16"), (2, "fp32"), (3, "fp32"), (3, "bf16"), (3, "fp16"))
]
# One process: stages differ in what of a unit it holds and when, which meets the models that are used in their own ways, each precision, and
# no_sync at each stage; other options at stage 3 and at one more. Models that are part of another one (unused of sometimes,
# checkpointed of experts_checkpointed) have several micro-batches. Precisions at stages 1 and 2, and what two ranks do with a drive
# that is late, are theirs.
ALONE = [
    case
    for case in CASES
    if case in spread(CASES) or case.model in ("sometimes", "elsewhere") or case.no_sync
    or (case.model in ("plain", "tied") and case == Case(stage=case.stage, dtype=case.dtype, model=case.model))
    if (case.dtype == "bf16" or (case.model == "plain" and case.stage in (0, 3)))
    and (case.accumulation == 3 or case.model not in ("unused", "checkpointed"))
    and (case.dtype == "bf16" or case.accumulation == 1 or case.stage == 3)
    and (case.model != "tied" or case.accumulation == 1 or case.stage == 3)
    and (case.model != "checkpointed" or case.stage == 0)  # of experts, and reentrant, at stage 3
    and (case.model != "experts" or case.stage == 3)
]  # fmt: skip
# Two ranks: what they send and when, by stage, precision and model. What an optimizer is they do not look at, nor how often a step is taken.
TWO = [
    *(Case(stage=stage, dtype=dtype) for stage, dtype in ((0, "bf16"), (1, "fp32"), (2, "fp16"))),
    *(Case(stage=stage, dtype="bf16", accumulation=3, no_sync=no_sync) for stage, no_sync in ((0, True), (1, False))),
    Case(stage=1, dtype="bf16", model="sometimes"),
    Case(stage=1, dtype="bf16", model="sometimes", optimizer="NAdam"),
    Case(stage=2, dtype="bf16", model="experts_checkpointed"),
    Case(stage=3, dtype="fp32", prefetch=0),
    Case(stage=3, dtype="bf16", model="checkpointed_reentrant", prefetch=3),
    Case(stage=3, dtype="bf16", model="elsewhere", accumulation=2),
    Case(stage=3, dtype="bf16", model="tied", tier="device"),
    Case(stage=3, dtype="bf16", optimizer="SGD", clip=None),
    *(case for case in OVERLAPPED if case.model in ("plain", "tied")),
    *(case for case in NVME if case.adversary and (case.no_sync or case.model in ("sometimes", "elsewhere"))),
]
# Three divide units unevenly: at stage 0, where nothing is divided, one mean.
THREE = [
    Case(stage=0, dtype="bf16"),
    *(Case(stage=stage, dtype="bf16", model=model) for stage, model in ((1, "tied"), (2, "sometimes"), (3, "frozen"))),
    Case(stage=3, dtype="bf16", model="elsewhere", accumulation=2),
]
# what one process does with a drive, and in the background, where two ranks do not do the same
HERE = [
    *OVERLAPPED,
    *(case for case in NVME if case not in TWO and (case.adversary or case.dtype != "fp32" or case.stage == 1)),
    *OPTIMIZERS,
]
BY_WORLD: dict[int, list[tuple[Callable[[Case], str], Case]]] = {
    1: [*((run_case, case) for case in (*ALONE, *HERE)), *((run_numba_case, case) for case in NUMBA)],
    2: [*((run_case, case) for case in TWO), *((run_numba_case, case) for case in NUMBA if case.stage == 1)],
    3: [(run_case, case) for case in THREE],
}


def trained(case: Case, world: int) -> Case:
    """With as many steps as show all of it: the third one uses every buffer again, and every order is known by then. A branch is used at the second
    step and at the fifth one."""
    is_long = case.model == "sometimes" and case.tier == "host" and world == 1
    has_many = case.accumulation == 3 and not case.overlap_step  # passes, of which each uses the buffers of the one before
    return dataclasses.replace(case, steps=5 if is_long else 2 if has_many else 3)


@functools.cache
def results(world: int) -> dict[tuple[Any, Case], list[Any]]:
    """A world is spawned when its first case is asked for, and runs all of them."""
    jobs = [(function, trained(case, world)) for function, case in BY_WORLD[world]]
    return dict(zip(BY_WORLD[world], run_world(world, call, jobs), strict=True))


@pytest.mark.parametrize(
    ("world", "function", "case"),
    [(world, *job) for world, jobs in BY_WORLD.items() for job in jobs],
    ids=lambda value: value.__name__ if callable(value) else str(value),
)
def test_trains_what_plain_torch_trains(world: int, function: Callable[[Case], str], case: Case) -> None:
    assert results(world)[function, case] == [""] * world
