"""In: a JSON file, or a dict. Out: a dict, or an error that points at the character and shows the line as it should be."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any


@dataclasses.dataclass(frozen=True, slots=True)
class _Fault:
    """Where text stops to be JSON, and the text without that fault if it is a comma."""

    position: int
    message: str
    mended: str | None


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
    text = path.read_text(encoding="utf-8-sig")
    found = _parse(text, str(path))
    if not isinstance(found, dict):
        raise ValueError(f"{path} must hold a JSON object, {{...}}; it holds a {type(found).__name__}")
    return found, str(path)


def _parse(text: str, path: str) -> Any:
    """What the text says, or an error that shows all faults up to the first that is no comma."""
    reports: list[str] = []
    while (fault := _fault_of(text)) is not None:
        reports.append(_report(text, fault, path))
        if fault.mended is None:
            break
        text = fault.mended
    if reports:
        raise ValueError("\n".join(reports))

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        names = [name for name, _ in pairs]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"{path}: the key {name!r} is there {names.count(name)} times in one object; keep one of them")
        return dict(pairs)

    return json.loads(text, object_pairs_hook=unique)


def _fault_of(text: str) -> _Fault | None:
    position, message = _decode(text)
    if position is None:
        return None
    # the end of what is before: where a comma is missing, or is too many (some versions of Python point at that comma itself)
    before = position if text[position : position + 1] == "," else len(text[:position].rstrip()) - 1
    if before >= 0 and text[before] == "," and text[before + 1 :].lstrip()[:1] in ("}", "]"):
        mended = text[:before] + text[before + 1 :]
        if _gets_past(mended, before):
            return _Fault(before, "a comma before the closing bracket", mended)
    mended = f"{text[: before + 1]},{text[before + 1 :]}"
    if "',' delimiter" in message and _gets_past(mended, position + 1):
        return _Fault(before + 1, "a comma is missing", mended)
    if text.startswith(("//", "/*", "#"), position):
        message = "a comment, which JSON does not have: remove it"
    return _Fault(position, message, None)


def _decode(text: str) -> tuple[int | None, str]:
    """Where and why the text is not JSON; None if it is."""
    try:
        json.loads(text)
    except json.JSONDecodeError as error:
        return error.pos, error.msg
    return None, ""


def _gets_past(text: str, position: int) -> bool:
    """Whether the text is JSON up to ``position``, and further."""
    stopped, _ = _decode(text)
    return stopped is None or stopped > position


def _report(text: str, fault: _Fault, path: str) -> str:
    number = text.count("\n", 0, fault.position)
    start = text.rfind("\n", 0, fault.position) + 1
    line = text.split("\n")[number].rstrip("\r")
    column = fault.position - start
    caret = "".join("\t" if letter == "\t" else " " for letter in line[:column]) + "^"
    shown = f"{path}, line {number + 1}, column {column + 1}: {fault.message}\n    {line}\n    {caret}"
    return shown if fault.mended is None else f"{shown}\nwrite line {number + 1} as\n    {fault.mended.split(chr(10))[number].rstrip()}"
