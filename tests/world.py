"""Spawned ranks on loopback, over gloo or NCCL. Starting them is the cost: one world runs a whole list of cases, and ranks find torch imported."""

from __future__ import annotations

import contextlib
import functools
import os
import pickle
import random
import socket
import tempfile
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing import forkserver
from multiprocessing.connection import wait
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

ENVIRONMENT = dict(os.environ)  # of no test
SOFTWARE_GPU = os.environ.get("ZK_SOFTGPU") == "1"
START = "spawn" if torch.cuda.is_available() and not SOFTWARE_GPU else "forkserver"


@functools.cache
def mesh_of(device: str, shape: tuple[int, ...], *names: str) -> DeviceMesh:
    """A mesh of the ranks of this world, made once: each group of gloo's has a thread that wakes 100 times a second until the world ends."""
    return init_device_mesh(device, shape, mesh_dim_names=names or None)


def inherit() -> None:
    """Fork from what this process itself is forked from. The standard library would start another, whose imports take seconds."""
    forkserver._forkserver.ensure_running = lambda: None  # type: ignore[attr-defined]


def processes() -> Any:
    """The context that starts processes: forked from one that has imported what they need, but for a GPU, with which no process can be forked."""
    context = mp.get_context(START)
    context.set_forkserver_preload(["tests.shared"])
    if START == "forkserver":
        with mock.patch.dict(os.environ, ENVIRONMENT, clear=True):  # not that of the test which happens to be the first
            forkserver._forkserver.ensure_running()  # type: ignore[attr-defined]  # nothing where this process is forked from it (inherit)
    return context


def become(environment: dict[str, str]) -> Callable[[], list[str]]:
    """Take the environment of a test, as what a process is forked from has another; and its software GPU, of which races are found."""
    os.environ.clear()
    os.environ.update(environment)
    if environment.get("ZK_SOFTGPU") != "1":
        return list
    from tests import softgpu

    softgpu.install()
    return softgpu.found


def call(job: tuple[Callable[[Any], Any], Any]) -> Any:
    """Call a function with a value, for worlds that run the cases of several functions."""
    return job[0](job[1])


def free_port() -> int:
    """A TCP port on loopback to listen at soon: below those that the system gives out, as other tests have it give out many meanwhile."""
    for port in random.SystemRandom().sample(range(20_000, 32_000), 100):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise RuntimeError("none of 100 ports between 20000 and 32000 is free")


def _rank_main(rank: int, world: int, rendezvous: str, backend: str, environment: dict[str, str], work: bytes, results: Any, timeout: float) -> None:
    races = become({**environment, "LOCAL_WORLD_SIZE": str(world)})
    torch.set_num_threads(1)
    function, cases = pickle.loads(work)
    if torch.cuda.is_available():
        torch.cuda.set_device(rank % torch.cuda.device_count())  # one of its own; of the software GPU's one of two
    dist.init_process_group(backend, init_method=f"file://{rendezvous}", rank=rank, world_size=world, timeout=timedelta(seconds=timeout))
    if backend == "gloo":
        dist.barrier()  # a rank that ends before another has connected to it would end that one too
    for index, case in enumerate(cases):
        try:
            result = function(case)
            raced = races()
            said = "races:\n" + "\n".join(raced) if raced else pickle.dumps(result)  # whole: torch has its reader ask a rank, which may have gone
            results.put((rank, index, said))
        except BaseException:
            results.put((rank, index, traceback.format_exc()))
            break  # ranks are out of step now: what follows would fail for a reason that is not its own, and its peers are told at once
    else:
        dist.barrier() if len(cases) > 1 else None
    dist.destroy_process_group()


def run_world(world: int, function: Callable[[Any], Any], cases: Sequence[Any], timeout: float = 300.0, backend: str = "") -> list[list[Any]]:
    """Call ``function(case)`` for every case on every rank. Returns [case][rank]: what came back, or a RuntimeError with the traceback.

    A function that catches its own assertion errors keeps the world going; one that raises ends it. ``backend``: NCCL where there are GPUs,
    else gloo. Skips the test where there are fewer GPUs than ranks.
    """
    if torch.cuda.is_available() and not SOFTWARE_GPU and torch.cuda.device_count() < world:
        pytest.skip(f"{world} ranks need {world} GPUs; there are {torch.cuda.device_count()}")
    backend = backend or ("nccl" if torch.cuda.is_available() else "gloo")
    context = processes()
    results = context.SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        work = pickle.dumps((function, list(cases)))
        arguments = (world, os.path.join(folder, "rendezvous"), backend, dict(os.environ), work, results, timeout)
        ranks = [context.Process(target=_rank_main, args=(rank, *arguments)) for rank in range(world)]
        for process in ranks:
            process.start()
        table: list[list[Any]] = [[RuntimeError("no result: the rank ended before this case")] * world for _ in cases]
        while (alive := [process.sentinel for process in ranks if process.is_alive()]) or not results.empty():
            if results.empty():
                wait([results._reader, *alive])
                continue
            rank, index, said = results.get()
            table[index][rank] = RuntimeError(said) if isinstance(said, str) else pickle.loads(said)
    return table
