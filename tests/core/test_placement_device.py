"""Devices with memory of their own: what moves there, what "auto" puts there, and what does not fit."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import zk
from tests import softgpu
from tests.models import GPT, batch, train
from zk import placement
from zk.kernels import reference
from zk.offload import tiers as link
from zk.placement import Place

if not softgpu.installed():
    pytest.skip("for the software GPU (pytest -p tests.softgpu.plugin)", allow_module_level=True)

pytestmark = pytest.mark.usefixtures("torch_engine")
GIB = 1 << 30
HOST = {"stage": 3, "param_tier": "host", "optimizer_tier": "host"}


@pytest.fixture(autouse=True)
def torch_updates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zk.kernels.adam_kernel.launch", reference.adam)


def model() -> nn.Module:
    torch.manual_seed(0)
    made = GPT().cpu()
    made.register_buffer("table", torch.randn(5))
    return made


def wrap(net: nn.Module, **options: Any) -> zk.ZeroOptimizer:
    return zk.ZeroOptimizer(net, torch.optim.AdamW(net.parameters(), lr=1e-2), num_threads=1, **options)


@pytest.mark.parametrize("options", [{"stage": 2}, HOST])
def test_a_model_in_host_memory_moves_with_its_buffers_and_trains_the_same_bits(options: dict[str, Any]) -> None:
    net = model()
    other = copy.deepcopy(net).cuda()
    optimizer, plain = wrap(net, dtype="bf16", device="cuda", **options), wrap(other, dtype="bf16", **options)
    assert {tensor.device for tensor in (*net.parameters(), *net.buffers())} == {torch.device("cuda", 0)}
    assert train(net, optimizer, 2) == train(other, plain, 2)
    optimizer.close(), plain.close()
    assert all(map(torch.equal, net.state_dict().values(), other.state_dict().values()))


def test_no_more_than_a_unit_is_whole_on_the_device_while_a_model_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "BEHIND_NBYTES", 0)  # of copies to the host, which end late here
    net = nn.Sequential(*(nn.Linear(256, 256) for _ in range(16)))
    nbytes = sum(param.nbytes for param in net.parameters())
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    optimizer = wrap(net, device="cuda", units=[nn.Linear], **HOST)
    assert torch.cuda.max_memory_allocated() - before < nbytes / 4
    optimizer.close()


def test_devices_that_differ_or_are_not_there_are_refused() -> None:
    net = model().cuda()
    net.tokens.cpu()
    with pytest.raises(ValueError, match=r"'tokens.weight' on cpu and 'head.weight' on cuda:0: .*device="):
        wrap(net)
    with pytest.raises(ValueError, match="'cuda:7', and torch sees 2 CUDA devices: name another"):
        wrap(net, device="cuda:7")
    optimizer = wrap(net, device="cuda")
    train(net, optimizer, 2)
    net.cpu()
    with pytest.raises(RuntimeError, match=r"was moved or converted after .* on cpu"):
        net(batch(0))


def free(device: int, host: int = GIB) -> Any:
    found = {"device": device, "host": host, "nvme": GIB}
    return mock.patch.object(placement, "free_memory", lambda device, paths: found)


def test_auto_fills_half_of_the_device_and_trains_the_same_bits(tmp_path: Path) -> None:
    losses, places = [], []
    auto = {"optimizer_tier": "auto", "nvme_path": tmp_path, "param_tier": "auto"}
    numel = sum(param.numel() for param in model().parameters())
    for nbytes in (GIB, int(1.5 * numel), -4 * numel):
        net = model().cuda()
        with free(device=nbytes):
            optimizer = wrap(net, dtype="bf16", stage=3, **auto)
        places.append(set(optimizer._layout.places.values()))
        losses.append(train(net, optimizer, 2))
        optimizer.close()
    assert losses == losses[:1] * 3 and places[0] == {Place("device", "device")}
    assert Place("mirrored", "host") in places[1] and places[2] == {Place("host", "host")}
    with free(device=-4 * numel), pytest.raises(MemoryError):  # full parameters are on the device
        wrap(model().cuda(), dtype="bf16", stage=2, optimizer_tier="auto", nvme_path=tmp_path)
