"""Adapters over a frozen decoder: what is trained then, and what the other weights cost as they are stored.

Counted as the packages have them: LoRA of PEFT on all linear layers of the blocks (``target_modules="all-linear"``), NF4 of bitsandbytes in
blocks of 64, int8 and float8 of torchao by row. Embeddings, head, norms and biases are not quantized.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from typing import Any

import torch

from zk.tools.plan.shape import Decoder, Shape, Units

# the weights of linear layers -> the dtype that they are stored in; "": as all others
BASES = {
    "nf4": torch.uint8,
    "nf4, scales not quantized": torch.uint8,
    "int8": torch.int8,
    "fp8": torch.float8_e4m3fn,
    "": None,
}
_TORCHAO = {
    "int8weightonlyconfig": "int8",
    "int8weightonly": "int8",
    "float8weightonlyconfig": "fp8",
    "float8weightonly": "fp8",
}
_DTYPES = ("bf16", "fp16", "fp32")
_FP32 = 4
# of NF4: weights that have one scale, and scales that have one scale of their own; elements of the tables of what codes mean
_BLOCK, _BLOCKS = 64, 256
_TABLE, _TABLE_OF_SCALES = 16, 256


def base_of(said: Mapping[str, Any]) -> str:
    """A key of BASES, or what else the ``quantization_config`` of a config.json names."""
    method = said.get("quant_method", "bitsandbytes" if "load_in_4bit" in said else "")
    if method == "bitsandbytes":
        if not (said.get("load_in_4bit") or said.get("_load_in_4bit")):
            return "bitsandbytes in 8 bits"
        return "nf4" if said.get("bnb_4bit_use_double_quant") else "nf4, scales not quantized"
    if method == "torchao":
        kind = said.get("quant_type")
        if isinstance(kind, Mapping):
            kind = kind.get("default", {}).get("_type")
        return _TORCHAO.get(str(kind).lower().replace("_", ""), f"torchao's {kind}")
    return "fp8" if method == "fp8" else str(method)


def adapted(shape: Shape, spec: str | None, base: str | None, dtype: str = "bf16") -> Shape:
    """The shape with adapters of ``spec`` ("rank=16") over frozen weights of ``base``.

    Args:
        spec: None for a model that is trained whole.
        base: None for what the model's configuration says.
        dtype: of the run.

    Raises ValueError for what cannot be counted, and for what cannot be trained so.
    """
    if spec is None:
        if base is not None:
            raise ValueError(f"--base {base} has no effect without --adapters: what is trained is in --dtype")
        return shape
    found = re.fullmatch(r"rank=([1-9]\d*)", spec)
    if found is None:
        raise ValueError(f"--adapters takes rank=NUMBER, the rank of LoRA on all linear layers of the blocks; got {spec!r}")
    decoder = shape.decoder
    if decoder is None:
        raise ValueError(f"--adapters needs gpt:SIZE or a config.json; {shape.name!r} has to build its model with adapters, and freeze the rest")
    if decoder.expert_modules:
        raise ValueError(f"--adapters over experts that are modules of their own, as {shape.name!r} has, is not counted; give a module:factory")
    kind = _kind(decoder, base, dtype)
    if kind and decoder.experts:
        raise ValueError(f"experts are one parameter for each of their linear layers, which {kind} leaves as it is; only --base {dtype} is counted")
    return Shape.of(decoder, shape.name, functools.partial(_divided, rank=int(found[1]), base=kind))


def _kind(decoder: Decoder, base: str | None, dtype: str) -> str:
    """The key of BASES that was given, or else configured."""
    if base is not None:
        if base in BASES:
            return base
        if base == dtype:
            return ""
        if base in _DTYPES:
            raise ValueError(f"--base {base} is not --dtype {dtype}, which all that is not quantized is cast to; leave --base out")
        raise ValueError(f"--base takes nf4, int8, fp8 or the --dtype of the run; got {base!r}")
    kind = base_of(decoder.quantization or {})
    if kind == "bitsandbytes in 8 bits":
        raise ValueError(
            "the configuration loads the model with bitsandbytes in 8 bits, whose layers keep a second hold on their codes, so that zk cannot move "
            "them and refuses the model; quantize to 4 bits (--base nf4), or with torchao's Int8WeightOnlyConfig (--base int8)"
        )
    if kind not in BASES:
        raise ValueError(f"the configuration quantizes with {kind}, which is not counted here; give --base nf4, int8 or fp8, or a module:factory")
    return kind


def _divided(decoder: Decoder, rank: int, base: str) -> tuple[Units, ...]:
    """The units of a decoder under adapters: what a block has of each dtype and kind, then the rest."""
    linears = [(fan_in, fan_out) for fan_in, fan_out, _ in decoder.linears()]
    adapters = [rank * width for layer in linears for width in layer]
    kept = list(decoder.block())
    units = [Units(tuple(sorted(adapters)), decoder.layers)]
    if base:
        for fan_in, fan_out in linears:
            kept.remove(fan_in * fan_out)
        units += _quantized(linears, decoder.layers, base)
    if kept:
        units.append(Units(tuple(kept), decoder.layers, trained=False))
    return *units, Units(decoder.rest(), 1, trained=False, rest=True)


def _quantized(linears: list[tuple[int, int]], layers: int, base: str) -> list[Units]:
    """The units of a block's linear layers, inputs and outputs: codes, and their scales where these are parts of the parameter."""
    weights = [fan_in * fan_out for fan_in, fan_out in linears]
    outputs = [fan_out for _, fan_out in linears]
    if base.startswith("nf4"):
        codes = [-(-numel // 2) for numel in weights]
        beside_nbytes = sum(_nf4_scales(numel, base == "nf4") for numel in weights)
    else:
        codes = weights + (outputs if base == "int8" else [])  # and zero points
        beside_nbytes = 0
    units = [
        Units(
            tuple(sorted(codes)),
            layers,
            trained=False,
            dtype=BASES[base],
            values=sum(weights),
            beside_nbytes=beside_nbytes,
            dequantized=max(weights) if beside_nbytes else sum(weights),  # torchao keeps them for backward
        )
    ]
    if not beside_nbytes:
        units.append(Units(tuple(sorted(outputs)), layers, trained=False, dtype=torch.float32, values=0))
    return units


def _nf4_scales(numel: int, double: bool) -> int:
    """Bytes that bitsandbytes keeps beside the codes of a weight: scales, in 8 bits if ``double``, and the tables of what codes mean."""
    scales = -(-numel // _BLOCK)
    if not double:
        return _FP32 * (scales + _TABLE)
    of_scales = -(-scales // _BLOCKS) + 1 + _TABLE_OF_SCALES  # and the mean of them
    return scales + _FP32 * (of_scales + _TABLE)
