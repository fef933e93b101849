"""What the compiler makes of the kernels, for GPUs that need not be there: read from the code that they would run."""

import functools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

PROGRAM = Path(__file__).parent / "compile_kernels.py"
ARCHITECTURES = (80, 90, 100, 120)


@functools.cache
def program() -> dict[str, Any]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("ZK_SOFTGPU")}
    environment |= {"TRITON_INTERPRET": "0", "TRITON_DEFAULT_FP_FUSION": "1", "PYTHONPATH": str(PROGRAM.parent.parent)}
    done = subprocess.run([sys.executable, str(PROGRAM)], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout)


def of(kind: str) -> list[dict[str, Any]]:
    found = [one for one in program()["compiled"] if kind in one["name"]]
    assert found, kind
    return found


@pytest.mark.parametrize("kind", ("cast", "flatten", "adam", "tiled_matmul"))
def test_kernels_spill_no_registers_fit_into_shared_memory_and_move_16_bytes_at_a_time(kind):
    assert {one["architecture"] for one in of(kind)} == set(ARCHITECTURES)
    for one in of(kind):
        assert one["stack"] == 0, one
        assert one["shared"] <= 99 * 1024, one  # the smallest among GPUs of these generations: compute capability 8.6
        assert one["wide_loads"] > 0 and one["wide_stores"] > 0, one


def test_16_bit_results_are_rounded_to_nearest_even():
    for one in of("to bf16") + of("to fp16") + of("fp32, flat bf16"):
        assert one["rounding"] and all(instruction.startswith("cvt.rn.") for instruction in one["rounding"]), one


def test_adam_divides_and_takes_roots_with_correct_rounding_and_leaves_no_product_to_be_fused():
    for one in of("adam"):
        assert one["divisions"] == ["div.rn.f32", "sqrt.rn.f32"], one
        assert one["loose_products"] == 0 and one["fused"] > 0, one


def test_launches_outside_of_an_op_leave_nothing_behind_in_torch():
    assert program()["launched"] == [3, 3, 3, 0, 0]
