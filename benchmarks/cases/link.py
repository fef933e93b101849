"""The link between a device and the host, each way, from page-locked memory (as zk does) and from pageable memory."""

from __future__ import annotations

import functools
import time
from collections.abc import Iterator
from typing import Any

import torch

from zk.memory import aligned, empty
from zk.offload.tiers import CudaLink, link_to

from .clock import CPU, Case, Report, copy_gbps, the_gpu

UP, DOWN = "host to device", "device to host"


def _cases(link: CudaLink, device: torch.device, numel: int) -> Iterator[Case]:
    """Copies of ``numel`` bf16 elements, compared with their sources first. RuntimeError if one differs."""
    memory = {"pinned": [empty(numel, torch.bfloat16, CPU, link) for _ in range(2)]}
    up = memory["pinned"][0].copy_(torch.arange(numel, dtype=torch.int32).remainder_(251).bfloat16())
    memory["pageable"] = [up.clone(), torch.zeros_like(up)]
    near_up, near_down = torch.zeros_like(up, device=device), torch.randn(numel, device=device).bfloat16()

    def copy(kind: str, directions: tuple[str, ...]) -> None:
        (source, target), events = memory[kind], []
        if kind == "pageable":
            origin, copied = (source, near_up) if UP in directions else (near_down, target)
            copied.copy_(origin)
            return
        if DOWN in directions:
            events.append(link.offload(target, near_down))
        if UP in directions:
            events.append(link.upload(near_up, source))
        for event in events:
            event.wait()

    ways: list[tuple[str, str, tuple[str, ...]]] = [(kind, way, (way,)) for kind in memory for way in (UP, DOWN)]
    ways.insert(2, ("pinned", "both at once", (UP, DOWN)))
    for kind, name, directions in ways:
        target = memory[kind][1].zero_()
        link.follow(link.upload(near_up, memory["pinned"][1].zero_()))
        copy(kind, directions)
        if (UP in directions and not torch.equal(near_up.cpu(), up)) or (DOWN in directions and not torch.equal(target, near_down.cpu())):
            raise RuntimeError(f"what was copied {name} ({kind}) is not its source")
        amount = len(directions) * up.nbytes / 1e9
        yield Case(f"{kind}, {name}", functools.partial(copy, kind, directions), {"gbps": amount})


def page_lock(nbytes: int, threads: int) -> tuple[float, float, str]:
    """Seconds in which threads touch new memory, and those to page-lock it; or if that is refused."""
    link: Any = link_to(the_gpu())
    memory, start = aligned(nbytes), time.perf_counter()
    torch.set_num_threads(max(1, threads))
    memory[: nbytes * bool(threads)].fill_(1)
    touched = time.perf_counter()
    link.pin(memory)
    locked = time.perf_counter()
    link.unpin(memory)
    return touched - start, locked - touched, ": refused" * bool(link.refuses)


def measure(nbytes: int = 1 << 28, rounds: int = 9, device: torch.device | None = None) -> Report:
    """Both directions, one at a time and both at once. The floor is a copy of as many bytes in host memory.

    ``device``: one with memory of its own; None takes the GPU. ValueError where there is none.
    """
    device = the_gpu() if device is None else device
    link = link_to(device)
    if link is None:
        raise ValueError(f"{device} has the host's memory: there is no link to measure")
    floors = {"copy_gbps": copy_gbps(CPU, nbytes, rounds)}
    found = Report.of("link", _cases(link, device, nbytes // 2), floors, rounds, device)
    found.settings.update(nbytes=nbytes, device=str(device), page_locked=not link.refuses)
    return found
