"""In: an error on the command line. Out: one line and exit code 2 for what the user can mend; anything else keeps its traceback."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import typer


@contextlib.contextmanager
def mendable(command: str) -> Iterator[None]:
    """What the user can mend becomes one line and exit code 2."""
    try:
        yield
    except (ValueError, OSError, MemoryError) as error:
        typer.secho(f"zk {command}: {error}", err=True, fg="red")
        raise typer.Exit(2) from None
