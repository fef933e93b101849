"""Python programs, as subprocess would start them, forked from a process that has imported torch (see tests/world.py).

On the software GPU a program ends with status 86 where it raced. A program ends with its threads and atexit functions, but its objects
are left to the system: tests of imports, of shared pages and of the interpreter's very end start an interpreter instead.
"""

import atexit
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import threading
import traceback
import types
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from tests.world import become, inherit, processes

ROOT = Path(__file__).parent.parent


def _execute(how: str, *arguments: str) -> None:
    """Do what ``python how *arguments`` does: ``-c program``, ``-m module`` or a path, and their arguments."""
    if how == "-m":
        sys.argv = [*arguments]
        runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
    elif how == "-c":
        sys.argv = ["-c", *arguments[1:]]
        sys.modules["__main__"] = main = types.ModuleType("__main__")
        exec(compile(arguments[0], "<string>", "exec"), main.__dict__)
    else:
        sys.argv = [how, *arguments]
        sys.path.insert(0, str(Path(how).parent))
        runpy.run_path(how, run_name="__main__")


def _main(arguments: tuple[str, ...], environment: dict[str, str], stdout: Connection, stderr: Connection) -> None:
    os.chdir(ROOT)
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]  # it may start programs of its own
    inherit()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell that starts the tests in the background has them ignore Ctrl-C
    for number, stream in ((1, stdout), (2, stderr)):
        os.dup2(stream.fileno(), number)
        stream.close()
    if "OMP_NUM_THREADS" in environment:  # which OpenMP has read already
        torch.set_num_threads(int(environment["OMP_NUM_THREADS"]))
    races = become(environment)
    code: Any = 0
    try:
        _execute(*arguments)
    except SystemExit as end:
        code = end.code
        if isinstance(code, str):
            print(code, file=sys.stderr)
    except BaseException as error:
        traceback.print_exception(error)
        code = 128 + signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    if raced := races():
        print("\n".join(raced))
        code = 86
    for file in (sys.stdout, sys.stderr):
        file.flush()
    os._exit(code if isinstance(code, int) else int(code is not None))


class Program:
    """A running program. What of ``subprocess.Popen`` tests use, under the same names."""

    def __init__(self, *arguments: str, env: Mapping[str, str] | None = None) -> None:
        context = processes()
        readers, writers = zip(*(context.Pipe(duplex=False) for _ in range(2)), strict=True)
        given = (arguments, dict(os.environ if env is None else env), *writers)
        self.process = context.Process(target=_main, args=given, daemon=True)  # it ends with the tests, should one of them fail
        self.process.start()
        for writer in writers:
            writer.close()
        self.stdout, self.stderr = (os.fdopen(os.dup(reader.fileno()), encoding="utf-8", errors="replace") for reader in readers)
        for reader in readers:
            reader.close()
        self.pid = self.process.pid

    @property
    def returncode(self) -> int | None:
        return self.process.exitcode

    def poll(self) -> int | None:
        return self.returncode

    def send_signal(self, number: int = signal.SIGKILL) -> None:
        if self.returncode is None:
            os.kill(self.pid, number)

    kill = send_signal

    def wait(self, timeout: float = 300.0) -> int:
        self.process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired(self.process.name, timeout)
        return self.returncode

    def communicate(self, timeout: float = 300.0) -> tuple[str, str]:
        with ThreadPoolExecutor(2) as readers, self.stdout, self.stderr:
            said = [readers.submit(stream.read) for stream in (self.stdout, self.stderr)]
            try:
                self.wait(timeout)
            finally:
                self.kill()
            return said[0].result(), said[1].result()


def rank_of(world: int, rank: int, port: int) -> dict[str, str]:
    """The environment of one of several ranks on this machine, as torchrun sets it."""
    ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, "MASTER_PORT": port, "OMP_NUM_THREADS": 1}
    return {**os.environ, "MASTER_ADDR": "127.0.0.1", **{name: str(value) for name, value in ranks.items()}}


def run(*arguments: str, env: Mapping[str, str] | None = None, timeout: float = 300.0, check: bool = False) -> subprocess.CompletedProcess[str]:
    """``subprocess.run``, with what the program prints."""
    program = Program(*arguments, env=env)
    stdout, stderr = program.communicate(timeout)
    done = subprocess.CompletedProcess(arguments, program.wait(timeout), stdout, stderr)
    if check and done.returncode:
        raise AssertionError(f"{arguments[:2]} ended with {done.returncode}:\n{stderr}")
    return done
