"""``in_place=True``: frozen weights of load_pretrained() are read where they lie, in the user's files.

With ``param_tier="nvme"`` they take no room on the drive, and none of their bytes is written: what
places them compares. Taken are weights as they are in a file: of its dtype, in its order, and not
converted. All others are copied, and travel apart. Each rank reads its shards, through the page cache.

Uses of the core: the seams ``check``, ``comm``, ``kind``, ``codec``, ``tier``; ``Drive.file``, of
which it replaces methods; ``Size.of``, for which the codec's "param" has no bytes.
"""

from copy import copy
from typing import Any

import numpy as np
import torch

from zk.addon import Addon
from zk.addons.compared import agree
from zk.addons.promised import promise_of
from zk.logs import require
from zk.offload.rules import Codec
from zk.precision import dtypes_of


class InPlace(Addon):
    def __init__(self, value: bool):
        require(value is True, f"in_place must be True or False; got {value!r}")
        self.found: Any = {}  # parameter -> its values, mapped from the file

    def check(self, model: Any, optimizers: Any, config: Any) -> None:
        require(
            (config.param_tier, config.host_budget, config.options.get("shard_group"))
            == ("nvme", None, None),
            "in_place=True needs param_tier='nvme', and excludes host_budget= and shard_group=",
        )
        dtype_of = dtypes_of(model, config.dtype, config.keep_dtype)
        for param in model.parameters():
            source = promise_of(param)
            if getattr(source, "converter", 0) is None and not param.requires_grad:
                values = source.make()
                if values.dtype == dtype_of(param) and values.stride() == param.stride():
                    self.found[param] = values.view(-1)

    def comm(self, comm: Any) -> Any:
        agree(comm, "weights in place", {"number": len(self.found)})
        self.rank = comm.rank
        return comm

    def kind(self, name: str, param: Any) -> Any:
        return param in self.found

    def codec(self, unit: Any, codec: Any) -> Any:
        is_here = unit.params[0] in self.found and not unit.is_trained
        return Codec({"param": np.dtype("V0")}) if is_here else codec  # type: ignore[dict-item]

    def tier(self, unit: Any, what: str, tier: Any) -> Any:
        if unit.params[0] not in self.found or unit.is_trained:
            return tier
        first, spans = self.rank * unit.shard_numel, []
        for index, here, there in unit.within(first, first + unit.shard_numel):
            values = self.found[unit.params[index]][there].view(torch.uint8).numpy()
            spans.append((here.start * unit.dtype.itemsize, values))

        def write(*given: Any) -> Any:
            request = file.start("write", *given)
            request.wait()  # whoever has changed it hears of it
            return request

        def move(verb: str, data: Any, offset: int, after: Any) -> None:
            for event in after:
                event.wait()
            block = np.asarray(data)
            for start, values in spans:
                at = start - offset
                part = block[max(at, 0) : max(at + len(values), 0)]
                there = values[max(-at, 0) :][: len(part)]
                is_same = verb == "read" or np.array_equal(part, there)
                part[:] = there
                require(is_same, f"{unit.name} is not as in its file: leave in_place= out", OSError)

        drive, file = copy(tier), copy(tier.file)
        vars(file).update(nbytes=1 << 62, extend=lambda _: 0, move=move, write_async=write)
        drive.file = file
        return drive
