"""The processes of pytest-xdist, forked as ranks are (tests/world.py): what each of them would import is two thirds of its start."""

from __future__ import annotations

import os
import sys
from multiprocessing.connection import Connection
from typing import Any

from execnet.gateway_base import Popen2IO

from tests.world import inherit, processes


def serve(reader: Connection, writer: Connection, environment: dict[str, str]) -> None:
    """Do what ``python -c`` does with what execnet says first."""
    os.environ.clear()
    os.environ.update(environment)
    inherit()
    from tests import shared  # imported in what this one is forked from

    os.dup2(shared.said, 2)
    for number, stream in enumerate((reader, writer)):
        os.dup2(stream.fileno(), number)
        stream.close()
    sys.stdin, sys.stdout = os.fdopen(0), os.fdopen(1, "w")
    exec(eval(sys.stdin.readline()), {"__name__": "__main__"})


class Worker(Popen2IO):
    """One of the processes of pytest-xdist, in place of ``python -c``."""

    def __init__(self, _: Any, execmodel: Any) -> None:
        context = processes()
        (their_in, ours), (mine, their_out) = (context.Pipe(duplex=False) for _ in range(2))
        self.process = context.Process(target=serve, args=(their_in, their_out, dict(os.environ)))
        self.process.start()
        files = [os.fdopen(os.dup(end.fileno()), mode) for end, mode in ((ours, "wb"), (mine, "rb"))]
        for end in (their_in, ours, mine, their_out):
            end.close()
        super().__init__(*files, execmodel)
        self.wait, self.kill = self.process.join, self.process.kill
