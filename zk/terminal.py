"""In: what a command prints, and its errors. Out: tables that are not cut off; one line and exit code 2 for what the user can mend."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from zk.config import ZeroConfig


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


def zero_config(*, stage: int, param_tier: str | None, nvme_path: Sequence[Path] | None, **fields: Any) -> ZeroConfig:
    """ZeroConfig from options of a command: parameters rest on the host at stage 3 where nothing else is said."""
    from zk.config import ZeroConfig

    return ZeroConfig(
        stage=stage,
        param_tier=param_tier or ("host" if stage == 3 else "device"),  # type: ignore[arg-type]
        nvme_path=tuple(map(str, nvme_path)) if nvme_path else None,
        **fields,
    )
