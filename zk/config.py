"""ZeroConfig: frozen options, each checked on construction. No I/O, no process groups.

Errors name the option, what it may be, and the value.
"""

from __future__ import annotations

import dataclasses
import difflib
import os
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed import ProcessGroup

from zk.addon import METHODS, OPTIONS, Addon, found
from zk.logs import require
from zk.precision import DynamicLossScale

Parser = Callable[[Any, str], Any]  # of a value as users write it, for the option of that name
PATH = str, os.PathLike
NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
DTYPES = {name: dtype for dtype, short in NAMES.items() for name in (short, str(dtype)[6:])}


def is_count(value: object, least: int = 1) -> bool:
    """Tell if ``value`` is a whole number, of at least so much; True and False are none."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def is_positive(value: Any) -> bool:
    """Tell if ``value`` is a finite number above 0; True is none."""
    return type(value) in (int, float) and 0 < value < float("inf")


def rule(holds: Callable[[Any], object], words: str, error: type[Exception] = ValueError) -> Parser:
    """A parser of values that must be as ``words`` say."""

    def parse(value: Any, name: str) -> Any:
        require(holds(value), f"{name} must be {words}; got {value!r}", error)
        return value

    return parse


def parse_tier(value: Any, name: str) -> str:
    """The name of a tier."""
    words = "'device', 'host', 'nvme' or 'auto' (a GPU is 'device', a CPU 'host', a disk 'nvme')"
    tier = str(value).lower()
    require(tier in words.split("'")[1:9:2], f"{name} must be {words}; got {value!r}")
    return tier


def parse_device(value: object, name: str) -> torch.device:
    """A device that torch sees, with its index; "cuda" is the current one."""
    words = f"{name} must be 'cpu', 'cuda' or 'cuda:N'; got {value!r}"
    require(isinstance(value, (str, torch.device)), words, TypeError)
    require(re.fullmatch(r"(cpu|cuda)(:0|:[1-9]\d?)?", str(value)), words)
    device = torch.device(str(value))
    if device.type == "cpu":
        return torch.device("cpu")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    index = device.index if device.index is not None or not count else torch.cuda.current_device()
    require(
        (index or 0) < count,
        f"{name}={str(value)!r}, and torch sees {count} CUDA devices: name another one, start no more "
        "ranks than that, or see what CUDA_VISIBLE_DEVICES leaves (zk doctor says why)",
    )
    return torch.device("cuda", index)


def parse_nbytes(value: Any, name: str) -> int:
    """Bytes above 0: a whole number, or a string such as "24GiB", "500 MB" or "1.5TiB"."""
    words = (
        f"{name} must be a number of bytes above 0, or a string with a unit: '24GiB'; got {value!r}"
    )
    require(isinstance(value, (int, str)) and not isinstance(value, bool), words, TypeError)
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(([kmgt]i?)?b)?\s*", str(value).lower())
    number, suffix, prefix = found.groups("") if found else ("0", "", "")
    nbytes = int(float(number) * (1024 if prefix[1:] else 1000) ** " kmgt".find(prefix[:1]))
    # "24" alone is more likely GiB than bytes
    require(nbytes >= 1000 or (nbytes and (suffix or isinstance(value, int))), words)
    return nbytes


def parse_paths(value: Any, name: str) -> tuple[str, ...]:
    """One folder or several, as absolute paths; each must be named once."""
    given = [value] if isinstance(value, PATH) else value
    is_path = isinstance(given, Sequence) and all(p and isinstance(p, PATH) for p in given)
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
    given = value if isinstance(value, Sequence) and not isinstance(value, str) else (value,)
    kinds = (one if isinstance(one, type) else type(one) for one in given)
    words = f"{name} must hold module names or nn.Module classes; got {value!r}"
    require(all(issubclass(kind, (str, nn.Module)) for kind in kinds), words, TypeError)
    return tuple(given)


def parse_loss_scale(value: Any, name: str) -> Any:
    """ "auto", a number, or the rule of a dynamic one."""
    scale = DynamicLossScale() if value == "dynamic" else value
    is_known = scale in ("auto", None) or isinstance(scale, DynamicLossScale) or is_positive(scale)
    words = "'auto', 'dynamic', a DynamicLossScale, None or a finite number above 0"
    require(is_known, f"{name} must be {words}; got {value!r}")
    return scale


PARSERS: dict[str, Parser] = {
    "stage": rule(lambda v: is_count(v, 0) and v < 4, "0, 1, 2 or 3"),
    "dtype": parse_dtype,
    "keep_dtype": parse_modules,
    "device": parse_device,
    "param_tier": parse_tier,
    "optimizer_tier": parse_tier,
    "nvme_path": parse_paths,
    "device_budget": parse_nbytes,
    "host_budget": parse_nbytes,
    "clip_grad_norm": rule(is_positive, "more than 0, or None"),
    "loss_scale": parse_loss_scale,
    "prefetch": rule(lambda v: is_count(v, 0), "a number of units, 0 or more"),
    "num_threads": rule(is_count, "1 or more, or None"),
    "process_group": rule(
        lambda v: isinstance(v, ProcessGroup),
        "a ProcessGroup that this rank is a member of (of a DeviceMesh: mesh.get_group()), or None",
        TypeError,
    ),
    "units": parse_modules,
    "addons": rule(
        lambda v: isinstance(v, (list, tuple)) and all(isinstance(one, Addon) for one in v),
        "a list of zk.Addon objects",
        TypeError,
    ),
}


@dataclasses.dataclass(frozen=True, init=False)
class ZeroConfig:
    """Options of a ZeroOptimizer. Every field is checked on construction.

    An option that is no field here belongs to an add-on, which its name makes.

    Raises:
        ValueError: for a value that has no meaning, with the remedy.
        TypeError: for a value of another type, and for an unknown option.
    """

    stage: int = 2
    """0: nothing is partitioned; 1: optimizer states; 2: gradients too; 3: parameters too."""
    dtype: str | torch.dtype | None = None
    """Parameters are cast to "bf16", "fp16" or "fp32", and so are inputs of the model's own call;
    None: they keep their own. Buffers keep theirs, and so do the parameters of BatchNorm, and what
    the model names in ``_keep_in_fp32_modules``."""
    keep_dtype: Sequence[str | type[nn.Module]] | None = None
    """What keeps its dtype: module classes; names of modules and parameters, or parts of names."""
    device: str | torch.device | None = None
    """The device that computes, for a model that is in host memory: it moves there unit by unit.
    None: where parameters are."""
    param_tier: str = "device"
    """Where parameters rest between uses at stage 3: "device", "host", "nvme" or "auto"."""
    optimizer_tier: str = "device"
    """Where gradients and optimizer states rest, and are updated."""
    nvme_path: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | None = None
    """The folder of the "nvme" tier, or several to stripe over. What is put there is private, and
    gone in the end."""
    device_budget: int | str | None = None
    """Bytes ("24GiB") of device memory for training state on a rank; "auto" fills it first. None:
    with "auto" half of what is free on a GPU, otherwise no limit."""
    host_budget: int | str | None = None
    """Bytes ("24GiB") of host memory for training state on a rank; with "nvme", whole
    units that fit stay there, parameters first. None: with "auto" nine tenths of this rank's share of
    what is free; with "nvme", none do; otherwise no limit."""
    clip_grad_norm: float | None = None
    """The largest 2-norm of all gradients: larger ones are scaled down in the update."""
    loss_scale: str | float | DynamicLossScale | None = "auto"
    """A number, "dynamic", DynamicLossScale(...), None, or "auto": dynamic for fp16, else none."""
    prefetch: int = 1
    """How many units are gathered ahead of the one in use, at stage 3."""
    num_threads: int | None = None
    """Threads of the CPU update; None: cores divided by ranks on this machine."""
    process_group: ProcessGroup | None = None
    """The ranks that train together; None: the default group, or one process without one."""
    units: Sequence[str | type[nn.Module]] | None = None
    """Modules that travel as one unit, by name or class; None: entries of ModuleLists. Large ones
    outside of them (zk.unit.LARGE) always do, if no other module shares their parameters."""
    addons: Sequence[Addon] = ()
    """Add-ons of your own (docs/guides/addons.md)."""
    options: dict[str, Any] = dataclasses.field(default_factory=dict, hash=False)
    """Options of registered add-ons; give them by name, as any other."""

    def __init__(self, **given: Any):
        given = {**given.pop("options", {}), **given}
        fields = {field.name: field.default for field in dataclasses.fields(self)}
        refuse_unknown(given.keys() - fields.keys() - OPTIONS.keys(), [*fields, *OPTIONS])
        own = {name: value for name, value in given.items() if name in OPTIONS}
        for name, default in fields.items():
            value = own if name == "options" else given.get(name, default)
            is_read = name in PARSERS and value is not default
            object.__setattr__(self, name, PARSERS[name](value, name) if is_read else value)
        self._check_together()

    @classmethod
    def from_deepspeed(
        cls, config: Any, *, auto: Mapping[str, Any] | None = None, **overrides: Any
    ) -> ZeroConfig:
        """The config of DeepSpeed's JSON, a path or a dict; ``overrides`` are fields of this class.

        Args:
            auto: values by the JSON's names, for what it leaves to be filled in ("auto").
        """
        convert = found("from_deepspeed", METHODS, TypeError)
        return convert(config, auto or {}, overrides)  # type: ignore[no-any-return]

    def _check_together(self) -> None:
        """ValueError for values that exclude each other."""
        tiers = self.param_tier, self.optimizer_tier
        require(
            self.stage == 3 or self.param_tier in ("device", "auto"),
            f"param_tier={self.param_tier!r} needs stage=3: at stage {self.stage} parameters stay on "
            "the device; use stage=3 or param_tier='device'",
        )
        words = "a tier is 'nvme' and nvme_path is not set; give nvme_path=, folders on the drive"
        require("nvme" not in tiers or self.nvme_path, words)
        words = "has no effect while no tier is 'nvme' or 'auto'; choose one, or remove it"
        require(not self.nvme_path or {"nvme", "auto"} & {*tiers}, f"nvme_path {words}")
        words = "has no effect while all tiers are 'device'; choose another, or remove it"
        require(self.host_budget is None or {*tiers} != {"device"}, f"host_budget {words}")
        require(
            tiers != ("nvme", "device"),
            "param_tier='nvme' needs optimizer_tier='host', 'nvme' or 'auto': its parameters are updated "
            "in host memory",
        )
        words = "has no effect without dtype=, as nothing is cast; give dtype= or remove it"
        require(self.keep_dtype is None or self.dtype, f"keep_dtype {words}")


def refuse_unknown(names: set[str], known: list[str]) -> None:
    """TypeError for the first of ``names``, with the closest one."""
    for name in sorted(names):
        close = difflib.get_close_matches(name, known, 1, 0.5)
        hint = f"the closest one is {close[0]!r}" if close else f"there are {', '.join(known)}"
        raise TypeError(
            f"ZeroOptimizer and ZeroConfig have no option {name!r}; {hint} (docs/what_left.md has those "
            "of 0.1.0, and what to use instead)"
        )
