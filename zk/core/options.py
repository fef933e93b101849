"""Values of options, read as users write them, and checked: errors name the option."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence

import torch
from torch import nn

DTYPES: dict[str, torch.dtype] = {
    **dict.fromkeys(("fp32", "float32"), torch.float32),
    **dict.fromkeys(("bf16", "bfloat16"), torch.bfloat16),
    **dict.fromkeys(("fp16", "float16"), torch.float16),
}
_UNITS = {"": 1, "b": 1} | {f"{letter}{i}b": base**power for power, letter in enumerate("kmgt", 1) for i, base in (("", 1000), ("i", 1024))}


def parse_device(value: object) -> torch.device:
    """A device that is there, with its index; "cuda" is the current one."""
    if not isinstance(value, (str, torch.device)):
        raise TypeError(f"device must be a name such as 'cuda:0', a torch.device or None; got {value!r}")
    if not re.fullmatch(r"(cpu|cuda)(:0|:[1-9]\d?)?", str(value)):
        raise ValueError(f"device must be 'cpu', 'cuda' or 'cuda:N'; got {value!r}")
    device = torch.device(value)
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise ValueError(f"device={str(device)!r}, and torch sees no CUDA device; zk doctor says why")
        if device.index is None:
            return torch.device("cuda", torch.cuda.current_device())
        count = torch.cuda.device_count()
        if device.index >= count:
            there = "'cuda:0'" if count == 1 else f"'cuda:0' to 'cuda:{count - 1}'"
            raise ValueError(
                f"device={str(device)!r}, and torch sees {count} CUDA device{'s' * (count > 1)}: name {there}, start no more ranks than that, or see "
                "what CUDA_VISIBLE_DEVICES leaves"
            )
    return torch.device(device.type) if device.type == "cpu" else device


def is_count(value: object, least: int = 1) -> bool:
    """Tell if ``value`` is a whole number, of at least so much; True and False are none."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def parse_nbytes(value: int | str, field: str) -> int:
    """A budget as bytes: a positive int, or a string such as ``"24GiB"``, ``"500 MB"`` or ``"1.5TiB"``.

    Raises ValueError (or TypeError for other types) that names ``field``.
    """
    if isinstance(value, bool) or not isinstance(value, (int, str)):
        raise TypeError(f"{field} must be a number of bytes or a string like '24GiB'; got {value!r}")
    if isinstance(value, str):
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", value.lower())
        if match is None or match[2] not in _UNITS:
            raise ValueError(f"{field} must be a number of bytes or a string like '24GiB' or '500MB'; got {value!r}")
        nbytes = int(float(match[1]) * _UNITS[match[2]])
        if 0 < nbytes < 1000 and not match[2]:
            raise ValueError(f"{field} needs a unit, such as {match[1]}GiB or {match[1]}GB; got {value!r}, which is that many bytes")
    else:
        nbytes = value
    if nbytes <= 0:
        raise ValueError(f"{field} must be more than zero bytes; got {value!r}")
    return nbytes


def parse_paths(value: str | os.PathLike[str] | Sequence[str | os.PathLike[str]], field: str) -> tuple[str, ...]:
    """Folders as absolute paths. TypeError or ValueError names ``field``."""
    given = [value] if isinstance(value, (str, os.PathLike)) else value
    if not isinstance(given, Sequence) or not all(isinstance(path, (str, os.PathLike)) for path in given):
        raise TypeError(f"{field} must be a path, or a sequence of paths; got {value!r}")
    paths = tuple(os.path.abspath(path) for path in given)
    if not paths or len({os.path.realpath(path) for path in paths}) != len(paths):
        raise ValueError(f"{field} must name at least one folder, and each of them once; got {paths!r}")
    return paths


def parse_dtype(value: str | torch.dtype, field: str) -> torch.dtype:
    """A floating point dtype from its name (``"bf16"``) or itself; ValueError names ``field`` and the choices."""
    dtype = DTYPES.get(value.lower().removeprefix("torch.")) if isinstance(value, str) else value
    if dtype not in DTYPES.values():
        raise ValueError(f"{field} must be one of 'fp32', 'bf16', 'fp16' or the torch dtype; got {value!r}")
    assert dtype is not None
    return dtype


def parse_modules(value: object, field: str) -> tuple[str | type[nn.Module], ...]:
    """One name or class of modules, or a sequence of them. TypeError names ``field``."""
    if not isinstance(value, (str, type, Sequence)):
        raise TypeError(f"{field} must be a sequence of module names or nn.Module classes; got {value!r}")
    entries = (value,) if isinstance(value, (str, type)) else tuple(value)
    for entry in entries:
        if not isinstance(entry, str) and not (isinstance(entry, type) and issubclass(entry, nn.Module)):
            raise TypeError(f"{field} must hold module names or nn.Module classes; got {entry!r}")
    return entries
