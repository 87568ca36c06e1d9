"""What can be counted about a model from config.json alone: its parameters, and what its cache holds."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from quantkit.arch import FAMILIES, Config
from quantkit.errors import InputError
from quantkit.formats import Shape
from quantkit.runtime.model.config import ModelConfig, read_model_config
from quantkit.stages import Experts, Stage

_EXPERT_KEYS = ("n_routed_experts", "num_local_experts", "num_experts", "moe_num_experts")
_KV_KEYS = ("num_key_value_heads", "num_attention_heads")
_LATENT_KEYS = ("kv_lora_rank", "qk_rope_head_dim")


@dataclass(frozen=True)
class Cache:
    """What attention keeps of earlier tokens."""

    kind: str  # MHA, GQA, MQA or MLA
    per_layer: int  # numbers that one layer keeps of one token
    width: int  # of which so many are one head, or all a latent
    windows: tuple[int | None, ...]  # of every layer: how many tokens it sees; None: all
    formula: str  # of `per_layer`, with its numbers

    @property
    def layers(self) -> int:
        return len(self.windows)

    @property
    def per_token(self) -> int:
        """Numbers that all layers keep of one token."""
        return self.layers * self.per_layer

    def seen(self, context: int) -> int:
        """Tokens that the layers see at the end of a context, summed over them."""
        return sum(count * min(context, window or context) for window, count in self._kinds.items())

    def read(self, context: int) -> int:
        """Numbers that a new token at the end of a context reads: sliding layers only their window."""
        return self.seen(context) * self.per_layer

    def seen_in_prompt(self, tokens: int) -> int:
        """Pairs of a token and an earlier one, itself included, that the layers of a whole prompt compare."""
        return sum(count * _pairs(tokens, window) for window, count in self._kinds.items())

    @cached_property
    def _kinds(self) -> Counter[int | None]:
        """How many layers have which window: a plan asks thousands of times."""
        return Counter(self.windows)

    def slides(self, context: int) -> bool:
        """Whether some layer does not see all of a context."""
        return self.seen(context) < context * self.layers


@dataclass(frozen=True, eq=False)
class Decoder:
    """The parameters of a supported model. Hashed by identity: it has thousands of linears."""

    config: ModelConfig
    raw: Config
    linears: dict[str, Shape]  # of all blocks, by module
    other: int  # norms and biases; routers of experts, which stay in 16 bit like them
    experts: dict[str, Experts] = field(default_factory=dict)  # which of them a linear belongs to, by module

    @property
    def linear_weights(self) -> int:
        return sum(math.prod(shape) for shape in self.linears.values())

    @property
    def embedding(self) -> int:
        return self.config.vocab * self.config.hidden

    @property
    def head(self) -> int:
        """Weights of lm_head beside the embedding: none where they are one matrix."""
        return 0 if self.config.tied else self.embedding

    @property
    def parameters(self) -> int:
        return self.linear_weights + self.embedding + self.head + self.other

    @property
    def others_title(self) -> str:
        return "norms, biases, routers" if self.experts else "norms and biases"

    @property
    def attention_width(self) -> int:
        """Numbers of a query that meet a key, of all heads, and as many of a value; over latents the mean of both."""
        latent = self.config.latent
        return self.config.attended if latent is None else self.config.heads * (latent.rank + latent.rope // 2)

    @property
    def prompt_width(self) -> int:
        """The same in a whole prompt, where making keys and values of all latents once takes fewer products."""
        latent = self.config.latent
        return self.config.attended if latent is None else self.config.heads * (latent.query + latent.value) // 2


@dataclass(frozen=True)
class PlannedModel:
    """A model to plan for."""

    name: str
    model_type: str
    dtype: str  # of what is not quantized: bfloat16 or float16
    max_positions: int | None
    cache: Cache
    decoder: Decoder | None  # None: only the cache can be planned
    remark: str  # why; empty for a supported model


def read_model(name: str, config: Mapping[str, Any]) -> PlannedModel:
    """From config.json. An unsupported family keeps its cache only; missing sizes are an InputError."""
    kind = config.get("model_type")
    if not isinstance(kind, str):
        raise InputError(f"config.json has no model_type; known families: {', '.join(sorted(FAMILIES))}")
    supported = kind in FAMILIES
    inner = config if supported or not isinstance(config.get("text_config"), Mapping) else config["text_config"]
    positions = inner.get("max_position_embeddings")
    dtype = str(config.get("dtype") or config.get("torch_dtype")).removeprefix("torch.")
    decoder = _decoder(config) if supported else None
    return PlannedModel(
        name=name,
        model_type=kind,
        dtype="float16" if dtype == "float16" else "bfloat16",
        max_positions=positions if isinstance(positions, int) else None,
        cache=_cache(inner, decoder.config if decoder else None),
        decoder=decoder,
        remark="" if supported else _why_not(kind, inner),
    )


def stage_shapes(config: ModelConfig, stage: Stage) -> list[Shape]:
    """(out, in) of the linears of a stage."""
    return [(rows, config.inputs(stage)) for rows in config.outputs(stage)]


def block_others(config: ModelConfig, raw: Config, layer: int) -> int:
    """What of one block is no linear that recipes quantize: norms, biases, routers, gates of shared experts.

    `config` may be that of a rank, `layer` is the number in the whole model.
    """
    family = config.family
    stages, biased = family.stages(layer, raw), family.biased(layer, raw)
    norms = sum(1 if part.post_norm is None else 2 for part in {stage.part for stage in stages})
    biases = sum(
        rows
        for stage in stages
        for name, rows in zip(stage.linears, config.outputs(stage), strict=True)
        if name in biased
    )
    experts = {stage.experts for stage in stages if stage.experts}
    routers = sum(each.count for each in experts)
    biases += sum(each.count for each in experts if each.router_biased)
    corrections = sum(each.count for each in experts if each.correction)
    gates = len({stage.gate for stage in stages if stage.gate})
    heads = (2 * config.head_dim if config.qk_norm else 0) + (config.heads if family.sinks else 0)
    latents = 0 if config.latent is None else config.latent.rank + (config.latent.query_rank or 0)  # norms of these
    return config.hidden * (norms + routers + gates) + heads + biases + corrections + latents


def _decoder(raw: Config) -> Decoder:
    config = read_model_config(raw)
    linears = {
        module: shape
        for layer, stages in enumerate(config.stages)
        for stage in stages
        for module, shape in zip(config.family.modules(layer, stage), stage_shapes(config, stage), strict=True)
    }
    experts = {
        module: stage.experts
        for layer, stages in enumerate(config.stages)
        for stage in stages
        if stage.experts is not None
        for module in config.family.modules(layer, stage)
    }
    others = sum(block_others(config, raw, layer) for layer in range(config.layers))
    return Decoder(config, raw, linears, others + config.hidden, experts)


def _cache(config: Config, known: ModelConfig | None) -> Cache:
    latent = None if known is None else known.latent
    if latent is not None or all(config.get(key) for key in _LATENT_KEYS):
        rank, rope = (latent.rank, latent.rope) if latent else (_whole(config, key) for key in _LATENT_KEYS)
        formula = f"kv_lora_rank {rank} + qk_rope_head_dim {rope}"
        return Cache("MLA", rank + rope, rank + rope, (None,) * _whole(config, "num_hidden_layers"), formula)
    heads = _whole(config, "num_attention_heads")
    kv_heads = _whole(config, next(key for key in _KV_KEYS if config.get(key)))
    if known is not None:
        head_dim, windows = known.head_dim, known.windows
    else:
        size = config.get("head_dim")
        head_dim = size if isinstance(size, int) and size > 0 else _whole(config, "hidden_size") // heads
        windows = _windows(config, _whole(config, "num_hidden_layers"))
    kind = "MHA" if kv_heads == heads else "MQA" if kv_heads == 1 else "GQA"
    return Cache(kind, 2 * kv_heads * head_dim, head_dim, windows, f"2 x {kv_heads} kv heads x {head_dim}")


def _windows(config: Config, layers: int) -> tuple[int | None, ...]:
    """Of a family that is not known: sliding only where config.json says so layer by layer."""
    kinds, width = config.get("layer_types"), config.get("sliding_window")
    if not isinstance(kinds, list) or len(kinds) != layers or not isinstance(width, int):
        return (None,) * layers
    return tuple(width if kind == "sliding_attention" else None for kind in kinds)


def _why_not(kind: str, config: Config) -> str:
    what = "is a mixture of experts" if any(config.get(key) for key in _EXPERT_KEYS) else "is of another family"
    return (
        f"model_type '{kind}' {what}, which quantkit neither quantizes nor runs: only its cache can be planned. "
        f"Supported: {', '.join(sorted(FAMILIES))}"
    )


def _pairs(tokens: int, window: int | None) -> int:
    full = min(tokens, window or tokens)
    return full * (full + 1) // 2 + (tokens - full) * full


def _whole(config: Config, key: str) -> int:
    value = config.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise InputError(f"config.json: '{key}' is {value!r}, but must be a positive whole number")
    return value
