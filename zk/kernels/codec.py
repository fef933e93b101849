"""Layouts of an update's fields: the master and the moments of a parameter, told by the dtypes in which they are kept.

    master      none: an fp32 parameter is its own; fp32; int16: the lower half, beside a bf16 parameter; uint8: 8 bits (eight_bit.py)
    moments     fp32; bf16; uint8: codes, of which the first one's are in units of the second one's (eight_bit.py)

Fields are tensors (n,) by name: "param", "master" if there is one, and moments by torch's names.

An fp32 master is split into a bf16 parameter and the 16 bits that it lacks, and joined again, without loss. The parameter is the master rounded
to nearest even, as every cast in torch does it; "master" holds the lower 16 bits. The parameter is then the master's upper half, or that plus one
when the lower half was rounded up, which is when its highest bit is set: but not at a tie (lower half exactly 0x8000) that went down to the even
neighbour. That one bit rides in the sign of Adam's second moment, which is never negative. Parameter and low together take the master's 4 bytes,
where a separate master takes 6. Where the user writes the parameter, the master is what was written, to within the parameter's precision. No master
is rounded up to zero, so a zero for which this seems so was written.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from zk.kernels import eight_bit


def join(param: Tensor, low: Tensor, exp_avg_sq: Tensor) -> Tensor:
    """The fp32 master (n,) of ``param`` (n,) bf16, ``low`` (n,) int16 and the signs of ``exp_avg_sq`` (n,) fp32 or bf16."""
    lower = low.to(torch.int32) & 0xFFFF
    return eight_bit.joined(param, (lower >> 15) & ~torch.signbit(exp_avg_sq).to(torch.int32), lower)


def split_(master: Tensor, param: Tensor, low: Tensor, exp_avg_sq: Tensor) -> None:
    """Write ``master`` (n,) fp32 into ``param``, ``low`` and the signs of ``exp_avg_sq``, whose magnitudes stay."""
    bits = master.view(torch.int32)
    param.copy_(master)
    low.copy_(bits.to(torch.int16))
    tie_down = ((bits & 0x8000) != 0) & (param.view(torch.int16) == (bits >> 16).to(torch.int16))
    magnitude = exp_avg_sq.abs()
    exp_avg_sq.copy_(torch.where(tie_down, -magnitude, magnitude))


def state_fields(dtype: torch.dtype, names: Sequence[str], state_dtype: torch.dtype, splits_master: bool) -> dict[str, torch.dtype]:
    """Name -> dtype of what is kept for each element of a ``dtype`` parameter: the master (its lower half or bits where that is enough), moments."""
    fields: dict[str, torch.dtype] = {}
    if dtype == torch.bfloat16 and state_dtype == eight_bit.CODES:
        fields["master"] = eight_bit.CODES
    elif dtype == torch.bfloat16 and splits_master and "exp_avg_sq" in names:
        fields["master"] = torch.int16
    elif dtype != torch.float32:
        fields["master"] = torch.float32
    return fields | {name: state_dtype if name != "max_exp_avg_sq" else torch.float32 for name in names}


def is_split(dtypes: Mapping[str, torch.dtype]) -> bool:
    """Tell if the parameter is a part of its master: what is written to it is in both."""
    return dtypes.get("master", torch.float32) != torch.float32


def dtype_of(dtypes: Mapping[str, torch.dtype], name: str) -> torch.dtype:
    """The narrowest float that holds every value of a field."""
    return torch.float32 if name == "master" else torch.bfloat16 if dtypes[name] == eight_bit.CODES else dtypes[name]


def start(fields: Mapping[str, Tensor], initial: Tensor) -> None:
    """Masters from ``initial`` (n,) in any precision, moments from zero."""
    for name, field in fields.items():
        if name != "param":
            field.zero_()
    write(fields, {"master": initial})
    if "master" in fields and fields["master"].dtype == eight_bit.CODES:  # compute has the parameters as torch casts them
        eight_bit.cast24_(initial.to(fields["param"].device), fields["param"], fields["master"])


def read(fields: Mapping[str, Tensor], name: str) -> Tensor:
    """The master, or a moment: codes in fp32, what is split joined; else as it is kept, a view."""
    if name == "master":
        param = fields["param"]
        master = fields.get("master", param)
        if master.dtype == torch.float32:
            return master
        return eight_bit.join24(param, master) if master.dtype == eight_bit.CODES else join(param, master, fields["exp_avg_sq"])
    kept = fields[name]
    if kept.dtype == eight_bit.CODES:
        return eight_bit.second_moment(kept) if name == "exp_avg_sq" else eight_bit.first_moment(kept, fields["exp_avg_sq"])
    return kept.abs() if name == "exp_avg_sq" and _has_signs(fields) else kept


def write(fields: Mapping[str, Tensor], values: Mapping[str, Tensor], mix: Tensor | None = None) -> None:
    """Overwrite what ``values`` (n,) has: the "master", and the parameter with it, or moments. The others keep their value.

    ``mix``: bits for the rounding to codes, as from ``eight_bit.mixed``; None for the nearest.
    """
    values = {name: value.to(fields["param" if name == "master" else name].device) for name, value in values.items()}
    if "exp_avg_sq" in values and _has_signs(fields):
        values = {"master": read(fields, "master"), **values}
    if any(fields[name].dtype == eight_bit.CODES for name in values if name != "master"):
        first, second = (values.pop(name).float() if name in values else read(fields, name) for name in ("exp_avg", "exp_avg_sq"))
        eight_bit.encode_(first, second, fields["exp_avg"], fields["exp_avg_sq"], mix)
    x = values.pop("master", None)
    for name, value in values.items():
        _copy(fields[name], value)
    if x is None:
        return
    param = fields["param"]
    master = fields.get("master", param)
    if master.dtype == eight_bit.CODES:
        eight_bit.split24_(x.float(), param, master, mix)
    elif master.dtype == torch.int16:
        split_(x.float(), param, master, fields["exp_avg_sq"])
    else:
        _copy(param, x)
        if master is not param:
            _copy(master, x)


def _has_signs(fields: Mapping[str, Tensor]) -> bool:
    """Check that the sign of the second moment carries a bit."""
    return "master" in fields and fields["master"].dtype == torch.int16


def _copy(field: Tensor, values: Tensor) -> None:
    if field.data_ptr() != values.data_ptr():
        field.copy_(values)
