"""Every stage, tier, precision, model, optimizer and number of ranks trains exactly what plain torch trains.

Arithmetic is in the same order on both sides (tests/plain.py), so the comparison is bitwise: losses of rank 0, parameters, and the
optimizer's state. The update runs on the torch engine, whose operations are torch.optim's; the numba engine, which differs from it only in
a correctly rounded square root, is compared with it in test_cpu_adam.py and, across stages and worlds, below.
"""

import functools
import itertools
from typing import Any

import pytest

from tests.parity import Case, run_case
from tests.world import run_world

pytestmark = pytest.mark.usefixtures("torch_engine")  # and no case leaves its own behind

TIERS, DTYPES = ("device", "host", "nvme"), ("bf16", "fp32", "fp16")
# each in its own way: shared, frozen, without a gradient always or at times, used twice, elsewhere, or as the data say; called again in backward
MODELS = ("plain", "tied", "unused", "frozen", "checkpointed_reentrant", "sometimes", "elsewhere", "experts", "experts_checkpointed")
MICRO_BATCHES: tuple[dict[str, Any], ...] = ({}, {"accumulation": 3, "steps": 2}, {"clip": None}, {"accumulation": 2, "no_sync": True, "steps": 2})
AT_STAGE_3: tuple[dict[str, Any], ...] = ({}, {"prefetch": 0}, {"prefetch": 3})
# One process: each stage with each tier in each precision, and each stage with each model, which meets another tier and precision at each of them.
# Every second drive is late and out of order.
ALONE = [
    Case(
        stage=stage,
        tier=tier,
        dtype=dtype,
        model=MODELS[(4 * stage + 3 * at + number) % len(MODELS)],
        adversary=tier == "nvme" and (stage + number) % 2 == 1,
        **MICRO_BATCHES[(stage + 2 * at + number) % 4],
        **(AT_STAGE_3[number] if stage == 3 else {}),
    )
    for stage in (0, 1, 2, 3)
    for (at, tier), (number, dtype) in itertools.product(enumerate(TIERS), enumerate(DTYPES))
]
OVERLAPPED = [Case(stage=3, dtype="bf16", overlap_step=True), Case(stage=3, dtype="bf16", model="tied", tier="nvme", overlap_step=True)]
# beyond AdamW: parameters of one unit with other step counts each; masters, gradients that are clipped; slices that begin anywhere.
# A branch is used at the second step and at the fifth one.
OPTIMIZERS = [
    *(
        Case(stage=index % 4, dtype=("bf16", "fp32")[index % 2], model="sometimes", optimizer=name, steps=5)
        for index, name in enumerate(("RMSprop", "NAdam", "RAdam", "Adagrad", "Adadelta", "Adamax", "Rprop", "ASGD", "SGD", "Adam"))
    ),
    Case(stage=3, dtype="bf16", optimizer="RMSprop", tier="nvme", adversary=True),
    Case(stage=2, dtype="fp16", optimizer="NAdam", tier="nvme", accumulation=2, steps=2),
    Case(stage=3, dtype="bf16", optimizer="Adagrad", overlap_step=True, clip=None),
]
# by the numba engine, against CPUAdam on whole parameters: flat buffers, slices and ranks change nothing
NUMBA = [
    Case(stage=stage, dtype=dtype, accumulation=2, steps=2, clip=None, optimizer="CPUAdam")
    for stage, dtype in ((1, "fp16"), (2, "fp32"), (3, "bf16"))
]
# Two ranks: what they send and when. Each stage with each tier, each of them in each precision; experts over ranks have a file of their own.
OF_RANKS = ("plain", "sometimes", "tied", "elsewhere", "frozen", "checkpointed_reentrant")
TWO = [
    Case(
        stage=stage,
        tier=tier,
        dtype=DTYPES[(stage + at) % 3],
        model=OF_RANKS[(stage + 3 * at) % len(OF_RANKS)],
        adversary=tier == "nvme",
        **MICRO_BATCHES[(stage + 3 * at) % 4],
        **(AT_STAGE_3[at] if stage == 3 else {}),
    )
    for stage, (at, tier) in itertools.product((0, 1, 2, 3), enumerate(TIERS))
] + [
    Case(stage=1, dtype="bf16", model="sometimes", optimizer="NAdam"),
    Case(stage=2, dtype="bf16", model="experts_checkpointed"),
    *(Case(stage=stage, dtype="bf16", model="checkpointed_reentrant", accumulation=3, no_sync=True, steps=2) for stage in (2, 3)),
    Case(stage=1, dtype="fp16", model="checkpointed_reentrant"),
    Case(stage=3, dtype="bf16", optimizer="SGD", clip=None),
    *OVERLAPPED,
]
# Three divide units unevenly: at stage 0, where nothing is divided, one mean.
THREE = [
    Case(stage=0, dtype="fp16", tier="device"),
    *(Case(stage=stage, dtype="bf16", model=model) for stage, model in ((1, "tied"), (2, "sometimes"), (3, "frozen"))),
    Case(stage=3, tier="nvme", model="elsewhere", accumulation=2, steps=2),
]
BY_WORLD = {1: [*ALONE, *OVERLAPPED, *OPTIMIZERS, *NUMBA], 2: [*TWO, NUMBA[0]], 3: THREE}


@functools.cache
def results(world: int) -> dict[Case, list[Any]]:
    """A world is spawned when its first case is asked for, and runs all of them."""
    return dict(zip(BY_WORLD[world], run_world(world, run_case, BY_WORLD[world]), strict=True))


@pytest.mark.parametrize(("world", "case"), [(world, case) for world, cases in BY_WORLD.items() for case in cases], ids=str)
def test_trains_what_plain_torch_trains(world: int, case: Case) -> None:
    assert results(world)[case] == [""] * world
