"""The terminal: tables that are not cut off, errors in one line with exit code 2, and options of a command as fields of a dataclass."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import typer

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from zk.config import ZeroConfig

T = TypeVar("T")


@contextlib.contextmanager
def mendable(command: str) -> Iterator[None]:
    """Turn what the user can mend into one line and exit code 2, and Ctrl-C while training into one line."""
    try:
        yield
    except (ValueError, OSError, MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "can't allocate memory" not in str(error):  # as torch says it
            raise
        said = f"{error.filename}: {error.strerror}" if isinstance(error, OSError) and error.filename and error.strerror else error
        typer.secho(f"zk {command}: {said}", err=True, fg="red")
        raise typer.Exit(2) from None
    except KeyboardInterrupt:
        raise typer.Exit(130) from None


def wide(console: Console) -> Console:
    """With room for tables where the output is a file or a pipe, which has no width of its own."""
    if not console.is_terminal:
        console.width = max(console.width, 140)
    return console


def table(title: str, left: Iterable[str], right: Iterable[str] = ()) -> Table:
    """An empty table: columns of text, then columns of numbers."""
    from rich.table import Table

    made = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for heading in left:
        made.add_column(heading, no_wrap=True)
    for heading in right:
        made.add_column(heading, justify="right", no_wrap=True)
    return made


def chosen(cls: type[T], options: Mapping[str, Any], **others: Any) -> T:
    """An instance of a dataclass, from the options of a command that are called as its fields."""
    names = {field.name for field in dataclasses.fields(cls)} & options.keys()  # type: ignore[arg-type]
    return cls(**{**{name: options[name] for name in names}, **others})


def zero_config(options: Mapping[str, Any], **others: Any) -> ZeroConfig:
    """ZeroConfig from the options of a command: parameters rest on the host at stage 3 where nothing else is said."""
    from zk.config import ZeroConfig

    tier = options["param_tier"] or ("host" if options["stage"] == 3 else "device")
    return chosen(ZeroConfig, options, param_tier=tier, nvme_path=tuple(map(str, options["nvme_path"] or ())) or None, **others)
