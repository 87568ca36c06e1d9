"""What the decoder must know about a model, read once from config.json and the family."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from quantkit.arch import Config, Family, family_of
from quantkit.errors import InputError
from quantkit.stages import Stage

ROLES = ("qkv", "output", "gate_up", "down")  # of the stages of a dense layer
ROUTED = ("gate_up", "down")  # of those, the ones that a layer with experts has once for every expert
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
    kv_heads: int
    head_dim: int
    max_positions: int
    windows: tuple[int | None, ...]  # of every layer: how many tokens it sees; None: all
    stages: tuple[tuple[Stage, ...], ...]  # of every layer, in the order of `ROLES`, then of `SHARED`
    activation: str
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

    @property
    def expert_modules(self) -> tuple[str, ...]:
        """Linears of experts by full module names."""
        return tuple(
            module
            for layer, stages in enumerate(self.stages)
            for stage in stages
            if stage.experts
            for module in self.family.modules(layer, stage)
        )

    def _channels(self, stage: Stage) -> int:
        return self.width(stage) * (1 if stage.experts is None else stage.experts.per_token)

    def width(self, stage: Stage) -> int:
        """Between gate_up and down of a stage's MLP."""
        return stage.width or self.intermediate

    def outputs(self, stage: Stage) -> tuple[int, ...]:
        """Of each linear of a stage, those of all experts included; a fused one has those of all that it joins."""
        queries, keys, width = self.heads * self.head_dim, self.kv_heads * self.head_dim, self.width(stage)
        sizes = {"qkv": (queries, keys, keys), "gate_up": (width, width), "shared_gate_up": (width, width)}
        outputs = sizes.get(stage.role, (self.hidden,))
        once = outputs if len(outputs) == len(stage.names) else (sum(outputs),)
        return once if stage.experts is None else once * stage.experts.count

    def inputs(self, stage: Stage) -> int:
        """That the linears of a stage read."""
        if stage.role == "output":
            return self.heads * self.head_dim
        return self.width(stage) if stage.role in ("down", "shared_down") else self.hidden


def read_model_config(config: Config, generation: Config | None = None) -> ModelConfig:
    """The settings of a model from config.json; `generation` is generation_config.json, whose end tokens win."""
    family = family_of(config)
    heads = _whole(config, "num_attention_heads")
    layers = _whole(config, "num_hidden_layers")
    head_dim = family.size_of_head(config)
    hidden = _whole(config, "hidden_size")
    scalar = config.get("query_pre_attn_scalar", family.query_pre_attn_scalar) or head_dim
    return ModelConfig(
        family=family,
        vocab=_whole(config, "vocab_size"),
        hidden=hidden,
        intermediate=_whole(config, "intermediate_size"),
        heads=heads,
        kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=head_dim,
        max_positions=_whole(config, "max_position_embeddings"),
        windows=tuple(family.window(config, layer) for layer in range(layers)),
        stages=tuple(_stages(family, layer, config) for layer in range(layers)),
        activation=_activation(config, family),
        norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        attention_scale=(scalar if family.query_pre_attn_scalar else head_dim) ** -0.5,
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
    roles = tuple(stage.role for stage in stages)
    routed = tuple(stage.role for stage in stages if stage.experts)
    if (roles, routed) not in ((ROLES, ()), (ROLES, ROUTED), (ROLES + SHARED, ROUTED)):
        found = ", ".join(f"{stage.role} (experts)" if stage.experts else stage.role for stage in stages)
        raise InputError(
            f"model_type '{family.model_type}' cannot be run: layer {layer} consists of {found}, and the runtime runs "
            f"layers of {', '.join(ROLES)} only, where the last two may be of experts with {' and '.join(SHARED)} "
            "beside them; use another engine"
        )
    return stages


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
