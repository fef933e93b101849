"""Rates of both sides of the update, for ``update_on="auto"``: measured once a month, and kept in the user's cache folder."""

from __future__ import annotations

import functools
import platform
import statistics
import time
from collections.abc import Callable

import torch

from zk.core.cache import read_json, write_json
from zk.offload.cpu_adam import CPUAdam
from zk.offload.pinned import Arena
from zk.offload.streams import link_to
from zk.offload.transfer import Transfer, pieces_of

_FILE, _VALID_S, _NBYTES, _ROUNDS = "rates.json", 30 * 86_400, 256 << 20, 3
_NAMES = ("up", "down", "cpu", "memory", "when")


def _known(key: str) -> dict[str, float] | None:
    found = read_json(_FILE).get(key)
    if not isinstance(found, dict) or not all(isinstance(found.get(name), float) and found[name] > 0 for name in _NAMES):
        return None
    return found if time.time() - found["when"] < _VALID_S else None


def measure_update(device: torch.device, num_threads: int, ranks: int, say: Callable[[str], None]) -> dict[str, float]:
    """Rates as for ``zk.offload.streamed.best_share``, measured unless they are known; ``say`` is told first.

    Args:
        device: with memory of its own.
        num_threads: of the update in host memory.
        ranks: on this machine, which all measure at once.
    """
    key = f"{platform.node()}: update on {torch.cuda.get_device_name(device)} or {num_threads} threads, {ranks} ranks"
    if (found := _known(key)) is not None:
        return found
    say("measuring the link and the CPU update, once a month (a few seconds)")
    rates = {**_link(device), **_host(num_threads), "when": time.time()}
    write_json(_FILE, {**read_json(_FILE), key: rates})
    return rates


def _seconds(work: Callable[[], object]) -> float:
    """Median of some calls, after a first one that does not count."""
    taken = []
    for _ in range(_ROUNDS + 1):
        start = time.perf_counter()
        work()
        taken.append(time.perf_counter() - start)
    return statistics.median(taken[1:])


def _link(device: torch.device) -> dict[str, float]:
    """Bytes/s each way from page-locked memory: the slower of one way alone and half of both at once, as blocks stream."""
    link, numel = link_to(device), _NBYTES // 2
    transfer = Transfer(link, Arena(link, 2 * _NBYTES), overlap=True)
    try:
        hosts = [transfer.memory(numel, torch.bfloat16) for _ in range(2)]
        nears = [torch.zeros(numel, dtype=torch.bfloat16, device=device) for _ in range(2)]

        def copy(up: bool, down: bool) -> None:
            events = []
            for piece in pieces_of(0, numel):
                events += [transfer.offload_to(hosts[1][piece], nears[1][piece])] if down else []
                events += [transfer.upload(nears[0][piece], hosts[0][piece])] if up else []
            for event in events:
                event.wait()

        both = _NBYTES / _seconds(lambda: copy(True, True))
        up, down = (_NBYTES / _seconds(functools.partial(copy, way, not way)) for way in (True, False))
        return {"up": min(up, both), "down": min(down, both)}
    finally:
        transfer.close()


def _host(num_threads: int) -> dict[str, float]:
    """Elements/s that host threads update (bf16, split master, fp32 moments), and bytes/s of a copy in host memory, read plus written."""
    param = torch.nn.Parameter(torch.zeros(_NBYTES // 16, dtype=torch.bfloat16))
    param.grad = torch.full_like(param, 1e-3)
    adam = CPUAdam([param], lr=1e-3, num_threads=num_threads)
    source, target = torch.ones(_NBYTES // 4), torch.zeros(_NBYTES // 4)
    return {
        "cpu": param.numel() / _seconds(adam.step),
        "memory": 2 * source.nbytes / _seconds(lambda: target.copy_(source)),
    }
