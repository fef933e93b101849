"""Values of options, read as users write them. Errors name the option, its value and what it may be."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

DTYPES: dict[str, torch.dtype] = {
    **dict.fromkeys(("fp32", "float32"), torch.float32),
    **dict.fromkeys(("bf16", "bfloat16"), torch.bfloat16),
    **dict.fromkeys(("fp16", "float16"), torch.float16),
}
NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
TIERS = "device", "host", "nvme", "auto"
CALLED = {"cpu": "host", "gpu": "device", "cuda": "device", "none": "device", "disk": "nvme"}
SUFFIXES = {"": 1, "b": 1} | {
    f"{letter}{i}b": base**power
    for power, letter in enumerate("kmgt", 1)
    for i, base in (("", 1000), ("i", 1024))
}


def require(holds: object, message: str, error: type[Exception] = ValueError) -> None:
    """Raise ``error`` unless ``holds``."""
    if not holds:
        raise error(message)


def is_count(value: object, least: int = 1) -> bool:
    """Tell if ``value`` is a whole number, of at least so much; True and False are none."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def is_positive(value: object) -> bool:
    """Tell if ``value`` is a number above 0; True is none."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0


def is_finite(value: Any) -> bool:
    return is_positive(value) and value != float("inf")


def parse_tier(value: Any, name: str) -> str:
    """The name of a tier; others' words for it are answered with zk's."""
    tier = str(value).lower()
    meant = f"; what others call {tier!r} is {CALLED.get(tier)!r} here" * (tier in CALLED)
    words = f"{name} must be 'device', 'host', 'nvme' or 'auto'; got {value!r}{meant}"
    require(tier in TIERS, words)
    return tier


def parse_device(value: object, name: str) -> torch.device:
    """A device that is there, with its index; "cuda" is the current one."""
    words = f"{name} must be a name such as 'cuda:0', or a torch.device; got {value!r}"
    require(isinstance(value, (str, torch.device)), words, TypeError)
    found = re.fullmatch(r"(cpu|cuda)(:0|:[1-9]\d?)?", str(value))
    require(found, f"{name} must be 'cpu', 'cuda' or 'cuda:N'; got {value!r}")
    device = torch.device(str(value))
    if device.type == "cpu":
        return torch.device("cpu")
    words = f"{name}={str(value)!r}: torch sees no CUDA device; zk doctor says why"
    require(torch.cuda.is_available(), words)
    index = torch.cuda.current_device() if device.index is None else device.index
    count = torch.cuda.device_count()
    require(
        index < count,
        f"{name}={str(value)!r}, and torch sees {count} CUDA device{'s' * (count > 1)}: name one of "
        "these, start no more ranks than that, or see what CUDA_VISIBLE_DEVICES leaves",
    )
    return torch.device("cuda", index)


def parse_nbytes(value: Any, name: str) -> int:
    """Bytes above 0: a whole number, or a string such as "24GiB", "500 MB" or "1.5TiB"."""
    rule = f"{name} must be a number of bytes or a string like '24GiB'; got {value!r}"
    require(isinstance(value, (int, str)) and not isinstance(value, bool), rule, TypeError)
    found = re.fullmatch(r"\s*(-?\d+(?:\.\d+)?)\s*([a-z]*)\s*", str(value).lower())
    number, suffix = found.groups() if found else ("0", "none")
    require(suffix in SUFFIXES, rule)
    nbytes = int(float(number) * SUFFIXES[suffix])
    require(nbytes > 0, f"{name} must be more than zero bytes; got {value!r}")
    is_clear = nbytes >= 1000 or suffix or isinstance(value, int)
    require(is_clear, f"{name} needs a unit, such as '{nbytes}GiB'; got {value!r}")
    return nbytes


def parse_paths(value: Any, name: str) -> tuple[str, ...]:
    """One folder or several, as absolute paths; each must be named once."""
    given = [value] if isinstance(value, (str, os.PathLike)) else value
    is_path = isinstance(given, Sequence) and all(isinstance(p, (str, os.PathLike)) for p in given)
    words = f"{name} must be a path, or a sequence of paths; got {value!r}"
    require(is_path, words, TypeError)
    paths = tuple(os.path.abspath(path) for path in given)
    words = f"{name} must name folders, and each of them once; got {paths!r}"
    require(len(set(map(os.path.realpath, paths))) == len(paths), words)
    return paths


def parse_dtype(value: Any, name: str) -> Any:
    """A dtype that can be trained, by its name ("bf16") or itself."""
    dtype = DTYPES.get(value.lower().removeprefix("torch.")) if isinstance(value, str) else value
    require(dtype in NAMES, f"{name} must be one of 'fp32', 'bf16', 'fp16'; got {value!r}")
    return dtype


def parse_modules(value: Any, name: str) -> tuple[str | type[nn.Module], ...]:
    """One name or class of modules, or a sequence of them."""
    given = (value,) if isinstance(value, (str, type)) else value
    words = f"{name} must be a sequence of module names or classes; got {value!r}"
    require(isinstance(given, Sequence), words, TypeError)
    for one in given:
        is_known = isinstance(one, str) or (isinstance(one, type) and issubclass(one, nn.Module))
        words = f"{name} must hold module names or nn.Module classes; got {one!r}"
        require(is_known, words, TypeError)
    return tuple(given)
