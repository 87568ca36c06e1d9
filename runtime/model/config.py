"""What the decoder must know about a model, read once from config.json and the family."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from quantkit.arch import Config, Family, family_of
from quantkit.arch.sizes import LatentSizes
from quantkit.errors import InputError
from quantkit.stages import Stage

ROLES = ("qkv", "output", "gate_up", "down")  # of the stages of a dense layer
LATENT = (("qkv", "kv_b", "output"), ("qkv", "q_b", "kv_b", "output"))  # of those of latent attention
ROUTED = ("gate_up", "down")  # what a layer with experts has once for every expert
SHARED = ("shared_gate_up", "shared_down")  # that every token runs through beside its experts, where the family has it
_ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_pytorch_tanh"}


@dataclass(frozen=True)
class ModelConfig:
    """Sizes and settings of one decoder."""

    family: Family
    vocab: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int  # 1 in latent attention
    head_dim: int  # in latent attention, of what turns
    latent: LatentSizes | None  # None: heads have keys and values of their own
    max_positions: int
    windows: tuple[int | None, ...]  # of every layer: how many tokens it sees; None: all
    stages: tuple[tuple[Stage, ...], ...]  # of every layer: of attention, then of the MLP, then of `SHARED`
    qk_norm: bool
    activation: str
    clip: tuple[float, float] | None  # limit of gate and up, and the factor inside of the sigmoid
    norm_eps: float
    attention_scale: float
    attention_cap: float | None
    logit_cap: float | None
    embedding_scale: float | None
    tied: bool
    eos: tuple[int, ...]  # tokens that end an answer

    @property
    def layers(self) -> int:
        return len(self.windows)

    @property
    def plus_one(self) -> bool:
        """Whether norms multiply by 1 + weight."""
        return self.family.norm_offset == 1.0

    @property
    def has_experts(self) -> bool:
        return any(stage.experts for stages in self.stages for stage in stages)

    @property
    def token_channels(self) -> int:
        """That one token has between gate_up and down of all MLPs that it runs through, in the layer with most."""
        return max(sum(self._channels(stage) for stage in _entries(stages)) for stages in self.stages)

    @property
    def decoded_weights(self) -> int:
        """Numbers of the largest weight that is decoded at once: gate and up of an MLP, of all experts together."""
        return max(
            2 * self.hidden * self.width(stage) * (1 if stage.experts is None else stage.experts.count)
            for stages in self.stages
            for stage in _entries(stages)
        )

    @property
    def routed_channels(self) -> int:
        """That all experts of a token leave before they are added, in the layer with most; 0 without any."""
        chosen = (stage.experts.per_token for stages in self.stages for stage in stages if stage.experts)
        return self.hidden * max(chosen, default=0)

    def _channels(self, stage: Stage) -> int:
        return self.width(stage) * (1 if stage.experts is None else stage.experts.per_token)

    def width(self, stage: Stage) -> int:
        """Between gate_up and down of a stage's MLP."""
        return stage.width or self.intermediate

    @property
    def attended(self) -> int:
        """What the output projection reads of a token."""
        return self.heads * (self.head_dim if self.latent is None else self.latent.value)

    @property
    def attention_numbers(self) -> int:
        """That attention holds of a token: what its first linear gives, what meets the cache, what comes out."""
        if self.latent is None:
            return (self.heads + 2 * self.kv_heads) * self.head_dim + 2 * self.attended
        in_latents = self.heads * (self.latent.kept + self.latent.rank)
        return sum(self._latent_outputs["qkv"]) + self.heads * self.latent.query + in_latents + self.attended

    @property
    def cache_entry(self) -> tuple[int, int, int]:
        """What a layer keeps of a token: how many of how many heads of how many numbers.

        Keys and values are two; a latent is both.
        """
        return (2, self.kv_heads, self.head_dim) if self.latent is None else (1, 1, self.latent.kept)

    @property
    def kept_numbers(self) -> int:
        """That a layer keeps of a token."""
        return math.prod(self.cache_entry)

    @cached_property
    def _latent_outputs(self) -> dict[str, tuple[int, ...]]:
        if self.latent is None:
            return {}
        queries, keys_values = self.heads * self.latent.query, self.heads * (self.latent.plain + self.latent.value)
        first = self.latent.query_rank or queries
        return {"qkv": (first, self.latent.kept), "q_b": (queries,), "kv_b": (keys_values,)}

    def outputs(self, stage: Stage) -> tuple[int, ...]:
        """Of each linear of a stage, those of all experts included; a fused one has those of all that it joins."""
        queries, keys, width = self.heads * self.head_dim, self.kv_heads * self.head_dim, self.width(stage)
        sizes = {"qkv": (queries, keys, keys), "gate_up": (width, width), "shared_gate_up": (width, width)}
        sizes |= self._latent_outputs
        outputs = sizes.get(stage.role, (self.hidden,))
        once = outputs if len(outputs) == len(stage.names) else (sum(outputs),)
        return once if stage.experts is None else once * stage.experts.count

    def inputs(self, stage: Stage) -> int:
        """That the linears of a stage read."""
        if stage.role == "output":
            return self.attended
        if self.latent is not None and stage.role in ("q_b", "kv_b"):
            return (self.latent.query_rank or self.hidden) if stage.role == "q_b" else self.latent.rank
        return self.width(stage) if stage.role in ("down", "shared_down") else self.hidden


def read_model_config(config: Config, generation: Config | None = None) -> ModelConfig:
    """The settings of a model from config.json; `generation` is generation_config.json, whose end tokens win."""
    family = family_of(config)
    heads = _whole(config, "num_attention_heads")
    layers = _whole(config, "num_hidden_layers")
    head_dim = family.size_of_head(config)
    hidden = _whole(config, "hidden_size")
    latent = family.latent_sizes(config)
    return ModelConfig(
        family=family,
        vocab=_whole(config, "vocab_size"),
        hidden=hidden,
        intermediate=_whole(config, "intermediate_size"),
        heads=heads,
        kv_heads=1 if latent else config.get("num_key_value_heads") or heads,
        head_dim=head_dim,
        latent=latent,
        max_positions=_whole(config, "max_position_embeddings"),
        windows=tuple(family.window(config, layer) for layer in range(layers)),
        stages=tuple(_stages(family, layer, config) for layer in range(layers)),
        qk_norm=family.has_qk_norm(config),
        activation=_activation(config, family),
        clip=_clip(config, family),
        norm_eps=float(config.get("rms_norm_eps", family.norm_eps)),
        attention_scale=_attention_scale(config, family, latent),
        attention_cap=_cap(config, "attn_logit_softcapping", family.attn_logit_softcapping),
        logit_cap=_cap(config, "final_logit_softcapping", family.final_logit_softcapping),
        embedding_scale=hidden**0.5 if family.scaled_embedding else None,
        tied=family.tied(config),
        eos=_end_tokens(config, generation or {}),
    )


def _entries(stages: tuple[Stage, ...]) -> Iterator[Stage]:
    """The first stage of every MLP of a layer."""
    return (stage for stage in stages if stage.role in ("gate_up", "shared_gate_up"))


def _stages(family: Family, layer: int, config: Config) -> tuple[Stage, ...]:
    """Refuses a layer that the decoder cannot run."""
    stages = family.stages(layer, config)
    attention = tuple(stage.role for stage in stages if stage.part.kind == "attention")
    mlp = tuple(stage.role for stage in stages[len(attention) :])
    routed = tuple(stage.role for stage in stages if stage.experts)
    known = attention in (LATENT if family.latent else (ROLES[:2],))
    if not known or (mlp, routed) not in ((ROUTED, ()), (ROUTED, ROUTED), (ROUTED + SHARED, ROUTED)):
        found = ", ".join(f"{stage.role} (experts)" if stage.experts else stage.role for stage in stages)
        raise InputError(
            f"model_type '{family.model_type}' cannot be run: layer {layer} consists of {found}, and the runtime runs "
            f"layers of {', '.join(ROLES)} only, where the last two may be of experts with "
            f"{' and '.join(SHARED)} beside them; use another engine"
        )
    return stages


def _attention_scale(config: Config, family: Family, latent: LatentSizes | None) -> float:
    if latent is not None:
        return float(latent.query**-0.5) * _yarn_scale(config)
    scalar = config.get("query_pre_attn_scalar", family.query_pre_attn_scalar)
    head = family.size_of_head(config)
    return float((scalar or head if family.query_pre_attn_scalar else head) ** -0.5)


def _yarn_scale(config: Config) -> float:
    """What `mscale_all_dim` makes of all scores, where rope only makes the turned numbers larger."""
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    factor, spread = rope.get("factor"), rope.get("mscale_all_dim")
    if rope.get("rope_type", rope.get("type", "default")) == "default" or not spread or not factor or factor <= 1:
        return 1.0
    return float((0.1 * spread * math.log(factor) + 1.0) ** 2)


def _whole(config: Config, key: str) -> int:
    value = config.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise InputError(f"config.json: '{key}' is {value!r}, but must be a positive whole number")
    return value


def _activation(config: Config, family: Family) -> str:
    named = config.get(family.activation_key) or config.get("hidden_act") or family.activation
    if named not in _ACTIVATIONS:
        raise InputError(f"config.json: activation '{named}' is not supported; supported: {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[named]


def _clip(config: Config, family: Family) -> tuple[float, float] | None:
    if family.clipped is None:
        return None
    keys = zip(("swiglu_limit", "swiglu_alpha"), family.clipped, strict=True)
    limit, alpha = (float(config.get(key, default)) for key, default in keys)
    return limit, alpha


def _cap(config: Config, key: str, default: float | None) -> float | None:
    """A soft cap that the family does not know is never applied."""
    if default is None:
        return None
    value = config.get(key, default)
    return None if value is None else float(value)


def _end_tokens(config: Config, generation: Config) -> tuple[int, ...]:
    given = generation.get("eos_token_id", config.get("eos_token_id"))
    if given is None:
        return ()
    return tuple(given) if isinstance(given, list | tuple) else (int(given),)
