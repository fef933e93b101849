"""In: a device. Out: what its link to the host moves each way, from page-locked memory (as zk does) and from pageable memory."""

from __future__ import annotations

import torch

from zk.bench.clock import Report, Row, Work, copy_gbps, seconds_of
from zk.offload.pinned import Arena
from zk.offload.streams import Link, link_to
from zk.offload.transfer import Transfer, pieces_of


def the_gpu() -> torch.device:
    """This process's GPU; ValueError, with the reason, where there is none."""
    if not torch.cuda.is_available():
        built = f"this torch is built for CUDA {torch.version.cuda}" if torch.version.cuda else "this torch is built without CUDA"
        raise ValueError(f"torch sees no GPU ({built}), so there is nothing to measure; python -m zk doctor says what there is")
    return torch.device("cuda", torch.cuda.current_device())


def measure(nbytes: int = 1 << 28, rounds: int = 9, device: torch.device | None = None) -> Report:
    """Both directions, one at a time and both at once. The floor is a copy of as many bytes in host memory.

    ``device``: one with memory of its own; None takes the GPU. ValueError where there is none.
    """
    device = the_gpu() if device is None else device
    link: Link = link_to(device)
    if link.joined:
        raise ValueError(f"{device} has the host's memory: there is no link to measure")
    copy = copy_gbps(torch.device("cpu"), nbytes, rounds)
    numel = nbytes // 2
    arena = Arena(link, 2 * nbytes)
    transfer = Transfer(link, arena, overlap=True)
    try:
        up, down = transfer.memory(numel, torch.bfloat16), transfer.memory(numel, torch.bfloat16)
        up.copy_(torch.arange(numel, dtype=torch.int32).remainder_(251).bfloat16())
        near_down = torch.randn(numel, device=device).bfloat16()
        near_up = torch.zeros(numel, dtype=torch.bfloat16, device=device)

        def pinned(*directions: str) -> Work:
            def run() -> None:
                events = []
                for piece in pieces_of(numel):
                    if "device to host" in directions:
                        events.append(transfer.offload_to(down[piece], near_down[piece]))
                    if "host to device" in directions:
                        events.append(transfer.upload(near_up[piece], up[piece]))
                for event in events:
                    event.wait()

            return run

        pageable_up, pageable_down = up.clone(), torch.zeros(numel, dtype=torch.bfloat16)
        works: dict[tuple[str, str, int], Work] = {
            ("pinned", "host to device", 1): pinned("host to device"),
            ("pinned", "device to host", 1): pinned("device to host"),
            ("pinned", "both at once", 2): pinned("host to device", "device to host"),
            ("pageable", "host to device", 1): lambda: near_up.copy_(pageable_up),
            ("pageable", "device to host", 1): lambda: pageable_down.copy_(near_down),
        }
        rows = []
        for (memory, direction, times), work in works.items():
            down.zero_(), pageable_down.zero_()
            transfer.follow(transfer.upload(near_up, down))
            work()
            there = down if memory == "pinned" else pageable_down
            if (direction != "device to host" and not torch.equal(near_up.cpu(), up)) or (
                direction != "host to device" and not torch.equal(there, near_down.cpu())
            ):
                raise RuntimeError(f"what was copied {direction} ({memory}) is not its source")
            seconds = seconds_of(work, rounds, device)
            rows.append(Row(f"{memory}, {direction}", seconds, times * nbytes / copy / 1e9, {"gbps": times * nbytes / 1e9}))
    finally:
        transfer.close()
    return Report("link", {"copy_gbps": copy}, rows, {"nbytes": nbytes, "device": str(device), "page_locked": arena.is_pinned})
