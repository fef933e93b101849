"""Jobs drawn from seeds train as plain PyTorch does, with faults too; and a planted defect is found. `make simulate` runs many more."""

import pytest
import torch

from tests import simulate

pytestmark = [
    pytest.mark.usefixtures("torch_engine"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="its collectives and drives are of host memory"),
]


def test_jobs_from_seeds() -> None:
    ran, faults, wrong, _ = simulate.several(562, 582)  # eight kinds of faults, growing, parked
    assert not wrong, "\n".join(wrong)
    assert ran == 20 and faults, "no job met its fault"


@pytest.mark.parametrize(("name", "seed"), [("rank dropped from sums", 0), ("norm of the own shard", 0), ("steps not restored", 20)])
def test_a_planted_defect_is_found(name: str, seed: int) -> None:
    assert simulate.several(seed, seed + 1, name)[2]
