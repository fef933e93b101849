"""Updates by way of the device: whatever passes through it, the bits are those of the CPU update."""

import contextlib
import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import zk
from tests import softgpu
from tests.addons.common import FOLDER, PROGRAMS, faults_of_ranks, told
from tests.models import DEVICE, small_chunks
from tests.parity import halved, place, unlike
from zk import memory
from zk.addons import update_on as module
from zk.addons.update_on import UpdateOn
from zk.kernels import reference

device_only = pytest.mark.device_only


@contextlib.contextmanager
def small() -> Iterator[list[None]]:
    """Units have several chunks, and those that are sent are counted. Interpreted, the kernel rounds otherwise: both sides use torch's ops."""
    sent, send = list[None](), UpdateOn.send
    with contextlib.ExitStack() as stack:
        stack.enter_context(small_chunks())
        stack.enter_context(mock.patch.object(UpdateOn, "send", lambda *given: sent.append(send(*given))))
        if softgpu.installed():
            stack.enter_context(mock.patch("zk.kernels.adam_kernel.launch", reference.adam))
            stack.enter_context(mock.patch("zk.offload.cpu_adam.default_engine", lambda: "torch"))
            stack.enter_context(mock.patch.object(module, "default_engine", lambda: "numba"))
        yield sent


def differing(what: str, update_on: Any, overlap_step: bool = False, steps: int = 3, **options: Any) -> list[int]:
    """What differs from the CPU update, by number."""
    return unlike(PROGRAMS[what], steps, {"update_on": update_on, "overlap_step": overlap_step}, **options)


CASES: list[tuple[str, str, Any, dict[str, Any]]] = [
    ("plain", "0 host", "device", {}),
    ("add gradients", "1 host", 0.5, {}),
    ("plain", "2 host", "auto", {}),
    ("plain", "2 nvme", "device", {"dtype": "fp32"}),
    ("change rate", "3 nvme", "auto", {}),
    ("add gradients", "3 nvme device", 0.5, {}),
    ("add gradients", "3 host", "device", {"overlap_step": True, "dtype": "fp32"}),  # beside the next forward
    ("add gradients", "3 nvme", 0.5, {"overlap_step": True}),
    # what is read and written between steps has been copied down, and goes up again
    ("infinite", "2 host", 0.7, {"steps": 5}),
    ("assign gradients", "2 nvme", 0.7, {"steps": 3}),
    ("write parameters", "2 host", 0.7, {"steps": 3}),
    ("change states", "3 nvme", 0.7, {"steps": 5}),
    ("save", "3 host", 0.7, {"steps": 5}),
    ("plain", "2 host", "device", {"state_dtype": "bf16"}),
    ("plain", "2 host", "device", {"state_dtype": "8bit"}),
    ("plain", "2 host", "device", {"dtype": "fp16", "loss_scale": 1024.0, "model": "frozen"}),
    ("plain", "1 host", "device", {"kind": torch.optim.Adam, "clip_grad_norm": None}),
]
CHUNKS = 3 + 3 + 1  # of two blocks, and of the rest


@device_only
@pytest.mark.parametrize(("what", "name", "value", "options"), CASES, ids=told)
def test_bits_are_those_of_the_cpu_update(what: str, name: str, value: Any, options: dict[str, Any], tmp_path: Path) -> None:
    FOLDER[:] = [tmp_path / "saved"]
    (tmp_path / "drive").mkdir()
    with small() as every_send:
        assert differing(what, value, **place(name, tmp_path / "drive"), **options) == []
    every, sent = 3 * CHUNKS, len(every_send)
    if {"model", "steps", "kind"} & options.keys():
        assert sent
    elif value == "auto":
        assert 3 <= sent < every
    else:
        assert sent == (every if value == "device" else every // 2)


def ranks_differ(folder: str) -> list[int]:
    with small():
        return [*differing("plain", "auto", **place("1 host", Path(folder))), *differing("plain", 0.5, **place("3 nvme", Path(folder)))]


@device_only
def test_on_two_ranks(tmp_path: Path) -> None:
    assert faults_of_ranks(2, ranks_differ, [str(tmp_path)]) == {}


@device_only
@small()
def test_two_blocks_are_on_the_device_at_most() -> None:
    """However many there are, and with no wait of the host; and what is page-locked is given back."""
    locked = pinned()
    model = nn.Linear(1024, 64, bias=False, device=DEVICE)  # 32 chunks
    optimizer = zk.ZeroOptimizer(model, torch.optim.AdamW(model.parameters()), dtype="bf16", optimizer_tier="host", update_on="device")
    model(torch.ones(2, 1024, device=DEVICE, dtype=torch.bfloat16)).float().sum().backward()
    seen: list[int] = []
    send, before = UpdateOn.send, torch.cuda.memory_allocated()

    def watched(*given: Any) -> None:
        torch.cuda.reset_peak_memory_stats()
        send(*given)
        seen.append(torch.cuda.max_memory_allocated() - before)

    nothing = mock.patch("zk.kernels.adam_kernel.launch", lambda *_: None)  # torch's ops would take some
    with nothing, mock.patch.object(UpdateOn, "send", watched):
        optimizer.step()
    block = 2048 * (2 + 2 + 2 + 8)  # parameter, gradient, the rest of the master, moments
    assert len(seen) == 32 and max(seen) <= 2 * block
    assert all(field.is_pinned() for one in optimizer._trained for chunk in one.states for field in chunk.fields.values())
    optimizer.close()
    assert pinned() == locked


def pinned() -> int:
    gc.collect()
    memory.trim()
    return softgpu.pinned_nbytes()


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"optimizer_tier": "device"}, "no effect with optimizer_tier='device'"),
    ({"kind": torch.optim.NAdam}, r"needs Adam or AdamW .* got \['NAdam'\]"),
    ({"kind": lambda halves, **o: torch.optim.AdamW(halves, amsgrad=True, **o)}, "without amsgrad"),
    ({"overlap_step": "backward"}, "use overlap_step=True"),
    ({}, "needs numba"),
]


@device_only
def test_what_cannot_be_right_is_refused_by_name() -> None:
    for options, match in REFUSED:
        engine = mock.patch.object(module, "default_engine", lambda options=options: "numba" if options else "torch")
        with engine, pytest.raises(ValueError, match=f"update_on='auto' .*{match}"):
            halved(update_on="auto", **options)


def test_other_values_and_hosts_are_refused() -> None:
    for value in ("host", True, 1, 1.0, 0.0, 2.0, [0.5]):
        with pytest.raises(ValueError, match="update_on must be 'device', 'auto' or a share between 0 and 1; got"):
            UpdateOn(value)
    model = nn.Linear(2, 2)
    with pytest.raises(ValueError, match=r"update_on=0\.5 needs a GPU"):
        zk.ZeroOptimizer(model, torch.optim.AdamW(model.parameters()), optimizer_tier="host", update_on=0.5)
