"""The user's cache folder: results that are computed or measured once per machine."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from pathlib import Path
from typing import Any


def cache_folder(name: str = "") -> Path | None:
    """Folder for zk in the user's cache folder (``XDG_CACHE_HOME``, else ``~/.cache``), made if need be; None if it cannot be written."""
    try:
        home = Path.home() / ("Library/Caches" if sys.platform == "darwin" else ".cache")
        folder = Path(os.environ.get("XDG_CACHE_HOME") or home) / "zk" / name
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError):  # read-only, or a user without a home
        return None
    return folder if os.access(folder, os.W_OK) else None


def read_json(name: str) -> dict[str, Any]:
    """The content of a JSON file in the cache folder; empty if there is none, or one that cannot be read."""
    folder = cache_folder()
    try:
        found = json.loads((folder / name).read_text(encoding="utf-8")) if folder is not None else {}
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def write_json(name: str, content: dict[str, Any]) -> None:
    """Replace a JSON file in the cache folder, at once, so that readers never see half of it; nothing where it cannot be written."""
    folder = cache_folder()
    if folder is not None:
        with contextlib.suppress(OSError):
            replace_text(folder / name, json.dumps(content, indent=1))


def replace_text(path: Path, text: str) -> None:
    """Write a file, at once, so that readers never see half of it. OSError names that file."""
    passing = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        passing.write_text(text, encoding="utf-8")
        passing.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            passing.unlink()
        raise type(error)(f"{path} cannot be written: {error.strerror}") from None
