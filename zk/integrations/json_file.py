"""A JSON file or a dict as a dict, or an error that points at the character and shows the line as it should be."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def read_object(config: str | os.PathLike[str] | Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    """The config as a dict, and what to call it in messages.

    Raises ValueError for what is not JSON (file, line, column, the line with a caret; where a comma is missing or too many, also the line
    without that fault) or not an object, for keys that are there twice; OSError if the file cannot be read.
    """
    if isinstance(config, Mapping):
        return dict(config), "the config"
    if not isinstance(config, (str, os.PathLike)):
        raise TypeError(f"a config is a path to a JSON file, or a dict; got {config!r}")
    path = Path(config)

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        names = [name for name, _ in pairs]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"{path}: the key {name!r} is there {names.count(name)} times in one object; keep one of them")
        return dict(pairs)

    text = path.read_text(encoding="utf-8-sig")
    _check(text, str(path))
    found = json.loads(text, object_pairs_hook=unique)
    if not isinstance(found, dict):
        raise ValueError(f"{path} must hold a JSON object, {{...}}; it holds a {type(found).__name__}")
    return found, str(path)


def _check(text: str, path: str) -> None:
    """ValueError with all faults up to the first that is no comma."""
    reports: list[str] = []
    while (error := _error(text)) is not None:
        fault, mended = _comma(text, error)
        line = text.split("\n")[fault.lineno - 1].rstrip("\r")
        caret = re.sub(r"[^\t]", " ", line[: fault.colno - 1]) + "^"
        reports.append(f"{path}, line {fault.lineno}, column {fault.colno}: {fault.msg}\n    {line}\n    {caret}")
        if mended is None:
            break
        reports.append(f"write line {fault.lineno} as\n    {mended.split(chr(10))[fault.lineno - 1].rstrip()}")
        text = mended
    if reports:
        raise ValueError("\n".join(reports))


def _error(text: str) -> json.JSONDecodeError | None:
    try:
        json.loads(text)
    except json.JSONDecodeError as error:
        return error
    return None


def _comma(text: str, error: json.JSONDecodeError) -> tuple[json.JSONDecodeError, str | None]:
    """The error as one about a comma, with the text without it, if a comma more or less gets the parser further."""
    # the last character before the error (some versions of Python point at the comma that is too many itself)
    last = error.pos if text[error.pos : error.pos + 1] == "," else len(text[: error.pos].rstrip()) - 1
    before, after = text[: last + 1], text[last + 1 :]
    faults = []
    if re.match(r",\s*[]}]", text[max(0, last) :]):
        faults.append((last, "a comma before the closing bracket", before[:-1] + after))
    if "',' delimiter" in error.msg:
        faults.append((last + 1, "a comma is missing", f"{before},{after}"))
    for position, message, mended in faults:
        stopped = _error(mended)
        if stopped is None or stopped.pos > len(mended) - len(after.lstrip()):
            return json.JSONDecodeError(message, text, position), mended
    if text.startswith(("//", "/*", "#"), error.pos):
        error.msg = "a comment, which JSON does not have: remove it"
    return error, None
