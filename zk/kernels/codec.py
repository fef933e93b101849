"""Layouts of an update's fields: a parameter's master and moments, told by their dtypes.

    master      none: an fp32 parameter is its own; fp32; int16: the lower half, beside a bf16
                parameter; uint8: 8 bits (eight_bit.py)
    moments     fp32; bf16; uint8: codes, of which the first one's are in units of the second one's

Fields are tensors (n,) by name: "param", "master" if there is one, and moments by torch's names.

An fp32 master is split into a bf16 parameter and the 16 bits that it lacks, and joined without
loss. The parameter is the master as torch casts it; "master" holds the lower 16 bits. It is the
master's upper half, or that plus one when the lower half was rounded up: when its highest bit is
set, but for a tie (0x8000) that went down to the even neighbour. That bit rides in the sign of
Adam's second moment, which is never negative. Where the user writes the parameter, the master is
that, to within its precision. No master is rounded up to zero, so such a zero was written.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from zk.kernels import eight_bit
from zk.kernels.eight_bit import CODES

Fields = Mapping[str, Tensor]


def join(param: Tensor, low: Tensor, exp_avg_sq: Tensor) -> Tensor:
    """The fp32 master (n,) of bf16 ``param``, int16 ``low``, and signs of ``exp_avg_sq``."""
    lower = low.to(torch.int32) & 0xFFFF
    rounded_up = (lower >> 15) & ~torch.signbit(exp_avg_sq).to(torch.int32)
    return eight_bit.joined(param, rounded_up, lower)


def split_(master: Tensor, param: Tensor, low: Tensor, exp_avg_sq: Tensor) -> None:
    """Write fp32 ``master`` (n,) into ``param``, ``low`` and the signs alone of ``exp_avg_sq``."""
    bits = master.view(torch.int32)
    param.copy_(master)
    low.copy_(bits.to(torch.int16))
    is_down = param.view(torch.int16) == (bits >> 16).to(torch.int16)
    magnitude = exp_avg_sq.abs()
    exp_avg_sq.copy_(torch.where(((bits & 0x8000) != 0) & is_down, -magnitude, magnitude))


def state_fields(
    dtype: torch.dtype, names: Sequence[str], state_dtype: torch.dtype, splits_master: bool
) -> dict[str, torch.dtype]:
    """Name -> dtype of what is kept beside a ``dtype`` parameter: master, or a part; moments."""
    fields = dict.fromkeys(names, state_dtype)
    if dtype == torch.float32:
        return fields
    is_split = dtype == torch.bfloat16 and splits_master and "exp_avg_sq" in names
    half = CODES if state_dtype == CODES else torch.int16
    return {"master": half if is_split else torch.float32, **fields}


def dtype_of(dtypes: Mapping[str, torch.dtype], name: str) -> torch.dtype:
    """The narrowest float that holds every value of a field."""
    kept = torch.float32 if name == "master" else dtypes[name]
    return torch.bfloat16 if kept == CODES else kept


def start(fields: Fields, initial: Tensor) -> None:
    """Masters from ``initial`` (n,) in any precision, of which "param" is the cast; else 0."""
    param, master = fields["param"], fields.get("master")
    if master is None or (master.dtype == torch.int16 and initial.dtype == param.dtype):
        return  # the parameter has all of it
    initial, param = initial.to(master.device).float(), param.to(master.device, copy=True)
    write({**fields, "param": param}, {"master": initial})
    if master.dtype == CODES:  # compute has parameters as torch casts them
        eight_bit.cast24_(initial, param, master)


_JOINED = {
    torch.int16: lambda fields: join(fields["param"], fields["master"], fields["exp_avg_sq"]),
    CODES: lambda fields: eight_bit.join24(fields["param"], fields["master"]),
}


def read(fields: Fields, name: str) -> Tensor:
    """The master, or a moment: codes in fp32, what is split joined; else as it is kept, a view."""
    kept = fields[name if name in fields else "param"]  # without a master, the parameter is it
    kind = fields.get("master", kept).dtype
    if name == "master" and kind in _JOINED:
        return _JOINED[kind](fields)
    if kept.dtype == CODES and name == "exp_avg_sq":
        return eight_bit.second_moment(kept)
    if kept.dtype == CODES:
        return eight_bit.first_moment(kept, fields["exp_avg_sq"])
    return kept.abs() if name == "exp_avg_sq" and kind == torch.int16 else kept


def write(fields: Fields, values: Fields, mix: Tensor | None = None) -> None:
    """Overwrite what ``values`` (n,) has, the parameter with the "master"; others keep their value.

    ``mix``: bits for the rounding to codes, as from ``eight_bit.mixed``; None for the nearest.
    """
    param = fields["param"]
    master = fields.get("master", param)
    values = {name: value.to(param.device) for name, value in values.items()}
    x = values.pop("master", None)
    if x is None and master.dtype == torch.int16:  # signs of the second moment are a part of it
        x = read(fields, "master")
    if any(fields[name].dtype == CODES for name in values):
        pair = {name: values.pop(name, None) for name in ("exp_avg", "exp_avg_sq")}
        first, second = (read(fields, n) if v is None else v.float() for n, v in pair.items())
        eight_bit.encode_(first, second, fields["exp_avg"], fields["exp_avg_sq"], mix)
    for name, value in values.items():
        _copy(fields[name], value)
    if x is None:
        return
    if master.dtype == CODES:
        eight_bit.split24_(x.float(), param, master, mix)
    elif master.dtype == torch.int16:
        split_(x.float(), param, master, fields["exp_avg_sq"])
    else:
        _copy(param, x)
        _copy(master, x)


def _copy(field: Tensor, values: Tensor) -> None:
    if field.data_ptr() != values.data_ptr():
        field.copy_(values)


@dataclasses.dataclass(frozen=True)
class Codec:
    """State of each element of a unit beside its parameter, and how values become it."""

    fields: Mapping[str, torch.dtype]  # what rests on the optimizer's tier
    start, read, write = staticmethod(start), staticmethod(read), staticmethod(write)

    def pre_gather(self, shard: Tensor) -> Tensor:
        """Return what ranks send each other of a parameter's ``shard`` (n,)."""
        return shard

    def post_gather(self, full: Tensor) -> Tensor:
        """Return the full parameters (numel,) of what has been gathered."""
        return full
