"""Sizes of a model's parameters by unit, from `gpt:10b`, `moe:100m`, a config.json of Hugging Face, or `module:factory`."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from zk.core.options import is_count
from zk.core.owners import inner_tensors, is_coded
from zk.core.units import find_units
from zk.nn.deferred import deferred_init
from zk.tools.plan import families
from zk.tools.train.gpt import GPTConfig
from zk.tools.train.mixture import MixtureConfig
from zk.tools.train.sizes import FAMILIES, config_of

_LAYERNORM = dict.fromkeys(("qkv_bias", "out_bias", "mlp_bias", "norm_bias"), True)
_CUT = ("heads", "kv_heads", "ffn", "vocab")  # over tensor parallel ranks


@dataclasses.dataclass(frozen=True, slots=True)
class Units:
    """Units that are alike."""

    numels: tuple[int, ...]  # elements of each parameter, in ascending order
    count: int
    trained: bool = True
    rest: bool = False  # what is outside of blocks: in use all through forward and backward
    block: int = 0  # units of one number are parts of the same blocks
    dtype: torch.dtype | None = None  # that stays as it is; None: what the run computes in
    values: int | None = None  # parameters that one unit stands for, where its elements are codes or scales
    beside_nbytes: int = 0  # of one unit: what belongs to it and stays on the device
    dequantized: int = 0  # elements of one unit that are there in full precision at once, while it is computed with
    parts: tuple[Units, ...] = ()  # of each of them, where its experts travel alone
    shapes: tuple[tuple[int, ...], ...] = dataclasses.field(default=(), compare=False)  # of each parameter, where they are known

    @property
    def numel(self) -> int:
        """Parameters of all of them."""
        return self.count * (sum(self.numels) if self.values is None else self.values)

    def stored_nbytes(self, size: int) -> int:
        """Bytes of all of them, ``size`` for an element of what the run computes in."""
        return self.count * sum(self.numels) * (size if self.dtype is None else self.dtype.itemsize)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Decoder:
    """A decoder of transformer blocks, as its configuration describes it."""

    layers: int
    width: int  # of the residual stream
    heads: int
    vocab: int
    ffn: int  # width between the linear layers of an MLP
    kv_heads: int
    head_dim: int
    positions: int = 0  # rows of a learned position embedding
    tied: bool = False  # the head is the embedding
    gated: bool = False  # a third linear layer in the MLP
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    norm_bias: bool = False  # LayerNorm, else RMSNorm
    head_norms: bool = False  # of queries and keys
    embedding_norm: bool = False
    fused: bool = False  # queries, keys and values are one parameter
    experts: int = 0  # MLPs of a block
    expert_modules: bool = False  # each expert is three linear layers; else all of them are in two parameters
    active: int = 0  # of them, for one token
    expert_bias: bool = False  # of experts and router
    sinks: bool = False  # a logit of each head that attends to nothing
    quantization: Mapping[str, Any] | None = None  # what its configuration says of stored weights

    def _norms(self, count: int) -> list[int]:
        return [self.width] * count * (2 if self.norm_bias else 1)

    def linears(self) -> list[tuple[int, int, bool]]:
        """Linear layers of a block: inputs, outputs, and if there is a bias."""
        width, queries, keys = self.width, self.heads * self.head_dim, self.kv_heads * self.head_dim
        projections = [queries + 2 * keys] if self.fused else [queries, keys, keys]
        linears = [(width, out, self.qkv_bias) for out in projections] + [(queries, width, self.out_bias)]
        if not self.experts:
            linears += [*[(width, self.ffn, self.mlp_bias)] * (2 if self.gated else 1), (self.ffn, width, self.mlp_bias)]
        return linears

    def block(self) -> tuple[int, ...]:
        """Elements of each parameter of a block, in ascending order; without experts that are modules."""
        width, linears = self.width, self.linears()
        weights = [fan_in * fan_out for fan_in, fan_out, _ in linears]
        biases = [fan_out for _, fan_out, biased in linears if biased] + [self.heads] * self.sinks
        if self.experts:
            weights.append(self.experts * width)
            weights += [self.experts * numel for numel in self._expert()] if not self.expert_modules else []
        if self.expert_bias:
            biases += [self.experts, self.experts * 2 * self.ffn, self.experts * width]
        return tuple(sorted(weights + biases + self._norms(2) + [self.head_dim] * (2 if self.head_norms else 0)))

    def _expert(self) -> tuple[int, ...]:
        """Elements of the weights of one expert: into it, which is gated, and out of it."""
        linear = self.width * self.ffn
        return (linear,) * 3 if self.expert_modules else (2 * linear, linear)

    @property
    def num_idle(self) -> int:
        """Elements of the experts that a token does not use."""
        biases = (2 * self.ffn + self.width) * self.expert_bias
        return self.layers * (self.experts - self.active) * (sum(self._expert()) + biases)

    def blocks(self) -> Units:
        """The blocks; of experts that are modules, what travels with a block and what travels alone."""
        block = Units(self.block(), self.layers)
        if not self.expert_modules:
            return block
        experts = Units(self._expert(), self.experts)
        whole = tuple(sorted(block.numels + experts.numels * experts.count))
        return Units(whole, self.layers, parts=(dataclasses.replace(block, count=1), experts))

    def rest(self) -> tuple[int, ...]:
        """Elements of each parameter outside the blocks, in ascending order."""
        rows = [self.vocab] * (1 if self.tied else 2) + [self.positions] * bool(self.positions)
        return tuple(sorted([count * self.width for count in rows] + self._norms(2 if self.embedding_norm else 1)))

    def part(self, ranks: int) -> Decoder:
        """The part of each of ``ranks`` tensor parallel ranks: of heads, of the inside of MLPs, and of the vocabulary, rounded up.

        Each has all of the norms, biases of what a block hands on, positions, and routers.
        """
        return dataclasses.replace(self, **{name: -(-getattr(self, name) // ranks) for name in _CUT})

    def grown(self, factor: float) -> Decoder:
        """Of about the same proportions, ``factor`` times as wide and as deep, with as many heads."""
        width = max(1, round(self.width * factor / 8)) * 8
        wider = width / self.width
        head_dim, ffn = max(1, round(self.head_dim * wider)), max(1, round(self.ffn * wider))
        return dataclasses.replace(self, layers=max(1, round(self.layers * factor)), width=width, head_dim=head_dim, ffn=ffn)


def whole(decoder: Decoder) -> tuple[Units, ...]:
    """The units of a decoder that is trained as it is."""
    return decoder.blocks(), Units(decoder.rest(), 1, rest=True)


@dataclasses.dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a model that a plan depends on."""

    name: str
    units: tuple[Units, ...]  # in the order of find_units: blocks, then the rest
    width: int  # of what one block hands to the next, per token
    ffn: int  # of the widest thing inside a block, per token, all of it together
    vocab: int
    decoder: Decoder | None = None
    divided: Callable[[Decoder], tuple[Units, ...]] = whole  # a decoder into units
    optimizer: str = "adamw"  # a name of zk.tools.plan.optimizers

    @classmethod
    def of(cls, decoder: Decoder, name: str, divided: Callable[[Decoder], tuple[Units, ...]] = whole) -> Shape:
        """The shape of a decoder."""
        ffn = decoder.ffn * (2 if decoder.gated else 1) * max(1, decoder.active)
        return cls(name, divided(decoder), decoder.width, ffn, decoder.vocab, decoder, divided)

    @property
    def num_params(self) -> int:
        return sum(units.numel for units in self.units)

    @property
    def num_trained(self) -> int:
        """Parameters that are not frozen."""
        return sum(units.numel for units in self.units if units.trained)

    @property
    def num_active(self) -> int:
        """Parameters that a token uses: all of them but for the experts that it does not go to."""
        return self.num_params - (self.decoder.num_idle if self.decoder else 0)

    @property
    def layers(self) -> int:
        """Number of blocks: of the units that there are most of."""
        return max(units.count for units in self.units)

    def part(self, ranks: int) -> Shape:
        """The part that each of ``ranks`` tensor parallel ranks has."""
        return self if ranks == 1 or self.decoder is None else self._of(self.decoder.part(ranks))

    def _of(self, decoder: Decoder) -> Shape:
        """The same of another decoder."""
        return dataclasses.replace(Shape.of(decoder, self.name, self.divided), optimizer=self.optimizer)

    def grown(self, factor: float) -> Shape:
        """A larger or smaller model: a decoder in width and depth, a module in the number of its blocks."""
        if self.decoder:
            return self._of(self.decoder.grown(factor))
        most = max(self.units, key=lambda units: units.count)
        alike = [u.block == most.block and u.rest == most.rest for u in self.units]
        grown = max(1, round(most.count * factor))
        units = tuple(dataclasses.replace(u, count=grown) if grows else u for u, grows in zip(self.units, alike, strict=True))
        return dataclasses.replace(self, units=units)


def shape_of(spec: str) -> Shape:
    """The shape of a model by its name.

    ``gpt:SIZE``, ``moe:SIZE``, ``gpt:layers=24,width=2048``; ``llama:8b`` and others of ``families.py``; the path of a config.json, or its
    folder; ``org/name`` that Hugging Face has on this machine; or ``module:factory``. ValueError says what is wrong with it.
    """
    if (config := families.named(spec)) is not None:
        return Shape.of(decoder_of(config, spec), spec)
    if re.match(f"({'|'.join(FAMILIES)}):", spec.lower()):
        return Shape.of(gpt_decoder(config_of(spec, 1024)), spec)
    path = Path(spec)
    if spec and path.is_dir():
        path /= "config.json"
    if path.is_file():
        return _from_config(path)
    if (found := families.cached(spec)) is not None:
        return dataclasses.replace(_from_config(found), name=spec)
    if re.fullmatch(r"[\w.]+:[\w.]+", spec):
        return _from_factory(spec)
    there = f"; there is no file {str(path)!r}" if path.suffix == ".json" else ""
    there += "; the local cache of Hugging Face has none of that name" if spec.count("/") == 1 else ""
    raise ValueError(
        f"a model is gpt:SIZE or moe:SIZE (gpt:10b), gpt:layers=24,width=2048, one of {families.KNOWN}, a config.json or its folder, org/name in the "
        f"cache of Hugging Face, or module:factory; got {spec!r}{there}{families.closest(spec)}"
    )


# ---- gpt, moe: the models of `python -m zk train` ----------------------------------------------------------------------------------------


def gpt_decoder(config: GPTConfig) -> Decoder:
    """The decoder that zk.tools.train builds."""
    sizes: dict[str, Any] = {name: getattr(config, name) for name in ("layers", "width", "heads", "kv_heads", "head_dim", "vocab")}
    if isinstance(config, MixtureConfig):
        sizes |= {"ffn": config.inner, "experts": config.experts, "active": config.used, "gated": True, "expert_modules": True}
    return Decoder(**{"ffn": 4 * config.width, "positions": config.context, "fused": True, **sizes, **_LAYERNORM})


# ---- config.json -------------------------------------------------------------------------------------------------------------------------

# model_type -> names of what its configuration does not say
_FAMILIES = {
    "llama": "gated",
    "mistral": "gated",
    "qwen2": "gated qkv_bias",
    "qwen3": "gated head_norms",
    "gemma": "gated tied",
    "phi3": "gated fused",
    "gpt2": "layernorm fused tied",
    "gpt_neox": "layernorm fused",
    "opt": "layernorm tied",
    "bloom": "layernorm fused embedding_norm tied",
    "mixtral": "gated experts",
    "qwen3_moe": "gated experts head_norms",
    "gpt_oss": "gated experts expert_bias sinks",
}


def _from_config(path: Path) -> Shape:
    try:
        config = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    if not isinstance(config, dict):
        raise ValueError(f"{path} must hold a configuration, a JSON object; it holds a {type(config).__name__}")
    return Shape.of(decoder_of(config, str(path)), path.parent.name or str(path))


def decoder_of(config: Mapping[str, Any], where: str = "config.json") -> Decoder:
    """The decoder that a configuration of Hugging Face transformers describes; ValueError for a family that is not known here."""

    def size(*names: str, default: int | None = None) -> int:
        for name in names:
            value = config.get(name)
            if value is not None:
                if not is_count(value):
                    raise ValueError(f"{where}: {name} must be a number above 0; got {value!r}")
                return int(value)
        if default is None:
            raise ValueError(f"{where} has none of {', '.join(names)}, which the size of the model depends on")
        return default

    family = config.get("model_type")
    if family not in _FAMILIES:
        raise ValueError(
            f"{where}: model_type {family!r} is not one of {', '.join(_FAMILIES)}; give module:factory, a function that builds the model"
        )
    options: dict[str, Any] = dict.fromkeys(_FAMILIES[family].split(), True)
    if options.pop("layernorm", False):
        options |= _LAYERNORM
    if family in ("llama", "qwen3"):
        options |= dict.fromkeys(("qkv_bias", "out_bias"), bool(config.get("attention_bias"))) | {"mlp_bias": bool(config.get("mlp_bias"))}
    if "experts" in options:
        options["experts"] = size("num_local_experts", "num_experts")
        options["active"] = size("num_experts_per_tok")
        options["qkv_bias"] = options["out_bias"] = bool(config.get("attention_bias", family == "gpt_oss"))
        if config.get("mlp_only_layers") or config.get("decoder_sparse_step", 1) != 1:
            raise ValueError(f"{where}: blocks with experts and blocks without take turns; give module:factory, a function that builds the model")
        if options["active"] > options["experts"]:
            raise ValueError(f"{where}: a token goes to {options['active']} experts, and there are {options['experts']}")
    options["tied"] = bool(config.get("tie_word_embeddings", options.get("tied")))
    width = size("hidden_size", "n_embd", "n_embed")
    heads = size("num_attention_heads", "n_head")
    if family == "opt" and config.get("word_embed_proj_dim", width) != width:
        raise ValueError(f"{where}: an OPT whose word_embed_proj_dim is not its hidden_size is not known here; give module:factory")
    positions = size("n_positions", "n_ctx") if family == "gpt2" else 0
    if family == "opt":
        positions = size("max_position_embeddings") + 2  # the first two rows are for padding
    ffn = size("moe_intermediate_size") if family == "qwen3_moe" else size("intermediate_size", "ffn_dim", "n_inner", default=4 * width)
    return Decoder(
        layers=size("num_hidden_layers", "n_layer"),
        width=width,
        heads=heads,
        kv_heads=size("num_key_value_heads", default=heads),
        head_dim=size("head_dim", default=width // heads),
        vocab=size("vocab_size"),
        ffn=ffn,
        positions=positions,
        quantization=config.get("quantization_config"),
        **options,
    )


# ---- module:factory ----------------------------------------------------------------------------------------------------------------------


def _from_factory(spec: str) -> Shape:
    module_name, _, path = spec.partition(":")
    try:
        factory: Any = importlib.import_module(module_name)
        for name in path.split("."):
            factory = getattr(factory, name)
    except (ImportError, AttributeError) as error:
        raise ValueError(
            f"{spec!r} is neither gpt:SIZE, moe:SIZE nor one of {families.KNOWN}, nor a module on the path, a colon, and what in it builds the model "
            f"({error}){families.closest(spec)}"
        ) from None
    try:
        inspect.signature(factory).bind()
    except TypeError as error:
        raise ValueError(f"{spec!r} must be something to call without arguments ({error}); wrap it in a function that gives them") from None
    with deferred_init("cpu"):
        model = factory()
    if not isinstance(model, nn.Module):
        raise ValueError(f"{spec!r} must return an nn.Module; it returned a {type(model).__name__}")
    return shape_of_module(model, spec)


def shape_of_module(model: nn.Module, name: str) -> Shape:
    """The shape of a model with or without memory; width and vocabulary, for the estimate of activations, are read off its weights."""
    # the dtype of what stays as it is; another, that no run has, of what a run casts to its own
    stored: dict[Tensor, torch.dtype] = {}
    for param in model.parameters():
        is_cast = param.is_floating_point() and param.itemsize > 1 and not is_coded(param)
        stored |= {inner: torch.float64 if is_cast else inner.dtype for _, inner in inner_tensors(param)}
    found = find_units(model, {param: 0 for param in model.parameters() if param.requires_grad}, stored)
    blocks: dict[nn.Module, list[Any]] = {}
    for unit in found:
        dtype = None if unit.dtype == torch.float64 else unit.dtype
        shapes = tuple(sorted((tuple(param.shape) for param in unit.params), key=lambda shape: (math.prod(shape), shape)))
        blocks.setdefault(unit.anchors[0], []).append((shapes, unit.trained, dtype))
    alike = Counter((tuple(parts), anchor is model) for anchor, parts in blocks.items())
    units = tuple(
        Units(tuple(map(math.prod, shapes)), count, trained, rest, 0 if rest else number, dtype, shapes=shapes)
        for number, ((parts, rest), count) in enumerate(alike.items())
        for shapes, trained, dtype in parts
    )
    if not units:
        raise ValueError(f"{name!r} has no parameters")
    linear = Counter((module.in_features, module.out_features) for module in model.modules() if isinstance(module, nn.Linear))
    inside = {shape: times for shape, times in linear.items() if times > 1} or linear  # what blocks have, and a head has not
    ends = Counter(end for shape, times in inside.items() for end in shape for _ in range(times))
    width = ends.most_common(1)[0][0] if ends else 0
    vocab = max((module.num_embeddings for module in model.modules() if isinstance(module, nn.Embedding)), default=0)
    return Shape(name, units, width, max(ends, default=0), vocab)
