"""In: what a command prints, and its errors. Out: tables that are not cut off; one line and exit code 2 for what the user can mend."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from rich.console import Console


@contextlib.contextmanager
def mendable(command: str) -> Iterator[None]:
    """What the user can mend becomes one line and exit code 2."""
    try:
        yield
    except (ValueError, OSError, MemoryError) as error:
        typer.secho(f"zk {command}: {error}", err=True, fg="red")
        raise typer.Exit(2) from None


def wide(console: Console) -> Console:
    """With room for tables where the output is a file or a pipe, which has no width of its own."""
    if not console.is_terminal:
        console.width = max(console.width, 140)
    return console
