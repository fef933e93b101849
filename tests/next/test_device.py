"""Parity with plain torch on devices with memory of their own, whose copies run as late as they may; the plugin reports each that is unordered."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from unittest import mock

import pytest

from tests import softgpu
from tests.next.stand_in import run_case
from tests.parity import Case
from zk import kernels
from zk.kernels import reference

if not softgpu.installed():
    pytest.skip("for the software GPU (pytest -p tests.softgpu.plugin)", allow_module_level=True)

pytestmark = pytest.mark.usefixtures("torch_engine", "one_thread")

GRID = [
    Case(stage=stage, dtype=dtype, tier=tier, steps=3)
    for stage, dtype, tier in itertools.product((0, 1, 2, 3), ("bf16", "fp16", "fp32"), ("device", "host", "nvme"))
]
OTHERS = [
    *(Case(stage=stage, dtype="bf16", accumulation=3, tier=tier, steps=2) for stage, tier in itertools.product((1, 2, 3), ("host", "nvme"))),
    Case(stage=3, dtype="bf16", accumulation=3, no_sync=True, steps=2),
    Case(stage=3, dtype="bf16", model="checkpointed", steps=3),
    Case(stage=3, dtype="bf16", model="checkpointed_reentrant", tier="nvme", steps=3),
    Case(stage=3, dtype="bf16", model="tied", steps=3),
    Case(stage=3, dtype="bf16", model="elsewhere", prefetch=0, steps=3),
    Case(stage=3, dtype="bf16", clip=None, prefetch=3, steps=3),
    Case(stage=2, dtype="bf16", model="frozen", steps=3),
    Case(stage=3, dtype="bf16", tier="host", params="device", steps=3),
    Case(stage=3, dtype="bf16", tier="device", params="host", steps=3),
    Case(stage=3, dtype="bf16", tier="nvme", params="host", steps=3),
    Case(stage=2, dtype="bf16", optimizer="SGD", steps=3),
    Case(stage=3, dtype="bf16", overlap_step=True, steps=4),
]


@pytest.fixture(autouse=True)
def torch_updates() -> Iterator[None]:
    """On the device too the update is torch's own ops: interpreted, the kernel rounds otherwise, and takes most of the time."""
    with mock.patch.object(kernels, "adam", reference.adam):
        yield


@pytest.mark.parametrize("case", [*GRID, *OTHERS], ids=str)
def test_the_latest_copies_change_no_bit(case: Case) -> None:
    assert run_case(case) == ""
