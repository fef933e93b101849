"""Bases in 4 bits (bitsandbytes' NF4 and FP4) under adapters: the bits of a plain run.

Codes travel as the bytes that they are, to every tier; no dtype casts them. Parameters keep their class
and ``quant_state``, whose tensors stay on the device and are buffers meanwhile: of the first rank on
all ranks, and in checkpoints. bitsandbytes keeps the codes of a layer until its backward.

Every optimizer has it. Uses of the core: the seams ``check``, ``comm``, ``attach``, ``closed``;
``Comm.words``, ``Hook``; buffers, which are alike on all ranks.
"""

import contextlib
import functools
import json
from typing import Any

import torch
from torch import Tensor

from zk.addon import Addon
from zk.logs import require
from zk.parallel.runtime import Hook

PACKS = "support_avx512bf16_for_cpu"  # in evaluation, to what no gradient goes through


class Quantized(Addon):
    def check(self, model: Any, *_: object) -> None:
        self.undo, self.layers, self.seen = contextlib.ExitStack(), list[Any](), dict[Tensor, int]()
        for path, module in model.named_modules():
            for key, param in module.named_parameters(recurse=False):
                kind, state = type(param).__name__, getattr(param, "quant_state", None)
                is_packed = getattr(state, "packing_format_for_cpu", False)
                is_right = state and param.dtype == torch.uint8 and not is_packed
                require(
                    is_right or kind not in ("Params4bit", "Int8Params"),
                    f"parameter '{path}.{key}' is a {kind} of {param.dtype}; zk takes 4-bit codes of "
                    "bitsandbytes in uint8: load the model with load_in_4bit=True, and wrap it before "
                    "an evaluation on a CPU packs them",
                )
                if state:
                    parts = state.as_dict(packed=True).items()
                    buffers = {f"{key}.{name}": value for name, value in parts}
                    self.layers.append((module, state, buffers))

    def comm(self, comm: Any) -> Any:
        sizes = [[*map(Tensor.size, buffers.values())] for *_, buffers in self.layers]
        for said in comm.words("quantized bases", sizes) if sizes else ():
            require(said == sizes, "ranks have other quantized bases: load the same one on all")
        return comm

    def attach(self, optimizer: object) -> None:
        at_end = self.undo.callback
        for module, state, buffers in self.layers:
            *_, text = buffers.values()
            renew = functools.partial(self.renew, state, text)
            for name in buffers:
                at_end(module._buffers.pop, name)
            at_end(setattr, module, PACKS, getattr(module, PACKS, False))
            at_end(module.register_forward_pre_hook(Hook(renew)).remove)
            at_end(renew)
            module._buffers.update(buffers)
            setattr(module, PACKS, False)

    def closed(self) -> None:
        self.undo.close()

    def renew(self, state: Any, text: Tensor, *_: object) -> None:
        """Take the number that is no tensor from the text that has it, once this was written."""
        if state.nested and self.seen.get(text) != text._version:
            self.seen[text] = text._version
            number = json.loads(bytes(text.tolist()))["nested_offset"]
            state.offset = state.state2.absmax.new_tensor(number)
