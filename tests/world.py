"""Spawned ranks over gloo on loopback. Starting them is the cost: one world runs a whole list of cases, and ranks find torch imported."""

from __future__ import annotations

import os
import pickle
import random
import socket
import tempfile
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

# What every rank needs, imported once by the process that ranks are forked from: 2 s of a core for each of them otherwise. Nothing of zk:
# a mutant (tests/mutate_waits.py) has to be in place before. (A process that has asked for GPUs cannot be forked.)
SHARED = ("torch._dynamo", "torch.distributed.fsdp", "numba.typed", "numba.np.arraymath", "triton", "hypothesis", "pytest")
START = "spawn" if torch.cuda.is_available() else "forkserver"


def free_port() -> int:
    """A TCP port on loopback to listen at soon: below those that the system gives out, as other tests have it give out many meanwhile."""
    for port in random.SystemRandom().sample(range(20_000, 32_000), 100):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise RuntimeError("none of 100 ports between 20000 and 32000 is free")


def _rank_main(rank: int, world: int, rendezvous: str, environment: dict[str, str], work: bytes, results: Any, timeout: float) -> None:
    os.environ.clear()
    os.environ.update(environment)  # the test's of now, as what ranks are forked from has that of its own start
    os.environ["LOCAL_WORLD_SIZE"] = str(world)
    torch.set_num_threads(1)
    function, cases = pickle.loads(work)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world, timeout=timedelta(seconds=timeout))
    for index, case in enumerate(cases):
        try:
            results.put((rank, index, "ok", function(case)))
        except BaseException:
            results.put((rank, index, "error", traceback.format_exc()))
            if len(cases) > 1:  # ranks are out of step now: what follows would fail for a reason that is not its own
                results.put((rank, None, "stopped", f"after case {case}"))
                break
    dist.barrier() if len(cases) > 1 else None
    dist.destroy_process_group()


def run_world(world: int, function: Callable[[Any], Any], cases: Sequence[Any], timeout: float = 60.0) -> list[list[Any]]:
    """Call ``function(case)`` for every case on every rank. Returns [case][rank]: what came back, or a RuntimeError with the traceback.

    A function that catches its own assertion errors keeps the world going; one that raises ends it.
    """
    context = mp.get_context(START)
    context.set_forkserver_preload(list(SHARED))
    results = context.SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        work = pickle.dumps((function, list(cases)))
        arguments = (world, os.path.join(folder, "rendezvous"), dict(os.environ), work, results, timeout)
        ranks = [context.Process(target=_rank_main, args=(rank, *arguments)) for rank in range(world)]
        for process in ranks:
            process.start()
        table: list[list[Any]] = [[RuntimeError("no result: the rank ended before this case")] * world for _ in cases]
        while any(process.is_alive() for process in ranks) or not results.empty():
            if results.empty():
                for process in ranks:
                    process.join(0.02)
                continue
            rank, index, status, value = results.get()
            if index is not None:
                table[index][rank] = value if status == "ok" else RuntimeError(value)
        for process in ranks:
            process.join()
    return table
