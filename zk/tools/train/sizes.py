"""Sizes of a model from text, `gpt:10b` or `moe:layers=8,width=256`: one syntax for `zk train` and `zk plan`."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping

from zk.tools.train.gpt import GPT, GPTConfig
from zk.tools.train.mixture import Mixture, MixtureConfig

FAMILIES: dict[str, type[GPTConfig]] = {"gpt": GPTConfig, "moe": MixtureConfig}
# of models whose size alone is given: parameters of a block for each width * width, and how often as wide as deep; as GPT-3, as Qwen3-30B-A3B
_PROPORTIONS = {"gpt": (12, 128), "moe": (4 + 128 * 3 * 3 / 8, 128 / 3)}
_KNOWN = {
    "moe:30b-a3b": {  # Qwen3-30B-A3B
        "layers": 48,
        "width": 2048,
        "heads": 32,
        "kv_heads": 4,
        "head_dim": 128,
        "vocab": 151936,
        "experts": 128,
        "used": 8,
        "inner": 768,
    },
}


def config_of(spec: str, context: int, sizes: Mapping[str, int] | None = None) -> GPTConfig:
    """The sizes of a model. ValueError says what is wrong with ``spec``.

    Args:
        spec: a family and a size, ``gpt:10b``; or sizes by name, ``moe:layers=8,experts=64``, the others as the family has them.
        context: where the spec does not say it.
        sizes: by name, instead of those of the spec.
    """
    family, _, text = spec.lower().partition(":")
    if family not in FAMILIES or not text:
        raise ValueError(f"a model is gpt:SIZE or moe:SIZE (gpt:10b, moe:100m), or sizes by name (moe:layers=8,width=256,experts=128); got {spec!r}")
    found = _KNOWN.get(f"{family}:{text}") or _sized(family, text) or _named(family, text)
    try:
        return FAMILIES[family](**{"context": context, **found, **(sizes or {})})
    except ValueError as error:
        raise ValueError(f"{family}: {error}") from None


def model_of(config: GPTConfig) -> GPT:
    """The model of these sizes."""
    return Mixture(config) if isinstance(config, MixtureConfig) else GPT(config)


def _sized(family: str, text: str) -> dict[str, int] | None:
    """Sizes of about as many parameters as ``text``, such as 10b; None for other text."""
    size = re.fullmatch(r"(\d+(?:\.\d+)?)([mbt])", text)
    if size is None:
        return None
    block, aspect = _PROPORTIONS[family]
    scale = {"m": 1e6, "b": 1e9, "t": 1e12}[size[2]]
    num_params = float(size[1]) * scale
    layers = max(1, round((num_params / (block * aspect**2)) ** (1 / 3)))
    heads = max(1, round((num_params / block / layers) ** 0.5 / 64))
    return {"width": 64 * heads, "layers": layers, "heads": heads}


def _named(family: str, text: str) -> dict[str, int]:
    """Sizes that are written out: layers=24,width=2048."""
    known = sorted(field.name for field in dataclasses.fields(FAMILIES[family]))
    given = {}
    for part in text.split(","):
        name, _, value = part.partition("=")
        if name not in known or not value.isdecimal() or not int(value):
            shapes = "".join(f"{shape.partition(':')[2]}, " for shape in _KNOWN if shape.startswith(family))
            raise ValueError(f"{family}: takes a size (125m, 10b, 1t), {shapes}or any of {', '.join(known)}=NUMBER; got {part!r}")
        given[name] = int(value)
    return given
