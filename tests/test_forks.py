"""Processes forked from one that trains, as a DataLoader's workers are: they cost no copy of its memory, and are told what they do not have."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.programs import Program

WORKERS = """
import gc, os, re, torch, zk
from pathlib import Path
from torch import nn
from torch.utils.data import DataLoader, Dataset

torch.set_num_threads(2)

class Lines(Dataset):
    def __len__(self):
        return 12
    def __getitem__(self, index):
        return torch.full((2048,), float(index))

def pss():
    pids = [os.getpid(), *Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()]
    return sum(int(re.search(r"^Pss:\\s+(\\d+) kB", Path(f"/proc/{pid}/smaps_rollup").read_text(), re.M)[1]) for pid in pids) << 10

def train(stage):
    model = nn.Sequential(*(nn.Linear(2048, 2048, bias=False) for _ in range(4)))
    nbytes = sum(param.nbytes for param in model.parameters())
    optimizer = zk.ZeroOptimizer(model, torch.optim.AdamW(model.parameters()), stage=stage, optimizer_tier="host")

    def step(batch):
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(2):
        step(torch.ones(4, 2048))
    loader, before, most = DataLoader(Lines(), batch_size=4, num_workers=2, multiprocessing_context="fork"), pss(), 0
    for batch in loader:
        step(batch)
        most = max(most, pss())
    print(f"{(most - before) / nbytes:.2f} {optimizer.metrics()['steps']}")
    optimizer.close()

for stage in (2, 3):
    train(stage)
    gc.collect()
"""


@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="needs the kernel's sums of memory")
def test_workers_of_a_loader_cost_no_copy_of_what_is_trained() -> None:
    """Parameters, gradients and states are four times the parameters, and each update writes three of them."""
    program = [sys.executable, "-c", WORKERS]
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}  # what torch frees goes back to the system at once
    done = subprocess.run(program, capture_output=True, text=True, timeout=300, env=environment, cwd=Path(__file__).parent.parent)
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    assert len(lines) == 2 and all(float(times) < 1 and steps == "5" for times, steps in lines), done.stdout


CLOSED = """
import os, sys, torch, warnings, zk
from torch import nn

stage, tier, folder = int(sys.argv[1]), sys.argv[2], sys.argv[3]
warnings.simplefilter("ignore")
torch.set_num_threads(1)
model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
places = {"optimizer_tier": tier, "param_tier": tier if stage == 3 else "device", "nvme_path": folder if tier == "nvme" else None}
optimizer = zk.ZeroOptimizer(model, torch.optim.AdamW(model.parameters()), stage=stage, **places)
model(torch.ones(2, 64)).sum().backward()
optimizer.step()
optimizer.close(gather=True)
want = model(torch.ones(2, 64)).sum().item()
child = os.fork()
if not child:
    os._exit(0 if model(torch.ones(2, 64)).sum().item() == want else 1)
print("status", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.parametrize(("stage", "tier"), [(2, "host"), (3, "host"), (3, "nvme")])
def test_a_process_that_is_forked_after_close_has_the_model(stage: int, tier: str, tmp_path: Path) -> None:
    said, errors = Program("-c", CLOSED, str(stage), tier, str(tmp_path)).communicate(60)
    assert said.splitlines() == ["status 0"], errors
